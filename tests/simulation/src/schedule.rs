//! What a caller does: calls of all kinds, one after the other, with pauses, while it keeps leases.

use std::time::Duration;

use kvhoist::Error;
use tokio::time::Instant;

use crate::{
    caller::{Caller, End, LEASES_MAX},
    calls,
    cancel::Cancel,
    chains, compute, many, memory_calls,
    plan::Call,
    sim::Rng,
    submit,
};

/// Whether a caller goes on.
#[derive(PartialEq, Eq)]
enum Flow {
    GoOn,
    Closed,
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
        self.parked.clear();
        submit::finish(&mut self).await;
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
        if self.extras.chance(self.context.plan.habits.extra) {
            std::mem::swap(&mut self.rng, &mut self.extras);
            let extra = weighted(&mut self.rng, Call::EXTRA.into_iter());
            let flow = self.make(extra).await;
            std::mem::swap(&mut self.rng, &mut self.extras);
            if flow == Flow::Closed || self.context.is_struck() {
                return flow;
            }
        }
        let weights = self.context.plan.habits.weights;
        let call = weighted(&mut self.rng, Call::ALL.into_iter().zip(weights));
        self.make(call).await
    }

    async fn make(&mut self, call: Call) -> Flow {
        let cancel = Cancel::draw(&mut self.rng, self.context.plan.habits.cancel);
        let began = Instant::now();
        self.context.report.borrow_mut().calls[call as usize] += 1;
        let end = match call {
            Call::Store => calls::store(self, cancel).await,
            Call::Reserve => calls::reserve(self, cancel).await,
            Call::Fetch => calls::fetch(self, cancel).await,
            Call::FetchToDevice => calls::fetch_to_device(self, cancel).await,
            Call::Prefetch => calls::prefetch(self),
            Call::Remove => calls::remove(self, cancel, false).await,
            Call::Match => calls::match_prefix(self),
            Call::Load => memory_calls::load(self, cancel).await,
            Call::StoreFrom => memory_calls::store_from(self, cancel).await,
            Call::Sync => calls::sync(self, cancel).await,
            Call::Stats => calls::stats(self),
            Call::Walk => chains::walk(self, cancel).await,
            Call::Hurry => chains::hurry(self, cancel).await,
            Call::Regions => memory_calls::regions(self).await,
            Call::Strangers => memory_calls::strangers(self).await,
            Call::Clear => many::clear(self, cancel).await,
            Call::FetchMany => many::fetch_many(self, cancel).await,
            Call::Compute => compute::get_or_fetch_with(self, cancel).await,
            Call::RemoveDurably => calls::remove(self, cancel, true).await,
            Call::Touch => many::touch(self),
            Call::Lend => submit::lend(self, cancel).await,
            Call::Submit => submit::submit(self).await,
            Call::Hint => unreachable!("it has no weight"),
        };
        self.note(call, &end, began);
        self.context.call_ended();
        if matches!(end, End::Error(Error::Closed)) { Flow::Closed } else { Flow::GoOn }
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
}

/// Draws a call by its weight.
fn weighted(rng: &mut Rng, of: impl Iterator<Item = (Call, u64)> + Clone) -> Call {
    let mut at = rng.below(of.clone().map(|(_, weight)| weight).sum());
    for (call, weight) in of {
        if at < weight {
            return call;
        }
        at -= weight;
    }
    unreachable!("the draw is below the sum")
}
