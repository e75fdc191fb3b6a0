//! Copies between host memory and a CUDA device.

use std::{
    cell::Cell,
    collections::BTreeMap,
    fmt, hint,
    ptr::{NonNull, null_mut},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

use cudarc::driver::sys::{self, CUresult, CUstream_flags, CUstreamWriteValue_flags};
use kvhoist::internals::{
    device::cufile::CufileReader,
    gpu::{Gpu, HostPin},
    memory::Mapping,
};

use crate::{Error, Result, process::PerProcess};

/// The streams of each device.
static STREAMS: PerProcess<BTreeMap<u32, Vec<Arc<Stream>>>> = PerProcess::new();

/// Streams of a device that all copies of this process to and from it are on: one copies while the other tells of its
/// last copy. A device with many more turns from one to another for as long as a copy takes.
const STREAMS_OF_A_DEVICE: usize = 2;

/// One of them.
struct Stream {
    gpu: Arc<Gpu>,
    handle: sys::CUstream,
}

// SAFETY: the driver takes calls for a stream from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above; it locks what it must.
unsafe impl Sync for Stream {}

/// Copies of one thread at a time, and a number in host memory that the device writes behind them: whoever waits looks
/// there. Questions to the driver wait for each other, and for those who put copies into it.
pub(crate) struct Copier {
    stream: Arc<Stream>,
    written: NonNull<AtomicU32>,
    /// The last number that the device was told to write.
    told: Cell<u32>,
    /// Copies have begun since then.
    has_begun: Cell<bool>,
}

// SAFETY: host memory of the driver's, which is the same on every thread, and is read and written as an atomic number.
unsafe impl Send for Copier {}

/// How often a thread that waits looks before it sleeps between two looks; and after how many it asks for errors.
const SPINS: u32 = 64;
/// How long it sleeps.
const SLEEP: Duration = Duration::from_micros(20);

/// A file that libcufile reads.
pub(crate) type Reader = CufileReader;

/// Host memory that is pinned for a device.
pub(crate) type Pinned = HostPin;

/// Pins memory for the device, which then copies without buffers of its driver's.
pub(crate) fn pin(ordinal: u32, memory: &Arc<Mapping>) -> Result<Pinned> {
    let gpu = open(ordinal)?;
    // SAFETY: the mapping, which stays for as long as its owner lives.
    unsafe { HostPin::new(gpu, memory.ptr(), memory.len(), Arc::clone(memory) as _) }.map_err(device)
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

impl Stream {
    /// The one of a device's streams that the fewest copiers have.
    fn of(ordinal: u32) -> Result<Arc<Self>> {
        let mut streams = STREAMS.lock();
        let streams = streams.entry(ordinal).or_default();
        if streams.len() < STREAMS_OF_A_DEVICE {
            let gpu = open(ordinal)?;
            if !gpu.has_stream_memory_ops() {
                return Err(device(
                    "found a driver without stream memory operations, expected CUDA 11.7's or a newer one",
                ));
            }
            gpu.make_current_for_good().map_err(device)?;
            let (mut handle, flags) = (null_mut(), CUstream_flags::CU_STREAM_NON_BLOCKING as u32);
            // SAFETY: the context is current. The stream stays for as long as the process.
            check("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut handle, flags) })?;
            streams.push(Arc::new(Stream { gpu, handle }));
        }
        Ok(Arc::clone(streams.iter().min_by_key(|stream| Arc::strong_count(stream)).expect("there is one")))
    }
}

impl Copier {
    pub(crate) fn open(ordinal: u32) -> Result<Self> {
        let stream = Stream::of(ordinal)?;
        stream.gpu.make_current_for_good().map_err(device)?;
        let mut written = null_mut();
        // SAFETY: the context is current; the memory is freed when the copier is dropped.
        check("cuMemAllocHost", unsafe { sys::cuMemAllocHost_v2(&raw mut written, size_of::<AtomicU32>()) })?;
        let written: NonNull<AtomicU32> = NonNull::new(written.cast()).expect("the driver allocates nothing at 0");
        // SAFETY: new memory, whose pages are aligned.
        unsafe { written.write(AtomicU32::new(0)) };
        Ok(Copier { stream, written, told: Cell::new(0), has_begun: Cell::new(false) })
    }

    /// Makes it the calling thread's, which is one of a transfer: each thread that uses it calls this first.
    pub(crate) fn enter(&self) -> Result<()> {
        self.stream.gpu.make_current_for_good().map_err(device)
    }

    /// Whether copies have begun that are not known to have ended.
    pub(crate) fn is_under_way(&self) -> bool {
        self.has_begun.get() || self.written() != self.told.get()
    }

    /// # Safety
    /// Both ranges stay valid, and nothing else touches them, until [`finish`](Self::finish) has returned.
    pub(crate) unsafe fn to_device(&self, address: usize, from: &[u8]) -> Result<()> {
        self.has_begun.set(true);
        let (to, len, stream) = (address as u64, from.len(), self.stream.handle);
        // SAFETY: the caller's promise; the context is current on this thread.
        check("cuMemcpyHtoDAsync", unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), len, stream) })
    }

    /// # Safety
    /// As of [`to_device`](Self::to_device).
    pub(crate) unsafe fn to_host(&self, to: &mut [u8], address: usize) -> Result<()> {
        self.has_begun.set(true);
        let (from, len, stream) = (address as u64, to.len(), self.stream.handle);
        // SAFETY: as in `to_device`.
        check("cuMemcpyDtoHAsync", unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, len, stream) })
    }

    /// Has [`finish`](Self::finish) wait for those copies only that have begun by now: others follow on the stream.
    pub(crate) fn mark(&self) -> Result<()> {
        let (at, next) = (self.written.as_ptr() as u64, self.told.get().wrapping_add(1));
        let flags = CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
        // SAFETY: memory of the driver's, where the device finds it by the same address; it is freed only when the
        // number has been written. The context is current on this thread, and the driver has the call.
        check("cuStreamWriteValue", unsafe { sys::cuStreamWriteValue32_v2(self.stream.handle, at, next, flags) })?;
        self.told.set(next);
        self.has_begun.set(false);
        Ok(())
    }

    /// Waits for all copies that have begun.
    pub(crate) fn finish(&self) -> Result<()> {
        if self.has_begun.get() {
            self.mark()?;
        }
        let mut looks = 0_u32;
        while self.is_under_way() {
            looks = looks.wrapping_add(1);
            if looks < SPINS {
                hint::spin_loop();
                continue;
            }
            // There may be more threads than processors.
            thread::sleep(SLEEP);
            if looks.is_multiple_of(SPINS) {
                // SAFETY: a handle that is there; the context is current on this thread.
                match unsafe { sys::cuStreamQuery(self.stream.handle) } {
                    CUresult::CUDA_ERROR_NOT_READY => {}
                    code => check("cuStreamQuery", code)?,
                }
            }
        }
        Ok(())
    }

    /// The number that the device has written last. Whoever has read it sees what the copies before it have brought.
    fn written(&self) -> u32 {
        // SAFETY: memory of this copier's.
        unsafe { self.written.as_ref() }.load(Ordering::Acquire)
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        // A device that has failed may still write there.
        if self.enter().is_ok() && self.finish().is_ok() {
            // SAFETY: it is used no more.
            _ = unsafe { sys::cuMemFreeHost(self.written.as_ptr().cast()) };
        }
    }
}
