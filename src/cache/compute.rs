//! Blocks that callers compute where they are missing.

use std::future::Future;

use bytes::Bytes;

use super::{
    Cache,
    computations::{Computing, Joined},
};
use crate::{
    block::BlockKey,
    error::{Error, Result},
    shield::{log, shield},
};

impl Cache {
    /// A block, computed and stored where it is missing; however many callers want it meanwhile, one of them computes
    /// it and the others wait for that.
    ///
    /// A resident block is fetched, as by [`fetch`](Cache::fetch). Of the callers that miss, the first one calls
    /// `compute`; the others get what it computed as soon as that is there. Then the block is stored, as by
    /// [`store`](Cache::store) with `parent`, and the caller that computed it returns when the store has ended. If the
    /// computation fails, panics or is dropped, all that wait look again, and the first of them to be polled calls its
    /// own `compute`.
    ///
    /// A store that fails takes nothing away: the computed block is returned all the same. So `Ok` says that the caller
    /// has the block, and not, with `write_through` either, that the disk has it. As no caller gets the error of the
    /// store, the next [`sync`](Cache::sync) or [`close`](Cache::close) reports it, as that of a write-back
    /// ([`Error::Refused`]). It is counted ([`Stats`](crate::Stats)) and logged at the level `DEBUG`.
    ///
    /// A [`remove`](Cache::remove) during the computation is about this block too: what is computed is returned to its
    /// own caller and not stored, and all that wait look again. No caller that asks after the removal gets bytes whose
    /// computation began before it.
    ///
    /// The bytes are the host tier's own (see [`Lease`](crate::Lease), *Slow readers*) or those that were computed.
    ///
    /// # Errors
    /// What `compute` returned, to its own caller alone. Errors of [`fetch`](Cache::fetch), turned into `E`.
    /// [`Error::Argument`] where what was computed is not one block; [`Error::Busy`] where
    /// [`Config::waiters_max`](crate::Config::waiters_max) callers want this block already.
    ///
    /// A fetch that fails is no miss, and `compute` is not called for it: a caller that can do without the cache
    /// matches on the error and computes the block itself, as `examples/service.rs` does. A fetch fails after
    /// [`deadline_ms`](crate::Limits::deadline_ms) at the latest: set that to what a request may wait for a block.
    ///
    /// No deadline applies to a computation, nor to those that wait for it: drop the future to wait no longer. A
    /// computation that fails is tried again by each of those that wait, one after the other: where each takes a second
    /// to fail, the last of ten callers waits for ten seconds.
    ///
    /// # Cancel safety
    /// Dropped while it waits, it leaves no trace. Dropped while it computes, it drops the computation, and those that
    /// wait look again. Dropped while it stores, it is a dropped [`store`](Cache::store).
    ///
    /// # Deadlocks
    /// A computation must not wait, directly or through others, for the block that it computes.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_cache(async |cache| {
    /// let key = kvhoist::BlockKey::new([1; 32]);
    /// let block = cache
    ///     .get_or_fetch_with(&key, None, || async {
    ///         // The expensive part: run by one caller at a time.
    ///         Ok::<_, kvhoist::Error>(vec![7; 4096])
    ///     })
    ///     .await?;
    /// assert_eq!(block[..], [7; 4096]);
    /// assert!(cache.contains(&key));
    /// # Ok(()) });
    /// ```
    pub async fn get_or_fetch_with<C, B, E>(
        &self,
        key: &BlockKey,
        parent: Option<&BlockKey>,
        compute: impl FnOnce() -> C,
    ) -> Result<Bytes, E>
    where
        C: Future<Output = Result<B, E>>,
        B: Into<Bytes>,
        E: From<Error>,
    {
        let waiters_max = self.config().limits.waiters_max;
        let mut has_looked_again = false;
        let computing = loop {
            if let Some(lease) = self.fetch(key).await? {
                return Ok(lease.into_bytes());
            }
            match self.inner.computations.join(key, waiters_max as usize) {
                // Another caller may have computed and stored it since the fetch. The right is dropped: those that wait
                // must not depend on a fetch.
                Joined::Computes(_) if !has_looked_again && self.contains(key) => has_looked_again = true,
                Joined::Computes(computing) => break computing,
                Joined::Computed(bytes) => return Ok(self.joined(bytes)),
                Joined::Waits(receiver) => {
                    if let Ok(bytes) = shield(receiver).await {
                        return Ok(self.joined(bytes));
                    }
                }
                Joined::Full => {
                    let what = "callers that want one block";
                    return Err(self.shared().busy(what, u64::from(waiters_max), "waiters_max").into());
                }
            }
        };
        let bytes: Bytes = compute().await?.into();
        self.check_length(&bytes)?;
        // Those that wait need not wait for the disk.
        computing.computed(&bytes);
        self.store_computed(key, parent, &bytes, &computing).await;
        Ok(bytes)
    }

    /// What another caller computed, counted.
    fn joined(&self, bytes: Bytes) -> Bytes {
        self.shared().metrics.joined.add(1);
        bytes
    }

    /// Stores a computed block, unless it was removed since its computation began.
    async fn store_computed(
        &self,
        key: &BlockKey,
        parent: Option<&BlockKey>,
        bytes: &Bytes,
        computing: &Computing<'_>,
    ) {
        let placed = self.place(key, parent, bytes, || !computing.is_removed()).await;
        let stored = match placed {
            Ok(committed) => self.write_placed(committed).await,
            Err(error) => {
                self.shared().metrics.stores_failed.add(1);
                Err(error)
            }
        };
        if let Err(error) = stored {
            if !computing.is_removed() {
                self.shared().note_untold(key, &error);
            }
            log(|| tracing::debug!(%error, "a computed block was not stored"));
        }
    }
}
