//! A table by key and tier, with the seeded hash of the index: an attacker cannot aim keys at one bucket.

use hashbrown::{HashTable, hash_table::Entry};

use crate::{
    block::{BlockKey, Tier},
    index::KeyHasher,
};

/// What a block and a tier have: `V`, at most one.
pub(super) struct Table<V> {
    entries: HashTable<(BlockKey, Tier, V)>,
    hasher: KeyHasher,
}

fn hash(hasher: &KeyHasher, key: &BlockKey, tier: Tier) -> u64 {
    hasher.hash(key).rotate_left(8 * tier as u32)
}

fn is<V>(key: &BlockKey, tier: Tier) -> impl Fn(&(BlockKey, Tier, V)) -> bool {
    move |entry| entry.1 == tier && entry.0 == *key
}

impl<V> Table<V> {
    pub(super) fn new(hasher: KeyHasher) -> Self {
        Table { entries: HashTable::new(), hasher }
    }

    pub(super) fn get(&self, key: &BlockKey, tier: Tier) -> Option<&V> {
        self.entries.find(hash(&self.hasher, key, tier), is(key, tier)).map(|(_, _, value)| value)
    }

    pub(super) fn get_mut(&mut self, key: &BlockKey, tier: Tier) -> Option<&mut V> {
        self.entries.find_mut(hash(&self.hasher, key, tier), is(key, tier)).map(|(_, _, value)| value)
    }

    /// Enters `value`. False if there is one already, which stays.
    #[must_use = "the value is dropped if there is one already"]
    pub(super) fn insert(&mut self, key: &BlockKey, tier: Tier, value: V) -> bool {
        let Table { entries, hasher } = self;
        let rehash = |entry: &(BlockKey, Tier, V)| hash(hasher, &entry.0, entry.1);
        match entries.entry(hash(hasher, key, tier), is(key, tier), rehash) {
            Entry::Occupied(_) => false,
            Entry::Vacant(place) => {
                place.insert((*key, tier, value));
                true
            }
        }
    }

    pub(super) fn remove(&mut self, key: &BlockKey, tier: Tier) -> Option<V> {
        let found = self.entries.find_entry(hash(&self.hasher, key, tier), is(key, tier)).ok()?;
        let ((_, _, value), _) = found.remove();
        Some(value)
    }

    /// All of them. In no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &(BlockKey, Tier, V)> {
        self.entries.iter()
    }

    /// Takes all of them.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = V> {
        self.entries.drain().map(|(_, _, value)| value)
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }
}
