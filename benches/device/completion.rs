//! How a host learns that a copy is done: an event that is asked, a word that the stream writes, a host function; and
//! what the engine makes of the first. One copy at a time, from pinned memory to the device.

use std::{
    ffi::c_void,
    io,
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread::{self, Thread},
    time::Instant,
};

use cudarc::driver::sys::{self, CUevent, CUstream};
use kvhoist::internals::{
    device::{
        CopyBatch, CopyEngine, CopyOp, Direction,
        cuda::copy::{CudaCopy, CudaCopyOptions},
    },
    gpu::{DeviceBuffer, Gpu, HostPin},
    memory::{Arena, DeviceMemory},
};
use kvhoist_bench_kit::{
    drive::{Options, other},
    measure::Stopwatch,
};
use tokio::task::LocalSet;

use super::layers::succeeded;

/// Copies of each way and size that are timed; before them a tenth as many warm up.
const COPIES: usize = 5000;

const BYTES_MAX: usize = 1 << 20;

pub fn run(_options: &Options, gpu: &Arc<Gpu>) -> io::Result<()> {
    let bench = Bench::new(gpu)?;
    println!("from the call to the knowledge that one copy to the device is done, {COPIES} copies one after the other");
    println!("  {:>9}  {:<34}  {:>8}  {:>8}  {:>12}", "bytes", "way", "p50 us", "p99 us", "CPU us/copy");
    for bytes in [4 << 10, 128 << 10, BYTES_MAX] {
        bench.report(bytes, "event, asked", || bench.by_event(bytes))?;
        bench.report(bytes, "word written by the stream, read", || bench.by_word(bytes))?;
        bench.report(bytes, "host function, thread parked", || bench.by_function(bytes))?;
        bench.by_engine(bytes)?;
    }
    println!();
    Ok(())
}

struct Bench {
    gpu: Arc<Gpu>,
    stream: CUstream,
    event: CUevent,
    /// The word's place for the device; for the host it is at the end of the arena.
    word_on_device: u64,
    device: DeviceBuffer,
    _pin: HostPin,
    arena: Arc<Arena>,
}

/// What the host function sets.
struct Told {
    done: AtomicBool,
    waiting: Thread,
}

impl Bench {
    fn new(gpu: &Arc<Gpu>) -> io::Result<Bench> {
        let mut arena = Arena::new(2, BYTES_MAX).map_err(other)?;
        arena.populate().map_err(other)?;
        let arena = Arc::new(arena);
        // SAFETY: both slots of the arena, which lie one after the other and live as long as it.
        let pin = unsafe { HostPin::new(Arc::clone(gpu), arena.slot_ptr(0), 2 * BYTES_MAX, Arc::clone(&arena) as _) };
        let pin = pin.map_err(other)?;
        gpu.make_current().map_err(other)?;
        let (mut stream, mut event, mut word_on_device) = (std::ptr::null_mut(), std::ptr::null_mut(), 0);
        // SAFETY: the context is current; handles and an address are written, of memory that was just pinned.
        unsafe {
            succeeded("cuStreamCreate", sys::cuStreamCreate(&mut stream, 1))?;
            succeeded("cuEventCreate", sys::cuEventCreate(&mut event, 2))?;
            let word = arena.slot_ptr(1).as_ptr().cast();
            succeeded("cuMemHostGetDevicePointer", sys::cuMemHostGetDevicePointer_v2(&mut word_on_device, word, 0))?;
        }
        let device = DeviceBuffer::new(Arc::clone(gpu), BYTES_MAX).map_err(other)?;
        Ok(Bench { gpu: Arc::clone(gpu), stream, event, word_on_device, device, _pin: pin, arena })
    }

    fn word(&self) -> &AtomicU32 {
        let word: NonNull<AtomicU32> = self.arena.slot_ptr(1).cast();
        // SAFETY: aligned, zeroed memory of the arena, used as this word only.
        unsafe { word.as_ref() }
    }

    fn start(&self, bytes: usize) -> io::Result<()> {
        let from = self.arena.slot_ptr(0).as_ptr().expose_provenance() as u64;
        let to = self.device.base().as_ptr().expose_provenance() as u64;
        // SAFETY: ranges that live as long as the bench, which waits for each copy.
        succeeded("cuMemcpyAsync", unsafe { sys::cuMemcpyAsync(to, from, bytes, self.stream) })
    }

    fn by_event(&self, bytes: usize) -> io::Result<()> {
        self.start(bytes)?;
        // SAFETY: our own event and stream.
        succeeded("cuEventRecord", unsafe { sys::cuEventRecord(self.event, self.stream) })?;
        loop {
            // SAFETY: our own event.
            match unsafe { sys::cuEventQuery(self.event) } {
                sys::CUresult::CUDA_ERROR_NOT_READY => {}
                result => return succeeded("cuEventQuery", result),
            }
        }
    }

    fn by_word(&self, bytes: usize) -> io::Result<()> {
        let next = self.word().load(Ordering::Relaxed).wrapping_add(1);
        self.start(bytes)?;
        // SAFETY: our own stream; the word is pinned for as long as the bench lives.
        let written = unsafe { sys::cuStreamWriteValue32_v2(self.stream, self.word_on_device, next, 0) };
        succeeded("cuStreamWriteValue32", written)?;
        while self.word().load(Ordering::Acquire) != next {
            std::hint::spin_loop();
        }
        Ok(())
    }

    fn by_function(&self, bytes: usize) -> io::Result<()> {
        /// # Safety
        /// For a count of a [`Told`], once.
        unsafe extern "C" fn tell(told: *mut c_void) {
            // SAFETY: the count that `by_function` gave away.
            let told = unsafe { Arc::from_raw(told.cast::<Told>()) };
            told.done.store(true, Ordering::Release);
            told.waiting.unpark();
        }
        let told = Arc::new(Told { done: AtomicBool::new(false), waiting: thread::current() });
        self.start(bytes)?;
        let given = Arc::into_raw(Arc::clone(&told)).cast_mut().cast();
        // SAFETY: our own stream; the function takes the count that is given to it, once.
        succeeded("cuLaunchHostFunc", unsafe { sys::cuLaunchHostFunc(self.stream, Some(tell), given) })?;
        while !told.done.load(Ordering::Acquire) {
            thread::park();
        }
        Ok(())
    }

    /// The copy engine: events, asked by a task of the runtime that the caller runs on.
    fn by_engine(&self, bytes: usize) -> io::Result<()> {
        let options = CudaCopyOptions { method: None, blocks_max: 16 };
        let engine = CudaCopy::new(&self.gpu, &self.arena, options).map_err(other)?;
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        let tasks = LocalSet::new();
        self.report(bytes, "the engine (event, asked by a task)", || {
            let op = CopyOp { src: self.arena.slot_ptr(0).as_ptr(), dst: self.device.base().as_ptr(), len: bytes };
            // SAFETY: ranges that live as long as the bench, which waits for each copy.
            let batch = unsafe { CopyBatch::new(vec![op], Direction::HostToDevice, Vec::new()) };
            tasks.block_on(&runtime, engine.copy(batch)).0.map_err(other)
        })
    }

    fn report(&self, bytes: usize, way: &str, mut copy: impl FnMut() -> io::Result<()>) -> io::Result<()> {
        self.gpu.make_current().map_err(other)?;
        (0..COPIES / 10).try_for_each(|_| copy())?;
        let mut micros = Vec::with_capacity(COPIES);
        let watch = Stopwatch::start();
        for _ in 0..COPIES {
            let started = Instant::now();
            copy()?;
            micros.push(started.elapsed().as_secs_f64() * 1e6);
        }
        let cpu = watch.stop(0).cpu_seconds * 1e6 / COPIES as f64;
        micros.sort_by(f64::total_cmp);
        let at = |share: f64| micros[((COPIES - 1) as f64 * share) as usize];
        println!("  {bytes:>9}  {way:<34}  {:>8.1}  {:>8.1}  {cpu:>12.1}", at(0.5), at(0.99));
        Ok(())
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        if self.gpu.make_current().is_ok() {
            // SAFETY: our own handles, destroyed once; nothing is in flight.
            unsafe {
                sys::cuEventDestroy_v2(self.event);
                sys::cuStreamDestroy_v2(self.stream);
            }
        }
    }
}
