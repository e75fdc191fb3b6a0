//! One life of a cache: opened, used by several callers at once, and ended in one way or another.

mod open;

use std::{rc::Rc, time::Duration};

use crate::sim::{self, CopyOptions, FaultRates, Reactor, Rng, SimOptions, Simulated, World};
use kvhoist::{Cache, Tier, WritePolicy, internals::io::OpKind};
use tokio::time::timeout;

use crate::{
    caller::Caller,
    calls::check_found,
    context::Context,
    foreign::{Memory, Pool},
    model::{Began, Claims, Ending},
    plan::{Call, Level, pick},
    stranger::Stranger,
    submissions::Submissions,
    trial::Trial,
};

/// Virtual time in which everything must have come to its end.
const PATIENCE: Duration = Duration::from_secs(3_600);

/// Regions that a caller has besides the one that most calls use, and their blocks.
const SPARE_REGIONS: usize = 2;
const REGION_BLOCKS: usize = 2;

/// How a life ends, once its callers have done what they came for or a part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Exit {
    /// All is done, then the cache is closed.
    Close,
    /// The cache is closed while calls are under way.
    CloseEarly,
    /// The last handle is dropped.
    Drop,
    /// The process ends at once.
    Kill,
    /// The power fails.
    PowerCut,
}

/// What a life leaves.
pub struct Remains {
    pub files: Vec<Vec<u8>>,
}

/// Lives once on `files`.
pub fn live(context: &Rc<Context>, files: Vec<Vec<u8>>, life: u32) -> Remains {
    let plan = &context.plan;
    let mut rng =
        plan.rng.reseeded(plan.rng.clone().next_u64() ^ u64::from(life + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let options = SimOptions {
        latency: Duration::ZERO..=plan.disk_latency_max,
        rates: plan.rates,
        memory_align_bytes: plan.memory_align_bytes,
        pin_refusals: plan.pin_refusals,
        pinned_bytes_max: plan.pinned_bytes_max,
        log_entries_max: if context.verbose { 1 << 16 } else { 0 },
        ..SimOptions::default()
    };
    let mut world = World::new(rng.next_u64(), Vec::new());
    let copy = CopyOptions {
        latency: Duration::ZERO..=plan.copy_latency_max,
        failure: plan.copy_failure,
        // By a draw of its own: all else of a seed stays as it is.
        checksums: Rng::new(!world.seed).chance(0.5),
    };
    world.storage = sim::Sim::new(rng.next_u64(), files, options);
    world.copy = sim::SimCopy::new(rng.next_u64(), copy);
    // By draws of its own: all else of a seed stays as it is.
    let mut workers = Rng::new(world.seed);
    world.deaths = pick(&mut workers, &[0.0, 1.0 / 64.0, 0.1]);
    match plan.trial {
        // A block is read again as often as its worker dies.
        Some(Trial::PromptReads) => {
            world.deaths = 0.0;
            world.transfers_max = plan.transfers_max.unwrap_or(world.transfers_max);
        }
        _ => world.transfers_max = pick(&mut workers, &[1, 2, 32]),
    }
    // Dropped after the runtime: what died with it may still name the memory.
    let mut pool = Pool::default();
    let remains = sim::block_on(async {
        context.begin_life();
        plan.remote.iter().for_each(|remote| remote.begin_life());
        let controller =
            tokio::task::spawn_local(release_stalled(world.clone(), rng.fork(), plan.config.limits.deadline_ms));
        let remains = Life { context: Rc::clone(context), world: world.clone(), rng }.live(&mut pool).await;
        controller.abort();
        remains
    });
    drop(pool);
    context.check(world.check_freed());
    for entry in world.storage.log() {
        context.say(|| format!("disk: {entry:?}"));
    }
    let mut report = context.report.borrow_mut();
    report.lives += 1;
    report.add_world(&world.storage.counts(), &world.copy.counts());
    context.lied_before.set(context.has_lied(&world));
    context.mix(world.storage.log_digest());
    remains
}

/// Lets stalled operations go on, sooner or later.
async fn release_stalled(world: World, mut rng: Rng, deadline_ms: u64) {
    loop {
        let pause_ms = rng.between(1, 8 * deadline_ms.min(1_000));
        tokio::time::sleep(Duration::from_millis(pause_ms)).await;
        world.storage.release();
    }
}

struct Life {
    context: Rc<Context>,
    world: World,
    rng: Rng,
}

impl Life {
    async fn live(mut self, pool: &mut Pool) -> Remains {
        let exit = self.draw_exit();
        self.context.say(|| format!("a life begins that will end by {exit:?}"));
        let Some(Simulated { cache, reactor }) = self.open(exit).await else {
            return self.cut_off(exit, None);
        };
        if let Some(refusal) = self.context.plan.refusal {
            tokio::task::spawn_local(refusal.work(self.world.storage.clone(), self.rng.fork()));
        }
        let stranger = self.stranger(pool).await;
        let callers: Vec<_> = (0..self.context.plan.callers)
            .map(|number| {
                let mut caller = self.caller(number, &cache, pool);
                caller.spares = self.spares(pool);
                caller.stranger = stranger.clone();
                caller.submissions = self.submissions(&cache, &caller, pool);
                tokio::task::spawn_local(caller.run())
            })
            .collect();
        self.wait_for_exit(exit, &callers).await;
        if matches!(exit, Exit::Kill | Exit::PowerCut) {
            return self.cut_off(exit, Some(&cache));
        }
        let mut sync = None;
        if exit == Exit::CloseEarly {
            sync = self.close(&cache, &reactor).await;
        }
        for caller in callers {
            if timeout(PATIENCE, caller).await.is_err() {
                self.context.fail("a caller waits for ever");
                return self.cut_off(exit, Some(&cache));
            }
        }
        // From here on nothing goes wrong any more, but for a disk that refuses of its own accord.
        if self.context.plan.refusal.is_none() {
            self.world.storage.set_rates(FaultRates::default());
        }
        self.world.copy.set_failure(0.0);
        if exit != Exit::CloseEarly {
            self.balance(&reactor).await;
            self.audit(&cache).await;
            self.balance(&reactor).await;
        }
        let claims = if exit == Exit::Drop {
            let (claims, began) = self.drop_handle(cache, &reactor).await;
            sync = began;
            claims
        } else {
            if exit == Exit::Close {
                sync = self.close(&cache, &reactor).await;
            }
            self.end(&reactor).await;
            self.look_back(&cache)
        };
        if let Some(began) = sync {
            self.context.model.borrow_mut().sync_ends(began);
        }
        let remains = self.remains(self.rng.clone().chance(0.5));
        self.context.model.borrow_mut().restart(Ending::PowerCut, claims);
        remains
    }

    /// Drops the last handle. What can be claimed of the life, and what is durable.
    async fn drop_handle(&mut self, cache: Cache, reactor: &Reactor) -> (Claims, Option<Vec<Began>>) {
        self.context.report.borrow_mut().drops += 1;
        let mut claims = self.look_back(&cache);
        // No call reports the result of the end: it is good if nothing failed before.
        let failed = self.world.storage.counts().failed[OpKind::Sync as usize] > 0;
        let flushed = !failed && self.context.plan.refusal.is_none();
        let sync = (claims.keeps && flushed).then(|| self.context.model.borrow().sync_begins());
        drop(cache);
        // What the last write-backs evict is in no figure.
        let fits = self.context.plan.universe.len() as u64 <= self.context.plan.config.disk_slots();
        // Nor is what they decide against.
        let fits = fits && self.context.plan.config.disk.write_policy != WritePolicy::ByValue;
        claims = Claims { keeps: claims.keeps && fits, keeps_synced: claims.keeps_synced && fits, ..claims };
        self.end(reactor).await;
        (claims, sync)
    }

    fn draw_exit(&mut self) -> Exit {
        if self.context.plan.strikes {
            let exits = [Exit::Kill, Exit::Kill, Exit::PowerCut, Exit::Close];
            return exits[self.rng.below(exits.len() as u64) as usize];
        }
        let exits = [Exit::Close, Exit::CloseEarly, Exit::Drop, Exit::Kill, Exit::PowerCut, Exit::PowerCut];
        let calm = self.context.plan.level == Level::Calm;
        exits[self.rng.below(if calm { 3 } else { exits.len() as u64 }) as usize]
    }

    fn caller(&mut self, number: u64, cache: &Cache, pool: &mut Pool) -> Caller {
        let config = &self.context.plan.config;
        let device = config.device_slots() > 0 && self.rng.chance(0.5);
        let blocks = self.rng.between(1, 4).min(u64::from(config.limits.movements_max)) as usize;
        let rng = self.rng.fork();
        Caller {
            context: Rc::clone(&self.context),
            cache: cache.clone(),
            world: self.world.clone(),
            number,
            hints: Rng::new(rng.clone().next_u64() ^ 0x417),
            extras: Rng::new(rng.clone().next_u64() ^ 0xe0c4),
            rng,
            memory: pool.take(config.block_bytes, blocks, device, self.context.plan.memory_shift),
            spares: Vec::new(),
            stranger: None,
            kept: Vec::new(),
            parked: Vec::new(),
            submissions: Submissions::default(),
        }
    }

    /// Another cache, where the run has one.
    async fn stranger(&mut self, pool: &mut Pool) -> Option<Rc<Stranger>> {
        if !self.context.plan.stranger {
            return None;
        }
        let opened = Stranger::open(&self.context, &mut self.rng, pool).await;
        opened.inspect_err(|error| self.context.fail(format!("another cache does not open: {error}"))).ok()
    }

    /// More memory of a caller, where the run has use for it.
    fn spares(&mut self, pool: &mut Pool) -> Vec<Memory> {
        let plan = &self.context.plan;
        let regions = if plan.habits.weights[Call::Regions as usize] > 0 { SPARE_REGIONS } else { 0 };
        (0..regions).map(|_| pool.take(plan.config.block_bytes, REGION_BLOCKS, false, plan.memory_shift)).collect()
    }

    /// What a caller submits with; by draws of its own.
    fn submissions(&self, cache: &Cache, caller: &Caller, pool: &mut Pool) -> Submissions {
        Submissions::new(&self.context.plan, cache, &mut caller.extras.clone(), pool)
    }

    /// Waits until the life is to end, if that is before its callers have done all that they came for.
    async fn wait_for_exit(&mut self, exit: Exit, callers: &[tokio::task::JoinHandle<()>]) {
        let all_calls = self.context.plan.callers * self.context.plan.calls_each;
        if self.context.plan.strikes && matches!(exit, Exit::Kill | Exit::PowerCut) {
            self.context.strike_after(self.rng.between(1, 8));
            self.wait_for_calls(u64::MAX, callers).await;
        } else if matches!(exit, Exit::CloseEarly | Exit::Kill | Exit::PowerCut) {
            let calls = self.rng.below(all_calls + all_calls / 8);
            self.wait_for_calls(calls, callers).await;
        }
    }

    /// Waits until so many calls have ended, or all callers have, and then a little longer.
    async fn wait_for_calls(&mut self, calls: u64, callers: &[tokio::task::JoinHandle<()>]) {
        let enough = async {
            while self.context.calls_ended() < calls
                && !self.context.is_struck()
                && !callers.iter().all(tokio::task::JoinHandle::is_finished)
            {
                // The last caller to end may end no more calls.
                drop(timeout(Duration::from_secs(1), self.context.call_ended.notified()).await);
            }
        };
        if timeout(PATIENCE, enough).await.is_err() {
            self.context.fail("the callers wait for ever");
        }
        match self.rng.below(3) {
            _ if self.context.is_struck() => {}
            0 => {}
            1 => tokio::task::yield_now().await,
            _ => tokio::time::sleep(Duration::from_millis(self.rng.below(10))).await,
        }
    }

    /// Closes the cache; what is durable then, if it says so.
    async fn close(&mut self, cache: &Cache, reactor: &Reactor) -> Option<Vec<Began>> {
        self.context.report.borrow_mut().closes += 1;
        self.context.closing.set(true);
        let began = self.context.sync_begins(cache);
        let second = self.close_again(cache, reactor);
        let Ok((first, second)) = timeout(PATIENCE, async { tokio::join!(cache.close(), second) }).await else {
            self.context.fail("the cache never closed");
            return None;
        };
        if let Some(second) = second.filter(|second| second.is_ok() != first.is_ok()) {
            self.context.fail(format!("of two closes one came to {first:?} and the other to {second:?}"));
        }
        match first {
            Ok(()) => Some(began),
            Err(error) => {
                self.context.check_error(&"close", &error, true);
                None
            }
        }
    }

    /// Closes the cache once more, at the same time or a little later.
    async fn close_again(&self, cache: &Cache, reactor: &Reactor) -> Option<Result<(), kvhoist::Error>> {
        if !self.context.plan.second_close {
            return None;
        }
        tokio::time::sleep(Duration::from_millis(self.rng.clone().below(10))).await;
        let result = cache.close().await;
        self.context.report.borrow_mut().second_closes += 1;
        if !reactor.is_ended() {
            self.context.fail(format!("a second close came to {result:?} while the cache was at work"));
        }
        Some(result)
    }

    /// Waits for the reactor to end.
    async fn end(&self, reactor: &Reactor) {
        if timeout(PATIENCE, reactor.ended()).await.is_err() {
            self.context.fail("the cache never came to its end");
        }
        self.balance(reactor).await;
    }

    /// With nobody at work, every slot and every byte is accounted for.
    async fn balance(&self, reactor: &Reactor) {
        if let Err(what) = reactor.settle(PATIENCE).await {
            self.context.fail(format!("the balance does not hold: {what}"));
        }
    }

    /// Asks for every block once, with nobody else at work.
    async fn audit(&mut self, cache: &Cache) {
        let mut auditor = self.caller(99, cache, &mut Pool::default());
        for block in 0..self.context.plan.universe.len() {
            let began = self.context.model.borrow().begin(block);
            let key = self.context.plan.universe.key(block);
            match timeout(PATIENCE, cache.fetch(&key)).await {
                Err(_) => self.context.fail(format!("block {block} is waited for for ever")),
                Ok(Err(error)) => self.context.check_error(&format_args!("the audit of block {block}"), &error, false),
                Ok(Ok(found)) => {
                    check_found(&auditor, began, found.is_some());
                    if let Some(lease) = found {
                        auditor.keep(crate::caller::Kept::Host { lease, block });
                        auditor.let_go(0);
                    }
                }
            }
        }
    }

    /// Notes what the life was, and what can be claimed of it.
    fn look_back(&self, cache: &Cache) -> Claims {
        let stats = cache.stats();
        let mut report = self.context.report.borrow_mut();
        report.read_only += u64::from(stats.disk_read_only.is_some());
        report.retired += u64::from(stats.disk_retired.is_some());
        report.quarantined += stats.quarantined;
        report.checksum_failures += stats.checksum_failures;
        report.pins_refused += self.world.storage.pins_refused();
        report.evictions += Tier::ALL.iter().map(|&tier| stats.tier(tier).evictions).sum::<u64>();
        report.found_remote(&stats);
        self.context.claims(cache, &self.world)
    }

    /// Ends the life where it stands.
    fn cut_off(&self, exit: Exit, cache: Option<&Cache>) -> Remains {
        let honest = !self.context.has_lied(&self.world);
        let claims =
            cache.map_or(Claims { keeps: honest, keeps_synced: honest, honest }, |cache| self.look_back(cache));
        let power_cut = exit == Exit::PowerCut;
        let mut report = self.context.report.borrow_mut();
        if power_cut {
            report.power_cuts += 1;
        } else {
            report.kills += 1;
        }
        drop(report);
        let remains = self.remains(power_cut);
        self.context.say(|| "the life is cut off".into());
        let ending = if power_cut { Ending::PowerCut } else { Ending::Kill };
        self.context.model.borrow_mut().restart(ending, claims);
        remains
    }

    fn remains(&self, power_cut: bool) -> Remains {
        Remains { files: self.world.storage.end(power_cut) }
    }
}
