//! Hints of callers, carried to the index.

use std::{sync::Arc, time::Duration};

use super::Shared;
use crate::block::BlockKey;

/// Blocks that are marked, or looked at, under one acquisition of the lock.
const MARKED_UNDER_ONE_LOCK: usize = 256;

impl Shared {
    /// Releases the first `count` blocks of a chain, whose other blocks are released already. Returns how many are
    /// released now; 0 once the cache is closed.
    pub(crate) fn release(self: &Arc<Self>, keys: &[BlockKey], count: usize) -> usize {
        let (mut released, mut left, now) = (0, count, self.now_ms());
        while left > 0 {
            let mut state = self.lock();
            if state.check_open().is_err() {
                break;
            }
            let first = left.saturating_sub(MARKED_UNDER_ONE_LOCK);
            for at in (first..left).rev() {
                let Some(is_released) = state.index.release_at(keys, at, now) else {
                    drop(state);
                    self.metrics.released.add(released as u64);
                    return released;
                };
                released += usize::from(is_released);
            }
            left = first;
        }
        self.metrics.released.add(released as u64);
        released
    }

    /// Keeps the blocks of a chain, and those before it, for `time`. Returns how many of the chain are kept; 0 once the
    /// cache is closed.
    pub(crate) fn keep(self: &Arc<Self>, keys: &[BlockKey], time: Duration) -> usize {
        let until = self.now_ms().saturating_add(u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
        let (mut kept, mut keys) = (0, keys.iter());
        // The block whose ancestors are kept next: named by its key, as it may be gone by the next lock.
        let mut below: Option<BlockKey> = None;
        loop {
            let mut state = self.lock();
            if state.check_open().is_err() {
                return kept;
            }
            let mut at = below.and_then(|key| state.index.find(&key));
            for _ in 0..MARKED_UNDER_ONE_LOCK {
                at = match at {
                    Some(id) => state.index.keep_before(id, until),
                    // From the beginning: the blocks before a kept one are kept already.
                    None => {
                        let Some(key) = keys.next() else { return kept };
                        let found = state.index.find(key).filter(|id| state.index.keep(*id, until));
                        kept += usize::from(found.is_some());
                        found
                    }
                };
            }
            below = at.map(|id| state.index.key(id));
        }
    }

    /// Milliseconds since the cache was opened.
    pub(super) fn now_ms(&self) -> u64 {
        u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::*;
    use crate::{block::Tier, config::Config, state::locks_taken};

    #[test]
    fn a_long_chain_is_kept_and_matched_under_many_locks() {
        const BLOCKS: u64 = 1 << 15;
        let shared = Shared::of_test(Config::default().block_bytes(4096).host_blocks(2));
        let keys = (0..BLOCKS).map(|n| {
            let mut key = [0; 32];
            key[..8].copy_from_slice(&n.to_le_bytes());
            BlockKey::new(key)
        });
        let keys: Vec<_> = keys.collect();
        let mut state = shared.lock();
        for (at, key) in keys.iter().enumerate() {
            let id = state.index.insert(*key, at.checked_sub(1).map(|at| keys[at]));
            assert!(state.index.begin_fill(id, Tier::Disk) && state.index.complete_fill(id, Tier::Disk, at as u32));
        }
        drop(state);
        let (last, before) = (keys.len() - 1, locks_taken());
        assert_eq!(shared.keep(&keys[last..], Duration::from_secs(60)), 1);
        let locks = locks_taken() - before;
        assert!(locks >= BLOCKS / 256, "{locks} locks for {BLOCKS} blocks");
        let before = locks_taken();
        assert_eq!((shared.match_len(&keys), shared.match_prefix(&keys).len()), (keys.len(), keys.len()));
        let locks = locks_taken() - before;
        assert!(locks >= 2 * BLOCKS / 256, "{locks} locks to match {BLOCKS} blocks twice");
        let state = shared.lock();
        let is_kept = |key: &BlockKey| state.index.find(key).is_some_and(|id| state.index.is_kept(id));
        assert!(keys.iter().all(is_kept), "the blocks before it too");
        state.index.validate().expect("valid");
    }
}
