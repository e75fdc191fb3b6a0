//! The seam for eviction policies.

use super::{EntryId, Lru, Rb};

/// The known uses of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Used {
    /// The index's clock at the last use; 0 before the first.
    pub last: u64,
    /// Uses, as far as they are remembered: 3 stands for more as well.
    pub uses: u8,
}

impl Used {
    /// It was used before its last use too.
    pub fn again(self) -> bool {
        self.uses > 1
    }
}

/// An entry that a restart found, in 16 bytes: there may be millions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Restored {
    last: u64,
    id: EntryId,
    uses: u8,
}

impl Restored {
    /// An entry and its known uses.
    pub fn new(id: EntryId, Used { last, uses }: Used) -> Self {
        Restored { last, id, uses }
    }

    /// The entry.
    pub fn id(&self) -> EntryId {
        self.id
    }

    /// Its known uses.
    pub fn used(&self) -> Used {
        Used { last: self.last, uses: self.uses }
    }
}

/// Chooses which entry a tier evicts next.
///
/// The index has one policy per tier and holds in it exactly the entries that *may* be evicted from that tier now:
/// full, unpinned, clean, no fill in flight, and no child resident there. A policy only orders them; it need not know
/// pins, chains or slots. Entries leave and come back often: every pin removes one and the last unpin inserts it again.
///
/// [`Used::last`] is a time of the index's own clock, which advances by one with each use. An entry can arrive with an
/// old one: a parent whose last child was just evicted.
///
/// [`Index::with_policies`](super::Index::with_policies) takes any policy:
///
/// ```
/// use std::collections::BTreeSet;
///
/// use kvhoist::internals::index::{EntryId, EvictionPolicy, Index, Policy, Used};
///
/// /// Evicts the lowest id: a short policy, not a good one.
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

    /// `id` may no longer be evicted, or was. `used` is as in the last call for it.
    fn remove(&mut self, id: EntryId, used: Used);

    /// `id`, which is held, was used.
    fn touch(&mut self, id: EntryId, from: Used, to: Used);

    /// The entry to evict next; `None` only if nothing is held. `last_use` answers for every entry that is held.
    fn victim(&self, last_use: &dyn Fn(EntryId) -> u64) -> Option<EntryId>;

    /// Enters many at once, none of them held before, in ascending order of last use: the blocks of a restart.
    fn fill(&mut self, entries: &[Restored]) {
        entries.iter().for_each(|entry| self.insert(entry.id(), entry.used()));
    }

    /// Number of entries held.
    fn len(&self) -> usize;

    /// True if nothing is held.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// True if only calls are uses, once per request: neither the end of a pin nor that of a fill. The calls below are
    /// made to such policies only.
    fn counts_requests(&self) -> bool {
        false
    }

    /// Allocates the memory that the policy will need; the error is the number of bytes that were refused.
    fn try_reserve(&mut self) -> Result<(), usize> {
        Ok(())
    }

    /// The copy that [`victim`](Self::victim) named is evicted. [`remove`](Self::remove) follows.
    fn evicted(&mut self, _used: Used, _now: u64) {}

    /// The evicted block is in no tier now: the policy remembers it, by the hash of its key. `at` is the low half of
    /// the clock at the eviction.
    fn remember(&mut self, _hash: u64, _at: u32, _uses: u8) {}

    /// A block that was in no tier is used. Returns its uses if it was remembered; else 0.
    fn returned(&mut self, _hash: u64, _now: u32) -> u8 {
        0
    }

    /// A block that was evicted at `at`, and is in another tier, is used.
    fn returned_to(&mut self, _at: u32, _now: u32, _uses: u8) {}

    /// A resident block in its first use is used again, `_after` uses later.
    fn reused(&mut self, _after: u64) {}

    /// True if the tier, which is full, should not take a new block. `coin` is one random draw for it and its
    /// successors.
    fn refuses(&self, _coin: u64) -> bool {
        false
    }

    /// A new block is admitted. It may not be resident yet when its successors in the chain arrive.
    fn accepted(&mut self, _hash: u64) {}

    /// True if a new block was admitted recently.
    fn was_accepted(&self, _hash: u64) -> bool {
        false
    }

    /// A block was refused, which is a use. `at` is the low half of the clock.
    fn refused(&mut self, _hash: u64, _at: u32) {}

    /// True if a block that is in no tier is remembered, so that this is not its first use.
    fn remembers(&self, _hash: u64) -> bool {
        false
    }
}

/// A policy of an [`Index`](super::Index). The built-in ones are called statically.
pub enum Policy {
    /// See [`Lru`].
    Lru(Lru),
    /// See [`Rb`].
    Rb(Box<Rb>),
    /// Any other.
    Other(Box<dyn EvictionPolicy>),
}

/// Calls a method of the policy.
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

    fn fill(&mut self, entries: &[Restored]) {
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

    fn evicted(&mut self, used: Used, now: u64) {
        each!(self, policy => policy.evicted(used, now));
    }

    fn remember(&mut self, hash: u64, at: u32, uses: u8) {
        each!(self, policy => policy.remember(hash, at, uses));
    }

    fn returned(&mut self, hash: u64, now: u32) -> u8 {
        each!(self, policy => policy.returned(hash, now))
    }

    fn returned_to(&mut self, at: u32, now: u32, uses: u8) {
        each!(self, policy => policy.returned_to(at, now, uses));
    }

    #[inline]
    fn reused(&mut self, after: u64) {
        each!(self, policy => policy.reused(after));
    }

    fn refuses(&self, coin: u64) -> bool {
        each!(self, policy => policy.refuses(coin))
    }

    fn accepted(&mut self, hash: u64) {
        each!(self, policy => policy.accepted(hash));
    }

    fn was_accepted(&self, hash: u64) -> bool {
        each!(self, policy => policy.was_accepted(hash))
    }

    fn refused(&mut self, hash: u64, at: u32) {
        each!(self, policy => policy.refused(hash, at));
    }

    fn remembers(&self, hash: u64) -> bool {
        each!(self, policy => policy.remembers(hash))
    }
}
