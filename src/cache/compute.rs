//! Blocks that callers compute where they are missing.

use std::future::Future;

use bytes::Bytes;

use super::Cache;
use crate::{
    block::BlockKey,
    error::{Error, Result},
    shield::shield,
};

impl Cache {
    /// A block, computed and stored where it is missing; however many callers want it meanwhile, one of them computes
    /// it and the others wait for that.
    ///
    /// A resident block is fetched, as by [`fetch`](Cache::fetch). Of the callers that miss, the first one calls
    /// `compute`; the others get what it computed as soon as that is there. Then the block is stored, as by
    /// [`store`](Cache::store) with `parent`, and the caller that computed it returns when the store has ended. If the
    /// computation fails, panics or is dropped, the caller that has waited longest has the turn, and calls its own
    /// `compute`.
    ///
    /// A store that fails takes nothing away: the computed block is returned all the same. It is counted
    /// ([`Stats`](crate::Stats)), logged at the level `DEBUG`, and the block will be computed again.
    ///
    /// The bytes are the host tier's own (see [`Lease`](crate::Lease), *Slow readers*) or those that were computed.
    ///
    /// # Errors
    /// What `compute` returned, to its own caller alone. Errors of [`fetch`](Cache::fetch), turned into `E`.
    /// [`Error::Argument`] where what was computed is not one block; [`Error::Busy`] where
    /// [`Config::waiters_max`](crate::Config::waiters_max) callers want this block already.
    ///
    /// No deadline applies to a computation, nor to those that wait for it: drop the future to wait no longer.
    ///
    /// # Cancel safety
    /// Dropped while it waits, it leaves no trace. Dropped while it computes, it drops the computation, and the turn
    /// goes to the next caller. Dropped while it stores, it is a dropped [`store`](Cache::store).
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
        if let Some(lease) = self.fetch(key).await? {
            return Ok(lease.into_bytes());
        }
        let waiters_max = self.config().limits.waiters_max;
        let participant = self.inner.turns.join(key, waiters_max as usize);
        let participant = participant
            .ok_or_else(|| self.shared().busy("callers that want one block", u64::from(waiters_max), "waiters_max"))?;
        let mut computed = shield(participant.turn().lock()).await;
        if let Some(bytes) = computed.as_ref() {
            return Ok(bytes.clone());
        }
        // Another caller may have computed and stored it since the fetch.
        if self.contains(key)
            && let Some(lease) = self.fetch(key).await?
        {
            return Ok(lease.into_bytes());
        }
        let bytes: Bytes = compute().await?.into();
        self.check_length(&bytes)?;
        *computed = Some(bytes.clone());
        participant.note_computed();
        // Those that wait need not wait for the disk.
        drop(computed);
        if let Err(error) = self.store(key, parent, &bytes).await {
            tracing::debug!(%error, "a computed block was not stored");
        }
        Ok(bytes)
    }
}
