//! Situations that calls drawn one by one reach too seldom. Seeds from [`TRIAL_SEEDS`] on are runs of one of them: a
//! run as any other seed makes it, bent by draws of its own. Those from [`PROMPT_SEEDS`] on are [`Trial::PromptReads`],
//! those from [`MEMORY_SEEDS`] on [`Trial::Memory`], those from
//! [`REMOTE_SEEDS`] on [`Trial::Remote`].

use std::time::Duration;

use crate::sim::{Fault, FaultRates, RemoteRates, Rng, Sim, SimRemote};
use kvhoist::{Capacity, DiskPath, RemotePolicy, WritePolicy, internals::io::OpKind};

use crate::{
    plan::{Call, Level, Plan, pick},
    universe::Universe,
};

/// Seeds from here on are runs of a [`Trial`].
pub const TRIAL_SEEDS: u64 = 3_000_000;

/// Seeds from here on are runs of [`Trial::PromptReads`].
pub const PROMPT_SEEDS: u64 = 4_000_000;

/// Seeds from here on are runs of [`Trial::Memory`].
pub const MEMORY_SEEDS: u64 = 5_000_000;

/// Seeds from here on are runs of [`Trial::Remote`].
pub const REMOTE_SEEDS: u64 = 5_500_000;

const EIO: i32 = 5;
const ENOSPC: i32 = 28;

/// Leases that a walk holds at most, besides the one that it waits for.
pub const WALK_LEASES_MAX: u64 = 2;

/// What a run tries in particular.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trial {
    /// Chains are fetched block by block, each under the lease of the one before. There are more slots than leases, and
    /// so nobody waits until a deadline.
    Walks,
    /// Fetches join prefetches while many writes wait. There is a slot for every block, and so a fetch takes no longer
    /// than its read.
    PromptReads,
    /// The disk refuses single writes and flushes, or every write from some time on. What a sync or a close confirms is
    /// there all the same.
    Refusals,
    /// Stores are dropped, and a sync or a power cut follows.
    DroppedStores,
    /// The disk has few slots, and a life ends at the instant in which a removal is answered.
    Removals,
    /// Callers have several regions, which they register, have pinned, load into and take back; the kernel refuses to
    /// pin some of them, or the arena. There is another cache, whose leases and regions are refused.
    Memory,
    /// There is a store beyond the node, which outlives the lives and lies. What it brings is right or missing, and the
    /// node keeps its promises.
    Remote,
}

/// What the disk refuses in a life of [`Trial::Refusals`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// A write now and then.
    Writes,
    /// A flush now and then; what it was to flush is lost, and the next flush says nothing of it.
    Syncs,
    /// Every write from some time on.
    ReadOnly,
}

impl Refusal {
    /// Whether an operation of this name may fail.
    pub fn explains(self, op: &str) -> bool {
        op.split(' ').next() == Some(if self == Refusal::Syncs { "sync" } else { "write" })
    }

    /// Lets the disk refuse until it is aborted.
    pub async fn work(self, disk: Sim, mut rng: Rng) {
        loop {
            tokio::time::sleep(Duration::from_millis(rng.between(1, 60))).await;
            match self {
                Refusal::Writes => {
                    let errno = pick(&mut rng, &[EIO, ENOSPC]);
                    disk.script_next(OpKind::Write, Fault::Error(errno));
                }
                Refusal::Syncs => disk.script_next(OpKind::Sync, Fault::Error(EIO)),
                Refusal::ReadOnly if rng.chance(0.2) => {
                    return disk.set_rates(FaultRates { write_error: 1.0, ..FaultRates::default() });
                }
                Refusal::ReadOnly => {}
            }
        }
    }
}

impl Trial {
    pub fn of(seed: u64) -> Option<Self> {
        const ALL: [Trial; 4] = [Trial::Walks, Trial::Refusals, Trial::DroppedStores, Trial::Removals];
        match seed {
            REMOTE_SEEDS.. => Some(Trial::Remote),
            MEMORY_SEEDS.. => Some(Trial::Memory),
            PROMPT_SEEDS.. => Some(Trial::PromptReads),
            TRIAL_SEEDS.. => Some(ALL[(seed % ALL.len() as u64) as usize]),
            _ => None,
        }
    }

    /// Makes the plan one of this trial.
    pub fn bend(self, plan: &mut Plan, rng: &mut Rng) {
        sober(plan);
        match self {
            Trial::Walks => walks(plan, rng),
            Trial::PromptReads => prompt_reads(plan, rng),
            Trial::Refusals => refusals(plan, rng),
            Trial::DroppedStores => dropped_stores(plan, rng),
            Trial::Removals => removals(plan, rng),
            Trial::Memory => memory(plan, rng),
            Trial::Remote => remote(plan, rng),
        }
        plan.config.validate().expect("every choice is within its limits");
        plan.second_opener = rng.chance(0.4);
        plan.second_close = rng.chance(0.4);
    }
}

/// No faults but those of the trial, no limits, and time enough: what goes wrong then has no excuse.
fn sober(plan: &mut Plan) {
    plan.level = plan.level.min(Level::Crashes);
    (plan.rates, plan.copy_failure) = (FaultRates::default(), 0.0);
    (plan.habits.keep, plan.habits.extra) = (0.0, 0.0);
    let config = &mut plan.config;
    (config.limits.movements_max, config.limits.waiters_max, config.limits.background_max) = (65_536, 65_536, 65_536);
    config.limits.deadline_ms = 60_000;
}

/// Room for every block on the first disk.
fn roomy(plan: &mut Plan) {
    if plan.config.disk.paths.is_empty() {
        plan.config.disk.paths.push(DiskPath::with_blocks("disk0", 2));
    }
    plan.config.disk.paths[0].capacity = Capacity::Blocks(plan.universe.len() as u32 + 4);
}

fn weigh(plan: &mut Plan, of: &[(Call, u64)]) {
    for &(call, weight) in of {
        plan.habits.weights[call as usize] = weight;
    }
}

fn walks(plan: &mut Plan, rng: &mut Rng) {
    plan.callers = rng.between(1, 3);
    plan.calls_each = rng.between(3, 12);
    // Each caller has its leases and one slot more, for what it waits for.
    let slots = plan.callers * (WALK_LEASES_MAX + 1) + rng.between(0, 3);
    plan.config.host.capacity = Capacity::Blocks(slots as u32);
    let blocks = rng.between(slots, 5 * slots).min(60) as usize;
    plan.universe = Universe::of_long_chains(rng, blocks, plan.config.block_bytes);
    weigh(plan, &[(Call::Walk, 30), (Call::Remove, 1), (Call::Touch, 2), (Call::FetchMany, 3), (Call::Compute, 5)]);
}

fn prompt_reads(plan: &mut Plan, rng: &mut Rng) {
    // Lives after the first begin with an empty host.
    (plan.level, plan.lives) = (Level::Calm, 3);
    roomy(plan);
    let slot_bytes = plan.config.slot_bytes() as u64;
    plan.config.limits.read_bytes_in_flight_max = slot_bytes * 1024;
    plan.config.limits.write_bytes_in_flight_max = slot_bytes;
    plan.config.host.capacity = Capacity::Blocks(4 * plan.universe.len() as u32 + 32);
    plan.disk_latency_max = Duration::from_millis(20);
    plan.callers = rng.between(4, 6);
    weigh(plan, &[(Call::Hurry, 20), (Call::Store, 20), (Call::StoreFrom, 20), (Call::Remove, 10), (Call::Sync, 1)]);
    if rng.chance(0.5) {
        queued_reads(plan, rng);
    }
}

/// The workers have few transfers in flight: what is announced and what is written waits in their queue, and no awaited
/// read waits for it.
fn queued_reads(plan: &mut Plan, rng: &mut Rng) {
    plan.transfers_max = Some(pick(rng, &[1, 2]));
    plan.universe = Universe::new(rng, 72, plan.config.block_bytes);
    roomy(plan);
    plan.config.limits.write_bytes_in_flight_max = plan.config.slot_bytes() as u64 * 1024;
    plan.config.host.capacity = Capacity::Blocks(4 * plan.universe.len() as u32 + 32);
    // A block that is removed is read again, and a load waits for several reads.
    weigh(plan, &[(Call::Remove, 0), (Call::Load, 0), (Call::Stats, 0)]);
}

fn refusals(plan: &mut Plan, rng: &mut Rng) {
    roomy(plan);
    plan.config.disk.write_policy =
        pick(rng, &[WritePolicy::WriteBack, WritePolicy::WriteBack, WritePolicy::WriteThrough]);
    plan.level = Level::Crashes;
    plan.refusal = Some(pick(rng, &[Refusal::Writes, Refusal::Syncs, Refusal::ReadOnly]));
    weigh(plan, &[(Call::Store, 20), (Call::Sync, 4), (Call::Compute, 20), (Call::Lend, 3), (Call::Submit, 3)]);
    plan.habits.cancel = pick(rng, &[0.0, 0.05]);
}

fn dropped_stores(plan: &mut Plan, rng: &mut Rng) {
    plan.level = Level::Crashes;
    roomy(plan);
    plan.config.disk.write_policy =
        pick(rng, &[WritePolicy::WriteThrough, WritePolicy::WriteThrough, WritePolicy::WriteBack]);
    plan.config.limits.write_bytes_in_flight_max = plan.config.slot_bytes() as u64 * pick(rng, &[1, 2, 1024]);
    plan.disk_latency_max = Duration::from_millis(20);
    plan.habits.cancel = 0.4;
    plan.habits.hint = pick(rng, &[0.0, 0.1, 0.4]);
    weigh(plan, &[(Call::Store, 20), (Call::Sync, 6), (Call::Remove, pick(rng, &[0, 3]))]);
    weigh(plan, &[(Call::Compute, 8), (Call::Lend, 4), (Call::Submit, 4)]);
}

fn removals(plan: &mut Plan, rng: &mut Rng) {
    plan.level = Level::Crashes;
    plan.strikes = true;
    plan.config.disk.write_policy = pick(rng, &[WritePolicy::WriteThrough, WritePolicy::WriteBack]);
    plan.config.disk.paths = vec![DiskPath::with_blocks("disk0", rng.between(2, 6) as u32)];
    plan.config.host.capacity = Capacity::Blocks(rng.between(2, 4) as u32);
    plan.disk_latency_max = Duration::from_millis(pick(rng, &[3, 20]));
    plan.callers = rng.between(2, 6);
    // What a dropped store leaves may be written at any time, and excuses a removed block that is back.
    plan.habits.cancel = 0.0;
    let blocks = rng.between(4, 12) as usize;
    plan.universe = Universe::new(rng, blocks, plan.config.block_bytes);
    weigh(plan, &[(Call::Store, 20), (Call::StoreFrom, 5), (Call::Remove, 20)]);
    weigh(plan, &[(Call::RemoveDurably, 8), (Call::Clear, 1), (Call::Compute, 4)]);
}

fn memory(plan: &mut Plan, rng: &mut Rng) {
    plan.callers = rng.between(2, 6);
    plan.stranger = true;
    let arena_bytes = u64::from(plan.config.host_slots()) * plan.config.slot_bytes() as u64;
    // Always, sometimes, or not for the arena, though a region would be pinned.
    (plan.pin_refusals, plan.pinned_bytes_max) =
        pick(rng, &[(0.0, u64::MAX), (0.3, u64::MAX), (0.7, u64::MAX), (0.0, arena_bytes - 1), (0.3, arena_bytes - 1)]);
    plan.disk_latency_max = Duration::from_millis(pick(rng, &[1, 3, 20]));
    weigh(plan, &[(Call::Regions, 20), (Call::Strangers, 3), (Call::Store, 10), (Call::StoreFrom, 5)]);
    weigh(plan, &[(Call::Lend, 8), (Call::Submit, 8)]);
}

fn remote(plan: &mut Plan, rng: &mut Rng) {
    plan.lives = 3;
    plan.calls_each = rng.between(20, 60);
    let mut rate = |of: &[f64]| pick(rng, of);
    let rates = RemoteRates {
        error: rate(&[0.0, 0.0, 0.05, 0.3, 1.0]),
        hang: rate(&[0.0, 0.0, 0.02, 0.2]),
        lie: rate(&[0.0, 0.05, 0.3, 1.0]),
        stale: rate(&[0.0, 0.2, 1.0]),
        delete: rate(&[0.0, 0.0, 0.05]),
        slow_hour: rate(&[0.0, 0.0, 0.02]),
    };
    let latency_max = Duration::from_millis(pick(rng, &[0, 1, 10, 100]));
    let block_bytes = plan.config.block_bytes as u64;
    let object_bytes = block_bytes * pick(rng, &[1, 2, 4, 8]);
    let store = SimRemote::new(rng.next_u64(), rates, latency_max, object_bytes);
    let policies = [RemotePolicy::Stored, RemotePolicy::Evicted, RemotePolicy::Reused, RemotePolicy::Never];
    plan.config = plan
        .config
        .clone()
        .remote_store(store.clone())
        .remote_policy(pick(rng, &policies))
        .remote_interval_s(pick(rng, &[1, 1, 60]))
        .remote_deadline_ms(pick(rng, &[20, 500, 10_000]))
        .recompute_us(pick(rng, &[None, None, Some(500), Some(50_000)]))
        .remote_bytes(pick(rng, &[None, None, Some(12 * block_bytes)]))
        .remote_index_bytes(pick(rng, &[1 << 16, 1 << 30]));
    // Little room on the node: what it evicts the store may still have.
    plan.config.host.capacity = Capacity::Blocks(pick(rng, &[4, 8, 16]));
    if rng.chance(0.5) {
        plan.config.disk.paths.clear();
        plan.config.disk.write_budget = None;
        plan.config.disk.write_policy = WritePolicy::WriteThrough;
    }
    plan.habits.pause = 0.5;
    plan.habits.cancel = pick(rng, &[0.0, 0.05, 0.3]);
    plan.habits.extra = pick(rng, &[0.0, 0.2]);
    plan.remote = Some(store);
    weigh(plan, &[(Call::Store, 10), (Call::Fetch, 20), (Call::Match, 5), (Call::Prefetch, 5), (Call::Load, 8)]);
    weigh(plan, &[(Call::FetchMany, 5), (Call::Compute, 5), (Call::Walk, 0), (Call::Remove, pick(rng, &[0, 2]))]);
}
