//! What the index knows of one block.

use crate::block::{BlockKey, Tier};

/// No entry: the parent of a chain's first block, or a parent not known.
pub(super) const NONE: u32 = u32::MAX;

// Four marks a tier, in `Entry::marks`.
/// A fill is under way.
pub(super) const FILLING: u16 = 1;
/// The slot is full.
pub(super) const FULL: u16 = 2;
/// The copy must be demoted before it may be evicted.
pub(super) const DIRTY: u16 = 4;
/// The entry is in this tier's eviction list, or where it is dirty in its dirty list.
pub(super) const LISTED: u16 = 8;

const EVERY_TIER: u16 = 0x111;

/// One block: its key, its place in the chain, its copies. 88 bytes, the slab's tag included.
///
/// The order of the fields is the order of their heat: a lookup needs the first 40 bytes.
#[repr(C)]
pub(super) struct Entry {
    /// Four bits a tier.
    marks: u16,
    /// Saturating count of hits.
    pub(super) hits: u8,
    /// No longer in the map; lives on until its last pin, fill and child is gone.
    pub(super) removed: bool,
    /// The entry of the block before it in the chain, or [`NONE`].
    pub(super) parent: u32,
    pub(super) key: BlockKey,
    /// The clock at its last use; 0 before the first.
    pub(super) last_use: u64,
    /// Entries that name this one as their parent.
    pub(super) named_by: u32,
    pub(super) places: [Place; Tier::COUNT],
}

/// A block's copy in one tier.
#[derive(Clone, Copy, Default)]
pub(super) struct Place {
    /// The slot, where [`FULL`].
    pub(super) slot: u32,
    /// Readers that hold it.
    pub(super) pins: u32,
    /// Entries that name this one as their parent and have a copy here, full or filling.
    pub(super) children: u32,
}

impl Entry {
    pub(super) fn new(key: BlockKey) -> Self {
        Entry {
            marks: 0,
            hits: 0,
            removed: false,
            parent: NONE,
            key,
            last_use: 0,
            named_by: 0,
            places: [Place::default(); Tier::COUNT],
        }
    }

    #[inline]
    pub(super) fn has(&self, tier: Tier, mark: u16) -> bool {
        self.marks & (mark << shift(tier)) != 0
    }

    #[inline]
    pub(super) fn set(&mut self, tier: Tier, mark: u16) {
        self.marks |= mark << shift(tier);
    }

    #[inline]
    pub(super) fn clear(&mut self, tier: Tier, mark: u16) {
        self.marks &= !(mark << shift(tier));
    }

    #[inline]
    pub(super) fn place(&self, tier: Tier) -> &Place {
        &self.places[tier as usize]
    }

    #[inline]
    pub(super) fn place_mut(&mut self, tier: Tier) -> &mut Place {
        &mut self.places[tier as usize]
    }

    /// True where a slot of `tier` is this entry's, full or filling.
    #[inline]
    pub(super) fn occupies(&self, tier: Tier) -> bool {
        self.has(tier, FULL | FILLING)
    }

    /// True where no slot of any tier is this entry's and nobody names it: nothing needs it.
    pub(super) fn is_idle(&self) -> bool {
        self.marks & (EVERY_TIER * (FULL | FILLING)) == 0 && self.named_by == 0
    }

    /// The fastest tier where it is full.
    #[inline]
    pub(super) fn best_tier(&self) -> Option<Tier> {
        let full = self.marks & (EVERY_TIER * FULL);
        Tier::ALL.get(full.trailing_zeros() as usize / 4).copied()
    }

    #[inline]
    pub(super) fn is_filling_anywhere(&self) -> bool {
        self.marks & (EVERY_TIER * FILLING) != 0
    }

    #[inline]
    pub(super) fn is_listed_anywhere(&self) -> bool {
        self.marks & (EVERY_TIER * LISTED) != 0
    }

    /// Whether the entry belongs in a list of `tier`: the dirty list if it is dirty there, else the
    /// eviction list.
    #[inline]
    pub(super) fn belongs_in_list(&self, tier: Tier) -> bool {
        let place = self.place(tier);
        self.has(tier, FULL)
            && place.pins == 0
            && !self.removed
            && (self.has(tier, DIRTY) || (place.children == 0 && !self.is_filling_anywhere()))
    }
}

#[inline]
fn shift(tier: Tier) -> u32 {
    4 * tier as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_small() {
        assert_eq!(size_of::<Entry>(), 88);
        // The slab keeps its own tag in the spare values of a bool.
        assert_eq!(size_of::<Option<Entry>>(), 88);
    }

    #[test]
    fn the_fastest_full_tier_is_the_best() {
        let mut entry = Entry::new(BlockKey::new([0; 32]));
        assert_eq!(entry.best_tier(), None);
        for tier in [Tier::Disk, Tier::Host, Tier::Device] {
            entry.set(tier, FILLING | LISTED | DIRTY);
            assert_ne!(entry.best_tier(), Some(tier));
            entry.set(tier, FULL);
            assert_eq!(entry.best_tier(), Some(tier));
        }
    }
}
