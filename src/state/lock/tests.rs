use std::{
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    task::{Context, Poll, Waker},
};

use tokio::sync::oneshot;

use super::{super::deferred::WORKS_PER_LOCK, DeferredWork, LOCKS_HELD, Locked, TURNS_MAX, Work};
use crate::{
    block::{BlockKey, Route, Tier},
    config::Config,
    error::Error,
    state::{Class, Few, Pin, Purpose, Shared},
};

const BYTES: usize = 4096;

/// A cache of host memory alone, with one block.
fn with_a_block(key: &BlockKey) -> Arc<Shared> {
    let shared = Shared::of_test(Config::default().block_bytes(BYTES).host_blocks(2));
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
        state.flights.begin((&key, Tier::Disk), id, Class::Awaited, Few::from([sender]), false);
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
    assert_eq!(state.index.pins(id, Tier::Host), 1, "it is deferred to the holder");
    drop(state);

    assert!(shared.deferred.is_empty(), "the holder looks again, though nobody takes the lock after it");
    assert!(matches!(for_a_slot.as_mut().poll(&mut context), Poll::Ready(Ok(_))), "its slot is granted");
    drop(filling);
}

#[test]
fn what_is_deferred_under_a_broken_lock_is_dropped() {
    let key = BlockKey::new([1; 32]);
    let shared = with_a_block(&key);
    let held = pin(&shared, &key);
    let noted = Arc::new(AtomicU32::new(0));
    let broken = catch_unwind(AssertUnwindSafe(|| {
        let _state = shared.lock();
        drop(held);
        shared.run_or_defer(Noted(Arc::clone(&noted)));
        panic!("an invariant is broken");
    }));
    assert!(broken.is_err());
    assert_eq!(noted.swap(0, Ordering::Relaxed), DROPPED, "not run, and not under the lock");
    assert_eq!(Arc::strong_count(&shared), 1, "nothing that was deferred holds the state");
}

#[test]
fn waiters_that_have_left_are_dropped_after_the_unlock() {
    let key = BlockKey::new([1; 32]);
    let shared = with_a_block(&key);
    let mut state = shared.lock();
    let id = state.index.find(&key).expect("stored");
    // Its waiter leaves at once. Before tokio 1.50 the channel keeps the waker of a receiver that is gone.
    state.flights.begin((&key, Tier::Disk), id, Class::Background, Few::from([oneshot::channel().0]), false);
    let joined = state.flights.join(&key, Tier::Disk, 1);
    assert!(joined.is_ok(), "the one that left made room");
    assert_eq!(state.flights.gone.len(), 1, "it is not dropped under the lock");
    drop(joined);
    assert!(state.flights.join(&key, Tier::Disk, 1).is_ok());
    assert_eq!(state.flights.gone.len(), 2);
    drop(state);
    assert!(shared.lock().flights.gone.is_empty(), "the unlock dropped them");
}

/// Work that notes what becomes of it, and whether the lock was held when it was dropped.
struct Noted(Arc<AtomicU32>);

const RUN: u32 = 1;
const ANSWERED: u32 = 2;
const DROPPED: u32 = 4;
const DROPPED_UNDER_LOCK: u32 = 8;

impl DeferredWork for Noted {
    fn run(&mut self, _state: &mut Locked<'_>) {
        self.0.fetch_or(RUN, Ordering::Relaxed);
    }

    fn answer(&mut self) {
        self.0.fetch_or(ANSWERED, Ordering::Relaxed);
    }
}

impl Drop for Noted {
    fn drop(&mut self) {
        let how = if LOCKS_HELD.get() > 0 { DROPPED_UNDER_LOCK } else { DROPPED };
        self.0.fetch_or(how, Ordering::Relaxed);
    }
}

#[test]
fn work_runs_under_the_lock_and_is_answered_after_it() {
    let shared = with_a_block(&BlockKey::new([1; 32]));
    let noted = Arc::new(AtomicU32::new(0));
    let state = shared.lock();
    shared.run_or_defer(Noted(Arc::clone(&noted)));
    assert_eq!(noted.load(Ordering::Relaxed), 0, "another has the lock");
    drop(state);
    assert_eq!(noted.swap(0, Ordering::Relaxed), RUN | ANSWERED | DROPPED, "its holder looked again");
    shared.run_or_defer(Noted(Arc::clone(&noted)));
    assert_eq!(noted.load(Ordering::Relaxed), RUN | ANSWERED | DROPPED, "nobody has the lock");
}

#[test]
fn work_that_ran_before_a_panic_is_dropped_after_the_unlock() {
    let shared = with_a_block(&BlockKey::new([1; 32]));
    let noted = Arc::new(AtomicU32::new(0));
    shared.deferred.defer(Work::Other(Box::new(Noted(Arc::clone(&noted)))));
    let broken = catch_unwind(AssertUnwindSafe(|| {
        let _state = shared.lock();
        panic!("an invariant is broken");
    }));
    assert!(broken.is_err());
    assert_eq!(noted.swap(0, Ordering::Relaxed), RUN | DROPPED, "who waits for it is told that the cache is closed");
    shared.run_or_defer(Noted(Arc::clone(&noted)));
    assert_eq!(noted.load(Ordering::Relaxed), DROPPED, "nobody will look");
}

/// Work that breaks an invariant.
struct Breaks(#[expect(dead_code, reason = "it notes its drop")] Noted);

impl DeferredWork for Breaks {
    fn run(&mut self, _state: &mut Locked<'_>) {
        panic!("an invariant is broken");
    }

    fn answer(&mut self) {}
}

#[test]
fn work_that_panics_is_dropped_after_the_unlock() {
    let shared = with_a_block(&BlockKey::new([1; 32]));
    let noted = Arc::new(AtomicU32::new(0));
    let broken = catch_unwind(AssertUnwindSafe(|| {
        let state = shared.lock();
        shared.run_or_defer(Breaks(Noted(Arc::clone(&noted))));
        drop(state);
    }));
    assert!(broken.is_err(), "its holder looked again");
    assert_eq!(noted.load(Ordering::Relaxed), DROPPED, "not under the lock");
}

#[test]
fn a_waiter_that_no_movement_has_is_dropped_where_the_lock_breaks() {
    let shared = with_a_block(&BlockKey::new([1; 32]));
    let (waiter, mut answer) = oneshot::channel();
    let broken = catch_unwind(AssertUnwindSafe(|| {
        let mut state = shared.lock();
        state.drop_after_unlock(waiter);
        panic!("an invariant is broken");
    }));
    assert!(broken.is_err());
    assert!(answer.try_recv().is_err_and(|error| error == oneshot::error::TryRecvError::Closed), "its caller is told");
}

/// Work that is followed by more of it.
struct Repeated {
    shared: Arc<Shared>,
    more: u32,
}

impl DeferredWork for Repeated {
    fn run(&mut self, _state: &mut Locked<'_>) {}

    fn answer(&mut self) {
        if self.more > 0 {
            // As another thread does that finds the lock taken.
            let next = Repeated { shared: Arc::clone(&self.shared), more: self.more - 1 };
            self.shared.deferred.defer(Work::Other(Box::new(next)));
        }
    }
}

#[test]
fn what_comes_while_a_thread_serves_is_left_to_the_reactor_while_there_is_one() {
    let shared = with_a_block(&BlockKey::new([1; 32]));
    let defer_many = || {
        let state = shared.lock();
        shared.run_or_defer(Repeated { shared: Arc::clone(&shared), more: 2 * TURNS_MAX });
        drop(state);
    };
    defer_many();
    assert!(!shared.deferred.is_empty(), "its thread has work of its own");
    let mut raised = pin!(shared.raised.notified());
    assert!(raised.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready(), "the reactor looks next");
    drop(shared.lock());
    shared.end_reactor();
    defer_many();
    assert!(shared.deferred.is_empty(), "nobody would look");
}

#[test]
fn one_lock_does_a_part_of_many_works_and_the_unlock_all_others() {
    let shared = with_a_block(&BlockKey::new([1; 32]));
    let noted: Vec<_> = (0..3 * WORKS_PER_LOCK).map(|_| Arc::new(AtomicU32::new(0))).collect();
    let count = |what| noted.iter().filter(|noted| noted.load(Ordering::Relaxed) & what != 0).count();
    for noted in &noted {
        shared.deferred.defer(Work::Other(Box::new(Noted(Arc::clone(noted)))));
    }
    let state = shared.lock();
    assert_eq!((count(RUN), count(ANSWERED)), (WORKS_PER_LOCK, 0));
    drop(state);
    assert_eq!((count(RUN), count(ANSWERED)), (noted.len(), noted.len()));
}

/// Work that takes a host slot, if there is one.
struct Takes(Arc<AtomicU32>);

impl DeferredWork for Takes {
    fn run(&mut self, state: &mut Locked<'_>) {
        if let Some(filling) = state.acquire(Tier::Host) {
            filling.release(state);
            self.0.fetch_or(RUN, Ordering::Relaxed);
        }
    }

    fn answer(&mut self) {}
}

#[test]
fn deferred_work_takes_no_slot_that_a_request_waits_for() {
    let key = BlockKey::new([1; 32]);
    let shared = with_a_block(&key);
    let held = pin(&shared, &key);
    let filling = shared.lock().acquire(Tier::Host).expect("the other slot");
    let mut waiting = pin!(shared.acquire(Tier::Host, Purpose::Call));
    let mut context = Context::from_waker(Waker::noop());
    assert!(waiting.as_mut().poll(&mut context).is_pending(), "both slots are held");

    let (state, took) = (shared.lock(), Arc::new(AtomicU32::new(0)));
    drop(held);
    shared.run_or_defer(Takes(Arc::clone(&took)));
    drop(state);

    assert!(matches!(waiting.as_mut().poll(&mut context), Poll::Ready(Ok(_))), "it came first");
    assert_eq!(took.load(Ordering::Relaxed), 0, "the slot that came free under the same lock was granted");
    drop(filling);
}
