//! Calls about many blocks, or all of them.

use std::{iter, sync::Arc};

use futures_util::{StreamExt, stream};

use super::{Cache, Lease, OpenCache};
use crate::{
    block::{BlockKey, Tier},
    error::{Error, Result},
    mover::{Begun, Command},
    state::{Class, Locked, Promotion, State, Use},
};

/// Blocks that [`Cache::clear`] forgets before other tasks of its caller's thread get a turn.
const REMOVED_PER_TURN: usize = 256;

/// Blocks that are prefetched under one lock: some microseconds.
const PREFETCHED_PER_LOCK: usize = 8;

impl Cache {
    /// Whether a block is resident in some tier that is in service, or offered by the remote tier; false once the cache
    /// is closed. No I/O.
    ///
    /// Unlike [`match_prefix`](Cache::match_prefix) it begins no request and counts no use: to ask about a block
    /// changes nothing about how long it stays. By the time of a fetch it may be gone.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_cache(async |cache| {
    /// let key = kvhoist::BlockKey::new([1; 32]);
    /// assert!(!cache.contains(&key));
    /// cache.store(&key, None, &[7; 4096]).await?;
    /// assert!(cache.contains(&key));
    /// # Ok(()) });
    /// ```
    pub fn contains(&self, key: &BlockKey) -> bool {
        let state = self.shared().lock();
        if state.check_open().is_err() {
            return false;
        }
        let is_resident = state.index.find(key).and_then(|id| state.served_tier(id)).is_some();
        drop(state);
        is_resident || self.shared().remote.as_ref().is_some_and(|remote| remote.offers(key))
    }

    /// The number of resident blocks, each counted once, however many tiers hold it; 0 once the cache is closed. One
    /// lock. Blocks of a tier that is out of service count, although no call serves them.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_cache(async |cache| {
    /// assert!(cache.is_empty());
    /// cache.store(&kvhoist::BlockKey::new([1; 32]), None, &[7; 4096]).await?;
    /// assert_eq!(cache.len(), 1);
    /// # Ok(()) });
    /// ```
    pub fn len(&self) -> usize {
        let state = self.shared().lock();
        if state.check_open().is_err() { 0 } else { state.index.blocks() }
    }

    /// True where [`len`](Cache::len) is 0.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_cache(async |cache| {
    /// assert!(cache.is_empty());
    /// # Ok(()) });
    /// ```
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The keys of all blocks that are resident in a tier in service, in no particular order. No I/O, no use counted.
    ///
    /// The iterator looks at one page of the index at a time, a few thousand blocks, and holds the lock for some tens
    /// of microseconds; between pages it holds neither the lock nor a block. A block that is resident from the first
    /// call of `next` to the last is yielded exactly once. A block that becomes resident or is removed meanwhile may be
    /// yielded or not; one that is removed and stored again may be yielded twice. The iterator ends when the cache is
    /// closed.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_cache(async |cache| {
    /// # cache.store(&kvhoist::BlockKey::new([1; 32]), None, &[7; 4096]).await?;
    /// for key in cache.keys() {
    ///     if let Some(block) = cache.fetch(&key).await? {
    ///         println!("{key}: {} bytes", block.len());
    ///     }
    /// }
    /// # Ok(()) });
    /// ```
    pub fn keys(&self) -> impl Iterator<Item = BlockKey> + Send + use<> {
        self.pages(State::serves).flatten()
    }

    /// The keys of the resident blocks that are wanted, a page of the index at a time.
    fn pages(
        &self,
        is_wanted: fn(&State, &BlockKey, Tier) -> bool,
    ) -> impl Iterator<Item = Vec<BlockKey>> + Send + use<> {
        let shared = Arc::clone(self.shared());
        let mut next = Some(0);
        iter::from_fn(move || {
            let page = next.take()?;
            let state = shared.lock();
            state.check_open().ok()?;
            let mut found = Vec::new();
            next = state.index.visit_page(page, |key, tier| found.extend(is_wanted(&state, &key, tier).then_some(key)));
            Some(found)
        })
    }

    /// Forgets every block that is resident when it is called, as [`remove`](Cache::remove) forgets one, also those of
    /// a tier that is out of service; how many there were. Readers keep their leases.
    ///
    /// Resolves when no record on disk names one of them, or a block that was evicted or removed before. Blocks that
    /// are stored meanwhile may stay or go. It takes about as long as a write of all records: to begin with an empty
    /// store, close the cache and remove its files, which is quicker. For the copies of a remote store the same applies
    /// as of [`remove`](Cache::remove).
    ///
    /// # Errors
    /// The first that a removal ended with; the other blocks are forgotten all the same. After [`Error::Io`], which a
    /// disk that is out of service may cause, or [`Error::Timeout`] some may be back at the next start: call it again,
    /// or remove the files of the closed cache. [`Error::Closed`].
    ///
    /// # Cancel safety
    /// What was removed stays so, and no more blocks are removed.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_cache(async |cache| {
    /// cache.store(&kvhoist::BlockKey::new([1; 32]), None, &[7; 4096]).await?;
    /// assert_eq!(cache.clear().await?, 1);
    /// assert!(cache.is_empty());
    /// # Ok(()) });
    /// ```
    pub async fn clear(&self) -> Result<u64> {
        self.shared().lock().check_open()?;
        // First: a computation that ends meanwhile has stored its block before the walk, or does not store it.
        self.inner.computations.clear();
        if let Some(remote) = &self.shared().remote {
            remote.remove_all();
        }
        let (mut removed, mut failed) = (0, None);
        // Last what others have removed and wait for: until its writes end, records may name it.
        let written = std::iter::once_with(|| self.shared().removed_in_flight());
        for page in self.pages(|_, _, _| true).chain(written) {
            for keys in page.chunks(REMOVED_PER_TURN) {
                for key in keys {
                    match self.forget(key).await {
                        Ok(was_resident) => removed += u64::from(was_resident),
                        Err(Error::Closed) => return Err(Error::Closed),
                        Err(error) => failed = failed.or(Some(error)),
                    }
                }
                tokio::task::yield_now().await;
            }
        }
        if let Some(remote) = &self.shared().remote {
            // Once more: an upload may have read the bytes of blocks that went since.
            remote.remove_all();
        }
        let recorded = self.ask(|reply| Command::Forget { key: None, reply }).await;
        failed.or(recorded.err()).map_or(Ok(removed), Err)
    }

    /// Starts to bring blocks into host memory; returns how many movements it started.
    ///
    /// Reads that a caller awaits go first. With [`Config::background_max`](crate::Config::background_max) movements in
    /// flight, or a full queue, the rest of the call is refused and counted. A block whose movement in flight cannot be
    /// joined, because it is overdue or has [`Config::waiters_max`](crate::Config::waiters_max) waiters, is skipped.
    ///
    /// # Errors
    /// [`Error::Closed`].
    ///
    /// ```
    /// # kvhoist::block_on(async {
    /// # let folder = tempfile::tempdir().expect("a folder");
    /// # let cache = kvhoist::Cache::builder().block_bytes(4096).host_bytes(1 << 20)
    /// #     .direct_io(kvhoist::DirectIo::Prefer).disk(folder.path(), 4 << 20).open().await?;
    /// # let key = kvhoist::BlockKey::new([1; 32]);
    /// # cache.store(&key, None, &[7; 4096]).await?;
    /// // A request is queued: its blocks are on the way while it waits.
    /// cache.prefetch(&[key])?;
    /// let block = cache.fetch(&key).await?;
    /// # assert!(block.is_some());
    /// # cache.close().await }).expect("the example runs");
    /// ```
    pub fn prefetch(&self, keys: &[BlockKey]) -> Result<usize> {
        self.inner.shared.lock().check_open()?;
        let (mut started, mut left) = (0, keys);
        while !left.is_empty() {
            let part = &left[..left.len().min(PREFETCHED_PER_LOCK)];
            let (began, taken) = self.prefetch_some(part)?;
            (started, left) = (started + began, &left[taken..]);
            if taken < part.len() {
                self.inner.shared.metrics.background_refused.add(left.len() as u64);
                break;
            }
        }
        Ok(started + self.inner.shared.want_remote(keys, false))
    }

    /// Begins to bring blocks into host memory, under one lock. Returns how many movements have begun, and how many
    /// blocks were not refused.
    fn prefetch_some(&self, keys: &[BlockKey]) -> Result<(usize, usize)> {
        let OpenCache { shared, submitter, .. } = &**self.inner;
        let (mut pushed, mut to_send) = (Vec::new(), Vec::new());
        let (mut started, mut taken) = (0, 0);
        let mut state = shared.lock();
        for key in keys {
            if state.flights.len() >= shared.config.limits.background_max as usize {
                break;
            }
            let begin = |state: &mut Locked<'_>, id, waiter| {
                let room = || shared.commands.try_take().ok();
                submitter.begin(state, (key, id), (Tier::Host, Class::Background), waiter, room)
            };
            let requested = (Class::Background, Use::Announced);
            match state.promote(key, Tier::Host, requested, begin) {
                // Nobody awaits it.
                Ok((Promotion::Started(_, begun), _)) => {
                    started += 1;
                    match begun {
                        Begun::Read(read) => pushed.push(submitter.submit(read)),
                        Begun::Command(room) => to_send.push((room, *key)),
                    }
                }
                Ok((Promotion::NotStarted, _)) => break,
                Err(Error::Closed) => return Err(Error::Closed),
                Ok((Promotion::Hit(pin), _)) => pin.release(&mut state),
                // Nowhere, or on its way. An error is of that movement, and no other block's.
                Ok(_) | Err(_) => {}
            }
            taken += 1;
        }
        drop(state);
        pushed.into_iter().for_each(|pushed| submitter.wake(pushed));
        to_send.into_iter().for_each(|(room, key)| self.send((Command::Promote { key, to: Tier::Host }, room)));
        Ok((started, taken))
    }

    /// Fetches many blocks at a time: one result per block, in order, each as of [`fetch`](Cache::fetch).
    ///
    /// Reads of blocks that are on disk run beside one another, [`Config::movements_max`](crate::Config::movements_max)
    /// at most. Each lease keeps a slot of the host tier (see [`Lease`], *Slow readers*): leave room for other callers,
    /// or move the blocks into memory of your own by [`load_into`](Cache::load_into).
    ///
    /// Returns a result for each key, in their order. None that fails or misses ends the others.
    ///
    /// # Errors
    /// As [`fetch`](Cache::fetch). [`Error::Argument`] for each key if there are more than the host tier has slots.
    ///
    /// # Cancel safety
    /// As [`fetch`](Cache::fetch): reads that began may still finish and make their blocks resident.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_cache(async |cache| {
    /// # let keys = [kvhoist::BlockKey::new([1; 32]), kvhoist::BlockKey::new([2; 32])];
    /// # cache.store(&keys[0], None, &[7; 4096]).await?;
    /// for (key, block) in keys.iter().zip(cache.fetch_many(&keys).await) {
    ///     match block? {
    ///         Some(block) => println!("{key}: {} bytes", block.len()),
    ///         None => println!("{key}: a miss"),
    ///     }
    /// }
    /// # Ok(()) });
    /// ```
    pub async fn fetch_many(&self, keys: &[BlockKey]) -> Vec<Result<Option<Lease>>> {
        let slots = self.shared().host_slots() as usize;
        if keys.len() > slots {
            let found = format!("{} of them", keys.len());
            let refused =
                Error::argument("keys", found, format!("{slots} at most, one for each slot of the host tier"));
            return keys.iter().map(|_| Err(refused.clone())).collect();
        }
        self.shared().want_remote(keys, true);
        let in_flight = self.config().limits.movements_max.max(1) as usize;
        let fetches = stream::iter(keys.iter().copied()).map(async |key| self.fetch(&key).await);
        fetches.buffered(in_flight).collect().await
    }
}

/// Futures of callers may move to other threads.
const _: fn(&Cache) = |cache| {
    fn sendable(_: impl Send) {}
    sendable(cache.clear());
    sendable(cache.fetch_many(&[]));
};
