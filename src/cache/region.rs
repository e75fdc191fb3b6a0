//! The calls on registered memory: register it, load blocks into it, store blocks from it, take it back.

use tokio::sync::oneshot;

use super::{
    Cache, Loan,
    regions::{MemoryOwner, Region},
};
use crate::{
    block::{BlockKey, Segment},
    device::GdrState,
    error::{Error, Result},
    memory::{Memory, MemoryKind, huge},
    mover::{Command, Job, RegionInner, RegionMemory, Reply, Submitter, Urgent},
    shield::shield,
};

/// Forgets a region whose registration is dropped before its caller has it.
struct Pending<'a> {
    cache: &'a Cache,
    region: &'a Region,
    registered: bool,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        if !self.registered {
            self.cache.inner.regions.remove(self.region).expect("a region of this cache");
            // The reactor may have pinned it. A cache that has ended has unpinned all regions.
            drop(self.cache.send_urgent(Urgent::GiveBack { region: self.region.inner.hold() }));
        }
    }
}

/// Pins a region that is registered already, for tests; `false` where the kernel or the storage engine refuses.
///
/// # Errors
/// [`Error::Argument`] for a region of another cache, or one that was unregistered. [`Error::Closed`].
pub async fn pin_region(cache: &Cache, region: &Region) -> Result<bool> {
    cache.pin_region(region).await
}

impl Cache {
    /// Registers memory of the caller's, to be the source and target of [`load_into`](Cache::load_into) and
    /// [`store_from`](Cache::store_from). Resolves at the first poll, unless the memory is to be
    /// [pinned](Memory::pinned).
    ///
    /// # Errors
    /// [`Error::Argument`] for an empty range or one that overlaps another region. [`Error::Busy`] past 4,096 regions.
    /// [`Error::Unavailable`] for device memory without a device tier. [`Error::Closed`], if it is to be pinned.
    ///
    /// # Cancel safety
    /// Dropped before it resolves, the memory is not registered: no call that begins later uses it. The kernel may keep
    /// its pages pinned for a moment longer; the memory may be unmapped nevertheless.
    ///
    /// ```
    /// # kvhoist::block_on(async {
    /// use kvhoist::{Memory, Segment};
    ///
    /// # let cache = kvhoist::Cache::builder().block_bytes(4096).host_bytes(1 << 20).open().await?;
    /// # let key = kvhoist::BlockKey::new([1; 32]);
    /// # cache.store(&key, None, &[7; 4096]).await?;
    /// let mut pool = vec![0; 16 * 4096];
    /// // SAFETY: the pool lives until `unregister` has resolved, and nobody touches it while a block is on its way.
    /// let memory = unsafe { Memory::host(pool.as_mut_ptr(), pool.len()) };
    /// let region = cache.register(memory.pinned(true)).await?;
    /// let place = Segment { ptr: pool[3 * 4096..].as_mut_ptr(), len: 4096 };
    /// let loaded = cache.load_into(&[key], &[vec![place]]).await?;
    /// cache.unregister(&region).await?;
    /// assert!(matches!(loaded[..], [Ok(true)]) && pool[3 * 4096..4 * 4096] == [7; 4096]);
    /// # cache.close().await }).expect("the example runs");
    /// ```
    pub async fn register(&self, memory: impl Into<Memory>) -> Result<Region> {
        let memory = memory.into();
        let pinned = memory.pinned;
        let region = self.add_region(memory)?;
        if pinned {
            let mut pending = Pending { cache: self, region: &region, registered: false };
            self.pin_region(&region).await?;
            pending.registered = true;
        }
        Ok(region)
    }

    /// Registers memory without pinning it.
    fn add_region(&self, memory: Memory) -> Result<Region> {
        let name = format!("a region of {} bytes at {:p}", memory.range.len, memory.range.ptr);
        self.add_region_of(memory, self.memory_owner(name))
    }

    /// As [`add_region`](Self::add_region), for an owner that may have several.
    #[doc(hidden)]
    pub fn add_region_of(&self, memory: Memory, whose: MemoryOwner) -> Result<Region> {
        if matches!(memory.kind, MemoryKind::Device) {
            self.need_device()?;
        }
        self.inner.regions.add(memory, whose)
    }

    /// One who will register memory, by a name for the log.
    #[doc(hidden)]
    pub fn memory_owner(&self, name: String) -> MemoryOwner {
        MemoryOwner(self.shared().lenders.add(name))
    }

    /// Moves a region of host memory into huge pages and has the kernel keep it pinned; `false` where the kernel or the
    /// storage engine refuses. Once, however often it is called.
    ///
    /// # Errors
    /// [`Error::Argument`] for a region of another cache, or one that was unregistered. [`Error::Closed`].
    ///
    /// # Cancel safety
    /// The region may be pinned all the same.
    #[doc(hidden)]
    pub async fn pin_region(&self, region: &Region) -> Result<bool> {
        let held = self.inner.regions.hold_one(region)?;
        let RegionInner { start, len, memory, .. } = *region.inner;
        if memory == RegionMemory::Host
            && let Err(error) = huge::collapse(start, len).await
        {
            tracing::debug!(%error, start, len, "not all of a region could be moved into huge pages");
        }
        let (reply, receiver) = oneshot::channel();
        shield(self.inner.commands.send(Command::Register { region: held, reply })).await.map_err(|_| Error::Closed)?;
        shield(receiver).await.map_err(|_| Error::Closed)
    }

    /// Forgets a region: resolves when no movement uses it any longer and nothing keeps it pinned. However many callers
    /// unregister one region, each of them waits for that; on a region that is forgotten already it resolves at once.
    ///
    /// # Errors
    /// [`Error::Argument`] for a region of another cache, which is left as it is.
    ///
    /// # Cancel safety
    /// The region is forgotten at the first poll. Movements may still use it when the future is dropped, and it may
    /// still be pinned: call again to wait for them.
    ///
    /// ```
    /// # kvhoist::block_on(async {
    /// # let cache = kvhoist::Cache::builder().block_bytes(4096).host_bytes(1 << 20).open().await?;
    /// use kvhoist::Memory;
    ///
    /// # let key = kvhoist::BlockKey::new([1; 32]);
    /// let mut pool = vec![7; 16 * 4096];
    /// // SAFETY: the pool lives until `unregister` has resolved, and nobody touches it while a block is on its way.
    /// let memory = unsafe { Memory::host(pool.as_mut_ptr(), pool.len()) };
    /// let region = cache.register(memory).await?;
    /// cache.unregister(&region).await?;
    /// drop(pool);
    /// # cache.close().await }).expect("the example runs");
    /// ```
    pub async fn unregister(&self, region: &Region) -> Result<()> {
        self.inner.regions.remove(region)?;
        shield(region.inner.wait_unused()).await;
        // The request holds the region until it is done, or lost with the reactor. Of two callers whose requests go out
        // at once each waits for both.
        let may_have_gdr = region.inner.lasting.is_some() && !matches!(self.inner.gdr.get(), GdrState::Off(_));
        let is_known = may_have_gdr || region.inner.is_fixed();
        let refused = is_known && self.send_urgent(Urgent::GiveBack { region: region.inner.hold() }).is_err();
        shield(region.inner.wait_unused()).await;
        if refused || region.inner.is_fixed() {
            // A cache that has ended has let go of all regions.
            drop(self.ended().await);
        }
        Ok(())
    }

    /// Copies blocks into registered memory: one result per block, in order. `true`: it is there;
    /// `false`: it is resident nowhere, its segments are as they were. Where they are on the device, or
    /// [`Config::bypass_host`](crate::Config::bypass_host) is on, they may hold anything then: the block was on its way
    /// when it turned out to be damaged, or was removed.
    ///
    /// `segments[i]` are the places of block `i`, in the order of its bytes, one block long in all.
    ///
    /// # Errors
    /// [`Error::Argument`] before anything moved: lengths, a segment outside every region, or more than
    /// [`Config::movements_max`](crate::Config::movements_max) blocks. A block's own error is in its result; its
    /// segments then hold anything.
    ///
    /// # Cancel safety
    /// The loads go on: their segments stay in use until [`unregister`](Cache::unregister) resolves.
    ///
    /// ```
    /// # kvhoist::block_on(async {
    /// # let cache = kvhoist::Cache::builder().block_bytes(4096).host_bytes(1 << 20).open().await?;
    /// use kvhoist::{Memory, Segment};
    ///
    /// # let key = kvhoist::BlockKey::new([1; 32]);
    /// # cache.store(&key, None, &[9; 4096]).await?;
    /// let mut pool = vec![7; 16 * 4096];
    /// // SAFETY: the pool lives until `unregister` has resolved, and nobody touches it while a block is on its way.
    /// let memory = unsafe { Memory::host(pool.as_mut_ptr(), pool.len()) };
    /// let region = cache.register(memory).await?;
    /// // The block's first half goes to the end of the pool, its second half to the beginning.
    /// let [end, begin] = [pool.len() - 2048, 0].map(|at| Segment { ptr: pool[at..].as_mut_ptr(), len: 2048 });
    /// let loaded = cache.load_into(&[key], &[vec![end, begin]]).await?;
    /// cache.unregister(&region).await?;
    /// assert!(matches!(loaded[..], [Ok(true)]) && pool[..2048] == [9; 2048]);
    /// # cache.close().await }).expect("the example runs");
    /// ```
    pub async fn load_into(&self, keys: &[BlockKey], segments: &[Vec<Segment>]) -> Result<Vec<Result<bool>>> {
        self.load_jobs(self.jobs(keys, None, segments, None)?).await
    }

    /// As [`load_into`](Self::load_into), of blocks that others load at the same time: each is read once for all who
    /// wait for it, into host memory, where it is pinned until it is copied to the last of them.
    #[doc(hidden)]
    pub async fn load_shared(&self, keys: &[BlockKey], segments: &[Vec<Segment>]) -> Result<Vec<Result<bool>>> {
        let mut jobs = self.jobs(keys, None, segments, None)?;
        jobs.iter_mut().for_each(|job| job.through_host = true);
        self.load_jobs(jobs).await
    }

    /// Stores blocks from registered memory: one result per block, in order; `true`: stored, as the
    /// write policy wants it.
    ///
    /// `keys` are one prefix chain: the parent of each is the one before it; `parent` is the first's.
    ///
    /// # Errors
    /// As [`load_into`](Cache::load_into) and [`store`](Cache::store).
    ///
    /// # Cancel safety
    /// The stores go on: their segments stay in use until [`unregister`](Cache::unregister) resolves.
    ///
    /// ```
    /// # kvhoist::block_on(async {
    /// # let cache = kvhoist::Cache::builder().block_bytes(4096).host_bytes(1 << 20).open().await?;
    /// use kvhoist::{Memory, Segment};
    ///
    /// # let key = kvhoist::BlockKey::new([1; 32]);
    /// let mut pool = vec![7; 16 * 4096];
    /// // SAFETY: the pool lives until `unregister` has resolved, and nobody touches it while a block is on its way.
    /// let memory = unsafe { Memory::host(pool.as_mut_ptr(), pool.len()) };
    /// let region = cache.register(memory).await?;
    /// let place = Segment { ptr: pool.as_mut_ptr(), len: 4096 };
    /// let stored = cache.store_from(&[key], None, &[vec![place]]).await?;
    /// cache.unregister(&region).await?;
    /// assert!(matches!(stored[..], [Ok(true)]) && cache.contains(&key));
    /// # cache.close().await }).expect("the example runs");
    /// ```
    pub async fn store_from(
        &self,
        keys: &[BlockKey],
        parent: Option<&BlockKey>,
        segments: &[Vec<Segment>],
    ) -> Result<Vec<Result<bool>>> {
        self.store_jobs(self.jobs(keys, Some(parent), segments, None)?).await
    }

    pub(super) async fn load_jobs(&self, jobs: Vec<Job>) -> Result<Vec<Result<bool>>> {
        self.want_remote(&jobs);
        self.ask_jobs(|reply| Submitter::begin_load(self.inner.submitter.as_ref(), jobs, reply)).await
    }

    /// Has what the remote tier alone has brought together.
    pub(super) fn want_remote(&self, jobs: &[Job]) {
        if self.shared().remote.is_some() {
            let keys: Vec<BlockKey> = jobs.iter().map(|job| job.key).collect();
            self.shared().want_remote(&keys, true);
        }
    }

    pub(super) async fn store_jobs(&self, jobs: Vec<Job>) -> Result<Vec<Result<bool>>> {
        let keys: Vec<BlockKey> = jobs.iter().map(|job| job.key).collect();
        let results = self.ask_jobs(|reply| Some(Command::StoreFrom { jobs, reply })).await?;
        self.shared().forget_reported(&keys, &results);
        Ok(results)
    }

    /// `chain`: the first key's parent, if the keys are a chain to be stored. `lent`: memory that the segments may lie
    /// in beside the registered regions.
    pub(super) fn jobs(
        &self,
        keys: &[BlockKey],
        chain: Option<Option<&BlockKey>>,
        segments: &[Vec<Segment>],
        lent: Option<&Loan>,
    ) -> Result<Vec<Job>> {
        if keys.len() != segments.len() {
            return Err(Error::argument(
                "segments",
                format!("{} lists", segments.len()),
                format!("one for each of {} keys", keys.len()),
            ));
        }
        let jobs_max = self.config().limits.movements_max;
        if keys.len() > jobs_max as usize {
            let most = format!("at most {jobs_max} in one call (`movements_max`): call once for each part of them");
            return Err(Error::argument("keys", keys.len(), most));
        }
        let mut parent = chain.flatten().copied();
        let mut jobs = Vec::with_capacity(keys.len());
        let held = self.inner.regions.hold(segments, self.config().block_bytes, lent)?;
        for ((key, segments), regions) in keys.iter().zip(segments).zip(held) {
            jobs.push(Job { key: *key, parent, segments: segments.clone(), regions, through_host: false });
            if chain.is_some() {
                parent = Some(*key);
            }
        }
        Ok(jobs)
    }

    async fn ask_jobs(&self, command: impl FnOnce(Reply) -> Option<Command>) -> Result<Vec<Result<bool>>> {
        let (sender, receiver) = oneshot::channel();
        // A caller that is gone does not want the answer.
        let reply: Reply = Box::new(move |results| drop(sender.send(results)));
        if let Some(command) = command(reply) {
            // A command that finds no reactor is dropped, and its reply: once the reads of its call have ended.
            drop(shield(self.inner.commands.send(command)).await);
        }
        shield(receiver).await.map_err(|_| Error::Closed)
    }
}
