//! The disk slot of a block in flight to disk: entered in the table, then made visible or given back.

use std::sync::Arc;

use super::{
    Class, Filling, Locked, PendingWrite, Permit, Pin, Purpose, Shared, State, Taken, WRITE, blames_disk, is_of_memory,
};
use crate::{
    block::{BlockKey, FileId, Tier},
    disk::{Origin, PageId},
    error::Error,
    index::EntryId,
};

/// Where a block is written: its payload, and the page with its record.
pub(crate) struct DiskPlace {
    pub(crate) file: FileId,
    pub(crate) offset: u64,
    pub(crate) page: PageId,
}

/// A disk slot with the bytes of a block, not visible yet.
pub(crate) struct DiskWrite {
    pub(crate) id: EntryId,
    pub(crate) filling: Filling,
}

/// What a write of a block has taken: its permit of the bytes in flight, and its disk slot, which the table has as the
/// block's.
pub(crate) type BegunWrite = (Permit, DiskWrite, DiskPlace);

impl Locked<'_> {
    /// The write of a pinned block, whose flight of this class has begun. An awaited one from host memory begins now,
    /// if it need not wait. Others ask for what they need behind those that are on their way to the reactor.
    pub(super) fn pending_write(&mut self, key: &BlockKey, pin: Pin, class: Class) -> PendingWrite {
        let (mut taken, purpose) = (Taken::default(), Purpose::Movement(key, Tier::Disk));
        let may_begin = pin.tier() == Tier::Host && class == Class::Awaited;
        let begun = match may_begin && taken.take(self, &WRITE, purpose).is_none() {
            true => self.begin_pinned_write(&pin, taken),
            false => Err(taken),
        };
        PendingWrite { key: *key, pin, begun }
    }

    /// Has the copy that another caller has stored of a block, if there is one, written once the flight of a write ends
    /// that has failed on its way from one caller's memory.
    pub(crate) fn write_other_copy(&mut self, key: &BlockKey, id: EntryId) {
        if self.index.find(key) == Some(id) && self.index.slot(id, Tier::Host).is_some() {
            self.flights.write_again(key);
        }
    }

    /// Begins the write of a block that is pinned in host or device memory, by what it has taken. Gives that back if
    /// the block was removed or is on disk already.
    pub(crate) fn begin_pinned_write(&mut self, pin: &Pin, mut taken: Taken) -> Result<BegunWrite, Taken> {
        let (checksum, permit, filling) = (self.checksum(pin), taken.permit(), taken.slot());
        match self.begin_disk_write(pin.id(), &filling, Some(checksum)) {
            Some(place) => Ok((permit, DiskWrite { id: pin.id(), filling }, place)),
            None => Err(Taken { slot: Some(filling), permit: Some(permit) }),
        }
    }

    /// Ends the write of a block to its disk slot; true if the block is visible there. If the block was removed
    /// meanwhile, or the write failed, the slot is given back, or quarantined where the drive is to blame: it would be
    /// the next one that a full disk tier takes. Its record page is stale then: the next write of the page, or a
    /// `sync`, clears the record.
    pub(crate) fn end_disk_write(&mut self, DiskWrite { id, filling }: DiskWrite, error: Option<&Error>) -> bool {
        let (key, slot) = (self.index.key(id), filling.slot());
        let is_visible = match error {
            None => self.index.complete_fill(id, Tier::Disk, slot),
            Some(error) => {
                let was_there = self.index.find(&key) == Some(id);
                self.index.abort_fill(id, Tier::Disk);
                // The refusal of a removed block is not reported. That of a block which is still there is noted at the
                // end of its flight, and once. A block whose caller took its memory away was not refused by the disk.
                if was_there && self.index.find(&key) != Some(id) && !is_of_memory(error) {
                    self.refusals.add(key, error.clone());
                }
                false
            }
        };
        if is_visible {
            filling.published();
        } else {
            if error.is_some_and(blames_slot) && self.may_quarantine() {
                self.disk_slots().quarantine(slot, &key);
                self.count(&self.shared().metrics.quarantined, 1);
            } else if self.disk_slots().meta(slot).is_some() {
                self.disk_slots().clear(slot, &key);
            }
            filling.release(self);
            self.note_given_up(&key, id);
        }
        is_visible
    }

    /// Whether a slot that cannot be written may be quarantined. Writes quarantine no more than half of
    /// `quarantine_max`, beyond which reads retire the tier, and never the last slot: failures in a row decide on a
    /// drive that takes no write.
    fn may_quarantine(&mut self) -> bool {
        let (disk, slots) = (&self.shared().config.disk, self.shared().config.disk_slots());
        let quarantined = self.disk_slots().quarantined_count();
        self.disk_service.writes() && quarantined < disk.quarantine_max / 2 && u64::from(quarantined) + 1 < slots
    }
}

impl Shared {
    /// Blocks that were removed, and are being written.
    pub(crate) fn removed_in_flight(self: &Arc<Self>) -> Vec<BlockKey> {
        let mut keys: Vec<BlockKey> = self.lock().flights.writes().collect();
        keys.retain(|key| self.lock().index.find(key).is_none());
        keys
    }
}

impl State {
    /// Notes the end of the write of `id`, whose flight has not ended; nothing if the block was removed meanwhile, also
    /// if another was stored under its key since, even one with the same id.
    pub(crate) fn note_written(&mut self, key: &BlockKey, id: EntryId, error: Option<&Error>) {
        if self.index.find(key) != Some(id) || self.flights.entry(key, Tier::Disk) != Some(id) {
            return;
        }
        if self.dirty.remove(key) {
            self.index.set_dirty(id, Tier::Host, false);
        }
        match error {
            None => self.refusals.written(key),
            Some(error) => self.refusals.add(*key, error.clone()),
        }
    }

    /// Notes in its flight that a write was given up, if its entry went with it: only a source's pin keeps an entry
    /// that is resident nowhere.
    pub(crate) fn note_given_up(&mut self, key: &BlockKey, id: EntryId) {
        if self.index.find(key) != Some(id) {
            self.flights.forget_entry(key, Tier::Disk);
        }
    }

    /// Begins to write a block to a disk slot, and enters it in the table if its checksum is known. `None` if it was
    /// removed or is there already.
    pub(crate) fn begin_disk_write(
        &mut self,
        id: EntryId,
        filling: &Filling,
        checksum: Option<u64>,
    ) -> Option<DiskPlace> {
        if !self.index.begin_fill(id, Tier::Disk) {
            return None;
        }
        if let Some(checksum) = checksum {
            self.enter_in_table(id, filling.slot(), checksum);
        }
        let slots = self.disk_slots();
        let (file, offset) = slots.locate(filling.slot());
        Some(DiskPlace { file, offset, page: slots.page_of(filling.slot()) })
    }

    /// Marks a block of the host tier as dirty: it is written to disk before it may be evicted.
    pub(crate) fn set_dirty(&mut self, id: EntryId, key: &BlockKey) {
        if self.index.slot(id, Tier::Host).is_some() {
            self.index.set_dirty(id, Tier::Host, true);
            self.dirty.insert(*key);
        }
    }

    /// Enters a block that is being written in place from memory of `origin` in the table, now that its checksum is
    /// known. False if the block was removed meanwhile: no record may name it.
    pub(crate) fn enter_written(&mut self, id: EntryId, slot: u32, checksum: u64, origin: Origin) -> bool {
        let key = self.index.key(id);
        let is_there = self.index.find(&key) == Some(id);
        if is_there {
            // Entered before, for a write that was lost.
            if self.disk_slots().meta(slot).is_some() {
                self.disk_slots().clear(slot, &key);
            }
            self.enter_in_table(id, slot, checksum);
            self.disk_slots().set_origin(slot, origin);
        }
        is_there
    }

    fn enter_in_table(&mut self, id: EntryId, slot: u32, checksum: u64) {
        let generation = self.generation;
        self.generation += 1;
        self.disk_slots().commit(slot, id.as_u32(), checksum, generation);
    }
}

/// Whether the place of a block, or that of its record, could not be written because of the drive.
fn blames_slot(error: &Error) -> bool {
    matches!(error, Error::Io { op: "write", source, .. } if blames_disk(source))
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use std::io;

    use super::*;
    use crate::{
        config::{Config, DiskPath},
        state::{Committed, Few, locks_taken},
    };

    const KEY: BlockKey = BlockKey::new([7; 32]);

    fn with_disk() -> Arc<Shared> {
        let disks = vec![DiskPath::with_blocks("nowhere", 4)];
        Shared::of_test(Config::default().block_bytes(4096).host_blocks(4).disks(disks))
    }

    /// A sync of one client fails for no block of another, which stores it from memory and takes that away.
    #[test]
    fn a_block_whose_caller_took_its_memory_away_was_not_refused_by_the_disk() {
        for is_on_its_way in [false, true] {
            let shared = with_disk();
            let mut state = shared.lock();
            let id = state.index.insert(KEY, None);
            let filling = state.acquire(Tier::Disk).expect("a slot");
            assert!(state.begin_disk_write(id, &filling, None).is_some());
            assert!(!is_on_its_way || state.index.begin_fill(id, Tier::Host));
            state.flights.begin((&KEY, Tier::Disk), id, Class::Awaited, Few::default(), true);
            let fault = Error::io("write", "nowhere", io::Error::from_raw_os_error(libc::EFAULT));
            assert!(!state.end_disk_write(DiskWrite { id, filling }, Some(&fault)));
            assert_eq!(state.index.find(&KEY).is_some(), is_on_its_way, "to host memory, which keeps its entry");
            drop(shared.end_write(state, &KEY, id, None, Err(fault)));
            assert!(shared.begin_report().report().is_ok());
        }
    }

    /// A window would let a block that is stored under the key of a removed one, and gets the id of its entry, take the
    /// write of that for its own.
    #[test]
    fn a_write_whose_source_a_library_holds_ends_under_one_lock() {
        let shared = with_disk();
        let copy = shared.lock().acquire(Tier::Host).expect("a slot");
        let Ok(Committed::Write(write, _receiver)) = shared.commit(&KEY, None, copy, 2) else {
            panic!("expected a write")
        };
        let PendingWrite { pin, begun: Ok((permit, write, _)), .. } = write else { panic!("there is room") };
        drop(permit);
        let (id, source) = (pin.id(), Arc::new(pin));
        let held = Arc::clone(&source);
        let mut state = shared.lock();
        let locks = locks_taken();
        assert!(state.end_disk_write(write, None));
        drop(shared.end_write(state, &KEY, id, Some(source), Ok(None)));
        assert_eq!(locks_taken(), locks);
        drop(held);
    }
}
