//! What the driver answers when it does not answer what was asked.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use cudarc::driver::sys;

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
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::SeqCst) {
                    ask_double(c"double_doubt", 2);
                    thread::yield_now();
                }
            });
            for n in (0..32).chain(0..32) {
                assert_is_right(&cache, n);
            }
            is_over.store(true, Ordering::SeqCst);
        });
        let stats = cache.stats();
        assert_eq!((stats.checksum_failures, stats.copy_errors, stats.device_retired), (0, 0, None));
        block_on(cache.close()).expect("close");
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
