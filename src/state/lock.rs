//! The one lock. Every unlock serves the requests for slots.
//!
//! A panic under the lock is a broken invariant. It answers every waiter with [`Error::Closed`] and poisons the lock:
//! later calls panic, because they could be served wrong bytes. Owners of slots leave the state as it is when they are
//! dropped after that.

use std::{
    ops::{Deref, DerefMut},
    sync::Arc,
};

use tokio::sync::oneshot;

use super::{
    Flight, Outcome, Shared, State,
    left::{LeftWork, Work},
    requests,
    slots::Grant,
};
use crate::{
    block::Tier,
    error::Error,
    metrics::{Count, Export, Held},
    sync::{MutexGuard, Refused},
};

/// How often a thread that has released the lock takes it again for what others leave meanwhile.
const TURNS_MAX: u32 = 4;

impl Shared {
    /// Locks the state.
    ///
    /// # Panics
    /// If an earlier holder panicked.
    #[inline]
    pub(crate) fn lock(self: &Arc<Self>) -> Locked<'_> {
        self.locked(self.state.lock())
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

    /// Locks the state, if that need not be waited for.
    #[inline(always)] // each drop of a lease pays for it
    pub(super) fn try_lock(self: &Arc<Self>) -> Result<Locked<'_>, Refused> {
        self.state.try_lock().map(|state| self.locked(state))
    }

    /// Does work under the lock, or leaves it to who has the lock. It is dropped if an invariant is broken.
    pub(crate) fn make_or_leave(self: &Arc<Self>, work: impl LeftWork + 'static) {
        let mut work = work;
        match self.try_lock() {
            Ok(mut state) => {
                work.make(&mut state);
                drop(state);
                work.answer();
            }
            Err(Refused::Taken) => self.leave(Work::Other(Box::new(work))),
            Err(Refused::Broken) => {}
        }
    }

    /// Leaves work to the holder of the lock, for a thread that has found it taken.
    #[inline(never)]
    pub(super) fn leave(self: &Arc<Self>, work: Work) {
        self.left.leave(work);
        self.serve_left();
    }

    /// Does what was left, unless another thread has the lock, who does it then.
    #[cold]
    fn serve_left(self: &Arc<Self>) {
        for _ in 0..TURNS_MAX {
            match self.try_lock() {
                Ok(mut state) => state.after.is_serving = true,
                Err(Refused::Taken) => return,
                // The flights have ended, and the owners leave the state as it is.
                Err(Refused::Broken) => return drop(self.left.take()),
            }
            if !self.left.any() {
                return;
            }
        }
        // The reactor's task takes the lock next: this thread has work of its own.
        self.raised.notify_one();
    }

    #[inline(always)]
    fn locked<'a>(self: &'a Arc<Self>, state: MutexGuard<'a, State>) -> Locked<'a> {
        LOCKS_HELD.set(LOCKS_HELD.get() + 1);
        let was_unwinding = std::thread::panicking();
        let after = AfterUnlock { shared: self, evicted: None, work: None, left: Vec::new(), is_serving: false };
        let mut locked = Locked { state, was_unwinding, after };
        #[cfg(feature = "sim")]
        count_lock();
        if !self.left.is_empty() {
            locked.after.left = locked.make_left();
        }
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

/// Counts a lock of this thread, and panics under it if a test wants that.
#[cfg(feature = "sim")]
fn count_lock() {
    LOCKS_TAKEN.set(LOCKS_TAKEN.get() + 1);
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

impl State {
    /// True if something follows the unlock, beside what the recorder is told of evictions.
    #[inline]
    fn has_left_work(&self) -> bool {
        !self.slot_requests.is_empty()
            || !self.raised.is_empty()
            || !self.exports.is_empty()
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
    // Declared, and so dropped, before what follows the unlock.
    state: MutexGuard<'a, State>,
    after: AfterUnlock<'a>,
    /// The thread panicked before it locked: it drops an owner, and breaks nothing here.
    was_unwinding: bool,
}

impl<'a> Locked<'a> {
    /// What needs no lock.
    #[inline]
    pub(crate) fn shared(&self) -> &'a Arc<Shared> {
        self.after.shared
    }

    /// Counts, and tells the recorder of metrics after the unlock.
    pub(crate) fn count(&mut self, count: &Count, n: u64) {
        if n > 0 {
            count.add_locked(n, self);
            self.exports.push(count.exported_later(n));
        }
    }

    /// Has the recorder of metrics told something after the unlock.
    pub(crate) fn export(&mut self, export: Export) {
        self.exports.push(export);
    }

    /// Counts an eviction, and tells the recorder of metrics after the unlock.
    pub(super) fn count_eviction(&mut self, tier: Tier) {
        self.shared().metrics.tier(tier).evictions.add_locked(1, self);
        self.evicted[tier as usize] += 1;
    }

    /// Takes all waiters, who are answered after the last unlock.
    #[cold]
    fn abandon(&mut self) -> Box<FollowUp> {
        let flights = self.flights.finish_all();
        let requests = Tier::ALL.map(|tier| self.slot_requests.take_all(tier));
        Box::new(FollowUp::Abandon { flights, requests })
    }

    /// Grants available slots to the requests that wait, and takes what is left for after the unlock.
    #[cold]
    fn serve(&mut self) -> Option<Box<FollowUp>> {
        let granted = self.grant_slots();
        let is_raised = !self.raised.is_empty();
        let (exports, gone) = (std::mem::take(&mut self.exports), std::mem::take(&mut self.flights.gone));
        let any = is_raised || !granted.is_empty() || !exports.is_empty() || !gone.is_empty();
        any.then(|| Box::new(FollowUp::Serve { granted, is_raised, exports, _gone: gone }))
    }
}

impl Held for Locked<'_> {}

impl Deref for Locked<'_> {
    type Target = State;
    #[inline]
    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Locked<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Drop for Locked<'_> {
    #[inline]
    fn drop(&mut self) {
        if std::thread::panicking() && !self.was_unwinding {
            self.after.work = Some(self.abandon());
            return;
        }
        if self.has_left_work() {
            self.after.work = self.serve();
        }
        // Last: a slot that is granted may be an evicted block's.
        if self.evicted != [0; Tier::COUNT] {
            self.after.evicted = Some(std::mem::take(&mut self.evicted));
        }
    }
}

/// What follows the unlock.
struct AfterUnlock<'a> {
    shared: &'a Arc<Shared>,
    evicted: Option<[u32; Tier::COUNT]>,
    work: Option<Box<FollowUp>>,
    /// What was left, and is done.
    left: Vec<Work>,
    /// Its thread looks itself for what is left.
    is_serving: bool,
}

enum FollowUp {
    /// Sends the granted slots, wakes the task that raises priorities, tells the recorder of metrics, and drops the
    /// waiters that have left.
    Serve { granted: Vec<Grant>, is_raised: bool, exports: Vec<Export>, _gone: Vec<oneshot::Sender<Outcome>> },
    /// Answers all waiters.
    Abandon { flights: Vec<Flight>, requests: [requests::Refused; Tier::COUNT] },
}

impl Drop for AfterUnlock<'_> {
    #[inline(always)] // each hit pays for it
    fn drop(&mut self) {
        LOCKS_HELD.set(LOCKS_HELD.get() - 1);
        // Taken: nothing is left to drop.
        let (evicted, work, left) = (self.evicted.take(), self.work.take(), std::mem::take(&mut self.left));
        if evicted.is_some() || work.is_some() || !left.is_empty() {
            self.shared.follow_up(evicted, work, left);
        }
        if self.shared.left.any() && !self.is_serving {
            self.shared.serve_left();
        }
    }
}

impl Shared {
    #[cold]
    fn follow_up(self: &Arc<Self>, evicted: Option<[u32; Tier::COUNT]>, work: Option<Box<FollowUp>>, left: Vec<Work>) {
        if !left.is_empty() {
            self.left.answer(left);
        }
        if let Some(evicted) = evicted {
            self.metrics.evicted(evicted);
        }
        if let Some(work) = work {
            (*work).run(self);
        }
    }
}

impl FollowUp {
    fn run(self, shared: &Arc<Shared>) {
        match self {
            FollowUp::Serve { granted, is_raised, exports, _gone } => {
                if is_raised {
                    shared.raised.notify_one();
                }
                granted.into_iter().for_each(|grant| grant.send(shared));
                exports.into_iter().for_each(Export::run);
            }
            FollowUp::Abandon { flights, requests } => {
                requests.into_iter().for_each(|requests| requests.refuse(&Error::Closed));
                // Dropping the senders answers the waiters with `Error::Closed`.
                drop(flights);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        future::Future,
        panic::{AssertUnwindSafe, catch_unwind},
        pin::pin,
        sync::Arc,
        task::{Context, Poll, Waker},
    };

    use tokio::sync::oneshot;

    use crate::{
        block::{BlockKey, Route, Tier},
        config::Config,
        error::Error,
        index::Index,
        memory::Arena,
        metrics::Metrics,
        state::{Class, Few, Joined, Pin, Purpose, Shared},
    };

    const BYTES: usize = 4096;

    /// A cache of host memory alone, with one block.
    fn with_a_block(key: &BlockKey) -> Arc<Shared> {
        let config = Config::default().block_bytes(BYTES).host_blocks(2);
        let arena = Arc::new(Arena::new(2, BYTES).expect("a little memory"));
        let shared = Arc::new(Shared::new(config, arena, None, Index::new(1), None, 1, Metrics::new("", BYTES)));
        let filling = shared.lock().acquire(Tier::Host).expect("both slots are free");
        assert!(shared.commit(key, None, filling, 0).is_ok(), "stored");
        shared
    }

    fn pin(shared: &Arc<Shared>, key: &BlockKey) -> Pin {
        let mut state = shared.lock();
        let id = state.index.find(key).expect("stored");
        state.pin(id, Tier::Host, Route::HostHit).expect("in host memory")
    }

    #[test]
    fn a_panic_under_the_lock_answers_the_waiters_and_lets_owners_be_dropped() {
        let key = BlockKey::new([1; 32]);
        let shared = with_a_block(&key);
        let held = pin(&shared, &key);
        let filling = shared.lock().acquire(Tier::Host).expect("the other slot");
        let mut for_a_slot = pin!(shared.acquire(Tier::Host, Purpose::Call));
        let mut context = Context::from_waker(Waker::noop());
        assert!(for_a_slot.as_mut().poll(&mut context).is_pending(), "both slots are held");
        let mut for_a_block = {
            let mut state = shared.lock();
            let id = state.index.find(&key).expect("stored");
            let (sender, receiver) = oneshot::channel();
            state.flights.begin((&key, Tier::Disk), id, Class::Awaited, Few::one(sender), false);
            receiver
        };

        let broken = catch_unwind(AssertUnwindSafe(|| {
            let mut state = shared.lock();
            let id = state.index.find(&key).expect("stored");
            // Dropped while this thread still holds the lock.
            let _pin = state.pin(id, Tier::Host, Route::HostHit);
            panic!("an invariant is broken");
        }));

        assert!(broken.is_err());
        assert!(for_a_block.try_recv().is_err_and(|error| error == tokio::sync::oneshot::error::TryRecvError::Closed));
        assert!(matches!(for_a_slot.as_mut().poll(&mut context), Poll::Ready(Err(Error::Closed))));
        drop(filling);
        // The pin is dropped by a caller that panics because of the lock: a second panic would end the process.
        let refused = catch_unwind(AssertUnwindSafe(|| {
            let _held = held;
            drop(shared.lock());
        }));
        assert!(refused.is_err(), "no state is shown that may be wrong");
    }
    #[test]
    fn a_lease_dropped_by_a_panic_of_its_caller_gives_its_slot_to_the_first_in_line() {
        let key = BlockKey::new([1; 32]);
        let shared = with_a_block(&key);
        let held = pin(&shared, &key);
        let _filling = shared.lock().acquire(Tier::Host).expect("the other slot");
        let mut waiting = pin!(shared.acquire(Tier::Host, Purpose::Call));
        let mut context = Context::from_waker(Waker::noop());
        assert!(waiting.as_mut().poll(&mut context).is_pending(), "both slots are held");

        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _held = held;
            panic!("a caller, on purpose");
        }));

        assert!(panicked.is_err());
        assert!(matches!(waiting.as_mut().poll(&mut context), Poll::Ready(Ok(_))), "no other event would grant it");
    }

    #[test]
    fn a_pin_dropped_while_the_lock_is_taken_ends_with_the_unlock() {
        let key = BlockKey::new([1; 32]);
        let shared = with_a_block(&key);
        let held = pin(&shared, &key);
        let (id, filling) = (held.id(), shared.lock().acquire(Tier::Host).expect("the other slot"));
        let mut for_a_slot = pin!(shared.acquire(Tier::Host, Purpose::Call));
        let mut context = Context::from_waker(Waker::noop());
        assert!(for_a_slot.as_mut().poll(&mut context).is_pending(), "both slots are held");

        let state = shared.lock();
        drop(held);
        assert_eq!(state.index.pins(id, Tier::Host), 1, "it is left to the holder");
        drop(state);

        assert!(shared.left.is_empty(), "the holder looks again, though nobody takes the lock after it");
        assert!(matches!(for_a_slot.as_mut().poll(&mut context), Poll::Ready(Ok(_))), "its slot is granted");
        drop(filling);
    }

    #[test]
    fn what_is_left_under_a_broken_lock_is_dropped() {
        let key = BlockKey::new([1; 32]);
        let shared = with_a_block(&key);
        let held = pin(&shared, &key);
        let broken = catch_unwind(AssertUnwindSafe(|| {
            let _state = shared.lock();
            drop(held);
            panic!("an invariant is broken");
        }));
        assert!(broken.is_err() && shared.left.is_empty());
        assert_eq!(Arc::strong_count(&shared), 1, "nothing that was left holds the state");
    }

    #[test]
    fn waiters_that_have_left_are_dropped_after_the_unlock() {
        let key = BlockKey::new([1; 32]);
        let shared = with_a_block(&key);
        let mut state = shared.lock();
        let id = state.index.find(&key).expect("stored");
        // Its waiter leaves at once. Before tokio 1.50 the channel keeps the waker of a receiver that is gone.
        state.flights.begin((&key, Tier::Disk), id, Class::Background, Few::one(oneshot::channel().0), false);
        let joined = state.flights.join(&key, Tier::Disk, 1);
        assert!(matches!(joined, Joined::Waiting(_)), "the one that left made room");
        assert_eq!(state.flights.gone.len(), 1, "it is not dropped under the lock");
        drop(joined);
        assert!(matches!(state.flights.join(&key, Tier::Disk, 1), Joined::Waiting(_)));
        assert_eq!(state.flights.gone.len(), 2);
        drop(state);
        assert!(shared.lock().flights.gone.is_empty(), "the unlock dropped them");
    }
}
