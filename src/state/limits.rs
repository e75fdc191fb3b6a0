//! The errors past a limit, which are counted. A holder of the lock calls the `_locked` ones.

use super::{Shared, State};
use crate::error::Error;

impl Shared {
    pub(crate) fn busy(&self, what: &'static str, limit: u64, setting: &'static str) -> Error {
        self.metrics.busy.add(1);
        Error::busy(what, limit, setting)
    }

    pub(super) fn busy_locked(
        &self,
        state: &mut State,
        what: &'static str,
        limit: u64,
        setting: &'static str,
    ) -> Error {
        state.count(&self.metrics.busy, 1);
        Error::busy(what, limit, setting)
    }

    pub(crate) fn timeout(&self, what: &'static str) -> Error {
        self.metrics.timeouts.add(1);
        Error::timeout(what, self.deadline(), None)
    }

    pub(super) fn timeout_locked(&self, state: &mut State, what: &'static str) -> Error {
        state.count(&self.metrics.timeouts, 1);
        Error::timeout(what, self.deadline(), None)
    }
}
