//! The end of a read: the block is published, or given up.

use std::sync::Arc;

use tokio::time::Instant;

use super::{Filling, FlightEnd, Locked, Pin, Shared, State, Unverified};
use crate::{
    block::{BlockKey, FileId, Route, Tier},
    disk::Origin,
    index::EntryId,
    shield::log,
};

/// Why a block on disk is given up.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The drive does not return it.
    Unreadable,
    /// The drive returns other bytes than its checksum is of.
    Mismatch,
}

impl Fault {
    fn text(self) -> &'static str {
        match self {
            Fault::Unreadable => "it cannot be read",
            Fault::Mismatch => "its checksum does not match",
        }
    }
}

impl Shared {
    /// Ends a read to a host slot, and its flight: publishes the block under one lock if it `matches`, gives it up for
    /// good otherwise.
    pub(crate) fn end_read(self: &Arc<Self>, key: &BlockKey, unverified: Unverified, matches: bool) -> FlightEnd {
        if !matches {
            let Unverified { source, filling, .. } = unverified;
            self.metrics.checksum_failures.add(1);
            self.unlink(source, filling, Fault::Mismatch);
            return self.lock().end_flight(key, Tier::Host, Ok(None));
        }
        self.count_read(unverified.started);
        self.lock().publish_read(key, unverified)
    }

    /// Counts a read that is about to be published, as far as that needs no lock.
    pub(crate) fn count_read(&self, started: Instant) {
        self.metrics.timed(Route::DiskToHost, started.elapsed());
        self.metrics.export_moved(Route::DiskToHost);
    }

    /// Gives back the disk slots of blocks that were read past host memory. Those that were right, since `began`, count
    /// as used and moved: a block that goes through a host slot is counted there. `submitted` of them were begun by
    /// [`begin_load`](super::Flights::begin_load).
    pub(crate) fn end_loads(
        self: &Arc<Self>,
        route: Route,
        pins: impl IntoIterator<Item = (Pin, Option<Instant>)> + AsRef<[(Pin, Option<Instant>)]>,
        submitted: usize,
    ) {
        let mut right = Vec::new();
        let mut state = self.lock();
        pins.as_ref().iter().for_each(|(pin, _)| state.index.prefetch(pin.id()));
        state.flights.loads -= submitted;
        if submitted > 0 && state.closed {
            self.ended.notify_one();
        }
        for (pin, began) in pins {
            if let Some(began) = began {
                state.index.touch(pin.id());
                state.index.hit(pin.id());
                state.note_right(&pin);
                right.push(began);
            }
            pin.release(&mut state);
        }
        drop(state);
        for began in right {
            self.metrics.looked_up(Some(Tier::Disk));
            self.metrics.moved(route, began.elapsed());
        }
    }

    /// Ends a read that failed for lack of a resource, not because of the disk: the block stays on disk.
    pub(crate) fn abort_read(self: &Arc<Self>, pin: Pin, filling: Filling) {
        let mut state = self.lock();
        state.index.abort_fill(pin.id(), Tier::Host);
        filling.release(&mut state);
        pin.release(&mut state);
    }

    /// Gives up a block that cannot be read from its disk slot, unless it was removed meanwhile: quarantines the slot,
    /// if the drive is to blame. `filling` is the host slot that the block was read into.
    ///
    /// If other readers hold the disk slot, the whole block is removed: a store must find it missing and keep its data.
    pub(crate) fn unlink(self: &Arc<Self>, pin: Pin, filling: Filling, fault: Fault) {
        let (id, slot) = (pin.id(), pin.slot());
        let mut state = self.lock();
        let key = state.index.key(id);
        state.index.abort_fill(id, Tier::Host);
        filling.release(&mut state);
        // If the block was removed meanwhile, its last reader frees the slot.
        let removed = state.index.slot(id, Tier::Disk) != Some(slot);
        pin.release(&mut state);
        if removed {
            return;
        }
        let origin = state.disk_slots().origin(slot);
        let is_drives = fault == Fault::Unreadable || origin == Origin::OURS;
        if !is_drives {
            state.disk_slots().clear(slot, &key);
        }
        match state.index.drop_copy(id, Tier::Disk) {
            Some(slot) if !is_drives => state.push_free(Tier::Disk, slot),
            Some(_) => {}
            None => {
                for (tier, slot) in Tier::ALL.into_iter().zip(state.index.remove(id)) {
                    slot.into_iter().for_each(|slot| state.push_free(tier, slot));
                }
            }
        }
        if !is_drives && origin != Origin::EARLIER_RUN {
            drop(state);
            return self.blame_lender(origin, slot);
        }
        if is_drives {
            state.disk_slots().quarantine(slot, &key);
        }
        let (file, of_path) = state.disk_slots().count_lost(slot);
        let quarantined = is_drives.then(|| state.disk_slots().quarantined_count());
        drop(state);
        self.note_lost((file, of_path), slot, fault, quarantined);
    }

    /// Counts a block whose lender changed its memory while it was stored, or so it seems: the bytes were never read
    /// back before.
    fn blame_lender(&self, origin: Origin, slot: u32) {
        self.metrics.changed_memory.add(1);
        let blamed = self.lenders.blame(origin);
        let name = blamed.as_ref().map_or("memory of a caller that is gone", |(lender, _)| &lender.name);
        let count = self.metrics.changed_memory.get();
        // Any caller can have many: a warning for each power of two, counters for the others.
        if count.is_power_of_two() {
            log(|| {
                tracing::warn!(
                    name,
                    slot,
                    count,
                    "a block on disk was given up: its memory was changed while it was stored from there, or the \
                 drive lost it before it was first read; wait for the end of a store before its memory is used again"
                );
            });
        } else {
            log(|| tracing::debug!(name, slot, count, "a block on disk was given up: wrong when it was first read"));
        }
        if let Some((lender, true)) = blamed {
            log(|| tracing::info!(name = lender.name, "blocks stored from this memory are copied first from now on"));
        }
    }

    /// Counts a lost block of a path. `quarantined` slots there are now, which may be too many for the disk tier;
    /// `None` if its slot is free again, as an earlier run wrote the block.
    fn note_lost(self: &Arc<Self>, (file, of_path): (FileId, u32), slot: u32, fault: Fault, quarantined: Option<u32>) {
        self.metrics.quarantined.add(quarantined.is_some().into());
        let why = match quarantined {
            Some(_) => fault.text(),
            None => "wrong when first read: a kill or a power cut ended its store, or the drive lost it since",
        };
        // A bad drive has many: one warning per path, counters for the others.
        if of_path == 1 || quarantined == Some(1) {
            let path = &self.config.disk.paths[usize::from(file.0)].path;
            log(|| {
                tracing::warn!(
                    ?path,
                    slot,
                    why,
                    quarantined = quarantined.is_some(),
                    "a block on disk was given up; the next ones of this path are counted, and logged at level DEBUG"
                );
            });
        } else {
            log(|| tracing::debug!(slot, why, quarantined = quarantined.is_some(), "a block on disk was given up"));
        }
        let Some(count) = quarantined else { return };
        let limit = self.config.disk.quarantine_max;
        if count > limit {
            self.retire_disk(format!("{count} slots are quarantined, more than quarantine_max = {limit}"));
        } else if u64::from(count) == self.config.disk_slots() {
            self.retire_disk(format!("all of its {count} slots are quarantined"));
        }
    }
}

impl Locked<'_> {
    /// Publishes a block that was read to a host slot, and ends its flight.
    pub(crate) fn publish_read(&mut self, key: &BlockKey, unverified: Unverified) -> FlightEnd {
        let Unverified { source, filling, checksum, .. } = unverified;
        let (route, shared) = (Route::DiskToHost, self.shared());
        let pin = self.publish(source.id(), filling, checksum, route, source);
        let end = self.end_flight(key, Tier::Host, Ok(pin));
        shared.metrics.moved_locked(route, self);
        end
    }

    /// Makes a filled host or device slot visible, and releases the source. Returns a pin for the first waiter; `None`
    /// if the block was removed meanwhile.
    pub(crate) fn publish(
        &mut self,
        id: EntryId,
        filling: Filling,
        checksum: u64,
        route: Route,
        source: Pin,
    ) -> Option<Pin> {
        self.prefetch(id);
        let (tier, slot) = (filling.tier(), filling.slot());
        let is_visible = self.index.complete_fill_pinned(id, tier, slot);
        if is_visible {
            self.checksums[tier as usize][slot as usize] = checksum;
            filling.published();
        } else {
            filling.release(self);
        }
        if source.tier() == Tier::Disk {
            self.note_right(&source);
        }
        let owner = source.end(self);
        is_visible.then(|| Pin::taken(owner, id, tier, slot, route))
    }
}

impl State {
    /// Notes that a block which is pinned on disk was read and is right: what becomes of it later is the drive's.
    pub(crate) fn note_right(&mut self, on_disk: &Pin) {
        self.disk_slots().set_origin(on_disk.slot(), Origin::OURS);
    }
}
