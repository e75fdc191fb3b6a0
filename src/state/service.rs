//! Takes a tier out of service.

use std::io;

use super::{Failures, Health, Shared};
use crate::block::{FileId, OpKind, Tier};

impl Shared {
    /// Takes the disk tier out of service. Host and device keep serving.
    pub(crate) fn retire_disk(&self, reason: String) {
        self.lower_service(Health::Retired(reason));
    }

    /// Takes the device tier out of service: its blocks cannot be read any more. Host and disk keep serving.
    pub(crate) fn retire_device(&self, reason: String) {
        let mut state = self.lock();
        if !state.device_service.lower(Health::Retired(reason.clone())) {
            return;
        }
        // Leased blocks go with their last lease.
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
    fn lower_service(&self, to: Health) {
        let mut state = self.lock();
        let lower = state.disk_service.lower(to.clone());
        let refused = state.slot_requests.take_all(Tier::Disk);
        let error = state.check_service(Tier::Disk);
        drop(state);
        refused.refuse(&error.expect_err("the disk tier takes no blocks by now"));
        if lower {
            let reason = to.detail();
            let what =
                if to.reads() { "the disk tier takes no more blocks" } else { "the disk tier is out of service" };
            tracing::error!(reason, "{what}");
        }
    }

    /// Counts the end of an operation on a file, and lowers the service after too many failures in a row.
    pub(crate) fn account<T>(&self, failures: &[Failures], file: FileId, kind: OpKind, result: &io::Result<T>) {
        let Some(count) = failures[usize::from(file.0)].count(kind, result) else { return };
        if count < self.config.disk.failures_max {
            return;
        }
        let path = self.config.disk.paths[usize::from(file.0)].path.display();
        let error = result.as_ref().err().expect("a failure was counted");
        let reason = format!("{count} {}s of {path} failed in a row, the last with: {error}", kind.name());
        match kind {
            OpKind::Read => self.retire_disk(reason),
            OpKind::Write | OpKind::Sync => self.lower_service(Health::ReadOnly(reason)),
        }
    }
}
