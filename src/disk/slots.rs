//! The slot table: which disk slot holds which block. Pure bookkeeping, protected by the mover's lock.
//!
//! ```text
//!            alloc              commit
//!     free ---------> filling ---------> full
//!       ^  <---------         <---------
//!       |    release            clear         quarantine: from filling or full, for good
//! ```
//!
//! The records on the medium are derived from this table, a page of 32 at a time. A page is *stale* while the medium
//! differs from the table: after `commit`, `clear` and `quarantine`. Encoding a page makes it fresh; the writer then
//! reports the result with [`DiskSlots::page_written`] or [`DiskSlots::page_failed`]. A change between the encoding and
//! the end of the write makes the page stale again, so no change is lost.
//!
//! A slot may be reused before its stale record is overwritten: the payload checksum exposes a stale record, and
//! writing stale pages only avoids those misses. But as long as the payload is intact, a removed block's record must be
//! cleared before the removal completes: [`DiskSlots::pages_naming`].

#[cfg(test)]
mod tests;

use super::{
    format::{
        PAGE_BYTES, RECORD_BYTES, RECORDS_PER_PAGE,
        record::{Record, RecordSeal, UnsealedPage},
        stripe::{PageId, Stripe},
    },
    leftovers::Leftovers,
    origin::Origin,
};
use crate::{
    bits::BitSet,
    block::{BlockKey, FileId},
    error::{Error, Result},
    memory::{huge, prefetch},
};

/// Record pages, of all members together, among which successive stores rotate; at least one of each member.
const PAGES_AT_ONCE: u32 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SlotState {
    Free,
    Filling,
    Full,
    Quarantined,
}

use SlotState::{Filling, Free, Full, Quarantined};

/// The content of a full slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotMeta {
    /// CRC-64/NVME of the payload.
    pub checksum: u64,
    /// The block's generation.
    pub generation: u64,
    /// The index entry of the block.
    pub entry: u32,
    // Here and not in tables of their own: they lie in the padding, so that a slot takes 24 bytes.
    state: SlotState,
    origin: Origin,
}

impl SlotMeta {
    const FREE: Self = SlotMeta { checksum: 0, generation: 0, entry: 0, state: Free, origin: Origin::OURS };
}

/// The slot table of a store. 24.2 bytes per slot.
#[derive(Debug)]
pub struct DiskSlots {
    stripe: Stripe,
    uuid: [u8; 16],
    /// Whether records contain use counts.
    records_uses: bool,
    slots: Vec<SlotMeta>,
    free: BitSet,
    stale: BitSet,
    leftovers: Leftovers,
    /// Slot at which the search for a free slot continues.
    cursor: u32,
    full: u32,
    quarantined: u32,
    /// Lost blocks of each member.
    lost_of: Vec<u32>,
}

impl DiskSlots {
    /// The slot table of store `uuid`, with all slots free. `records_uses`: whether its records contain use counts
    /// ([`Superblock::records_uses`](super::format::superblock::Superblock::records_uses)).
    ///
    /// # Errors
    /// [`Error::Config`] if the system has no memory for it.
    pub fn new(stripe: Stripe, uuid: [u8; 16], records_uses: bool) -> Result<Self> {
        let count = stripe.slots() as usize;
        let mut slots = Vec::<SlotMeta>::new();
        slots.try_reserve_exact(count).map_err(|_| {
            Error::config(
                "disks.blocks",
                format!("{count} slots in all, whose table takes memory that the system refused"),
                "fewer slots, or a system with more memory",
            )
        })?;
        huge::prefer(slots.as_ptr().addr(), count * size_of::<SlotMeta>());
        slots.resize(count, SlotMeta::FREE);
        Ok(DiskSlots {
            slots,
            stale: BitSet::new(stripe.pages()),
            lost_of: vec![0; stripe.members().len()],
            leftovers: Leftovers::default(),
            free: BitSet::full(stripe.slots()),
            stripe,
            uuid,
            records_uses,
            cursor: 0,
            full: 0,
            quarantined: 0,
        })
    }

    /// Enters a recovered block: a free slot becomes full, and its page stays fresh.
    ///
    /// # Panics
    /// If the slot is not free or out of range.
    pub fn restore(&mut self, slot: u32, entry: u32, checksum: u64, generation: u64) {
        assert!(self.free.remove(slot), "restored slot {slot} is {:?}", self.state(slot));
        self.slots[slot as usize].state = Filling;
        self.fill(slot, entry, checksum, generation);
        self.set_origin(slot, Origin::EARLIER_RUN);
    }

    /// Takes a free slot, which becomes filling; `None` if there is none.
    ///
    /// Rotates over a few record pages before moving on to the next few: blocks stored together share page writes, and
    /// a store seldom has to wait for a write of its page that is in flight.
    pub fn alloc(&mut self) -> Option<u32> {
        let slot = self.free.next(self.cursor).or_else(|| self.free.next(0))?;
        assert!(self.free.remove(slot) && self.state(slot) == Free, "the set of free slots agrees with the states");
        self.slots[slot as usize].state = Filling;
        self.cursor = self.after(slot);
        Some(slot)
    }

    /// The slot at which the search continues after `slot`.
    fn after(&self, slot: u32) -> u32 {
        let members = self.stripe.members().len() as u32;
        let page = RECORDS_PER_PAGE as u32 * members;
        let group = page * (PAGES_AT_ONCE / members).max(1);
        let within = slot % group;
        match (within + page < group, within % page + 1) {
            (true, _) => slot.saturating_add(page),
            (false, next) if next < page => slot - within + next,
            (false, _) => (slot - within).saturating_add(group),
        }
    }

    /// Frees a slot that will not be filled. A quarantined slot stays quarantined: readers held it until now.
    ///
    /// # Panics
    /// If the slot is free or full.
    pub fn release(&mut self, slot: u32) {
        if self.state(slot) == Quarantined {
            return;
        }
        self.expect(slot, Filling);
        self.slots[slot as usize] = SlotMeta::FREE;
        assert!(self.free.insert(slot), "a filling slot is not in the set of free slots");
    }

    /// Makes a filling slot full and its record page stale.
    ///
    /// # Panics
    /// If the slot is not filling, or `generation` is not below 2^63.
    pub fn commit(&mut self, slot: u32, entry: u32, checksum: u64, generation: u64) {
        self.fill(slot, entry, checksum, generation);
        self.stale.insert(self.stripe.page_of(slot).0);
    }

    /// Notes whose memory a block was written from, or that it was read back and is right ([`Origin::OURS`]).
    ///
    /// # Panics
    /// If the store has no such slot.
    pub fn set_origin(&mut self, slot: u32, origin: Origin) {
        self.slots[slot as usize].origin = origin;
    }

    /// Whose memory the block in `slot` was written from.
    ///
    /// # Panics
    /// If the store has no such slot.
    pub fn origin(&self, slot: u32) -> Origin {
        self.slots[slot as usize].origin
    }

    /// Makes the full slot of block `key` filling again, and its record page stale, after an eviction, a removal or a
    /// write that has failed. Must be followed by `release`, or by filling the slot anew.
    ///
    /// # Panics
    /// If the slot is not full.
    pub fn clear(&mut self, slot: u32, key: &BlockKey) {
        self.expect(slot, Full);
        self.slots[slot as usize] = SlotMeta { state: Filling, ..SlotMeta::FREE };
        self.full -= 1;
        self.mark_leftover(self.stripe.page_of(slot), Some(key));
    }

    /// Takes a filling slot, or the full slot of block `key`, out of service until the store is opened again.
    ///
    /// # Panics
    /// If the slot is free or quarantined.
    pub fn quarantine(&mut self, slot: u32, key: &BlockKey) {
        if self.state(slot) == Full {
            self.clear(slot, key);
        }
        self.expect(slot, Filling);
        self.slots[slot as usize] = SlotMeta { state: Quarantined, ..SlotMeta::FREE };
        self.quarantined += 1;
    }

    /// Counts the block of a slot as lost. Returns its member, and how many of that are.
    pub fn count_lost(&mut self, slot: u32) -> (FileId, u32) {
        let (file, _) = self.stripe.locate(slot);
        let of_member = &mut self.lost_of[usize::from(file.0)];
        *of_member += 1;
        (file, *of_member)
    }

    /// Tells the processor that what the table has of `slot` will be read.
    pub fn prefetch(&self, slot: u32) {
        prefetch(self.slots.as_ptr().wrapping_add(slot as usize));
    }

    /// The content of a full slot; `None` for any other slot.
    ///
    /// # Panics
    /// If the store has no such slot.
    pub fn meta(&self, slot: u32) -> Option<&SlotMeta> {
        let meta = &self.slots[slot as usize];
        (meta.state == Full).then_some(meta)
    }

    /// Offset of the block in `slot`.
    ///
    /// # Panics
    /// If the store has no such slot.
    pub fn locate(&self, slot: u32) -> (FileId, u64) {
        self.stripe.locate(slot)
    }

    /// The record page of `slot`.
    ///
    /// # Panics
    /// If the store has no such slot.
    pub fn page_of(&self, slot: u32) -> PageId {
        self.stripe.page_of(slot)
    }

    /// Encodes a record page, to be sealed and written at [its place](Stripe::page_location), and marks it fresh.
    /// `describe` returns key, parent, last use and uses of an index entry.
    ///
    /// # Panics
    /// If the store has no such page, or a last use is not below 2^63.
    pub fn encode_page<'a>(
        &mut self,
        page: PageId,
        out: &'a mut [u8; PAGE_BYTES],
        mut describe: impl FnMut(u32) -> (BlockKey, Option<BlockKey>, u64, u8),
    ) -> UnsealedPage<'a> {
        let (file, first, count) = self.stripe.page_slots(page);
        let seal = RecordSeal::new(&self.uuid, file.0);
        let (records, _) = out.as_chunks_mut::<RECORD_BYTES>();
        for (local, bytes) in (first..).zip(records) {
            *bytes = [0; RECORD_BYTES];
            // The last page of a member may have room for more records than the member has slots.
            if local - first >= count {
                continue;
            }
            let Some(meta) = self.meta(self.stripe.slot(file, local)) else { continue };
            let (key, parent, last_use, uses) = describe(meta.entry);
            let uses = if self.records_uses { uses } else { 0 };
            let length = self.stripe.block_bytes();
            let (generation, checksum) = (meta.generation, meta.checksum);
            let record = Record { key, parent, length, generation, checksum, last_use, uses };
            *bytes = seal.encode_unsealed(local, &record);
        }
        self.stale.remove(page.0);
        self.leftovers.encoded(page);
        UnsealedPage(out)
    }

    /// Notes that the encoded page is on the medium.
    pub fn page_written(&mut self, page: PageId) {
        self.leftovers.written(page);
    }

    /// Notes that the write failed: the page is not on the medium, or only in part.
    ///
    /// # Panics
    /// If the store has no such page.
    pub fn page_failed(&mut self, page: PageId) {
        self.stale.insert(page.0);
        self.leftovers.failed(page);
    }

    /// Marks a page for rewriting although nothing has changed.
    ///
    /// # Panics
    /// If the store has no such page.
    pub fn mark_stale(&mut self, page: PageId) {
        self.stale.insert(page.0);
    }

    /// Notes that the page's records on the medium name a block that is not there: `key`, or any block if it is
    /// unknown.
    ///
    /// # Panics
    /// If the store has no such page.
    pub fn mark_leftover(&mut self, page: PageId, key: Option<&BlockKey>) {
        self.stale.insert(page.0);
        self.leftovers.add(page, key);
    }

    /// Pages whose records on the medium may name `key` in a slot that does not hold it: until their next write has
    /// ended.
    pub fn pages_naming(&self, key: &BlockKey) -> impl Iterator<Item = PageId> + '_ {
        self.leftovers.pages(key)
    }

    /// Pages from this one on whose records on the medium differ from the table, ascending.
    pub fn stale_pages(&self, from: PageId) -> impl Iterator<Item = PageId> + '_ {
        std::iter::successors(self.stale.next(from.0), |page| self.stale.next(page + 1)).map(PageId)
    }

    /// The index entries of the blocks in the slots of a record page.
    ///
    /// # Panics
    /// If the store has no such page.
    pub fn entries_of(&self, page: PageId) -> impl Iterator<Item = u32> + '_ {
        let (file, first, count) = self.stripe.page_slots(page);
        (first..first + count).filter_map(move |local| self.meta(self.stripe.slot(file, local))).map(|meta| meta.entry)
    }

    /// Number of free slots.
    pub fn free_count(&self) -> u32 {
        self.free.len()
    }

    /// Number of full slots.
    pub fn full_count(&self) -> u32 {
        self.full
    }

    /// Number of quarantined slots.
    pub fn quarantined_count(&self) -> u32 {
        self.quarantined
    }

    /// The mapping of slots to members.
    pub fn stripe(&self) -> &Stripe {
        &self.stripe
    }

    /// Checks the table's invariants. Takes time in proportion to the slots; for tests and fuzzing.
    pub fn validate(&self) -> Result<(), String> {
        self.free.validate().map_err(|what| format!("free slots: {what}"))?;
        self.stale.validate().map_err(|what| format!("stale pages: {what}"))?;
        self.leftovers.validate().map_err(|what| format!("records left over: {what}"))?;
        if let Some(page) = self.leftovers.pending().find(|page| !self.stale.contains(page.0)) {
            return Err(format!("{page:?} has records left over, and is not stale"));
        }
        let counted = [(Free, self.free.len()), (Full, self.full), (Quarantined, self.quarantined)];
        for (state, kept) in counted {
            let found = self.slots.iter().filter(|meta| meta.state == state).count() as u32;
            if found != kept {
                return Err(format!("{found} slots are {state:?}, expected {kept}"));
            }
        }
        match self.free.iter().find(|&slot| self.slots[slot as usize] != SlotMeta::FREE) {
            Some(slot) => Err(format!("slot {slot} is in the set of free slots and {:?}", self.state(slot))),
            None => Ok(()),
        }
    }

    fn fill(&mut self, slot: u32, entry: u32, checksum: u64, generation: u64) {
        self.expect(slot, Filling);
        self.slots[slot as usize] = SlotMeta { checksum, generation, entry, state: Full, origin: Origin::OURS };
        self.full += 1;
    }

    fn state(&self, slot: u32) -> SlotState {
        self.slots[slot as usize].state
    }

    fn expect(&self, slot: u32, state: SlotState) {
        assert_eq!(self.state(slot), state, "slot {slot}");
    }
}
