//! The lists of a tier: what is evicted first, and what must be demoted before.

use kvhoist_base::block::{BlockKey, Tier};

use super::{
    EntryId, Index, Used,
    entry::{DIRTY, FULL, HELD, LISTED, List},
    link::Link,
};

/// Copies that one search for a victim compares, or passes over because they are spared: some microseconds.
const LOOKED_AT_MAX: usize = 64;

impl Index {
    /// Marks the copy in `tier` as dirty (it must be demoted before it may be evicted) or as clean. Does nothing if it
    /// is not full.
    pub fn set_dirty(&mut self, id: EntryId, tier: Tier, dirty: bool) {
        let entry = self.entry(id);
        if entry.is_removed() || !entry.has(tier, FULL) || entry.has(tier, DIRTY) == dirty {
            return;
        }
        // The mark decides the list, so the entry leaves one list before and enters the other after.
        self.take_out(id, tier);
        let entry = self.entry_mut(id);
        if dirty {
            entry.set(tier, DIRTY);
        } else {
            entry.clear(tier, DIRTY);
        }
        self.relist(id, tier);
    }

    /// True if the copy in `tier` must be demoted before it may be evicted.
    pub fn is_dirty(&self, id: EntryId, tier: Tier) -> bool {
        self.entry(id).has(tier, DIRTY)
    }

    /// The next copy to evict from `tier`: a released leaf, the leaf that the policy chooses, a copy right above held
    /// ones ([why](super)), or else a kept one. `None` if every copy is pinned, dirty or being filled.
    pub fn victim(&mut self, tier: Tier) -> Option<EntryId> {
        self.victim_unless(tier, false)
    }

    /// As [`victim`](Self::victim); with `spares_dirty` no copy that is dirty, and released.
    pub fn victim_unless(&mut self, tier: Tier, spares_dirty: bool) -> Option<EntryId> {
        let is_taking_back = self.take_back_some();
        let is_spared = |id: &EntryId| spares_dirty && self.is_dirty(*id, tier);
        let released = self.coldest_first(List::Released, tier).take(LOOKED_AT_MAX).find(|id| !is_spared(id));
        if released.is_some() && !is_taking_back {
            return released;
        }
        let by_policy = self.policies[tier as usize].victim(&mut self.entries, tier);
        let kept = self.coldest(List::Kept, tier);
        // Beyond the limit of kept copies they compete with all others.
        let competing = kept.filter(|_| self.kept.is_over(tier));
        let leaf = match (by_policy, competing) {
            (Some(choice), Some(kept)) => {
                let [used, of_kept] = [choice, kept].map(|id| self.used(id));
                Some(if self.policies[tier as usize].is_before(of_kept, used) { kept } else { choice })
            }
            (choice, _) => choice,
        };
        if let Some(leaf) = leaf.or(released).or(competing) {
            return Some(leaf);
        }
        match self.last_resort(tier, spares_dirty) {
            Some(id) if kept.is_none() || !self.is_kept(id) => Some(id),
            _ => kept,
        }
    }

    /// At most `most` blocks whose copies in `tier` are evicted next, as far as that can be told now: leaves in the
    /// policy's order, each followed by the copies above it that would be leaves then. Neither kept nor released ones.
    pub fn next_victims(&self, tier: Tier, most: usize) -> Vec<BlockKey> {
        let mut keys = Vec::new();
        let leaves = self.policies[tier as usize].coldest_first(&self.entries, tier);
        for leaf in leaves.filter(|id| self.entry(*id).is_evictable(tier)) {
            let is_next = |id: &EntryId| {
                let entry = self.entry(*id);
                entry.may_go(tier) && entry.place(tier).children == 1 && entry.list(tier) == List::Policy
            };
            let above = std::iter::successors(self.parent(leaf).filter(is_next), |id| self.parent(*id).filter(is_next));
            for id in std::iter::once(leaf).chain(above) {
                if keys.len() == most {
                    return keys;
                }
                keys.push(self.entry(id).key);
            }
        }
        keys
    }

    /// A copy that can be evicted although it has children there, all of them held: of the first some the coldest that
    /// is not kept. Takes as many steps more as inner copies became held since the last call.
    #[cold]
    fn last_resort(&mut self, tier: Tier, spares_dirty: bool) -> Option<EntryId> {
        let (mut found, mut from) = (None, 0);
        for _ in 0..LOOKED_AT_MAX {
            let id = loop {
                let Some(id) = self.frontier[tier as usize].next(from).map(EntryId) else {
                    return found.map(|(_, _, id)| id);
                };
                if self.entry(id).may_go(tier) {
                    break id;
                }
                // Held like all below it: only a copy above it can be evicted.
                self.count_held(id, tier, true);
                from = self.parent(id).map_or(from, |parent| parent.0.min(from));
            };
            from = id.0 + 1;
            if !(spares_dirty && self.is_dirty(id, tier)) {
                let this = (self.is_kept(id), self.last_use(id), id);
                found = Some(found.map_or(this, |best| this.min(best)));
            }
        }
        found.map(|(_, _, id)| id)
    }

    /// True if [`evict`](Self::evict) may be called.
    pub(super) fn may_evict(&self, id: EntryId, tier: Tier) -> bool {
        let entry = self.entry(id);
        entry.has(tier, LISTED) && entry.list(tier) != List::Dirty || entry.is_last_resort(tier)
    }

    /// The copies to demote from `tier`: the dirty ones without pins, whatever their children, the coldest first.
    ///
    /// A demotion pins its source, which takes it out of this list.
    pub fn demotable(&self, tier: Tier) -> impl Iterator<Item = EntryId> {
        self.coldest_first(List::Dirty, tier)
    }

    /// The dirty, released copy that [`victim_unless`](Self::victim_unless) has just spared, if it found nothing else.
    pub fn spared(&self, tier: Tier) -> Option<EntryId> {
        let above_held = || self.frontier[tier as usize].next(0).map(EntryId);
        let found = self.coldest(List::Released, tier).or_else(above_held);
        found.filter(|id| self.entry(*id).may_go(tier) && self.is_dirty(*id, tier))
    }

    /// The copy of a list in order of last use that was used longest ago.
    fn coldest(&self, list: List, tier: Tier) -> Option<EntryId> {
        self.coldest_first(list, tier).next()
    }

    fn coldest_first(&self, list: List, tier: Tier) -> impl Iterator<Item = EntryId> {
        let last_use = |id| self.entry(EntryId(id)).last_use;
        self.lists[list as usize][tier as usize].coldest_first(last_use).map(EntryId)
    }

    /// Number of leaves in `tier` that may be evicted now.
    pub fn evictable(&self, tier: Tier) -> usize {
        let of_hints = [List::Released, List::Kept].map(|list| self.lists[list as usize][tier as usize].len());
        self.evictable[tier as usize] + of_hints.iter().sum::<usize>()
    }

    /// Enters the entry in the list of `tier` that it belongs in, or takes it out, and counts it as held or not.
    ///
    /// Called after every change of what [`belongs_in_list`](super::entry::Entry::belongs_in_list) and
    /// [`is_held`](super::entry::Entry::is_held) read.
    #[inline]
    pub(super) fn relist(&mut self, id: EntryId, tier: Tier) {
        if self.entry(id).is_unlisted(tier) {
            return;
        }
        self.relist_any(id, tier);
    }

    #[inline(never)]
    fn relist_any(&mut self, id: EntryId, tier: Tier) {
        self.tell_held(id, tier);
        let entry = &self.entries[id.0 as usize];
        let belongs = entry.belongs_in_list(tier);
        if belongs != entry.has(tier, LISTED) {
            match belongs {
                true => self.enlist(id, tier),
                false => self.delist(id, tier),
            }
        }
    }

    /// Counts a held leaf among its parent's held children, and no longer if it is not held. A held inner copy is
    /// counted only during the search for a victim: most are no longer held by then.
    #[inline]
    pub(super) fn tell_held(&mut self, id: EntryId, tier: Tier) {
        let entry = &self.entries[id.0 as usize];
        let (held, counted) = (entry.is_held(tier), entry.has(tier, HELD));
        let counts = held && (counted || entry.place(tier).children == 0);
        if counts != counted {
            self.count_held(id, tier, counts);
        }
    }

    /// Counts the entry among its parent's held children in `tier`, or no longer.
    #[inline(never)]
    fn count_held(&mut self, id: EntryId, tier: Tier, counts: bool) {
        let entry = self.entry_mut(id);
        match counts {
            true => entry.set(tier, HELD),
            false => entry.clear(tier, HELD),
        }
        self.weigh_inner(id, tier);
        if let Some(parent) = self.parent(id) {
            let held = &mut self.entry_mut(parent).place_mut(tier).held;
            *held = if counts { *held + 1 } else { *held - 1 };
            self.weigh(parent, tier);
        }
    }

    /// Enters the copy among those right above held ones, or takes it out. Called after every change of what
    /// [`is_frontier`](super::entry::Entry::is_frontier) reads.
    pub(super) fn weigh(&mut self, id: EntryId, tier: Tier) {
        let set = &mut self.frontier[tier as usize];
        match self.entries[id.0 as usize].is_frontier(tier) {
            true => set.insert(id.0),
            false => set.remove(id.0),
        };
    }

    /// As [`weigh`](Self::weigh), where the number of its children has not changed: without any it is in no frontier.
    #[inline]
    pub(super) fn weigh_inner(&mut self, id: EntryId, tier: Tier) {
        if self.entry(id).place(tier).children > 0 {
            self.weigh(id, tier);
        }
    }

    /// Enters the entry into the list of `tier` that it belongs in.
    #[inline(never)]
    fn enlist(&mut self, id: EntryId, tier: Tier) {
        let entry = self.entry_mut(id);
        entry.set(tier, LISTED);
        let last_use = entry.last_use;
        match entry.list(tier) {
            List::Policy => {
                self.evictable[tier as usize] += 1;
                self.enter_order(id, tier);
            }
            list => self.lists[list as usize][tier as usize].insert(id.0, last_use),
        }
    }

    /// Enters the entry in the policy's order of `tier`, if it is a leaf there, unless it is in the order already or
    /// belongs in another list.
    #[inline]
    pub(super) fn enter_order(&mut self, id: EntryId, tier: Tier) {
        let entry = self.entry(id);
        let is_leaf = entry.place(tier).children == 0;
        if is_leaf && entry.link(tier) == Link::OUT && entry.list(tier) == List::Policy {
            self.policies[tier as usize].insert(&mut self.entries, tier, id);
        }
    }

    /// Takes the entry out of the policy's order of `tier`, if it is in.
    #[inline]
    pub(super) fn leave_order(&mut self, id: EntryId, tier: Tier) {
        if self.entry(id).link(tier) != Link::OUT {
            self.policies[tier as usize].remove(&mut self.entries, tier, id);
        }
    }

    /// Takes the entry out of the list of `tier` that it is in, if any. It keeps its place in the policy's order: a
    /// leaf that is pinned or being filled may be evicted soon.
    #[inline(never)]
    fn delist(&mut self, id: EntryId, tier: Tier) {
        let entry = &mut self.entries[id.0 as usize];
        if !entry.has(tier, LISTED) {
            return;
        }
        entry.clear(tier, LISTED);
        let last_use = entry.last_use;
        match entry.list(tier) {
            List::Policy => self.evictable[tier as usize] -= 1,
            list => self.lists[list as usize][tier as usize].remove(id.0, last_use),
        }
    }

    /// Takes the entry out of the list of `tier` that it is in, and out of the policy's order: its copy goes, or
    /// another list orders it from now on.
    #[inline]
    pub(super) fn take_out(&mut self, id: EntryId, tier: Tier) {
        self.delist(id, tier);
        self.leave_order(id, tier);
    }

    /// Reports a use to the orders that the entry is in: before, its uses were `from`.
    #[inline]
    pub(super) fn reorder(&mut self, id: EntryId, from: Used) {
        if self.entry(id).is_ordered_anywhere() {
            self.reorder_any(id, from);
        }
    }

    #[inline(never)]
    fn reorder_any(&mut self, id: EntryId, from: Used) {
        for tier in Tier::ALL {
            let entry = &self.entries[id.0 as usize];
            if entry.link(tier) != Link::OUT {
                self.policies[tier as usize].touch(&mut self.entries, tier, id, from);
            } else if entry.has(tier, LISTED) {
                let list = entry.list(tier);
                self.lists[list as usize][tier as usize].touch(id.0, from.last, entry.last_use);
            }
        }
    }
}
