//! Pins whose owners were dropped while another thread had the lock. Its next holder ends them.
//!
//! A lease is dropped as often as a block is fetched, and its drop has no result. To wait for the lock would cost its
//! thread more than the drop itself, and all others another turn. A pin is not left while a request waits for a slot:
//! its end may free one, which is granted at the unlock.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::{block::Tier, index::EntryId, sync::Mutex};

/// Pins that are left at most: their end takes the next holder no more than some microseconds.
const PINS_MAX: usize = 32;

/// A pin that ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EndedPin {
    pub(super) id: EntryId,
    pub(super) tier: Tier,
    /// It is counted as a lease.
    pub(super) is_leased: bool,
}

/// The pins that were left.
pub(super) struct LeftPins {
    left: Mutex<Left>,
    /// How many there are: read without their lock, by each holder of the state's lock.
    count: AtomicUsize,
}

struct Left {
    pins: Vec<EndedPin>,
    /// A request waits for a slot.
    is_slot_awaited: bool,
}

impl LeftPins {
    pub(super) fn new() -> Self {
        let left = Left { pins: Vec::with_capacity(PINS_MAX), is_slot_awaited: false };
        LeftPins { left: Mutex::new(left), count: AtomicUsize::new(0) }
    }

    /// Leaves a pin to the next holder of the state's lock. False if the caller must take that lock and end it.
    pub(super) fn leave(&self, pin: EndedPin) -> bool {
        let Some(mut left) = self.left.lock_unless_poisoned() else { return false };
        if left.is_slot_awaited || left.pins.len() == PINS_MAX {
            return false;
        }
        left.pins.push(pin);
        self.count.store(left.pins.len(), Ordering::Relaxed);
        true
    }

    /// True if none is left. Of those that other threads leave at the same time some may be missed.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// Gives the pins that were left to `end`.
    pub(super) fn take(&self, end: impl FnMut(EndedPin)) {
        let mut left = self.left.lock();
        left.pins.drain(..).for_each(end);
        self.count.store(0, Ordering::Relaxed);
    }

    /// Notes whether a request waits for a slot, for a holder of the state's lock. If one does, no pin is left from now
    /// on, and those that were are to be [taken](Self::take) now.
    pub(super) fn await_slot(&self, is_awaited: bool) {
        self.left.lock().is_slot_awaited = is_awaited;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_are_left_up_to_a_limit_and_not_while_a_slot_is_awaited() {
        let left = LeftPins::new();
        let pin =
            |n: usize| EndedPin { id: EntryId::from_u32(n as u32), tier: Tier::Host, is_leased: n.is_multiple_of(2) };
        assert!((0..PINS_MAX).all(|n| left.leave(pin(n))) && !left.leave(pin(99)));
        left.await_slot(true);
        let mut taken = Vec::new();
        left.take(|pin| taken.push(pin));
        assert_eq!(taken, (0..PINS_MAX).map(pin).collect::<Vec<_>>());
        assert!(left.is_empty() && !left.leave(pin(1)), "who waits for a slot gets it at the unlock");
        left.await_slot(false);
        assert!(left.leave(pin(1)) && !left.is_empty());
    }
}
