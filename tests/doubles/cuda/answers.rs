//! What the driver answers when it does not answer what was asked.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
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
