//! What a library does that does not work as it should, and what callers notice of it: nothing but the time.

use std::time::{Duration, Instant};

use kvhoist::{Cache, EngineMode, Route, Stats, Tier, block_on, internals::device::cufile::Driver};

use super::{
    common,
    doubles::{BLOCKS, DEVICE_BLOCKS, STUCK_MS, ask, close, cold, config, fetch, fetch_all, open, with_double},
};

#[test]
fn short_transfers_are_resumed() {
    with_double("trouble::short_transfers_are_resumed", &["short"], |_| {
        let directory = common::directory();
        let cache = cold(config(&directory));
        fetch_all(&cache);
        let stats = close(cache);
        assert!(stats.cufile && stats.route_blocks(Route::DiskToHostToDevice) == 0, "{stats:?}");
        assert_eq!((stats.cufile_errors, stats.checksum_failures), (0, 0));
    });
}

#[test]
fn one_that_is_refused_among_others_does_not_fail_them() {
    with_double("trouble::one_that_is_refused_among_others_does_not_fail_them", &["submit"], |_| {
        let directory = common::directory();
        let cache = cold(config(&directory));
        fetch_all(&cache);
        let stats = close(cache);
        assert!(stats.cufile && stats.cufile_errors == 0, "{stats:?}");
    });
}

#[test]
fn failures_go_through_host_memory_and_end_the_route_when_they_go_on() {
    with_double(
        "trouble::failures_go_through_host_memory_and_end_the_route_when_they_go_on",
        &["event", "ends"],
        |mode| {
            let directory = common::directory();
            let cache = cold(config(&directory));
            assert!(cache.stats().cufile, "the probe is no batch");
            for n in 0..BLOCKS {
                assert_eq!(fetch(&cache, n), "disk_to_host_to_device");
            }
            let stats = close(cache);
            assert!(!stats.cufile && stats.cufile_errors == 3, "{stats:?}");
            let why = if mode == "event" { "failed: Input/output error" } else { "0 bytes of " };
            assert!(stats.cufile_reason.starts_with("3 requests in a row failed"), "{stats:?}");
            assert!(stats.cufile_reason.contains(why), "{stats:?}");
            assert_eq!(
                (stats.checksum_failures, stats.quarantined, stats.read_errors),
                (0, 0, 0),
                "no fault of the disk"
            );
        },
    );
}

#[test]
fn failures_now_and_then_do_not_end_the_route() {
    with_double("trouble::failures_now_and_then_do_not_end_the_route", &["once"], |_| {
        let directory = common::directory();
        // One transfer a block: one in two fails, three in all.
        let cache = cold(config(&directory).device_layout(None));
        for n in 0..BLOCKS {
            fetch(&cache, n);
        }
        let stats = close(cache);
        assert!(stats.cufile && stats.cufile_errors == 3, "{stats:?}");
        assert_eq!(stats.route_blocks(Route::DiskToHostToDevice), 3);
        assert_eq!(stats.route_blocks(Route::DiskToDevice), BLOCKS - 3);
    });
}

#[test]
fn wrong_bytes_are_seen_by_nobody_and_end_the_route() {
    with_double("trouble::wrong_bytes_are_seen_by_nobody_and_end_the_route", &["wrong"], |_| {
        let directory = common::directory();
        let cache = cold(config(&directory));
        for n in 0..BLOCKS {
            assert_eq!(fetch(&cache, n), "disk_to_host_to_device");
        }
        let stats = close(cache);
        assert!(!stats.cufile && stats.cufile_reason.contains("wrong bytes"), "{stats:?}");
        // The disk's are right: nothing of it is given up.
        assert_eq!((stats.checksum_failures, stats.quarantined), (0, 0));
    });
}

#[test]
fn a_block_that_is_wrong_on_disk_is_no_fault_of_libcufile() {
    with_double("trouble::a_block_that_is_wrong_on_disk_is_no_fault_of_libcufile", &["direct"], |_| {
        use std::os::unix::fs::FileExt;
        let directory = common::directory();
        block_on(cold(config(&directory)).close()).expect("close");
        // Every slot's last byte.
        let file = std::fs::OpenOptions::new().write(true).open(common::store_file(&directory)).expect("the store");
        let bytes = file.metadata().expect("its size").len();
        (1..=256).for_each(|slot| file.write_all_at(&[0x5a], bytes - (slot - 1) * 16384 - 1).expect("written"));
        let cache = open(config(&directory));
        assert!(cache.stats().cufile, "{:?}", cache.stats());
        for n in 0..8 {
            assert!(block_on(cache.fetch_to_device(&common::key(n))).expect("fetch").is_none(), "block {n}");
        }
        let stats = close(cache);
        assert!(stats.cufile, "{stats:?}");
        assert_eq!((stats.checksum_failures, stats.changed_memory, stats.quarantined), (8, 0, 0));
    });
}

/// Blocks of stuck requests go through host memory, and their slots stay reserved.
#[test]
fn what_does_not_come_back_is_left_to_the_library() {
    with_double("trouble::what_does_not_come_back_is_left_to_the_library", &["hang"], |_| {
        let directory = common::directory();
        let cache = cold(config(&directory));
        let started = Instant::now();
        assert_eq!(fetch(&cache, 0), "disk_to_host_to_device");
        assert!(started.elapsed() >= Duration::from_millis(STUCK_MS), "it was waited for");
        let stats = cache.stats();
        assert!(!stats.cufile, "{stats:?}");
        assert_eq!(stats.cufile_stuck, 1);
        assert!(stats.cufile_reason.starts_with("libcufile is stuck: a read has not completed within 3s"), "{stats:?}");
        // From now on no caller waits for it.
        let leases: Vec<_> = (0..u64::from(DEVICE_BLOCKS) - 1)
            .map(|n| block_on(cache.fetch_to_device(&common::key(n))).expect("fetch").expect("stored"))
            .collect();
        assert_eq!(cache.stats().cufile_stuck, 1, "nothing more was given to the library");
        // The library has one slot: with all others leased there is none.
        let tier = *cache.stats().tier(Tier::Device);
        assert_eq!((tier.free, tier.resident), (0, u64::from(DEVICE_BLOCKS) - 1));
        // Now it comes back, and writes to the slot: no other block's bytes change, and the slot is free.
        ask("release");
        while cache.stats().cufile_stuck > 0 {
            std::thread::yield_now();
        }
        for (n, lease) in leases.iter().enumerate() {
            let bytes = block_on(cache.read_device(lease, Vec::new())).expect("read");
            assert!(bytes == common::payload(n as u64, common::BLOCK_BYTES), "block {n}");
        }
        while cache.stats().tier(Tier::Device).free == 0 {
            std::thread::yield_now();
        }
        drop(leases);
        fetch_all(&cache);
        assert!(!close(cache).cufile, "once is enough");
    });
}

#[test]
fn many_that_do_not_come_back_are_all_served() {
    with_double("trouble::many_that_do_not_come_back_are_all_served", &["hang", "status", "cookie"], |mode| {
        let directory = common::directory();
        let cache = cold(config(&directory));
        fetch_all(&cache);
        // Eight threads ask, and the library takes eight transfers, three a block; what it does not have comes back.
        while cache.stats().cufile_stuck > 3 {
            std::thread::yield_now();
        }
        let stats = cache.stats();
        assert!(!stats.cufile && stats.cufile_stuck > 0, "{stats:?}");
        let lost = |stats: &Stats| stats.tier(Tier::Device).slots - stats.tier(Tier::Device).free;
        while lost(&cache.stats()) - cache.stats().tier(Tier::Device).resident != cache.stats().cufile_stuck {
            std::thread::yield_now();
        }
        let why = match mode {
            "hang" => "has not completed within",
            "status" => "cuFileBatchIOGetStatus: 5030",
            _ => "the completion of a transfer that is not in flight",
        };
        assert!(stats.cufile_reason.contains(why), "{stats:?}");
        // The end does not wait for it either, and the store's file stays locked while the library has it.
        let started = Instant::now();
        block_on(cache.close()).expect("close");
        assert!(started.elapsed() < Duration::from_secs(120), "{:?}", started.elapsed());
        drop(cache);
        if mode == "hang" {
            let error = block_on(Cache::open(config(&directory))).expect_err("the library has the file");
            assert!(error.to_string().contains("a lock on it"), "{error}");
            ask("release");
            let opened = (0..50).find_map(|_| block_on(Cache::open(config(&directory))).ok());
            let cache = opened.expect("it came back");
            fetch_all(&cache);
            assert!(close(cache).cufile);
        }
    });
}

#[test]
fn a_library_that_does_not_come_back_from_its_first_calls_is_left_alone() {
    with_double(
        "trouble::a_library_that_does_not_come_back_from_its_first_calls_is_left_alone",
        &["open", "register", "exit"],
        |mode| {
            let directory = common::directory();
            let cache = cold(config(&directory));
            let stats = cache.stats();
            let why = if mode == "open" { "cuFileDriverOpen has not returned" } else { "from its first calls" };
            assert!(!stats.cufile && stats.cufile_reason.contains(why), "{stats:?}");
            let held = u64::from(mode != "open");
            assert_eq!(stats.cufile_stuck, held);
            fetch_all(&cache);
            let used = *cache.stats().tier(Tier::Device);
            assert_eq!(used.slots - used.free - used.resident, held);
            if mode == "register" {
                ask("release");
                while cache.stats().cufile_stuck > 0 {
                    std::thread::yield_now();
                }
            }
            block_on(cache.close()).expect("close");
            drop(cache);
            // Whatever comes back as the process exits, libcufile's exit handler finds its counters stopped.
            if mode != "exit" {
                ask("release");
            }
            if mode == "open" {
                // It has come back meanwhile, or does soon.
                let opened = (0..50).find_map(|_| {
                    let cache = open(config(&directory).cufile(EngineMode::Auto));
                    if cache.stats().cufile {
                        return Some(cache);
                    }
                    block_on(cache.close()).expect("close");
                    None
                });
                let cache = opened.expect("it came back");
                assert_eq!(fetch(&cache, 0), "disk_to_device");
                close(cache);
            }
        },
    );
}

/// The self-test of one cache takes long: that of another waits for it, up to the limit of its own calls.
#[test]
fn a_self_test_waits_for_that_of_another_cache() {
    with_double("trouble::a_self_test_waits_for_that_of_another_cache", &["stuck"], |_| {
        Driver::open(Duration::from_secs(60)).expect("the double is there");
        let directories = [(); 3].map(|()| common::directory());
        let [first, second, third] = directories.each_ref().map(|directory| config(directory).cufile(EngineMode::On));
        std::thread::scope(|scope| {
            let first = scope.spawn(|| open(first));
            while !first.is_finished() && ask("asked_reads") == 0 {
                std::thread::yield_now();
            }
            let second = scope.spawn(|| open(second));
            let refused = block_on(Cache::open(third.cufile_stuck_ms(STUCK_MS))).expect_err("a cache that waited");
            let expected = "found another test of libcufile of this process under way for 3s";
            assert!(refused.to_string().contains(expected), "{refused}");
            ask("release");
            for opened in [first, second] {
                let cache = opened.join().expect("opened");
                assert!(cache.stats().cufile, "{:?}", cache.stats());
                block_on(cache.close()).expect("close");
            }
        });
    });
}
