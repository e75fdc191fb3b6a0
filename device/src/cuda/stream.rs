//! Streams, events, and the driver's own copies.

use std::sync::Arc;

use cudarc::driver::sys::{
    self, CUevent, CUevent_flags, CUmemLocation, CUmemLocationType, CUmemcpyAttributes, CUmemcpySrcAccessOrder,
    CUresult, CUstream, CUstream_flags,
};
use kvhoist_base::block::{CopyOp, Direction};

use super::{
    context::Gpu,
    driver::{BatchForm, CudaError, check},
};

/// A CUDA stream: a queue of device work that runs in order.
pub(crate) struct Stream {
    gpu: Arc<Gpu>,
    raw: CUstream,
}

/// A CUDA event: a position in a stream that can be polled.
pub(crate) struct Event {
    gpu: Arc<Gpu>,
    raw: CUevent,
}

/// Arguments of a batch copy, reused from batch to batch.
#[derive(Default)]
pub(crate) struct BatchArrays {
    dsts: Vec<u64>,
    srcs: Vec<u64>,
    lens: Vec<usize>,
}

impl Stream {
    /// A stream of the highest priority, independent of the legacy default stream: copies are short, while the
    /// inference engine's kernels may run long.
    pub(crate) fn new(gpu: &Arc<Gpu>) -> std::result::Result<Self, CudaError> {
        gpu.bind()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the context is current; the call writes two integers.
        check("cuCtxGetStreamPriorityRange", unsafe { sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest) })?;
        let mut raw = std::ptr::null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current; the call writes one handle, destroyed when this is dropped.
        check("cuStreamCreateWithPriority", unsafe { sys::cuStreamCreateWithPriority(&mut raw, flags, greatest) })?;
        Ok(Stream { gpu: Arc::clone(gpu), raw })
    }

    pub(super) fn raw(&self) -> CUstream {
        self.raw
    }

    /// Waits until all work in the stream is done. Blocks the thread.
    pub(crate) fn synchronize(&self) -> std::result::Result<(), CudaError> {
        self.gpu.bind()?;
        // SAFETY: our own stream.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.raw) })
    }

    /// Whether all work in the stream is done. The context must be current.
    pub(crate) fn is_idle(&self) -> std::result::Result<bool, CudaError> {
        // SAFETY: our own stream.
        is_done("cuStreamQuery", unsafe { sys::cuStreamQuery(self.raw) })
    }

    /// Queues one copy. The context must be current.
    ///
    /// # Safety
    /// Both ranges must stay valid and untouched by others until the stream has passed the copy.
    pub(crate) unsafe fn copy(&self, op: &CopyOp) -> std::result::Result<(), CudaError> {
        let (src, dst) = (op.src.expose_provenance() as u64, op.dst.expose_provenance() as u64);
        // SAFETY: the caller vouches for both ranges.
        check("cuMemcpyAsync", unsafe { sys::cuMemcpyAsync(dst, src, op.len, self.raw) })
    }

    /// Queues copies that may run in any order.
    ///
    /// # Safety
    /// As [`copy`](Self::copy), for each copy.
    pub(crate) unsafe fn copy_batch(
        &self,
        ops: impl Iterator<Item = CopyOp>,
        direction: Direction,
        arrays: &mut BatchArrays,
    ) -> std::result::Result<(), CudaError> {
        let Some(form) = self.gpu.batch_form() else {
            return check("cuMemcpyBatchAsync", CUresult::CUDA_ERROR_NOT_SUPPORTED);
        };
        arrays.fill(ops);
        let count = arrays.lens.len();
        // A device source may be written by earlier work of the stream, so it must be read in stream order. A host
        // source is final already.
        let order = match direction {
            Direction::HostToDevice => CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_ANY,
            _ => CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
        };
        let nowhere = CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
        let mut attributes =
            CUmemcpyAttributes { srcAccessOrder: order, srcLocHint: nowhere, dstLocHint: nowhere, flags: 0 };
        let (mut first, mut failed) = (0_usize, usize::MAX);
        let (dsts, srcs, lens) = (arrays.dsts.as_mut_ptr(), arrays.srcs.as_mut_ptr(), arrays.lens.as_mut_ptr());
        // SAFETY: the driver reads three arrays of `count` numbers during the call, and one attribute for all of them;
        // the caller vouches for the ranges.
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
        // SAFETY: our own stream, destroyed once; queued work still runs.
        self.gpu.give_back("cuStreamDestroy", || unsafe { sys::cuStreamDestroy_v2(self.raw) });
    }
}

impl Event {
    /// Makes an event without timing.
    pub(crate) fn new(gpu: &Arc<Gpu>) -> std::result::Result<Self, CudaError> {
        gpu.bind()?;
        let mut raw = std::ptr::null_mut();
        let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the context is current; the call writes one handle, destroyed when this is dropped.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, flags) })?;
        Ok(Event { gpu: Arc::clone(gpu), raw })
    }

    /// Records the stream's current position. The context must be current.
    pub(crate) fn record(&self, stream: &Stream) -> std::result::Result<(), CudaError> {
        // SAFETY: our own event and stream.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.raw, stream.raw) })
    }

    /// Whether the stream has passed the recorded position. The context must be current.
    pub(crate) fn is_reached(&self) -> std::result::Result<bool, CudaError> {
        // SAFETY: our own event.
        is_done("cuEventQuery", unsafe { sys::cuEventQuery(self.raw) })
    }
}

/// What a query has found. An error, unless it is [sticky](CudaError::is_sticky), does not mean that the work is done.
fn is_done(call: &'static str, code: CUresult) -> std::result::Result<bool, CudaError> {
    match code {
        CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        code => check(call, code).map(|()| true),
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: our own event, destroyed once.
        self.gpu.give_back("cuEventDestroy", || unsafe { sys::cuEventDestroy_v2(self.raw) });
    }
}
