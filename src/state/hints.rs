//! Passes the hints of callers on chains to the index.

use std::time::Duration;

use super::Shared;
use crate::block::BlockKey;

/// Blocks that are marked under one lock.
const TOLD_UNDER_ONE_LOCK: usize = 256;

impl Shared {
    /// Releases the chain of `keys`; returns the number of released blocks. 0 once the cache is closed.
    pub(crate) fn release(&self, keys: &[BlockKey]) -> usize {
        let mut released = 0;
        let mut left = keys.len();
        while left > 0 {
            let mut state = self.lock();
            if state.check_open().is_err() {
                break;
            }
            let first = left.saturating_sub(TOLD_UNDER_ONE_LOCK);
            for at in (first..left).rev() {
                let Some(is_released) = state.index.release_at(keys, at) else {
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

    /// Keeps the blocks of a chain for `time`; returns the number of kept blocks. 0 once the cache is closed.
    pub(crate) fn keep(&self, keys: &[BlockKey], time: Duration) -> usize {
        let until = self.now_ms().saturating_add(u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
        let mut kept = 0;
        // From the beginning: the ancestors of a block are kept with it, and cost nothing then.
        for keys in keys.chunks(TOLD_UNDER_ONE_LOCK) {
            let mut state = self.lock();
            if state.check_open().is_err() {
                break;
            }
            for id in keys.iter().filter_map(|key| state.index.find(key)).collect::<Vec<_>>() {
                kept += usize::from(state.index.keep(id, until));
            }
        }
        kept
    }

    /// Milliseconds since the cache was opened.
    pub(super) fn now_ms(&self) -> u64 {
        u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}
