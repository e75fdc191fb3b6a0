//! Reports refusals: the caller of a store gets its own, a sync or the close reports the others.

use std::sync::Arc;

use super::Shared;
use crate::{
    block::{BlockKey, Tier},
    config::WritePolicy,
    error::{Error, Result},
};

impl Shared {
    /// Forgets a refusal whose error the caller of the store has taken. Not earlier: the answer may be dropped on its
    /// way.
    pub(crate) fn forget_reported_one(self: &Arc<Self>, key: &BlockKey, error: &Error) {
        if says_refused(error) {
            self.lock().refusals.forget(key);
        }
    }

    /// Forgets the refusals whose results the caller of the stores has.
    pub(crate) fn forget_reported(self: &Arc<Self>, keys: &[BlockKey], results: &[Result<bool>]) {
        for (key, result) in keys.iter().zip(results) {
            result.as_ref().err().into_iter().for_each(|error| self.forget_reported_one(key, error));
        }
    }

    /// Notes the error of a store that its caller does not get, unless the block is on disk all the same, or the policy
    /// promises no write of it.
    pub(crate) fn note_untold(self: &Arc<Self>, key: &BlockKey, error: &Error) {
        let disk = &self.config.disk;
        let is_promised = matches!(disk.write_policy, WritePolicy::WriteThrough | WritePolicy::WriteBack);
        // A closed cache has no sync, and its close covers what was stored before.
        if disk.paths.is_empty() || !is_promised || matches!(error, Error::Closed) {
            return;
        }
        let mut state = self.lock();
        let is_on_disk = state.index.find(key).is_some_and(|id| state.index.slot(id, Tier::Disk).is_some());
        if !is_on_disk {
            state.refusals.add(*key, error.clone());
        }
    }

    /// Begins a sync, or the close.
    pub(crate) fn begin_report(self: &Arc<Self>) -> Reporter {
        let began = self.lock().refusals.begin();
        Reporter { shared: Some(Arc::clone(self)), began }
    }

    /// As [`begin_report`](Self::begin_report), for a caller that leaves the report to another one. `None` in a forked
    /// child, and after a panic under the lock.
    pub(crate) fn begin_covering(self: &Arc<Self>) -> Option<Reporter> {
        let shared = Arc::clone(self).at_home()?;
        let began = shared.lock_unless_broken()?.refusals.begin();
        Some(Reporter { shared: Some(shared), began })
    }
}

/// True for the errors that a store returns if the disk refused its block. A store that failed for another reason (a
/// timeout, a closed cache, a failed copy) says nothing about the block of an earlier store.
fn says_refused(error: &Error) -> bool {
    matches!(error, Error::Io { .. } | Error::Refused { .. } | Error::Unavailable { .. })
}

/// The reporter of a sync or of the close, created when it begins.
pub(crate) struct Reporter {
    /// `None` once it has reported.
    shared: Option<Arc<Shared>>,
    began: u64,
}

impl Reporter {
    /// Returns the refusals that had not been reported when this sync began; the caller reports them.
    pub(crate) fn report(mut self) -> Result<()> {
        let Some(shared) = self.shared.take() else { return Ok(()) };
        let report = shared.lock().refusals.report(self.began);
        let Some((count, last)) = report else { return Ok(()) };
        let blocks = if count == 1 { "block was" } else { "blocks were" };
        Err(Error::refused(format!(
            "{count} {blocks} stored and refused by the disk, which this reports once; the last because: {last}"
        )))
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.take().and_then(Shared::at_home)
            && let Some(mut state) = shared.lock_unless_broken()
        {
            state.refusals.end(self.began);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_refusal_itself_tells_of_a_refusal() {
        let io = Error::io("write", "a store", std::io::ErrorKind::StorageFull.into());
        assert!(says_refused(&io) && says_refused(&Error::refused("read-only")));
        let copy = Error::copy("memcpy", "a reason");
        assert!(!says_refused(&Error::Closed) && !says_refused(&copy));
    }
}
