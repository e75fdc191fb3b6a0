//! What callers say of chains, carried to the index.

use std::time::Duration;

use super::Shared;
use crate::block::BlockKey;

/// Blocks that are told of before others are let at the index.
const TOLD_UNDER_ONE_LOCK: usize = 256;

impl Shared {
    /// The chain of `keys` is over; gives how many of its blocks are released. 0 once the cache is closed.
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

    /// Keeps the blocks of a chain for `time`; gives how many of them are kept. 0 once the cache is closed.
    pub(crate) fn keep(&self, keys: &[BlockKey], time: Duration) -> usize {
        let until = self.now_ms().saturating_add(u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
        let mut kept = 0;
        // From the beginning: what is before a block is kept with it, and is then no more work.
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
