//! What callers know of chains and the cache cannot: that one is over, or will be wanted again.

use std::time::Duration;

use super::Cache;
use crate::block::BlockKey;

impl Cache {
    /// Says that the chain of `keys`, given in prefix order, is over: its blocks are the first to go, in every tier,
    /// and need not be written before. Gives how many blocks that are resident it holds for. No I/O.
    ///
    /// From the last key on, up to the first block that another chain goes on from (or did, while both were here), or
    /// that is [kept](Self::keep): a prompt that many conversations begin with is not over with one of them. So the
    /// whole chain may be named. A later use of a block, by whatever call, takes it back for the block and for those
    /// before it.
    ///
    /// Say it only where it is known. A chain that is released and goes on has to be computed anew, which costs far
    /// more than a chain that is over and takes slots until it is the coldest. What is released and not written yet
    /// (`write_back`) is written by a [`sync`](Self::sync) that begins while it is resident; where it had to make room
    /// before, it is lost, and counted ([`Stats::released_unwritten`](crate::Stats::released_unwritten)). With
    /// `by_value` a `sync` does not write it.
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
        self.inner.shared.release(keys)
    }

    /// Keeps the resident blocks of a chain, given in prefix order, for `time` from now: they go after all others, in
    /// every tier. Gives how many are kept; what is resident nowhere cannot be. No I/O.
    ///
    /// A quarter of a tier's slots is kept at most. Where more copies are, the coldest of them go when they would have
    /// gone anyway ([`TierStats::kept`](crate::TierStats::kept) says how many there are). A preference, and not a pin:
    /// where nothing else may go, kept blocks do. What is before a kept block is kept as well. A block that is kept for
    /// longer stays so; nothing but time ends it. It ends with the process.
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
        self.inner.shared.keep(keys, time)
    }
}
