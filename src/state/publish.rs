//! How a read ends: the block is published, or it is given up.

use std::sync::Arc;

use super::{Filling, Pin, Shared, State};
use crate::{
    block::{Route, Tier},
    index::EntryId,
};

impl Shared {
    /// Makes a filled host or device slot visible, pinned for the first waiter; gives the source back. `None` if the
    /// block was removed meanwhile.
    pub(crate) fn publish(
        self: &Arc<Self>,
        id: EntryId,
        filling: Filling,
        checksum: u64,
        route: Route,
        source: Pin,
    ) -> Option<Pin> {
        self.publish_locked(&mut self.lock(), id, filling, checksum, route, source)
    }

    /// As [`publish`](Self::publish), for a holder of the lock.
    pub(crate) fn publish_locked(
        self: &Arc<Self>,
        state: &mut State,
        id: EntryId,
        filling: Filling,
        checksum: u64,
        route: Route,
        source: Pin,
    ) -> Option<Pin> {
        let (tier, slot) = (filling.tier(), filling.slot());
        let pin = if state.index.complete_fill(id, tier, slot) {
            let checksums = match tier {
                Tier::Device => &mut state.device_checksums,
                _ => &mut state.host_checksums,
            };
            checksums[slot as usize] = checksum;
            filling.published();
            Pin::take(self, state, id, tier, route)
        } else {
            filling.release(state);
            None
        };
        source.release(state);
        pin
    }

    /// Ends a read that failed through no fault of the disk: the block stays there.
    pub(crate) fn abort_read(&self, pin: Pin, filling: Filling) {
        let mut state = self.lock();
        state.index.abort_fill(pin.id(), Tier::Host);
        filling.release(&mut state);
        pin.release(&mut state);
    }

    /// A block that cannot be had from its disk slot: forgotten there, and the slot set aside.
    /// `filling` is the host slot that it was read into, if it was.
    pub(crate) fn unlink(&self, pin: Pin, filling: Option<Filling>, why: &str) {
        let (id, slot) = (pin.id(), pin.slot());
        let mut state = self.lock();
        let key = state.index.key(id);
        if let Some(filling) = filling {
            state.index.abort_fill(id, Tier::Host);
            filling.release(&mut state);
        }
        // Of a block that was removed meanwhile this pin is the last trace: its slot is free already, its entry gone.
        let removed = state.index.slot(id, Tier::Disk) != Some(slot);
        pin.release(&mut state);
        let mut quarantined = None;
        if !removed && state.index.drop_copy(id, Tier::Disk).is_some() {
            let slots = state.disk_slots();
            let (file, of_path) = slots.quarantine(slot, &key);
            quarantined = Some((file, of_path, slots.quarantined_count()));
        }
        drop(state);
        match quarantined {
            // A bad drive has many: one warning names it, the counters tell the rest.
            Some((file, 1, _)) => {
                let path = &self.config.disk.paths[usize::from(file.0)].path;
                tracing::warn!(
                    ?path,
                    slot,
                    why,
                    "a block on disk was given up and its slot quarantined; the next ones of this path are counted, \
                     and logged at level DEBUG"
                );
            }
            _ => tracing::debug!(slot, why, "a block on disk was given up and its slot quarantined"),
        }
        if let Some((.., count)) = quarantined {
            self.metrics.quarantined.add(1);
            let limit = self.config.disk.quarantine_max;
            if count > limit {
                self.retire_disk(format!("{count} slots are quarantined, more than quarantine_max = {limit}"));
            } else if u64::from(count) == self.config.disk_slots() {
                self.retire_disk(format!("all of its {count} slots are quarantined"));
            }
        }
    }
}
