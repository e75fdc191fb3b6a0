//! What the counters say is what happened: of fetches and of loads alike.

use crate::common;

use common::{BLOCK_BYTES, config, directory, key, payload, store};
use kvhoist::{Cache, Config, DeviceKind, Route, Segment, Stats, StorageKind, Tier, WritePolicy, block_on};

/// Hits of the host tier, hits of the disk tier, misses.
fn looked_up(stats: &Stats) -> [u64; 3] {
    [stats.tier(Tier::Host).hits, stats.tier(Tier::Disk).hits, stats.misses]
}

fn went(stats: &Stats, route: Route) -> [u64; 2] {
    [stats.route_blocks(route), stats.route_bytes(route) / BLOCK_BYTES as u64]
}

/// A pool of the caller's. Leaked, so that it never moves and outlives every movement.
fn pool(blocks: usize) -> (*mut u8, Vec<Vec<Segment>>) {
    let layout = std::alloc::Layout::from_size_align(blocks * BLOCK_BYTES, 4096).expect("a power of two");
    // SAFETY: the layout is not empty.
    let memory = unsafe { std::alloc::alloc_zeroed(layout) };
    let place = |block: usize| Segment { ptr: memory.wrapping_add(block * BLOCK_BYTES), len: BLOCK_BYTES };
    (memory, (0..blocks).map(|block| vec![place(block)]).collect())
}

/// The ways to load blocks.
#[derive(Debug, Clone, Copy)]
enum Way {
    Fetch,
    LoadInto,
    SubmitLoad,
    LoadLayers,
}

async fn load(cache: &Cache, way: Way, blocks: &[u64], places: &[Vec<Segment>]) {
    let keys: Vec<_> = blocks.iter().map(|&n| key(n)).collect();
    let places = &places[..keys.len()];
    let found = match way {
        Way::Fetch => {
            let mut found = Vec::new();
            for key in &keys {
                found.push(cache.fetch(key).await.expect("fetched").is_some());
            }
            found
        }
        Way::LoadInto => {
            let results = cache.load_into(&keys, places).await.expect("taken on");
            results.into_iter().map(|result| result.expect("loaded")).collect()
        }
        Way::SubmitLoad => {
            let queue = cache.completion_queue(1).expect("a queue");
            queue.submit_load(&keys, places).expect("submitted");
            let mut done = queue.drain();
            while done.is_empty() {
                std::thread::yield_now();
                done = queue.drain();
            }
            let (_, results) = done.pop().expect("not empty");
            results.into_iter().map(|result| result.expect("loaded")).collect()
        }
        Way::LoadLayers => {
            let load = cache.load_layers(&keys, places, &[0]).await.expect("taken on");
            load.blocks().await.into_iter().map(|result| result.expect("loaded")).collect()
        }
    };
    let expected: Vec<bool> = blocks.iter().map(|&n| n < 8).collect();
    assert_eq!(found, expected, "{way:?}");
}

/// Blocks 0 to 7 are on disk, 6 and 7 in host memory too, the others nowhere.
#[test]
fn every_way_to_load_counts_each_block_once_where_it_was_found() {
    for way in [Way::Fetch, Way::LoadInto, Way::SubmitLoad, Way::LoadLayers] {
        for bypass_host in [false, true] {
            block_on(async {
                let directory = directory();
                let settings = config(&directory, StorageKind::Auto, 2, 16).bypass_host(bypass_host);
                let cache = Cache::open(settings).await.expect("open");
                let (memory, places) = pool(8);
                // SAFETY: the memory is leaked, and nothing reads it.
                let lent = unsafe { kvhoist::Memory::host(memory, 8 * BLOCK_BYTES) };
                let region = kvhoist::block_on(cache.register(lent)).expect("registered");
                for n in 0..8 {
                    store(&cache, n).await;
                }
                let before = cache.stats();
                assert_eq!(went(&before, Route::CallerToHost), [8, 8]);
                assert_eq!(looked_up(&before), [0; 3]);
                load(&cache, way, &[7, 6, 0, 100, 101, 102], &places).await;
                let after = cache.stats();
                assert_eq!(looked_up(&after), [2, 1, 3], "{way:?}, bypass_host = {bypass_host}");
                let straight = u64::from(bypass_host && !matches!(way, Way::Fetch));
                let copied = if matches!(way, Way::Fetch) { 0 } else { 3 - straight };
                assert_eq!(went(&after, Route::HostToCaller), [copied; 2], "{way:?}, bypass_host = {bypass_host}");
                assert_eq!(went(&after, Route::DiskToRegion), [straight; 2], "{way:?}, bypass_host = {bypass_host}");
                let out = after.tier(Tier::Host).bytes_out - before.tier(Tier::Host).bytes_out;
                assert_eq!(out, copied * BLOCK_BYTES as u64, "{way:?}, bypass_host = {bypass_host}");
                cache.unregister(&region).await.expect("its own region");
                cache.close().await.expect("close");
            });
        }
    }
}

/// From host memory, where it is copied from, also where the device has it too.
#[test]
fn a_load_of_a_block_in_host_and_device_memory_is_a_hit_of_the_host_tier() {
    for way in [Way::LoadInto, Way::SubmitLoad, Way::LoadLayers] {
        block_on(async {
            let directory = directory();
            let settings = config(&directory, StorageKind::Auto, 4, 4).device_blocks(2);
            let cache = Cache::open(settings.device(DeviceKind::Simulated)).await.expect("open");
            let (memory, places) = pool(2);
            // SAFETY: the memory is leaked, and nothing reads it.
            let lent = unsafe { kvhoist::Memory::host(memory, 2 * BLOCK_BYTES) };
            let region = cache.register(lent).await.expect("registered");
            for n in 0..2 {
                store(&cache, n).await;
                drop(cache.fetch_to_device(&key(n)).await.expect("fetched").expect("resident"));
            }
            let before = looked_up(&cache.stats());
            load(&cache, way, &[0, 1], &places).await;
            let after = looked_up(&cache.stats());
            assert_eq!((after[0] - before[0], cache.stats().tier(Tier::Device).hits), (2, 0), "{way:?}");
            cache.unregister(&region).await.expect("its own region");
            cache.close().await.expect("close");
        });
    }
}

#[test]
fn what_is_stored_from_a_region_and_read_from_the_device_has_a_route() {
    block_on(async {
        let settings = Config::default().block_bytes(BLOCK_BYTES).host_blocks(4).device_blocks(2);
        let cache = Cache::open(settings.device(DeviceKind::Simulated)).await.expect("open");
        let (memory, places) = pool(1);
        // SAFETY: the memory is leaked, and nothing else uses it.
        unsafe { memory.copy_from_nonoverlapping(payload(1, BLOCK_BYTES).as_ptr(), BLOCK_BYTES) };
        // SAFETY: as above.
        let lent = unsafe { kvhoist::Memory::host(memory, BLOCK_BYTES) };
        let region = kvhoist::block_on(cache.register(lent)).expect("registered");
        let stored = cache.store_from(&[key(1)], None, &places).await.expect("taken on");
        assert!(stored.into_iter().all(|result| result.expect("stored")));
        assert_eq!(went(&cache.stats(), Route::CallerToHost), [1, 1]);
        let lease = cache.fetch_to_device(&key(1)).await.expect("fetched").expect("resident");
        assert_eq!(cache.read_device(&lease, Vec::new()).await.expect("read"), payload(1, BLOCK_BYTES));
        assert_eq!(went(&cache.stats(), Route::DeviceToCaller), [1, 1]);
        drop(lease);
        cache.unregister(&region).await.expect("its own region");
        cache.close().await.expect("close");
    });
}

/// With `write_through_selective` a block is written once it was used often enough, by loads too.
#[test]
fn loads_are_uses_that_select_a_block_for_the_disk() {
    for way in [Way::Fetch, Way::LoadInto, Way::LoadLayers] {
        block_on(async {
            let directory = directory();
            let write_policy = WritePolicy::WriteThroughSelective;
            let settings = config(&directory, StorageKind::Auto, 4, 4).write_policy(write_policy).selective_hits(2);
            let cache = Cache::open(settings).await.expect("open");
            let (memory, places) = pool(1);
            // SAFETY: the memory is leaked, and nothing reads it.
            let lent = unsafe { kvhoist::Memory::host(memory, BLOCK_BYTES) };
            let region = kvhoist::block_on(cache.register(lent)).expect("registered");
            store(&cache, 1).await;
            load(&cache, way, &[1], &places).await;
            cache.sync().await.expect("flushed");
            assert_eq!(cache.stats().tier(Tier::Disk).resident, 0, "{way:?}: one use is too few");
            load(&cache, way, &[1], &places).await;
            cache.close().await.expect("movements in flight finish");
            assert_eq!(went(&cache.stats(), Route::HostToDisk), [1, 1], "{way:?}: it was used twice");
            drop(region);
        });
    }
}
