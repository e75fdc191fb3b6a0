//! Which way is taken, where everything works or is not there.

use kvhoist::{Cache, EngineMode, Error, Layout, Route, WritePolicy, block_on};

use super::{
    common::{self, key},
    doubles::{
        BLOCKS, DEVICE_BLOCKS, ask, checksum_launches, close, cold, config, fetch, fetch_all, open, with_double,
        with_part, without_kernel,
    },
};

#[test]
fn a_proven_path_is_taken() {
    with_double("routes::a_proven_path_is_taken", &["direct", "p2p"], |mode| {
        let directory = common::directory();
        let cache = cold(config(&directory));
        let stats = cache.stats();
        let way = if mode == "p2p" { "direct by PCI peer-to-peer" } else { "direct by nvidia-fs" };
        assert!(stats.cufile && stats.cufile_reason.starts_with(way), "{stats:?}");
        for n in 0..BLOCKS {
            assert_eq!(fetch(&cache, n), "disk_to_device");
        }
        fetch_all(&cache);
        let (most, buffers) = (ask("most_in_flight"), ask("buffers"));
        assert!((2..=8).contains(&most), "{most} transfers at once");
        assert!(buffers > 0, "the device's slots are registered");
        let launches = checksum_launches();
        assert!(launches > 0 && launches <= cache.stats().route_blocks(Route::DiskToDevice), "{launches} checksums");
        let stats = close(cache);
        let blocks = stats.route_blocks(Route::DiskToDevice);
        assert!(blocks >= BLOCKS && ask("direct") >= 3 * blocks, "{stats:?}");
        assert_eq!(stats.tier(kvhoist::Tier::Host).bytes_in, 0, "nothing went through host memory");
        assert_eq!((stats.cufile_errors, stats.cufile_stuck, stats.checksum_failures), (0, 0, 0));
    });
}

#[test]
fn without_the_kernel_blocks_are_verified_by_the_host() {
    let name = "routes::without_the_kernel_blocks_are_verified_by_the_host";
    without_kernel(name, &["direct", "wrong"], |mode| {
        let directory = common::directory();
        let cache = cold(config(&directory));
        fetch_all(&cache);
        assert_eq!(checksum_launches(), 0);
        assert_eq!(close(cache).cufile, mode == "direct");
    });
}

#[test]
fn without_registrations_it_is_taken_too() {
    with_double("routes::without_registrations_it_is_taken_too", &["pinning"], |_| {
        let directory = common::directory();
        let cache = cold(config(&directory));
        fetch_all(&cache);
        assert_eq!(ask("buffers"), 0);
        let stats = close(cache);
        assert!(stats.cufile && stats.route_blocks(Route::DiskToHostToDevice) == 0, "{stats:?}");
    });
}

/// Where `auto` goes through host memory, says why, and `on` refuses to open.
fn through_host_memory(why: &str) {
    let directory = common::directory();
    let cache = cold(config(&directory));
    let stats = cache.stats();
    assert!(!stats.cufile && stats.cufile_reason.contains(why), "{stats:?}");
    assert_eq!(fetch(&cache, 0), "disk_to_host_to_device");
    fetch_all(&cache);
    block_on(cache.close()).expect("close");
    drop(cache);
    match block_on(Cache::open(config(&directory).cufile(EngineMode::On))) {
        Err(Error::Unavailable { tier: "device", reason }) => {
            assert!(reason.starts_with("cufile = on: ") && reason.contains(why), "{reason}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn without_the_library_blocks_go_through_host_memory() {
    with_part("routes::without_the_library_blocks_go_through_host_memory", false, None, |_| {
        through_host_memory("libcufile.so was not found; it comes with the CUDA toolkit");
    });
}

#[test]
fn a_library_that_lacks_a_function_is_not_called() {
    with_part("routes::a_library_that_lacks_a_function_is_not_called", true, Some("cuFileBatchIOSubmit=other"), |_| {
        through_host_memory("libcufile.so.0 has no cuFileBatchIOSubmit");
    });
}

#[test]
fn without_a_udev_record_the_reason_and_the_fix_are_told() {
    with_double("routes::without_a_udev_record_the_reason_and_the_fix_are_told", &["record"], |_| {
        through_host_memory(
            "cuFileHandleRegister: 5027 (CU_FILE_HANDLE_NOT_REGISTERED); libcufile finds no udev record",
        );
    });
}

#[test]
fn a_read_that_did_not_happen_proves_nothing() {
    with_double("routes::a_read_that_did_not_happen_proves_nothing", &["liar"], |_| {
        through_host_memory("the device does not hold what is in the file");
    });
}

#[test]
fn compat_mode_is_taken_only_when_it_is_forced() {
    with_double("routes::compat_mode_is_taken_only_when_it_is_forced", &["compat"], |_| {
        let directory = common::directory();
        let cache = cold(config(&directory));
        let stats = cache.stats();
        assert!(!stats.cufile && stats.cufile_reason.starts_with("compat mode"), "{stats:?}");
        assert!(stats.cufile_reason.contains("n_posix_reads 1"), "{stats:?}");
        assert_eq!(fetch(&cache, 0), "disk_to_host_to_device");
        block_on(cache.close()).expect("close");
        drop(cache);
        let cache = open(config(&directory).cufile(EngineMode::On));
        assert!(cache.stats().cufile_reason.starts_with("compat mode"));
        assert_eq!(fetch(&cache, 0), "disk_to_device");
        fetch_all(&cache);
        assert_eq!(ask("batches"), 0, "no batch in compat mode");
        assert_eq!(close(cache).cufile_errors, 0);
    });
}

#[test]
fn statistics_of_an_unknown_layout_prove_nothing() {
    with_double("routes::statistics_of_an_unknown_layout_prove_nothing", &["layout"], |_| {
        let directory = common::directory();
        let cache = cold(config(&directory));
        let stats = cache.stats();
        assert!(!stats.cufile && stats.cufile_reason.contains("the layout of its statistics is unknown"), "{stats:?}");
        assert_eq!(fetch(&cache, 0), "disk_to_host_to_device");
        block_on(cache.close()).expect("close");
        drop(cache);
        let cache = open(config(&directory).cufile(EngineMode::On));
        assert_eq!(fetch(&cache, 0), "disk_to_device");
        assert_eq!(ask("batches"), 0, "no batch without a proof");
        assert_eq!(close(cache).cufile_errors, 0);
    });
}

#[test]
fn without_statistics_nothing_is_proven() {
    with_part("routes::without_statistics_nothing_is_proven", true, Some("NO_STATISTICS"), |_| {
        let directory = common::directory();
        let cache = cold(config(&directory));
        let stats = cache.stats();
        assert!(!stats.cufile && stats.cufile_reason.contains("has no cuFileGetStatsL3"), "{stats:?}");
        assert_eq!(fetch(&cache, 0), "disk_to_host_to_device");
    });
}

#[test]
fn off_is_off() {
    with_double("routes::off_is_off", &["direct"], |_| {
        let directory = common::directory();
        let cache = cold(config(&directory).cufile(EngineMode::Off));
        assert_eq!(cache.stats().cufile_reason, "cufile = off");
        assert_eq!(fetch(&cache, 0), "disk_to_host_to_device");
    });
}

#[test]
fn segments_that_direct_io_cannot_have_go_through_host_memory() {
    with_double("routes::segments_that_direct_io_cannot_have_go_through_host_memory", &["direct"], |_| {
        let directory = common::directory();
        let layout = Some(Layout::new(vec![4096, 100, 16384 - 4196]).expect("16 KiB"));
        let cache = cold(config(&directory).device_layout(layout));
        let stats = cache.stats();
        assert!(stats.cufile_reason.contains("found a segment of 100 bytes in device_layout"), "{stats:?}");
        assert_eq!(fetch(&cache, 0), "disk_to_host_to_device");
    });
}

#[test]
fn what_only_the_device_holds_is_written_from_there() {
    with_double(
        "routes::what_only_the_device_holds_is_written_from_there",
        &["direct", "hangwrite", "event"],
        |mode| {
            let directory = common::directory();
            let policy = WritePolicy::WriteThroughSelective;
            let config = config(&directory).write_policy(policy).selective_hits(3);
            let cache = open(config.clone());
            let on_device = u64::from(DEVICE_BLOCKS) - 2;
            for n in 0..on_device {
                block_on(common::store(&cache, n));
                assert_eq!(fetch(&cache, n), "host_to_device");
            }
            // Host memory goes to others.
            for n in 100..120 {
                block_on(common::store(&cache, n));
            }
            // The first of them are on the device only. Hit often enough, they are to be on disk.
            for _ in 0..3 {
                (0..on_device).for_each(|n| assert_eq!(fetch(&cache, n), "device_hit"));
            }
            // Three failures end the route, and nothing but the route writes from the device.
            let expected = if mode == "event" { 3 } else { on_device };
            let written = |stats: &kvhoist::Stats| {
                (stats.route_blocks(Route::DeviceToDisk), stats.route_blocks(Route::HostToDisk))
            };
            // A block is counted a moment after it can be seen.
            let stats = loop {
                let stats = cache.stats();
                let (direct, host) = written(&stats);
                if stats.tier(kvhoist::Tier::Disk).resident >= expected && direct + host >= expected {
                    break stats;
                }
                std::thread::yield_now();
            };
            let (direct, host) = written(&stats);
            match mode {
                "direct" => assert!(direct >= on_device - 1 && host <= 1, "{stats:?}"),
                _ => assert!(direct == 0 && host >= expected && !stats.cufile, "{stats:?}"),
            }
            if mode == "hangwrite" {
                assert!(
                    stats.cufile_stuck > 0 && stats.cufile_reason.contains("a write has not completed"),
                    "{stats:?}"
                );
                ask("release");
            }
            close(cache);
            let cache = open(config.cufile(EngineMode::Off));
            let on_disk = (0..on_device).filter(|&n| block_on(common::fetch_verified(&cache, n))).count() as u64;
            assert!(on_disk >= expected, "{on_disk} blocks are on disk, whole");
            assert!(block_on(cache.fetch(&key(100))).expect("fetch").is_none(), "that one was never stored");
        },
    );
}
