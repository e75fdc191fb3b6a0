//! Driver functions for RDMA devices: dma-buf export of device memory, and flushing of RDMA writes.

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

/// Granularity of exported ranges: the largest page size of a host that runs CUDA.
const PAGE: usize = 64 << 10;

/// `CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER`: kernels and copies of the device see writes made before they began.
const ORDERED: i32 = 100;

/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST`.
const BY_HOST: i32 = 1;

/// Whether writes of an RDMA device must be flushed before the device reads them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteFlush {
    /// The device sees them in order.
    NotNeeded,
    /// The driver can flush them.
    ByDriver,
    /// A flush is needed, and the driver has none.
    Unavailable,
}

impl Gpu {
    /// Exports device memory as a dma-buf; returns it with the offset of the range in it. The dma-buf stays valid after
    /// the memory is freed.
    ///
    /// # Errors
    /// The driver's error.
    pub fn export_dma_buf(&self, start: usize, bytes: usize) -> Result<(OwnedFd, u64), String> {
        if !self.device().dma_buf {
            return Err("the device exports no dma-buf; install the open kernel modules of a newer driver".into());
        }
        if !has("cuMemGetHandleForAddressRange") {
            return Err("libcuda.so has no cuMemGetHandleForAddressRange; install a newer NVIDIA driver".into());
        }
        let _entered = self.enter().map_err(|fault| fault.to_string())?;
        let from = start / PAGE * PAGE;
        let whole = (start + bytes).next_multiple_of(PAGE) - from;
        let mut fd: i32 = -1;
        // SAFETY: the function exists, the context is current; the call writes one descriptor, which becomes ours.
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
        // SAFETY: the driver made the descriptor for this call.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok((fd, (start - from) as u64))
    }

    /// Whether writes of an RDMA device must be flushed.
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

    /// Makes writes of RDMA devices visible to the device. Call only if [`write_flush`](Self::write_flush) is
    /// [`WriteFlush::ByDriver`].
    ///
    /// # Errors
    /// The driver's error.
    pub fn flush_writes(&self) -> Result<(), String> {
        let flushed = self.enter().and_then(|_entered| {
            // SAFETY: the caller has checked `write_flush`, so the function exists; the context is current.
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
