//! A device and its primary context.

use std::{cell::Cell, marker::PhantomData, sync::Arc};

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUresult, CUstreamCaptureMode};
use kvhoist_base::{
    error::{Error, Result},
    panics::log,
};

use super::{
    discover::{Device, discover, handle},
    driver::{BatchForm, CudaError, Driver, check},
};

const RELAXED: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;

/// A GPU with its primary context, which the CUDA runtime, and with it every framework in this process, uses too.
/// Addresses and streams are shared with them.
pub struct Gpu {
    handle: CUdevice,
    context: CUcontext,
    driver: Driver,
    device: Device,
}

// SAFETY: handles of a library that may be called from any thread; `bind` or `enter` makes the context current before
// each use.
unsafe impl Send for Gpu {}
// SAFETY: the library may be called from any thread, and nothing is changed through `&self`.
unsafe impl Sync for Gpu {}

impl Gpu {
    /// Opens the device with this ordinal and retains its primary context.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with the number of devices that the driver shows.
    pub fn open(ordinal: u32) -> Result<Arc<Self>> {
        let unavailable = |reason| Error::unavailable("device", reason);
        let discovery = discover();
        let device = discovery.device(ordinal).map_err(unavailable)?.clone();
        let driver = Driver::get().map_err(unavailable)?;
        Self::retain(driver, device).map(Arc::new).map_err(|fault| unavailable(fault.to_string()))
    }

    fn retain(driver: Driver, device: Device) -> std::result::Result<Self, CudaError> {
        let handle = handle(device.ordinal as i32)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: the function exists, and writes one handle; it is released when `Gpu` is dropped.
        check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, handle) })?;
        Ok(Gpu { handle, context, driver, device })
    }

    /// Properties of the device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    pub(super) fn handle(&self) -> CUdevice {
        self.handle
    }

    /// Makes the context current on this thread for good, and lets captures of streams forbid it nothing: on threads of
    /// this library, such as the reactor. Cheap; every call of the driver needs this or [`enter`](Self::enter) first.
    pub(crate) fn bind(&self) -> std::result::Result<(), CudaError> {
        thread_local!(static IS_RELAXED: Cell<bool> = const { Cell::new(false) });
        if !IS_RELAXED.replace(true) {
            self.driver.exchange_capture_mode(RELAXED);
        }
        self.set_current()
    }

    fn set_current(&self) -> std::result::Result<(), CudaError> {
        // SAFETY: the context is retained for the life of `self`.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    /// As [`bind`](Self::bind), on a thread that may be a caller's, until the value is dropped.
    pub(super) fn enter(&self) -> std::result::Result<Entered, CudaError> {
        // SAFETY: the context is retained for the life of `self`; `Entered` pops it.
        check("cuCtxPushCurrent", unsafe { sys::cuCtxPushCurrent_v2(self.context) })?;
        let mode = self.driver.exchange_capture_mode(RELAXED);
        Ok(Entered { driver: self.driver, mode, _of_this_thread: PhantomData })
    }

    /// Gives something of this context back to the driver. A refusal, which leaves no more to do, is logged.
    pub(super) fn give_back(&self, call: &'static str, release: impl FnOnce() -> CUresult) {
        if let Err(fault) = self.enter().and_then(|_entered| check(call, release())) {
            log(|| tracing::debug!(%fault, "the driver did not take something back"));
        }
    }

    /// Makes the device's primary context current on this thread, for the caller's own calls of the driver.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with the driver's error.
    pub fn make_current(&self) -> Result<()> {
        self.set_current().map_err(|fault| Error::unavailable("device", fault))
    }

    /// As [`make_current`](Self::make_current), on a thread that is its caller's own for good: captures of streams
    /// forbid it nothing from now on, and it ends none.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with the driver's error.
    pub fn make_current_for_good(&self) -> Result<()> {
        self.bind().map_err(|fault| Error::unavailable("device", fault))
    }

    /// The form of the driver's batch copy, if it has one.
    pub(super) fn batch_form(&self) -> Option<BatchForm> {
        self.driver.batch
    }

    /// Whether streams can wait for a word in memory, and write one.
    pub fn has_stream_memory_ops(&self) -> bool {
        self.driver.stream_memory_ops
    }

    /// Whether the driver has a batch copy.
    pub(crate) fn has_batches(&self) -> bool {
        self.batch_form().is_some()
    }

    /// Free and total bytes of device memory.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with the driver's error.
    pub fn memory_bytes(&self) -> Result<(u64, u64)> {
        let (mut free, mut total) = (0, 0);
        let queried = self.enter().and_then(|_entered| {
            // SAFETY: the function exists, the context is current, and the call writes two integers.
            check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })
        });
        queried.map_err(|fault| Error::unavailable("device", fault))?;
        Ok((free as u64, total as u64))
    }
}

/// The context is current on this thread, which captures of streams forbid nothing; dropped, all is as before.
pub(super) struct Entered {
    driver: Driver,
    mode: CUstreamCaptureMode,
    _of_this_thread: PhantomData<*mut ()>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.driver.exchange_capture_mode(self.mode);
        let mut context = std::ptr::null_mut();
        // SAFETY: pushed by `enter` on this thread, which the value cannot leave; the call writes one handle.
        if let Err(fault) = check("cuCtxPopCurrent", unsafe { sys::cuCtxPopCurrent_v2(&mut context) }) {
            log(|| tracing::debug!(%fault, "the context before is not current again"));
        }
    }
}

debug_fields!(Gpu, gpu => device: gpu.device);

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: retained in `retain`, released once. Streams, modules and memory hold the `Gpu`, so all of them are
        // gone.
        let released = check("cuDevicePrimaryCtxRelease", unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.handle) });
        if let Err(fault) = released {
            log(|| tracing::debug!(%fault, "the device was not released"));
        }
    }
}
