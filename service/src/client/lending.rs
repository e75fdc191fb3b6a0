//! Memory that a client lends to the service.

use std::{
    ops::Range,
    os::fd::{AsFd, BorrowedFd},
    ptr,
    sync::{Arc, Weak, atomic::Ordering},
};

use kvhoist::{
    BlockKey, Memory, Segment, SharedMemory,
    internals::service::{MemoryKind, Ranges, check_device_of},
};

use super::{
    bounce::Bounce,
    calls::{Client, Inner, unexpected},
    order::What,
    places::{Lent, LentForCalls, Passed, Places, Users},
};
use crate::{
    error::{Error, Result},
    protocol::{RegionKind, Reply, Request, Way},
};

/// Memory of a client's: registered, or [lent](Client::lend) for calls of its own. [`Client::unregister`] takes it
/// back.
///
/// Dropping it changes nothing for registered memory, and ends the use of lent memory. It keeps no client connected.
pub struct ClientRegion {
    client: Weak<Inner>,
    number: u32,
    /// Its first address, where it is registered.
    start: usize,
    pinned: bool,
    memory: Kept,
}

/// What is known here of a region.
enum Kept {
    /// The service has it mapped.
    Shared,
    /// It is in the table, and its blocks are copied.
    Copied(Users),
    Lent(LentForCalls),
}

debug_fields!(ClientRegion, region => number: region.number, pinned: region.pinned, shared: region.is_shared());

impl ClientRegion {
    /// Whether the service has it mapped. Blocks of memory that it has not go through a bounce buffer, one copy more.
    pub fn is_shared(&self) -> bool {
        matches!(self.memory, Kept::Shared)
    }

    /// Whether the service's kernel keeps it pinned, which saves work for each transfer.
    pub fn is_pinned(&self) -> bool {
        self.pinned
    }

    /// [`Client::load_into`], with segments in this memory or in registered regions. Only a poll of the call touches
    /// lent memory: a call that was dropped, or has timed out, leaves it alone.
    ///
    /// # Errors
    /// As [`Client::load_into`]; [`Error::Argument`] for lent memory that was [unregistered](Client::unregister).
    ///
    /// # Cancel safety
    /// As [`Client::load_into`]; lent memory is not touched any more.
    pub async fn load_into(&self, keys: &[BlockKey], segments: &[Vec<Segment>]) -> Result<Vec<Result<bool>>> {
        self.client()?.moved(Way::Load, keys, segments, self.lent()).await
    }

    /// [`Client::store_from`], as [`load_into`](Self::load_into) is [`Client::load_into`].
    ///
    /// # Errors
    /// As of [`load_into`](Self::load_into).
    ///
    /// # Cancel safety
    /// As of [`load_into`](Self::load_into).
    pub async fn store_from(
        &self,
        keys: &[BlockKey],
        parent: Option<&BlockKey>,
        segments: &[Vec<Segment>],
    ) -> Result<Vec<Result<bool>>> {
        self.client()?.moved(Way::Store(parent.copied()), keys, segments, self.lent()).await
    }

    fn client(&self) -> Result<Client> {
        self.client.upgrade().map(|inner| Client { inner }).ok_or(Error::Closed)
    }

    fn lent(&self) -> Option<&LentForCalls> {
        match &self.memory {
            Kept::Lent(lent) => Some(lent),
            Kept::Shared | Kept::Copied(_) => None,
        }
    }
}

impl Client {
    /// Registers memory, to be the source and target of [`load_into`](Client::load_into) and
    /// [`store_from`](Client::store_from), until it is unregistered.
    ///
    /// The service maps [`SharedMemory`] and the memory of a [memfd](Memory::memfd). Blocks of other
    /// [host](Memory::host) memory go through a bounce buffer of [`bounce_bytes`](super::ClientOptions::bounce_bytes),
    /// with one copy more, made in the polls of the calls; it is not pinned.
    ///
    /// # Errors
    /// [`Error::Service`]: [`ServiceFault::Memory`] if the service cannot map it, [`ServiceFault::Busy`] beyond its
    /// limits, [`ServiceFault::Away`]. [`Error::Argument`] for no memory, for memory that is registered already, and
    /// for device memory. [`Error::Closed`].
    ///
    /// [`ServiceFault::Memory`]: kvhoist::ServiceFault::Memory
    /// [`ServiceFault::Busy`]: kvhoist::ServiceFault::Busy
    /// [`ServiceFault::Away`]: kvhoist::ServiceFault::Away
    ///
    /// # Cancel safety
    /// The service gives the memory back by itself.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_client(async |client| {
    /// use std::sync::Arc;
    /// use kvhoist::{Memory, SharedMemory};
    ///
    /// let pool = Arc::new(SharedMemory::new(64 << 10)?);
    /// // SAFETY: nobody touches a block of the pool while it is on its way.
    /// let lent = unsafe { Memory::shared(pool.clone()) };
    /// let region = client.register(lent).await?;
    /// assert!(region.is_shared());
    /// # Ok(()) });
    /// ```
    pub async fn register(&self, memory: impl Into<Memory>) -> Result<ClientRegion> {
        let (range, kind, pinned) = memory.into().into_parts();
        let at = range.addresses("region")?;
        match kind {
            MemoryKind::Shared(memory) => {
                let passed = memfd(memory.as_fd(), 0, pinned, RegionKind::Host)?;
                self.register_passed(at, passed, Some(Arc::clone(&memory))).await
            }
            MemoryKind::Memfd { fd, offset } => {
                self.register_passed(at, memfd(fd.as_fd(), offset, pinned, RegionKind::Host)?, None).await
            }
            MemoryKind::Host => self.register_copied(at),
            MemoryKind::Device => Err(Error::argument(
                "memory",
                "device memory",
                "host memory; device memory is registered by `register_device`",
            )),
        }
    }

    /// Registers memory of the space's device ([`ClientOptions::device`](super::ClientOptions::device)), to be the
    /// source and target of blocks as memory of [`register`](Client::register) is. Blocks reach it through the
    /// service's host memory, where other clients of the space find them.
    ///
    /// The memory of a CUDA device is named by its [address](Memory::device): memory of `cudaMalloc`, of one
    /// allocation. The simulated device's memory is [`SharedMemory`] or that of a [memfd](Memory::memfd).
    ///
    /// # Errors
    /// As [`register`](Client::register); [`Error::Argument`] for memory that is not the device's, that no other
    /// process can map, and where the client has connected without a device.
    ///
    /// # Cancel safety
    /// As [`register`](Client::register).
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_device_client(async |client| {
    /// use std::sync::Arc;
    /// use kvhoist::{Memory, SharedMemory};
    ///
    /// let pool = Arc::new(SharedMemory::new(64 << 10)?);
    /// // SAFETY: nobody touches a block of the pool while it is on its way.
    /// let region = client.register_device(unsafe { Memory::shared(pool.clone()) }).await?;
    /// client.unregister(&region).await?;
    /// # Ok(()) });
    /// ```
    pub async fn register_device(&self, memory: impl Into<Memory>) -> Result<ClientRegion> {
        let (range, kind, _) = memory.into().into_parts();
        let at = range.addresses("region")?;
        match kind {
            _ if self.inner.device.is_none() => {
                let expected = "a client that was connected with the option `device`";
                Err(Error::argument("device", "a client without a device", expected))
            }
            MemoryKind::Device if let Some(gpu) = &*self.inner.gpu => {
                check_device_of(std::ptr::without_provenance(at.start), Some(gpu))?;
                let (handle, offset) = gpu.export_memory(at.start, at.len())?;
                self.register_passed(at, Passed::Device { handle, offset }, None).await
            }
            _ if self.inner.gpu.is_some() => {
                Err(Error::argument("memory", "host memory", "an address of the CUDA device"))
            }
            MemoryKind::Shared(memory) => {
                let passed = memfd(memory.as_fd(), 0, false, RegionKind::Simulated)?;
                self.register_passed(at, passed, Some(Arc::clone(&memory))).await
            }
            MemoryKind::Memfd { fd, offset } => {
                self.register_passed(at, memfd(fd.as_fd(), offset, false, RegionKind::Simulated)?, None).await
            }
            MemoryKind::Host | MemoryKind::Device => {
                Err(Error::argument("memory", "memory that is no memfd", "a memfd, for a simulated device"))
            }
        }
    }

    /// Lends memory that is not registered, for calls of the region that this returns: their blocks go through a bounce
    /// buffer of [`bounce_bytes`](super::ClientOptions::bounce_bytes), one copy more. Empty ranges are left out.
    ///
    /// # Errors
    /// [`Error::Argument`] for a range at address 0, or past the end of memory.
    ///
    /// # Safety
    /// The ranges stay mapped, readable, and writable where blocks are loaded into them, until the region is
    /// dropped, or [`unregister`](Client::unregister) has resolved.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_client(async |client| {
    /// let keys = kvhoist::PrefixChain::new("model").extend_tokens(&[1, 2, 3, 4], 2)?;
    /// use kvhoist::Segment;
    ///
    /// let mut block = vec![7; 4096];
    /// let place = Segment { ptr: block.as_mut_ptr(), len: 4096 };
    /// // SAFETY: the block outlives the region, and nobody writes to it before the call has ended.
    /// let region = unsafe { client.lend(&[place]) }?;
    /// let stored = region.store_from(&keys[..1], None, &[vec![place]]).await?;
    /// assert!(matches!(stored[..], [Ok(true)]));
    /// # Ok(()) });
    /// ```
    pub unsafe fn lend(&self, memory: &[Segment]) -> Result<ClientRegion> {
        let ranges = memory.iter().filter(|segment| segment.len > 0).map(|segment| segment.addresses("memory"));
        let ranges = ranges.collect::<Result<Ranges<()>>>()?;
        let number = self.inner.next_region.fetch_add(1, Ordering::Relaxed);
        Ok(self.region(number, 0, false, Kept::Lent(LentForCalls { number, ranges, users: Users::default() })))
    }

    /// Registers memory that cannot be passed to the service.
    fn register_copied(&self, at: Range<usize>) -> Result<ClientRegion> {
        self.check_free(&at)?;
        let number = self.inner.next_region.fetch_add(1, Ordering::Relaxed);
        let users = self.inner.places.add_copied(number, at.clone());
        Ok(self.region(number, at.start, false, Kept::Copied(users)))
    }

    fn region(&self, number: u32, start: usize, pinned: bool, memory: Kept) -> ClientRegion {
        ClientRegion { client: Arc::downgrade(&self.inner), number, start, pinned, memory }
    }

    fn check_free(&self, at: &Range<usize>) -> Result<()> {
        if self.inner.places.is_free(at) {
            return Ok(());
        }
        let found = format!("{} bytes at {:#x}, part of which is registered", at.len(), at.start);
        Err(Error::argument("region", found, "each range registered once"))
    }

    /// The bounce buffer, which the first call that needs it makes and lends to the service.
    pub(super) async fn bounce(&self) -> Result<&Bounce> {
        let make = || async {
            let bounce = Bounce::new(self.inner.bounce_bytes, self.inner.block_bytes)?;
            // Never unregistered: it is lent for as long as the client lives.
            // SAFETY: a slot of the buffer belongs to one call, until the service has answered it.
            let lent = unsafe { Memory::shared(Arc::clone(bounce.memory())) };
            self.register(lent.pinned(true)).await?;
            Ok(bounce)
        };
        self.inner.bounce.get_or_try_init(make).await
    }

    pub(super) fn places(&self) -> &Places {
        &self.inner.places
    }

    async fn register_passed(
        &self,
        at: Range<usize>,
        passed: Passed,
        memory: Option<Arc<SharedMemory>>,
    ) -> Result<ClientRegion> {
        self.check_free(&at)?;
        let number = self.inner.next_region.fetch_add(1, Ordering::Relaxed);
        let lent = Lent { number, start: at.start, len: at.len(), passed };
        match self.call(lent.request(), What::Register(lent.clone()), None).await? {
            Reply::Registered { pinned } => {
                self.inner.places.add(&lent, memory);
                Ok(self.region(number, at.start, pinned, Kept::Shared))
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Takes memory back: resolves when the service does not use it any longer and has unmapped it. Resolves at once if
    /// it was taken back already, or if the service is away.
    ///
    /// # Errors
    /// [`Error::Argument`] for a region of another client. [`Error::Closed`] in a forked child, and once the
    /// client is closed, for memory that the service had. [`Error::Service`] with
    /// [`ServiceFault::Abandoned`](kvhoist::ServiceFault::Abandoned) if the service still has the memory some
    /// time after the deadline ([`give_up`](super::ClientOptions::give_up)): call again to wait for it. After a
    /// [close](Client::close) that failed so it has the memory for as long as it lives.
    ///
    /// # Cancel safety
    /// The region is forgotten at the first poll. The service may still use it when the future is dropped: call again
    /// to wait.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_client(async |client| {
    /// use std::sync::Arc;
    /// use kvhoist::{Memory, SharedMemory};
    ///
    /// let pool = Arc::new(SharedMemory::new(64 << 10)?);
    /// // SAFETY: nobody touches a block of the pool while it is on its way.
    /// let lent = unsafe { Memory::shared(pool.clone()) };
    /// let region = client.register(lent).await?;
    /// client.unregister(&region).await?;
    /// drop(pool);
    /// # Ok(()) });
    /// ```
    pub async fn unregister(&self, region: &ClientRegion) -> Result<()> {
        if !ptr::eq(region.client.as_ptr(), Arc::as_ptr(&self.inner)) {
            return Err(Error::argument("region", "a region of another client", "one that this client has registered"));
        }
        self.inner.places.remove(region.number, region.start);
        match &region.memory {
            Kept::Copied(users) | Kept::Lent(LentForCalls { users, .. }) => {
                *users.write().await = true;
                return Ok(());
            }
            Kept::Shared => {}
        }
        let request = Request::Unregister { region: region.number };
        self.call(request, What::Unregister(region.number), None).await.map(drop)
    }
}

/// Memory of a memfd, as it is passed.
fn memfd(fd: BorrowedFd<'_>, offset: u64, pin: bool, kind: RegionKind) -> Result<Passed> {
    let fd = fd.try_clone_to_owned().map_err(|error| Error::io("duplicate", "a memfd", error))?;
    Ok(Passed::Memfd { fd: Arc::new(fd), offset, pin, kind })
}
