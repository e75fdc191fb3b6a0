//! Hints of callers: a chain is over, or is to be kept for a time.
//!
//! A *released* block is evicted before all others, and need not be written first. Its chain is released from its end
//! up to the first block from which another chain continues, or has continued while both were resident: a prompt that
//! many conversations begin with is not over with one of them. A use takes the release back, for the block and for its
//! ancestors, so that all children of a released block are released. A chain may be long, and a use is made under the
//! lock that all callers share: the use takes back [`TAKEN_BACK_AT_ONCE`] releases, and evictions the others. Until
//! then no block is evicted because of a release, unless nothing else can be.
//!
//! A *kept* block is evicted after all others, as long as no more copies are kept in its tier than
//! [`limit_kept`](Index::limit_kept) allows; beyond that the coldest of them are evicted as if they were not kept. Its
//! ancestors are kept by [`keep_before`](Index::keep_before), one by one. This is a preference: if nothing else can be
//! evicted, kept blocks are.

use kvhoist_base::block::{BlockKey, Tier};

use super::{
    EntryId, Index,
    entry::{Entry, FULL},
};

/// Expired blocks that one call of [`Index::expire`] handles.
const EXPIRED_AT_ONCE: usize = 64;

/// Releases that one call takes back: some microseconds.
const TAKEN_BACK_AT_ONCE: usize = 64;

impl Index {
    /// Releases the chain of `keys`, in prefix order, at the time `now`. Returns how many blocks are released now.
    pub fn release(&mut self, keys: &[BlockKey], now: u64) -> usize {
        let steps = (0..keys.len()).rev().map_while(|at| self.release_at(keys, at, now));
        steps.filter(|released| *released).count()
    }

    /// One step of [`release`](Self::release), made for the last key first. Returns whether the block of key `at` is
    /// released now; `None` at the first block that is part of another chain too, or is kept: the rest is not over.
    pub fn release_at(&mut self, keys: &[BlockKey], at: usize, now: u64) -> Option<bool> {
        let Some(id) = self.find(&keys[at]) else { return Some(false) };
        if self.kept.until(id.0).is_some_and(|until| until <= now) {
            self.end_keeping(id);
        }
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
        self.entry(id).is_released() && self.taking_back.is_empty()
    }

    /// True if the block is evicted last, within the limit of its tier.
    pub fn is_kept(&self, id: EntryId) -> bool {
        self.entry(id).is_kept()
    }

    /// Keeps a block until `until`, a time as [`expire`](Self::expire) gets it; a later time that was set before stays.
    /// False if it is resident nowhere.
    pub fn keep(&mut self, id: EntryId, until: u64) -> bool {
        if !self.entry(id).occupies_any() || self.entry(id).is_removed() {
            return false;
        }
        if !self.is_kept_until(id, until) {
            self.keep_longer(id, until);
        }
        true
    }

    /// Keeps the parent of a block as well, and returns it; `None` if it is kept until then, and its ancestors with it.
    pub fn keep_before(&mut self, id: EntryId, until: u64) -> Option<EntryId> {
        let parent = self.parent(id).filter(|&parent| !self.entry(parent).is_removed())?;
        if self.is_kept_until(parent, until) {
            return None;
        }
        self.keep_longer(parent, until);
        Some(parent)
    }

    fn is_kept_until(&self, id: EntryId, until: u64) -> bool {
        self.kept.until(id.0).is_some_and(|known| known >= until)
    }

    fn keep_longer(&mut self, id: EntryId, until: u64) {
        self.kept.set(id.0, until);
        self.end_release(id);
        if !self.entry(id).is_kept() {
            self.set_kept(id, true);
        }
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
            self.end_keeping(EntryId(id));
        }
    }

    fn end_keeping(&mut self, id: EntryId) {
        self.kept.forget(id.0);
        self.set_kept(id, false);
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
        for _ in 0..TAKEN_BACK_AT_ONCE {
            let Some(id) = at.filter(|id| self.entry(*id).is_released()) else { return };
            self.set_released(id, false);
            at = self.parent(id);
        }
        let rest = at.map(|id| self.entry(id)).filter(|entry| entry.is_released()).map(|entry| entry.key);
        self.taking_back.extend(rest);
    }

    /// Takes back some of the releases that uses have left; true if there were any.
    pub(super) fn take_back_some(&mut self) -> bool {
        let Some(key) = self.taking_back.pop_first() else { return false };
        if let Some(id) = self.find(&key) {
            self.end_release(id);
        }
        true
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
    }

    pub(super) fn set_released(&mut self, id: EntryId, released: bool) {
        self.stop_taking_back(id);
        self.mark(id, |entry| entry.set_released(released));
    }

    /// The release of the block is about to end, or to begin anew.
    pub(super) fn stop_taking_back(&mut self, id: EntryId) {
        if !self.taking_back.is_empty() {
            self.taking_back.remove(&self.entries[id.0 as usize].key);
        }
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
        Tier::ALL.into_iter().for_each(|tier| self.take_out(id, tier));
        change(self.entry_mut(id));
        Tier::ALL.into_iter().for_each(|tier| self.relist(id, tier));
    }

    /// Checks that every release which is being taken back is one.
    pub(super) fn validate_taking_back(&self) -> Result<(), String> {
        let is_released = |key: &BlockKey| self.find(key).is_some_and(|id| self.entry(id).is_released());
        match self.taking_back.iter().find(|key| !is_released(key)) {
            Some(key) => Err(format!("{key:?} is being taken back, and not released")),
            None => Ok(()),
        }
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
        if parent.is_released() && !released && !self.taking_back.contains(&parent.key) {
            return Err("not released, and its parent is".into());
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

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: u32 = 1000;

    fn key(number: u32) -> BlockKey {
        let mut bytes = [0; 32];
        bytes[..4].copy_from_slice(&number.to_le_bytes());
        BlockKey::new(bytes)
    }

    fn put(index: &mut Index, number: u32, parent: Option<u32>, tier: Tier) -> EntryId {
        let id = index.insert(key(number), parent.map(key));
        assert!(index.begin_fill(id, tier) && index.complete_fill(id, tier, number));
        id
    }

    #[test]
    fn a_use_takes_a_long_release_back_in_steps_and_none_is_evicted_for_it_meanwhile() {
        let mut index = Index::new(1);
        // Its second half is on disk only: in host memory its middle can be evicted.
        let tier = |number| if number < LONG / 2 { Tier::Host } else { Tier::Disk };
        let ids: Vec<_> = (0..LONG).map(|n| put(&mut index, n, n.checked_sub(1), tier(n))).collect();
        let others: Vec<_> = (LONG..LONG + 20).map(|n| put(&mut index, n, None, Tier::Host)).collect();
        let keys: Vec<_> = (0..LONG).map(key).collect();
        assert_eq!(index.release(&keys, 0), LONG as usize);
        let marked = |index: &Index| ids.iter().filter(|id| index.entry(**id).is_released()).count();
        index.touch(ids[LONG as usize - 1]);
        assert_eq!(marked(&index), LONG as usize - TAKEN_BACK_AT_ONCE, "a use takes a bounded number of steps");
        assert!(ids.iter().all(|id| !index.is_released(*id)), "its chain is in use");
        for other in others.iter().take(6) {
            index.validate().expect("valid");
            let before = marked(&index);
            assert_eq!(index.victim(Tier::Host), Some(*other), "the chain is in use, and colder");
            assert!(before - marked(&index) <= TAKEN_BACK_AT_ONCE, "so does an eviction");
            index.evict(*other, Tier::Host);
        }
        while marked(&index) > 0 {
            assert!(index.victim(Tier::Host).is_some());
        }
        index.validate().expect("valid");
        let middle = ids[LONG as usize / 2 - 1];
        assert_eq!(index.victim(Tier::Host), Some(middle), "the coldest, as if it had not been released");
    }

    #[test]
    fn a_chain_that_is_released_again_and_again_is_remembered_once() {
        let mut index = Index::new(1);
        let ids: Vec<_> = (0..LONG).map(|n| put(&mut index, n, n.checked_sub(1), Tier::Host)).collect();
        let keys: Vec<_> = (0..LONG).map(key).collect();
        for _ in 0..100 {
            index.release(&keys, 0);
            assert!(index.is_released(ids[0]), "the last use of it is over");
            index.touch(ids[LONG as usize - 1]);
            assert!(!index.is_released(ids[0]) && index.taking_back.len() == 1);
            index.validate().expect("valid");
        }
        for id in ids.iter().rev() {
            index.remove(*id);
        }
        assert!(index.taking_back.is_empty());
    }
}
