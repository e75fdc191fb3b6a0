//! Hints of callers: a chain is over, or is to be kept for a time.
//!
//! A *released* block is evicted before all others, and need not be written first. Its chain is released from its end
//! up to the first block from which another chain continues, or has continued while both were resident: a prompt that
//! many conversations begin with is not over with one of them. A use takes the release back, for the block and for its
//! ancestors; so all children of a released block are released.
//!
//! A *kept* block is evicted after all others, as long as no more copies are kept in its tier than
//! [`limit_kept`](Index::limit_kept) allows; beyond that the coldest of them are evicted as if they were not kept. The
//! ancestors of a kept block are kept as well, since they cannot be evicted before it. This is a preference: if nothing
//! else can be evicted, kept blocks are.

use super::{
    ANCESTORS_MAX, EntryId, Index,
    entry::{Entry, FULL},
};
use crate::block::{BlockKey, Tier};

/// Expired blocks that one call of [`Index::expire`] handles.
const EXPIRED_AT_ONCE: usize = 64;

impl Index {
    /// Releases the chain of `keys`, in prefix order. Returns how many blocks are released now.
    pub fn release(&mut self, keys: &[BlockKey]) -> usize {
        let steps = (0..keys.len()).rev().map_while(|at| self.release_at(keys, at));
        steps.filter(|released| *released).count()
    }

    /// One step of [`release`](Self::release), made for the last key first. Returns whether the block of key `at` is
    /// released now; `None` at the first block that is part of another chain too, or is kept: the rest is not over.
    pub fn release_at(&mut self, keys: &[BlockKey], at: usize) -> Option<bool> {
        let Some(id) = self.find(&keys[at]) else { return Some(false) };
        let entry = self.entry(id);
        let next = keys.get(at + 1).and_then(|key| self.find(key)).map(|next| self.entry(next));
        let next = next.filter(|next| next.parent == id.0 && next.is_released());
        let is_only = |tier: Tier| {
            let by_next = next.is_some_and(|next| next.occupies(tier));
            entry.place(tier).children == u32::from(by_next)
        };
        if entry.is_forked() || entry.is_kept() || !Tier::ALL.into_iter().all(is_only) {
            return None;
        }
        if !entry.occupies_any() {
            return Some(false);
        }
        self.set_released(id, true);
        Some(true)
    }

    /// True if the block is evicted first.
    pub fn is_released(&self, id: EntryId) -> bool {
        self.entry(id).is_released()
    }

    /// True if the block is evicted last, within the limit of its tier.
    pub fn is_kept(&self, id: EntryId) -> bool {
        self.entry(id).is_kept()
    }

    /// Keeps a block and its ancestors until `until`, a time as [`expire`](Self::expire) gets it; a later time that was
    /// set before stays. False if it is resident nowhere, or its chain is too long.
    pub fn keep(&mut self, id: EntryId, until: u64) -> bool {
        if !self.entry(id).occupies_any() || self.entry(id).is_removed() || !self.reaches_kept(id, until) {
            return false;
        }
        self.end_release(id);
        self.keep_up_from(id, until);
        true
    }

    /// How many copies of `tier` may be kept.
    pub fn limit_kept(&mut self, tier: Tier, copies: usize) {
        self.kept.copies_max[tier as usize] = copies;
    }

    /// Number of kept copies in `tier`.
    pub fn kept(&self, tier: Tier) -> usize {
        self.kept.copies[tier as usize]
    }

    /// True if nothing is kept, so that nothing can expire.
    pub fn keeps_nothing(&self) -> bool {
        self.kept.by_time.is_empty()
    }

    /// Ends the keeping of blocks that were kept until `now` or before; a part of them if they are many.
    pub fn expire(&mut self, now: u64) {
        for _ in 0..EXPIRED_AT_ONCE {
            let Some(&(_, id)) = self.kept.by_time.first().filter(|(until, _)| *until <= now) else { return };
            self.kept.expired = self.kept.expired.max(now);
            let id = EntryId(id);
            self.kept.forget(id.0);
            self.set_kept(id, false);
        }
    }

    /// Takes back the release of a block and of its ancestors.
    #[inline]
    pub(super) fn end_release(&mut self, id: EntryId) {
        if self.entry(id).is_released() {
            self.end_releases_from(id);
        }
    }

    #[cold]
    fn end_releases_from(&mut self, id: EntryId) {
        let mut at = Some(id);
        while let Some(id) = at.filter(|id| self.entry(*id).is_released()) {
            self.set_released(id, false);
            at = self.parent(id);
        }
    }

    /// A child of `parent` is about to get its first copy: if another child exists, two chains continue from there.
    pub(super) fn note_fork(&mut self, parent: EntryId) {
        if self.entry(parent).is_named() {
            self.entry_mut(parent).set_forked();
        }
    }

    /// `id` was linked to `parent`.
    pub(super) fn hint_parent(&mut self, id: EntryId, parent: EntryId) {
        if !self.entry(id).is_released() {
            self.end_release(parent);
        }
        if let Some(until) = self.kept.until(id.0) {
            self.keep_up_from(parent, until);
        }
    }

    /// True if the walk up to an ancestor that is kept for as long, or to the chain's beginning, is short enough to be
    /// made under the lock.
    fn reaches_kept(&self, id: EntryId, until: u64) -> bool {
        let mut at = Some(id);
        for _ in 0..ANCESTORS_MAX {
            let Some(id) = at.filter(|id| self.kept.until(id.0).is_none_or(|known| known < until)) else { return true };
            at = self.parent(id);
        }
        false
    }

    fn keep_up_from(&mut self, id: EntryId, until: u64) {
        let mut at = Some(id);
        while let Some(id) =
            at.filter(|id| self.kept.until(id.0).is_none_or(|known| known < until) && !self.entry(*id).is_removed())
        {
            self.kept.set(id.0, until);
            self.end_release(id);
            if !self.entry(id).is_kept() {
                self.set_kept(id, true);
            }
            at = self.parent(id);
        }
    }

    pub(super) fn set_released(&mut self, id: EntryId, released: bool) {
        self.mark(id, |entry| entry.set_released(released));
    }

    fn set_kept(&mut self, id: EntryId, kept: bool) {
        for tier in Tier::ALL {
            let full = self.entry(id).has(tier, FULL);
            self.kept.count(full, tier, kept);
        }
        self.mark(id, |entry| entry.set_kept(kept));
    }

    /// Changes marks that decide the lists of an entry: it leaves them before and enters them after.
    fn mark(&mut self, id: EntryId, change: impl FnOnce(&mut Entry)) {
        Tier::ALL.into_iter().for_each(|tier| self.delist(id, tier));
        change(self.entry_mut(id));
        Tier::ALL.into_iter().for_each(|tier| self.relist(id, tier));
    }

    /// Checks the hints of an entry.
    pub(super) fn validate_hints(&self, id: EntryId, entry: &Entry) -> Result<(), String> {
        let (released, kept) = (entry.is_released(), entry.is_kept());
        if released && (kept || entry.is_removed() || !entry.occupies_any()) {
            return Err("released, and kept, removed or resident nowhere".into());
        }
        let until = self.kept.until(id.0);
        if kept != until.is_some() || until.is_some_and(|until| !self.kept.by_time.contains(&(until, id.0))) {
            return Err(format!("kept is {kept}, until {until:?}"));
        }
        let Some(parent) = self.parent(id).map(|parent| self.entry(parent)).filter(|_| !entry.is_removed()) else {
            return Ok(());
        };
        if parent.is_released() && !released {
            return Err("not released, and its parent is".into());
        }
        if until.is_some_and(|until| until > self.kept.expired) && !parent.is_kept() && !parent.is_removed() {
            return Err("kept, and its parent is not".into());
        }
        Ok(())
    }

    /// Checks the counts of kept blocks: `copies` are those of entries that are marked.
    pub(super) fn validate_kept(&self, copies: [usize; Tier::COUNT]) -> Result<(), String> {
        let (known, by_time) = (self.kept.until.len(), self.kept.by_time.len());
        let marked = self.entries.iter().filter(|(_, entry)| entry.is_kept()).count();
        if copies != self.kept.copies || known != by_time || known != marked {
            let counted = self.kept.copies;
            return Err(format!(
                "{counted:?} copies kept, {copies:?} found; {known} and {by_time} times, {marked} kept"
            ));
        }
        Ok(())
    }
}
