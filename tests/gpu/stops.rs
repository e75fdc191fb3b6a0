//! Another kernel in the process accesses invalid memory, and so takes the device's context down.

use kvhoist::Error;

use super::*;
use crate::{
    apart::apart,
    common::{key, payload},
};

/// Writes to an unmapped address.
const CRASH: &str = "\
.version 7.0
.target sm_80
.address_size 64
.visible .entry crash()
{
    .reg .u64 %address;
    .reg .u32 %value;
    mov.u64 %address, 16;
    mov.u32 %value, 1;
    st.global.u32 [%address], %value;
    ret;
}
\0";

const BLOCK_BYTES: usize = 128 << 10;

/// Runs the kernel; false where the device cannot load it.
fn crash(gpu: &Gpu) -> bool {
    gpu.make_current().expect("a context");
    let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the context is current; the image is a string that ends in 0.
    if unsafe { sys::cuModuleLoadData(&mut module, CRASH.as_ptr().cast()) } != CUresult::CUDA_SUCCESS {
        return false;
    }
    // SAFETY: our own module, and the name of a kernel in it.
    succeeded(unsafe { sys::cuModuleGetFunction(&mut function, module, c"crash".as_ptr()) });
    let none = std::ptr::null_mut();
    // SAFETY: our own function, which takes nothing. What it does to the context is what is tested.
    succeeded(unsafe { sys::cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, none, none.cast(), none.cast()) });
    // SAFETY: the stream that it was put into.
    let ended = unsafe { sys::cuStreamSynchronize(none) };
    assert_eq!(ended, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, "the kernel was not stopped");
    true
}

#[test]
fn a_device_that_stops_takes_nothing_else_with_it() {
    if device().is_none() {
        return;
    }
    if std::env::var_os("KVHOIST_SANITIZED").is_some() {
        common::skip::skipped("a tool that looks for wrong accesses would find this one (KVHOIST_SANITIZED is set)");
        return;
    }
    apart("stops::a_device_that_stops_takes_nothing_else_with_it", || {
        let gpu = device().expect("it was just there");
        let directory = directory();
        let cache = open(config(&directory, BLOCK_BYTES, 16, 32));
        (0..16).for_each(|n| block_on(common::store(&cache, n)));
        assert!(block_on(cache.fetch_to_device(&key(0))).expect("fetch").is_some());
        let pool = Pool::new(&gpu, 16 * BLOCK_BYTES);
        let region = pool.register(&cache);
        if !crash(&gpu) {
            common::skip::skipped("this device does not load the kernel");
            return;
        }
        let place = |n: usize| {
            let ptr = pool.base().wrapping_add(n * BLOCK_BYTES);
            vec![
                kvhoist::Segment { ptr, len: BLOCK_BYTES / 2 },
                kvhoist::Segment { ptr: ptr.wrapping_add(BLOCK_BYTES / 2), len: BLOCK_BYTES / 2 },
            ]
        };
        let keys: Vec<_> = (0..16).map(key).collect();
        let places: Vec<_> = (0..16).map(place).collect();
        let load = block_on(cache.load_layers(&keys, &places, &[0, 1])).expect("taken on");
        for layer in 0..2 {
            let (leading, error) = block_on(load.layer(layer)).expect("a layer");
            assert!(leading == 0 && error.is_some(), "{leading}, {error:?}");
        }
        let error = block_on(cache.fetch_to_device(&key(1))).expect_err("the device stopped");
        assert!(matches!(error, Error::Unavailable { tier: "device", .. }), "{error}");
        assert!(cache.stats().device_retired.is_some());
        for n in 0..16 {
            let lease = block_on(cache.fetch(&key(n))).expect("fetch").expect("stored");
            assert_same(&lease, &payload(n, BLOCK_BYTES), &format!("block {n} from host memory"));
        }
        block_on(cache.unregister(&region)).expect("its own region");
        block_on(cache.close()).expect("close");
    });
}
