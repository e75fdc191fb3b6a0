//! The state of one block in the index.

use std::num::NonZeroU8;

use kvhoist_base::block::{BlockKey, Tier};

use super::{
    Used,
    link::{Link, NONE},
    place::Place,
};

// Five marks a tier, in `Entry::marks`.
/// A fill is under way.
pub(super) const FILLING: u16 = 1;
/// The slot is full.
pub(super) const FULL: u16 = 2;
/// The copy must be demoted before it may be evicted.
pub(super) const DIRTY: u16 = 4;
/// The entry is in one of this tier's lists: [`Entry::list`] says in which.
pub(super) const LISTED: u16 = 8;
/// The copy is counted in its parent's [`Place::held`].
pub(super) const HELD: u16 = 16;

const MARKS: u32 = 5;
const EVERY_TIER: u16 = 1 | 1 << MARKS | 1 << (2 * MARKS);

/// The highest count of uses: 3 stands for more as well.
pub(super) const USES_MAX: u8 = 3;

/// The lists of a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum List {
    /// Copies that must be demoted before they may be evicted.
    Dirty,
    /// Copies that are evicted first.
    Released,
    /// Copies that are evicted last.
    Kept,
    /// Copies that are evicted in the order of the policy.
    Policy,
}

impl List {
    /// The lists in order of last use, whatever the policy.
    pub(super) const BY_LAST_USE: [List; 3] = [List::Dirty, List::Released, List::Kept];
}

/// One block: its key, its place in the chain, its copies. 128 bytes, the slab's tag included: two lines of the
/// processor's cache, which it loads as a pair.
///
/// The order of the fields is the order of their heat: a lookup needs the first 44 bytes.
#[repr(C, align(128))]
pub(super) struct Entry {
    /// Five bits a tier.
    marks: u16,
    /// Saturating count of hits.
    pub(super) hits: u8,
    flags: Flags,
    /// The entry of the block before it in the chain, or [`NONE`].
    pub(super) parent: u32,
    pub(super) key: BlockKey,
    /// The next entry of its chain in the map, which alone reads it.
    pub(super) next: u32,
    /// The clock at its last use; 0 before the first.
    pub(super) last_use: u64,
    pub(super) places: [Place; Tier::COUNT],
    /// Its neighbors in the policy's order of each tier.
    pub(super) links: [Link; Tier::COUNT],
}

/// The state of an entry as a whole. Never zero: the slab keeps its own tag in the value that this cannot have.
#[derive(Clone, Copy)]
struct Flags(NonZeroU8);

impl Flags {
    const NONE: NonZeroU8 = NonZeroU8::new(1 << 7).expect("not zero");
    /// No longer in the map; lives until its last pin, fill and child has ended.
    const REMOVED: u8 = 1;
    /// Its next use was counted when it was announced.
    const ANNOUNCED: u8 = 1 << 1;
    /// Uses, at most [`USES_MAX`]: two bits from here on.
    const USES_SHIFT: u32 = 2;
    const USES: u8 = USES_MAX << Self::USES_SHIFT;
    /// A caller released its chain: it is evicted first.
    const RELEASED: u8 = 1 << 4;
    /// Two entries named it as their parent at the same time: more than one chain continued from here.
    const FORKED: u8 = 1 << 5;
    /// It is kept for a time: it is evicted last.
    const KEPT: u8 = 1 << 6;

    fn has(self, mask: u8) -> bool {
        self.0.get() & mask != 0
    }

    /// With these bits in place of those of the mask.
    fn with(self, mask: u8, bits: u8) -> Self {
        Flags(Self::NONE | (self.0.get() & !mask | bits & mask))
    }

    fn with_one(self, mask: u8, set: bool) -> Self {
        self.with(mask, if set { mask } else { 0 })
    }
}

impl Entry {
    /// An entry without a key, resident nowhere.
    pub(super) const EMPTY: Entry = Entry {
        marks: 0,
        hits: 0,
        flags: Flags(Flags::NONE),
        parent: NONE,
        key: BlockKey::new([0; 32]),
        last_use: 0,
        places: [Place::EMPTY; Tier::COUNT],
        links: [Link::OUT; Tier::COUNT],
        next: 0,
    };

    /// Puts the block of this new entry in `slot` of `tier`, with these uses, at least one.
    #[inline]
    pub(super) fn make_resident(&mut self, tier: Tier, slot: u32, used: Used) {
        self.marks = FULL << shift(tier);
        self.place_mut(tier).slot = slot;
        self.set_used(Used { uses: used.uses.max(1), ..used });
    }

    #[inline]
    pub(super) fn used(&self) -> Used {
        Used { last: self.last_use, uses: (self.flags.0.get() & Flags::USES) >> Flags::USES_SHIFT }
    }

    #[inline]
    pub(super) fn set_used(&mut self, used: Used) {
        self.last_use = used.last;
        self.flags = self.flags.with(Flags::USES, used.uses.min(USES_MAX) << Flags::USES_SHIFT);
    }

    /// No longer in the map; lives until its last pin, fill and child has ended.
    #[inline]
    pub(super) fn is_removed(&self) -> bool {
        self.flags.has(Flags::REMOVED)
    }

    pub(super) fn set_removed(&mut self) {
        self.flags = self.flags.with(Flags::REMOVED, Flags::REMOVED);
    }

    /// Its next use was counted when it was announced.
    #[inline]
    pub(super) fn is_announced(&self) -> bool {
        self.flags.has(Flags::ANNOUNCED)
    }

    #[inline]
    pub(super) fn set_announced(&mut self, announced: bool) {
        self.flags = self.flags.with_one(Flags::ANNOUNCED, announced);
    }

    /// A caller released its chain.
    #[inline]
    pub(super) fn is_released(&self) -> bool {
        self.flags.has(Flags::RELEASED)
    }

    pub(super) fn set_released(&mut self, released: bool) {
        self.flags = self.flags.with_one(Flags::RELEASED, released);
    }

    /// More than one chain continued from here at the same time.
    pub(super) fn is_forked(&self) -> bool {
        self.flags.has(Flags::FORKED)
    }

    pub(super) fn set_forked(&mut self) {
        self.flags = self.flags.with_one(Flags::FORKED, true);
    }

    /// It is kept for a time.
    #[inline]
    pub(super) fn is_kept(&self) -> bool {
        self.flags.has(Flags::KEPT)
    }

    pub(super) fn set_kept(&mut self, kept: bool) {
        self.flags = self.flags.with_one(Flags::KEPT, kept);
    }

    /// The list of `tier` for its copy there, if the copy belongs in one.
    #[inline]
    pub(super) fn list(&self, tier: Tier) -> List {
        if self.is_released() {
            List::Released
        } else if self.has(tier, DIRTY) {
            List::Dirty
        } else if self.is_kept() {
            List::Kept
        } else {
            List::Policy
        }
    }

    /// Takes the low half of the clock at the eviction of the copy in `tier`, unless there is a copy again.
    #[inline]
    pub(super) fn take_evicted_at(&mut self, tier: Tier) -> Option<u32> {
        let at = self.place(tier).slot;
        if at == NONE || self.has(tier, FULL) {
            return None;
        }
        self.place_mut(tier).slot = NONE;
        Some(at)
    }

    /// Clears the uses of a block that is resident nowhere: the policies remember them.
    pub(super) fn forget_uses(&mut self) {
        self.set_used(Used { last: 0, uses: 0 });
        self.set_announced(false);
    }

    /// Clears the evictions of a removed block: no policy learns of them.
    pub(super) fn forget_evictions(&mut self) {
        Tier::ALL.into_iter().for_each(|tier| _ = self.take_evicted_at(tier));
    }

    /// True if another entry names it as its parent. Such an entry has a copy somewhere, or a fill.
    #[inline]
    pub(super) fn is_named(&self) -> bool {
        self.places.iter().any(|place| place.children > 0)
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

    #[inline]
    pub(super) fn link(&self, tier: Tier) -> Link {
        self.links[tier as usize]
    }

    /// True if it is in the policy's order of a tier, or in another list.
    #[inline]
    pub(super) fn is_ordered_anywhere(&self) -> bool {
        self.links.iter().any(|link| link.colder != NONE) || self.marks & (EVERY_TIER * LISTED) != 0
    }

    /// True if it may be evicted from `tier` now, in the order of the policy.
    #[inline]
    pub(super) fn is_evictable(&self, tier: Tier) -> bool {
        self.has(tier, LISTED) && self.list(tier) == List::Policy
    }

    /// True if the entry owns a slot of `tier`, full or filling.
    #[inline]
    pub(super) fn occupies(&self, tier: Tier) -> bool {
        self.has(tier, FULL | FILLING)
    }

    /// True if the entry owns a slot of some tier, full or filling. Else it is a ghost, or about to be removed.
    #[inline]
    pub(super) fn occupies_any(&self) -> bool {
        self.marks & (EVERY_TIER * (FULL | FILLING)) != 0
    }

    /// The fastest tier with a full copy.
    #[inline]
    pub(super) fn best_tier(&self) -> Option<Tier> {
        let full = self.marks & (EVERY_TIER * FULL);
        Tier::ALL.get((full.trailing_zeros() / MARKS) as usize).copied()
    }

    #[inline]
    pub(super) fn is_filling_anywhere(&self) -> bool {
        self.marks & (EVERY_TIER * FILLING) != 0
    }

    /// True if the copy in `tier` is full, unpinned and not removed.
    #[inline]
    fn is_settled(&self, tier: Tier) -> bool {
        self.has(tier, FULL) && self.place(tier).pins == 0 && !self.is_removed()
    }

    /// True if the copy in `tier` must be demoted before it may be evicted.
    #[inline]
    fn must_be_demoted(&self, tier: Tier) -> bool {
        self.has(tier, DIRTY) && !self.is_released()
    }

    /// True if the copy in `tier` could be evicted, whatever its children: full, unpinned, clean or released, and no
    /// fill reads from it.
    #[inline]
    pub(super) fn may_go(&self, tier: Tier) -> bool {
        self.is_settled(tier) && !self.must_be_demoted(tier) && !self.is_filling_anywhere()
    }

    /// Whether the entry belongs in a list of `tier`: the dirty list if it must be demoted, else one of the eviction
    /// lists.
    #[inline]
    pub(super) fn belongs_in_list(&self, tier: Tier) -> bool {
        match self.must_be_demoted(tier) {
            true => self.is_settled(tier),
            false => self.place(tier).children == 0 && self.may_go(tier),
        }
    }

    /// True if there is a copy in `tier`, or a fill of one, that cannot be evicted now, whatever its children.
    #[inline]
    pub(super) fn is_held(&self, tier: Tier) -> bool {
        self.occupies(tier) && !self.may_go(tier)
    }

    /// True if it is in no list of `tier`, is not counted as held there, and belongs in none, pinned or not: it has no
    /// copy there, or a clean one with children.
    #[inline]
    pub(super) fn is_unlisted(&self, tier: Tier) -> bool {
        let is_leaf = self.place(tier).children == 0 && self.occupies(tier);
        !is_leaf && !self.has(tier, LISTED | DIRTY | HELD)
    }

    /// True if it has children in `tier` and all of them are counted as held.
    #[inline]
    fn has_only_held(&self, tier: Tier) -> bool {
        let place = self.place(tier);
        place.children > 0 && place.held == place.children
    }

    /// True if there is a copy in `tier`, or a fill of one, right above counted ones and not counted itself.
    #[inline]
    pub(super) fn is_frontier(&self, tier: Tier) -> bool {
        self.has_only_held(tier) && self.occupies(tier) && !self.has(tier, HELD)
    }

    /// True if the copy in `tier` could be evicted and all its children there are held: it is evicted if no leaf can
    /// be.
    #[inline]
    pub(super) fn is_last_resort(&self, tier: Tier) -> bool {
        self.has_only_held(tier) && self.may_go(tier)
    }
}

#[inline]
fn shift(tier: Tier) -> u32 {
    MARKS * tier as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_small() {
        assert_eq!(size_of::<Entry>(), 128);
        // The slab keeps its own tag in the value that the flags cannot have.
        assert_eq!(size_of::<Option<Entry>>(), 128);
    }

    #[test]
    fn the_fastest_full_tier_is_the_best() {
        let mut entry = Entry::EMPTY;
        assert_eq!(entry.best_tier(), None);
        for tier in [Tier::Disk, Tier::Host, Tier::Device] {
            entry.set(tier, FILLING | LISTED | DIRTY | HELD);
            assert_ne!(entry.best_tier(), Some(tier));
            entry.set(tier, FULL);
            assert_eq!(entry.best_tier(), Some(tier));
        }
    }
}
