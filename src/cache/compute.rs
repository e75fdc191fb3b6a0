//! Blocks that callers compute where they are missing: one caller at a time computes a block.

use std::{
    collections::HashMap,
    future::Future,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use bytes::Bytes;

use super::Cache;
use crate::{
    block::BlockKey,
    error::{Error, Result},
    shield::shield,
};

/// The turn to compute one block. Its lock is the right to compute, given first come, first served; the value is there
/// once somebody has computed it.
type Turn = tokio::sync::Mutex<Option<Bytes>>;

/// Blocks that callers compute now, or wait for.
#[derive(Default)]
pub(super) struct Turns(Mutex<HashMap<BlockKey, Arc<Turn>>>);

/// A caller that computes a block or waits for its turn.
struct Participant<'a> {
    turns: &'a Turns,
    key: BlockKey,
    /// `None` once dropped.
    turn: Option<Arc<Turn>>,
    /// It has computed the block: when it goes, the block is in the cache, and whoever asks then is answered there.
    has_computed: AtomicBool,
}

impl Turns {
    fn map(&self) -> MutexGuard<'_, HashMap<BlockKey, Arc<Turn>>> {
        // The map is whole between any two of its methods.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Joins those who want a block, where fewer than `participants_max` do.
    fn join(&self, key: &BlockKey, participants_max: usize) -> Option<Participant<'_>> {
        let mut map = self.map();
        let turn = map.entry(*key).or_default();
        if Arc::strong_count(turn) > participants_max {
            return None;
        }
        let turn = Some(Arc::clone(turn));
        drop(map);
        Some(Participant { turns: self, key: *key, turn, has_computed: AtomicBool::new(false) })
    }
}

impl Participant<'_> {
    fn turn(&self) -> &Turn {
        self.turn.as_ref().expect("it is there until the participant is dropped")
    }
}

impl Drop for Participant<'_> {
    fn drop(&mut self) {
        let Some(own) = self.turn.take() else { return };
        let mut map = self.turns.map();
        let is_current = map.get(&self.key).is_some_and(|turn| Arc::ptr_eq(turn, &own));
        // The map's, and this one's: nobody else is left.
        if is_current && (self.has_computed.load(Ordering::Relaxed) || Arc::strong_count(&own) == 2) {
            map.remove(&self.key);
        }
        // Under the lock: of two participants that go at once the second is to see that it is the last.
        drop(own);
    }
}

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
    /// # kvhoist::block_on(async {
    /// # let cache = kvhoist::Cache::builder().block_bytes(4096).host_bytes(1 << 20).open().await?;
    /// let key = kvhoist::BlockKey::new([1; 32]);
    /// let block = cache
    ///     .get_or_fetch_with(&key, None, || async {
    ///         // The expensive part: run by one caller at a time.
    ///         Ok::<_, kvhoist::Error>(vec![7; 4096])
    ///     })
    ///     .await?;
    /// assert_eq!(block[..], [7; 4096]);
    /// assert!(cache.contains(&key));
    /// # cache.close().await }).unwrap();
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
        let waiters_max = self.config().waiters_max;
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
        participant.has_computed.store(true, Ordering::Relaxed);
        // Those that wait need not wait for the disk.
        drop(computed);
        if let Err(error) = self.store(key, parent, &bytes).await {
            tracing::debug!(%error, "a computed block was not stored");
        }
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: BlockKey = BlockKey::new([1; 32]);

    #[test]
    fn a_turn_lives_as_long_as_somebody_wants_the_block() {
        let turns = Turns::default();
        let (first, second) = (turns.join(&KEY, 2).expect("room"), turns.join(&KEY, 2).expect("room"));
        assert!(turns.join(&KEY, 2).is_none(), "two at most");
        assert!(std::ptr::eq(first.turn(), second.turn()));
        drop(first);
        assert_eq!(turns.map().len(), 1);
        drop(second);
        assert!(turns.map().is_empty());
    }

    #[test]
    fn a_computed_block_is_asked_for_anew_when_its_caller_is_gone() {
        let turns = Turns::default();
        let (computes, waits) = (turns.join(&KEY, 9).expect("room"), turns.join(&KEY, 9).expect("room"));
        computes.has_computed.store(true, Ordering::Relaxed);
        drop(computes);
        let later = turns.join(&KEY, 9).expect("room");
        assert!(!std::ptr::eq(waits.turn(), later.turn()), "it is to find the block in the cache");
        drop(waits);
        assert_eq!(turns.map().len(), 1, "the later one's");
        drop(later);
        assert!(turns.map().is_empty());
    }
}
