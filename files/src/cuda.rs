//! Copies between host memory and a CUDA device.

use std::{
    cell::Cell,
    collections::BTreeMap,
    fmt,
    ptr::null_mut,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use cudarc::driver::sys::{self, CUevent_flags, CUresult, CUstream_flags};
use kvhoist::internals::{
    device::cufile::CufileReader,
    gpu::{Gpu, HostPin},
};

use crate::{Error, Result, pages::Pages};

/// The streams of each device.
static STREAMS: Mutex<BTreeMap<u32, Vec<Arc<Stream>>>> = Mutex::new(BTreeMap::new());

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

/// Copies of one thread at a time, and the event that says that they have ended.
pub(crate) struct Copier {
    stream: Arc<Stream>,
    event: sys::CUevent,
    copies: Cell<Group>,
}

/// What is known of a copier's copies.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Group {
    /// All have ended.
    Ended,
    /// The event is behind all of them.
    Marked,
    /// Some have begun since.
    Begun,
}

// SAFETY: the driver takes calls for an event from any thread.
unsafe impl Send for Copier {}

/// How often a thread that waits asks before it sleeps between two questions. The driver's own sleep ends by an
/// interrupt, which takes longer than a copy.
const SPINS: u32 = 16;
/// How long it sleeps.
const SLEEP: Duration = Duration::from_micros(20);

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

impl Stream {
    /// The one of a device's streams that the fewest copiers have.
    fn of(ordinal: u32) -> Result<Arc<Self>> {
        let mut streams = STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
        let streams = streams.entry(ordinal).or_default();
        if streams.len() < STREAMS_OF_A_DEVICE {
            let gpu = open(ordinal)?;
            gpu.make_current().map_err(device)?;
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
        stream.gpu.make_current().map_err(device)?;
        let (mut event, flags) = (null_mut(), CUevent_flags::CU_EVENT_DISABLE_TIMING as u32);
        // SAFETY: the context is current; the event is destroyed when the copier is dropped.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut event, flags) })?;
        Ok(Copier { stream, event, copies: Cell::new(Group::Ended) })
    }

    /// Makes it the calling thread's: each thread that uses it calls this first.
    pub(crate) fn enter(&self) -> Result<()> {
        self.stream.gpu.make_current().map_err(device)
    }

    /// Whether copies have begun that are not known to have ended.
    pub(crate) fn is_under_way(&self) -> bool {
        self.copies.get() != Group::Ended
    }

    /// # Safety
    /// Both ranges stay valid, and nothing else touches them, until [`finish`](Self::finish) has returned.
    pub(crate) unsafe fn to_device(&self, address: usize, from: &[u8]) -> Result<()> {
        self.copies.set(Group::Begun);
        let (to, len, stream) = (address as u64, from.len(), self.stream.handle);
        // SAFETY: the caller's promise; the context is current on this thread.
        check("cuMemcpyHtoDAsync", unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), len, stream) })
    }

    /// # Safety
    /// As of [`to_device`](Self::to_device).
    pub(crate) unsafe fn to_host(&self, to: &mut [u8], address: usize) -> Result<()> {
        self.copies.set(Group::Begun);
        let (from, len, stream) = (address as u64, to.len(), self.stream.handle);
        // SAFETY: as in `to_device`.
        check("cuMemcpyDtoHAsync", unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, len, stream) })
    }

    /// Has [`finish`](Self::finish) wait for those copies only that have begun by now: others follow on the stream.
    pub(crate) fn mark(&self) -> Result<()> {
        // SAFETY: handles that are there; the context is current on this thread.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.event, self.stream.handle) })?;
        self.copies.set(Group::Marked);
        Ok(())
    }

    /// Waits for all copies that have begun.
    pub(crate) fn finish(&self) -> Result<()> {
        if self.copies.get() == Group::Begun {
            self.mark()?;
        }
        let mut asked = 0;
        while self.is_under_way() {
            // SAFETY: as above.
            match unsafe { sys::cuEventQuery(self.event) } {
                CUresult::CUDA_ERROR_NOT_READY if asked < SPINS => asked += 1,
                CUresult::CUDA_ERROR_NOT_READY => thread::sleep(SLEEP),
                code => {
                    check("cuEventQuery", code)?;
                    self.copies.set(Group::Ended);
                }
            }
        }
        Ok(())
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        if self.enter().is_ok() {
            // SAFETY: it is used no more.
            _ = unsafe { sys::cuEventDestroy_v2(self.event) };
        }
    }
}
