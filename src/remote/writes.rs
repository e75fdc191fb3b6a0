//! Which blocks are written to the store, and what is known of them then.

use std::time::Duration;

use super::{
    format::Table,
    store::RemoteError,
    tier::{Remote, TierState},
};
use crate::block::BlockKey;

impl Remote {
    /// Queues blocks to be written; how many found no room.
    pub(crate) fn queue_uploads(&self, keys: &[BlockKey]) -> usize {
        let TierState { uploads, is_closed, .. } = &mut *self.state.lock();
        if *is_closed {
            return 0;
        }
        keys.iter().filter(|key| !uploads.push(key)).count()
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
    pub(crate) fn unwritten(&self, keys: &[BlockKey]) -> Vec<BlockKey> {
        let mut unknown = {
            let presence = &self.state.lock().presence;
            keys.iter().filter(|key| !presence.contains(key)).copied().collect::<Vec<_>>()
        };
        // Without the lock: names take longer to make than to look up.
        let names: Vec<String> = unknown.iter().map(|key| self.space.name(key)).collect();
        let mut names = names.iter();
        let presence = &self.state.lock().presence;
        unknown.retain(|_| names.next().is_some_and(|name| !presence.refuses_writes(name)));
        unknown
    }

    /// Whether a write may begin now: the store takes them, or it is time to try one.
    pub(crate) fn may_write(&self) -> bool {
        self.state.lock().writes.offers(1, self.now())
    }

    /// Begins a write, if one may begin. [`end_write`](Self::end_write) follows.
    pub(crate) fn begin_write(&self) -> bool {
        let writes = &mut self.state.lock().writes;
        let may_begin = writes.offers(1, self.now());
        if may_begin {
            writes.begin(1);
        }
        may_begin
    }

    /// Notes the end of a write. Why none follows for a while, if it is the first one after which none does.
    pub(crate) fn end_write(&self, result: Result<(), &RemoteError>) -> Option<String> {
        let (writes, now) = (&mut self.state.lock().writes, self.now());
        let was_well = writes.reason().is_none();
        match result {
            Ok(()) => writes.ended(Ok((1, Duration::ZERO)), now),
            Err(error @ RemoteError::Refused(_)) => writes.refused(error.to_string(), now),
            Err(error) => writes.ended(Err(error.to_string()), now),
        }
        writes.reason().filter(|_| was_well)
    }

    /// Notes that an object is not what it should be; false if it was not so before.
    pub(crate) fn pass_over(&self, name: &str) -> bool {
        let TierState { presence, listings, .. } = &mut *self.state.lock();
        presence.pass_over(name, *listings)
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
    /// first is offered; if not, its write would be in vain until the object is gone, or the block removed.
    pub(crate) fn found_written(&self, name: &str, stored: &[(BlockKey, u64)]) -> bool {
        let TierState { presence, removed, uploads, listings, .. } = &mut *self.state.lock();
        for (at, (key, checksum)) in stored.iter().enumerate() {
            let is_stored = removed.contains(key) && !uploads.is_removed(key);
            if is_stored && presence.offer(name, at, key, *checksum) {
                removed.forget(key);
            }
        }
        let Some((first, _)) = stored.first() else { return false };
        let is_offered = presence.contains(first);
        if !is_offered && !uploads.is_removed(first) {
            presence.refuse_writes(name, *listings);
        }
        is_offered
    }
}
