//! A table by key and tier, with the seeded hash of the index: an attacker cannot aim keys at one bucket.

use hashbrown::{HashTable, hash_table::Entry};
use slab::Slab;

use crate::{
    block::{BlockKey, Tier},
    index::KeyHasher,
};

/// What a block and a tier have: `V`, at most one.
pub(super) struct Table<V> {
    entries: Slab<Placed<V>>,
    /// Places of the entries.
    map: HashTable<u32>,
    hasher: KeyHasher,
}

/// What a block and a tier have.
pub(super) struct Placed<V> {
    pub(super) key: BlockKey,
    pub(super) tier: Tier,
    hash: u64,
    pub(super) value: V,
}

impl<V> Table<V> {
    pub(super) fn new(hasher: KeyHasher) -> Self {
        Table { entries: Slab::new(), map: HashTable::new(), hasher }
    }

    #[inline]
    fn hash(&self, key: &BlockKey, tier: Tier) -> u64 {
        self.hasher.hash(key).rotate_left(8 * tier as u32)
    }

    /// The place of an entry.
    #[inline]
    fn find(&self, key: &BlockKey, tier: Tier) -> Option<usize> {
        if self.map.is_empty() {
            return None;
        }
        let is = |&at: &u32| self.entries[at as usize].is(key, tier);
        self.map.find(self.hash(key, tier), is).map(|&at| at as usize)
    }

    pub(super) fn get(&self, key: &BlockKey, tier: Tier) -> Option<&V> {
        self.find(key, tier).map(|at| &self.entries[at].value)
    }

    pub(super) fn get_mut(&mut self, key: &BlockKey, tier: Tier) -> Option<&mut V> {
        self.find(key, tier).map(|at| &mut self.entries[at].value)
    }

    /// What is at a place, which may have been left and taken again since it was given.
    pub(super) fn at(&self, place: u32) -> Option<&Placed<V>> {
        self.entries.get(place as usize)
    }

    /// Enters `value`, and returns its place. `None` if there is one already, which stays.
    #[must_use = "the value is dropped if there is one already"]
    pub(super) fn insert(&mut self, key: &BlockKey, tier: Tier, value: V) -> Option<u32> {
        let hash = self.hash(key, tier);
        let Table { entries, map, .. } = self;
        match map.entry(hash, |&at| entries[at as usize].is(key, tier), |&at| entries[at as usize].hash) {
            Entry::Occupied(_) => None,
            Entry::Vacant(vacant) => {
                let at = entries.insert(Placed { key: *key, tier, hash, value });
                let at = u32::try_from(at).expect("memory ends long before numbers do");
                vacant.insert(at);
                Some(at)
            }
        }
    }

    /// Removes an entry, and returns what `take` takes from it. In its place: moved whole to where only a part is
    /// wanted, the compiler would copy it byte by byte.
    pub(super) fn remove<R>(&mut self, key: &BlockKey, tier: Tier, take: impl FnOnce(&mut V) -> R) -> Option<R> {
        let hash = self.hash(key, tier);
        let Table { entries, map, .. } = self;
        let found = map.find_entry(hash, |&at| entries[at as usize].is(key, tier)).ok()?;
        let (at, _) = found.remove();
        let taken = take(&mut entries[at as usize].value);
        drop(entries.remove(at as usize));
        Some(taken)
    }

    /// All of them. In no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Placed<V>> {
        self.entries.iter().map(|(_, placed)| placed)
    }

    /// Takes all of them.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = V> {
        self.map.clear();
        self.entries.drain().map(|placed| placed.value)
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }
}

impl<V> Placed<V> {
    #[inline]
    fn is(&self, key: &BlockKey, tier: Tier) -> bool {
        self.tier == tier && self.key == *key
    }
}
