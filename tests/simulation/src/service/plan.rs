//! What a seed decides before a service runs.

use std::time::Duration;

use kvhoist::{Config, DiskPath, Eviction, WritePolicy};
use kvhoist_service::ServerConfig;

use crate::{
    plan::pick,
    sim::{FaultRates, Rng},
    universe::Universe,
};

/// Virtual time in which everything must have ended.
pub const PATIENCE: Duration = Duration::from_secs(3_600);

/// Blocks of one load layer by layer, at most.
const LAYERED_BLOCKS_MAX: u32 = 8;

/// Users of the node. No process of a test has one of these numbers.
const UIDS: [u32; 2] = [0x7000_0001, 0x7000_0002];

/// A space, and all blocks that its clients may store.
pub struct Space {
    pub uid: u32,
    pub namespace: &'static str,
    pub block_bytes: usize,
    pub shared: bool,
    pub capacity_bytes: u64,
    /// Host memory that its clients ask for.
    pub host_bytes: u64,
    /// Its clients may lend memory of a simulated device.
    pub device: bool,
    pub universe: Universe,
}

/// How the bytes of a connection arrive.
#[derive(Debug, Clone, Copy)]
pub struct Delivery {
    /// Bytes that are sent and not received yet, at most.
    pub room: usize,
    /// The chance that a part of what was sent arrives, and not all of it.
    pub pieces: f64,
    /// The chance that it arrives some milliseconds later.
    pub late: f64,
    /// The chance that nothing arrives for a long time.
    pub freeze: f64,
    pub freeze_ms_max: u64,
}

/// Everything that a seed decides beforehand.
pub struct Plan {
    pub spaces: Vec<Space>,
    pub config: ServerConfig,
    /// Limits are so small that calls run into them.
    pub is_tight: bool,
    pub rates: FaultRates,
    pub disk_latency_max: Duration,
    pub delivery: Delivery,
    pub clients: u64,
    pub hostile: u64,
    pub calls_each: u64,
    pub callers_max: u64,
    /// Ends of the service before the last one.
    pub ends: u64,
    pub deadline: Duration,
    /// How long clients wait for memory after it.
    pub give_up: Option<Duration>,
    /// Clients load layer by layer, too, and pin blocks.
    pub by_layer: bool,
    /// The chance that a copy to or from a device fails.
    pub copy_failure: f64,
    /// The chance that a client's memory cannot be mapped.
    pub map_refused: f64,
    /// The chance that a thread cannot be started, by the service or a client.
    pub thread_refused: f64,
    /// The chance that a call is dropped.
    pub cancel: f64,
    /// The chance that a client dies after a call.
    pub die: f64,
    pub pause: f64,
}

impl std::fmt::Debug for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (at, space) in self.spaces.iter().enumerate() {
            let Space { uid, namespace, block_bytes, shared, capacity_bytes, host_bytes, device, universe } = space;
            let blocks = universe.len();
            writeln!(
                f,
                "space {at}: {namespace} of user {uid:#x} (shared: {shared}, device: {device}), {blocks} blocks of \
                 {block_bytes}, disk {capacity_bytes}, host {host_bytes}"
            )?;
        }
        writeln!(f, "{:?}\n{:?}\n{:?}", self.config, self.rates, self.delivery)?;
        write!(
            f,
            "{} clients, {} hostile ones, {} calls each of up to {} callers, {} ends of the service, deadline {:?}, \
             give up {:?}, mappings refused {}, threads refused {}, copies failed {}",
            self.clients,
            self.hostile,
            self.calls_each,
            self.callers_max,
            self.ends,
            self.deadline,
            self.give_up,
            self.map_refused,
            self.thread_refused,
            self.copy_failure
        )
    }
}

impl Plan {
    pub fn draw(rng: &mut Rng, by_layer: bool) -> Self {
        let with_faults = rng.chance(0.4);
        let paths = rng.between(1, 2);
        let mut spaces = spaces(rng, paths);
        if by_layer {
            spaces.iter_mut().for_each(|space| give_device(rng, space));
        }
        let is_tight = rng.chance(0.25);
        let ends = pick(rng, &[0, 1, 1, 2, 3]);
        let quick = rng.chance(0.2);
        let mut config = config(rng, &spaces, paths, is_tight);
        if by_layer {
            // A load layer by layer is one call of the cache.
            config.cache.limits.movements_max = config.cache.limits.movements_max.max(LAYERED_BLOCKS_MAX);
        }
        Plan {
            config,
            is_tight,
            rates: if with_faults { rates(rng) } else { FaultRates::default() },
            disk_latency_max: Duration::from_millis(pick(rng, &[0, 1, 3, 20])),
            delivery: delivery(rng),
            // The only client of a space has blocks read directly into its memory.
            clients: pick(rng, &[1, 1, 2, 3, 4, 5]),
            hostile: pick(rng, &[0, 0, 1, 2]),
            calls_each: rng.between(3, 14),
            callers_max: rng.between(1, 3),
            ends,
            deadline: Duration::from_millis(if quick { pick(rng, &[50, 200, 1000]) } else { 60_000 }),
            cancel: pick(rng, &[0.0, 0.05, 0.25]),
            die: pick(rng, &[0.0, 0.02, 0.1]),
            pause: pick(rng, &[0.0, 0.1, 0.5]),
            copy_failure: if by_layer && with_faults { pick(rng, &[0.0, 0.05]) } else { 0.0 },
            by_layer,
            give_up: pick(rng, &[None, Some(20), Some(500), Some(60_000)]).map(Duration::from_millis),
            map_refused: pick(rng, &[0.0, 0.0, 0.1, 0.5]),
            thread_refused: pick(rng, &[0.0, 0.0, 0.0, 0.2]),
            spaces,
        }
    }

    pub fn by_value(&self) -> bool {
        self.config.cache.disk.write_policy == WritePolicy::ByValue
    }

    pub fn has_faults(&self) -> bool {
        let FaultRates { read_error, write_error, sync_error, short, no_space, .. } = self.rates;
        read_error + write_error + sync_error + short + no_space > 0.0
    }

    pub fn may_time_out(&self) -> bool {
        self.deadline < Duration::from_secs(60)
            || self.rates.stall + self.delivery.freeze > 0.0
            || self.config.cache.limits.deadline_ms < 60_000
    }

    /// A connection may end although its client goes on.
    pub fn may_lose_connections(&self) -> bool {
        self.ends > 0 || self.delivery.freeze > 0.0 || self.deadline < Duration::from_secs(60)
    }

    /// The host memory of a space may be another's when it is opened.
    pub fn may_lack_memory(&self) -> bool {
        self.config.move_host
    }
}

fn spaces(rng: &mut Rng, paths: u64) -> Vec<Space> {
    let count = rng.between(1, 3);
    let mut spaces: Vec<Space> = Vec::new();
    for n in 0..count as usize {
        let block_bytes = pick(rng, &[4096, 4096, 8192, 100, 5000]);
        let slots = rng.between(4, 20) * paths;
        // Half of them have room for all blocks.
        let blocks = if rng.chance(0.6) { rng.between(2, slots) } else { rng.between(2, 2 * slots) };
        let mut space = Space {
            uid: pick(rng, &UIDS),
            namespace: ["model", "other", "third"][n],
            block_bytes,
            shared: rng.chance(0.2),
            capacity_bytes: DiskPath::file_bytes(slots / paths, block_bytes as u64) * paths,
            host_bytes: block_bytes.next_multiple_of(4096) as u64 * rng.between(1, 8),
            device: false,
            universe: Universe::new(rng, blocks as usize, block_bytes),
        };
        // A space of another user, with the same name and the same keys, and other bytes.
        if let Some(first) = spaces.first().filter(|first| !first.shared && n == 1 && rng.chance(0.6)) {
            space = Space {
                uid: UIDS[usize::from(first.uid == UIDS[0])],
                namespace: first.namespace,
                block_bytes: first.block_bytes,
                shared: false,
                capacity_bytes: first.capacity_bytes,
                host_bytes: first.host_bytes,
                device: false,
                universe: first.universe.twin(rng),
            };
        }
        spaces.push(space);
    }
    spaces
}

/// Most spaces get a device, and host memory of which some blocks may be pinned.
fn give_device(rng: &mut Rng, space: &mut Space) {
    space.device = rng.chance(0.7);
    space.host_bytes = space.block_bytes.next_multiple_of(4096) as u64 * rng.between(4, 16);
}

fn config(rng: &mut Rng, spaces: &[Space], paths: u64, is_tight: bool) -> ServerConfig {
    let slot_bytes = spaces.iter().map(|space| space.block_bytes.next_multiple_of(4096)).max().unwrap_or(4096) as u64;
    let policy = pick(rng, &[WritePolicy::WriteThrough, WritePolicy::WriteThrough, WritePolicy::ByValue]);
    let cache = Config::default()
        .bypass_host(rng.chance(0.6))
        .write_policy(policy)
        .eviction_policy(pick(rng, &[Eviction::Lru, Eviction::Rb, Eviction::RbRefuse]))
        .read_bytes_in_flight_max(slot_bytes * pick(rng, &[1, 2, 8, 1024]))
        .write_bytes_in_flight_max(slot_bytes * pick(rng, &[1, 2, 8, 1024]))
        .disk_failures_max(pick(rng, &[2, 16]))
        .deadline_ms(pick(rng, &[100, 1000, 60_000, 60_000]));
    let mut config = ServerConfig::new("simulated");
    config.paths = (0..paths).map(|path| format!("drive{path}").into()).collect();
    config.capacity_bytes = spaces.iter().map(|space| space.capacity_bytes).sum::<u64>() + 4096;
    config.host_bytes = spaces.iter().map(|space| space.host_bytes).sum::<u64>() + slot_bytes * rng.below(8);
    config.move_host = rng.chance(0.5);
    config.cache = cache;
    config.bytes_in_flight_max = slot_bytes * pick(rng, &[1, 3, 1024]);
    config.stall_ms = pick(rng, &[300, 10_000]);
    if is_tight {
        config.requests_max = pick(rng, &[1, 2, 4]);
        config.connections_max = pick(rng, &[2, 4, 1024]);
        config.cache = config.cache.movements_max(pick(rng, &[1, 4, 64])).waiters_max(pick(rng, &[1, 4, 64]));
    }
    config
}

fn rates(rng: &mut Rng) -> FaultRates {
    let mut rate = || pick(rng, &[0.0, 0.0, 0.003, 0.02, 0.1]);
    FaultRates {
        read_error: rate(),
        write_error: rate(),
        sync_error: rate(),
        short: rate(),
        bit_flip: rate(),
        no_space: rate(),
        stall: rate(),
        ..FaultRates::default()
    }
}

fn delivery(rng: &mut Rng) -> Delivery {
    Delivery {
        room: pick(rng, &[40, 300, 4096, 200_000]),
        pieces: pick(rng, &[0.0, 0.3, 0.8]),
        late: pick(rng, &[0.0, 0.1, 0.5]),
        freeze: pick(rng, &[0.0, 0.0, 0.002, 0.02]),
        freeze_ms_max: pick(rng, &[500, 12_000]),
    }
}
