//! What is given up first: the seam for eviction policies.

use super::EntryId;

/// Chooses which entry a tier gives up next.
///
/// The index keeps one policy a tier and holds in it exactly the entries that *may* be evicted from
/// that tier now: full, unpinned, clean, no fill under way, and no child resident there. A policy
/// only orders them; it need not know of pins, chains or slots. Entries leave and come back often:
/// every pin removes one and the last unpin inserts it again.
///
/// `last_use` is the index's own clock, which advances by one with each use. An entry can arrive
/// with an old `last_use`: a parent whose last child was just evicted.
///
/// The default is [`Lru`](super::Lru). Another is given to
/// [`Index::with_policies`](super::Index::with_policies):
///
/// ```
/// use std::collections::BTreeSet;
///
/// use kvhoist::index::{EntryId, EvictionPolicy, Index};
///
/// /// Gives up what has the lowest id: no policy anyone wants, but a short one.
/// struct LowestId(BTreeSet<EntryId>);
///
/// impl EvictionPolicy for LowestId {
///     fn insert(&mut self, id: EntryId, _last_use: u64) {
///         self.0.insert(id);
///     }
///     fn remove(&mut self, id: EntryId, _last_use: u64) {
///         self.0.remove(&id);
///     }
///     fn touch(&mut self, _id: EntryId, _from: u64, _to: u64) {}
///     fn victim(&self, _last_use: &dyn Fn(EntryId) -> u64) -> Option<EntryId> {
///         self.0.first().copied()
///     }
///     fn len(&self) -> usize {
///         self.0.len()
///     }
/// }
///
/// let index = Index::with_policies(7, |_tier| Box::new(LowestId(BTreeSet::new())));
/// assert!(index.is_empty());
/// ```
pub trait EvictionPolicy: Send {
    /// `id` may be evicted from now on. It was not held before.
    fn insert(&mut self, id: EntryId, last_use: u64);

    /// `id` may no longer be evicted, or was. `last_use` is what the policy was last told of it.
    fn remove(&mut self, id: EntryId, last_use: u64);

    /// `id`, which is held, was used: its last use moves from `from` to `to`.
    fn touch(&mut self, id: EntryId, from: u64, to: u64);

    /// The entry to give up next; `None` only where nothing is held. `last_use` answers for every
    /// entry that is held.
    fn victim(&self, last_use: &dyn Fn(EntryId) -> u64) -> Option<EntryId>;

    /// Enters many at once, none of them held before, in ascending order of last use: what a restart found.
    fn fill(&mut self, entries: &mut dyn Iterator<Item = (EntryId, u64)>) {
        entries.for_each(|(id, last_use)| self.insert(id, last_use));
    }

    /// Number of entries held.
    fn len(&self) -> usize;

    /// True where nothing is held.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
