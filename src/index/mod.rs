//! Who is where: the prefix-hash index.
//!
//! For every known block the index holds its parent in the prefix chain and, per tier, its slot, its
//! pins, whether a fill is under way and whether the copy is dirty. From that it keeps, per tier, the
//! list of what may be evicted now and the list of what must be demoted first. It is pure data: no
//! I/O, no threads, no clock but a count of uses, and no randomness but the seed it is given; the
//! same calls give the same answers.
//!
//! # Life of an entry
//!
//! [`insert`](Index::insert) makes an entry; its parent, where unknown, becomes a *ghost*: an entry
//! that is resident nowhere and exists because a child names it. An entry goes, and its id with it,
//! as soon as it has no slot in any tier, no fill is under way and no other entry names it as its
//! parent. A ghost names no parent itself: whoever stores the block again says it anew. So there are never more
//! ghosts than blocks that are resident or being filled, and none takes a row of others with it. So an id is good while
//! one of these holds or, after `insert` or [`find`](Index::find), until the next call that takes something away.
//! Whoever keeps an id for longer (a lease, a movement) keeps a pin or a fill. The methods panic on an id that is not
//! good, or where its number was given out anew answer for another entry: that is a bug of the caller, which
//! no key and no file can cause.
//!
//! [`remove`](Index::remove) takes an entry out of the map at once. What is pinned or filling then
//! lives on under its id, out of sight, until the last unpin or the end of the fill; the key can
//! be inserted anew meanwhile.
//!
//! # What may be evicted
//!
//! A copy that is full, unpinned and clean, of a block that is not being filled in any tier (a fill
//! may read from any copy). A suffix without its prefix is useless, so leaves go first, in the order of the policy:
//! the copies that have no child with a copy in the same tier.
//!
//! Where no leaf can go, every leaf is *held*: pinned, dirty or being filled. Then the copy right above held ones goes,
//! the deepest of its chain that can. That makes the block above it a leaf, so the chain shrinks from its end on, as
//! far as it is free, and what is left of it is a prefix that can still be matched. The held copies below stay where
//! they are and can be read by their keys; once let go they are leaves like all others. If the block that went is in
//! another tier, or is stored again, the chain is whole as before. So one reader never keeps more of a tier than the
//! blocks that it has pinned.
//!
//! What callers say of chains goes before that order: a leaf that is [released](Index::release) goes first, one that is
//! [kept](Index::keep) last.
//!
//! # What counts as a use
//!
//! The last unpin and every other, [`touch`](Index::touch), [`touch_chain`](Index::touch_chain), and a
//! fill that completes, unless a faster tier holds the block already: a demotion must not make a
//! cold block recent.
//!
//! A policy that [counts requests](EvictionPolicy::counts_requests), [`Rb`] above all, wants to know how often a block
//! was asked for, not how often it was moved. Where there is one, the ends of pins and fills are no uses, but for the
//! fill of a block that was never used (it is being stored), and what is used several times in one request was used
//! once. A request is what follows [`begin_request`](Index::begin_request) until the next one, or until two uses for
//! each of its blocks have been counted; outside of one, each call is a request of its own. A use that was
//! [announced](Index::announce) is not counted again when it follows, however many requests begin in between.
//!
//! # Bytes
//!
//! An entry takes 96 bytes of slab with its key and its tag and 3 bits of where held copies end, a map place 5 bytes, a
//! place in an LRU list a node of 24 bytes and 17 bytes of table; tables are between 7/16 and 7/8 full, and the slab
//! doubles where [`try_reserve`](Index::try_reserve) was not called.
//! `tests/index_bytes.rs` measures and bounds them.
//!
//! # Cost
//!
//! A held leaf is counted by its parent at once, a held inner copy only when a [`victim`](Index::victim) is looked for
//! and no leaf may go: to pin and unpin an inner block changes that block alone.
//!
//! Every operation is O(1) but for these: a late arrival in an [`Lru`] is O(log n); a search for a victim where no leaf
//! may go takes a step for each inner copy that was pinned since the last such search;
//! `touch_chain` and `match_prefix` are linear in their keys; and linking a block that has children to a parent that
//! has parents walks up the chain in search of a cycle, 16,384 steps at most.

mod entry;
mod ghosts;
mod hash;
mod hints;
mod kept;
mod lru;
mod pages;
mod policy;
mod prefix;
mod radix;
mod rb;
mod recency;
mod residency;
mod restore;
mod validate;
mod values;
mod worth;

pub use lru::Lru;
pub use policy::{EvictionPolicy, Policy, Used};
pub use prefix::PrefixMatch;
pub use rb::Rb;
pub use worth::Worth;

use std::fmt;

use hashbrown::{HashTable, hash_table};
use slab::Slab;

use self::{
    entry::{Entry, HELD, List, NONE},
    hash::KeyHasher,
    kept::Kept,
    values::WriteValues,
};
use crate::{
    bits::BitSet,
    block::{BlockKey, Tier},
};

/// Steps of a walk up a chain in search of a cycle; where it would take more the link is refused, which
/// costs no more than the order of eviction. The walk is made under the lock that all callers share: it takes about a
/// tenth of a millisecond, a millisecond where no entry is in the processor's caches.
const ANCESTORS_MAX: usize = 1 << 14;

/// Names an entry of an [`Index`] while that entry lives; the head of the module says for how long that is.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Ord, PartialOrd, Debug)]
pub struct EntryId(u32);

impl EntryId {
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
    /// Finds entries by key; those that were removed are not in it.
    map: HashTable<u32>,
    hasher: KeyHasher,
    /// Uses so far. Stays at its maximum should a store ever say so.
    clock: u64,
    policies: [Policy; Tier::COUNT],
    /// Some policy counts requests.
    counts_requests: bool,
    /// The clock when the request began whose uses are being counted, and when it is over at the latest.
    request: std::ops::Range<u64>,
    /// What is not in the order of the policy, but of last use: the lists before [`List::Policy`].
    lists: [[Lru; Tier::COUNT]; List::BY_LAST_USE.len()],
    kept: Kept,
    /// By id, the copies right above held ones: where no leaf may go, the search for what may begins at them.
    frontier: [BitSet; Tier::COUNT],
    /// Full copies of entries in the map.
    resident: [usize; Tier::COUNT],
    /// Entries in the map that are full in some tier.
    blocks: usize,
    /// During recovery only: shortcuts up the chains.
    tops: restore::Tops,
    /// Which blocks are worth a write to disk, where that is asked.
    values: Option<Box<WriteValues>>,
}

impl Index {
    /// An empty index that evicts by LRU in every tier.
    ///
    /// Keys may be chosen by strangers, so in production `seed` is random; in a simulation it is fixed.
    pub fn new(seed: u64) -> Self {
        Self::with_policies(seed, |_| Policy::Lru(Lru::new()))
    }

    /// An empty index with an eviction policy for each tier.
    pub fn with_policies(seed: u64, policies: impl FnMut(Tier) -> Policy) -> Self {
        let policies = Tier::ALL.map(policies);
        Index {
            counts_requests: policies.iter().any(Policy::counts_requests),
            request: 0..0,
            entries: Slab::new(),
            map: HashTable::new(),
            hasher: KeyHasher::new(seed),
            clock: 0,
            policies,
            lists: std::array::from_fn(|_| std::array::from_fn(|_| Lru::new())),
            kept: Kept::default(),
            frontier: std::array::from_fn(|_| BitSet::new(0)),
            resident: [0; Tier::COUNT],
            blocks: 0,
            tops: restore::Tops::default(),
            values: None,
        }
    }

    /// Makes room for `entries` more entries, exactly: nothing moves until then. Address space is what it takes; memory
    /// comes with the entries. Where there is not enough, the error is how many bytes were asked for.
    pub fn try_reserve(&mut self, entries: usize) -> Result<(), usize> {
        let (slab, hasher) = (&self.entries, &self.hasher);
        let bytes = entries.saturating_mul(size_of::<Entry>() + size_of::<u32>());
        self.map.try_reserve(entries, |&id| hasher.hash(&slab[id as usize].key)).map_err(|_| bytes)?;
        // The slab itself could only panic. This gives the place back that it then takes.
        Vec::<Entry>::new().try_reserve_exact(slab.len().saturating_add(entries)).map_err(|_| bytes)?;
        self.entries.reserve_exact(entries);
        self.reach_capacity();
        self.policies.iter_mut().try_for_each(Policy::try_reserve)
    }

    /// The entry of `key`, also where it is resident nowhere: a ghost, or a first fill under way.
    #[inline]
    pub fn find(&self, key: &BlockKey) -> Option<EntryId> {
        let hash = self.hasher.hash(key);
        self.map.find(hash, |&id| self.entries[id as usize].key == *key).map(|&id| EntryId(id))
    }

    /// The key of an entry.
    pub fn key(&self, id: EntryId) -> BlockKey {
        self.entry(id).key
    }

    /// The key of the block before it in its chain; `None` for the first, or where it was never told.
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
    /// An entry that comes to nothing must be given up, by [`abort_fill`](Self::abort_fill) or
    /// [`remove`](Self::remove).
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

    /// True where no entry can be found.
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
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

    /// Makes room in the sets for every id that the slab may give without growing.
    fn reach_capacity(&mut self) {
        let ids = u32::try_from(self.entries.capacity()).unwrap_or(u32::MAX);
        self.frontier.iter_mut().for_each(|set| set.grow(ids));
    }

    fn find_or_create(&mut self, key: BlockKey) -> EntryId {
        let Index { entries, map, hasher, .. } = self;
        let capacity = entries.capacity();
        let entry = map.entry(
            hasher.hash(&key),
            |&id| entries[id as usize].key == key,
            |&id| hasher.hash(&entries[id as usize].key),
        );
        match entry {
            hash_table::Entry::Occupied(found) => EntryId(*found.get()),
            hash_table::Entry::Vacant(place) => {
                let id = u32::try_from(entries.insert(Entry::new(key))).expect("memory ends long before ids do");
                assert!(id != NONE, "memory ends long before ids do");
                place.insert(id);
                if entries.capacity() != capacity {
                    self.reach_capacity();
                }
                if let Some(values) = &mut self.values {
                    values.forget_chain(id);
                }
                EntryId(id)
            }
        }
    }

    /// Makes the entry of `parent` the parent of `id`, unless it has one in the map already, or `is_ancestor` says that
    /// this would make a circle.
    fn link(&mut self, id: EntryId, parent: BlockKey, is_ancestor: impl FnOnce(&mut Self, EntryId, EntryId) -> bool) {
        if self.parent(id).is_some_and(|current| !self.entry(current).is_removed()) {
            return;
        }
        let parent = self.find_or_create(parent);
        // A fresh ghost names nobody and a block without children is nobody's ancestor: the walk is rare.
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
    fn unlink(&mut self, id: EntryId) {
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

    /// True where `id` is `of` or above it, or where the chain is too long to tell.
    fn is_ancestor(&mut self, id: EntryId, of: EntryId) -> bool {
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

    /// Takes the link to its parent from an entry that is resident nowhere, and the entry too if nobody names it; then
    /// the ghost that only it named, which names nobody.
    fn collect(&mut self, mut id: EntryId) {
        while !self.entry(id).occupies_any() {
            if self.counts_requests {
                self.remember_evictions(id);
            }
            let entry = self.entry_mut(id);
            let parent = std::mem::replace(&mut entry.parent, NONE);
            let (is_named, removed, key) = (entry.is_named(), entry.is_removed(), entry.key);
            if is_named && parent == NONE {
                return;
            }
            self.tops.forget();
            if !is_named {
                let entry = self.entries.remove(id.0 as usize);
                if entry.is_kept() {
                    self.kept.forget(id.0);
                }
                if !removed {
                    self.unmap(id, &key);
                }
            }
            if parent == NONE {
                return;
            }
            id = EntryId(parent);
        }
    }

    fn unmap(&mut self, id: EntryId, key: &BlockKey) {
        let found = self.map.find_entry(self.hasher.hash(key), |&other| other == id.0);
        found.expect("an entry that was not removed is in the map").remove();
    }

    fn child_arrived(&mut self, parent: EntryId, tier: Tier) {
        self.entry_mut(parent).place_mut(tier).children += 1;
        self.weigh(parent, tier);
        self.relist(parent, tier);
    }

    fn child_left(&mut self, parent: EntryId, tier: Tier) {
        self.entry_mut(parent).place_mut(tier).children -= 1;
        self.weigh(parent, tier);
        self.relist(parent, tier);
    }
}

impl fmt::Debug for Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Index")
            .field("len", &self.len())
            .field("resident", &self.resident)
            .field("clock", &self.clock)
            .finish_non_exhaustive()
    }
}
