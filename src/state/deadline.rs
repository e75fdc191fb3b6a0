//! Deadlines without a clock: callers count the ticks of the reactor's task.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use super::{Locked, Shared};
use crate::{block::Tier, shield::log};

/// Looks at the clock for each deadline that passes: a waiter waits at most a quarter longer than it should.
pub(crate) const LOOKS_PER_DEADLINE: u32 = 4;

/// Overdue movements that are marked under one lock, and waiters that are told in one turn.
const OVERDUE_AT_ONCE: usize = 128;

impl Shared {
    /// How long a movement may take.
    pub(crate) fn deadline(&self) -> Duration {
        Duration::from_millis(self.config.limits.deadline_ms)
    }

    /// Answers the waiters of the first `begun` movements; true if some of these are still in flight.
    pub(crate) async fn give_up_overdue(self: &Arc<Self>, begun: u64) -> bool {
        let (mut told, held) = (0, Tier::ALL.map(|tier| self.held_slots(tier)));
        loop {
            let (waiters, is_all) = {
                let mut state = self.lock();
                let before = state.flights.overdue(Tier::Disk);
                let taken = state.flights.take_overdue(begun, OVERDUE_AT_ONCE);
                if state.flights.overdue(Tier::Disk) > before {
                    // Of write-backs others begin in their place.
                    self.write_back.notify_one();
                }
                taken
            };
            told += waiters.len();
            for (at, (waiter, slot_wanted)) in waiters.into_iter().enumerate() {
                if at > 0 && at % OVERDUE_AT_ONCE == 0 {
                    crate::io::yield_now().await;
                }
                let error = match slot_wanted {
                    Some(tier) => self.slot_timeout(tier, held[tier as usize]),
                    None => self.timeout("a movement"),
                };
                drop(waiter.send(Err(error)));
            }
            if is_all {
                break;
            }
            crate::io::yield_now().await;
        }
        if told > 0 {
            log(|| tracing::warn!(waiters = told, deadline = ?self.deadline(), "movements are overdue"));
        }
        self.lock().flights.any_overdue()
    }

    /// Whether the clock is to be watched on: while a movement `is_active` on the reactor, a flight is in flight, or a
    /// request waits for a slot, for room or the remote tier. Who begins to later wakes the task again.
    pub(crate) fn is_watched(self: &Arc<Self>, is_active: bool) -> bool {
        let mut state = self.lock();
        let is_remote_awaited = || self.remote.as_ref().is_some_and(|remote| remote.has_waiters());
        let is_waited = state.flights.len() > 0 || Tier::ALL.iter().any(|&tier| state.has_waiters(tier));
        state.is_watched = is_active || is_waited || is_remote_awaited() || self.is_room_awaited();
        state.is_watched
    }

    /// Number of deadline ticks so far. Only the reactor reads a clock.
    pub(crate) fn looks(&self) -> u64 {
        self.looks.load(Ordering::Relaxed)
    }

    /// True if a waiter since `looks` is past its deadline.
    pub(crate) fn is_overdue(&self, since: u64) -> bool {
        self.looks() - since > u64::from(LOOKS_PER_DEADLINE)
    }
}

impl Locked<'_> {
    /// A movement that no task of the reactor has begun is in flight from now on.
    pub(crate) fn watch(&mut self) {
        if !std::mem::replace(&mut self.is_watched, true) {
            self.shared().watch.notify_one();
        }
    }
}
