//! Copies in tiers: how they come, are held, and go.

use super::{
    EntryId, EvictionPolicy, Index,
    entry::{DIRTY, FILLING, FULL, List, NONE},
};
use crate::block::Tier;

impl Index {
    /// The slot that holds the block in `tier`; `None` where it is not full or the entry was removed.
    #[inline]
    pub fn slot(&self, id: EntryId, tier: Tier) -> Option<u32> {
        let entry = self.entry(id);
        (entry.has(tier, FULL) && !entry.is_removed()).then(|| entry.place(tier).slot)
    }

    /// True where a fill of `tier` is under way, also one that will be refused because the entry was removed.
    pub fn is_filling(&self, id: EntryId, tier: Tier) -> bool {
        self.entry(id).has(tier, FILLING)
    }

    /// The fastest tier where the block is full; `None` where there is none or the entry was removed.
    #[inline]
    pub fn best_tier(&self, id: EntryId) -> Option<Tier> {
        let entry = self.entry(id);
        if entry.is_removed() { None } else { entry.best_tier() }
    }

    /// Number of blocks that are full in `tier` and can be found.
    pub fn resident(&self, tier: Tier) -> usize {
        self.resident[tier as usize]
    }

    /// Starts a fill of `tier`: true for one caller, who ends it by [`complete_fill`](Self::complete_fill) or
    /// [`abort_fill`](Self::abort_fill). False where it is full or filling already, or the entry was removed.
    #[must_use = "only one caller may fill"]
    pub fn begin_fill(&mut self, id: EntryId, tier: Tier) -> bool {
        let entry = self.entry_mut(id);
        if entry.is_removed() || entry.occupies(tier) {
            return false;
        }
        let is_first = !entry.occupies_any();
        entry.set(tier, FILLING);
        self.weigh(id, tier);
        if let Some(parent) = self.parent(id) {
            if is_first {
                self.note_fork(parent);
            }
            self.child_arrived(parent, tier);
        }
        self.relist_all(id);
        true
    }

    /// Ends a fill: the block is resident in `slot` of `tier` from now on. A use, unless a faster tier holds the
    /// block already.
    ///
    /// False if the entry was removed meanwhile: nothing is resident and the slot stays the caller's.
    ///
    /// # Panics
    /// If no fill is under way: the caller did not begin one.
    #[must_use = "where it is false the slot stays the caller's"]
    pub fn complete_fill(&mut self, id: EntryId, tier: Tier, slot: u32) -> bool {
        let entry = self.entry_mut(id);
        assert!(entry.has(tier, FILLING), "no fill of {tier} is under way for {:?}", entry.key);
        if entry.is_removed() {
            self.vacate(id, tier);
            return false;
        }
        let best = entry.best_tier();
        let demoted = best.is_some_and(|best| best < tier);
        entry.clear(tier, FILLING);
        entry.set(tier, FULL);
        entry.place_mut(tier).slot = slot;
        self.resident[tier as usize] += 1;
        self.kept.count(self.entries[id.0 as usize].is_kept(), tier, true);
        self.blocks += usize::from(best.is_none());
        if !demoted {
            self.touch_in_passing(id);
        }
        self.relist_all(id);
        true
    }

    /// Ends a fill that failed. Where none is under way it only gives up an entry that came to nothing.
    pub fn abort_fill(&mut self, id: EntryId, tier: Tier) {
        if self.entry(id).has(tier, FILLING) {
            self.vacate(id, tier);
        } else {
            self.collect(id);
        }
    }

    /// Holds the copy in `tier`; gives its slot. `None` where it is not full, the entry was removed, or
    /// four billion pins are out.
    #[inline]
    pub fn pin(&mut self, id: EntryId, tier: Tier) -> Option<u32> {
        let entry = &mut self.entries[id.0 as usize];
        if !entry.has(tier, FULL) || entry.is_removed() {
            return None;
        }
        let place = entry.place_mut(tier);
        place.pins = place.pins.checked_add(1)?;
        let (slot, first) = (place.slot, place.pins == 1);
        if first {
            self.relist(id, tier);
        }
        Some(slot)
    }

    /// Ends one hold. A use. Gives the slot where the entry was removed and this was its last pin: free, and the
    /// caller's to give back.
    ///
    /// # Panics
    /// If nobody holds the copy.
    #[inline]
    #[must_use = "a freed slot must be given back to its tier"]
    pub fn unpin(&mut self, id: EntryId, tier: Tier) -> Option<u32> {
        let entry = &mut self.entries[id.0 as usize];
        let place = entry.place_mut(tier);
        assert!(place.pins > 0, "unpin of a copy in {tier} that nobody has pinned");
        place.pins -= 1;
        let last = place.pins == 0;
        if entry.is_removed() {
            let freed = last.then_some(entry.place(tier).slot);
            if freed.is_some() {
                self.vacate(id, tier);
            }
            return freed;
        }
        self.touch_in_passing(id);
        if last {
            self.relist(id, tier);
        }
        None
    }

    /// How many hold the copy in `tier`, also of an entry that was removed.
    pub fn pins(&self, id: EntryId, tier: Tier) -> u32 {
        self.entry(id).place(tier).pins
    }

    /// Gives up the copy in `tier`; its slot is the caller's.
    ///
    /// # Panics
    /// If it may not be evicted now. What [`victim`](Self::victim) names may, until the index next changes.
    pub fn evict(&mut self, id: EntryId, tier: Tier) -> u32 {
        assert!(self.may_evict(id, tier), "{:?} may not be evicted from {tier} now", self.entry(id).key);
        // What a caller said of the block is no choice of the policy, which has nothing to learn of it.
        if !self.counts_requests || self.entry(id).list(tier) != List::Policy {
            return self.free(id, tier);
        }
        let used = self.entry(id).used();
        self.policies[tier as usize].evicted(used, self.clock);
        let slot = self.entry(id).place(tier).slot;
        self.forget(id, tier);
        // Its entry remembers it for as long as it is in another tier.
        self.entry_mut(id).place_mut(tier).slot = self.now();
        self.collect(id);
        slot
    }

    /// Forgets the copy in `tier` although it may have children there or be dirty: the slot turned out to be corrupt.
    /// Gives the slot; `None` where it is not full, or pinned.
    pub fn drop_copy(&mut self, id: EntryId, tier: Tier) -> Option<u32> {
        let entry = self.entry(id);
        let may = entry.has(tier, FULL) && entry.place(tier).pins == 0 && !entry.is_removed();
        may.then(|| self.free(id, tier))
    }

    /// Forgets a block: it leaves the map at once, and its key can be inserted anew.
    ///
    /// Gives, per tier, the slots that are free now. A pinned one is freed by its last [`unpin`](Self::unpin); a fill
    /// under way is refused when it completes. Where neither is the case but other entries name it as
    /// their parent, it stays as a ghost.
    pub fn remove(&mut self, id: EntryId) -> [Option<u32>; 3] {
        let mut freed = [None; Tier::COUNT];
        if self.entry(id).is_removed() {
            return freed;
        }
        if self.entry(id).is_released() {
            self.set_released(id, false);
        }
        let mut lives_on = false;
        for tier in Tier::ALL {
            let entry = self.entry_mut(id);
            if entry.has(tier, FULL) && entry.place(tier).pins == 0 {
                freed[tier as usize] = Some(entry.place(tier).slot);
                self.forget(id, tier);
            } else if entry.occupies(tier) {
                entry.clear(tier, DIRTY);
                let (full, kept) = (entry.has(tier, FULL), entry.is_kept());
                self.resident[tier as usize] -= usize::from(full);
                self.kept.count(full && kept, tier, false);
                lives_on = true;
            }
        }
        let entry = self.entry_mut(id);
        entry.hits = 0;
        entry.forget_evictions();
        if lives_on {
            let was_resident = entry.best_tier().is_some();
            entry.set_removed();
            if entry.is_kept() {
                entry.set_kept(false);
                self.kept.forget(id.0);
            }
            let entry = self.entry(id);
            let key = entry.key;
            self.blocks -= usize::from(was_resident);
            self.unmap(id, &key);
        } else {
            self.collect(id);
        }
        freed
    }

    /// Gives up a full copy of an entry in the map; gives its slot.
    fn free(&mut self, id: EntryId, tier: Tier) -> u32 {
        let slot = self.entry(id).place(tier).slot;
        self.forget(id, tier);
        self.collect(id);
        slot
    }

    /// A full copy of an entry in the map is no more. The entry stays, whether or not anything needs it.
    fn forget(&mut self, id: EntryId, tier: Tier) {
        self.delist(id, tier);
        self.resident[tier as usize] -= 1;
        self.kept.count(self.entries[id.0 as usize].is_kept(), tier, false);
        self.clear_place(id, tier);
        self.blocks -= usize::from(self.entry(id).best_tier().is_none());
    }

    /// A fill, or a full copy of a removed entry, is no more; then perhaps the entry.
    fn vacate(&mut self, id: EntryId, tier: Tier) {
        self.clear_place(id, tier);
        self.relist_all(id);
        self.collect(id);
    }

    fn clear_place(&mut self, id: EntryId, tier: Tier) {
        let entry = self.entry_mut(id);
        if entry.has(tier, FULL) {
            entry.place_mut(tier).slot = NONE;
        }
        entry.clear(tier, FILLING | FULL | DIRTY);
        if !entry.occupies_any() {
            entry.set_released(false);
        }
        // Not held there any more, before the parent counts a child less.
        self.weigh(id, tier);
        self.relist(id, tier);
        if let Some(parent) = self.parent(id) {
            self.child_left(parent, tier);
        }
    }

    /// A fill holds back the entry's copies in all tiers, so its begin and end concern them all.
    fn relist_all(&mut self, id: EntryId) {
        for tier in Tier::ALL {
            self.relist(id, tier);
        }
    }
}
