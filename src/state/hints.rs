//! Hints of callers, carried to the index.

use std::{sync::Arc, time::Duration};

use super::Shared;
use crate::block::BlockKey;

impl Shared {
    /// Releases the first `count` blocks of a chain, whose other blocks are released already. Returns how many are
    /// released now; 0 once the cache is closed.
    pub(crate) fn release(self: &Arc<Self>, keys: &[BlockKey], count: usize) -> usize {
        let (mut released, mut left, now) = (0, count, self.now_ms());
        'chain: while left > 0 {
            let mut state = self.lock();
            if state.check_open().is_err() {
                break;
            }
            let first = left.saturating_sub(KeepWalk::BLOCKS_PER_PART);
            for at in (first..left).rev() {
                let Some(is_released) = state.index.release_at(keys, at, now) else { break 'chain };
                released += usize::from(is_released);
            }
            left = first;
        }
        self.metrics.released.add(released as u64);
        released
    }

    /// Begins to keep the blocks of a chain, and those before it, for `time`.
    pub(crate) fn keep<'a>(self: &'a Arc<Self>, keys: &'a [BlockKey], time: Duration) -> KeepWalk<'a> {
        let until = self.now_ms().saturating_add(u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
        KeepWalk { shared: self, until, keys, next: 0, kept: 0, below: None }
    }

    /// Milliseconds since the cache was opened.
    pub(super) fn now_ms(&self) -> u64 {
        u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

/// A chain that is being kept, in parts: however long it is, others get the lock between them, and a caller may do
/// other things. Dropped before its end, blocks before the chain may not be kept, also by later calls that keep
/// the same chain for a shorter time: these stop at a block that is kept already.
#[doc(hidden)]
pub struct KeepWalk<'a> {
    shared: &'a Arc<Shared>,
    until: u64,
    keys: &'a [BlockKey],
    /// The key that is looked at after the ancestors of the one before it.
    next: usize,
    kept: usize,
    /// The block whose ancestors are kept next: named by its key, as it may be gone by the next lock.
    below: Option<BlockKey>,
}

impl KeepWalk<'_> {
    /// Blocks that are looked at under one lock, or marked by a release.
    pub const BLOCKS_PER_PART: usize = 256;

    /// Keeps the next blocks, under one lock. `None` if there may be more of them; at the end, how many of the chain
    /// are kept: fewer where the cache has been closed.
    pub fn keep_some(&mut self) -> Option<usize> {
        let mut state = self.shared.lock();
        if state.check_open().is_err() {
            return Some(self.kept);
        }
        let mut at = self.below.and_then(|key| state.index.find(&key));
        for _ in 0..Self::BLOCKS_PER_PART {
            at = match at {
                Some(id) => state.index.keep_before(id, self.until),
                // From the beginning: the blocks before a kept one are kept already.
                None => {
                    let Some(key) = self.keys.get(self.next) else {
                        drop(state);
                        self.shared.note_kept(self.keys);
                        return Some(self.kept);
                    };
                    let found = state.index.find(key).filter(|id| state.index.keep(*id, self.until));
                    self.next += 1;
                    self.kept += usize::from(found.is_some());
                    found
                }
            };
        }
        self.below = at.map(|id| state.index.key(id));
        None
    }

    /// Keeps all of them. Returns how many of the chain are kept.
    pub(crate) fn keep_all(mut self) -> usize {
        loop {
            if let Some(kept) = self.keep_some() {
                return kept;
            }
        }
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::*;
    use crate::{block::Tier, config::Config, state::locks_taken};

    const MARKED: usize = KeepWalk::BLOCKS_PER_PART;

    fn key(number: u64) -> BlockKey {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&number.to_le_bytes());
        BlockKey::new(key)
    }

    /// A cache with a chain of so many blocks on disk, and its keys.
    fn chain(blocks: u64) -> (Arc<Shared>, Vec<BlockKey>) {
        let shared = Shared::of_test(Config::default().block_bytes(4096).host_blocks(2));
        let keys: Vec<_> = (0..blocks).map(key).collect();
        let mut state = shared.lock();
        for (at, key) in keys.iter().enumerate() {
            let id = state.index.insert(*key, at.checked_sub(1).map(|at| keys[at]));
            assert!(state.index.begin_fill(id, Tier::Disk) && state.index.complete_fill(id, Tier::Disk, at as u32));
        }
        drop(state);
        (shared, keys)
    }

    fn kept_of(shared: &Arc<Shared>, keys: &[BlockKey]) -> Vec<bool> {
        let state = shared.lock();
        state.index.validate().expect("valid");
        keys.iter().map(|key| state.index.find(key).is_some_and(|id| state.index.is_kept(id))).collect()
    }

    /// Removes blocks of a chain of which the end is kept, and keeps the rest: which are kept then. Where the removed
    /// one is only the first that is kept, the index still knows it, without what was above it.
    fn kept_after_removal(removes_end: bool) -> Vec<bool> {
        let (shared, keys) = chain(4 * MARKED as u64);
        let ends = [keys[4 * MARKED - 1], keys[MARKED - 1]];
        let (mut walk, before) = (shared.keep(&ends, Duration::from_secs(60)), locks_taken());
        assert_eq!(walk.keep_some(), None);
        assert_eq!(locks_taken() - before, 1);
        let kept = kept_of(&shared, &keys);
        assert!((0..kept.len()).all(|at| kept[at] == (at >= 3 * MARKED)), "from its end on, so many at once");
        let removed = if removes_end { 3 * MARKED..4 * MARKED } else { 3 * MARKED..3 * MARKED + 1 };
        let mut state = shared.lock();
        for key in keys[removed].iter().rev() {
            let id = state.index.find(key).expect("resident");
            state.index.remove(id);
        }
        drop(state);
        assert_eq!((0..8).find_map(|_| walk.keep_some()), Some(2));
        kept_of(&shared, &keys)
    }

    #[test]
    fn a_chain_is_kept_in_parts_also_if_the_block_is_removed_where_it_goes_on() {
        for removes_end in [false, true] {
            let kept = kept_after_removal(removes_end);
            let expected = |at: usize| at < MARKED || at >= 3 * MARKED && !removes_end;
            assert!((0..kept.len()).all(|at| kept[at] == expected(at)), "the next key, and those above it, are kept");
        }
    }

    #[test]
    fn a_chain_of_a_cache_that_is_closed_in_between_is_kept_no_further() {
        let (shared, keys) = chain(4 * MARKED as u64);
        let mut walk = shared.keep(&keys, Duration::from_secs(60));
        assert_eq!(walk.keep_some(), None);
        shared.close();
        assert_eq!(walk.keep_some(), Some(MARKED / 2));
    }

    #[test]
    fn a_long_chain_is_kept_and_matched_under_many_locks() {
        const BLOCKS: u64 = 1 << 15;
        let (shared, keys) = chain(BLOCKS);
        let (last, before) = (keys.len() - 1, locks_taken());
        assert_eq!(shared.keep(&keys[last..], Duration::from_secs(60)).keep_all(), 1);
        let locks = locks_taken() - before;
        assert!(locks >= BLOCKS / 256, "{locks} locks for {BLOCKS} blocks");
        let before = locks_taken();
        assert_eq!((shared.match_len(&keys), shared.match_prefix(&keys).len()), (keys.len(), keys.len()));
        let locks = locks_taken() - before;
        assert!(locks >= 2 * BLOCKS / 256, "{locks} locks to match {BLOCKS} blocks twice");
        assert!(kept_of(&shared, &keys).iter().all(|kept| *kept), "the blocks before it too");
    }
}
