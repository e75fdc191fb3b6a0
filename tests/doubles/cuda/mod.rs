//! The device tier on a CUDA device, without one: over a double of the driver's library (`libcuda.c`), whose copies
//! take effect late, and which can be told to fail. Each test runs in a process of its own, because a process loads
//! the library once.

#[path = "../../common/apart.rs"]
#[allow(dead_code, reason = "a part of it is used here")]
mod apart;
use crate::common;
mod answers;
mod layers;
mod two_devices;

use std::{path::Path, process::Command, sync::OnceLock};

use common::{BLOCK_BYTES, key, payload};
use cudarc::driver::sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
use kvhoist::{
    Cache, Config, CopyMethod, DeviceKind, Error, Layout, Tier, block_on,
    internals::{
        device::cuda::discover,
        gpu::{DeviceBuffer, Gpu},
        memory::DeviceMemory,
    },
};
use tempfile::TempDir;

/// The directory of the double, built once a process.
fn double() -> &'static Path {
    static DOUBLE: OnceLock<TempDir> = OnceLock::new();
    DOUBLE
        .get_or_init(|| {
            let directory = common::directory();
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/doubles/cuda/libcuda.c");
            let mut compiler = Command::new("cc");
            compiler.args(["-shared", "-fPIC", "-O1", "-o"]).arg(directory.path().join("libcuda.so")).arg(source);
            assert!(compiler.status().expect("Rust links with cc").success(), "the double does not compile");
            directory
        })
        .path()
}

/// Runs the body in a process that finds the double, told to fail so.
fn with_double(name: &str, fault: &str, body: impl FnOnce()) {
    let ours = std::env::var("DOUBLE_FAULT").is_ok();
    if ours {
        return apart::apart(name, body);
    }
    let output = apart::command(name, "").env("LD_LIBRARY_PATH", double()).env("DOUBLE_FAULT", fault).output();
    let output = output.expect("this test starts again");
    assert!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
}

/// A function of the double that NVIDIA's library does not have.
fn of_double(name: &std::ffi::CStr) -> *mut libc::c_void {
    // SAFETY: the library is loaded already; a handle to it is looked up, and none is closed.
    let library = unsafe { libc::dlopen(c"libcuda.so".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    assert!(!library.is_null(), "the double is loaded");
    // SAFETY: a valid handle and a name.
    let function = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!function.is_null(), "the double has {name:?}");
    function
}

/// Makes the double's device stop.
fn stop_device() {
    ask_double(c"double_stop", CUDA_ERROR_ILLEGAL_ADDRESS as i32);
}

/// Lets so many more events be reached.
fn allow_events(count: i32) {
    // SAFETY: the function of this name takes an integer and gives nothing.
    unsafe { std::mem::transmute::<*mut libc::c_void, extern "C" fn(i32)>(of_double(c"double_allow"))(count) };
}

/// Calls a function of the double that takes a number, or nothing, and gives one.
fn ask_double(name: &std::ffi::CStr, number: i32) -> i32 {
    // SAFETY: functions of these names take an integer or nothing, and give one.
    unsafe { std::mem::transmute::<*mut libc::c_void, extern "C" fn(i32) -> i32>(of_double(name))(number) }
}

fn config(device_blocks: u32) -> Config {
    Config::default()
        .block_bytes(BLOCK_BYTES)
        .host_blocks(64)
        .device_blocks(device_blocks)
        .device(DeviceKind::Cuda)
        // Segments of which some are aligned for the widest loads and some are not.
        .device_layout(Layout::new(vec![4096, 4096 + 4, 100, BLOCK_BYTES - 8296]).expect("it is one block"))
}

/// Blocks go to the device, out of it again as others come, and are right there, by every way there is.
fn round_trips(copy: Option<CopyMethod>) {
    let cache = block_on(Cache::open(config(8).copy(copy))).expect("the double is a device");
    for n in 0..32 {
        block_on(common::store(&cache, n));
    }
    for n in (0..32).chain((0..32).rev()) {
        let lease = block_on(cache.fetch_to_device(&key(n))).expect("fetch").expect("stored");
        let bytes = block_on(cache.read_device(&lease, Vec::new())).expect("read");
        assert!(bytes == payload(n, BLOCK_BYTES), "block {n} by {}", lease.route());
    }
    block_on(cache.close()).expect("close");
}

#[test]
fn blocks_are_right_by_every_method() {
    with_double("blocks_are_right_by_every_method", "", || {
        round_trips(None);
        CopyMethod::ALL.into_iter().for_each(|method| round_trips(Some(method)));
    });
}

#[test]
fn many_at_once_are_right() {
    with_double("many_at_once_are_right", "", || {
        let cache = block_on(Cache::open(config(16))).expect("the double is a device");
        for n in 0..64 {
            block_on(common::store(&cache, n));
        }
        let threads: Vec<_> = (0..8_u64)
            .map(|thread| {
                let cache = cache.clone();
                std::thread::spawn(move || {
                    for i in 0..64 {
                        let n = common::mix(thread * 1000 + i) % 64;
                        let lease = block_on(cache.fetch_to_device(&key(n))).expect("fetch").expect("stored");
                        let bytes = block_on(cache.read_device(&lease, Vec::new())).expect("read");
                        assert!(bytes == payload(n, BLOCK_BYTES), "block {n}");
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
        block_on(cache.close()).expect("close");
    });
}

/// Blocks from disk to the device, one of which is damaged; how often the device was asked for checksums.
fn damaged_block_is_a_miss() -> u64 {
    let directory = common::directory();
    let settings =
        common::config(&directory, kvhoist::StorageKind::Auto, 8, 32).device(DeviceKind::Cuda).device_blocks(4);
    let cache = block_on(Cache::open(settings.clone())).expect("the double is a device");
    (0..16).for_each(|n| block_on(common::store(&cache, n)));
    block_on(cache.close()).expect("close");
    common::damage(&directory, &payload(5, BLOCK_BYTES));
    let cache = block_on(Cache::open(settings)).expect("the double is a device");
    for n in 0..16 {
        let lease = block_on(cache.fetch_to_device(&key(n))).expect("served");
        assert_eq!(lease.is_some(), n != 5, "block {n}");
        if let Some(lease) = lease {
            let bytes = block_on(cache.read_device(&lease, Vec::new())).expect("read");
            assert!(bytes == payload(n, BLOCK_BYTES), "block {n}");
        }
    }
    let stats = cache.stats();
    assert_eq!((stats.checksum_failures, stats.changed_memory, stats.quarantined), (1, 0, 0));
    block_on(cache.close()).expect("close");
    // SAFETY: the function of this name takes nothing and gives a number.
    unsafe {
        std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> u64>(of_double(c"double_checksum_launches"))()
    }
}

#[test]
fn blocks_from_disk_are_verified_by_the_device() {
    with_double("blocks_from_disk_are_verified_by_the_device", "", || assert!(damaged_block_is_a_miss() >= 16));
}

#[test]
fn a_device_without_the_checksum_kernel_leaves_it_to_the_processor() {
    let name = "a_device_without_the_checksum_kernel_leaves_it_to_the_processor";
    with_double(name, "checksum", || assert_eq!(damaged_block_is_a_miss(), 0));
}

#[test]
fn a_pool_of_the_caller_is_filled_and_stored_from() {
    with_double("a_pool_of_the_caller_is_filled_and_stored_from", "", || {
        let cache = block_on(Cache::open(config(4))).expect("the double is a device");
        let gpu = Gpu::open(0).expect("the double is a device");
        let pool = DeviceBuffer::new(gpu, 16 * BLOCK_BYTES).expect("memory");
        // SAFETY: the pool lives until the region is given back below, and nothing else uses it.
        let lent = unsafe { kvhoist::Memory::device(pool.base().as_ptr(), pool.bytes()) };
        let region = kvhoist::block_on(cache.register(lent)).expect("registered");
        common::load_and_store(&cache, pool.base().as_ptr());
        block_on(cache.unregister(&region)).expect("its own region");
        block_on(cache.close()).expect("close");
    });
}

/// Pairs of equal blocks, one of them damaged on disk, are loaded into one place, where the right one arrives too. What
/// is in host memory afterwards is right.
#[test]
fn what_is_in_a_callers_memory_proves_no_block() {
    with_double("what_is_in_a_callers_memory_proves_no_block", "", || {
        const PAIRS: u64 = 8;
        let directory = common::directory();
        let settings = common::config(&directory, kvhoist::StorageKind::Auto, 8, 32);
        let settings = settings.device(DeviceKind::Cuda).device_blocks(4);
        let cache = block_on(Cache::open(settings.clone())).expect("the double is a device");
        for n in 0..2 * PAIRS {
            block_on(cache.store(&key(n), None, &payload(n / 2, BLOCK_BYTES))).expect("store");
        }
        block_on(cache.close()).expect("close");
        (0..PAIRS).for_each(|pair| common::damage(&directory, &payload(pair, BLOCK_BYTES)));
        let cache = block_on(Cache::open(settings)).expect("the double is a device");
        let pool = DeviceBuffer::new(Gpu::open(0).expect("the double is a device"), BLOCK_BYTES).expect("memory");
        let base = pool.base().as_ptr();
        // SAFETY: the pool lives until the region is given back below, and nothing else uses it.
        let region =
            block_on(cache.register(unsafe { kvhoist::Memory::device(base, BLOCK_BYTES) })).expect("registered");
        let place = || vec![kvhoist::Segment { ptr: base, len: BLOCK_BYTES }];
        for pair in 0..PAIRS {
            // Either one may be copied last.
            for keys in [[key(2 * pair), key(2 * pair + 1)], [key(2 * pair + 1), key(2 * pair)]] {
                drop(block_on(cache.load_into(&keys, &[place(), place()])).expect("begun"));
            }
            let leases = [2 * pair, 2 * pair + 1].map(|n| block_on(cache.fetch(&key(n))).expect("fetch"));
            assert_eq!(leases.iter().flatten().count(), 1, "the other one of pair {pair} is damaged");
            leases.iter().flatten().for_each(|lease| assert!(**lease == payload(pair, BLOCK_BYTES)[..], "{pair}"));
        }
        block_on(cache.unregister(&region)).expect("its own region");
        block_on(cache.close()).expect("close");
    });
}

#[test]
fn what_is_dropped_in_mid_copy_leaves_nothing_behind() {
    with_double("what_is_dropped_in_mid_copy_leaves_nothing_behind", "", || {
        let cache = block_on(Cache::open(config(2))).expect("the double is a device");
        for n in 0..16 {
            block_on(common::store(&cache, n));
        }
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        for n in 0..16 {
            let wanted = key(n);
            let mut fetch = std::pin::pin!(cache.fetch_to_device(&wanted));
            // Begun, and dropped, at whatever point it is by now.
            let _ = fetch.as_mut().poll(&mut context);
        }
        // Two slots: were one of them lost, this would come to an end only at the deadline.
        end_with_all_on_the_device(cache);
    });
}

/// Checks the 16 blocks of a cache by way of its device, and closes it.
fn end_with_all_on_the_device(cache: Cache) {
    for n in 0..16 {
        let lease = block_on(cache.fetch_to_device(&key(n))).expect("fetch").expect("stored");
        let bytes = block_on(cache.read_device(&lease, Vec::new())).expect("read");
        assert!(bytes == payload(n, BLOCK_BYTES), "block {n}");
    }
    kvhoist::internals::validate(&cache).expect("valid");
    block_on(cache.close()).expect("close");
}

#[test]
fn memory_that_cannot_be_pinned_is_copied_all_the_same() {
    with_double("memory_that_cannot_be_pinned_is_copied_all_the_same", "register", || {
        // Nor can the descriptions of the kernel: whatever is asked for, each copy is a call of the driver's own.
        round_trips(None);
        round_trips(Some(CopyMethod::Kernel));
    });
}

#[test]
fn a_device_without_memory_is_said_to_have_none() {
    with_double("a_device_without_memory_is_said_to_have_none", "alloc", || {
        let error = block_on(Cache::open(config(8))).expect_err("no memory").to_string();
        assert!(error.contains("bytes of device memory were refused") && error.contains("are free"), "{error}");
    });
}

#[test]
fn without_a_usable_driver_the_reason_is_told() {
    for fault in ["init", "none"] {
        let name = "without_a_usable_driver_the_reason_is_told";
        with_double(name, fault, || {
            let is_init = std::env::var("DOUBLE_FAULT").is_ok_and(|fault| fault == "init");
            let reason = if is_init { "cuInit: " } else { "the driver shows no GPU to this process" };
            let error = Gpu::open(0).expect_err("no device").to_string();
            assert!(error.contains(reason), "{error}");
            // Asked for in any case: refused. Asked for where there is one: simulated.
            assert!(matches!(block_on(Cache::open(config(8))), Err(Error::Unavailable { tier: "device", .. })));
            let cache = block_on(Cache::open(config(8).device(DeviceKind::Auto))).expect("simulated");
            block_on(common::store(&cache, 1));
            assert!(block_on(cache.fetch_to_device(&key(1))).expect("fetch").is_some());
        });
    }
}

#[test]
fn without_a_library_the_device_is_simulated_or_refused() {
    if discover().driver.is_ok() {
        common::skip::skipped("this machine has NVIDIA's driver");
        return;
    }
    let error = block_on(Cache::open(config(8))).expect_err("no library").to_string();
    assert!(error.contains("libcuda.so was not found"), "{error}");
    let cache = block_on(Cache::open(config(8).device(DeviceKind::Auto))).expect("simulated");
    block_on(common::store(&cache, 1));
    assert!(block_on(cache.fetch_to_device(&key(1))).expect("fetch").is_some());
}

#[test]
fn a_device_that_stops_takes_nothing_else_with_it() {
    with_double("a_device_that_stops_takes_nothing_else_with_it", "", || {
        let cache = block_on(Cache::open(config(8))).expect("the double is a device");
        for n in 0..16 {
            block_on(common::store(&cache, n));
        }
        assert!(block_on(cache.fetch_to_device(&key(0))).expect("fetch").is_some());
        let leased = block_on(cache.fetch_to_device(&key(1))).expect("fetch").expect("stored");
        stop_device();
        let error = block_on(cache.fetch_to_device(&key(2))).expect_err("the device stopped").to_string();
        assert!(error.starts_with("copy by cuda: ") && error.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{error}");
        // From now on no block on the device is served, resident or not.
        for n in 0..16 {
            let error = block_on(cache.fetch_to_device(&key(n))).expect_err("the device stopped").to_string();
            assert!(error.starts_with("device tier is not available: the device stopped: "), "{error}");
            assert!(block_on(common::fetch_verified(&cache, n)), "block {n} from host memory");
        }
        let stats = cache.stats();
        assert!(stats.device_retired.as_ref().is_some_and(|reason| reason.contains("CUDA_ERROR_ILLEGAL_ADDRESS")));
        assert_eq!(stats.tier(Tier::Device).resident, 1, "what is leased");
        block_on(cache.read_device(&leased, Vec::new())).expect_err("the device stopped");
        drop(leased);
        kvhoist::internals::validate(&cache).expect("valid");
        block_on(cache.close()).expect("close");
    });
}

#[test]
fn a_wrong_method_is_refused() {
    with_double("a_wrong_method_is_refused", "", || {
        // SAFETY: this process has no other thread that reads or writes its environment.
        unsafe { std::env::set_var("KVHOIST_COPY", "gdr") };
        match block_on(Cache::open(config(8))) {
            Err(Error::Config { field: "KVHOIST_COPY", found, .. }) => assert_eq!(found, "gdr"),
            other => panic!("{other:?}"),
        }
    });
}
