//! One caller at a time computes a block, and tells those who wait for it.
//!
//! The end of a computation wakes every caller that waits: with the block, or to look again. No right passes from one
//! waiter to the next, so a waiter that is not polled holds nobody up.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use bytes::Bytes;
use tokio::sync::oneshot;

use crate::{block::BlockKey, fork::Home, sync::Mutex};

/// Blocks that callers compute. Nothing of a caller's is dropped or woken under its lock.
pub(super) struct Computations {
    by_key: Mutex<HashMap<BlockKey, Computation>>,
    home: Home,
}

struct Computation {
    stage: Stage,
    /// The block was removed since the computation began. Shared with its [`Computing`], and no other computation.
    is_removed: Arc<AtomicBool>,
}

enum Stage {
    /// With the callers that wait. A sender that is dropped has its waiter look again.
    Computing(Vec<oneshot::Sender<Bytes>>),
    /// The block may not be in the cache yet.
    Computed(Bytes),
}

/// What a caller that misses a block does.
pub(super) enum Joined<'a> {
    /// It computes the block.
    Computes(Computing<'a>),
    /// It waits for the block. The end of the channel says that it has to look again.
    Waits(oneshot::Receiver<Bytes>),
    /// It has the block, which is being stored.
    Computed(Bytes),
    /// As many callers as are permitted want the block already.
    Full,
}

/// The right to compute a block, of one caller at a time. To drop it without a block makes the waiters look again.
pub(super) struct Computing<'a> {
    computations: &'a Computations,
    key: BlockKey,
    is_removed: Arc<AtomicBool>,
}

impl Computations {
    pub(super) fn new() -> Self {
        Computations { by_key: Mutex::new(HashMap::new()), home: Home::here() }
    }

    /// Joins the callers that want a missing block, at most `callers_max`.
    pub(super) fn join(&self, key: &BlockKey, callers_max: usize) -> Joined<'_> {
        // Dropped after the unlock: a sender drops the waker of its waiter.
        let mut gone = Vec::new();
        let mut computations = self.by_key.lock();
        match computations.entry(*key) {
            Entry::Vacant(vacant) => {
                let is_removed = Arc::<AtomicBool>::default();
                let stage = Stage::Computing(Vec::new());
                vacant.insert(Computation { stage, is_removed: Arc::clone(&is_removed) });
                Joined::Computes(Computing { computations: self, key: *key, is_removed })
            }
            Entry::Occupied(mut present) => match &mut present.get_mut().stage {
                Stage::Computed(bytes) => Joined::Computed(bytes.clone()),
                Stage::Computing(waiters) => {
                    // One computes.
                    if waiters.len() + 1 >= callers_max {
                        gone.extend(waiters.extract_if(.., |waiter| waiter.is_closed()));
                    }
                    if waiters.len() + 1 >= callers_max {
                        return Joined::Full;
                    }
                    let (sender, receiver) = oneshot::channel();
                    waiters.push(sender);
                    Joined::Waits(receiver)
                }
            },
        }
    }

    /// The block is about to be removed: what is being computed goes to its own caller alone and is not stored, and the
    /// waiters look again.
    pub(super) fn remove(&self, key: &BlockKey) {
        let removed = self.by_key.lock().remove(key);
        removed.iter().for_each(Computation::end);
    }

    /// As [`remove`](Self::remove), for every block.
    pub(super) fn clear(&self) {
        let removed = std::mem::take(&mut *self.by_key.lock());
        removed.values().for_each(Computation::end);
    }
}

impl Computation {
    fn end(&self) {
        self.is_removed.store(true, Ordering::Release);
    }
}

impl Computing<'_> {
    /// Gives the block to the callers that wait, and to those that come before this is dropped.
    pub(super) fn computed(&self, bytes: &Bytes) {
        let computed = Stage::Computed(bytes.clone());
        let before = {
            let mut computations = self.computations.by_key.lock();
            let own = computations.get_mut(&self.key).filter(|found| self.is_of(found));
            own.map(|own| std::mem::replace(&mut own.stage, computed))
        };
        // After the unlock: wakers are callers' code.
        if let Some(Stage::Computing(waiters)) = before {
            waiters.into_iter().for_each(|waiter| drop(waiter.send(bytes.clone())));
        }
    }

    /// True if the block was removed since the computation began.
    pub(super) fn is_removed(&self) -> bool {
        self.is_removed.load(Ordering::Acquire)
    }

    fn is_of(&self, computation: &Computation) -> bool {
        Arc::ptr_eq(&self.is_removed, &computation.is_removed)
    }
}

impl Drop for Computing<'_> {
    fn drop(&mut self) {
        // In a forked child another thread of the parent may hold the lock for ever, and the waiters are the parent's.
        if !self.computations.home.is_here() {
            return;
        }
        let own = self.computations.by_key.lock_unless_poisoned().and_then(|mut computations| {
            let is_own = computations.get(&self.key).is_some_and(|found| self.is_of(found));
            if is_own { computations.remove(&self.key) } else { None }
        });
        // After the unlock: wakers, and the drop of a block that a caller computed, are callers' code.
        drop(own);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use futures_util::FutureExt;

    use super::*;

    const KEY: BlockKey = BlockKey::new([1; 32]);

    fn computes(computations: &Computations) -> Computing<'_> {
        match computations.join(&KEY, 9) {
            Joined::Computes(computing) => computing,
            _ => panic!("another caller computes"),
        }
    }

    fn waits(computations: &Computations) -> oneshot::Receiver<Bytes> {
        match computations.join(&KEY, 9) {
            Joined::Waits(receiver) => receiver,
            _ => panic!("nobody computes"),
        }
    }

    /// What a waiter has by now: `None` if it still waits.
    fn told(receiver: oneshot::Receiver<Bytes>) -> Option<Option<Bytes>> {
        receiver.now_or_never().map(Result::ok)
    }

    #[test]
    fn the_end_of_a_computation_wakes_every_waiter_and_leaves_nothing() {
        let computations = Computations::new();
        let computing = computes(&computations);
        let waiters = [(); 3].map(|()| waits(&computations));
        drop(computing);
        assert!(waiters.into_iter().all(|waiter| told(waiter) == Some(None)), "each looks again");
        assert!(computations.by_key.lock().is_empty());
        let computing = computes(&computations);
        let waiter = waits(&computations);
        computing.computed(&Bytes::from_static(b"block"));
        assert_eq!(told(waiter), Some(Some(Bytes::from_static(b"block"))));
        assert!(matches!(computations.join(&KEY, 2), Joined::Computed(_)), "until it is stored");
        drop(computing);
        assert!(computations.by_key.lock().is_empty());
    }

    #[test]
    fn a_removal_ends_the_computation_for_all_but_its_own_caller() {
        removal_ends_a_computation(|computations| computations.remove(&KEY));
        removal_ends_a_computation(Computations::clear);
    }

    fn removal_ends_a_computation(remove: fn(&Computations)) {
        let computations = Computations::new();
        let computing = computes(&computations);
        let waiter = waits(&computations);
        remove(&computations);
        assert!(computing.is_removed());
        assert_eq!(told(waiter), Some(None), "it looks again");
        let later = computes(&computations);
        computing.computed(&Bytes::from_static(b"before"));
        let waiter = waits(&computations);
        drop(computing);
        assert!(!later.is_removed());
        later.computed(&Bytes::from_static(b"after"));
        assert_eq!(told(waiter), Some(Some(Bytes::from_static(b"after"))));
        remove(&computations);
        drop((computes(&computations), later));
        assert!(computations.by_key.lock().is_empty());
    }

    #[test]
    fn callers_that_have_left_make_room() {
        let computations = Computations::new();
        let computing = computes(&computations);
        let (left, stays) = (waits(&computations), waits(&computations));
        assert!(matches!(computations.join(&KEY, 3), Joined::Full));
        drop(left);
        assert!(matches!(computations.join(&KEY, 3), Joined::Waits(_)));
        drop(computing);
        assert_eq!(told(stays), Some(None));
    }

    #[test]
    fn a_forked_child_that_drops_a_turn_takes_no_lock() {
        let computations = Computations { by_key: Mutex::new(HashMap::new()), home: Home::elsewhere() };
        let computing = computes(&computations);
        std::thread::scope(|scope| {
            let held = computations.by_key.lock();
            let (ended, end) = std::sync::mpsc::channel();
            scope.spawn(move || {
                drop(computing);
                _ = ended.send(());
            });
            let has_ended = end.recv_timeout(std::time::Duration::from_secs(60)).is_ok();
            drop(held);
            assert!(has_ended, "it waits for a lock that a thread of its parent holds");
        });
    }

    /// A block of a caller whose drop comes back to the table.
    struct Returns(Arc<Computations>, Arc<AtomicU32>);

    impl AsRef<[u8]> for Returns {
        fn as_ref(&self) -> &[u8] {
            &[7]
        }
    }

    impl Drop for Returns {
        fn drop(&mut self) {
            self.0.remove(&BlockKey::new([2; 32]));
            self.1.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn what_callers_computed_is_dropped_without_the_lock() {
        let (computations, dropped) = (Arc::new(Computations::new()), Arc::<AtomicU32>::default());
        let block = || Bytes::from_owner(Returns(Arc::clone(&computations), Arc::clone(&dropped)));
        let computing = computes(&computations);
        computing.computed(&block());
        drop(computing);
        let computing = computes(&computations);
        computing.computed(&block());
        computations.remove(&KEY);
        computing.computed(&block());
        drop(computing);
        assert_eq!(dropped.load(Ordering::Relaxed), 3);
    }
}
