//! Callers' memory: registered for every call, or lent for calls of its own, and given back.

use std::sync::{
    Arc, Weak,
    atomic::{AtomicBool, Ordering},
};

use tokio::sync::oneshot;

use super::{Cache, CompletionQueue, MemoryOwner, OpenCache, ranges::Ranges};
use crate::{
    block::{BlockKey, Segment},
    device::{GdrState, check_device_of, cuda::Gpu},
    error::{Error, Result},
    fork::HomeBound,
    memory::{Memory, MemoryKind, huge},
    mover::{CallerMemory, Command, RegionMemory, Urgent},
    shield::{log, shield},
};

/// Memory of a caller's: one range that is [registered](Cache::register), or any that are [lent](Cache::lend). Give it
/// back with [`Cache::unregister`]: until that has resolved it must stay mapped.
///
/// Calls of the cache find registered memory by its addresses. Lent memory is used by the calls of this value alone.
///
/// Dropping it changes nothing: movements under way go on, and a registered range stays registered for the life of the
/// cache. It keeps no cache open.
pub struct Region {
    cache: Weak<HomeBound<OpenCache>>,
    /// What movements hold that use the memory.
    pub(super) inner: Arc<CallerMemory>,
    /// The memory, where it is lent.
    pub(super) lent: Ranges<()>,
    /// Whether the kernel has the regions that it was asked to pin.
    registered: Arc<AtomicBool>,
}

debug_fields!(Region, region => len: region.inner.len, memory: region.inner.memory, lent: region.lent.len());

impl Region {
    /// Whether the kernel keeps the memory pinned ([`Memory::pinned`](crate::Memory::pinned)). Every change pins all
    /// regions anew: if the kernel refuses one, no region is pinned until the next change.
    pub fn is_pinned(&self) -> bool {
        self.inner.is_fixed() && self.registered.load(Ordering::Acquire)
    }

    /// Whether no movement uses the memory at this moment.
    pub fn is_unused(&self) -> bool {
        self.inner.is_unused()
    }

    /// [`Cache::load_into`], with segments in this memory or in registered regions.
    ///
    /// # Errors
    /// As [`Cache::load_into`]; [`Error::Argument`] for lent memory that was [unregistered](Cache::unregister).
    ///
    /// # Cancel safety
    /// The loads go on: the memory stays in use until [`unregister`](Cache::unregister) resolves.
    pub async fn load_into(&self, keys: &[BlockKey], segments: &[Vec<Segment>]) -> Result<Vec<Result<bool>>> {
        let cache = self.cache()?;
        cache.load_jobs(cache.jobs(keys, None, segments, Some(self))?).await
    }

    /// [`Cache::store_from`], with segments in this memory or in registered regions.
    ///
    /// # Errors
    /// As [`Cache::store_from`]; [`Error::Argument`] for lent memory that was [unregistered](Cache::unregister).
    ///
    /// # Cancel safety
    /// The stores go on: the memory stays in use until [`unregister`](Cache::unregister) resolves.
    pub async fn store_from(
        &self,
        keys: &[BlockKey],
        parent: Option<&BlockKey>,
        segments: &[Vec<Segment>],
    ) -> Result<Vec<Result<bool>>> {
        let cache = self.cache()?;
        cache.store_jobs(cache.jobs(keys, Some(parent), segments, Some(self))?).await
    }

    /// [`CompletionQueue::submit_load`], with segments in this memory or in registered regions.
    ///
    /// # Errors
    /// As [`CompletionQueue::submit_load`]; [`Error::Argument`] for a queue of another cache.
    pub fn submit_load(&self, queue: &CompletionQueue, keys: &[BlockKey], segments: &[Vec<Segment>]) -> Result<u64> {
        queue.submit_load_of(keys, segments, Some(self))
    }

    /// [`CompletionQueue::submit_store`], with segments in this memory or in registered regions.
    ///
    /// # Errors
    /// As [`CompletionQueue::submit_store`]; [`Error::Argument`] for a queue of another cache.
    pub fn submit_store(
        &self,
        queue: &CompletionQueue,
        keys: &[BlockKey],
        parent: Option<&BlockKey>,
        segments: &[Vec<Segment>],
    ) -> Result<u64> {
        queue.submit_store_of(keys, parent, segments, Some(self))
    }

    fn cache(&self) -> Result<Cache> {
        self.cache.upgrade().map(|inner| Cache { inner }).ok_or(Error::Closed)
    }
}

/// Forgets a region whose registration is dropped before its caller has it.
struct Pending<'a> {
    cache: &'a Cache,
    region: &'a Region,
    registered: bool,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        // A forked child has nothing of its parent's to give back.
        if !self.registered && self.cache.shared().home.is_here() {
            self.cache.inner.regions.remove(&self.region.inner);
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
    /// [`Error::Argument`] for an empty range, one that overlaps another region, and memory of another GPU than the
    /// cache's. [`Error::Busy`] past 4,096 regions. [`Error::Unavailable`] for device memory without a device tier. If
    /// it is to be pinned: [`Error::Timeout`] past [`Config::deadline_ms`](crate::Config::deadline_ms) without room
    /// among the commands, [`Error::Closed`].
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
        if matches!(memory.kind, MemoryKind::Device) {
            self.need_device()?;
            check_device_of(memory.range.ptr, self.inner.facts.gpu.as_deref())?;
        }
        let name = format!("a region of {} bytes at {:p}", memory.range.len, memory.range.ptr);
        self.add_region_of(memory, self.memory_owner(name))
    }

    /// As [`add_region`](Self::add_region), for an owner that may have several.
    #[doc(hidden)]
    pub fn add_region_of(&self, memory: Memory, whose: MemoryOwner) -> Result<Region> {
        if matches!(memory.kind, MemoryKind::Device) {
            self.need_device()?;
        }
        Ok(self.region_of(self.inner.regions.add(memory, whose)?, Ranges::default()))
    }

    fn region_of(&self, inner: Arc<CallerMemory>, lent: Ranges<()>) -> Region {
        let registered = Arc::clone(&self.shared().registered);
        Region { cache: Arc::downgrade(&self.inner), inner, lent, registered }
    }

    /// Refuses a region of another cache.
    pub(super) fn check_region(&self, region: &Region) -> Result<()> {
        if std::ptr::eq(region.cache.as_ptr(), Arc::as_ptr(&self.inner)) {
            return Ok(());
        }
        Err(Error::argument("region", "a region of another cache", "a region of this cache"))
    }

    /// Lends host memory for calls of the region that it returns: any number of ranges, which may overlap each other,
    /// registered regions and other lent memory, so that two callers can store from one buffer at a time. Unlike
    /// [`register`](Cache::register) it takes no place in a table. Empty ranges are left out.
    ///
    /// # Errors
    /// [`Error::Argument`] for a range at address 0, or past the end of memory.
    ///
    /// # Safety
    /// Until [`unregister`](Cache::unregister) has resolved, or the cache is closed and every call on it has returned,
    /// every range must stay mapped and readable; writable where blocks are loaded into it. While a segment is loaded
    /// nobody else may touch it; while it is stored from, nobody may write to it. That a future was dropped does not
    /// end its load.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_cache(async |cache| {
    /// use kvhoist::Segment;
    ///
    /// # let key = kvhoist::BlockKey::new([1; 32]);
    /// let mut block = vec![7; 4096];
    /// let place = Segment { ptr: block.as_mut_ptr(), len: 4096 };
    /// // SAFETY: the block lives until it is unregistered, and nobody writes to it before.
    /// let region = unsafe { cache.lend(&[place]) }?;
    /// let stored = region.store_from(&[key], None, &[vec![place]]).await?;
    /// cache.unregister(&region).await?;
    /// assert!(matches!(stored[..], [Ok(true)]));
    /// # Ok(()) });
    /// ```
    pub unsafe fn lend(&self, memory: &[Segment]) -> Result<Region> {
        let ranges = memory.iter().filter(|segment| segment.len > 0).map(|segment| segment.addresses("memory"));
        let lent = ranges.collect::<Result<Ranges<()>>>()?;
        Ok(self.region_of(CallerMemory::lent(Arc::clone(&self.shared().lenders.of_lent)), lent))
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
        self.check_region(region)?;
        let held = self.inner.regions.hold_one(&region.inner)?;
        let CallerMemory { start, len, memory, .. } = *region.inner;
        if memory == RegionMemory::Host
            && let Err(error) = shield(huge::collapse(start, len)).await
        {
            log(|| tracing::debug!(%error, start, len, "not all of a region could be moved into huge pages"));
        }
        let (reply, receiver) = oneshot::channel();
        self.send((Command::Register { region: held, reply }, self.room().await?));
        shield(receiver).await.map_err(|_| Error::Closed)
    }

    /// Copies to and from registered memory of this GPU, too, from now on. The reactor opens it, which takes some 300
    /// ms the first time.
    ///
    /// # Errors
    /// [`Error::Unavailable`] for a cache without a CUDA device, and with the driver's error. [`Error::Closed`].
    ///
    /// # Cancel safety
    /// It is opened all the same.
    #[doc(hidden)]
    pub async fn add_gpu(&self, gpu: Arc<Gpu>) -> Result<()> {
        let (reply, receiver) = oneshot::channel();
        self.send((Command::AddGpu { gpu, reply }, self.room().await?));
        shield(receiver).await.map_err(|_| Error::Closed)?
    }

    /// Takes memory back: no call that is polled for the first time from now on uses it. Resolves when no movement uses
    /// it any longer and nothing keeps it pinned. However many callers unregister one region, each of them waits for
    /// that; on a region that is forgotten already it resolves at once.
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
        self.check_region(region)?;
        self.inner.regions.remove(&region.inner);
        region.inner.end();
        shield(region.inner.wait_unused()).await;
        // The request holds the region until it is done, or lost with the reactor. Of two callers whose requests go out
        // at once each waits for both.
        let may_have_gdr = region.inner.lasting.is_some() && !matches!(self.inner.facts.gdr.get(), GdrState::Off(_));
        let is_known = may_have_gdr || region.inner.is_fixed();
        let refused = is_known && self.send_urgent(Urgent::GiveBack { region: region.inner.hold() }).is_err();
        shield(region.inner.wait_unused()).await;
        if refused || region.inner.is_fixed() {
            // A cache that has ended has let go of all regions.
            drop(self.ended().await);
        }
        Ok(())
    }
}
