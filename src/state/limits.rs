//! The errors past a limit, which are counted.

use super::{Locked, NoWait, Shared, rooms::COMMANDS_MAX};
use crate::error::Error;

impl Shared {
    pub(crate) fn busy(&self, what: &'static str, limit: u64, setting: &'static str) -> Error {
        self.metrics.busy.add(1);
        Error::busy(what, limit, setting)
    }

    /// The reactor's queue is full.
    pub(crate) fn busy_with_commands(&self) -> Error {
        let max = self.commands.max();
        self.busy("queued commands", max.into(), if max < COMMANDS_MAX { "movements_max" } else { "none" })
    }

    pub(crate) fn timeout(&self, what: &'static str) -> Error {
        self.metrics.timeouts.add(1);
        Error::timeout(what, self.deadline(), None)
    }
}

/// The recorder of metrics is told after the unlock.
impl Locked<'_> {
    pub(super) fn busy(&mut self, what: &'static str, limit: u64, setting: &'static str) -> Error {
        self.count(&self.shared().metrics.busy, 1);
        Error::busy(what, limit, setting)
    }

    pub(super) fn timeout(&mut self, what: &'static str) -> Error {
        self.count(&self.shared().metrics.timeouts, 1);
        Error::timeout(what, self.shared().deadline(), None)
    }

    /// The error of waiters that the movement of a block does not take.
    pub(super) fn refused_waiter(&mut self, why: NoWait, waiters_max: u32) -> Error {
        match why {
            NoWait::Full => self.busy("waiters for one block", u64::from(waiters_max), "waiters_max"),
            _ => self.timeout("a movement of the block that is overdue"),
        }
    }
}
