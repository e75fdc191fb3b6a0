//! The order in which a tier evicts.

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
pub enum Policy {
    /// See [`Lru`].
    Lru(Lru),
    /// See [`Rb`].
    Rb(Box<Rb>),
}

/// Calls a method of the policy.
macro_rules! each {
    ($policy:expr, $name:ident => $call:expr) => {
        match $policy {
            Policy::Lru($name) => $call,
            Policy::Rb($name) => $call,
        }
    };
}

impl Policy {
    /// The policy, if it counts uses by requests: only calls are uses, once per request, neither the end of a pin nor
    /// that of a fill.
    pub(super) fn rb(&self) -> Option<&Rb> {
        match self {
            Policy::Rb(rb) => Some(rb),
            Policy::Lru(_) => None,
        }
    }

    /// As [`rb`](Self::rb), to change it.
    #[inline]
    pub(super) fn rb_mut(&mut self) -> Option<&mut Rb> {
        match self {
            Policy::Rb(rb) => Some(rb),
            Policy::Lru(_) => None,
        }
    }

    /// Allocates the memory that the policy will need; the error is the number of bytes that were refused.
    pub(super) fn try_reserve(&mut self) -> Result<(), usize> {
        self.rb_mut().map_or(Ok(()), Rb::try_reserve)
    }

    /// `id` may be evicted from now on. It was not held before.
    #[inline]
    pub(super) fn insert(&mut self, id: EntryId, used: Used) {
        each!(self, policy => policy.insert(id, used));
    }

    /// `id` may no longer be evicted, or was. `used` is as in the last call for it.
    #[inline]
    pub(super) fn remove(&mut self, id: EntryId, used: Used) {
        each!(self, policy => policy.remove(id, used));
    }

    /// `id`, which is held, was used.
    #[inline]
    pub(super) fn touch(&mut self, id: EntryId, from: Used, to: Used) {
        each!(self, policy => policy.touch(id, from, to));
    }

    /// The entry to evict next; `None` only if nothing is held. `last_use` answers for every entry that is held.
    pub(super) fn victim(&self, last_use: &dyn Fn(EntryId) -> u64) -> Option<EntryId> {
        each!(self, policy => policy.victim(last_use))
    }

    /// Enters many at once, none of them held before, in ascending order of last use: the blocks of a restart.
    pub(super) fn fill(&mut self, entries: &[Restored]) {
        match self {
            Policy::Lru(lru) => lru.fill(entries.iter()),
            Policy::Rb(rb) => rb.fill(entries),
        }
    }

    /// Number of entries held.
    #[inline]
    pub(super) fn len(&self) -> usize {
        each!(self, policy => policy.len())
    }

    /// True if `id` is held. `used` are its last known uses.
    pub(super) fn contains(&self, id: EntryId, used: Used) -> bool {
        match self {
            Policy::Lru(lru) => lru.contains(id, used.last),
            Policy::Rb(rb) => rb.contains(id, used),
        }
    }

    /// Checks the order. `used` is what is known of an entry that is held.
    pub(super) fn validate(&self, used: &dyn Fn(EntryId) -> Used) -> Result<(), String> {
        match self {
            Policy::Lru(lru) => lru.validate(&|id| used(id).last),
            Policy::Rb(rb) => rb.validate(used),
        }
    }
}
