//! A thread captures a stream, as engines do for CUDA graphs, while other threads use the cache.

use std::thread;

use super::*;
use crate::common::{key, payload};

const BLOCK_BYTES: usize = 128 << 10;
const BLOCKS: u64 = 64;

/// In the mode in which a capture forbids other threads the most: no call of the cache is forbidden, which would fail
/// and end the capture; no block is wrong; callers keep their context.
#[test]
fn a_capture_in_another_thread_goes_on() {
    let Some(gpu) = device() else { return };
    let directory = directory();
    let cache = open(config(&directory, BLOCK_BYTES, 8, BLOCKS as u32));
    (0..BLOCKS).for_each(|n| block_on(common::store(&cache, n)));
    let engine_memory = Pool::new(&gpu, 1 << 20);
    gpu.make_current().expect("a context");
    let mut stream = std::ptr::null_mut();
    // SAFETY: the context is current; a handle is written.
    succeeded(unsafe { sys::cuStreamCreate(&mut stream, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32) });
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    // SAFETY: our own stream, to which nothing was put.
    succeeded(unsafe { sys::cuStreamBeginCapture_v2(stream, mode) });
    // SAFETY: our own memory, to which nothing is on its way.
    succeeded(unsafe { sys::cuMemsetD8Async(engine_memory.address(), 1, engine_memory.bytes(), stream) });
    thread::scope(|scope| {
        scope.spawn(|| {
            for n in (0..BLOCKS).chain(0..BLOCKS) {
                let lease = block_on(cache.fetch_to_device(&key(n))).expect("fetch").expect("stored");
                let bytes = block_on(cache.read_device(&lease, Vec::new())).expect("read");
                assert_same(&bytes, &payload(n, BLOCK_BYTES), &format!("block {n} by {}", lease.route()));
            }
            drop(DeviceBuffer::new(Arc::clone(&gpu), 1 << 20).expect("device memory"));
            let mut context = std::ptr::null_mut();
            // SAFETY: a handle is written.
            succeeded(unsafe { sys::cuCtxGetCurrent(&mut context) });
            assert!(context.is_null(), "this thread had no context");
        });
    });
    let (mut graph, mut run) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the capture that this thread began; what it made is run once, and destroyed.
    unsafe {
        succeeded(sys::cuStreamEndCapture(stream, &mut graph));
        succeeded(sys::cuGraphInstantiateWithFlags(&mut run, graph, 0));
        succeeded(sys::cuGraphLaunch(run, stream));
        succeeded(sys::cuStreamSynchronize(stream));
        succeeded(sys::cuGraphExecDestroy(run));
        succeeded(sys::cuGraphDestroy(graph));
        succeeded(sys::cuStreamDestroy_v2(stream));
    }
    assert_same(&engine_memory.read(), &[1; 1 << 20], "what the graph wrote");
    let stats = cache.stats();
    assert_eq!((stats.copy_errors, stats.checksum_failures, stats.device_retired), (0, 0, None));
    block_on(cache.close()).expect("close");
}
