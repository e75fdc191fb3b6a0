//! Blocks that are to be written to the store.

use std::collections::{BTreeMap, BTreeSet};

use crate::block::BlockKey;

/// Blocks that wait to be written, each once, and those that are being written.
pub(crate) struct Uploads {
    keys: BTreeSet<BlockKey>,
    /// What is being written, and whether it was removed since.
    begun: BTreeMap<BlockKey, bool>,
    most: usize,
}

impl Uploads {
    pub(crate) fn new(most: usize) -> Self {
        Uploads { keys: BTreeSet::new(), begun: BTreeMap::new(), most }
    }

    /// Queues a block; false if there is no room.
    pub(crate) fn push(&mut self, key: &BlockKey) -> bool {
        self.keys.contains(key) || self.keys.len() < self.most && self.keys.insert(*key)
    }

    pub(crate) fn take(&mut self) -> BTreeSet<BlockKey> {
        std::mem::take(&mut self.keys)
    }

    /// The bytes of these blocks are about to be read, to be written.
    pub(crate) fn begin(&mut self, keys: &[BlockKey]) {
        self.begun.extend(keys.iter().map(|key| (*key, false)));
    }

    /// The blocks that are being written.
    pub(crate) fn begun(&self) -> impl Iterator<Item = &BlockKey> {
        self.begun.keys()
    }

    pub(crate) fn is_begun(&self, key: &BlockKey) -> bool {
        self.begun.contains_key(key)
    }

    /// Whether a block was removed since its write has begun.
    pub(crate) fn is_removed(&self, key: &BlockKey) -> bool {
        self.begun.get(key).is_some_and(|is_removed| *is_removed)
    }

    pub(crate) fn end(&mut self, keys: &[BlockKey]) {
        keys.iter().for_each(|key| _ = self.begun.remove(key));
    }

    /// Notes that a block was removed: it is not written, or what is written is not what it may be stored with again.
    pub(crate) fn remove(&mut self, key: &BlockKey) {
        self.keys.remove(key);
        if let Some(is_removed) = self.begun.get_mut(key) {
            *is_removed = true;
        }
    }

    /// As [`remove`](Self::remove), of every block.
    pub(crate) fn remove_all(&mut self) {
        self.keys.clear();
        self.begun.values_mut().for_each(|is_removed| *is_removed = true);
    }
}
