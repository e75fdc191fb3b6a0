//! The remote tier, as callers and the reactor share it: what is there, what is wanted, what goes up.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::{Notify, oneshot},
    time::Instant,
};

use super::{
    format::{Space, Table},
    health::Health,
    presence::{Known, Presence, ReadBlock, ReadLimits, Run, SHARDS},
    removed::{REMOVED_MIN, Removed},
    store::{Capabilities, Object, RemoteError, RemoteStore},
    uploads::Uploads,
    wanted::{Batch, Full, Read, Wanted},
};
use crate::{block::BlockKey, index::KeyHasher, sync::Mutex};

/// What one read brings at most. A store of small values says so by the size of its objects.
const READ_BYTES_MAX: u64 = 16 << 20;

/// What one call of several reads brings at most: enough for few calls, little enough to stay in a cache between the
/// store's processor and ours.
const READ_TOGETHER_BYTES: u64 = 1 << 20;

/// The remote tier of a cache.
pub(crate) struct Remote {
    store: Arc<dyn RemoteStore>,
    pub(crate) capabilities: Capabilities,
    pub(crate) space: Space,
    limits: Limits,
    pub(super) state: Mutex<TierState>,
    /// Wakes the task that brings blocks.
    pub(crate) wake: Notify,
    /// Wakes the task that writes blocks.
    pub(crate) wake_uploads: Notify,
    opened: Instant,
}

/// Limits of the remote tier.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) index_bytes: u64,
    pub(crate) recompute_us: Option<u64>,
    /// Blocks that may be wanted at a time: by calls that wait, and by all.
    pub(crate) awaited_max: usize,
    pub(crate) background_max: usize,
    pub(crate) waiters_max: usize,
    /// Blocks that may wait to be written.
    pub(crate) uploads_max: usize,
}

/// What is known of a store.
#[derive(Debug, Default)]
pub(crate) struct Figures {
    /// Blocks, each counted once for each object that has it.
    pub(crate) blocks: u64,
    pub(crate) objects: u64,
    /// Memory that this takes.
    pub(crate) index_bytes: u64,
    /// Whether its blocks are offered.
    pub(crate) offers: bool,
    /// Why they are not, if it is so.
    pub(crate) standing_down: Option<String>,
    /// Why nothing is written to it, if it is so.
    pub(crate) read_only: Option<String>,
}

pub(super) struct TierState {
    pub(super) presence: Presence,
    /// Blocks that are not offered, whichever object has them.
    pub(super) removed: Removed,
    wanted: Wanted,
    health: Health,
    pub(super) writes: Health,
    pub(super) uploads: Uploads,
    pub(super) is_closed: bool,
    /// Listings that have begun.
    pub(super) listings: u64,
    /// As [`Remote::end_listing`] notes.
    is_listed: bool,
}

impl TierState {
    fn new(limits: Limits, hasher: KeyHasher) -> Self {
        TierState {
            removed: Removed::new(hasher.clone()),
            presence: Presence::new(hasher, usize::try_from(limits.index_bytes).unwrap_or(usize::MAX)),
            wanted: Wanted::default(),
            health: Health::new(limits.recompute_us),
            writes: Health::new(None),
            uploads: Uploads::new(limits.uploads_max),
            is_closed: false,
            listings: 0,
            is_listed: false,
        }
    }

    /// Has blocks brought that the store has and nobody wants yet, while no more than `most` are wanted: of those that
    /// callers wait for, or of all. How many.
    fn want(&mut self, keys: impl Iterator<Item = BlockKey>, is_awaited: bool, most: usize, now: Duration) -> usize {
        let TierState { presence, wanted, health, .. } = self;
        let room = most.saturating_sub(if is_awaited { wanted.awaited() } else { wanted.len() });
        let mut keys: Vec<BlockKey> =
            keys.filter(|key| presence.contains(key) && !wanted.contains(key)).take(room).collect();
        keys.sort_unstable();
        keys.dedup();
        let blocks = keys.len();
        if blocks == 0 || self.is_closed || !health.offers(blocks, now) {
            return 0;
        }
        health.begin(blocks);
        wanted.push(keys, is_awaited);
        blocks
    }

    /// Enters an object, but offers none of its blocks that were removed; false if there is no room.
    pub(super) fn enter(&mut self, name: &str, Table { parent, blocks }: Table) -> bool {
        let TierState { presence, removed, listings: seen, .. } = self;
        let hidden: Vec<BlockKey> = blocks.iter().map(|block| block.key).filter(|key| removed.contains(key)).collect();
        let is_known = presence.enter(Run::new(name, parent, blocks, *seen));
        hidden.iter().for_each(|key| _ = presence.forget(key));
        is_known
    }

    /// Offers no copy of a block that the store has or is being given, until this node has written it anew.
    fn remove(&mut self, key: &BlockKey, name: &str) {
        if self.presence.forget(key) || self.uploads.is_begun(key) {
            self.removed.insert(key);
        }
        self.presence.allow_writes(name);
        self.wanted.remove(key);
        self.uploads.remove(key);
    }

    /// As [`remove`](Self::remove), of every block.
    fn remove_all(&mut self) {
        let TierState { presence, removed, uploads, .. } = self;
        uploads.begun().for_each(|key| removed.insert(key));
        presence.forget_all();
        self.wanted.remove_all();
        uploads.remove_all();
    }
}

impl Remote {
    pub(crate) fn new(
        store: Arc<dyn RemoteStore>,
        capabilities: Capabilities,
        space: Space,
        limits: Limits,
        hasher: KeyHasher,
    ) -> Self {
        Remote {
            store,
            capabilities,
            space,
            limits,
            state: Mutex::new(TierState::new(limits, hasher)),
            wake: Notify::new(),
            wake_uploads: Notify::new(),
            opened: Instant::now(),
        }
    }

    pub(crate) fn store(&self) -> &dyn RemoteStore {
        &*self.store
    }

    /// Blocks of an object that this cache writes.
    pub(crate) fn blocks_of_object(&self) -> usize {
        self.space.blocks_of(self.capabilities.object_bytes)
    }

    /// How so many blocks are read: few of them by as many requests as the store takes, many by few requests.
    fn read_limits(&self, blocks: usize) -> ReadLimits {
        let Capabilities { object_bytes, requests_in_flight, reads_per_call, .. } = self.capabilities;
        let blocks_max = self.space.blocks_of(READ_TOGETHER_BYTES);
        ReadLimits {
            range_blocks: self.space.blocks_of(object_bytes.min(READ_BYTES_MAX)),
            ranges: reads_per_call.max(1) as usize,
            blocks: blocks.div_ceil(requests_in_flight.max(1) as usize).min(blocks_max),
        }
    }

    /// Blocks that the store has, as far as is known.
    pub(crate) fn blocks(&self) -> u64 {
        self.state.lock().presence.len() as u64
    }

    /// What is known of the store now.
    pub(crate) fn figures(&self) -> Figures {
        let TierState { presence, health, writes, .. } = &*self.state.lock();
        let standing_down = health.reason();
        Figures {
            blocks: presence.len() as u64,
            objects: presence.objects() as u64,
            index_bytes: presence.bytes() as u64,
            offers: standing_down.is_none(),
            standing_down,
            read_only: writes.reason(),
        }
    }

    /// Whether a block is offered now.
    pub(crate) fn offers(&self, key: &BlockKey) -> bool {
        let mut state = self.state.lock();
        if state.is_closed || !state.presence.contains(key) {
            return false;
        }
        state.wanted.contains(key) || state.health.offers(1, self.now())
    }

    /// How many of the leading `keys` the store has and offers together; 0 or all of them.
    pub(crate) fn offered<'a>(&self, keys: impl Iterator<Item = &'a BlockKey>) -> usize {
        let mut state = self.state.lock();
        let TierState { presence, health, is_closed, .. } = &mut *state;
        let there = keys.take_while(|key| presence.contains(key)).count();
        let is_offered = there > 0 && !*is_closed && health.offers(there, self.now());
        if is_offered { there } else { 0 }
    }

    /// Has those of the `keys` brought that the store has and nobody wants yet, as long as there is room; how many.
    pub(crate) fn want(&self, keys: impl Iterator<Item = BlockKey>, is_awaited: bool) -> usize {
        let most = if is_awaited { self.limits.awaited_max } else { self.limits.background_max };
        let blocks = self.state.lock().want(keys, is_awaited, most, self.now());
        if blocks > 0 {
            self.wake.notify_one();
        }
        blocks
    }

    /// Waits for a block that is wanted, or is from now on, `since` so many looks at the clock; `None` if it is not
    /// offered.
    pub(crate) fn bring(&self, key: &BlockKey, since: u64) -> Result<Option<oneshot::Receiver<bool>>, Full> {
        // Under one lock: the block may come as soon as it is wanted.
        let mut state = self.state.lock();
        let begun = state.want([*key].into_iter(), true, self.limits.awaited_max, self.now());
        let mut gone = Vec::new();
        let receiver = state.wanted.join(key, since, self.limits.waiters_max, &mut gone);
        let raised = state.wanted.raised(key);
        drop(state);
        // After the unlock: wakers are callers' code.
        drop(gone);
        raised.iter().for_each(|read| read.notify_one());
        if begun > 0 {
            self.wake.notify_one();
        }
        receiver
    }

    /// Whether somebody waits for a block.
    pub(crate) fn has_waiters(&self) -> bool {
        self.state.lock().wanted.has_waiters()
    }

    /// Has those miss their blocks that wait for too long.
    pub(crate) fn give_up_overdue(&self, is_overdue: impl Fn(u64) -> bool) {
        let overdue = self.state.lock().wanted.take_overdue(is_overdue);
        // After the unlock: wakers are callers' code.
        overdue.into_iter().for_each(|waiter| _ = waiter.send(false));
    }

    /// The next blocks to be brought, by reads; the keys that are not there any more have been answered.
    pub(crate) fn next_batch(&self) -> Option<(Batch, Vec<Read>)> {
        let mut state = self.state.lock();
        let TierState { presence, wanted, .. } = &mut *state;
        let batch = wanted.pop()?;
        let (reads, unknown) = presence.plan(&batch.keys, self.read_limits(batch.keys.len()));
        let reads = reads.into_iter().map(|blocks| wanted.read(blocks)).collect();
        drop(state);
        unknown.iter().for_each(|key| self.answer(key, &batch, false));
        Some((batch, reads))
    }

    /// Whether somebody waits for one of the blocks.
    pub(crate) fn is_awaited(&self, blocks: &[ReadBlock]) -> bool {
        let state = self.state.lock();
        blocks.iter().any(|block| state.wanted.has_waiter(&block.known.key))
    }

    /// Whether a block that is being brought was removed since.
    pub(crate) fn is_removed(&self, key: &BlockKey) -> bool {
        self.state.lock().wanted.is_removed(key)
    }

    /// Tells those who wait for a block of a batch whether it is there.
    pub(crate) fn answer(&self, key: &BlockKey, batch: &Batch, is_there: bool) {
        let waiters = self.state.lock().wanted.end(key, batch.number);
        // After the unlock: wakers are callers' code.
        waiters.into_iter().for_each(|waiter| _ = waiter.send(is_there));
    }

    /// Notes the end of a batch: so many blocks, since `began`, or why there are none.
    pub(crate) fn ended(&self, result: Result<usize, &RemoteError>, began: Instant) {
        let result = result.map(|blocks| (blocks, began.elapsed())).map_err(ToString::to_string);
        self.state.lock().health.ended(result, self.now());
    }

    /// The time since the cache was opened.
    pub(super) fn now(&self) -> Duration {
        self.opened.elapsed()
    }

    /// A listing begins; its number.
    pub(crate) fn begin_listing(&self) -> u64 {
        let mut state = self.state.lock();
        state.listings += 1;
        state.listings
    }

    /// What the store has is known as far as a listing tells it: one has ended, or none may.
    pub(crate) fn end_listing(&self) {
        self.state.lock().is_listed = true;
    }

    /// Whether that is so: before it most of what the store has is not known.
    pub(crate) fn is_listed(&self) -> bool {
        self.state.lock().is_listed
    }

    /// Notes that a listing has an object; false if its table is to be read.
    pub(crate) fn see(&self, object: &Object, listing: u64) -> bool {
        self.state.lock().presence.see(&object.name, self.space.blocks_in(object.bytes), listing)
    }

    /// Enters an object; false if there is no room.
    pub(crate) fn enter(&self, name: &str, table: Table) -> bool {
        self.state.lock().enter(name, table)
    }

    /// Forgets those of some objects that the listing of this number does not have; where the next ones begin, if there
    /// are more.
    pub(crate) fn forget_unseen(&self, listing: u64, from: usize) -> Option<usize> {
        self.state.lock().presence.forget_unseen(listing, from)
    }

    /// Whether an object would find no room.
    pub(crate) fn is_full(&self) -> bool {
        self.state.lock().presence.is_full()
    }

    pub(crate) fn forget_object(&self, name: &str) {
        self.state.lock().presence.forget_object(name);
    }

    /// Offers no block of an object any more, which is not what it should be.
    pub(crate) fn hide_object(&self, name: &str) {
        self.state.lock().presence.hide_object(name);
    }

    /// Forgets a block, of which an object does not have what its table says.
    pub(crate) fn doubt(&self, name: &str, known: &Known) {
        self.state.lock().presence.doubt(name, known);
    }

    /// A caller removes a block: it is not brought any more, nor stored if it is on its way, nor written.
    pub(crate) fn remove(&self, key: &BlockKey) {
        let name = self.space.name(key);
        self.state.lock().remove(key, &name);
    }

    /// As [`remove`](Self::remove), of every block.
    pub(crate) fn remove_all(&self) {
        // In parts: others wait for the lock, some of them under the cache's own.
        for shard in 0..SHARDS {
            let TierState { presence, removed, .. } = &mut *self.state.lock();
            // More would not be remembered.
            presence.keys_of(shard).take(REMOVED_MIN / SHARDS).for_each(|key| removed.insert(&key));
        }
        self.state.lock().remove_all();
    }

    /// Ends every wait; nothing is offered any more.
    pub(crate) fn close(&self) {
        // Also where the reactor has panicked, maybe under this lock.
        let Some(mut state) = self.state.lock_unless_poisoned() else { return };
        state.is_closed = true;
        let waiters = state.wanted.end_all();
        drop(state);
        drop(waiters);
    }

    /// A wait of this time and up to half of it more: nodes that wait for the same do not wait equally long.
    pub(crate) fn jittered(&self, time: Duration) -> Duration {
        time + time.mul_f64(f64::from(self.opened.elapsed().subsec_nanos() % 1000) / 2000.0)
    }
}

#[cfg(test)]
mod tests;
