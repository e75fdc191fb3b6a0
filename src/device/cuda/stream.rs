//! Streams, events, and the driver's own copies.

use std::sync::Arc;

use cudarc::driver::sys::{
    self, CUevent, CUevent_flags, CUmemLocation, CUmemLocationType, CUmemcpyAttributes, CUmemcpySrcAccessOrder,
    CUresult, CUstream, CUstream_flags,
};

use super::{
    context::Gpu,
    driver::{BatchForm, Fault, check},
};
use crate::{
    block::{CopyOp, Direction},
    error::{Error, Result},
};

/// A queue of device work that runs in order.
pub(crate) struct Stream {
    gpu: Arc<Gpu>,
    raw: CUstream,
}

/// A point in a stream, to be asked whether it was reached.
pub(crate) struct Event {
    gpu: Arc<Gpu>,
    raw: CUevent,
}

/// Addresses and lengths in the form in which the driver wants a batch. Kept from batch to batch.
#[derive(Default)]
pub(crate) struct BatchArrays {
    dsts: Vec<u64>,
    srcs: Vec<u64>,
    lens: Vec<usize>,
}

impl Stream {
    /// A stream of the highest priority, which does not wait for the legacy default stream: copies are short, and a
    /// kernel of the engine beside them may be long.
    pub(crate) fn new(gpu: &Arc<Gpu>) -> std::result::Result<Self, Fault> {
        gpu.bind()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the context is current; two integers are written.
        check("cuCtxGetStreamPriorityRange", unsafe { sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest) })?;
        let mut raw = std::ptr::null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: as above; one handle is written, and destroyed when this is dropped.
        check("cuStreamCreateWithPriority", unsafe { sys::cuStreamCreateWithPriority(&mut raw, flags, greatest) })?;
        Ok(Stream { gpu: Arc::clone(gpu), raw })
    }

    pub(super) fn raw(&self) -> CUstream {
        self.raw
    }

    /// Waits until everything in it is done. Blocks the thread.
    pub(crate) fn synchronize(&self) -> std::result::Result<(), Fault> {
        self.gpu.bind()?;
        // SAFETY: our own stream.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.raw) })
    }

    /// Queues one copy. Its context is current.
    ///
    /// # Safety
    /// Both ranges must stay valid and untouched by others until the stream has passed the copy.
    pub(crate) unsafe fn copy(&self, op: &CopyOp) -> std::result::Result<(), Fault> {
        let (src, dst) = (op.src.expose_provenance() as u64, op.dst.expose_provenance() as u64);
        // SAFETY: the caller's promise.
        check("cuMemcpyAsync", unsafe { sys::cuMemcpyAsync(dst, src, op.len, self.raw) })
    }

    /// Queues copies that may run in any order among themselves.
    ///
    /// # Safety
    /// As [`copy`](Self::copy), for each.
    pub(crate) unsafe fn copy_batch(
        &self,
        ops: impl Iterator<Item = CopyOp>,
        direction: Direction,
        arrays: &mut BatchArrays,
    ) -> std::result::Result<(), Fault> {
        let Some(form) = self.gpu.batch_form() else {
            return check("cuMemcpyBatchAsync", CUresult::CUDA_ERROR_NOT_SUPPORTED);
        };
        arrays.fill(ops);
        let count = arrays.lens.len();
        // A source on the device is final when the stream comes to it, not before: reading it early would copy what a
        // kernel has yet to write. One in host memory is final already.
        let order = match direction {
            Direction::HostToDevice => CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_ANY,
            _ => CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
        };
        let nowhere = CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
        let mut attributes =
            CUmemcpyAttributes { srcAccessOrder: order, srcLocHint: nowhere, dstLocHint: nowhere, flags: 0 };
        let (mut first, mut failed) = (0_usize, usize::MAX);
        let (dsts, srcs, lens) = (arrays.dsts.as_mut_ptr(), arrays.srcs.as_mut_ptr(), arrays.lens.as_mut_ptr());
        // SAFETY: three arrays of `count` numbers, which the driver reads during the call, and one attribute for
        // all of them; the ranges are as the caller promises.
        let code = unsafe {
            match form {
                BatchForm::V2 => {
                    sys::cuMemcpyBatchAsync_v2(dsts, srcs, lens, count, &mut attributes, &mut first, 1, self.raw)
                }
                BatchForm::V1(copy) => {
                    copy(dsts, srcs, lens, count, &mut attributes, &mut first, 1, &mut failed, self.raw)
                }
            }
        };
        check("cuMemcpyBatchAsync", code)
    }
}

impl BatchArrays {
    fn fill(&mut self, ops: impl Iterator<Item = CopyOp>) {
        self.dsts.clear();
        self.srcs.clear();
        self.lens.clear();
        for op in ops {
            self.dsts.push(op.dst.expose_provenance() as u64);
            self.srcs.push(op.src.expose_provenance() as u64);
            self.lens.push(op.len);
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: our own stream, destroyed once; what is in it still runs.
        let destroyed =
            self.gpu.bind().and_then(|()| check("cuStreamDestroy", unsafe { sys::cuStreamDestroy_v2(self.raw) }));
        if let Err(fault) = destroyed {
            tracing::debug!(%fault, "a stream was not destroyed");
        }
    }
}

impl Event {
    /// An event that keeps no time.
    pub(crate) fn new(gpu: &Arc<Gpu>) -> std::result::Result<Self, Fault> {
        gpu.bind()?;
        let mut raw = std::ptr::null_mut();
        let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the context is current; one handle is written, and destroyed when this is dropped.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, flags) })?;
        Ok(Event { gpu: Arc::clone(gpu), raw })
    }

    /// Marks what the stream holds now. Its context is current.
    pub(crate) fn record(&self, stream: &Stream) -> std::result::Result<(), Fault> {
        // SAFETY: our own event and stream.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.raw, stream.raw) })
    }

    /// Whether the stream has passed the mark. Its context is current.
    pub(crate) fn is_reached(&self) -> std::result::Result<bool, Fault> {
        // SAFETY: our own event.
        match unsafe { sys::cuEventQuery(self.raw) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => check("cuEventQuery", code).map(|()| true),
        }
    }
}

/// A mark in a stream of the caller's: copies through an RDMA device can wait for it
/// ([`CopyOrder::after`](crate::device::gdr::CopyOrder)).
pub struct StreamMark(Event);

impl StreamMark {
    /// Marks what the stream holds now: a `CUstream` (or `cudaStream_t`) of the device's primary context, as a number.
    ///
    /// # Safety
    /// The stream must not be destroyed during the call.
    ///
    /// # Errors
    /// [`Error::Copy`] with what the driver said.
    pub unsafe fn record(gpu: &Arc<Gpu>, stream: usize) -> Result<Self> {
        let event = Event::new(gpu).map_err(refused)?;
        let raw: CUstream = std::ptr::with_exposed_provenance_mut(stream);
        // SAFETY: our own event; the stream is as the caller promises. `new` has made the context current.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.raw, raw) }).map_err(refused)?;
        Ok(StreamMark(event))
    }

    /// Whether the device has come past it.
    ///
    /// # Errors
    /// [`Error::Copy`] with what the driver said.
    pub fn is_passed(&self) -> Result<bool> {
        self.0.gpu.bind().and_then(|()| self.0.is_reached()).map_err(refused)
    }
}

fn refused(fault: Fault) -> Error {
    Error::Copy { engine: "cuda", reason: fault.to_string() }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: our own event, destroyed once.
        let destroyed =
            self.gpu.bind().and_then(|()| check("cuEventDestroy", unsafe { sys::cuEventDestroy_v2(self.raw) }));
        if let Err(fault) = destroyed {
            tracing::debug!(%fault, "an event was not destroyed");
        }
    }
}
