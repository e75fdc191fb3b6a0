//! The mapping of slots to members: slots are striped over the members.
//!
//! Slots are assigned in rows: one slot to each member that still has room, in the order of the members:
//!
//! ```text
//! members of 4, 2 and 3 slots          member 0   member 1   member 2
//!                              row 0       0          1          2     \ band of all three
//!                              row 1       3          4          5     /
//!                              row 2       6                     7       band of members 0 and 2
//!                              row 3       8                             band of member 0
//! ```
//!
//! Rows with the same members form a *band*. There are at most as many bands as members, so a look-up takes O(members).
//! A slot's index within its member is its row.

use super::{PAGE_BYTES, RECORDS_PER_PAGE, TABLE_OFFSET};
pub use crate::config::sizing::SLOTS_MAX;
use crate::{
    block::FileId,
    config::{Config, sizing::data_offset},
};

/// Largest number of members of a store.
pub const MEMBERS_MAX: usize = 64;

/// A page of the record tables: the pages of member 0 first, then those of member 1, and so on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageId(pub u32);

/// Consecutive rows with the same members.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Band {
    slot_first: u32,
    row_first: u32,
    row_end: u32,
    members: Vec<u16>,
}

/// Sizes of one member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemberGeometry {
    /// Number of slots.
    pub slots: u32,
    /// Number of record pages.
    pub pages: u32,
    /// Offset of slot 0.
    pub data_offset: u64,
    /// Required bytes of the file or device.
    pub bytes: u64,
    page_first: u32,
}

/// The location of every slot and record page of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stripe {
    block_bytes: u32,
    slot_bytes: u32,
    slots: u32,
    pages: u32,
    members: Vec<MemberGeometry>,
    bands: Vec<Band>,
}

impl Stripe {
    /// The mapping of a store with these settings, which must be [valid](Config::validate).
    ///
    /// # Panics
    /// If the settings are not valid.
    pub fn new(config: &Config) -> Self {
        let slots: Vec<u32> = config.disk.paths.iter().map(|disk| config.path_slots(disk)).collect();
        Self::of(config.block_bytes, config.slot_bytes(), &slots)
    }

    fn of(block_bytes: usize, slot_bytes: usize, slots: &[u32]) -> Self {
        let total: u64 = slots.iter().map(|&slots| u64::from(slots)).sum();
        assert!(slots.len() <= MEMBERS_MAX && total <= SLOTS_MAX, "Config::validate limits members and slots");
        assert!(slots.iter().all(|&slots| slots > 0), "Config::validate refuses empty members");
        assert!(block_bytes > 0 && block_bytes <= slot_bytes && slot_bytes <= 1 << 30, "Config::validate limits both");
        let mut members = Vec::with_capacity(slots.len());
        let mut page_first = 0;
        for &slots in slots {
            let member = MemberGeometry::new(slots, slot_bytes as u64, page_first);
            page_first += member.pages;
            members.push(member);
        }
        Stripe {
            block_bytes: block_bytes as u32,
            slot_bytes: slot_bytes as u32,
            slots: total as u32,
            pages: page_first,
            bands: bands(slots),
            members,
        }
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// Distance between slots, in bytes.
    pub fn slot_bytes(&self) -> u32 {
        self.slot_bytes
    }

    /// Number of slots of all members; slot numbers are smaller.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Number of record pages of all members; page numbers are smaller.
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// Sizes of the members, in the order of the configured paths.
    pub fn members(&self) -> &[MemberGeometry] {
        &self.members
    }

    /// The member that holds `slot`, and the slot's index there.
    ///
    /// # Panics
    /// If the store has no such slot.
    pub fn place(&self, slot: u32) -> (FileId, u32) {
        assert!(slot < self.slots, "slot {slot} of {}", self.slots);
        let at = self.bands.partition_point(|band| band.slot_first <= slot) - 1;
        let band = &self.bands[at];
        let (within, width) = (slot - band.slot_first, band.members.len() as u32);
        (FileId(band.members[(within % width) as usize]), band.row_first + within / width)
    }

    /// The slot with index `local` on member `file`: the inverse of [`place`](Self::place).
    ///
    /// # Panics
    /// If the member has no such slot.
    pub fn slot(&self, file: FileId, local: u32) -> u32 {
        let slots = self.members[usize::from(file.0)].slots;
        assert!(local < slots, "slot {local} of {slots} of member {}", file.0);
        let at = self.bands.partition_point(|band| band.row_end <= local);
        let band = &self.bands[at];
        let column = band.members.binary_search(&file.0).expect("a member is in every band up to its last row");
        band.slot_first + (local - band.row_first) * band.members.len() as u32 + column as u32
    }

    /// Offset of the block in `slot`.
    ///
    /// # Panics
    /// If the store has no such slot.
    pub fn locate(&self, slot: u32) -> (FileId, u64) {
        let (file, local) = self.place(slot);
        (file, self.members[usize::from(file.0)].data_offset + u64::from(local) * u64::from(self.slot_bytes))
    }

    /// The record page that holds the record of `slot`.
    ///
    /// # Panics
    /// If the store has no such slot.
    pub fn page_of(&self, slot: u32) -> PageId {
        let (file, local) = self.place(slot);
        PageId(self.members[usize::from(file.0)].page_first + local / RECORDS_PER_PAGE as u32)
    }

    /// Offset of a record page.
    ///
    /// # Panics
    /// If the store has no such page.
    pub fn page_location(&self, page: PageId) -> (FileId, u64) {
        let (file, within) = self.page_place(page);
        (file, TABLE_OFFSET + u64::from(within) * PAGE_BYTES as u64)
    }

    /// The slots of a record page: their member, the index of the first slot there, and their number.
    ///
    /// # Panics
    /// If the store has no such page.
    pub fn page_slots(&self, page: PageId) -> (FileId, u32, u32) {
        let (file, within) = self.page_place(page);
        let first = within * RECORDS_PER_PAGE as u32;
        let slots = self.members[usize::from(file.0)].slots;
        (file, first, (slots - first).min(RECORDS_PER_PAGE as u32))
    }

    fn page_place(&self, page: PageId) -> (FileId, u32) {
        assert!(page.0 < self.pages, "record page {} of {}", page.0, self.pages);
        let at = self.members.partition_point(|member| member.page_first <= page.0) - 1;
        (FileId(at as u16), page.0 - self.members[at].page_first)
    }
}

impl MemberGeometry {
    /// The geometry of a store's only member.
    pub(crate) fn of(slots: u32, slot_bytes: u64) -> Self {
        Self::new(slots, slot_bytes, 0)
    }

    fn new(slots: u32, slot_bytes: u64, page_first: u32) -> Self {
        let pages = slots.div_ceil(RECORDS_PER_PAGE as u32);
        let data_offset = data_offset(slots);
        MemberGeometry { slots, pages, data_offset, bytes: data_offset + u64::from(slots) * slot_bytes, page_first }
    }

    /// Bytes of the record table.
    pub fn table_bytes(&self) -> u64 {
        u64::from(self.pages) * PAGE_BYTES as u64
    }
}

fn bands(slots: &[u32]) -> Vec<Band> {
    let mut ends = slots.to_vec();
    ends.sort_unstable();
    ends.dedup();
    let (mut slot_first, mut row_first) = (0, 0);
    let mut bands = Vec::with_capacity(ends.len());
    for row_end in ends {
        let members: Vec<u16> = (0..slots.len() as u16).filter(|&at| slots[usize::from(at)] > row_first).collect();
        let width = members.len() as u32;
        bands.push(Band { slot_first, row_first, row_end, members });
        slot_first += (row_end - row_first) * width;
        row_first = row_end;
    }
    bands
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_example_in_the_docs_is_right() {
        let stripe = Stripe::of(4096, 4096, &[4, 2, 3]);
        let places: Vec<(u16, u32)> = (0..9).map(|slot| stripe.place(slot)).map(|(file, at)| (file.0, at)).collect();
        assert_eq!(places, [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2), (2, 2), (0, 3)]);
    }

    #[test]
    fn the_largest_store_has_offsets_far_below_the_limit() {
        let stripe = Stripe::of(1 << 30, 1 << 30, &[u32::MAX >> 1]);
        let (_, offset) = stripe.locate((u32::MAX >> 1) - 1);
        assert!(offset < 1 << 62 && stripe.members()[0].bytes < 1 << 62);
    }

    #[test]
    #[should_panic(expected = "slot 3 of 3")]
    fn a_slot_out_of_range_is_asserted() {
        Stripe::of(4096, 4096, &[3]).locate(3);
    }

    proptest! {
        #[test]
        fn every_slot_has_one_place_of_its_own(slots in prop::collection::vec(1u32..200, 1..9)) {
            let stripe = Stripe::of(5000, 8192, &slots);
            let mut seen = HashSet::new();
            for slot in 0..stripe.slots() {
                let (file, local) = stripe.place(slot);
                prop_assert!(local < slots[usize::from(file.0)]);
                prop_assert!(seen.insert((file, local)));
                prop_assert_eq!(stripe.slot(file, local), slot);
                let member = stripe.members()[usize::from(file.0)];
                let (_, offset) = stripe.locate(slot);
                prop_assert!(offset >= member.data_offset && offset + 8192 <= member.bytes && offset % 4096 == 0);
                let (page_file, first, count) = stripe.page_slots(stripe.page_of(slot));
                prop_assert!(page_file == file && (first..first + count).contains(&local));
            }
            prop_assert_eq!(seen.len() as u32, slots.iter().sum::<u32>());
        }

        #[test]
        fn record_pages_lie_between_the_superblocks_and_the_data(slots in prop::collection::vec(1u32..200, 1..9)) {
            let stripe = Stripe::of(4096, 4096, &slots);
            let mut covered = 0;
            for page in (0..stripe.pages()).map(PageId) {
                let (file, offset) = stripe.page_location(page);
                let member = stripe.members()[usize::from(file.0)];
                prop_assert!(offset >= TABLE_OFFSET && offset + 4096 <= TABLE_OFFSET + member.table_bytes());
                prop_assert!(TABLE_OFFSET + member.table_bytes() <= member.data_offset);
                covered += stripe.page_slots(page).2;
            }
            prop_assert_eq!(covered, stripe.slots());
        }
    }
}
