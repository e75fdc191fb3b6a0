//! Hints: what callers know of chains and the cache cannot. One is over, will be requested again, or is in use.

use std::time::Duration;

use super::Cache;
use crate::{block::BlockKey, state::KeepWalk};

/// Blocks that [`Cache::touch`] counts before it lets others at the index.
const TOUCHED_UNDER_ONE_LOCK: usize = 256;

impl Cache {
    /// Releases the chain of `keys`, given in prefix order, because it is over: its blocks are evicted first, in every
    /// tier, and need not be written before. Returns how many resident blocks are released. No I/O.
    ///
    /// The release goes from the last key up to the first block from which another chain continues (or has continued
    /// while both were resident), or that is [kept](Self::keep): a prompt that many conversations begin with is not
    /// over with one of them. So callers may pass the whole chain. A later use of a block, by any call, takes the
    /// release back for the block and for those before it.
    ///
    /// Release only what is known to be over. A chain that is released and continues has to be computed anew, which
    /// costs far more than a chain that is over and occupies slots until it is the coldest. A released block that is
    /// not written yet (`write_back`) is written by a [`sync`](Self::sync) that begins while it is resident, and stays
    /// in host memory until then. If it is evicted before, it is lost, and counted
    /// ([`Stats::released_unwritten`](crate::Stats::released_unwritten)). With `by_value` a `sync` does not write it.
    ///
    /// ```
    /// # use kvhoist::{Cache, PrefixChain, block_on};
    /// # block_on(async {
    /// let cache = Cache::builder().block_bytes(4096).host_bytes(64 << 10).open().await?;
    /// let keys = PrefixChain::new("chat").extend_tokens(&[7; 96], 32)?;
    /// cache.store(&keys[0], None, &[0; 4096]).await?;
    /// cache.store(&keys[1], Some(&keys[0]), &[1; 4096]).await?;
    /// // The user has closed the conversation. Its third block was never stored.
    /// assert_eq!(cache.release(&keys), 2);
    /// # cache.close().await
    /// # }).expect("the example runs");
    /// ```
    pub fn release(&self, keys: &[BlockKey]) -> usize {
        self.inner.shared.release(keys, keys.len())
    }

    /// Releases the first `count` blocks of a chain whose other blocks an earlier call released.
    #[doc(hidden)]
    pub fn release_first(&self, keys: &[BlockKey], count: usize) -> usize {
        self.inner.shared.release(keys, count)
    }

    /// Keeps the resident blocks of a chain, given in prefix order, for `time` from now: they are evicted last, in
    /// every tier. Returns how many are kept; blocks that are not resident cannot be. No I/O.
    ///
    /// At most a quarter of a tier's slots is kept. Beyond that the coldest kept copies are evicted as if they were not
    /// kept ([`TierStats::kept`](crate::TierStats::kept) counts the kept copies). This is a preference, not a pin: if
    /// nothing else can be evicted, kept blocks are. The blocks that are before a kept one during the call are kept as
    /// well. A second call only extends the time; nothing ends it early but the end of the process.
    ///
    /// ```
    /// # use kvhoist::{Cache, PrefixChain, block_on};
    /// # use std::time::Duration;
    /// # block_on(async {
    /// let cache = Cache::builder().block_bytes(4096).host_bytes(64 << 10).open().await?;
    /// let system_prompt = PrefixChain::new("chat").extend_tokens(&[7; 32], 32)?;
    /// cache.store(&system_prompt[0], None, &[0; 4096]).await?;
    /// assert_eq!(cache.keep(&system_prompt, Duration::from_secs(3600)), 1);
    /// # cache.close().await
    /// # }).expect("the example runs");
    /// ```
    pub fn keep(&self, keys: &[BlockKey], time: Duration) -> usize {
        self.keep_in_parts(keys, time).keep_all()
    }

    /// As [`keep`](Self::keep), for a caller that has other things to do before a long chain is kept.
    #[doc(hidden)]
    pub fn keep_in_parts<'a>(&'a self, keys: &'a [BlockKey], time: Duration) -> KeepWalk<'a> {
        self.inner.shared.keep(keys, time)
    }

    /// Counts a use of every resident block of a chain, given in prefix order, as a load of it would. No I/O.
    ///
    /// For engines that keep a copy of their own and so never load what they use most. Blocks that are nowhere are
    /// passed over.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_block(async |cache, key| {
    /// // The engine has the block in its own memory: it is in use, although nobody loads it.
    /// cache.touch(&[key]);
    /// # Ok(()) });
    /// ```
    pub fn touch(&self, keys: &[BlockKey]) {
        // From the end, as within each part: a chain's end is to be evicted before its beginning.
        for part in keys.rchunks(TOUCHED_UNDER_ONE_LOCK) {
            let mut state = self.inner.shared.lock();
            let ids: Vec<_> = part.iter().filter_map(|key| state.index.find(key)).collect();
            state.index.touch_chain(&ids);
            ids.into_iter().for_each(|id| state.reconsider(id));
        }
    }
}
