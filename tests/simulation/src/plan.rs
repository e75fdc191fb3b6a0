//! What a seed decides before anything runs.

use std::{sync::Arc, time::Duration};

use crate::sim::{FaultRates, Rng, SimRemote};
use kvhoist::{Config, DiskPath, Eviction, Layout, WritePolicy, internals::io::IO_ALIGN};

pub use crate::call::Call;
use crate::{
    trial::{MEMORY_SEEDS, PROMPT_SEEDS, Refusal, TRIAL_SEEDS, Trial},
    universe::Universe,
};

/// How much goes wrong in a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Nothing: restarts are orderly.
    Calm,
    /// Processes are killed and power is cut.
    Crashes,
    /// Operations fail too, in ways that the cache is told of and that harm nothing stored.
    Errors,
    /// Disks also lie: bits flip, writes are lost or go astray, reads fail.
    Lies,
}

/// Chances of each call; of the sum of all.
#[derive(Debug, Clone)]
pub struct Habits {
    pub weights: [u64; Call::COUNT],
    /// A future is dropped before it has ended.
    pub cancel: f64,
    /// A lease is kept while other calls are made.
    pub keep: f64,
    /// A caller pauses between calls.
    pub pause: f64,
    /// A caller gives a hint before a call.
    pub hint: f64,
    /// A caller makes one of [`Call::EXTRA`] before a call.
    pub extra: f64,
}

/// Everything that a seed decides beforehand.
pub struct Plan {
    pub level: Level,
    pub config: Config,
    /// Loads go layer by layer.
    pub layered: bool,
    /// What the disks ask of memory.
    pub memory_align_bytes: usize,
    /// Bytes into a page at which the callers' memory begins.
    pub memory_shift: usize,
    pub universe: Universe,
    pub rates: FaultRates,
    pub copy_failure: f64,
    pub disk_latency_max: Duration,
    pub copy_latency_max: Duration,
    pub lives: u32,
    pub callers: u64,
    pub calls_each: u64,
    pub habits: Habits,
    pub trial: Option<Trial>,
    /// The store beyond the node.
    pub remote: Option<Arc<SimRemote>>,
    /// What the disk refuses, of its own accord.
    pub refusal: Option<Refusal>,
    /// Two caches open the store at the same time.
    pub second_opener: bool,
    /// The cache is closed twice.
    pub second_close: bool,
    /// A life that is cut off ends when a removal has been answered.
    pub strikes: bool,
    /// The chance that the kernel refuses to pin a table of buffers, and what it pins at most.
    pub pin_refusals: f64,
    pub pinned_bytes_max: u64,
    /// Another cache lives in the same process.
    pub stranger: bool,
    /// Transfers that a worker has in flight at most, where the run decides it.
    pub transfers_max: Option<usize>,
    /// For what is decided on the way.
    pub rng: Rng,
}

/// Seeds from here on are runs with [`Config::bypass_host`].
pub const STRAIGHT_SEEDS: u64 = 1_000_000;

/// Seeds from here on are runs whose loads go layer by layer.
pub const LAYERED_SEEDS: u64 = 2_000_000;

impl Plan {
    pub fn new(seed: u64) -> Self {
        Plan::draw(seed, Rng::new(seed))
    }

    /// The plan of a fuzzer's input: the first bytes choose the kind of run and a seed, the others make its choices.
    /// The run is short, because a fuzzer makes many.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        const KINDS: [u64; 8] = [0, 0, 0, STRAIGHT_SEEDS, LAYERED_SEEDS, TRIAL_SEEDS, PROMPT_SEEDS, MEMORY_SEEDS];
        let [kind, seed @ ..] = *bytes.first_chunk::<3>().unwrap_or(&[0; 3]);
        let seed = KINDS[usize::from(kind) % KINDS.len()] + u64::from(u16::from_le_bytes(seed));
        let mut plan = Plan::draw(seed, Rng::with_tape(seed, bytes.get(3..).unwrap_or_default().to_vec()));
        (plan.lives, plan.calls_each) = (plan.lives.min(2), plan.calls_each.min(12));
        plan
    }

    fn draw(seed: u64, mut rng: Rng) -> Self {
        let level = pick(&mut rng, &[Level::Calm, Level::Crashes, Level::Errors, Level::Errors, Level::Lies]);
        let (rates, copy_failure) = rates(&mut rng, level);
        let straight = (STRAIGHT_SEEDS..LAYERED_SEEDS).contains(&seed);
        // By a bit of its own, so that older seeds draw what they drew.
        let eviction_policy =
            pick(&mut Rng::new(seed ^ 0xe71c_0000_0000_0000), &[Eviction::Lru, Eviction::Rb, Eviction::RbRefuse]);
        let config = config(&mut rng, level).bypass_host(straight).eviction_policy(eviction_policy);
        let config = if Trial::of(seed).is_none() { by_value(seed, config) } else { config };
        let (memory_align_bytes, memory_shift) = if straight { alignment(seed) } else { (IO_ALIGN, 0) };
        let slots = config.disk_slots().max(u64::from(config.host_slots()));
        // Half of the runs have room for all.
        let blocks = if rng.chance(0.5) { rng.between(2, slots.max(2)) } else { rng.between(2, 2 * slots + 8) };
        let universe = rng.seeded(|rng| Universe::new(rng, blocks.min(80) as usize, config.block_bytes));
        let milliseconds = |rng: &mut Rng, of: &[u64]| Duration::from_millis(pick(rng, of));
        let trial = Trial::of(seed);
        let mut plan = Plan {
            level,
            rates,
            copy_failure,
            disk_latency_max: milliseconds(&mut rng, &[0, 1, 3, 20]),
            copy_latency_max: milliseconds(&mut rng, &[0, 1, 5]),
            lives: rng.between(1, 3) as u32,
            callers: rng.between(1, 6),
            calls_each: rng.between(5, 50),
            habits: habits(&mut rng, &config),
            config,
            layered: (LAYERED_SEEDS..TRIAL_SEEDS).contains(&seed),
            memory_align_bytes,
            memory_shift,
            universe,
            trial,
            remote: None,
            refusal: None,
            second_opener: false,
            second_close: false,
            strikes: false,
            pin_refusals: 0.0,
            pinned_bytes_max: u64::MAX,
            stranger: false,
            transfers_max: None,
            rng,
        };
        // By a draw of its own, so that older seeds make the calls that they made.
        plan.habits.hint = pick(&mut Rng::new(seed ^ 0x417_0000_0000_0000), &[0.0, 0.0, 0.02, 0.1, 0.4]);
        plan.habits.extra = pick(&mut Rng::new(seed ^ 0xe0c4_0000_0000_0000), &[0.0, 0.0, 0.05, 0.2, 0.5]);
        if let Some(trial) = trial {
            let mut rng = plan.rng.reseeded(seed ^ 0x7214_1000_0000_0000);
            (plan.layered, plan.config.host.bypass) = (rng.chance(0.2), rng.chance(0.3));
            if plan.config.host.bypass {
                (plan.memory_align_bytes, plan.memory_shift) = alignment(seed);
            }
            trial.bend(&mut plan, &mut rng);
            if plan.config.disk.write_policy == WritePolicy::WriteBack {
                plan.config = by_value(seed, plan.config).write_budget(None);
            }
        }
        plan
    }

    /// True where callers may run into a limit.
    pub fn has_tight_limits(&self) -> bool {
        let config = &self.config;
        config.limits.movements_max.min(config.limits.waiters_max).min(config.limits.background_max) < 1024
    }

    /// True where a wait may end at its deadline although nothing is stuck for good.
    pub fn may_time_out(&self) -> bool {
        self.rates.stall > 0.0 || self.habits.keep > 0.0 || self.config.limits.deadline_ms < 60_000
    }

    /// True where what `store` has acknowledged must still be there as long as nothing is evicted from disk.
    pub fn store_keeps(&self) -> bool {
        !self.config.disk.paths.is_empty() && self.config.disk.write_policy != WritePolicy::WriteThroughSelective
    }
}

pub fn pick<T: Copy>(rng: &mut Rng, of: &[T]) -> T {
    of[rng.below(of.len() as u64) as usize]
}

/// A third of the runs write by value, half of them within a budget. By draws of their own: all else of a seed stays as
/// it is.
fn by_value(seed: u64, mut config: Config) -> Config {
    let mut rng = Rng::new(seed ^ 0xb1d6_0000_0000_0000);
    if rng.chance(0.33) {
        let least = (config.slot_bytes() + IO_ALIGN) as u64 * 240;
        config.disk.write_policy = WritePolicy::ByValue;
        // A run takes milliseconds to seconds: nothing, one block a second, as much as a slow disk, or a quick one.
        config.disk.write_budget =
            pick(&mut rng, &[None, None, None, Some(1), Some(360), Some(1 << 16), Some(1 << 24)])
                .map(|times: u64| times * least);
    }
    config
}

/// What the disks ask of memory, and where the callers' begins. By draws of their own: all else of a seed stays as it
/// is.
fn alignment(seed: u64) -> (usize, usize) {
    let mut rng = Rng::new(seed ^ 0xa119_0000_0000_0000);
    (pick(&mut rng, &[1, 4, 64, 512, IO_ALIGN]), pick(&mut rng, &[0, 0, 4, 64, 512, 1]))
}

fn rates(rng: &mut Rng, level: Level) -> (FaultRates, f64) {
    // Seldom, sometimes, often; or never.
    let mut rate = |from: Level| {
        let rate = pick(rng, &[0.0, 0.0, 0.003, 0.02, 0.1]);
        if level >= from { rate } else { 0.0 }
    };
    let mut rates = FaultRates {
        read_error: rate(Level::Lies),
        write_error: rate(Level::Errors),
        sync_error: rate(Level::Errors),
        short: rate(Level::Errors),
        bit_flip: rate(Level::Lies),
        lost_write: rate(Level::Lies),
        no_space: rate(Level::Errors),
        misdirected_write: rate(Level::Lies),
        stall: rate(Level::Errors),
    };
    let copy_failure = rate(Level::Errors);
    if level >= Level::Errors && rng.chance(0.05) {
        // A disk that is no good at all.
        match rng.below(3) {
            0 => rates.write_error = 1.0,
            1 if level == Level::Lies => rates.read_error = 1.0,
            _ => rates.sync_error = 1.0,
        }
    }
    (rates, copy_failure)
}

fn config(rng: &mut Rng, level: Level) -> Config {
    let block_bytes: usize = pick(rng, &[4096, 4096, 4096, 8192, 16384, 100, 4095, 5000]);
    let slot_bytes = block_bytes.next_multiple_of(4096) as u64;
    let device_blocks = if rng.chance(0.5) { rng.between(1, 4) as u32 } else { 0 };
    let split = rng.between(1, block_bytes as u64 - 1) as usize;
    let layout = rng.chance(0.5).then(|| Layout::new(vec![split, block_bytes - split]).expect("two segments"));
    let mut disks: Vec<DiskPath> =
        (0..rng.between(1, 3)).map(|n| DiskPath::with_blocks(format!("disk{n}"), rng.between(2, 24) as u32)).collect();
    if rng.chance(0.05) {
        disks.clear();
    }
    let policies = [WritePolicy::WriteThrough, WritePolicy::WriteBack, WritePolicy::WriteThroughSelective];
    let tight = rng.chance(0.4);
    let mut limit = |small: &[u32]| if tight { pick(rng, small) } else { 65_536 };
    let (movements_max, waiters_max, background_max) =
        (limit(&[1, 2, 4, 16, 65_536]), limit(&[1, 2, 8, 65_536]), limit(&[1, 4, 65_536]));
    let low_watermark = pick(rng, &[0.0, 0.1, 0.3, 1.0]);
    let config = Config::default()
        .block_bytes(block_bytes)
        .host_blocks(pick(rng, &[1, 2, 3, 4, 6, 8, 16]))
        .device_blocks(device_blocks)
        .device_layout(layout.filter(|_| device_blocks > 0))
        .disks(disks)
        .write_policy(pick(rng, &policies))
        .selective_hits(pick(rng, &[1, 2, 3]))
        .read_bytes_in_flight_max(slot_bytes * pick(rng, &[1, 2, 8, 1024]))
        .write_bytes_in_flight_max(slot_bytes * pick(rng, &[1, 2, 8, 1024]))
        .movements_max(movements_max)
        .waiters_max(waiters_max)
        .background_max(background_max)
        .low_watermark(low_watermark)
        .high_watermark(if rng.chance(0.5) { low_watermark } else { 1.0 })
        .quarantine_max(pick(rng, &[0, 2, 1024]))
        .disk_failures_max(pick(rng, &[1, 2, 4, 16]))
        .deadline_ms(if level >= Level::Errors { pick(rng, &[25, 100, 1000, 60_000]) } else { 60_000 });
    config.validate().expect("every choice is within its limits");
    config
}

fn habits(rng: &mut Rng, config: &Config) -> Habits {
    let mut weights = [0; Call::COUNT];
    weights[..Call::COMMON].fill_with(|| pick(rng, &[0, 1, 3, 10]));
    // No run without stores and fetches.
    weights[Call::Store as usize] += 3;
    weights[Call::Fetch as usize] += 3;
    weights[Call::Remove as usize] = weights[Call::Remove as usize].min(pick(rng, &[0, 1, 3]));
    weights[Call::Sync as usize] = weights[Call::Sync as usize].min(pick(rng, &[0, 1, 2]));
    weights[Call::Stats as usize] = weights[Call::Stats as usize].min(1);
    if config.device_slots() == 0 {
        weights[Call::FetchToDevice as usize] = weights[Call::FetchToDevice as usize].min(1);
    }
    Habits {
        weights,
        cancel: pick(rng, &[0.0, 0.05, 0.3]),
        keep: pick(rng, &[0.0, 0.2, 0.6]),
        pause: pick(rng, &[0.0, 0.1, 0.5]),
        hint: 0.0,
        extra: 0.0,
    }
}
