//! Copies in tiers: fills, pins, evictions and removals.

use kvhoist_base::block::Tier;

use super::{
    EntryId, Index,
    entry::{DIRTY, FILLING, FULL, List},
    link::NONE,
};

impl Index {
    /// The slot that holds the block in `tier`; `None` if it is not full or the entry was removed.
    #[inline]
    pub fn slot(&self, id: EntryId, tier: Tier) -> Option<u32> {
        let entry = self.entry(id);
        (entry.has(tier, FULL) && !entry.is_removed()).then(|| entry.place(tier).slot)
    }

    /// True if a fill of `tier` is in flight, even one that will be refused because the entry was removed.
    pub fn is_filling(&self, id: EntryId, tier: Tier) -> bool {
        self.entry(id).has(tier, FILLING)
    }

    /// The fastest tier with a full copy; `None` if there is none or the entry was removed.
    #[inline]
    pub fn best_tier(&self, id: EntryId) -> Option<Tier> {
        let entry = self.entry(id);
        if entry.is_removed() { None } else { entry.best_tier() }
    }

    /// Number of blocks that are full in `tier` and can be found.
    pub fn resident(&self, tier: Tier) -> usize {
        self.resident[tier as usize]
    }

    /// Begins a fill of `tier`. True for one caller, which ends it by [`complete_fill`](Self::complete_fill) or
    /// [`abort_fill`](Self::abort_fill); false if it is full or filling already, or the entry was removed.
    #[must_use = "only one caller may fill"]
    pub fn begin_fill(&mut self, id: EntryId, tier: Tier) -> bool {
        let entry = self.entry_mut(id);
        if entry.is_removed() || entry.occupies(tier) {
            return false;
        }
        let is_first = !entry.occupies_any();
        if is_first {
            // It is about to be stored, which is a use, however often the block was used before it left.
            entry.forget_uses();
        }
        entry.set(tier, FILLING);
        self.weigh_inner(id, tier);
        if let Some(parent) = self.parent(id) {
            if is_first {
                self.note_fork(parent);
            }
            self.child_arrived(parent, tier);
        }
        if self.entry(id).last_use > 0 {
            // Now: mostly right after the use for which it is filled, so that it arrives in order.
            self.enter_order(id, tier);
        }
        self.relist_all(id);
        true
    }

    /// Ends a fill: the block is resident in `slot` of `tier` from now on. A use only if no call has used
    /// it since the fill of a block that was resident nowhere began: it is being stored.
    ///
    /// False if the entry was removed meanwhile: nothing is resident and the caller keeps the slot.
    ///
    /// # Panics
    /// If no fill is in flight: the caller did not begin one.
    #[must_use = "if it is false the caller keeps the slot"]
    pub fn complete_fill(&mut self, id: EntryId, tier: Tier, slot: u32) -> bool {
        self.complete(id, tier, slot, 0)
    }

    /// As [`complete_fill`](Self::complete_fill), and [pins](Self::pin) the copy, which so enters no list only to leave
    /// it at once.
    #[must_use = "if it is false the caller keeps the slot"]
    pub fn complete_fill_pinned(&mut self, id: EntryId, tier: Tier, slot: u32) -> bool {
        self.complete(id, tier, slot, 1)
    }

    fn complete(&mut self, id: EntryId, tier: Tier, slot: u32, pins: u32) -> bool {
        let entry = self.entry_mut(id);
        assert!(entry.has(tier, FILLING), "no fill of {tier} is under way for {:?}", entry.key);
        if entry.is_removed() {
            self.vacate(id, tier);
            return false;
        }
        let is_new = entry.best_tier().is_none();
        entry.clear(tier, FILLING);
        entry.set(tier, FULL);
        let place = entry.place_mut(tier);
        (place.slot, place.pins) = (slot, pins);
        self.resident[tier as usize] += 1;
        self.kept.count(self.entries[id.0 as usize].is_kept(), tier, true);
        self.blocks += usize::from(is_new);
        if self.entry(id).used().uses == 0 {
            // The fill began before, so it does not end a release.
            self.touch_as_released(id);
        }
        self.enter_order(id, tier);
        self.relist_all(id);
        true
    }

    /// Ends a fill that failed. If none is in flight, it only gives up an entry that was not filled.
    pub fn abort_fill(&mut self, id: EntryId, tier: Tier) {
        if self.entry(id).has(tier, FILLING) {
            self.vacate(id, tier);
        } else {
            self.collect(id);
        }
    }

    /// Pins the copy in `tier`, and returns its slot. `None` if it is not full, the entry was removed, or it has four
    /// billion pins.
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

    /// Pins the copy in `tier` for a call that asked for the block: a [use](Self::touch) and a [hit](Self::hit).
    #[inline]
    pub fn pin_used(&mut self, id: EntryId, tier: Tier) -> Option<u32> {
        let slot = self.pin(id, tier)?;
        self.touch(id);
        self.hit(id);
        Some(slot)
    }

    /// Ends one pin, which is no use. Returns the slot if the entry was removed and this was its last pin: it is free,
    /// and the caller gives it back.
    ///
    /// # Panics
    /// If the copy has no pin.
    #[inline]
    #[must_use = "a freed slot must be given back to its tier"]
    pub fn unpin(&mut self, id: EntryId, tier: Tier) -> Option<u32> {
        let entry = &mut self.entries[id.0 as usize];
        let place = entry.place_mut(tier);
        assert!(place.pins > 0, "unpin of a copy in {tier} without a pin");
        place.pins -= 1;
        let last = place.pins == 0;
        if entry.is_removed() {
            let freed = last.then_some(entry.place(tier).slot);
            if freed.is_some() {
                self.vacate(id, tier);
            }
            return freed;
        }
        if last {
            self.relist(id, tier);
        }
        None
    }

    /// Number of pins of the copy in `tier`, also of a removed entry.
    pub fn pins(&self, id: EntryId, tier: Tier) -> u32 {
        self.entry(id).place(tier).pins
    }

    /// Evicts the copy in `tier`, and returns its slot, which is the caller's.
    ///
    /// # Panics
    /// If it may not be evicted now. The result of [`victim`](Self::victim) may, until the index next changes.
    pub fn evict(&mut self, id: EntryId, tier: Tier) -> u32 {
        assert!(self.may_evict(id, tier), "{:?} may not be evicted from {tier} now", self.entry(id).key);
        // An eviction because of a hint is no decision of the policy, which learns nothing from it.
        if !self.counts_requests || self.entry(id).list(tier) != List::Policy {
            return self.free(id, tier);
        }
        let used = self.entry(id).used();
        if let Some(policy) = self.policies[tier as usize].rb_mut() {
            policy.evicted(used, self.clock);
        }
        let slot = self.entry(id).place(tier).slot;
        self.forget(id, tier);
        // The entry remembers the eviction while it is in another tier.
        self.entry_mut(id).place_mut(tier).slot = self.now();
        self.collect(id);
        slot
    }

    /// Drops the copy in `tier`, which cannot be read, even if it has children there or is dirty. Returns the slot;
    /// `None` if it is not full, or is pinned.
    pub fn drop_copy(&mut self, id: EntryId, tier: Tier) -> Option<u32> {
        let entry = self.entry(id);
        let may = entry.has(tier, FULL) && entry.place(tier).pins == 0 && !entry.is_removed();
        may.then(|| self.free(id, tier))
    }

    /// Removes a block: it leaves the map at once, and its key can be inserted again.
    ///
    /// Returns, per tier, the slots that are free now. A pinned one is freed by its last [`unpin`](Self::unpin); a fill
    /// in flight is refused when it completes. Without either, it stays as a ghost if other entries name it as their
    /// parent.
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
                self.take_out(id, tier);
                let entry = self.entry_mut(id);
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
            self.blocks -= usize::from(was_resident);
            self.unmap(id);
        } else {
            self.collect(id);
        }
        freed
    }

    /// Drops a full copy of an entry in the map, and returns its slot.
    fn free(&mut self, id: EntryId, tier: Tier) -> u32 {
        let slot = self.entry(id).place(tier).slot;
        self.forget(id, tier);
        self.collect(id);
        slot
    }

    /// Drops a full copy of an entry in the map. The entry stays, whether or not anything needs it.
    fn forget(&mut self, id: EntryId, tier: Tier) {
        self.resident[tier as usize] -= 1;
        self.kept.count(self.entries[id.0 as usize].is_kept(), tier, false);
        self.clear_place(id, tier);
        self.blocks -= usize::from(self.entry(id).best_tier().is_none());
    }

    /// Ends a fill, or a full copy of a removed entry; and the entry, if nothing needs it.
    fn vacate(&mut self, id: EntryId, tier: Tier) {
        self.clear_place(id, tier);
        self.relist_all(id);
        self.collect(id);
    }

    fn clear_place(&mut self, id: EntryId, tier: Tier) {
        self.take_out(id, tier);
        let entry = self.entry_mut(id);
        if entry.has(tier, FULL) {
            entry.place_mut(tier).slot = NONE;
        }
        entry.clear(tier, FILLING | FULL | DIRTY);
        if entry.is_released() && !entry.occupies_any() {
            entry.set_released(false);
            self.stop_taking_back(id);
        }
        // It is no longer counted as held before the parent counts one child less.
        self.weigh_inner(id, tier);
        self.relist(id, tier);
        if let Some(parent) = self.parent(id) {
            self.child_left(parent, tier);
        }
    }

    /// A fill prevents the eviction of the entry's copies in all tiers, so its begin and end change all lists.
    fn relist_all(&mut self, id: EntryId) {
        for tier in Tier::ALL {
            self.relist(id, tier);
        }
    }
}
