//! Blocks that are to be written to the store.

use std::collections::BTreeSet;

use crate::block::BlockKey;

/// Blocks that wait to be written, each once.
pub(crate) struct Uploads {
    keys: BTreeSet<BlockKey>,
    most: usize,
}

impl Uploads {
    pub(crate) fn new(most: usize) -> Self {
        Uploads { keys: BTreeSet::new(), most }
    }

    /// Queues a block; false if there is no room.
    pub(crate) fn push(&mut self, key: &BlockKey) -> bool {
        self.keys.contains(key) || self.keys.len() < self.most && self.keys.insert(*key)
    }

    pub(crate) fn take(&mut self) -> BTreeSet<BlockKey> {
        std::mem::take(&mut self.keys)
    }
}
