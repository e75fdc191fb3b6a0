//! The prefix-hash index: which block is in which tier.
//!
//! For every known block the index holds its parent in the prefix chain and, per tier, its slot, its pins, whether a
//! fill is in flight and whether the copy is dirty. From these it maintains, per tier, the lists of copies that may be
//! evicted now and of those that must be demoted before. It is pure data: no I/O, no threads, no clock but a count of
//! uses, and no randomness but the seed. The same calls give the same answers.
//!
//! # Life of an entry
//!
//! [`insert`](Index::insert) creates an entry. An unknown parent becomes a *ghost*: an entry that is resident nowhere
//! and exists because a child names it. An entry is removed, and its id becomes invalid, as soon as it has no slot in
//! any tier, no fill is in flight and no other entry names it as its parent. A ghost names no parent itself: the next
//! store of the block names it again. So there are never more ghosts than blocks that are resident or being filled, and
//! the end of a ghost ends no other.
//!
//! An id is therefore valid while one of these conditions holds or, after `insert` or [`find`](Index::find), until the
//! next call that removes something. A lease or a movement, which keeps an id for longer, keeps a pin or a fill. With
//! an invalid id the methods panic, or answer for another entry that got the same number: that is a bug of the caller,
//! which no key and no file can cause.
//!
//! [`remove`](Index::remove) takes an entry out of the map at once. A pinned copy or a fill lives on under its id,
//! unreachable by key, until the last unpin or the end of the fill; meanwhile the key can be inserted again.
//!
//! # What may be evicted
//!
//! A copy that is full, unpinned and clean, of a block that is not being filled in any tier (a fill may read from any
//! copy). A suffix without its prefix is useless, so leaves are evicted first, in the order of the policy: the copies
//! that have no child with a copy in the same tier.
//!
//! If no leaf can be evicted, every leaf is *held*: pinned, dirty or being filled. Then the copy right above held ones
//! is evicted, the deepest of its chain that can be. That makes its parent a leaf, so the chain shrinks from its end,
//! and the rest is a prefix that can still be matched. The held copies stay where they are and can be read by their
//! keys; when they are no longer held they are leaves like all others. If the evicted block is in another tier, or is
//! stored again, the chain is whole again. So a reader never blocks more of a tier than the copies that it has pinned.
//!
//! Hints take precedence over that order: a [released](Index::release) leaf is evicted first, a [kept](Index::keep) one
//! last.
//!
//! # What counts as a use
//!
//! The calls that ask for a block, whatever the policy: [`touch`](Index::touch), [`touch_chain`](Index::touch_chain),
//! [`announce`](Index::announce) and [`pin_used`](Index::pin_used). Movements are none: neither the end of a pin nor
//! that of a fill, which must not make a cold block recent. The exception is the first fill to complete of a block that
//! was resident nowhere, if no call has used the block since that began: it is being stored.
//!
//! [`Rb`] needs the number of requests for a block: with this policy several uses in one request count as one. A
//! request begins with [`begin_request`](Index::begin_request) and ends with the next one, or when two uses for each of
//! its blocks have been counted; outside of a request each call counts as one. An [announced](Index::announce) use is
//! not counted again when it follows, whatever requests begin in between.
//!
//! # Bytes
//!
//! An entry takes 128 bytes of slab, with its key, its links in the orders of eviction and its tag, and 3 bits in the
//! frontier sets, and a chain of the map 4 bytes. A dirty, released or kept copy takes a node of 24 bytes and 17 bytes
//! of table, which is between 7/16 and 7/8 full, a late arrival about 24 bytes. Slab and map double if
//! [`try_reserve`](Index::try_reserve) was not called. `tests/process/index_bytes.rs` measures and bounds them.
//!
//! # Cost
//!
//! A held leaf is counted by its parent at once, a held inner copy only during the search for a
//! [`victim`](Index::victim) when no leaf can be evicted: pinning and unpinning an inner block changes that block
//! alone.
//!
//! Every operation is O(1), with these exceptions. A late arrival in an order by last use is O(log n). A search for a
//! victim takes copies out of the order that may not be evicted, each of which cost an arrival, and arrives late when
//! it may be evicted again; when no leaf can be evicted but kept ones, it compares 64 copies, and takes a step for
//! each inner copy that was pinned since the last such search. `touch_chain` is linear in its ids. A
//! use of a released block takes at most 64 steps up its chain, and so does a search for a victim after it. Linking a
//! block that has children to a parent that has parents walks up the chain in search of a cycle, 16,384 steps at most.

mod chain;
mod entry;
mod eviction_order;
mod ghosts;
mod hash;
mod hints;
mod kept;
mod link;
mod lru;
mod map;
mod pages;
mod place;
mod policy;
mod prefetch;
mod rb;
mod recency_list;
mod residency;
mod restore;
mod used;
mod uses;
mod validate;
mod write_outcomes;
mod write_value;

pub use hash::KeyHasher;
pub use lru::Lru;
pub use policy::{Eviction, Policy};
pub use rb::Rb;
pub use used::Used;
pub use write_value::Worth;

use std::collections::BTreeSet;

use kvhoist_base::{
    bits::BitSet,
    block::{BlockKey, Tier},
};
use slab::Slab;

use self::{
    entry::{Entry, List},
    kept::Kept,
    link::{LATE, NONE},
    map::KeyMap,
    recency_list::RecencyList,
    write_outcomes::WriteValues,
};

/// Steps of a walk up a chain in search of a cycle. Beyond that the link is refused, which costs no more than the order
/// of eviction. The walk holds the lock that all callers share: it takes about a tenth of a millisecond, or a
/// millisecond if no entry is in the processor's caches.
const ANCESTORS_MAX: usize = 1 << 14;

/// Names an entry of an [`Index`] while that entry lives; the head of the module says for how long that is.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Ord, PartialOrd, Debug)]
pub struct EntryId(u32);

impl EntryId {
    /// The id of no entry.
    pub const NONE: EntryId = EntryId(NONE);

    /// The entry of this number.
    pub const fn from_u32(id: u32) -> Self {
        EntryId(id)
    }

    /// Its number: small, and reused.
    pub const fn as_u32(self) -> u32 {
        self.0
    }
}

/// Which blocks are resident where, and what each tier evicts next.
pub struct Index {
    entries: Slab<Entry>,
    /// The address of the first one, for [hints](Self::prefetch): to read an entry's tag would be to wait for it.
    entries_at: usize,
    /// Finds entries by key; those that were removed are not in it.
    map: KeyMap,
    hasher: KeyHasher,
    /// Uses so far. Stays at its maximum should a store ever say so.
    clock: u64,
    policies: [Policy; Tier::COUNT],
    /// Some policy counts requests.
    counts_requests: bool,
    /// The clock at the begin of the current request, and at its end at the latest.
    request: std::ops::Range<u64>,
    /// Copies that may be evicted in the order of the policy.
    evictable: [usize; Tier::COUNT],
    /// The lists in order of last use, whatever the policy: those before [`List::Policy`].
    lists: [[RecencyList; Tier::COUNT]; List::BY_LAST_USE.len()],
    kept: Kept,
    /// Released blocks below which one was used since.
    taking_back: BTreeSet<BlockKey>,
    /// By id, the copies right above held ones: the search for a victim begins at them if no leaf can be evicted.
    frontier: [BitSet; Tier::COUNT],
    /// Full copies of entries in the map.
    resident: [usize; Tier::COUNT],
    /// Entries in the map that are full in some tier.
    blocks: usize,
    /// During recovery only: shortcuts up the chains.
    tops: restore::Tops,
    /// The clock at the end of recovery.
    restored_at: u64,
    /// Blocks that were used again, after [`note_reused`](Index::note_reused).
    reused: Option<Vec<BlockKey>>,
    /// Which blocks are worth a write to disk, after [`value_writes`](Index::value_writes).
    values: Option<Box<WriteValues>>,
}

impl Index {
    /// An empty index that evicts by LRU in every tier.
    ///
    /// Attackers may choose keys, so in production `seed` is random; in a simulation it is fixed.
    pub fn new(seed: u64) -> Self {
        Self::with_policies(seed, |_| Policy::Lru(Lru::new()))
    }

    /// An empty index with an eviction policy for each tier.
    pub fn with_policies(seed: u64, policies: impl FnMut(Tier) -> Policy) -> Self {
        let policies = Tier::ALL.map(policies);
        Index {
            counts_requests: policies.iter().any(|policy| policy.rb().is_some()),
            request: 0..0,
            entries: Slab::new(),
            entries_at: 0,
            map: KeyMap::default(),
            hasher: KeyHasher::new(seed),
            clock: 0,
            policies,
            evictable: [0; Tier::COUNT],
            lists: Default::default(),
            kept: Kept::default(),
            taking_back: BTreeSet::new(),
            frontier: std::array::from_fn(|_| BitSet::new(0)),
            resident: [0; Tier::COUNT],
            blocks: 0,
            tops: restore::Tops::default(),
            restored_at: 0,
            reused: None,
            values: None,
        }
    }

    /// Reserves room for exactly `entries` more entries: nothing moves until then. This takes address space; memory
    /// follows with the entries. The error is the number of bytes that were refused.
    pub fn try_reserve(&mut self, entries: usize) -> Result<(), usize> {
        let room = self.entries.len().saturating_add(entries);
        let bytes = room.saturating_mul(size_of::<Entry>() + size_of::<u32>());
        // Slab and map themselves could only panic. This allocates, and frees, what each then takes.
        Vec::<Entry>::new().try_reserve_exact(room).map_err(|_| bytes)?;
        self.entries.reserve_exact(entries);
        Vec::<u32>::new().try_reserve_exact(room).map_err(|_| bytes)?;
        self.reach_capacity();
        self.policies.iter_mut().try_for_each(Policy::try_reserve)
    }

    /// The entry of `key`, also where it is resident nowhere: a ghost, or a first fill under way.
    #[inline]
    pub fn find(&self, key: &BlockKey) -> Option<EntryId> {
        self.map.find(&self.entries, self.hasher.hash(key), key).map(EntryId)
    }

    /// The hash of its keys.
    pub fn hasher(&self) -> &KeyHasher {
        &self.hasher
    }

    /// The key of an entry.
    pub fn key(&self, id: EntryId) -> BlockKey {
        self.entry(id).key
    }

    /// The key of the block before it in its chain; `None` for the first, or if it is not known.
    pub fn parent_key(&self, id: EntryId) -> Option<BlockKey> {
        let parent = self.entry(id).parent;
        (parent != NONE).then(|| self.entries[parent as usize].key)
    }

    /// Finds the entry of `key`, or makes one that is resident nowhere.
    ///
    /// A `parent` that is unknown becomes a ghost. An entry keeps the parent that it was first given; one
    /// that had none, or whose parent was removed, takes `parent`. A parent that is the key itself or
    /// one of its descendants is ignored: no true prefix chain has that.
    ///
    /// An entry that is not filled must be given up, by [`abort_fill`](Self::abort_fill) or [`remove`](Self::remove).
    pub fn insert(&mut self, key: BlockKey, parent: Option<BlockKey>) -> EntryId {
        let id = self.find_or_create(key);
        if let Some(parent) = parent
            && parent != key
        {
            self.link(id, parent, Self::is_ancestor);
        }
        if self.values.is_some() {
            self.toss_coin(id);
        }
        id
    }

    /// Number of entries that can be found, ghosts included.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// True if no entry can be found.
    pub fn is_empty(&self) -> bool {
        self.map.len() == 0
    }

    #[inline]
    fn entry(&self, id: EntryId) -> &Entry {
        &self.entries[id.0 as usize]
    }

    #[inline]
    fn entry_mut(&mut self, id: EntryId) -> &mut Entry {
        &mut self.entries[id.0 as usize]
    }

    #[inline]
    fn parent(&self, id: EntryId) -> Option<EntryId> {
        let parent = self.entry(id).parent;
        (parent != NONE).then_some(EntryId(parent))
    }

    /// The hash of an entry's key.
    #[inline]
    fn hash_of(&self, id: EntryId) -> u64 {
        self.hasher.hash(&self.entry(id).key)
    }

    /// Reserves room in the map and the sets for every id that the slab may assign without growing.
    fn reach_capacity(&mut self) {
        let ids = u32::try_from(self.entries.capacity()).unwrap_or(u32::MAX);
        self.frontier.iter_mut().for_each(|set| set.grow(ids));
        self.map.grow(&mut self.entries, |key| self.hasher.hash(key));
    }

    fn find_or_create(&mut self, key: BlockKey) -> EntryId {
        self.find_or_create_with(&key, |_| ()).0
    }

    /// Finds the entry of `key`, or creates one and has it set up. True if it was created.
    #[inline]
    fn find_or_create_with(&mut self, key: &BlockKey, set_up: impl FnOnce(&mut Entry)) -> (EntryId, bool) {
        let hash = self.hasher.hash(key);
        if let Some(id) = self.map.find(&self.entries, hash, key) {
            return (EntryId(id), false);
        }
        if self.entries.len() == self.entries.capacity() {
            self.entries.reserve(1);
            self.reach_capacity();
        }
        // Set up where it lies: copied from the stack, its fields would be read before they have reached the
        // processor's cache, and every entry would wait for the stores before it.
        let at = self.entries.insert(Entry::EMPTY);
        let entry = &mut self.entries[at];
        self.entries_at = std::ptr::from_ref(entry).addr() - at * size_of::<Entry>();
        entry.key = *key;
        set_up(entry);
        let id = u32::try_from(at).expect("memory ends long before ids do");
        assert!(id < LATE, "memory ends long before ids do");
        self.map.insert(&mut self.entries, hash, id);
        if let Some(values) = &mut self.values {
            values.forget_chain(id);
        }
        (EntryId(id), true)
    }
}

kvhoist_base::debug_fields!(Index, index => len: index.len(), resident: index.resident, clock: index.clock);
