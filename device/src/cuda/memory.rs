//! Device memory, and pinned host memory.

use std::{any::Any, ptr::NonNull, sync::Arc};

use cudarc::driver::sys;

use kvhoist_base::{
    block::Direction,
    error::{Error, Result},
    memory::{DeviceMemory, Mapping},
    panics::log,
};

use super::{
    context::Gpu,
    driver::{CudaError, check},
};

/// One allocation of device memory (`cuMemAlloc`), freed when dropped.
pub struct DeviceBuffer {
    gpu: Arc<Gpu>,
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: an address that the host never dereferences, and a handle that may be used from any thread.
unsafe impl Send for DeviceBuffer {}
// SAFETY: nothing is changed through `&self`.
unsafe impl Sync for DeviceBuffer {}

impl DeviceBuffer {
    /// Allocates `bytes` bytes (more than 0) of undefined content.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with the driver's error and the free memory.
    pub fn new(gpu: Arc<Gpu>, bytes: usize) -> Result<Self> {
        let mut address = 0;
        let allocated = gpu.enter().and_then(|_entered| {
            // SAFETY: the context is current; the call writes one address.
            check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&mut address, bytes) })
        });
        allocated.map_err(|fault| {
            let free = gpu.memory_bytes().map_or_else(|_| "?".into(), |(free, _)| free.to_string());
            let reason = format!("{bytes} bytes of device memory were refused, {free} are free: {fault}");
            Error::unavailable("device", reason)
        })?;
        let base = NonNull::new(std::ptr::with_exposed_provenance_mut(address as usize));
        let base = base.ok_or_else(|| Error::unavailable("device", "cuMemAlloc gave address 0"))?;
        Ok(DeviceBuffer { gpu, base, bytes })
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        let freed = self.gpu.enter().and_then(|_entered| {
            // SAFETY: allocated in `new`, freed once. The driver waits for work that still uses it.
            check("cuMemFree", unsafe { sys::cuMemFree_v2(self.base.as_ptr().expose_provenance() as u64) })
        });
        if let Err(fault) = freed {
            log(|| tracing::warn!(%fault, bytes = self.bytes, "device memory was not freed"));
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

debug_fields!(DeviceBuffer, buffer => bytes: buffer.bytes);

/// A range of host memory that is pinned for the device until dropped: copies bypass the driver's own buffers, and
/// kernels can read and write it.
///
/// The same memory may be registered with a ring: each registration pins the pages independently.
pub struct HostPin {
    gpu: Arc<Gpu>,
    start: NonNull<u8>,
    bytes: usize,
    /// Keeps the memory mapped.
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: an address that is not dereferenced here, and a handle that may be used from any thread.
unsafe impl Send for HostPin {}
// SAFETY: nothing is changed through `&self`.
unsafe impl Sync for HostPin {}

impl HostPin {
    /// Pins a range.
    ///
    /// # Safety
    /// The range must be mapped, readable and writable for as long as `owner` lives.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with the driver's error, such as the limit of pinned memory, or that the range is pinned
    /// already.
    pub unsafe fn new(
        gpu: Arc<Gpu>,
        start: NonNull<u8>,
        bytes: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        // SAFETY: the caller vouches for the range.
        unsafe { Self::register(gpu, start, bytes, owner) }.map_err(|fault| {
            Error::unavailable(
                "device",
                format!("{bytes} bytes of host memory could not be pinned for the device: {fault}"),
            )
        })
    }

    /// Allocates `bytes` bytes of zeroed, page-aligned memory and pins it. A mapping, because a fork must not make what
    /// the device reads and writes copy-on-write.
    pub(crate) fn zeroed(gpu: &Arc<Gpu>, bytes: usize) -> std::result::Result<Self, CudaError> {
        let Ok(memory) = Mapping::anonymous(bytes) else { return Err(CudaError::out_of_memory("mmap")) };
        // SAFETY: the mapping stays in place when its owner is moved, and lives as long as that.
        unsafe { Self::register(Arc::clone(gpu), memory.ptr(), bytes, Arc::new(memory)) }
    }

    /// # Safety
    /// As [`new`](Self::new).
    unsafe fn register(
        gpu: Arc<Gpu>,
        start: NonNull<u8>,
        bytes: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> std::result::Result<Self, CudaError> {
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        gpu.enter().and_then(|_entered| {
            // SAFETY: the caller vouches for the range; it is unregistered on drop, before the owner is dropped.
            check("cuMemHostRegister", unsafe { sys::cuMemHostRegister_v2(start.as_ptr().cast(), bytes, flags) })
        })?;
        Ok(HostPin { gpu, start, bytes, _owner: owner })
    }

    /// First address.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Length in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for HostPin {
    fn drop(&mut self) {
        // SAFETY: registered in `register`, unregistered once. The driver waits for copies that use it.
        self.gpu.give_back("cuMemHostUnregister", || unsafe { sys::cuMemHostUnregister(self.start.as_ptr().cast()) });
    }
}

debug_fields!(HostPin, pin => bytes: pin.bytes);
