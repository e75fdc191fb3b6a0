//! Device memory, and host memory that the device knows.

use std::{any::Any, fmt, ptr::NonNull, sync::Arc};

use cudarc::driver::sys;

use super::{
    context::Gpu,
    driver::{Fault, check},
};
use crate::{
    block::Direction,
    error::{Error, Result},
    memory::DeviceMemory,
};

/// One plain allocation of device memory (`cuMemAlloc`), given back when dropped.
pub struct DeviceBuffer {
    gpu: Arc<Gpu>,
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: an address that the host never dereferences, and a handle that may be used from any thread.
unsafe impl Send for DeviceBuffer {}
// SAFETY: as above; nothing is changed through `&self`.
unsafe impl Sync for DeviceBuffer {}

impl DeviceBuffer {
    /// `bytes` bytes, more than 0. What is in them is undefined.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with what the driver said, and what was free.
    pub fn new(gpu: Arc<Gpu>, bytes: usize) -> Result<Self> {
        let mut address = 0;
        let allocated = gpu.bind().and_then(|()| {
            // SAFETY: the context is current; one address is written.
            check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&mut address, bytes) })
        });
        allocated.map_err(|fault| {
            let free = gpu.memory_bytes().map_or_else(|_| "?".into(), |(free, _)| free.to_string());
            let reason = format!("{bytes} bytes of device memory were refused, {free} are free: {fault}");
            Error::Unavailable { tier: "device", reason }
        })?;
        let base = NonNull::new(std::ptr::with_exposed_provenance_mut(address as usize));
        let base =
            base.ok_or_else(|| Error::Unavailable { tier: "device", reason: "cuMemAlloc gave address 0".into() })?;
        Ok(DeviceBuffer { gpu, base, bytes })
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        let freed = self.gpu.bind().and_then(|()| {
            // SAFETY: allocated in `new`, freed once. The driver waits for what still uses it.
            check("cuMemFree", unsafe { sys::cuMemFree_v2(self.base.as_ptr().expose_provenance() as u64) })
        });
        if let Err(fault) = freed {
            tracing::warn!(%fault, bytes = self.bytes, "device memory was not given back");
        }
    }
}

// SAFETY: one allocation, fixed until dropped, that copies between host and device may read and write.
unsafe impl DeviceMemory for DeviceBuffer {
    fn kind(&self) -> &'static str {
        "cuda"
    }

    fn base(&self) -> NonNull<u8> {
        self.base
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn promote_direction(&self) -> Direction {
        Direction::HostToDevice
    }

    fn demote_direction(&self) -> Direction {
        Direction::DeviceToHost
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

/// A range of host memory that is pinned and known to the device, until dropped: copies take it without a detour
/// through the driver's own buffers, and kernels can read and write it.
///
/// The same memory may be registered with a ring: both pin its pages, each for itself.
pub struct HostPin {
    gpu: Arc<Gpu>,
    start: NonNull<u8>,
    bytes: usize,
    /// Pinned by us, and so to be unpinned by us.
    ours: bool,
    /// Keeps it mapped.
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: an address that is not dereferenced here, and a handle that may be used from any thread.
unsafe impl Send for HostPin {}
// SAFETY: as above; nothing is changed through `&self`.
unsafe impl Sync for HostPin {}

impl HostPin {
    /// Pins a range. One that somebody else in the process has pinned is as good; whoever did must not take that back
    /// while it is in use.
    ///
    /// # Safety
    /// The range must be mapped, readable and writable for as long as `owner` lives.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with what the driver said: not enough memory that may be pinned, say.
    pub unsafe fn new(
        gpu: Arc<Gpu>,
        start: NonNull<u8>,
        bytes: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        // SAFETY: the caller's promise.
        unsafe { Self::register(gpu, start, bytes, owner) }.map_err(|fault| Error::Unavailable {
            tier: "device",
            reason: format!("{bytes} bytes of host memory could not be pinned for it: {fault}"),
        })
    }

    /// # Safety
    /// As [`new`](Self::new).
    pub(crate) unsafe fn register(
        gpu: Arc<Gpu>,
        start: NonNull<u8>,
        bytes: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> std::result::Result<Self, Fault> {
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        let registered = gpu.bind().and_then(|()| {
            // SAFETY: the caller's promise; unregistered when dropped, before the owner goes.
            check("cuMemHostRegister", unsafe { sys::cuMemHostRegister_v2(start.as_ptr().cast(), bytes, flags) })
        });
        let ours = registered.is_ok();
        registered.or_else(Fault::unless_pinned)?;
        Ok(HostPin { gpu, start, bytes, ours, _owner: owner })
    }

    /// Its first address.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Its length.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for HostPin {
    fn drop(&mut self) {
        if !self.ours {
            return;
        }
        let unpinned = self.gpu.bind().and_then(|()| {
            // SAFETY: registered in `new`, unregistered once. The driver waits for copies that use it.
            check("cuMemHostUnregister", unsafe { sys::cuMemHostUnregister(self.start.as_ptr().cast()) })
        });
        if let Err(fault) = unpinned {
            tracing::debug!(%fault, "host memory was not unpinned");
        }
    }
}

impl fmt::Debug for HostPin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostPin").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}
