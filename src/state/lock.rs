//! The one lock. Every unlock serves the requests for slots.
//!
//! A panic under the lock is a broken invariant. It answers every waiter with [`Error::Closed`] and poisons the lock:
//! later calls panic, because they could be served wrong bytes. Owners of slots leave the state as it is when they are
//! dropped after that.

#[cfg(test)]
mod tests;

use std::{
    ops::{Deref, DerefMut},
    sync::Arc,
};

use tokio::sync::oneshot;

use super::{
    Outcome, Shared, SlotRequests, State,
    deferred::{DeferredWork, Work},
};
use crate::{
    block::Tier,
    error::Error,
    metrics::{Count, Export, Held},
    sync::{MutexGuard, Refused},
};

/// Why nobody has the state of an unlocked [`Locked`].
const UNLOCKED: &str = "its drop unlocks it";

/// How often a thread that has released the lock takes it again for what others defer meanwhile, while the reactor can
/// take it instead.
const TURNS_MAX: u32 = 4;

impl Shared {
    /// Locks the state.
    ///
    /// # Panics
    /// If an earlier holder panicked.
    #[inline]
    pub(crate) fn lock(self: &Arc<Self>) -> Locked<'_> {
        self.locked(self.guard())
    }

    /// The guard of a [`locked`](Self::locked) state.
    ///
    /// # Panics
    /// If an earlier holder panicked.
    #[inline(always)] // each hit pays for it
    pub(crate) fn guard(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// As [`guard`](Self::guard); `None` if another thread has the lock.
    #[inline(always)] // each hit pays for it
    pub(crate) fn guard_if_free(&self) -> Option<MutexGuard<'_, State>> {
        if seems_taken() && !self.is_broken() {
            return None;
        }
        match self.state.try_lock() {
            Ok(guard) => Some(guard),
            Err(Refused::Taken) => None,
            Err(Refused::Broken) => Some(self.guard()),
        }
    }

    /// True once an invariant is broken: nothing that was deferred is done any more.
    pub(crate) fn is_broken(&self) -> bool {
        self.deferred.is_broken()
    }

    /// Locks the state for the drop of an owner; `None` if a panic under the lock has broken an invariant.
    #[inline(always)] // each drop of a lease pays for it
    pub(crate) fn lock_unless_broken(self: &Arc<Self>) -> Option<Locked<'_>> {
        // Under the lock that this thread still holds while it unwinds, the drop would wait for itself.
        if LOCKS_HELD.get() > 0 && std::thread::panicking() {
            return None;
        }
        self.state.lock_unless_poisoned().map(|state| self.locked(state))
    }

    /// Does work under the lock, or defers it to who has the lock. It is dropped if an invariant is broken.
    pub(crate) fn run_or_defer(self: &Arc<Self>, work: impl DeferredWork + 'static) {
        let mut work = work;
        match self.state.try_lock() {
            Ok(state) => {
                work.run(&mut self.locked(state));
                work.answer();
            }
            Err(Refused::Taken) => self.defer(Work::Other(Box::new(work))),
            Err(Refused::Broken) => {}
        }
    }

    /// Defers work to the holder of the lock, for a thread that has found it taken.
    #[inline(never)]
    pub(super) fn defer(self: &Arc<Self>, work: Work) {
        self.deferred.defer(work);
        self.serve_deferred();
    }

    /// Does what was deferred, unless another thread has the lock, who does it then, or much comes meanwhile.
    #[cold]
    fn serve_deferred(self: &Arc<Self>) {
        for turn in 1.. {
            match self.state.try_lock() {
                Ok(state) => self.locked(state).is_serving = true,
                Err(Refused::Taken) if !self.deferred.is_broken() => return,
                // The flights have ended, and the owners leave the state as it is.
                Err(_) => return drop(self.deferred.take(usize::MAX)),
            }
            if !self.deferred.any() {
                return;
            }
            if turn >= TURNS_MAX && !self.deferred.has_ended() {
                // The reactor's task takes the lock next: this thread has work of its own.
                return self.raised.notify_one();
            }
        }
    }

    /// Notes that the reactor takes the lock once more, and may not look again for what is deferred.
    pub(crate) fn end_reactor(&self) {
        self.deferred.end();
    }

    /// A locked state, with some of what was deferred before done.
    #[inline(always)] // each hit pays for it
    pub(super) fn locked<'a>(self: &'a Arc<Self>, state: MutexGuard<'a, State>) -> Locked<'a> {
        LOCKS_HELD.set(LOCKS_HELD.get() + 1);
        let was_unwinding = std::thread::panicking();
        if count_lock() || !self.deferred.is_empty() {
            return self.locked_and_served(state, was_unwinding);
        }
        // Made where it stays: to copy it once takes as long as to take the lock.
        Locked { state: Some(state), shared: self, was_unwinding, is_serving: false }
    }

    /// Does some of what was deferred before.
    #[inline(never)]
    fn locked_and_served<'a>(self: &'a Arc<Self>, state: MutexGuard<'a, State>, was_unwinding: bool) -> Locked<'a> {
        let mut locked = Locked { state: Some(state), shared: self, was_unwinding, is_serving: false };
        #[cfg(feature = "sim")]
        panic_if_wanted();
        locked.run_deferred();
        locked
    }
}

std::thread_local! {
    /// Index locks that this thread holds.
    static LOCKS_HELD: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
    /// Index locks that this thread has taken so far.
    #[cfg(feature = "sim")]
    static LOCKS_TAKEN: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
    /// The lock of this thread under which it panics, counted as [`LOCKS_TAKEN`].
    #[cfg(feature = "sim")]
    static PANIC_AT: std::cell::Cell<Option<u64>> = const { std::cell::Cell::new(None) };
}

/// Counts a lock of this thread. True if a test wants a panic under it.
#[cfg(feature = "sim")]
fn count_lock() -> bool {
    LOCKS_TAKEN.set(LOCKS_TAKEN.get() + 1);
    PANIC_AT.get() == Some(LOCKS_TAKEN.get())
}

#[cfg(not(feature = "sim"))]
const fn count_lock() -> bool {
    false
}

/// True if a simulation, where no other thread ever has the lock, wants a caller to find it taken.
#[cfg(feature = "sim")]
fn seems_taken() -> bool {
    LOCKS_TAKEN.get() % 3 == 2
}

#[cfg(not(feature = "sim"))]
const fn seems_taken() -> bool {
    false
}

#[cfg(feature = "sim")]
fn panic_if_wanted() {
    if PANIC_AT.get() == Some(LOCKS_TAKEN.get()) {
        PANIC_AT.set(None);
        panic!("a panic under the index lock, on purpose");
    }
}

/// Makes this thread panic under the `n`th index lock that it takes from now on: for tests.
#[cfg(feature = "sim")]
pub fn panic_under_lock(n: u64) {
    PANIC_AT.set(Some(LOCKS_TAKEN.get() + n));
}

/// Number of index locks that this thread has taken so far.
#[cfg(feature = "sim")]
pub fn locks_taken() -> u64 {
    LOCKS_TAKEN.get()
}

/// True while this thread holds the index lock of a cache. Nothing that may block, such as a log, may happen then:
/// every caller would wait for it.
#[cfg(feature = "sim")]
pub fn holds_lock() -> bool {
    LOCKS_HELD.get() > 0
}

/// What the holder of the lock leaves for after the unlock, beside slots for requests.
#[derive(Default)]
pub(super) struct FollowUps {
    /// What the recorder of metrics is told, and of how many evictions.
    exports: Vec<Export>,
    evicted: [u32; Tier::COUNT],
    /// What was deferred to the holder of the lock, and is done.
    pub(super) done: Vec<Work>,
}

impl State {
    /// True if something follows the unlock.
    #[inline]
    fn has_follow_ups(&self) -> bool {
        let FollowUps { exports, evicted, done } = &self.follow_ups;
        *evicted != [0; Tier::COUNT]
            || !done.is_empty()
            || !exports.is_empty()
            || self.slot_requests.iter().map(SlotRequests::len).sum::<usize>() > 0
            || !self.raised.is_empty()
            || !self.flights.gone.is_empty()
    }
}

/// The state, locked, with what its holder may do. The unlock grants available slots to the requests that wait, first
/// come, first served.
///
/// Many events free slots, some of them several: the end of a fill makes copies in other tiers evictable, an evicted
/// suffix its prefix. None of them looks for requests.
///
/// Wakers and the recorder of metrics are users' code, which may call the cache. So whatever wakes or drops a waker, or
/// calls the recorder, is left in the state by the holder of the lock, and follows the unlock.
pub(crate) struct Locked<'a> {
    /// `None` once it is unlocked, by the drop.
    state: Option<MutexGuard<'a, State>>,
    shared: &'a Arc<Shared>,
    /// The thread panicked before it locked: it drops an owner, and breaks nothing here.
    was_unwinding: bool,
    /// Its thread looks itself for what is deferred.
    is_serving: bool,
}

impl<'a> Locked<'a> {
    /// What needs no lock.
    #[inline]
    pub(crate) fn shared(&self) -> &'a Arc<Shared> {
        self.shared
    }

    /// Counts, and tells the recorder of metrics after the unlock.
    pub(crate) fn count(&mut self, count: &Count, n: u64) {
        if n > 0 {
            count.add_locked(n, self);
            self.follow_ups.exports.push(count.exported_later(n));
        }
    }

    /// Has the recorder of metrics told something after the unlock.
    pub(crate) fn export(&mut self, export: Export) {
        self.follow_ups.exports.push(export);
    }

    /// Drops a waiter without an answer: its caller's waker runs.
    pub(crate) fn drop_after_unlock(&mut self, waiter: oneshot::Sender<Outcome>) {
        self.flights.gone.push(waiter);
    }

    /// Counts an eviction, and tells the recorder of metrics after the unlock.
    pub(super) fn count_eviction(&mut self, tier: Tier) {
        self.shared().metrics.tier(tier).evictions.add_locked(1, self);
        self.follow_ups.evicted[tier as usize] += 1;
    }

    #[inline(always)]
    fn unlock(&mut self) {
        self.state = None;
        LOCKS_HELD.set(LOCKS_HELD.get() - 1);
    }

    /// Unlocks for the last time, and answers all waiters.
    #[cold]
    fn abandon(&mut self) {
        let flights = self.flights.finish_all();
        let requests = self.slot_requests.each_mut().map(SlotRequests::take_all);
        let (done, gone) = (std::mem::take(&mut self.follow_ups.done), std::mem::take(&mut self.flights.gone));
        self.shared.deferred.break_off();
        self.unlock();
        // Its task then finds the lock broken: else nobody of the reactor does while nothing moves.
        self.shared.raised.notify_one();
        requests.into_iter().for_each(|requests| requests.refuse(&Error::Closed));
        // Dropping the senders answers the waiters with `Error::Closed`, also of what others deferred meanwhile.
        drop((flights, done, gone, self.shared.deferred.take(usize::MAX)));
    }

    /// Grants available slots to the requests that wait, and unlocks. Then sends the granted slots, wakes the task that
    /// raises priorities, tells the recorder of metrics, and drops waiters that no movement has.
    #[inline(never)]
    fn unlock_and_follow_up(&mut self) {
        let abandons = AbandonsOnPanic(self);
        let granted = abandons.0.grant_slots();
        std::mem::forget(abandons);
        let (is_raised, gone) = (!self.raised.is_empty(), std::mem::take(&mut self.flights.gone));
        // Last: a slot that is granted may be an evicted block's.
        let FollowUps { exports, evicted, done } = std::mem::take(&mut self.follow_ups);
        self.unlock();
        let shared = self.shared;
        shared.metrics.evicted(evicted);
        if is_raised {
            shared.raised.notify_one();
        }
        granted.into_iter().for_each(|grant| grant.send(shared));
        exports.into_iter().for_each(Export::run);
        drop(gone);
        if !done.is_empty() {
            shared.deferred.answer(done);
        }
    }
}

/// Answers all waiters if the unlock itself panics.
struct AbandonsOnPanic<'b, 'a>(&'b mut Locked<'a>);

impl Drop for AbandonsOnPanic<'_, '_> {
    fn drop(&mut self) {
        self.0.abandon();
    }
}

impl Held for Locked<'_> {}

impl Deref for Locked<'_> {
    type Target = State;
    #[inline]
    fn deref(&self) -> &State {
        self.state.as_ref().expect(UNLOCKED)
    }
}

impl DerefMut for Locked<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut State {
        self.state.as_mut().expect(UNLOCKED)
    }
}

impl Drop for Locked<'_> {
    #[inline(always)] // each hit pays for it
    fn drop(&mut self) {
        if std::thread::panicking() && !self.was_unwinding {
            self.abandon();
        } else if self.has_follow_ups() {
            self.unlock_and_follow_up();
        } else {
            self.unlock();
        }
        if self.shared.deferred.any() && !self.is_serving {
            self.shared.serve_deferred();
        }
    }
}
