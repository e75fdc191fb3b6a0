//! What callers and movements ask of the remote tier.

use std::sync::Arc;

use super::{Shared, Use};
use crate::{
    block::{BlockKey, Tier},
    config::{Config, RemotePolicy},
    error::Result,
    index::Index,
    remote::{Limits, Remote, Space},
    shield::shield,
};

/// Blocks that are looked up under one lock: some tens of microseconds.
const LOOKED_UP_UNDER_ONE_LOCK: usize = 256;

/// Of this share of the last tier's slots the blocks are written before they are evicted, all of them once one is in
/// the half that goes first, so that objects hold many.
const EVICTED_NEXT_SHARE: usize = 4;

/// The remote tier that the settings want.
pub(super) fn of(config: &Config, index: &mut Index) -> Option<Arc<Remote>> {
    let handle = config.remote.store.as_ref()?;
    if matches!(config.remote.policy, RemotePolicy::Reused | RemotePolicy::Stored) {
        index.note_reused();
    }
    let limits = Limits {
        index_bytes: config.remote.index_bytes,
        recompute_us: config.remote.recompute_us,
        awaited_max: config.limits.movements_max as usize,
        background_max: config.limits.background_max as usize,
        waiters_max: config.limits.waiters_max as usize,
        uploads_max: config.limits.background_max as usize,
    };
    let space = Space::new(&format!("{}{}", config.namespace, config.remote.owner), config.block_bytes as u64);
    Some(Arc::new(Remote::new(handle.store(), handle.capabilities(), space, limits, index.hasher().clone())))
}

impl Shared {
    /// Waits until the remote tier has brought a block into host memory, and counts the hit if the use is not counted
    /// yet; how the look-up that follows counts. Where it is not brought, or not by the deadline, it may have come with
    /// another call.
    pub(crate) async fn bring(self: &Arc<Self>, key: &BlockKey, usage: Use) -> Result<Use> {
        let waiters_max = u64::from(self.config.limits.waiters_max);
        let joined = self.remote.as_ref().map(|remote| remote.bring(key, self.looks()));
        let joined = joined.transpose().map_err(|_| self.busy("waiters for one block", waiters_max, "waiters_max"));
        let Some(receiver) = joined?.flatten() else { return Ok(usage) };
        self.lock().watch();
        let is_there = shield(receiver).await.unwrap_or(false);
        if is_there && usage == Use::Now {
            self.metrics.looked_up(Some(Tier::Remote));
            return Ok(Use::Counted);
        }
        Ok(usage)
    }

    /// Has those miss their blocks that have waited for the remote tier past their deadline.
    pub(crate) fn give_up_overdue_remote(&self) {
        if let Some(remote) = &self.remote {
            remote.give_up_overdue(|since| self.is_overdue(since));
        }
    }

    /// Has a block that was stored written to the remote store, if all are.
    pub(crate) fn note_stored(&self, key: &BlockKey) {
        if self.config.remote.policy == RemotePolicy::Stored {
            self.send_remote(&[*key]);
        }
    }

    /// Has blocks that are to be kept written to the remote store, if such blocks are.
    pub(crate) fn note_kept(&self, keys: &[BlockKey]) {
        if self.config.remote.policy == RemotePolicy::Reused {
            self.send_remote(keys);
        }
    }

    /// What the task that writes finds by itself, and is not woken for: blocks that were used again, or that the last
    /// tier of the node evicts next, which are looked for under one lock.
    pub(crate) fn found_for_remote(self: &Arc<Self>, remote: &Remote) -> Vec<BlockKey> {
        match self.config.remote.policy {
            // Each further use is another chance of a block whose write failed, or whose object is gone. Before the
            // first listing most of them would be written again.
            RemotePolicy::Reused | RemotePolicy::Stored if remote.is_listed() => self.lock().index.take_reused(),
            RemotePolicy::Evicted if !remote.is_full() => self.evicted_next(remote),
            _ => Vec::new(),
        }
    }

    fn evicted_next(self: &Arc<Self>, remote: &Remote) -> Vec<BlockKey> {
        let (tier, state) = (self.config.last_tier(), self.lock());
        let slots = if tier == Tier::Disk { self.config.disk_slots() } else { u64::from(self.config.host_slots()) };
        let ahead = LOOKED_UP_UNDER_ONE_LOCK.min(slots as usize / EVICTED_NEXT_SHARE).max(1);
        let free = state.free_slots(tier);
        let evicted = state.index.next_victims(tier, ahead.saturating_sub(free));
        drop(state);
        let soon = evicted[..ahead.div_ceil(2).saturating_sub(free).min(evicted.len())].to_vec();
        let unwritten = remote.unwritten(&evicted);
        let is_time = unwritten.first().is_some_and(|next| soon.contains(next));
        if is_time { unwritten } else { Vec::new() }
    }

    /// Queues blocks to be written to the remote store, and wakes the task that writes them.
    pub(crate) fn send_remote(&self, keys: &[BlockKey]) {
        let Some(remote) = &self.remote else { return };
        keys.chunks(LOOKED_UP_UNDER_ONE_LOCK).for_each(|keys| self.queue_remote(remote, keys));
        remote.wake_uploads.notify_one();
    }

    /// Queues those of the blocks that are not in the remote store, as far as is known.
    pub(crate) fn queue_remote(&self, remote: &Remote, keys: &[BlockKey]) {
        let unwritten = remote.unwritten(keys);
        if remote.is_full() {
            // What the map has no room for would be written again and again.
            return self.metrics.remote_unlisted.add(unwritten.len() as u64);
        }
        self.metrics.remote_unsent.add(remote.queue_uploads(&unwritten) as u64);
    }

    /// Has the blocks of a call that no tier of the node has brought together, as far as the remote tier offers them;
    /// how many.
    pub(crate) fn want_remote(self: &Arc<Self>, keys: &[BlockKey], is_awaited: bool) -> usize {
        let Some(remote) = self.remote.as_ref().filter(|remote| remote.blocks() > 0) else { return 0 };
        let mut wanted = Vec::new();
        for keys in keys.chunks(LOOKED_UP_UNDER_ONE_LOCK) {
            let state = self.lock();
            let is_away = |key: &&BlockKey| state.index.find(key).and_then(|id| state.served_tier(id)).is_none();
            wanted.extend(keys.iter().filter(is_away).copied());
        }
        remote.want(wanted.into_iter(), is_awaited)
    }

    /// The tiers of a chain's leading blocks, as a request for them begins: those of the node and what the remote tier
    /// offers. None once the cache is closed.
    pub(crate) fn match_prefix(self: &Arc<Self>, keys: &[BlockKey]) -> Vec<Tier> {
        // Not under the lock, where it would grow.
        let mut tiers = Vec::with_capacity(keys.len());
        self.match_keys(keys, |tier| tiers.push(tier));
        tiers
    }

    /// The length of [`match_prefix`](Self::match_prefix). Without a remote tier it allocates nothing.
    pub(crate) fn match_len(self: &Arc<Self>, keys: &[BlockKey]) -> usize {
        self.match_keys(keys, |_| {})
    }

    /// How many leading blocks the node has, with the lock for a part of them at a time. Adds their tiers. The first
    /// lock `begins` a request for all; none is found once the cache is closed.
    fn match_in_turns(self: &Arc<Self>, keys: &[BlockKey], begins: bool, mut add: impl FnMut(Tier)) -> usize {
        let mut matched = 0;
        loop {
            let turn = &keys[matched..keys.len().min(matched + LOOKED_UP_UNDER_ONE_LOCK)];
            let mut state = self.lock();
            if matched == 0 && begins {
                if state.check_open().is_err() {
                    return 0;
                }
                state.index.begin_request(keys.len());
            }
            let found = state.match_served(turn).inspect(|tier| add(*tier)).count();
            matched += found;
            if found < turn.len() || matched == keys.len() {
                return matched;
            }
        }
    }

    /// The number of leading blocks that the node has, with those that the remote tier offers behind them, and those
    /// that follow these. Adds their tiers.
    fn match_keys(self: &Arc<Self>, keys: &[BlockKey], mut add: impl FnMut(Tier)) -> usize {
        let mut matched = self.match_in_turns(keys, true, &mut add);
        let Some(remote) = &self.remote else { return matched };
        while matched < keys.len() {
            let offered = remote.offered(keys[matched..].iter());
            if offered == 0 {
                break;
            }
            (0..offered).for_each(|_| add(Tier::Remote));
            matched += offered;
            let resident = self.match_in_turns(&keys[matched..], false, &mut add);
            matched += resident;
            if resident == 0 {
                break;
            }
        }
        matched
    }
}
