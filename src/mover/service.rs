//! Whether the disk and the device tier may be used, and when they may not be any longer.
//!
//! A disk that fails is not asked for ever: after a run of failures without a success between them its tier is taken
//! out of service, with a reason, until the cache is opened again. Failing writes end the writing only: what is
//! on such a disk can be read as long as it can be read.

use std::{cell::Cell, io};

use super::shared::Shared;
use crate::{
    block::{FileId, OpKind, Tier},
    error::Error,
    io::is_shortage,
};

/// What the disk tier is good for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum DiskService {
    /// Reads and writes.
    #[default]
    Full,
    /// Reads, for the reason given.
    ReadOnly(String),
    /// Nothing, for the reason given.
    Retired(String),
}

impl DiskService {
    pub(crate) fn reads(&self) -> bool {
        !matches!(self, DiskService::Retired(_))
    }

    pub(crate) fn writes(&self) -> bool {
        *self == DiskService::Full
    }

    /// Why it does not do all that it should.
    pub(crate) fn reason(&self) -> Option<&str> {
        match self {
            DiskService::Full => None,
            DiskService::ReadOnly(reason) | DiskService::Retired(reason) => Some(reason),
        }
    }

    /// An error for those who wanted to write.
    pub(crate) fn check_writes(&self) -> Result<(), Error> {
        match self.reason() {
            None => Ok(()),
            Some(reason) => Err(Error::Unavailable { tier: "disk", reason: reason.to_owned() }),
        }
    }
}

/// Failures in a row of one file, by kind of operation.
#[derive(Default)]
pub(super) struct Failures([Cell<u32>; 3]);

impl Failures {
    /// Counts the end of an operation; the number of failures in a row when it was one.
    fn count(&self, kind: OpKind, result: &io::Result<()>) -> Option<u32> {
        let count = &self.0[kind as usize];
        match result {
            Ok(()) => {
                count.set(0);
                None
            }
            Err(error) if !blames_disk(error) => None,
            Err(_) => {
                count.set(count.get().saturating_add(1));
                Some(count.get())
            }
        }
    }
}

/// False where an operation failed for lack of space or of the machine's resources, or because of the memory that it
/// was given: that says nothing of the disk, nor of the block.
pub(super) fn blames_disk(error: &io::Error) -> bool {
    let elsewhere = [libc::ENOSPC, libc::EDQUOT, libc::EFAULT];
    !is_shortage(error) && error.raw_os_error().is_none_or(|errno| !elsewhere.contains(&errno))
}

impl Shared {
    /// Takes the disk tier out of service. Host and device keep serving.
    pub(crate) fn retire_disk(&self, reason: String) {
        self.lower_service(DiskService::Retired(reason));
    }

    /// Takes the device tier out of service: what is on the device is out of reach. Host and disk keep serving.
    pub(super) fn retire_device(&self, reason: String) {
        let mut state = self.lock();
        if state.device_retired.is_some() {
            return;
        }
        state.device_retired = Some(reason.clone());
        // What is leased goes when its last lease does.
        while let Some(victim) = state.index.victim(Tier::Device) {
            let slot = state.index.evict(victim, Tier::Device);
            state.push_free(Tier::Device, slot);
        }
        let refused = state.slot_requests.take_all(Tier::Device);
        let error = state.check_service(Tier::Device);
        drop(state);
        tracing::error!(reason, "the device tier is out of service");
        refused.refuse(&error.expect_err("the device tier was just taken out of service"));
    }

    /// Lowers the service of the disk tier; it never rises again.
    fn lower_service(&self, to: DiskService) {
        let mut state = self.lock();
        let lower = state.disk_service.writes() || (state.disk_service.reads() && !to.reads());
        if lower {
            state.disk_service = to.clone();
        }
        let refused = state.slot_requests.take_all(Tier::Disk);
        let error = state.check_service(Tier::Disk);
        drop(state);
        refused.refuse(&error.expect_err("the disk tier takes no blocks by now"));
        if lower {
            let reason = to.reason().expect("lower than full");
            let what =
                if to.reads() { "the disk tier takes no more blocks" } else { "the disk tier is out of service" };
            tracing::error!(reason, "{what}");
        }
    }

    /// Counts the end of an operation on a file, and draws the conclusion.
    pub(super) fn account(&self, failures: &[Failures], file: FileId, kind: OpKind, result: &io::Result<()>) {
        let Some(count) = failures[usize::from(file.0)].count(kind, result) else { return };
        if count < self.config.disk_failures_max {
            return;
        }
        let path = self.config.disks[usize::from(file.0)].path.display();
        let error = result.as_ref().expect_err("a failure was counted");
        let reason = format!("{count} {}s of {path} failed in a row, the last with: {error}", kind.name());
        match kind {
            OpKind::Read => self.retire_disk(reason),
            OpKind::Write | OpKind::Sync => self.lower_service(DiskService::ReadOnly(reason)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_failures_in_a_row_count() {
        let failures = Failures::default();
        let eio = || Err(io::Error::from_raw_os_error(libc::EIO));
        assert_eq!(failures.count(OpKind::Read, &eio()), Some(1));
        assert_eq!(failures.count(OpKind::Read, &eio()), Some(2));
        assert_eq!(failures.count(OpKind::Write, &eio()), Some(1), "each kind for itself");
        assert_eq!(failures.count(OpKind::Read, &Err(io::Error::from_raw_os_error(libc::ENOSPC))), None);
        assert_eq!(failures.count(OpKind::Read, &eio()), Some(3), "a shortage says nothing of the disk");
        assert_eq!(failures.count(OpKind::Read, &Ok(())), None);
        assert_eq!(failures.count(OpKind::Read, &eio()), Some(1));
    }
}
