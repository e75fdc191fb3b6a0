//! Making a filled host slot visible, and what the write policy wants done then.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::{
    flight::{Joined, Message},
    shared::{Filling, Pin, Shared, State},
    verify::Settled,
};
use crate::{
    block::{BlockKey, Route, Tier},
    config::WritePolicy,
    error::Result,
    index::EntryId,
};

/// What a store has still to do.
pub(crate) enum Committed {
    /// Nothing: the policy is satisfied.
    Done,
    /// A movement of the same key is under way; its outcome comes here, and then the store looks again: it may have
    /// been of a block that was removed. The pin, on the block of this store, keeps that from being evicted meanwhile.
    Join(oneshot::Receiver<Message>, Option<Pin>),
    /// The block must be written; the flight has begun, the reactor must be asked.
    Write(Pin, oneshot::Receiver<Message>),
}

impl Shared {
    /// What is to be done for a block that is resident already; `None` where its bytes are needed.
    pub(crate) fn store_known(
        self: &Arc<Self>,
        key: &BlockKey,
        parent: Option<&BlockKey>,
    ) -> Result<Option<Committed>> {
        let mut state = self.lock();
        state.check_open()?;
        let Some(id) = state.index.find(key) else { return Ok(None) };
        let on_disk = state.index.slot(id, Tier::Disk).is_some() && state.disk_service.reads();
        if !on_disk && state.index.slot(id, Tier::Host).is_none() {
            return Ok(None);
        }
        if parent.is_some() {
            state.index.insert(*key, parent.copied());
        }
        state.index.touch(id);
        self.metrics.stores_known.add(1);
        self.apply_policy(&mut state, id, key).map(Some)
    }

    /// Makes a filled host slot visible under `key`.
    pub(crate) fn commit(
        self: &Arc<Self>,
        key: &BlockKey,
        parent: Option<&BlockKey>,
        filling: Filling,
        checksum: u64,
    ) -> Result<Committed> {
        let mut state = self.lock();
        if let Err(error) = state.check_open() {
            filling.release(&mut state);
            return Err(error);
        }
        let id = state.index.insert(*key, parent.copied());
        if state.index.begin_fill(id, Tier::Host) {
            let published = state.index.complete_fill(id, Tier::Host, filling.slot());
            assert!(published, "nothing can come between the two");
            state.host_checksums[filling.slot() as usize] = checksum;
            filling.published();
            self.metrics.stores.add(1);
        } else {
            // Stored by someone else meanwhile, or being read from disk: the same bytes either way.
            filling.release(&mut state);
            self.metrics.stores_known.add(1);
        }
        self.apply_policy(&mut state, id, key)
    }

    fn apply_policy(self: &Arc<Self>, state: &mut State, id: EntryId, key: &BlockKey) -> Result<Committed> {
        if self.config.disks.is_empty() || state.index.slot(id, Tier::Disk).is_some() {
            return Ok(Committed::Done);
        }
        match self.config.write_policy {
            WritePolicy::WriteThrough => self.begin_write(state, id, key),
            WritePolicy::WriteThroughSelective => Ok(Committed::Done),
            WritePolicy::WriteBack => {
                if state.disk_service.writes() && state.index.slot(id, Tier::Host).is_some() {
                    state.index.set_dirty(id, Tier::Host, true);
                    state.dirty.insert(*key);
                    // Nothing else tells of a block that must be written before it may make way for them.
                    if state.has_waiters(Tier::Host) {
                        self.write_back.notify_one();
                    }
                }
                Ok(Committed::Done)
            }
        }
    }

    /// Starts or joins the write of a host block to disk. The pin in the answer is not to be dropped under the lock.
    pub(crate) fn begin_write(self: &Arc<Self>, state: &mut State, id: EntryId, key: &BlockKey) -> Result<Committed> {
        let mut pin = Pin::take(self, state, id, Tier::Host, Route::HostHit);
        // Only libcufile spares a block the way through host memory, where there may be no room for it.
        let from_device = state.cufile.writes && state.device_retired.is_none();
        if pin.is_none() && from_device && !state.flights.contains(key, Tier::Host) {
            pin = Pin::take(self, state, id, Tier::Device, Route::DeviceHit);
        }
        // Without a pin the block is on its way to the host, from the device: when it is there, it can be written.
        let tier = if pin.is_some() || state.flights.contains(key, Tier::Disk) { Tier::Disk } else { Tier::Host };
        let waiters_max = self.config.waiters_max;
        let refused = match state.flights.join(key, tier, waiters_max) {
            Joined::Waiting(receiver) => return Ok(Committed::Join(receiver, pin)),
            Joined::Unverified => return Ok(Committed::Join(self.ticket(state, key), pin)),
            Joined::None => {
                return Ok(match pin {
                    Some(pin) => Committed::Write(pin, state.flights.begin(key, Tier::Disk)),
                    None => Committed::Done,
                });
            }
            Joined::Full => self.busy("waiters for one block", u64::from(waiters_max), "waiters_max"),
            Joined::Overdue => self.timeout("a movement of the block that is overdue"),
        };
        if let Some(pin) = pin {
            pin.release(state);
        }
        Err(refused)
    }

    /// Waits for a write to disk, or for another movement that a store joined.
    pub(crate) async fn written(self: &Arc<Self>, receiver: oneshot::Receiver<Message>) -> Result<()> {
        match self.settle(receiver).await {
            Settled::Ended(outcome) => outcome.map(drop),
            Settled::AskAgain => Ok(()),
        }
    }

    /// For `write_through_selective`: begins the write of a block that has been hit often enough
    /// and is not on disk. Its outcome is nobody's.
    pub(crate) fn selected_for_disk(self: &Arc<Self>, key: &BlockKey) -> Option<Pin> {
        let mut state = self.lock();
        let id = state.index.find(key)?;
        let wanted = state.index.hits(id) >= self.config.selective_hits
            && state.index.slot(id, Tier::Disk).is_none()
            && state.disk.is_some()
            && state.disk_service.writes()
            && !state.flights.contains(key, Tier::Disk);
        if !wanted {
            return None;
        }
        if state.flights.len() >= self.config.background_max as usize {
            self.metrics.background_refused.add(1);
            return None;
        }
        let committed = self.begin_write(&mut state, id, key);
        drop(state);
        match committed {
            Ok(Committed::Write(pin, _nobody)) => Some(pin),
            _ => None,
        }
    }
}
