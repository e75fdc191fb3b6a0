//! Hints of callers, carried to the index.

use std::time::Duration;

use super::Shared;
use crate::block::BlockKey;

/// Blocks that are marked under one acquisition of the lock.
const MARKED_UNDER_ONE_LOCK: usize = 256;

impl Shared {
    /// Releases the first `count` blocks of a chain, whose other blocks are released already. Returns how many are
    /// released now; 0 once the cache is closed.
    pub(crate) fn release(&self, keys: &[BlockKey], count: usize) -> usize {
        let mut released = 0;
        let mut left = count;
        while left > 0 {
            let mut state = self.lock();
            if state.check_open().is_err() {
                break;
            }
            let first = left.saturating_sub(MARKED_UNDER_ONE_LOCK);
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

    /// Keeps the blocks of a chain for `time`. Returns how many of them are kept; 0 once the cache is closed.
    pub(crate) fn keep(&self, keys: &[BlockKey], time: Duration) -> usize {
        let until = self.now_ms().saturating_add(u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
        let mut kept = 0;
        // From the beginning: the blocks before a kept one are kept already.
        for keys in keys.chunks(MARKED_UNDER_ONE_LOCK) {
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
