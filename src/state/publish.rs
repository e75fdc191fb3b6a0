//! The end of a read: the block is published, or given up.

use std::sync::Arc;

use super::{Filling, Pin, Shared, State};
use crate::{
    block::{Route, Tier},
    index::EntryId,
};

impl Shared {
    /// Makes a filled host or device slot visible, and releases the source. Returns a pin for the first waiter; `None`
    /// if the block was removed meanwhile.
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

    /// Ends a read that failed for lack of a resource, not because of the disk: the block stays on disk.
    pub(crate) fn abort_read(&self, pin: Pin, filling: Filling) {
        let mut state = self.lock();
        state.index.abort_fill(pin.id(), Tier::Host);
        filling.release(&mut state);
        pin.release(&mut state);
    }

    /// Gives up a block that cannot be read from its disk slot, and quarantines the slot. `filling` is the host slot
    /// that the block was read into, if one was.
    pub(crate) fn unlink(&self, pin: Pin, filling: Option<Filling>, why: &str) {
        let (id, slot) = (pin.id(), pin.slot());
        let mut state = self.lock();
        let key = state.index.key(id);
        if let Some(filling) = filling {
            state.index.abort_fill(id, Tier::Host);
            filling.release(&mut state);
        }
        // If the block was removed meanwhile, this pin alone holds its entry: the slot is free once it is released.
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
            // A bad drive has many: one warning per path, counters for the others.
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
