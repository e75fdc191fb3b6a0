//! What RDMA devices need of the driver: dma-bufs of device memory, and writes of theirs made visible.

use std::os::fd::{FromRawFd, OwnedFd};

use cudarc::driver::sys::{
    self, CUdevice_attribute as Attribute, CUflushGPUDirectRDMAWritesScope, CUflushGPUDirectRDMAWritesTarget,
    CUmemRangeHandleType,
};

use super::{
    context::Gpu,
    discover::attribute,
    driver::{check, has},
};

/// Granularity of what is exported: the largest page of a host that runs CUDA.
const PAGE: usize = 64 << 10;

/// `CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER`: kernels and copies of the device see what was written before they began.
const ORDERED: i32 = 100;

/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST`.
const BY_HOST: i32 = 1;

/// Whether writes of an RDMA device must be flushed before the device reads them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteFlush {
    /// The device sees them in order.
    NotNeeded,
    /// By a call of the driver.
    ByDriver,
    /// They must be, and the driver cannot.
    Unavailable,
}

impl Gpu {
    /// A dma-buf of device memory, and where in it the range begins. It stays valid when the memory is freed.
    ///
    /// # Errors
    /// What the driver said.
    pub fn export_dma_buf(&self, start: usize, bytes: usize) -> Result<(OwnedFd, u64), String> {
        if !self.device().dma_buf {
            return Err("the device exports no dma-buf; install the open kernel modules of a newer driver".into());
        }
        if !has("cuMemGetHandleForAddressRange") {
            return Err("libcuda.so has no cuMemGetHandleForAddressRange; install a newer NVIDIA driver".into());
        }
        self.bind().map_err(|fault| fault.to_string())?;
        let from = start / PAGE * PAGE;
        let whole = (start + bytes).next_multiple_of(PAGE) - from;
        let mut fd: i32 = -1;
        // SAFETY: the function exists, the context is current; one descriptor is written, which is ours then.
        check("cuMemGetHandleForAddressRange", unsafe {
            sys::cuMemGetHandleForAddressRange(
                (&raw mut fd).cast(),
                from as u64,
                whole,
                CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD,
                0,
            )
        })
        .map_err(|fault| fault.to_string())?;
        if fd < 0 {
            return Err("cuMemGetHandleForAddressRange gave no descriptor".into());
        }
        // SAFETY: the driver has made it for us.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok((fd, (start - from) as u64))
    }

    /// Whether what an RDMA device writes must be flushed.
    pub fn write_flush(&self) -> WriteFlush {
        let value = |which| attribute(self.handle(), which).unwrap_or(0);
        let ordering = value(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING);
        let options = value(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS);
        match (ordering >= ORDERED, options & BY_HOST != 0 && has("cuFlushGPUDirectRDMAWrites")) {
            (true, _) => WriteFlush::NotNeeded,
            (false, true) => WriteFlush::ByDriver,
            (false, false) => WriteFlush::Unavailable,
        }
    }

    /// Makes what RDMA devices have written visible to the device. Only where [`write_flush`](Self::write_flush) says
    /// [`WriteFlush::ByDriver`].
    ///
    /// # Errors
    /// What the driver said.
    pub(crate) fn flush_writes(&self) -> Result<(), String> {
        let flushed = self.bind().and_then(|()| {
            // SAFETY: the function exists, or the caller would not ask; the context is current.
            check("cuFlushGPUDirectRDMAWrites", unsafe {
                sys::cuFlushGPUDirectRDMAWrites(
                    CUflushGPUDirectRDMAWritesTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
                    CUflushGPUDirectRDMAWritesScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER,
                )
            })
        });
        flushed.map_err(|fault| fault.to_string())
    }
}
