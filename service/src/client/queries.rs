//! Look-ups, prefetches, removals, and the space's figures.

use kvhoist::{BlockKey, Stats, Tier};

use super::calls::{Client, unexpected};
use crate::{
    error::{Error, Result},
    protocol::{KEYS_MAX, Reply, Request},
};

impl Client {
    /// The number of leading `keys` that are resident in some tier.
    ///
    /// # Errors
    /// [`Error::Service`]; [`Error::Closed`].
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_stored(async |client, keys| {
    /// assert_eq!(client.match_len(keys).await?, 1);
    /// # Ok(()) });
    /// ```
    pub async fn match_len(&self, keys: &[BlockKey]) -> Result<usize> {
        let mut leading = 0;
        for keys in keys.chunks(KEYS_MAX) {
            let count = self.count(Request::MatchLen { keys: keys.to_vec() }).await?;
            leading += count;
            if count < keys.len() {
                break;
            }
        }
        Ok(leading)
    }

    /// The fastest tier of each of the leading `keys` that are resident.
    ///
    /// # Errors
    /// As [`match_len`](Client::match_len).
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_stored(async |client, keys| {
    /// assert_eq!(client.match_prefix(keys).await?, [kvhoist::Tier::Disk]);
    /// # Ok(()) });
    /// ```
    pub async fn match_prefix(&self, keys: &[BlockKey]) -> Result<Vec<Tier>> {
        let mut leading = Vec::new();
        for keys in keys.chunks(KEYS_MAX) {
            let tiers = match self.ask(Request::MatchPrefix { keys: keys.to_vec() }).await? {
                Reply::Tiers(tiers) => tiers,
                other => return Err(unexpected(&other)),
            };
            let all = tiers.len() == keys.len();
            leading.extend(tiers);
            if !all {
                break;
            }
        }
        Ok(leading)
    }

    /// Which of `keys` are resident, whatever comes before them. Unlike [`match_len`](Client::match_len) it begins no
    /// request.
    ///
    /// # Errors
    /// As [`match_len`](Client::match_len).
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_stored(async |client, keys| {
    /// assert_eq!(client.contains(keys).await?, [true, false]);
    /// # Ok(()) });
    /// ```
    pub async fn contains(&self, keys: &[BlockKey]) -> Result<Vec<bool>> {
        let mut there = Vec::with_capacity(keys.len());
        for keys in keys.chunks(KEYS_MAX) {
            match self.ask(Request::Contains { keys: keys.to_vec() }).await? {
                Reply::Flags(flags) if flags.len() == keys.len() => there.extend(flags),
                other => return Err(unexpected(&other)),
            }
        }
        Ok(there)
    }

    /// Starts to bring blocks into the service's host memory; how many movements it started.
    ///
    /// # Errors
    /// As [`match_len`](Client::match_len).
    ///
    /// # Cancel safety
    /// The blocks are brought all the same, if the request was sent.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_stored(async |client, keys| {
    /// // The first block is on disk, and the second is nowhere.
    /// assert_eq!(client.prefetch(keys).await?, 1);
    /// # Ok(()) });
    /// ```
    pub async fn prefetch(&self, keys: &[BlockKey]) -> Result<usize> {
        let mut started = 0;
        for keys in keys.chunks(KEYS_MAX) {
            started += self.count(Request::Prefetch { keys: keys.to_vec() }).await?;
        }
        Ok(started)
    }

    /// Counts a use of every resident block of a chain, as [`Cache::touch`](kvhoist::Cache::touch).
    ///
    /// # Errors
    /// As [`match_len`](Client::match_len).
    ///
    /// # Cancel safety
    /// The uses are counted all the same, if the request was sent.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_stored(async |client, keys| {
    /// client.touch(keys).await?;
    /// # Ok(()) });
    /// ```
    pub async fn touch(&self, keys: &[BlockKey]) -> Result<()> {
        for keys in keys.chunks(KEYS_MAX) {
            self.ask(Request::Touch { keys: keys.to_vec() }).await?;
        }
        Ok(())
    }

    /// Forgets a block in every tier, for all clients of the space; true if it was resident.
    ///
    /// # Errors
    /// As [`Cache::remove`](kvhoist::Cache::remove), as [`Error::Service`]; [`Error::Closed`].
    ///
    /// # Cancel safety
    /// The block may be forgotten all the same.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_stored(async |client, keys| {
    /// assert!(client.remove(&keys[0]).await?);
    /// assert!(!client.remove(&keys[0]).await?, "it is gone");
    /// # Ok(()) });
    /// ```
    pub async fn remove(&self, key: &BlockKey) -> Result<bool> {
        self.remove_one(key, false).await
    }

    /// As [`remove`](Client::remove), and flushes: the removal survives a power cut too.
    ///
    /// # Errors
    /// As [`remove`](Client::remove).
    ///
    /// # Cancel safety
    /// As [`remove`](Client::remove).
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_stored(async |client, keys| {
    /// client.remove_durably(&keys[0]).await?;
    /// assert_eq!(client.contains(keys).await?, [false, false]);
    /// # Ok(()) });
    /// ```
    pub async fn remove_durably(&self, key: &BlockKey) -> Result<bool> {
        self.remove_one(key, true).await
    }

    async fn remove_one(&self, key: &BlockKey, durable: bool) -> Result<bool> {
        match self.ask(Request::Remove { durable, keys: vec![*key] }).await? {
            Reply::Results(mut results) if results.len() == 1 => results.remove(0).map_err(Error::from),
            other => Err(unexpected(&other)),
        }
    }

    /// Resolves when all that was stored in the space before it, by any client, is written and flushed.
    ///
    /// # Errors
    /// As [`Cache::sync`](kvhoist::Cache::sync), as [`Error::Service`]; [`Error::Closed`]. A sync that ends with
    /// [`ServiceFault::Timeout`](kvhoist::ServiceFault::Timeout), or with a lost connection, may have taken the
    /// report of refused blocks with it: no later sync repeats it.
    ///
    /// # Cancel safety
    /// The writes and the flush go on. A report of refused blocks may be lost, as above.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_stored(async |client, keys| {
    /// client.sync().await?;
    /// # Ok(()) });
    /// ```
    pub async fn sync(&self) -> Result<()> {
        self.ask(Request::Sync).await.map(drop)
    }

    /// The space's figures for all clients, since the service opened it.
    ///
    /// # Errors
    /// [`Error::Service`]; [`Error::Closed`].
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_stored(async |client, keys| {
    /// let stats = client.stats().await?;
    /// assert_eq!(stats.stores, 1);
    /// # Ok(()) });
    /// ```
    pub async fn stats(&self) -> Result<Stats> {
        match self.ask(Request::Stats).await? {
            Reply::Stats(stats) => Ok(*stats),
            other => Err(unexpected(&other)),
        }
    }
}
