//! Copies between host memory and a CUDA device, on a stream of each thread's own.

use std::{fmt, sync::Arc};

use cudarc::driver::sys::{self, CUevent_flags, CUresult, CUstream_flags};
use kvhoist::internals::{
    device::cufile::CufileReader,
    gpu::{Gpu, HostPin},
};

use crate::{Error, Result, pages::Pages};

/// A stream of one thread, and the event that says that its copies have ended.
pub(crate) struct Copier {
    gpu: Arc<Gpu>,
    stream: sys::CUstream,
    event: sys::CUevent,
}

/// A file that libcufile reads.
pub(crate) type Reader = CufileReader;

/// Host memory that is pinned for a device.
pub(crate) type Pinned = HostPin;

/// Pins the pages for the device, which then copies without buffers of its driver's.
pub(crate) fn pin(ordinal: u32, pages: &Arc<Pages>) -> Result<Pinned> {
    let gpu = open(ordinal)?;
    // SAFETY: the mapping, which stays for as long as its owner lives.
    unsafe { HostPin::new(gpu, pages.start(), pages.bytes(), Arc::clone(pages) as _) }.map_err(device)
}

fn open(ordinal: u32) -> Result<Arc<Gpu>> {
    Gpu::open(ordinal).map_err(device)
}

fn device(error: impl fmt::Display) -> Error {
    Error::Device(error.to_string())
}

fn check(call: &'static str, code: CUresult) -> Result<()> {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(device(format!("{call}: {code:?}"))),
    }
}

impl Copier {
    /// For the calling thread.
    pub(crate) fn open(ordinal: u32) -> Result<Self> {
        let gpu = open(ordinal)?;
        gpu.make_current().map_err(device)?;
        let mut copier = Copier { gpu, stream: std::ptr::null_mut(), event: std::ptr::null_mut() };
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current; the handle is destroyed when the copier is dropped.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut copier.stream, flags) })?;
        // A thread that waits sleeps: there may be more of them than processors.
        let flags = CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32 | CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: as above.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut copier.event, flags) })?;
        Ok(copier)
    }

    /// # Safety
    /// Both ranges stay valid, and nothing else touches them, until [`finish`](Self::finish) has returned.
    pub(crate) unsafe fn to_device(&self, address: usize, from: &[u8]) -> Result<()> {
        // SAFETY: the caller's promise; the context is current on the thread that opened the copier.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(address as u64, from.as_ptr().cast(), from.len(), self.stream) };
        check("cuMemcpyHtoDAsync", code)
    }

    /// # Safety
    /// As of [`to_device`](Self::to_device).
    pub(crate) unsafe fn to_host(&self, to: &mut [u8], address: usize) -> Result<()> {
        // SAFETY: as in `to_device`.
        let code = unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), address as u64, to.len(), self.stream) };
        check("cuMemcpyDtoHAsync", code)
    }

    pub(crate) fn finish(&self) -> Result<()> {
        // SAFETY: handles of this copier, on its thread.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.event, self.stream) })?;
        // SAFETY: as above.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.event) })
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        if self.gpu.make_current().is_err() {
            return;
        }
        // SAFETY: handles of this copier, used no more; null ones were never made. The driver destroys a stream once
        // its copies have ended.
        unsafe {
            if !self.event.is_null() {
                _ = sys::cuEventDestroy_v2(self.event);
            }
            if !self.stream.is_null() {
                _ = sys::cuStreamDestroy_v2(self.stream);
            }
        }
    }
}
