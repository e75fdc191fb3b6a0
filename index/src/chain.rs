//! Links between the blocks of a chain, and the end of entries that nothing needs.

use kvhoist_base::block::{BlockKey, Tier};

use super::{
    ANCESTORS_MAX, EntryId, Index,
    entry::HELD,
    link::{Link, NONE},
};

impl Index {
    /// Makes the entry of `parent` the parent of `id`, unless it has one in the map already, or `is_ancestor` finds
    /// that this would make a cycle.
    pub(super) fn link(
        &mut self,
        id: EntryId,
        parent: BlockKey,
        is_ancestor: impl FnOnce(&mut Self, EntryId, EntryId) -> bool,
    ) {
        if self.parent(id).is_some_and(|current| !self.entry(current).is_removed()) {
            return;
        }
        let parent = self.find_or_create(parent);
        // A new ghost has no parent and a block without children is no ancestor: the walk is rare.
        if self.entry(id).is_named() && is_ancestor(self, id, parent) {
            return;
        }
        self.unlink(id);
        self.entry_mut(id).parent = parent.0;
        if self.entry(id).occupies_any() {
            self.note_fork(parent);
        }
        for tier in Tier::ALL {
            let entry = self.entry(id);
            if entry.occupies(tier) {
                let held = u32::from(entry.has(tier, HELD));
                self.entry_mut(parent).place_mut(tier).held += held;
                self.child_arrived(parent, tier);
            }
        }
        self.hint_parent(id, parent);
    }

    /// Undoes the link of `id` to its parent, which may then leave.
    pub(super) fn unlink(&mut self, id: EntryId) {
        let Some(parent) = self.parent(id) else { return };
        for tier in Tier::ALL {
            let entry = self.entry(id);
            if entry.occupies(tier) {
                let held = u32::from(entry.has(tier, HELD));
                self.entry_mut(parent).place_mut(tier).held -= held;
                self.child_left(parent, tier);
            }
        }
        self.entry_mut(id).parent = NONE;
        self.tops.forget();
        self.collect(parent);
    }

    /// True if `id` is `of` or an ancestor of it, or if the chain is too long to find out.
    pub(super) fn is_ancestor(&mut self, id: EntryId, of: EntryId) -> bool {
        let mut at = Some(of);
        for _ in 0..ANCESTORS_MAX {
            match at {
                None => return false,
                Some(found) if found == id => return true,
                Some(other) => at = self.parent(other),
            }
        }
        true
    }

    /// Removes the link to its parent from an entry that is resident nowhere, and the entry too if no other entry names
    /// it; then the ghost that only this entry named, which names no parent.
    pub(super) fn collect(&mut self, mut id: EntryId) {
        while !self.entry(id).occupies_any() {
            if self.counts_requests {
                self.remember_evictions(id);
            }
            let entry = self.entry_mut(id);
            let parent = std::mem::replace(&mut entry.parent, NONE);
            let (is_named, removed) = (entry.is_named(), entry.is_removed());
            if is_named && parent == NONE {
                return;
            }
            self.tops.forget();
            if !is_named {
                if !removed {
                    self.unmap(id);
                }
                let entry = self.entries.remove(id.0 as usize);
                debug_assert!(entry.links == [Link::OUT; Tier::COUNT], "it has left with its last copy");
                if entry.is_kept() {
                    self.kept.forget(id.0);
                }
            }
            if parent == NONE {
                return;
            }
            id = EntryId(parent);
        }
    }

    /// Takes an entry that was not removed out of the map.
    pub(super) fn unmap(&mut self, id: EntryId) {
        let hash = self.hash_of(id);
        self.map.remove(&mut self.entries, hash, id.0);
    }

    pub(super) fn child_arrived(&mut self, parent: EntryId, tier: Tier) {
        self.entry_mut(parent).place_mut(tier).children += 1;
        // Most inner copies stay inner ones, and their uses need move nothing.
        self.leave_order(parent, tier);
        self.weigh(parent, tier);
        self.relist(parent, tier);
    }

    pub(super) fn child_left(&mut self, parent: EntryId, tier: Tier) {
        self.entry_mut(parent).place_mut(tier).children -= 1;
        self.weigh(parent, tier);
        self.relist(parent, tier);
    }
}
