//! Blocks that are to be written to the store.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    format::Table,
    tier::{Remote, TierState},
};
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

impl Remote {
    /// Queues blocks to be written; how many found no room.
    pub(crate) fn queue_uploads(&self, keys: impl Iterator<Item = BlockKey>) -> usize {
        let mut state = self.state.lock();
        let TierState { presence, uploads, is_closed, .. } = &mut *state;
        if *is_closed {
            return 0;
        }
        keys.filter(|key| !presence.contains(key) && !uploads.push(key)).count()
    }

    /// The bytes of these blocks are about to be read, to be written. [`end_upload`](Self::end_upload) follows.
    pub(crate) fn begin_upload(&self, keys: &[BlockKey]) {
        self.state.lock().uploads.begin(keys);
    }

    pub(crate) fn end_upload(&self, keys: &[BlockKey]) {
        self.state.lock().uploads.end(keys);
    }

    /// Takes all blocks that are to be written and are not there by now.
    pub(crate) fn take_uploads(&self) -> Vec<BlockKey> {
        let TierState { presence, uploads, .. } = &mut *self.state.lock();
        uploads.take().into_iter().filter(|key| !presence.contains(key)).collect()
    }

    /// Those of the blocks that the store does not have, as far as is known, and of which no write would be in vain.
    pub(crate) fn unwritten(&self, keys: Vec<BlockKey>) -> Vec<BlockKey> {
        // Before the lock: names take longer to make than to look up.
        let named: Vec<(String, BlockKey)> = keys.into_iter().map(|key| (self.space.name(&key), key)).collect();
        let presence = &self.state.lock().presence;
        let unwritten = |(name, key): (String, BlockKey)| {
            (!presence.contains(&key) && !presence.refuses_writes(&name)).then_some(key)
        };
        named.into_iter().filter_map(unwritten).collect()
    }

    /// Whether the store has an object, as far as is known.
    pub(crate) fn knows(&self, name: &str) -> bool {
        self.state.lock().presence.knows(name)
    }

    /// Enters an object that this node has written: its blocks are offered, but for those that were removed meanwhile.
    pub(crate) fn enter_written(&self, name: &str, table: Table) -> bool {
        let mut state = self.state.lock();
        let TierState { presence, removed, uploads, .. } = &mut *state;
        let keys = table.blocks.iter().map(|block| &block.key);
        keys.filter(|key| !uploads.is_removed(key)).for_each(|key| removed.forget(key));
        // A listing may have entered it before.
        presence.forget_object(name);
        state.enter(name, table)
    }

    /// The store has an object of the name that blocks were to be written under, which are `stored` here with these
    /// checksums: those of them that were removed, and that it has with the same bytes, are offered again. Whether the
    /// first is offered; if not, its write would be in vain until the object is gone.
    pub(crate) fn found_written(&self, name: &str, stored: &[(BlockKey, u64)]) -> bool {
        let TierState { presence, removed, uploads, listings, .. } = &mut *self.state.lock();
        for (at, (key, checksum)) in stored.iter().enumerate() {
            let is_stored = removed.contains(key) && !uploads.is_removed(key);
            if is_stored && presence.offer(name, at, key, *checksum) {
                removed.forget(key);
            }
        }
        let is_offered = stored.first().is_some_and(|(first, _)| presence.contains(first));
        if !is_offered {
            presence.refuse_writes(name, *listings);
        }
        is_offered
    }
}
