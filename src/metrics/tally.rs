//! A count that holders of a lock change without atomic additions.

use std::sync::atomic::{AtomicU64, Ordering};

/// What only the holder of the lock has.
pub(crate) trait Held {}

/// A count that the holder of one certain lock changes, and others as well.
///
/// An atomic addition costs as much as dozens of other instructions. The holder of the lock has no rival, so it loads,
/// adds and stores.
#[derive(Default)]
pub(crate) struct Tally {
    /// Changed by the holder of the lock; wraps.
    locked: AtomicU64,
    /// Changed by all others.
    unlocked: AtomicU64,
}

impl Tally {
    #[inline]
    pub(crate) fn add(&self, n: u64) {
        self.unlocked.fetch_add(n, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn add_locked(&self, n: u64, _held: &mut impl Held) {
        self.locked.store(self.locked.load(Ordering::Relaxed).wrapping_add(n), Ordering::Release);
    }

    /// Subtracts what was added before, by either way.
    #[inline]
    pub(crate) fn sub_locked(&self, n: u64, held: &mut impl Held) {
        self.add_locked(n.wrapping_neg(), held);
    }

    /// The count. It is never below zero: whoever sees a subtraction sees the addition before it.
    pub(crate) fn get(&self) -> u64 {
        let locked = self.locked.load(Ordering::Acquire);
        locked.wrapping_add(self.unlocked.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    struct State;

    impl Held for State {}

    #[test]
    fn nothing_that_threads_count_is_lost() {
        const ROUNDS: u64 = 100_000;
        let (tally, lock) = (Tally::default(), Mutex::new(State));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..ROUNDS {
                        tally.add(3);
                        let mut held = lock.lock().expect("no thread panics");
                        tally.sub_locked(2, &mut *held);
                        tally.add_locked(1, &mut *held);
                    }
                });
            }
        });
        assert_eq!(tally.get(), 4 * ROUNDS * 2);
    }
}
