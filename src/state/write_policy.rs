//! What the write policy wants for a block that is in memory.

use std::sync::Arc;

use super::{Class, Committed, Few, Locked, PendingWrite, Shared, spare};
use crate::{
    block::{BlockKey, Tier},
    config::WritePolicy,
    error::{Error, Result},
    index::EntryId,
};

impl Shared {
    /// Begins the write of a block that is not on disk and was hit often enough, or was refused and is used again.
    /// Without a waiter.
    pub(crate) fn selected_for_disk(self: &Arc<Self>, key: &BlockKey) -> Option<PendingWrite> {
        let mut state = self.lock();
        // The close waits for the writes in flight, and takes no requests by then.
        state.check_open().ok()?;
        let id = state.index.find(key)?;
        let often = match self.config.disk.write_policy {
            WritePolicy::WriteThroughSelective => state.index.hits(id) >= self.config.disk.selective_hits,
            _ => state.index.used(id).again(),
        };
        let wanted = often
            && !state.index.is_dirty(id, Tier::Host)
            && state.index.slot(id, Tier::Disk).is_none()
            && state.disk.is_some()
            && state.disk_service.writes()
            && !state.flights.contains(key, Tier::Disk);
        if !wanted {
            return None;
        }
        if state.flights.len() >= self.config.limits.background_max as usize {
            state.count(&self.metrics.background_refused, 1);
            return None;
        }
        // Without a waiter it is no refusal that its slot is refused at the close.
        state.write_for(id, key, Class::Background, Few::default(), u32::MAX).ok().flatten()
    }
}

impl Locked<'_> {
    /// Does what the policy wants for a block that is stored, or stored again. A write through is of this class.
    pub(super) fn apply_policy(&mut self, id: EntryId, key: &BlockKey, class: Class) -> Result<Committed> {
        if self.shared().config.disk.paths.is_empty() {
            return Ok(Committed::Done);
        }
        if self.index.slot(id, Tier::Disk).is_some() {
            return self.check_copy_on_disk(key);
        }
        if matches!(self.shared().config.disk.write_policy, WritePolicy::WriteThrough | WritePolicy::WriteBack) {
            let parent = self.index.parent_key(id);
            if self.refuses(key, parent.as_ref(), Tier::Disk) {
                return Ok(Committed::Done);
            }
        }
        match self.shared().config.disk.write_policy {
            WritePolicy::WriteThrough => {
                // A write that has begun may succeed yet.
                if !self.flights.is_written(key)
                    && let Err(error) = self.disk_service.check_writes("disk")
                {
                    self.note_refused(key, error.clone());
                    // As by a write that has ended.
                    let (refuse, refused) = spare::take();
                    drop(refuse.send(Err(error)));
                    return Ok(Committed::Wait(refused));
                }
                self.begin_write(id, key, class, self.shared().config.limits.waiters_max)
            }
            WritePolicy::WriteThroughSelective => Ok(Committed::Done),
            WritePolicy::WriteBack | WritePolicy::ByValue => {
                self.must_be_written(id, key);
                Ok(Committed::Done)
            }
        }
    }

    /// As a write of the block would fail, if the disk tier that has a copy of it is out of service.
    fn check_copy_on_disk(&mut self, key: &BlockKey) -> Result<Committed> {
        if !self.disk_service.reads()
            && let Err(error) = self.disk_service.check_writes("disk")
        {
            match self.shared().config.disk.write_policy {
                WritePolicy::WriteThrough => {
                    self.count(&self.shared().metrics.writes_refused, 1);
                    return Err(error);
                }
                WritePolicy::WriteThroughSelective => {}
                WritePolicy::WriteBack | WritePolicy::ByValue => self.note_refused(key, error),
            }
        }
        Ok(Committed::Done)
    }

    /// Notes that the disk takes no write of a block, for the next sync unless the block's caller gets the error.
    pub(super) fn note_refused(&mut self, key: &BlockKey, error: Error) {
        self.count(&self.shared().metrics.writes_refused, 1);
        self.refusals.add(*key, error);
    }

    /// Marks a block to be written, without a waiter. Notes a refusal if the disk takes no writes.
    pub(super) fn must_be_written(&mut self, id: EntryId, key: &BlockKey) {
        if self.index.slot(id, Tier::Host).is_none() {
            // It is being copied from the device: the write follows.
            _ = self.flights.wait_for_write((key, Tier::Host), id, Few::default(), u32::MAX);
            return;
        }
        if let Err(error) = self.disk_service.check_writes("disk") {
            return self.note_refused(key, error);
        }
        self.set_dirty(id, key);
        // No other event starts the write of a block whose slot a request waits for.
        if self.has_waiters(Tier::Host) {
            self.shared().write_back.notify_one();
        }
    }

    /// After a use of a block that was not worth a write: the write is decided again when host memory evicts it.
    #[inline]
    pub(crate) fn reconsider(&mut self, id: EntryId) {
        if self.shared().config.values_writes()
            && self.index.best_tier(id) != Some(Tier::Disk)
            && self.index.slot(id, Tier::Disk).is_none()
            && !self.index.is_filling(id, Tier::Disk)
            && !self.index.is_dirty(id, Tier::Host)
            && self.disk_service.writes()
        {
            let key = self.index.key(id);
            self.set_dirty(id, &key);
            if self.has_waiters(Tier::Host) {
                self.shared().write_back.notify_one();
            }
        }
    }

    /// Lets a block be evicted unwritten: its write was declined.
    pub(crate) fn decline_write(&mut self, id: EntryId, key: &BlockKey) {
        self.dirty.remove(key);
        self.index.set_dirty(id, Tier::Host, false);
    }
}
