//! The order in which a tier evicts.

use kvhoist_base::block::Tier;
use serde::{Deserialize, Serialize};
use slab::Slab;

use super::{EntryId, Lru, Rb, Used, entry::Entry};

/// Which blocks host memory and disk evict first. Under every policy, the last blocks of a prefix chain go before those
/// that precede them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Eviction {
    /// The least recently used block.
    Lru,
    /// Keeps blocks used in one request apart from blocks used in several, and evicts from the colder group, weighed by
    /// how often each group's evicted blocks are requested again (see [`Rb`]). Better than `Lru` if
    /// many blocks are used once and the tier is small. Takes up to 48 bytes more per slot.
    #[default]
    Rb,
    /// Like `Rb`, with admission control in the last tier (disk, or host memory without a disk tier): while evicted
    /// blocks are requested again more often than new ones, the tier refuses a part of the new blocks, each with the
    /// rest of its chain. A refusal is not an error: the block stays in host memory only, or without a disk tier
    /// becomes a miss. Refusals are counted (`TierStats::refused`).
    RbRefuse,
}

impl Eviction {
    /// Every choice.
    #[doc(hidden)]
    pub const ALL: &[Eviction] = &[Eviction::Lru, Eviction::Rb, Eviction::RbRefuse];
}

/// Chooses which entry a tier evicts next.
///
/// The index has one policy per tier. It orders the entries with a copy there by their uses; need not know pins, chains
/// or slots; and names the first that may be evicted. An entry is in the order, whose links it
/// holds, from the time that its copy is a leaf until that goes or has a child, or until the search for a victim finds
/// that it may not be evicted; from then on until it may.
///
/// [`Used::last`] is a time of the index's own clock, which advances by one with each use. An entry can arrive with an
/// old one: a parent whose last child was just evicted.
pub enum Policy {
    /// See [`Lru`].
    Lru(Lru),
    /// See [`Rb`].
    Rb(Box<Rb>),
}

impl Policy {
    /// The policy of a tier of so many slots.
    pub fn new(eviction: Eviction, is_last_tier: bool, slots: u32) -> Self {
        match eviction {
            Eviction::Lru => Policy::Lru(Lru::new()),
            Eviction::RbRefuse if is_last_tier => Policy::Rb(Box::new(Rb::refusing(slots))),
            Eviction::Rb | Eviction::RbRefuse => Policy::Rb(Box::new(Rb::new(slots))),
        }
    }

    /// The policy, if it counts uses by requests: several in one request are one.
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

    /// Enters `id` in the order.
    #[inline]
    pub(super) fn insert(&mut self, entries: &mut Slab<Entry>, tier: Tier, id: EntryId) {
        let used = entries[id.0 as usize].used();
        self.list_of(used).insert(entries, tier, id);
    }

    /// Takes `id` out of the order, if it is in.
    #[inline]
    pub(super) fn remove(&mut self, entries: &mut Slab<Entry>, tier: Tier, id: EntryId) {
        let used = entries[id.0 as usize].used();
        self.list_of(used).remove(entries, tier, id, used.last);
    }

    /// `id`, which is in the order, was used: before, its uses were `from`.
    #[inline]
    pub(super) fn touch(&mut self, entries: &mut Slab<Entry>, tier: Tier, id: EntryId, from: Used) {
        let to = entries[id.0 as usize].used();
        if matches!(self, Policy::Lru(_)) || from.again() == to.again() {
            return self.list_of(to).touch(entries, tier, id, from.last);
        }
        self.list_of(from).remove(entries, tier, id, from.last);
        self.list_of(to).insert(entries, tier, id);
    }

    /// The list of entries with these uses.
    #[inline]
    fn list_of(&mut self, used: Used) -> &mut Lru {
        match self {
            Policy::Lru(lru) => lru,
            Policy::Rb(rb) => rb.list_of(used),
        }
    }

    /// The entry to evict next; `None` only if none may be evicted.
    pub(super) fn victim(&mut self, entries: &mut Slab<Entry>, tier: Tier) -> Option<EntryId> {
        match self {
            Policy::Lru(lru) => lru.victim(entries, tier),
            Policy::Rb(rb) => rb.victim(entries, tier),
        }
    }

    /// Whether a block with these uses is evicted before the other one.
    pub(super) fn is_before(&self, one: Used, other: Used) -> bool {
        match self {
            Policy::Rb(rb) => rb.is_before(one, other),
            Policy::Lru(_) => one.last < other.last,
        }
    }

    /// The entries in the order of eviction as it is now, also those that may not be evicted.
    pub(super) fn coldest_first<'a>(
        &'a self,
        entries: &'a Slab<Entry>,
        tier: Tier,
    ) -> Box<dyn Iterator<Item = EntryId> + 'a> {
        match self {
            Policy::Lru(lru) => Box::new(lru.coldest_first(entries, tier).map(|(_, id)| id)),
            Policy::Rb(rb) => Box::new(rb.coldest_first(entries, tier).map(|(_, id)| id)),
        }
    }

    /// Checks the order. Returns how many entries are in it.
    pub(super) fn validate(&self, entries: &Slab<Entry>, tier: Tier) -> Result<usize, String> {
        match self {
            Policy::Lru(lru) => lru.validate(entries, tier, &|_| true),
            Policy::Rb(rb) => rb.validate(entries, tier),
        }
    }
}
