//! Hints: what callers know of chains and the service cannot.

use std::time::Duration;

use super::calls::{Client, unexpected};
use crate::{
    block::BlockKey,
    error::Result,
    service::protocol::{KEYS_MAX, Reply, Request},
};

impl Client {
    /// Releases a chain, given in prefix order, for all clients of the space, as
    /// [`Cache::release`](crate::Cache::release). Returns how many blocks are released.
    ///
    /// # Errors
    /// As [`match_len`](Client::match_len).
    ///
    /// # Cancel safety
    /// The chain may be released from its end up to some block.
    ///
    /// ```
    /// # let dir = tempfile::tempdir().expect("a directory");
    /// # let mut config = kvhoist::service::ServerConfig::new(dir.path().join("socket"));
    /// # config.host_bytes = 1 << 20;
    /// # let server = kvhoist::service::Server::start(config).expect("a service");
    /// # kvhoist::block_on(async {
    /// # let options = kvhoist::service::ClientOptions::new("model", 4096);
    /// # let client = kvhoist::service::Client::connect(server.socket(), options).await?;
    /// let keys = kvhoist::PrefixChain::new("model").extend_tokens(&[1, 2, 3, 4], 2)?;
    /// # let mut block = vec![7; 4096];
    /// # let place = kvhoist::Segment { ptr: block.as_mut_ptr(), len: 4096 };
    /// # // SAFETY: the block lives until the call has ended.
    /// # unsafe { client.lend(&[place]) }.store_from(&keys[..1], None, &[vec![place]]).await?;
    /// assert_eq!(client.release(&keys).await?, 1);
    /// # client.close().await }).expect("the example runs");
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
    /// clients of the space, as [`Cache::keep`](crate::Cache::keep). Returns how many blocks are kept.
    ///
    /// # Errors
    /// As [`match_len`](Client::match_len).
    ///
    /// # Cancel safety
    /// The chain may be kept from its beginning up to some block.
    ///
    /// ```
    /// # let dir = tempfile::tempdir().expect("a directory");
    /// # let mut config = kvhoist::service::ServerConfig::new(dir.path().join("socket"));
    /// # config.host_bytes = 1 << 20;
    /// # let server = kvhoist::service::Server::start(config).expect("a service");
    /// # kvhoist::block_on(async {
    /// # let options = kvhoist::service::ClientOptions::new("model", 4096);
    /// # let client = kvhoist::service::Client::connect(server.socket(), options).await?;
    /// let keys = kvhoist::PrefixChain::new("model").extend_tokens(&[1, 2, 3, 4], 2)?;
    /// # let mut block = vec![7; 4096];
    /// # let place = kvhoist::Segment { ptr: block.as_mut_ptr(), len: 4096 };
    /// # // SAFETY: the block lives until the call has ended.
    /// # unsafe { client.lend(&[place]) }.store_from(&keys[..1], None, &[vec![place]]).await?;
    /// assert_eq!(client.keep(&keys, std::time::Duration::from_secs(60)).await?, 1);
    /// # client.close().await }).expect("the example runs");
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
    async fn count(&self, request: Request) -> Result<usize> {
        match self.ask(request).await? {
            Reply::Count(count) => Ok(count as usize),
            other => Err(unexpected(&other)),
        }
    }
}
