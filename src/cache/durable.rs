//! What is to be true after the end of the process: removals, syncs, and the close.

use super::Cache;
use crate::{
    block::BlockKey,
    error::{Error, Result},
    mover::{Command, Urgent},
    shield::shield,
    state::Removed,
};

impl Cache {
    /// Forgets a block in every tier; true if it was resident. Readers keep their leases.
    ///
    /// Resolves when no record on disk names it any more, also where it was resident no longer: a write of the block
    /// that is under way is waited for, and records that still name it are written anew. The removal then survives the
    /// end of the process. A power cut may undo it until a [`sync`](Cache::sync) has followed; use
    /// [`remove_durably`](Cache::remove_durably) where it must not. A computation of the block that is under way
    /// ([`get_or_fetch_with`](Cache::get_or_fetch_with)) is not stored.
    ///
    /// The copies of a remote store stay there, for other nodes. A block of which this cache knows one it offers from
    /// there no more, until it has written the block anew or was opened anew: that holds for the last half a million of
    /// removals. An object is never overwritten: where the store has one that begins with the block, a write of the
    /// block, stored anew, offers it again only if that object has the same bytes, and else counts as
    /// [`Stats::remote_unsent`](crate::Stats::remote_unsent). Where the cache knows no copy it offers what it learns of
    /// later.
    ///
    /// # Errors
    /// [`Error::Io`] if its record on disk could not be cleared, [`Error::Timeout`] if that takes too long; the block
    /// is forgotten all the same, and may be back at the next start. [`Error::Closed`].
    ///
    /// # Cancel safety
    /// The block is forgotten at the first poll. Dropped after that, only its record may come back at the next start.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_block(async |cache, key| {
    /// assert!(cache.remove(&key).await?);
    /// assert!(!cache.contains(&key));
    /// # Ok(()) });
    /// ```
    pub async fn remove(&self, key: &BlockKey) -> Result<bool> {
        let resident = self.forget(key).await?;
        if self.inner.shared.may_be_recorded(key) {
            self.ask(|reply| Command::Forget { key: Some(*key), reply }).await?;
        }
        Ok(resident)
    }

    /// Forgets a block, and waits for its write in flight. Its record may still name it.
    pub(super) async fn forget(&self, key: &BlockKey) -> Result<bool> {
        let shared = &self.inner.shared;
        // First: a computation that ends meanwhile stores the block before the removal from the index, or not at all.
        self.inner.computations.remove(key);
        if let Some(remote) = &shared.remote {
            remote.remove(key);
        }
        let removed = shared.remove(key);
        // Once more: an upload may have read its bytes before they went.
        if let Some(remote) = &shared.remote {
            remote.remove(key);
        }
        let Removed { resident, writing } = removed?;
        // A write that failed has ended as well, and has left its record to be cleared.
        if let Some(writing) = writing
            && let Err(error) = shield(shared.written(writing)).await
            && matches!(error, Error::Timeout { .. } | Error::Closed)
        {
            return Err(error);
        }
        Ok(resident)
    }

    /// As [`remove`](Cache::remove), and flushes: the removal survives a power cut too. It takes as long as the drive's
    /// flush does, one for each path.
    ///
    /// # Errors
    /// As [`remove`](Cache::remove); [`Error::Io`] also after a failed flush, as of [`sync`](Cache::sync).
    ///
    /// # Cancel safety
    /// As [`remove`](Cache::remove).
    ///
    /// ```
    /// # kvhoist::block_on(async {
    /// # let folder = tempfile::tempdir().expect("a folder");
    /// # let cache = kvhoist::Cache::builder().block_bytes(4096).host_bytes(1 << 20)
    /// #     .direct_io(kvhoist::DirectIo::Prefer).disk(folder.path(), 4 << 20).open().await?;
    /// # let key = kvhoist::BlockKey::new([1; 32]);
    /// # cache.store(&key, None, &[7; 4096]).await?;
    /// // A user's data is to be forgotten, also after a power cut.
    /// cache.remove_durably(&key).await?;
    /// # cache.close().await }).expect("the example runs");
    /// ```
    pub async fn remove_durably(&self, key: &BlockKey) -> Result<bool> {
        let resident = self.remove(key).await?;
        self.ask(|reply| Command::Flush { reply }).await?;
        Ok(resident)
    }

    /// Resolves when all that was stored before it is written and flushed: it survives a power cut.
    ///
    /// That is every block whose store has returned, or was dropped after the block became visible. With
    /// `write_through_selective` it is only the blocks that were selected. With `by_value` every block that is not on
    /// disk, and was used since it was last decided on, is decided on now, as if host memory let it go, and those that
    /// are worth a write, within the budget, are written and flushed. The rest stays in host memory until its slots are
    /// needed, and does not survive the cache: [`Stats::writes_declined`](crate::Stats::writes_declined) and
    /// [`Stats::writes_over_budget`](crate::Stats::writes_over_budget) count it, and it is no error.
    ///
    /// # Errors
    /// [`Error::Refused`] if the disk did not take blocks and no store has returned that error: write-backs, writes
    /// whose store was dropped, and stores of [computed](Cache::get_or_fetch_with) blocks, also if host memory had no
    /// slot for them. They are not tried again, and not reported to syncs that begin later: store them anew.
    ///
    /// [`Error::Io`] if records could not be written (the next sync tries again) or a flush failed. After a failed
    /// flush every later sync, and the close, fails too: the kernel does not try again what it could not write, so
    /// nobody can tell what survives a power cut. Reads go on; open the cache anew to sync again.
    ///
    /// [`Error::Unavailable`] if a file of the store was deleted: nothing of it survives the cache.
    ///
    /// [`Error::Timeout`] past [`Config::deadline_ms`](crate::Config::deadline_ms) (what was begun goes on),
    /// [`Error::Closed`].
    ///
    /// # Cancel safety
    /// The writes and the flush go on. Refused blocks are left for the next sync to report.
    ///
    /// ```
    /// # kvhoist::block_on(async {
    /// # let folder = tempfile::tempdir().expect("a folder");
    /// # let cache = kvhoist::Cache::builder().block_bytes(4096).host_bytes(1 << 20)
    /// #     .direct_io(kvhoist::DirectIo::Prefer).disk(folder.path(), 4 << 20).open().await?;
    /// # let key = kvhoist::BlockKey::new([1; 32]);
    /// # cache.store(&key, None, &[7; 4096]).await?;
    /// cache.sync().await?;
    /// // The block survives a power cut from here on.
    /// # cache.close().await }).expect("the example runs");
    /// ```
    pub async fn sync(&self) -> Result<()> {
        let refusals = self.inner.shared.begin_report();
        self.ask(|reply| Command::Sync { reply }).await?;
        self.inner.facts.names.check(&self.inner.shared)?;
        // Here and not on the reactor: what a caller that is gone was to be told, the next one is.
        refusals.report()
    }

    /// Finishes what is under way, writes what is dirty, flushes, and releases the files. With `by_value` it writes
    /// what a [`sync`](Cache::sync) would, and the rest is gone.
    ///
    /// Calls on other handles fail with [`Error::Closed`] from now on. Leases stay valid. However many callers close
    /// the cache, and whenever they do, each waits until it has ended and gets the same result: registered memory may
    /// be reused after any of them.
    ///
    /// # Errors
    /// As [`sync`](Cache::sync); the cache is closed all the same.
    ///
    /// # Cancel safety
    /// From the first poll on the close goes on.
    ///
    /// ```
    /// # kvhoist::block_on(async {
    /// # let cache = kvhoist::Cache::builder().block_bytes(4096).host_bytes(1 << 20).open().await?;
    /// cache.close().await?;
    /// assert!(matches!(cache.sync().await, Err(kvhoist::Error::Closed)));
    /// # Ok::<_, kvhoist::Error>(()) }).expect("the example runs");
    /// ```
    pub async fn close(&self) -> Result<()> {
        // As for a sync: from here on no released block is evicted before it is written.
        let _covers = self.inner.shared.begin_covering();
        // Refused where it has ended.
        drop(self.send_urgent(Urgent::Close));
        self.ended().await
    }

    /// Whether it serves no call any more: it was closed, or a panic that is a defect has ended it.
    #[doc(hidden)]
    pub fn has_ended(&self) -> bool {
        self.shared().has_ended()
    }

    /// Waits until its reactor has ended, by a close or by a defect.
    #[doc(hidden)]
    pub async fn wait_ended(&self) {
        drop(self.ended().await);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;
    use crate::{
        Config,
        block::Tier,
        block_on,
        index::EntryId,
        state::{Class, Few},
    };

    /// Too many writes wait for a slot of the disk tier, so that of the removed block ends.
    #[test]
    fn a_removal_succeeds_where_the_write_it_waits_for_was_refused() {
        let cache = block_on(Cache::open(Config::default().block_bytes(4096).host_blocks(2))).expect("open");
        let (key, shared) = (BlockKey::new([1; 32]), cache.shared());
        shared.lock().flights.begin((&key, Tier::Disk), EntryId::NONE, Class::Awaited, Few::default(), true);
        let mut removal = Box::pin(cache.remove(&key));
        assert!((&mut removal).now_or_never().is_none(), "a record may come");
        let (answers, _) = shared.lock().end_flight(&key, Tier::Disk, Err(Error::busy("waiters", 1, "waiters_max")));
        answers.into_iter().for_each(|(waiter, answer)| drop(waiter.send(answer)));
        assert!(matches!(removal.now_or_never(), Some(Ok(false))));
    }
}
