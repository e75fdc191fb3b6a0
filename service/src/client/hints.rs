//! Hints: what callers know of chains and the service cannot.

use std::time::Duration;

use kvhoist::BlockKey;

use super::calls::{Client, unexpected};
use crate::{
    error::Result,
    protocol::{KEYS_MAX, Reply, Request},
};

impl Client {
    /// Releases a chain, given in prefix order, for all clients of the space, as
    /// [`Cache::release`](kvhoist::Cache::release). Returns how many blocks are released.
    ///
    /// # Errors
    /// As [`match_len`](Client::match_len).
    ///
    /// # Cancel safety
    /// The chain may be released from its end up to some block.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_stored(async |client, keys| {
    /// assert_eq!(client.release(keys).await?, 1);
    /// # Ok(()) });
    /// ```
    pub async fn release(&self, keys: &[BlockKey]) -> Result<usize> {
        let mut released = 0;
        let mut next = None;
        // From the end: a block is released after those that continue from it.
        for keys in keys.rchunks(KEYS_MAX) {
            released += self.count(Request::Release { next, keys: keys.to_vec() }).await?;
            next = keys.first().copied();
        }
        Ok(released)
    }

    /// Keeps the resident blocks of a chain, given in prefix order, for `time` after the request arrives, for all
    /// clients of the space, as [`Cache::keep`](kvhoist::Cache::keep). Returns how many blocks are kept.
    ///
    /// # Errors
    /// As [`match_len`](Client::match_len).
    ///
    /// # Cancel safety
    /// The chain may be kept from its beginning up to some block.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_stored(async |client, keys| {
    /// assert_eq!(client.keep(keys, std::time::Duration::from_secs(60)).await?, 1);
    /// # Ok(()) });
    /// ```
    pub async fn keep(&self, keys: &[BlockKey], time: Duration) -> Result<usize> {
        let ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let mut kept = 0;
        for keys in keys.chunks(KEYS_MAX) {
            kept += self.count(Request::Keep { ms, keys: keys.to_vec() }).await?;
        }
        Ok(kept)
    }

    /// A request whose reply is a number of blocks.
    pub(super) async fn count(&self, request: Request) -> Result<usize> {
        match self.ask(request).await? {
            Reply::Count(count) => Ok(count as usize),
            other => Err(unexpected(&other)),
        }
    }
}
