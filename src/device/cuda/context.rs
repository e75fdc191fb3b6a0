//! A device and its primary context.

use std::{fmt, sync::Arc};

use cudarc::driver::sys::{self, CUcontext, CUdevice};

use super::{
    discover::{Device, discover, handle},
    driver::{BatchForm, Driver, Fault, check},
};
use crate::error::{Error, Result};

/// A device that is in use, by its primary context: the one that CUDA's runtime, and so every framework in this
/// process, uses too. Addresses and streams are shared with them.
pub struct Gpu {
    handle: CUdevice,
    context: CUcontext,
    driver: Driver,
    device: Device,
}

// SAFETY: handles of a library that may be called from any thread; `bind` makes the context current before each use.
unsafe impl Send for Gpu {}
// SAFETY: as above; nothing is changed through `&self`.
unsafe impl Sync for Gpu {}

impl Gpu {
    /// Takes the device of this number into use.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with what is there instead.
    pub fn open(ordinal: u32) -> Result<Arc<Self>> {
        let unavailable = |reason| Error::Unavailable { tier: "device", reason };
        let discovery = discover();
        let device = discovery.device(ordinal).map_err(unavailable)?.clone();
        let driver = Driver::get().map_err(unavailable)?;
        Self::retain(driver, device).map(Arc::new).map_err(|fault| unavailable(fault.to_string()))
    }

    fn retain(driver: Driver, device: Device) -> std::result::Result<Self, Fault> {
        let handle = handle(device.ordinal as i32)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: the function exists, and writes one handle; it is released when `Gpu` is dropped.
        check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, handle) })?;
        Ok(Gpu { handle, context, driver, device })
    }

    /// What it is.
    pub fn device(&self) -> &Device {
        &self.device
    }

    pub(super) fn handle(&self) -> CUdevice {
        self.handle
    }

    /// Makes the context the current one of this thread. Cheap; whoever calls the driver calls this first.
    pub(crate) fn bind(&self) -> std::result::Result<(), Fault> {
        // SAFETY: the context is retained for the life of `self`.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    /// Makes the device's primary context the current one of this thread, for calls of the driver of one's own.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with what the driver said.
    pub fn make_current(&self) -> Result<()> {
        self.bind().map_err(|fault| Error::Unavailable { tier: "device", reason: fault.to_string() })
    }

    /// The form in which the driver copies batches, if it does.
    pub(super) fn batch_form(&self) -> Option<BatchForm> {
        self.driver.batch
    }

    /// Whether streams can wait for a word in memory.
    pub(super) fn has_stream_waits(&self) -> bool {
        self.driver.stream_waits
    }

    /// Whether the driver copies batches.
    pub(crate) fn has_batches(&self) -> bool {
        self.batch_form().is_some()
    }

    /// Free and total bytes of device memory.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with what the driver said.
    pub fn memory_bytes(&self) -> Result<(u64, u64)> {
        let (mut free, mut total) = (0, 0);
        let asked = self.bind().and_then(|()| {
            // SAFETY: the function exists, the context is current, and two integers are written.
            check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })
        });
        asked.map_err(|fault| Error::Unavailable { tier: "device", reason: fault.to_string() })?;
        Ok((free as u64, total as u64))
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gpu").field("device", &self.device).finish_non_exhaustive()
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: retained in `retain`, released once. Streams, modules and memory hold the `Gpu` and are gone.
        let released = check("cuDevicePrimaryCtxRelease", unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.handle) });
        if let Err(fault) = released {
            tracing::debug!(%fault, "the device was not released");
        }
    }
}
