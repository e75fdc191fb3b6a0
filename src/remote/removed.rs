//! Blocks that were removed here while the store had them.

use std::mem;

use hashbrown::HashTable;

use crate::{block::BlockKey, index::KeyHasher};

/// Removals that are remembered: so many, and up to twice as many.
pub(crate) const REMOVED_MIN: usize = 1 << 19;

/// The hashes of the keys that were removed last, at most 20 MB: no object that becomes known brings one back.
pub(crate) struct Removed {
    hasher: KeyHasher,
    latest: HashTable<u64>,
    /// Those before them, which are forgotten together.
    earlier: HashTable<u64>,
}

impl Removed {
    pub(crate) fn new(hasher: KeyHasher) -> Self {
        Removed { hasher, latest: HashTable::new(), earlier: HashTable::new() }
    }

    pub(crate) fn insert(&mut self, key: &BlockKey) {
        if self.contains(key) {
            return;
        }
        if self.latest.len() >= REMOVED_MIN || self.latest.capacity() == 0 {
            // Of its full size at once: one that grows moves its entries under the lock.
            self.earlier = mem::replace(&mut self.latest, HashTable::with_capacity(REMOVED_MIN));
        }
        let hash = self.hasher.hash(key);
        self.latest.insert_unique(hash, hash, |hash| *hash);
    }

    pub(crate) fn contains(&self, key: &BlockKey) -> bool {
        let hash = self.hasher.hash(key);
        [&self.latest, &self.earlier].iter().any(|hashes| hashes.find(hash, |other| *other == hash).is_some())
    }

    /// Notes that this node has written a block anew.
    pub(crate) fn forget(&mut self, key: &BlockKey) {
        let hash = self.hasher.hash(key);
        for hashes in [&mut self.latest, &mut self.earlier] {
            if let Ok(found) = hashes.find_entry(hash, |other| *other == hash) {
                found.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_removals_are_remembered() {
        let key = |n: usize| {
            let mut bytes = [0; 32];
            bytes[..8].copy_from_slice(&n.to_le_bytes());
            BlockKey::new(bytes)
        };
        let mut removed = Removed::new(KeyHasher::new(7));
        (0..2 * REMOVED_MIN + 1).for_each(|n| removed.insert(&key(n)));
        assert!(!removed.contains(&key(0)) && !removed.contains(&key(2 * REMOVED_MIN + 1)));
        assert!((REMOVED_MIN..2 * REMOVED_MIN + 1).all(|n| removed.contains(&key(n))));
        [REMOVED_MIN, 2 * REMOVED_MIN].into_iter().for_each(|n| removed.forget(&key(n)));
        assert!(!removed.contains(&key(REMOVED_MIN)) && !removed.contains(&key(2 * REMOVED_MIN)));
    }
}
