//! Memory of callers, to be registered.

use std::{os::fd::OwnedFd, sync::Arc};

use super::{Guard, SharedMemory};
use crate::block::Segment;

/// A caller's memory, to be registered with `Cache::register`, or
/// with a client of the node's service, as the source and target of loads and stores.
///
/// # Safety
/// The unsafe constructors share one contract, which the caller keeps from the call of `register` until `unregister`
/// has resolved, or until the cache or the client is closed and every call on it has returned:
///
/// - The range stays mapped where it is, readable and writable.
/// - No other code touches a segment while a block is loaded into it, or writes to a segment while a block is
///   stored from it. A dropped future does not end its load: only its result or `unregister` does. Nor does an
///   error that says that the driver did not say whether copies had ended: the device may write to its memory for as
///   long as the process lives, and `unregister` does not resolve.
#[derive(Debug)]
pub struct Memory {
    /// Where it is.
    pub range: Segment,
    /// What it is, and how another process gets it.
    pub kind: MemoryKind,
    /// Whether the kernel keeps it pinned while it is registered.
    pub pinned: bool,
    /// What ends transfers of memory that may be taken away.
    pub guard: Option<Guard>,
}

/// What the memory is, and how another process gets it.
#[derive(Debug)]
pub enum MemoryKind {
    /// Host memory of this process.
    Host,
    /// Device memory.
    Device,
    /// A mapping of a memfd.
    Memfd {
        /// The memfd.
        fd: OwnedFd,
        /// Where in it the mapping begins.
        offset: u64,
    },
    /// Memory that is kept mapped for as long as it is registered.
    Shared(Arc<SharedMemory>),
}

impl Memory {
    /// Host memory. A client of the service cannot pass it to the service, and copies its blocks through a
    /// buffer of its own.
    ///
    /// # Safety
    /// As of [`Memory`].
    pub unsafe fn host(start: *mut u8, len: usize) -> Self {
        Memory::of(start, len, MemoryKind::Host)
    }

    /// Device memory, by device addresses; with a simulated device, host memory. A client of the service takes it for
    /// memory of a CUDA device.
    ///
    /// # Safety
    /// As of [`Memory`], for device addresses.
    pub unsafe fn device(start: *mut u8, len: usize) -> Self {
        Memory::of(start, len, MemoryKind::Device)
    }

    /// Host memory that a service can map: `len` bytes that the caller has mapped at `start` from `offset` of a memfd
    /// on (`MAP_SHARED`).
    ///
    /// # Safety
    /// As of [`Memory`]. In addition, `start` must be a mapping of the memfd from `offset` on: the service finds a
    /// segment by its offset in the memfd.
    pub unsafe fn memfd(fd: OwnedFd, offset: u64, start: *mut u8, len: usize) -> Self {
        Memory::of(start, len, MemoryKind::Memfd { fd, offset })
    }

    /// Memory that a service can map, which is kept mapped for as long as it is registered.
    ///
    /// # Safety
    /// As of [`Memory`]: [`SharedMemory::write`], other mappings of its memfd and blocks that are loaded into it may
    /// change what is being stored.
    pub unsafe fn shared(memory: Arc<SharedMemory>) -> Self {
        Memory::of(memory.as_ptr(), memory.len(), MemoryKind::Shared(memory))
    }

    /// Whether the kernel is asked to keep host memory pinned, as a buffer of the ring, for as long as it is
    /// registered; not by default.
    ///
    /// Direct transfers between it and disk (`Config::bypass_host`) then take a
    /// half to a quarter of the kernel's CPU time. Without a ring, or if the kernel refuses (`RLIMIT_MEMLOCK`), the
    /// region is registered unpinned, and the log says so.
    ///
    /// The memory is first moved into huge pages, if the system can do so (Linux 6.1 or later; memory that a device
    /// has pinned is not moved), because a drive then gets fewer and larger requests. Contents and addresses stay the
    /// same. Moving takes about 0.2 s per GiB, more if free memory is fragmented, and the cache continues meanwhile.
    /// Pinning takes about 30 ms per GiB, for this region and for all that are pinned already, and the cache moves no
    /// block meanwhile: register before there is traffic.
    #[must_use]
    pub fn pinned(mut self, pinned: bool) -> Self {
        self.pinned = pinned;
        self
    }

    /// Memory that may be taken away, as its guard knows: nothing is stored from it any more then.
    #[doc(hidden)]
    pub fn guarded(self, guard: Option<Guard>) -> Self {
        Memory { guard, ..self }
    }

    /// The range, what it is, and whether it is to be pinned.
    #[doc(hidden)]
    pub fn into_parts(self) -> (Segment, MemoryKind, bool) {
        (self.range, self.kind, self.pinned)
    }

    fn of(ptr: *mut u8, len: usize, kind: MemoryKind) -> Self {
        Memory { range: Segment { ptr, len }, kind, pinned: false, guard: None }
    }
}
