//! What the driver answers when it does not answer what was asked.

use std::{sync::Arc, thread};

use cudarc::driver::sys;
use futures_util::FutureExt;
use kvhoist::internals::{
    device::{
        CopyBatch, CopyEngine, CopyOp, Direction,
        cuda::copy::{CudaCopy, CudaCopyOptions},
    },
    memory::Arena,
};

use super::*;

/// Blocks in host memory, and a device that is copied to by the kernel.
fn open() -> Cache {
    let cache = block_on(Cache::open(config(8).copy(CopyMethod::Kernel))).expect("the double is a device");
    (0..16).for_each(|n| block_on(common::store(&cache, n)));
    cache
}

fn assert_is_right(cache: &Cache, n: u64) {
    let lease = block_on(cache.fetch_to_device(&key(n))).expect("fetch").expect("stored");
    let bytes = block_on(cache.read_device(&lease, Vec::new())).expect("read");
    assert!(bytes == payload(n, BLOCK_BYTES), "block {n}");
}

#[test]
fn a_query_that_fails_does_not_end_a_copy() {
    with_double("answers::a_query_that_fails_does_not_end_a_copy", "", || {
        let cache = open();
        allow_events(0);
        ask_double(c"double_doubt", 1000);
        thread::scope(|scope| {
            let fetch = scope.spawn(|| block_on(cache.fetch_to_device(&key(3))));
            while ask_double(c"double_doubt", -1) > 0 {
                assert!(!fetch.is_finished(), "the copy is on its way: {:?}", fetch.join());
                thread::yield_now();
            }
            assert!(!fetch.is_finished(), "the copy is on its way: {:?}", fetch.join());
            allow_events(i32::MAX);
            fetch.join().expect("no panic").expect("fetch").expect("stored");
        });
        (0..16).for_each(|n| assert_is_right(&cache, n));
        kvhoist::internals::validate(&cache).expect("valid");
        block_on(cache.close()).expect("close");
    });
}

#[test]
fn a_query_that_fails_does_not_end_a_checksum() {
    with_double("answers::a_query_that_fails_does_not_end_a_checksum", "", || {
        let directory = common::directory();
        let settings = common::config(&directory, kvhoist::StorageKind::Auto, 4, 32);
        let settings = settings.device(DeviceKind::Cuda).device_blocks(4);
        let cache = block_on(Cache::open(settings)).expect("the double is a device");
        (0..32).for_each(|n| block_on(common::store(&cache, n)));
        // To the end of the process.
        thread::spawn(|| {
            loop {
                ask_double(c"double_doubt", 2);
                thread::yield_now();
            }
        });
        (0..32).chain(0..32).for_each(|n| assert_is_right(&cache, n));
        let stats = cache.stats();
        assert_eq!((stats.checksum_failures, stats.copy_errors, stats.device_retired), (0, 0, None));
        block_on(cache.close()).expect("close");
    });
}

/// The error of a read from disk of which the driver lets so many events happen.
fn error_of(events: i32, read: impl FnOnce(&Cache) -> kvhoist::Error) {
    let directory = common::directory();
    let settings = common::config(&directory, kvhoist::StorageKind::Auto, 4, 32);
    let settings = settings.device(DeviceKind::Cuda).device_blocks(4);
    let cache = block_on(Cache::open(settings)).expect("the double is a device");
    (0..32).for_each(|n| block_on(common::store(&cache, n)));
    allow_events(events);
    ask_double(c"double_doubt", i32::MAX);
    let error = read(&cache).to_string();
    assert!(error.contains("the driver did not say for 5s"), "{error}");
    assert!(block_on(common::fetch_verified(&cache, 0)), "from disk");
    block_on(cache.close()).expect("close");
}

/// Copies and checksums of blocks from disk: the error names the driver, and not the cache, which goes on.
#[test]
fn a_copy_from_disk_of_which_the_driver_says_nothing_fails_by_its_name() {
    with_double("answers::a_copy_from_disk_of_which_the_driver_says_nothing_fails_by_its_name", "", || {
        for events in [0, 1] {
            error_of(events, |cache| block_on(cache.fetch_to_device(&key(0))).expect_err("nobody knows"));
        }
        error_of(0, |cache| {
            let gpu = Gpu::open(0).expect("the double is a device");
            let pool = std::mem::ManuallyDrop::new(DeviceBuffer::new(gpu, BLOCK_BYTES).expect("memory"));
            let base = pool.base().as_ptr();
            // SAFETY: the pool is never freed, and nothing else uses it.
            let lent = unsafe { kvhoist::Memory::device(base, BLOCK_BYTES) };
            let _region = block_on(cache.register(lent)).expect("registered");
            let places = [vec![kvhoist::Segment { ptr: base, len: BLOCK_BYTES }]];
            let mut loaded = block_on(cache.load_into(&[key(0)], &places)).expect("begun");
            loaded.remove(0).expect_err("nobody knows")
        });
    });
}

/// What the device may still read or write is not given back; callers and streams have an answer all the same.
#[test]
fn a_driver_that_never_says_whether_a_copy_has_ended_keeps_its_memory() {
    let name = "answers::a_driver_that_never_says_whether_a_copy_has_ended_keeps_its_memory";
    with_double(name, "", || {
        let cache = open();
        let pins = ask_double(c"double_pins", 0);
        allow_events(0);
        ask_double(c"double_doubt", i32::MAX);
        block_on(cache.fetch_to_device(&key(3))).expect_err("nobody knows");
        assert_eq!(ask_double(c"double_pins", 0), pins, "nothing was unpinned");
        for n in 0..16 {
            let error = block_on(cache.fetch_to_device(&key(n))).expect_err("out of service").to_string();
            assert!(error.contains("the driver did not say for 5s whether copies had ended"), "{error}");
            assert!(block_on(common::fetch_verified(&cache, n)), "block {n} from host memory");
        }
        let retired = cache.stats().device_retired.expect("out of service");
        assert!(retired.contains("the driver did not say for 5s"), "{retired}");
        block_on(cache.close()).expect("close");
    });
}

/// The current context of this thread, as the driver's handle.
fn current() -> usize {
    let mut context = std::ptr::null_mut();
    // SAFETY: the call writes one handle.
    assert_eq!(unsafe { sys::cuCtxGetCurrent(&mut context) }, sys::CUresult::CUDA_SUCCESS);
    context.addr()
}

/// A stream of the caller, made on a thread whose context is of no interest.
fn stream(gpu: &Gpu) -> usize {
    gpu.make_current().expect("a context");
    let mut stream = std::ptr::null_mut();
    // SAFETY: the context is current; a handle is written.
    let created = unsafe { sys::cuStreamCreateWithPriority(&mut stream, 0, 0) };
    assert_eq!(created, sys::CUresult::CUDA_SUCCESS);
    stream.expose_provenance()
}

/// Calls that may be made on a caller's thread leave the context that it has, also none or that of another device.
#[test]
fn a_caller_keeps_its_context() {
    with_double("answers::a_caller_keeps_its_context", "", || {
        // SAFETY: this process has no other thread that reads or writes its environment.
        unsafe { std::env::set_var("DOUBLE_DEVICES", "2") };
        let [gpu, other] = [0, 1].map(|ordinal| Gpu::open(ordinal).expect("the double has two devices"));
        let cache = open();
        let stream = thread::scope(|scope| scope.spawn(|| stream(&gpu)).join()).expect("no panic");
        for before in [None, Some(other)] {
            if let Some(other) = &before {
                other.make_current().expect("a context");
            }
            let expected = current();
            assert_eq!(expected == 0, before.is_none());
            let pool = DeviceBuffer::new(gpu.clone(), BLOCK_BYTES).expect("memory");
            let base = pool.base().as_ptr();
            gpu.memory_bytes().expect("known");
            gpu.export_memory(base.expose_provenance(), BLOCK_BYTES).expect("exported");
            gpu.export_dma_buf(base.expose_provenance(), BLOCK_BYTES).expect("exported");
            // SAFETY: the pool lives until the region is given back below, and nothing else uses it.
            let lent = unsafe { kvhoist::Memory::device(base, BLOCK_BYTES) };
            let region = block_on(cache.register(lent)).expect("registered");
            let places = [vec![kvhoist::Segment { ptr: base, len: BLOCK_BYTES }]];
            allow_events(0);
            let load = block_on(cache.load_layers(&[key(1)], &places, &[0])).expect("taken on");
            // SAFETY: a stream of the device, which is not destroyed.
            unsafe { load.stream_wait(0, stream) }.expect("waits");
            allow_events(i32::MAX);
            assert!(block_on(load.blocks()).into_iter().all(|result| result.expect("loaded")));
            block_on(cache.unregister(&region)).expect("its own region");
            drop((load, pool));
            assert_eq!(current(), expected);
        }
        block_on(cache.close()).expect("close");
        drop((cache, gpu));
    });
}

/// A thread captures a stream in global mode: what the cache does on its own threads and on callers' neither fails nor
/// ends the capture.
#[test]
fn a_capture_of_a_stream_goes_on() {
    with_double("answers::a_capture_of_a_stream_goes_on", "", || {
        let directory = common::directory();
        let settings = common::config(&directory, kvhoist::StorageKind::Auto, 4, 32);
        let settings = settings.device(DeviceKind::Cuda).device_blocks(4);
        let cache = block_on(Cache::open(settings)).expect("the double is a device");
        (0..32).for_each(|n| block_on(common::store(&cache, n)));
        ask_double(c"double_capture", 1);
        (0..32).for_each(|n| assert_is_right(&cache, n));
        drop(DeviceBuffer::new(Gpu::open(0).expect("a device"), BLOCK_BYTES).expect("memory"));
        assert_eq!(ask_double(c"double_capture", 0), 1, "nothing ended the capture");
        let mut event = std::ptr::null_mut();
        ask_double(c"double_capture", 1);
        // SAFETY: the calls write a handle, look at it, and destroy it.
        let asked = unsafe {
            assert_eq!(sys::cuEventCreate(&mut event, 0), sys::CUresult::CUDA_SUCCESS);
            let asked = sys::cuEventQuery(event);
            sys::cuEventDestroy_v2(event);
            asked
        };
        // The thread has the mode that it had.
        assert_eq!(asked, sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        assert_eq!(ask_double(c"double_capture", 0), 0, "that ended the capture");
        block_on(cache.close()).expect("close");
    });
}

/// Copies of 64 bytes each from `host` to `device`, in another order there, by an engine that uses the kernel.
struct Scattered {
    host: Arc<Arena>,
    device: Arc<DeviceBuffer>,
    engine: CudaCopy,
}

impl Scattered {
    fn new(gpu: &Arc<Gpu>, count: usize) -> Scattered {
        let host = Arc::new(Arena::new(count.div_ceil(1024) as u32, 64 << 10).expect("memory"));
        let device = Arc::new(DeviceBuffer::new(Arc::clone(gpu), count * 64).expect("memory"));
        let options = CudaCopyOptions { method: Some(CopyMethod::Kernel), blocks_max: 16 };
        let engine = CudaCopy::new(gpu, &host, options).expect("an engine");
        Scattered { host, device, engine }
    }

    /// Copies of so many pieces; each has a byte by its number.
    fn batch(&self, count: usize, byte: impl Fn(usize) -> u8) -> CopyBatch {
        let start = self.host.slot_ptr(0).as_ptr();
        // SAFETY: memory of the arena, which nobody else knows.
        (0..count).for_each(|at| unsafe { start.add(at * 64).write_bytes(byte(at), 64) });
        let op = |at: usize| CopyOp { src: start.wrapping_add(at * 64), dst: self.place(count, at), len: 64 };
        let ops = (0..count).map(op).collect();
        let owners = vec![Arc::clone(&self.host) as _, Arc::clone(&self.device) as _];
        // SAFETY: the owners keep both memories, and nobody else uses them.
        unsafe { CopyBatch::new(ops, Direction::HostToDevice, owners) }
    }

    fn place(&self, count: usize, at: usize) -> *mut u8 {
        self.device.base().as_ptr().wrapping_add((count - 1 - at) * 64)
    }

    /// Copies, and looks at all bytes.
    async fn copy(&self, count: usize, stamp: u8) -> Result<(), Error> {
        let byte = |at: usize| (at % 251) as u8 ^ stamp;
        self.engine.copy(self.batch(count, byte)).await.0?;
        for at in 0..count {
            // SAFETY: the double's device memory is host memory.
            let found = unsafe { std::slice::from_raw_parts(self.place(count, at), 64) };
            assert!(found.iter().all(|&found| found == byte(at)), "copy {at} of {count}");
        }
        Ok(())
    }
}

/// Memory is pinned at open only: a driver that pins may wait for the device, and the device for the reactor.
#[test]
fn no_copy_pins_memory() {
    with_double("answers::no_copy_pins_memory", "", || {
        // More descriptors than there is memory for.
        const COUNT: usize = 10 * 16_384 + 17;
        let gpu = Gpu::open(0).expect("the double is a device");
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let copies = async {
            let scattered = Scattered::new(&gpu, COUNT);
            let pins = ask_double(c"double_pins", 0);
            for (count, stamp) in [(100, 1), (COUNT, 2), (3 * 16_384, 3), (COUNT, 4)] {
                scattered.copy(count, stamp).await.expect("copied");
                assert_eq!(ask_double(c"double_pins", 0), pins, "after {count} copies");
            }
            // Launches that fail keep what they have, too.
            for stamp in 5..15 {
                ask_double(c"double_refuse", 1);
                scattered.copy(100, stamp).await.expect_err("refused");
                scattered.copy(100, stamp).await.expect("copied");
                assert_eq!(ask_double(c"double_pins", 0), pins, "after {stamp} refusals");
            }
        };
        tokio::task::LocalSet::new().block_on(&runtime, copies);
    });
}

/// An engine that goes while its copies are on their way waits for them, or leaks what they use.
#[test]
fn an_engine_that_goes_frees_nothing_in_use() {
    with_double("answers::an_engine_that_goes_frees_nothing_in_use", "", || {
        let gpu = Gpu::open(0).expect("the double is a device");
        for is_answered in [true, false] {
            let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
            let begun = async {
                let scattered = Scattered::new(&gpu, 100);
                allow_events(0);
                let mut copy = Box::pin(scattered.engine.copy(scattered.batch(100, |at| at as u8)));
                assert!(copy.as_mut().now_or_never().is_none(), "the copy is on its way");
                drop(copy);
                ask_double(c"double_doubt", if is_answered { 0 } else { i32::MAX });
                (scattered.host, ask_double(c"double_pins", 0))
            };
            let (host, pins) = tokio::task::LocalSet::new().block_on(&runtime, begun);
            // With the set of tasks the engine has gone: pins of the arena, 8 of descriptors, 2 for checksums. A copy
            // that may still run keeps its descriptors and the arena, which it and its pin own.
            let (owners, unpinned) = (Arc::strong_count(&host), ask_double(c"double_pins", 0) - pins);
            assert_eq!((owners, unpinned), if is_answered { (1, 11) } else { (3, 9) }, "answered: {is_answered}");
            ask_double(c"double_doubt", 0);
            allow_events(i32::MAX);
        }
    });
}

/// As of copies.
#[test]
fn no_checksum_pins_memory() {
    with_double("answers::no_checksum_pins_memory", "", || {
        let directory = common::directory();
        let settings = common::config(&directory, kvhoist::StorageKind::Auto, 4, 32);
        let settings = settings.device(DeviceKind::Cuda).device_blocks(4).copy(CopyMethod::Loop);
        let cache = block_on(Cache::open(settings)).expect("the double is a device");
        (0..32).for_each(|n| block_on(common::store(&cache, n)));
        let pins = ask_double(c"double_pins", 0);
        for n in 0..16 {
            // The checksum's: no other kernel is used. The processor sums up what the device did not.
            ask_double(c"double_refuse", 1);
            assert_is_right(&cache, n);
            assert_is_right(&cache, n + 16);
            assert_eq!(ask_double(c"double_pins", 0), pins, "after block {n}");
        }
        block_on(cache.close()).expect("close");
    });
}

#[test]
fn every_error_that_ends_a_context_stops_the_device() {
    with_double("answers::every_error_that_ends_a_context_stops_the_device", "", || {
        use sys::CUresult as E;
        for error in [
            E::CUDA_ERROR_ECC_UNCORRECTABLE,
            E::CUDA_ERROR_NVLINK_UNCORRECTABLE,
            E::CUDA_ERROR_CONTAINED,
            E::CUDA_ERROR_TENSOR_MEMORY_LEAK,
            E::CUDA_ERROR_MPS_CLIENT_TERMINATED,
            E::CUDA_ERROR_EXTERNAL_DEVICE,
        ] {
            let cache = open();
            ask_double(c"double_stop", error as i32);
            block_on(cache.fetch_to_device(&key(1))).expect_err("the device stopped");
            let retired = cache.stats().device_retired.expect("out of service");
            assert!(retired.starts_with("the device stopped: "), "{error:?}: {retired}");
            block_on(cache.close()).expect("close");
            ask_double(c"double_stop", 0);
        }
    });
}

/// What the device reads and writes while this process changes it must not become copy-on-write.
#[test]
fn a_forked_child_has_no_part_of_pinned_memory() {
    with_double("answers::a_forked_child_has_no_part_of_pinned_memory", "", || {
        let cache = open();
        assert_eq!(ask_double(c"double_inherited", 0), 0);
        block_on(cache.close()).expect("close");
    });
}

#[test]
fn a_method_that_fails_is_left_out_of_the_measurements() {
    with_double("answers::a_method_that_fails_is_left_out_of_the_measurements", "", || {
        let gpu = Gpu::open(0).expect("the double is a device");
        ask_double(c"double_refuse", 1);
        let scattered = Scattered::new(&gpu, 100);
        let measured =
            |to_device, method| scattered.engine.calibration().estimate(to_device, method, 4096, 8).is_some();
        for method in CopyMethod::ALL {
            assert_eq!(measured(true, method), method != CopyMethod::Kernel, "{method}");
            assert!(measured(false, method), "{method}");
        }
    });
}
