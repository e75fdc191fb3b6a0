//! One caller: a task that makes calls of all kinds, one after the other, and holds leases meanwhile.

use std::{rc::Rc, time::Duration};

use crate::sim::{Rng, World};
use kvhoist::{Cache, DeviceLease, Error, Lease};
use tokio::time::Instant;

use crate::{
    calls,
    cancel::{Cancel, late, until},
    chains,
    context::{Context, error_code},
    foreign::Memory,
    plan::Call,
    stranger::Stranger,
};

/// Leases that a caller keeps at once.
const LEASES_MAX: usize = 3;

/// What a caller keeps while it does other things.
pub enum Kept {
    Host { lease: Lease, block: usize },
    Device { lease: DeviceLease, block: usize },
}

pub struct Caller {
    pub context: Rc<Context>,
    pub cache: Cache,
    pub world: World,
    pub number: u64,
    pub rng: Rng,
    /// For hints: the draws of other calls do not depend on them.
    pub hints: Rng,
    pub memory: Memory,
    /// More of it, for [`calls::regions`].
    pub spares: Vec<Memory>,
    pub stranger: Option<Rc<Stranger>>,
    pub kept: Vec<Kept>,
}

impl Caller {
    /// Makes all its calls, unless the cache is closed before.
    pub async fn run(mut self) {
        for _ in 0..self.context.plan.calls_each {
            if self.context.failed() || self.pause().await || self.call().await == Flow::Closed {
                break;
            }
            if self.context.is_struck() {
                // Nothing may come after what ends the life.
                std::future::pending::<()>().await;
            }
        }
        self.let_go(0);
        self.memory.unregister(&self.cache).await;
        for mut memory in std::mem::take(&mut self.spares) {
            memory.unregister(&self.cache).await;
            if !memory.is_left_alone() {
                self.context.fail("somebody wrote to memory that was given back");
            }
        }
    }

    /// True where there is nothing left to do.
    async fn pause(&mut self) -> bool {
        let (pauses, long) = (self.rng.chance(self.context.plan.habits.pause), self.rng.chance(0.2));
        let pause_ms = self.rng.between(0, if long { 300 } else { 5 });
        if pauses {
            tokio::time::sleep(Duration::from_millis(pause_ms)).await;
        }
        let keep = self.rng.below(LEASES_MAX as u64 + 1) as usize;
        self.let_go(keep);
        false
    }

    async fn call(&mut self) -> Flow {
        if self.hints.chance(self.context.plan.habits.hint) {
            self.context.report.borrow_mut().calls[Call::Hint as usize] += 1;
            let end = chains::hint(self);
            self.note(Call::Hint, &end, Instant::now());
        }
        let call = self.draw_call();
        let cancel = Cancel::draw(&mut self.rng, self.context.plan.habits.cancel);
        let began = Instant::now();
        self.context.report.borrow_mut().calls[call as usize] += 1;
        let end = match call {
            Call::Store => calls::store(self, cancel).await,
            Call::Reserve => calls::reserve(self, cancel).await,
            Call::Fetch => calls::fetch(self, cancel).await,
            Call::FetchToDevice => calls::fetch_to_device(self, cancel).await,
            Call::Prefetch => calls::prefetch(self),
            Call::Remove => calls::remove(self, cancel).await,
            Call::Match => calls::match_prefix(self),
            Call::Load => calls::load(self, cancel).await,
            Call::StoreFrom => calls::store_from(self, cancel).await,
            Call::Sync => calls::sync(self, cancel).await,
            Call::Stats => calls::stats(self),
            Call::Walk => chains::walk(self, cancel).await,
            Call::Hurry => chains::hurry(self, cancel).await,
            Call::Regions => calls::regions(self).await,
            Call::Strangers => calls::strangers(self).await,
            Call::Hint => unreachable!("it has no weight"),
        };
        self.note(call, &end, began);
        self.context.call_ended();
        if matches!(end, End::Error(Error::Closed)) { Flow::Closed } else { Flow::GoOn }
    }

    fn draw_call(&mut self) -> Call {
        let weights = &self.context.plan.habits.weights;
        let mut at = self.rng.below(weights.iter().sum());
        for (call, weight) in Call::ALL.into_iter().zip(weights) {
            if at < *weight {
                return call;
            }
            at -= weight;
        }
        unreachable!("the draw is below the sum")
    }

    fn note(&self, call: Call, end: &End, began: Instant) {
        let context = &self.context;
        context.mix(self.number << 32 | (call as u64) << 16 | end.code());
        context.mix(context.now_ms());
        match end {
            End::Dropped => context.report.borrow_mut().dropped += 1,
            End::Error(error) => {
                let closing = self.is_closing();
                context.check_error(&format_args!("caller {}: {}", self.number, call.name()), error, closing);
            }
            End::Done(_) => {}
        }
        let took = began.elapsed();
        context.say(|| format!("caller {} {} ended: {end:?} after {} ms", self.number, call.name(), took.as_millis()));
        if took > context.patience(call) && !self.is_closing() {
            context.fail(format!(
                "caller {}: {} took {} ms, and the deadline is {} ms",
                self.number,
                call.name(),
                took.as_millis(),
                context.plan.config.limits.deadline_ms
            ));
        }
    }

    fn is_closing(&self) -> bool {
        self.context.closing.get()
    }

    /// Drops all but `keep` leases, in any order, after a last look at what they hold.
    pub fn let_go(&mut self, keep: usize) {
        while self.kept.len() > keep {
            let at = self.rng.below(self.kept.len() as u64) as usize;
            let kept = self.kept.swap_remove(at);
            self.context.check(kept.check(&self.context));
        }
    }

    /// Keeps a lease, or lets it go at once.
    pub fn keep(&mut self, kept: Kept) {
        self.context.check(kept.check(&self.context));
        if self.rng.chance(self.context.plan.habits.keep) {
            self.let_go(LEASES_MAX - 1);
            self.kept.push(kept);
        }
    }

    /// Runs a call, unless it is given up.
    pub async fn run_call<T>(&self, cancel: Cancel, call: impl Future<Output = T>) -> Option<T> {
        let rng = self.context.late.borrow_mut().fork();
        until(late(call, rng), cancel).await
    }

    pub fn draw_block(&mut self) -> usize {
        let blocks = self.context.plan.universe.len() as u64;
        // Some blocks are asked for more often than others.
        let limit = if self.rng.chance(0.5) { blocks } else { blocks.div_ceil(4) };
        self.rng.below(limit) as usize
    }
}

/// Whether a caller goes on.
#[derive(PartialEq, Eq)]
enum Flow {
    GoOn,
    Closed,
}

/// How a call ended.
#[derive(Debug)]
pub enum End {
    /// With a number that tells answers apart.
    Done(u64),
    Error(Error),
    Dropped,
}

impl End {
    fn code(&self) -> u64 {
        match self {
            End::Done(code) => *code,
            End::Error(error) => error_code(error),
            End::Dropped => 100,
        }
    }
}

impl Kept {
    /// A lease shows the bytes that its key names, for as long as it lives.
    fn check(&self, context: &Context) -> Result<(), String> {
        let (block, right) = match self {
            Kept::Host { lease, block } => (*block, **lease == *context.plan.universe.block(*block).payload),
            Kept::Device { lease, block } => {
                (*block, device_holds(lease, &context.plan.universe.block(*block).payload))
            }
        };
        if right { Ok(()) } else { Err(format!("a lease on block {block} shows wrong bytes")) }
    }
}

fn device_holds(lease: &DeviceLease, payload: &[u8]) -> bool {
    let mut rest = payload;
    for segment in lease.segments() {
        let (here, next) = rest.split_at(segment.len);
        // SAFETY: the lease keeps the segment valid and unchanged; a simulated device is host memory.
        if unsafe { std::slice::from_raw_parts(segment.ptr, segment.len) } != here {
            return false;
        }
        rest = next;
    }
    rest.is_empty()
}
