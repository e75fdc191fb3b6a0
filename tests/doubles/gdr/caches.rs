//! Whole caches: every movement between host and device memory goes through the RDMA device, and callers
//! do not see its failures.

use std::time::Duration;

use kvhoist::{
    Cache, Config, DeviceKind, DiskPath, EngineMode, Layout, Route, Segment, Tier, block_on,
    internals::{
        gpu::{DeviceBuffer, Gpu},
        memory::DeviceMemory,
    },
};

use super::{
    common::{self, BLOCK_BYTES, key, mix, payload},
    double::{get, set, until_forgotten, with_double, with_double_at_once},
};

/// Slots of the device: few, so that blocks leave it.
const DEVICE_BLOCKS: u32 = 12;

/// A device tier with the RDMA device beside it, `on`.
pub fn config(cuda: bool) -> Config {
    Config::default()
        .block_bytes(BLOCK_BYTES)
        .host_blocks(64)
        .device_blocks(DEVICE_BLOCKS)
        .device(if cuda { DeviceKind::Cuda } else { DeviceKind::Simulated })
        // Segments that begin anywhere, in pools layer by layer.
        .device_layout(Layout::new(vec![4096, 4096 + 4, 100, BLOCK_BYTES - 8296]).expect("it is one block"))
        .gdr(EngineMode::On)
}

pub fn open(config: Config) -> Cache {
    block_on(Cache::open(config)).expect("the double is a device")
}

/// Batches that an engine copied.
pub fn copies(cache: &Cache, engine: &str) -> u64 {
    cache.stats().copied_batches()[engine]
}

/// Blocks that were copied between host and device memory.
pub fn moved(cache: &Cache) -> u64 {
    let stats = cache.stats();
    [Route::HostToDevice, Route::DiskToHostToDevice, Route::DeviceToHost]
        .map(|route| stats.route_blocks(route))
        .iter()
        .sum()
}

/// Blocks go to the device and out of it again as others come, and are right there.
pub fn round_trips(cache: &Cache, blocks: u64) {
    for n in 0..blocks {
        block_on(common::store(cache, n));
    }
    for n in (0..blocks).chain((0..blocks).rev()) {
        fetch_to_device(cache, n);
    }
}

fn fetch_to_device(cache: &Cache, n: u64) {
    let lease = block_on(cache.fetch_to_device(&key(n))).expect("fetch").expect("stored");
    let bytes = block_on(cache.read_device(&lease, Vec::new())).expect("read");
    assert!(bytes == payload(n, BLOCK_BYTES), "block {n} by {}", lease.route());
}

/// The same from several threads, and all of them several times.
fn many_threads(cache: &Cache, blocks: u64, rounds: u64) {
    std::thread::scope(|scope| {
        for thread in 0..6 {
            scope.spawn(move || {
                (0..rounds).for_each(|i| fetch_to_device(cache, mix(thread * 1000 + i) % blocks));
            });
        }
    });
}

fn finish(cache: Cache) {
    kvhoist::internals::validate(&cache).expect("valid");
    block_on(cache.close()).expect("close");
    drop(cache);
    until_forgotten();
}

/// Both worlds: host memory plays the device, and the double of a CUDA device.
const WORLDS: [&str; 4] = ["late", "now,depth=16", "late DOUBLE_ORDERING=0", "late,race,depth=16 DOUBLE_ORDERING=0"];

fn is_cuda(case: &str) -> bool {
    case.contains("DOUBLE_ORDERING")
}

#[test]
fn blocks_of_all_tiers_are_right() {
    with_double("caches::blocks_of_all_tiers_are_right", &WORLDS, |case| {
        let directory = common::directory();
        let disks = vec![DiskPath::with_blocks(directory.path(), 128)];
        let settings = config(is_cuda(case)).disks(disks).host_blocks(16);
        let cache = open(settings.clone());
        round_trips(&cache, 60);
        many_threads(&cache, 60, 30);
        finish(cache);
        // And what the disk kept.
        let cache = open(settings);
        many_threads(&cache, 60, 20);
        let stats = cache.stats();
        assert!(stats.gdr && moved(&cache) > 30, "{stats:?}");
        assert!(copies(&cache, "gdr") >= moved(&cache), "no path is left out: {stats:?}");
        finish(cache);
    });
}

#[test]
fn blocks_that_only_the_device_has_come_back_through_it() {
    with_double("caches::blocks_that_only_the_device_has_come_back_through_it", &WORLDS, |case| {
        let cache = open(config(is_cuda(case)).host_blocks(4));
        for n in 0..DEVICE_BLOCKS.into() {
            block_on(common::store(&cache, n));
            fetch_to_device(&cache, n);
        }
        // Host memory has four of them.
        for n in 0..DEVICE_BLOCKS.into() {
            assert!(block_on(common::fetch_verified(&cache, n)), "block {n}");
        }
        assert!(copies(&cache, "gdr") >= moved(&cache) && moved(&cache) > 12, "{:?}", cache.stats());
        finish(cache);
    });
}

#[test]
fn a_failure_is_nobodys_but_the_engines() {
    let cases = [
        "late FAULT=fail=9:12",
        "late FAULT=fail=1:4",
        "late FAULT=fatal=7",
        "now FAULT=fail=9:10",
        "late DOUBLE_ORDERING=0 FAULT=fail=9:12",
        "late DOUBLE_ORDERING=0 FAULT=fail=30:5",
        "late DOUBLE_ORDERING=0 FAULT=fatal=7",
        "late,nodmabuf,peermem DOUBLE_ORDERING=0 FAULT=fail=9:10",
    ];
    with_double("caches::a_failure_is_nobodys_but_the_engines", &cases, |case| {
        let fault = std::env::var("FAULT").expect("a fault");
        let cache = open(config(is_cuda(case)));
        round_trips(&cache, 40);
        set(&fault);
        // No caller sees an error.
        many_threads(&cache, 40, 40);
        let stats = cache.stats();
        assert!(stats.gdr_failovers > 0, "{stats:?}");
        while !cache.stats().gdr {
            assert!(cache.stats().gdr_reason.starts_with("recovering"), "{}", cache.stats().gdr_reason);
            std::thread::sleep(Duration::from_millis(1));
        }
        set("go");
        let before = copies(&cache, "gdr");
        many_threads(&cache, 40, 20);
        assert!(copies(&cache, "gdr") > before, "it is used again");
        set(&fault);
        many_threads(&cache, 40, 40);
        while !cache.stats().gdr_reason.starts_with("retired: ") {
            std::thread::sleep(Duration::from_millis(1));
        }
        set("go");
        let (stats, writes) = (cache.stats(), get("writes"));
        assert!(!stats.gdr && stats.gdr_reason.contains("failed twice within"), "{}", stats.gdr_reason);
        assert!(stats.device_retired.is_none(), "the device itself works");
        many_threads(&cache, 40, 20);
        assert_eq!((get("writes"), cache.stats().gdr_failovers), (writes, stats.gdr_failovers), "it is out of use");
        finish(cache);
    });
}

#[test]
fn a_device_that_stops_to_answer_holds_nobody_up_for_ever() {
    let cases = ["late FAULT=never=20", "late DOUBLE_ORDERING=0 FAULT=dead"];
    with_double_at_once("caches::a_device_that_stops_to_answer_holds_nobody_up_for_ever", &cases, |case| {
        let cache = open(config(is_cuda(case)).deadline_ms(60_000).gdr_stuck_ms(2_000));
        round_trips(&cache, 40);
        set(&std::env::var("FAULT").expect("a fault"));
        many_threads(&cache, 40, 10);
        assert!(cache.stats().gdr_failovers > 0);
        set("go");
        many_threads(&cache, 40, 10);
        finish(cache);
    });
}

#[test]
fn a_close_in_mid_copy_waits_or_fails_over_and_leaves_nothing() {
    let cases = [
        "late,delay=3000",
        "late,delay=3000 DOUBLE_ORDERING=0",
        "late,delay=1000 FAULT=fail=30:12",
        "late,delay=1000 DOUBLE_ORDERING=0 FAULT=fatal=30",
    ];
    with_double("caches::a_close_in_mid_copy_waits_or_fails_over_and_leaves_nothing", &cases, |case| {
        for drops in [false, true] {
            let cache = open(config(is_cuda(case)));
            for n in 0..40 {
                block_on(common::store(&cache, n));
            }
            if let Ok(fault) = std::env::var("FAULT") {
                set(&fault);
            }
            let wanted: Vec<_> = (0..40).map(key).collect();
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            let mut fetches: Vec<_> = wanted.iter().map(|key| Box::pin(cache.fetch_to_device(key))).collect();
            fetches.retain_mut(|fetch| fetch.as_mut().poll(&mut context).is_pending());
            if drops {
                drop(fetches);
            } else {
                // Each is answered, with its block or with the end.
                block_on(cache.close()).expect("close");
                for fetch in fetches {
                    drop(block_on(fetch));
                }
            }
            drop(cache);
            // The reactor ends by itself without a waiter.
            until_forgotten();
            set("go");
        }
    });
}

#[test]
fn pools_of_the_caller_are_registered_once_and_given_back_before_they_may_go() {
    let cases = ["late", "late DOUBLE_ORDERING=0", "late,nodmabuf,peermem DOUBLE_ORDERING=0"];
    with_double("caches::pools_of_the_caller_are_registered_once_and_given_back_before_they_may_go", &cases, |case| {
        let cache = open(config(is_cuda(case)));
        let before = (get("regions"), get("registered"));
        if is_cuda(case) {
            let pool =
                DeviceBuffer::new(Gpu::open(0).expect("the double is a device"), 16 * BLOCK_BYTES).expect("memory");
            // SAFETY: the pool lives until the region is given back below, and nothing else uses it.
            let lent = unsafe { kvhoist::Memory::device(pool.base().as_ptr(), pool.bytes()) };
            let region = kvhoist::block_on(cache.register(lent)).expect("registered");
            common::load_and_store(&cache, pool.base().as_ptr());
            let copied = copies(&cache, "gdr");
            common::load_and_store(&cache, pool.base().as_ptr());
            // Blocks that are loaded together may be one.
            assert!(copied > 16 && copies(&cache, "gdr") > copied, "{:?}", cache.stats().copied_batches());
            assert_eq!((get("regions"), get("registered")), (before.0 + 1, before.1 + 1), "once");
            block_on(cache.unregister(&region)).expect("its own region");
        } else {
            let mut memory = kvhoist::internals::io::AlignedBuf::zeroed(16 * BLOCK_BYTES);
            let base = memory.as_mut_ptr();
            // SAFETY: as above.
            let lent = unsafe { kvhoist::Memory::host(base, 16 * BLOCK_BYTES) };
            let region = kvhoist::block_on(cache.register(lent)).expect("registered");
            common::load_and_store(&cache, base);
            common::load_and_store(&cache, base);
            block_on(cache.unregister(&region)).expect("its own region");
            drop(memory);
        }
        assert_eq!(get("regions"), before.0, "the device does not know it any more");
        assert_eq!(cache.stats().gdr_failovers, 0);
        finish(cache);
    });
}

#[test]
fn a_pool_that_cannot_be_registered_is_copied_another_way() {
    let cases = ["late DOUBLE_ORDERING=0 FAULT=regions=0", "late DOUBLE_ORDERING=0 FAULT=nodmabuf"];
    with_double("caches::a_pool_that_cannot_be_registered_is_copied_another_way", &cases, |_| {
        let cache = open(config(true));
        set(&std::env::var("FAULT").expect("a fault"));
        let pool = DeviceBuffer::new(Gpu::open(0).expect("the double is a device"), 16 * BLOCK_BYTES).expect("memory");
        // SAFETY: the pool lives until the region is given back below, and nothing else uses it.
        let lent = unsafe { kvhoist::Memory::device(pool.base().as_ptr(), pool.bytes()) };
        let region = kvhoist::block_on(cache.register(lent)).expect("registered");
        common::load_and_store(&cache, pool.base().as_ptr());
        let stats = cache.stats();
        assert!(stats.gdr && copies(&cache, "cuda") > 16, "{stats:?}");
        block_on(cache.unregister(&region)).expect("its own region");
        // The cache's own blocks still go through it.
        let before = copies(&cache, "gdr");
        round_trips(&cache, 20);
        assert!(copies(&cache, "gdr") > before);
        finish(cache);
    });
}

#[test]
fn many_pools_come_and_go() {
    with_double("caches::many_pools_come_and_go", &["now DOUBLE_ORDERING=0"], |_| {
        let cache = open(config(true));
        let gpu = Gpu::open(0).expect("the double is a device");
        let before = get("regions");
        (0..16).for_each(|n| block_on(common::store(&cache, n)));
        for round in 0..8 {
            let pools: Vec<_> = (0..20).map(|_| DeviceBuffer::new(gpu.clone(), BLOCK_BYTES).expect("memory")).collect();
            // SAFETY: the pools live until their regions are given back below, and nothing else uses them.
            let lent = |pool: &DeviceBuffer| unsafe { kvhoist::Memory::device(pool.base().as_ptr(), pool.bytes()) };
            let register = |pool: &DeviceBuffer| kvhoist::block_on(cache.register(lent(pool)));
            let regions: Vec<_> = pools.iter().map(|pool| register(pool).expect("registered")).collect();
            for (n, pool) in pools.iter().enumerate() {
                let place = vec![vec![Segment { ptr: pool.base().as_ptr(), len: BLOCK_BYTES }]];
                let loaded = block_on(cache.load_into(&[key(n as u64 % 16)], &place)).expect("loads");
                assert!(loaded.into_iter().all(|result| result.expect("load")), "round {round}");
            }
            for region in regions {
                block_on(cache.unregister(&region)).expect("its own region");
            }
            assert_eq!(get("regions"), before);
        }
        assert_eq!(cache.stats().tier(Tier::Host).resident, 16);
        finish(cache);
    });
}
