//! What was used when, and what goes first.

use super::{
    EntryId, EvictionPolicy, Index,
    entry::{DIRTY, FULL, LISTED},
};
use crate::block::Tier;

impl Index {
    /// A use: the entry becomes the most recent of every list that it is in.
    pub fn touch(&mut self, id: EntryId) {
        self.clock = self.clock.saturating_add(1);
        let clock = self.clock;
        let entry = &mut self.entries[id.0 as usize];
        let last_use = std::mem::replace(&mut entry.last_use, clock);
        if entry.is_listed_anywhere() {
            self.retime(id, last_use, clock);
        }
    }

    /// A use of a chain, given in prefix order. Touches children before parents, so that a chain
    /// comes to its end from its end.
    pub fn touch_chain(&mut self, ids: &[EntryId]) {
        for &id in ids.iter().rev() {
            self.touch(id);
        }
    }

    /// Counts a hit; gives the count after it, which stops at 255.
    pub fn hit(&mut self, id: EntryId) -> u8 {
        let hits = &mut self.entry_mut(id).hits;
        *hits = hits.saturating_add(1);
        *hits
    }

    /// Hits counted so far; stops at 255.
    pub fn hits(&self, id: EntryId) -> u8 {
        self.entry(id).hits
    }

    /// Marks the copy in `tier` as dirty (it must be demoted before it may be evicted) or as clean.
    /// Does nothing where it is not full.
    pub fn set_dirty(&mut self, id: EntryId, tier: Tier, dirty: bool) {
        let entry = self.entry(id);
        if entry.removed || !entry.has(tier, FULL) || entry.has(tier, DIRTY) == dirty {
            return;
        }
        // Which list it is in depends on the mark, so it leaves the one before it enters the other.
        self.delist(id, tier);
        let entry = self.entry_mut(id);
        if dirty {
            entry.set(tier, DIRTY);
        } else {
            entry.clear(tier, DIRTY);
        }
        self.relist(id, tier);
    }

    /// True where the copy in `tier` must be demoted before it may be evicted.
    pub fn is_dirty(&self, id: EntryId, tier: Tier) -> bool {
        self.entry(id).has(tier, DIRTY)
    }

    /// What `tier` should give up next; `None` where nothing may be evicted now.
    pub fn victim(&self, tier: Tier) -> Option<EntryId> {
        self.policies[tier as usize].victim(&|id| self.entry(id).last_use)
    }

    /// What to demote next out of `tier`: the coldest dirty copy that nobody has pinned. Children do not matter.
    ///
    /// A demotion pins its source, which takes it off this list.
    pub fn demotable(&self, tier: Tier) -> Option<EntryId> {
        self.dirty[tier as usize].victim(&|id| self.entry(id).last_use)
    }

    /// Number of copies in `tier` that may be evicted now.
    pub fn evictable(&self, tier: Tier) -> usize {
        self.policies[tier as usize].len()
    }

    /// Number of copies in `tier` that may be demoted now.
    pub fn demotable_len(&self, tier: Tier) -> usize {
        self.dirty[tier as usize].len()
    }

    /// The clock at the entry's last use; 0 if it was never used.
    pub fn last_use(&self, id: EntryId) -> u64 {
        self.entry(id).last_use
    }

    /// Uses so far, or the latest that was restored if that is more.
    pub fn clock(&self) -> u64 {
        self.clock
    }

    /// Puts the entry into the list of `tier` that it belongs in, or takes it out.
    ///
    /// Called after every change of what [`belongs_in_list`](super::entry::Entry::belongs_in_list) reads.
    #[inline]
    pub(super) fn relist(&mut self, id: EntryId, tier: Tier) {
        let entry = &mut self.entries[id.0 as usize];
        let belongs = entry.belongs_in_list(tier);
        if belongs == entry.has(tier, LISTED) {
            return;
        }
        if !belongs {
            return self.delist(id, tier);
        }
        entry.set(tier, LISTED);
        let (dirty, last_use) = (entry.has(tier, DIRTY), entry.last_use);
        self.list(tier, dirty).insert(id, last_use);
    }

    /// Takes the entry out of the list of `tier` that it is in, if any.
    pub(super) fn delist(&mut self, id: EntryId, tier: Tier) {
        let entry = &mut self.entries[id.0 as usize];
        if !entry.has(tier, LISTED) {
            return;
        }
        entry.clear(tier, LISTED);
        let (dirty, last_use) = (entry.has(tier, DIRTY), entry.last_use);
        self.list(tier, dirty).remove(id, last_use);
    }

    /// Tells the lists that the entry is in of a new last use.
    pub(super) fn retime(&mut self, id: EntryId, from: u64, to: u64) {
        for tier in Tier::ALL {
            let entry = self.entry(id);
            if entry.has(tier, LISTED) {
                let dirty = entry.has(tier, DIRTY);
                self.list(tier, dirty).touch(id, from, to);
            }
        }
    }

    #[inline]
    fn list(&mut self, tier: Tier, dirty: bool) -> &mut dyn EvictionPolicy {
        if dirty { &mut self.dirty[tier as usize] } else { &mut *self.policies[tier as usize] }
    }
}
