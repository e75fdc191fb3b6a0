//! What everything in a run shares.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeSet,
    fmt,
    rc::Rc,
    time::Duration,
};

use crate::sim::{FaultKind, Rng, World};
use kvhoist::{Cache, Error, Tier, WritePolicy, internals::io::OpKind};
use tokio::{sync::Notify, time::Instant};

use crate::{
    computations::Computations,
    model::{Began, Claims, Model},
    plan::{Call, Level, Plan},
    report::Report,
};

/// One run.
pub struct Context {
    pub plan: Plan,
    pub model: RefCell<Model>,
    pub report: RefCell<Report>,
    pub verbose: bool,
    /// A disk of an earlier life lied.
    pub lied_before: Cell<bool>,
    /// The cache is being closed: calls may be refused.
    pub closing: Cell<bool>,
    pub computations: RefCell<Computations>,
    /// Draws how late callers are resumed.
    pub late: RefCell<Rng>,
    failure: RefCell<Option<String>>,
    digest: Cell<u64>,
    life_began: Cell<Option<Instant>>,
    /// Calls ended in this life.
    calls_ended: Cell<u64>,
    pub call_ended: Notify,
    /// Removals that are answered before the life is cut off, if that is what ends it.
    removals_left: Cell<Option<u64>>,
}

impl Context {
    pub fn new(plan: Plan, verbose: bool) -> Rc<Self> {
        let writes_through = plan.config.disk.write_policy == WritePolicy::WriteThrough;
        let comes_back = plan.remote.is_some();
        let model = Model::new(plan.universe.len(), plan.store_keeps(), writes_through, comes_back);
        let late = RefCell::new(Rng::new(plan.rng.clone().next_u64() ^ 0x1a7e_0000_0000_0000));
        Rc::new(Context {
            plan,
            model: RefCell::new(model),
            report: RefCell::new(Report { runs: 1, ..Report::default() }),
            verbose,
            lied_before: Cell::new(false),
            closing: Cell::new(false),
            computations: RefCell::default(),
            late,
            failure: RefCell::new(None),
            digest: Cell::new(0xcbf2_9ce4_8422_2325),
            life_began: Cell::new(None),
            calls_ended: Cell::new(0),
            call_ended: Notify::new(),
            removals_left: Cell::new(None),
        })
    }

    pub fn begin_life(&self) {
        self.life_began.set(Some(Instant::now()));
        self.calls_ended.set(0);
        self.closing.set(false);
        self.removals_left.set(None);
        *self.computations.borrow_mut() = Computations::default();
    }

    /// Lets the life end when so many removals have been answered.
    pub fn strike_after(&self, removals: u64) {
        self.removals_left.set(Some(removals));
    }

    pub fn removal_ended(&self) {
        self.removals_left.set(self.removals_left.get().map(|left| left.saturating_sub(1)));
    }

    /// The life ends at this instant.
    pub fn is_struck(&self) -> bool {
        self.removals_left.get() == Some(0)
    }

    /// The longest that a call may take in virtual time, however slow the disk is.
    pub fn patience(&self, call: Call) -> Duration {
        let deadlines = match call {
            Call::Sync | Call::RemoveDurably | Call::Clear => 100,
            _ => 20,
        };
        Duration::from_millis(self.plan.config.limits.deadline_ms * deadlines + 2_000)
    }

    /// Notes the first thing that is wrong; the run ends as soon as it can.
    pub fn fail(&self, what: impl Into<String>) {
        let what = what.into();
        self.say(|| format!("WRONG: {what}"));
        self.failure.borrow_mut().get_or_insert(what);
    }

    pub fn check(&self, result: Result<(), String>) {
        if let Err(what) = result {
            self.fail(what);
        }
    }

    pub fn failed(&self) -> bool {
        self.failure.borrow().is_some()
    }

    pub fn take_failure(&self) -> Option<String> {
        self.failure.borrow_mut().take()
    }

    /// Virtual time since the life began, milliseconds.
    pub fn now_ms(&self) -> u64 {
        self.life_began.get().map_or(0, |began| began.elapsed().as_millis() as u64)
    }

    /// A line for who watches.
    pub fn say(&self, line: impl FnOnce() -> String) {
        if self.verbose {
            eprintln!("{:>8} ms  {}", self.now_ms(), line());
        }
    }

    /// Takes `word` into the digest of all answers.
    pub fn mix(&self, word: u64) {
        self.digest.set((self.digest.get() ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23));
    }

    pub fn digest(&self) -> u64 {
        self.digest.get()
    }

    pub fn call_ended(&self) {
        self.calls_ended.set(self.calls_ended.get() + 1);
        self.call_ended.notify_waiters();
    }

    pub fn calls_ended(&self) -> u64 {
        self.calls_ended.get()
    }

    /// True where a disk of this life or an earlier one lied about a write.
    pub fn has_lied(&self, world: &World) -> bool {
        let faults = world.storage.counts().faults_by_kind;
        let lies: u64 = [FaultKind::Lost, FaultKind::Misdirected]
            .into_iter()
            .map(|kind| faults[OpKind::Write as usize][kind as usize] + faults[OpKind::Sync as usize][kind as usize])
            .sum();
        self.lied_before.get() || lies > 0
    }

    /// What can be claimed now.
    pub fn claims(&self, cache: &Cache, world: &World) -> Claims {
        claims_of(cache, world, self.has_lied(world))
    }

    /// What a sync or a close that begins now will have made durable.
    pub fn sync_begins(&self, cache: &Cache) -> Vec<Began> {
        let mut began = self.model.borrow().sync_begins();
        // Of a released block that was dropped unwritten, device memory may have a copy, which no sync writes.
        let is_told = self.plan.config.device_slots() == 0 || cache.stats().released_unwritten == 0;
        // What only the store beyond the node has is not written to disk.
        let on_node: Option<BTreeSet<_>> = self.plan.remote.is_some().then(|| cache.keys().collect());
        for (block, began) in began.iter_mut().enumerate() {
            let key = self.plan.universe.key(block);
            began.visible =
                is_told && on_node.as_ref().map_or_else(|| cache.contains(&key), |keys| keys.contains(&key));
        }
        began
    }

    /// Whether the faults of this run allow a call to end like this.
    pub fn check_error(&self, what: &dyn fmt::Display, error: &Error, closing: bool) {
        let plan = &self.plan;
        let allowed = match error {
            Error::Busy { .. } => plan.has_tight_limits(),
            Error::Timeout { .. } => plan.may_time_out(),
            Error::Io { op, .. } => {
                let rates = &plan.rates;
                let rate = match op.split(' ').next() {
                    Some("read") => rates.read_error + rates.short,
                    Some("write") => rates.write_error + rates.no_space + rates.short,
                    _ => rates.sync_error,
                };
                rate > 0.0 || plan.refusal.is_some_and(|refusal| refusal.explains(op))
            }
            Error::Copy { .. } => plan.copy_failure > 0.0,
            // What reached no caller is reported by a later sync: a write that ran into a limit, a computed block that
            // found no slot in time.
            Error::Refused { .. } => plan.level >= Level::Crashes || plan.has_tight_limits() || plan.may_time_out(),
            Error::Unavailable { tier: "disk", .. } => plan.level >= Level::Crashes,
            Error::Unavailable { tier: "device", .. } => plan.config.device_slots() == 0,
            Error::Closed => closing,
            _ => false,
        };
        let mut report = self.report.borrow_mut();
        match error {
            Error::Busy { .. } => report.busy += 1,
            Error::Timeout { .. } => report.timeouts += 1,
            _ => report.failed += 1,
        }
        drop(report);
        if !allowed {
            self.fail(format!("{what} failed, and nothing in this run explains it: {error}"));
        }
    }
}

/// What a cache must keep, given what has gone wrong so far, and whether a disk has lied.
pub fn claims_of(cache: &Cache, world: &World, lied: bool) -> Claims {
    let (stats, honest) = (cache.stats(), !lied);
    let of_reads = world.storage.counts().faults_by_kind[OpKind::Read as usize];
    let read_well = of_reads[FaultKind::Error as usize] + of_reads[FaultKind::BitFlip as usize] == 0;
    let keeps_synced = honest
        && read_well
        && stats.read_errors == 0
        && stats.disk_retired.is_none()
        && stats.writes_declined + stats.writes_over_budget == 0
        && stats.tier(Tier::Disk).evictions == 0
        // By value, a sync decides on released blocks as host memory does.
        && (stats.released_unwritten == 0 || cache.config().disk.write_policy != WritePolicy::ByValue);
    let keeps = keeps_synced
        && stats.released_unwritten == 0
        && (cache.config().disk.write_policy == WritePolicy::WriteThrough
            || (stats.writes_refused == 0 && stats.disk_read_only.is_none()));
    Claims { keeps, keeps_synced, honest }
}

/// A number for the digest that tells errors apart.
pub fn error_code(error: &Error) -> u64 {
    match error {
        Error::Busy { .. } => 101,
        Error::Timeout { .. } => 102,
        Error::Io { .. } => 103,
        Error::Copy { .. } => 104,
        Error::Refused { .. } => 105,
        Error::Unavailable { .. } => 106,
        Error::Closed => 107,
        Error::Argument { .. } => 108,
        _ => 109,
    }
}
