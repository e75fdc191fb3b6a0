//! What is given up first: the seam for eviction policies.

use super::{EntryId, Lru, Rb};

/// What the index knows of an entry's uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Used {
    /// The index's clock at the last use; 0 before the first.
    pub last: u64,
    /// It was used before that too, as far as is remembered.
    pub again: bool,
}

/// Chooses which entry a tier gives up next.
///
/// The index keeps one policy a tier and holds in it exactly the entries that *may* be evicted from
/// that tier now: full, unpinned, clean, no fill under way, and no child resident there. A policy
/// only orders them; it need not know of pins, chains or slots. Entries leave and come back often:
/// every pin removes one and the last unpin inserts it again.
///
/// [`Used::last`] is of the index's own clock, which advances by one with each use. An entry can arrive
/// with an old one: a parent whose last child was just evicted.
///
/// The default is [`Lru`](super::Lru). Another is given to
/// [`Index::with_policies`](super::Index::with_policies):
///
/// ```
/// use std::collections::BTreeSet;
///
/// use kvhoist::index::{EntryId, EvictionPolicy, Index, Policy, Used};
///
/// /// Gives up what has the lowest id: no policy anyone wants, but a short one.
/// struct LowestId(BTreeSet<EntryId>);
///
/// impl EvictionPolicy for LowestId {
///     fn insert(&mut self, id: EntryId, _used: Used) {
///         self.0.insert(id);
///     }
///     fn remove(&mut self, id: EntryId, _used: Used) {
///         self.0.remove(&id);
///     }
///     fn touch(&mut self, _id: EntryId, _from: Used, _to: Used) {}
///     fn victim(&self, _last_use: &dyn Fn(EntryId) -> u64) -> Option<EntryId> {
///         self.0.first().copied()
///     }
///     fn len(&self) -> usize {
///         self.0.len()
///     }
/// }
///
/// let index = Index::with_policies(7, |_tier| Policy::Other(Box::new(LowestId(BTreeSet::new()))));
/// assert!(index.is_empty());
/// ```
pub trait EvictionPolicy: Send {
    /// `id` may be evicted from now on. It was not held before.
    fn insert(&mut self, id: EntryId, used: Used);

    /// `id` may no longer be evicted, or was. `used` is what the policy was last told of it.
    fn remove(&mut self, id: EntryId, used: Used);

    /// `id`, which is held, was used.
    fn touch(&mut self, id: EntryId, from: Used, to: Used);

    /// The entry to give up next; `None` only where nothing is held. `last_use` answers for every
    /// entry that is held.
    fn victim(&self, last_use: &dyn Fn(EntryId) -> u64) -> Option<EntryId>;

    /// Enters many at once, none of them held before, in ascending order of last use: what a restart found.
    fn fill(&mut self, entries: &mut dyn Iterator<Item = (EntryId, Used)>) {
        entries.for_each(|(id, used)| self.insert(id, used));
    }

    /// Number of entries held.
    fn len(&self) -> usize;

    /// True where nothing is held.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// True where only what callers do is a use, once a request: neither the end of a pin nor that of a fill. The
    /// calls below are made to such policies only.
    fn counts_requests(&self) -> bool {
        false
    }

    /// Takes the memory that it will need; the error is how many bytes were refused.
    fn try_reserve(&mut self) -> Result<(), usize> {
        Ok(())
    }

    /// A copy that it named as the victim is evicted. [`remove`](Self::remove) follows.
    fn evicted(&mut self, _again: bool) {}

    /// The evicted block is in no other tier: whether it comes back is for the policy to remember, by the hash of its
    /// key. `at` is the low half of the clock at the eviction.
    fn remember(&mut self, _hash: u64, _at: u32, _again: bool) {}

    /// A block that was in no tier is used. True where it was remembered.
    fn returned(&mut self, _hash: u64, _now: u32) -> bool {
        false
    }

    /// A block that was evicted at `at`, and is in another tier, is used.
    fn returned_to(&mut self, _at: u32, _now: u32, _again: bool) {}
}

/// A policy of an [`Index`](super::Index). Those that come with it are called without a table of functions.
pub enum Policy {
    /// See [`Lru`].
    Lru(Lru),
    /// See [`Rb`].
    Rb(Box<Rb>),
    /// Any other.
    Other(Box<dyn EvictionPolicy>),
}

/// Calls a method on whatever policy it is.
macro_rules! each {
    ($policy:expr, $name:ident => $call:expr) => {
        match $policy {
            Policy::Lru($name) => $call,
            Policy::Rb($name) => $call,
            Policy::Other($name) => $call,
        }
    };
}

impl EvictionPolicy for Policy {
    #[inline]
    fn insert(&mut self, id: EntryId, used: Used) {
        each!(self, policy => policy.insert(id, used));
    }

    #[inline]
    fn remove(&mut self, id: EntryId, used: Used) {
        each!(self, policy => policy.remove(id, used));
    }

    #[inline]
    fn touch(&mut self, id: EntryId, from: Used, to: Used) {
        each!(self, policy => policy.touch(id, from, to));
    }

    fn victim(&self, last_use: &dyn Fn(EntryId) -> u64) -> Option<EntryId> {
        each!(self, policy => policy.victim(last_use))
    }

    fn fill(&mut self, entries: &mut dyn Iterator<Item = (EntryId, Used)>) {
        each!(self, policy => policy.fill(entries));
    }

    #[inline]
    fn len(&self) -> usize {
        each!(self, policy => policy.len())
    }

    fn counts_requests(&self) -> bool {
        each!(self, policy => policy.counts_requests())
    }

    fn try_reserve(&mut self) -> Result<(), usize> {
        each!(self, policy => policy.try_reserve())
    }

    fn evicted(&mut self, again: bool) {
        each!(self, policy => policy.evicted(again));
    }

    fn remember(&mut self, hash: u64, at: u32, again: bool) {
        each!(self, policy => policy.remember(hash, at, again));
    }

    fn returned(&mut self, hash: u64, now: u32) -> bool {
        each!(self, policy => policy.returned(hash, now))
    }

    fn returned_to(&mut self, at: u32, now: u32, again: bool) {
        each!(self, policy => policy.returned_to(at, now, again));
    }
}
