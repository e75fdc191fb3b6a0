//! Calls of many blocks that go by way of host memory: what waits, for how long, and what is copied together.

use kvhoist::{Cache, Config, Error, Memory, Region, Route, Segment, internals::io::OpKind};
use kvhoist_simulation::sim::{self, Fault};

use crate::scene::*;

/// Memory of the device for so many blocks.
struct DevicePool {
    memory: Vec<u8>,
    region: Region,
}

impl DevicePool {
    async fn new(cache: &Cache, blocks: usize) -> Self {
        let mut memory = vec![0xee; blocks * BLOCK_BYTES];
        // SAFETY: the pool is unregistered before it is dropped, and looked at where no call is under way.
        let lent = unsafe { Memory::device(memory.as_mut_ptr(), memory.len()) };
        DevicePool { region: cache.register(lent).await.expect("registered"), memory }
    }

    /// Loads blocks of these numbers to one place after the other.
    async fn load(&mut self, cache: &Cache, blocks: &[u8]) -> Vec<Result<bool, Error>> {
        let start = self.memory.as_mut_ptr();
        let place = |n| vec![Segment { ptr: start.wrapping_add(n * BLOCK_BYTES), len: BLOCK_BYTES }];
        let places: Vec<_> = (0..blocks.len()).map(place).collect();
        let keys: Vec<_> = blocks.iter().map(|&n| key(n)).collect();
        cache.load_into(&keys, &places).await.expect("asked")
    }

    fn has(&self, blocks: &[u8]) -> bool {
        self.memory.chunks(BLOCK_BYTES).zip(blocks).all(|(place, &n)| place == payload(n))
    }

    async fn end(self, cache: &Cache) {
        cache.unregister(&self.region).await.expect("its own region");
    }
}

fn with_device() -> Config {
    config().device_blocks(1)
}

#[test]
fn a_call_of_more_blocks_than_there_are_host_slots_loads_them_all() {
    // Seeds decide on the I/O threads.
    for (seed, host_blocks) in (0..8).flat_map(|seed| [(seed, 1), (seed, 2), (seed, 4)]) {
        sim::block_on(async {
            let (cache, reactor, _) = open_seeded(with_device().host_blocks(host_blocks), 1, 1, seed).await;
            fill(&cache).await;
            let mut pool = DevicePool::new(&cache, 32).await;
            // Each block twice: one call joins its own movements.
            let blocks: Vec<u8> = (0..16).chain(0..16).collect();
            let loaded = pool.load(&cache, &blocks).await;
            assert!(loaded.iter().all(|result| matches!(result, Ok(true))), "{seed}, {host_blocks} slots: {loaded:?}");
            assert!(pool.has(&blocks), "{seed}, {host_blocks} slots");
            pool.end(&cache).await;
            finish(cache, reactor).await;
        });
    }
}

#[test]
fn calls_that_share_few_host_slots_all_come_to_their_end() {
    for seed in 0..8 {
        sim::block_on(async {
            let (cache, reactor, _) = open_seeded(with_device().host_blocks(2), 1, 1, seed).await;
            fill(&cache).await;
            let load = |first: u8| {
                spawn(&cache, async move |cache| {
                    let mut pool = DevicePool::new(&cache, 16).await;
                    let blocks: Vec<u8> = (0..16).map(|n| (n + first) % 16).collect();
                    let loaded = pool.load(&cache, &blocks).await;
                    assert!(loaded.iter().all(|result| matches!(result, Ok(true))) && pool.has(&blocks), "{loaded:?}");
                    pool.end(&cache).await;
                })
            };
            for call in [0, 4, 8, 12].map(load) {
                call.await.expect("no panic");
            }
            finish(cache, reactor).await;
        });
    }
}

#[test]
fn a_call_waits_one_deadline_for_slots_and_loads_what_needs_none() {
    for seed in 0..4 {
        sim::block_on(async {
            let (cache, reactor, _) = open_seeded(with_device().host_blocks(2), 1, 1, seed).await;
            fill(&cache).await;
            // All host slots, for as long as it takes.
            let leases = [cache.fetch(&key(0)).await, cache.fetch(&key(1)).await];
            let mut pool = DevicePool::new(&cache, 8).await;
            let (loaded, took) = elapsed(pool.load(&cache, &[2, 3, 0, 4, 5, 6, 7, 1])).await;
            for (at, result) in loaded.iter().enumerate() {
                match at {
                    2 | 7 => assert!(matches!(result, Ok(true)), "{seed}: {result:?}"),
                    _ => assert!(matches!(result, Err(Error::Timeout { .. })), "{seed}: {result:?}"),
                }
            }
            assert!(on_time(took), "{seed}: one deadline, not one a block: {took:?}");
            drop(leases);
            let blocks = [2, 3, 0, 4, 5, 6, 7, 1];
            let loaded = pool.load(&cache, &blocks).await;
            assert!(loaded.iter().all(|result| matches!(result, Ok(true))) && pool.has(&blocks), "{seed}: {loaded:?}");
            pool.end(&cache).await;
            finish(cache, reactor).await;
        });
    }
}

/// A disk that goes on, but slowly: each read ends in time, and all of them together do not.
#[test]
fn a_call_of_many_slow_reads_ends_by_its_deadline() {
    for seed in 0..4 {
        sim::block_on(async {
            let settings = with_device().host_blocks(1);
            let (cache, reactor, _) = open_seeded(settings, DEADLINE.as_millis() as u64 * 2 / 5, 1, seed).await;
            fill(&cache).await;
            let mut pool = DevicePool::new(&cache, 16).await;
            let blocks: Vec<u8> = (0..16).collect();
            let (loaded, took) = elapsed(pool.load(&cache, &blocks)).await;
            let late = loaded.iter().filter(|result| matches!(result, Err(Error::Timeout { .. }))).count();
            let there = loaded.iter().filter(|result| matches!(result, Ok(true))).count();
            assert!(there > 0 && late > 0 && there + late == 16, "{seed}: {loaded:?}");
            assert!(on_time(took), "{seed}: {took:?}");
            pool.end(&cache).await;
            finish(cache, reactor).await;
        });
    }
}

#[test]
fn blocks_in_host_memory_do_not_wait_for_those_before_them() {
    for seed in 0..4 {
        sim::block_on(async {
            let (cache, reactor, world) = open_seeded(with_device().host_blocks(2), 1, 1, seed).await;
            fill(&cache).await;
            world.storage.script_next(OpKind::Read, Fault::Stall);
            let hanging = spawn(&cache, async |cache| fetch(&cache, 0).await);
            a_while().await;
            assert!(fetch(&cache, 1).await.expect("served"), "in the other slot");
            let loading = spawn(&cache, async |cache| {
                let lease = cache.fetch(&key(1)).await.expect("served");
                let mut pool = DevicePool::new(&cache, 3).await;
                let loaded = pool.load(&cache, &[2, 3, 1]).await;
                assert!(matches!(loaded[2], Ok(true)), "{loaded:?}");
                drop(lease);
                pool.end(&cache).await;
            });
            a_while().await;
            // Copied, though the call waits for a slot.
            assert_eq!(world.copy.counts().done, 1, "{seed}");
            world.storage.release();
            loading.await.expect("no panic");
            drop(hanging.await.expect("no panic"));
            finish(cache, reactor).await;
        });
    }
}

/// The prefix of a chain is in host memory, all of which it takes; the reads of the rest are to evict none of it.
#[test]
fn a_call_does_not_evict_its_own_blocks_before_they_are_copied() {
    for seed in 0..8 {
        sim::block_on(async {
            let settings = with_device().host_blocks(8);
            let (cache, reactor, _) = open_seeded(settings, 1, 1, seed).await;
            for n in 0..16 {
                let parent = (n > 0).then(|| key(n - 1));
                cache.store(&key(n), parent.as_ref(), &payload(n)).await.expect("a sound disk");
            }
            for n in 0..8 {
                assert!(fetch(&cache, n).await.expect("served"));
            }
            let read = || cache.stats().route_blocks(Route::DiskToHost);
            let before = read();
            let mut pool = DevicePool::new(&cache, 16).await;
            let blocks: Vec<u8> = (0..16).collect();
            let loaded = pool.load(&cache, &blocks).await;
            assert!(loaded.iter().all(|result| matches!(result, Ok(true))) && pool.has(&blocks), "{seed}: {loaded:?}");
            assert_eq!(read() - before, 8, "{seed}: blocks that were in host memory were read");
            pool.end(&cache).await;
            finish(cache, reactor).await;
        });
    }
}

#[test]
fn a_call_of_no_blocks_is_answered() {
    for seed in 0..4 {
        sim::block_on(async {
            let (cache, reactor, _) = open_seeded(with_device(), 1, 1, seed).await;
            assert!(cache.load_into(&[], &[]).await.expect("asked").is_empty());
            assert!(cache.store_from(&[], None, &[]).await.expect("asked").is_empty());
            finish(cache, reactor).await;
        });
    }
}

/// The block of a movement that the call has joined is removed, and stored anew.
#[test]
fn a_block_that_was_stored_anew_is_looked_up_again() {
    for seed in 0..4 {
        sim::block_on(async {
            let (cache, reactor, world) = open_seeded(with_device(), 1, 1, seed).await;
            fill(&cache).await;
            world.storage.script_next(OpKind::Read, Fault::Stall);
            let hanging = spawn(&cache, async |cache| fetch(&cache, 0).await);
            a_while().await;
            let loading = spawn(&cache, async |cache| {
                let mut pool = DevicePool::new(&cache, 2).await;
                let loaded = pool.load(&cache, &[1, 0]).await;
                assert!(loaded.iter().all(|result| matches!(result, Ok(true))) && pool.has(&[1, 0]), "{loaded:?}");
                pool.end(&cache).await;
            });
            a_while().await;
            cache.remove(&key(0)).await.expect("removed");
            store(&cache, 0).await.expect("stored anew");
            world.storage.release();
            loading.await.expect("no panic");
            drop(hanging.await.expect("no panic"));
            finish(cache, reactor).await;
        });
    }
}

#[test]
fn a_read_that_hangs_is_a_timeout_of_its_block_alone() {
    for seed in 0..4 {
        sim::block_on(async {
            let (cache, reactor, world) = open_seeded(with_device(), 1, 1, seed).await;
            fill(&cache).await;
            let mut pool = DevicePool::new(&cache, 8).await;
            world.storage.script_next(OpKind::Read, Fault::Stall);
            let blocks: Vec<u8> = (0..8).collect();
            let (loaded, took) = elapsed(pool.load(&cache, &blocks)).await;
            let late = loaded.iter().filter(|result| matches!(result, Err(Error::Timeout { .. }))).count();
            let there = loaded.iter().filter(|result| matches!(result, Ok(true))).count();
            assert_eq!((late, there), (1, 7), "{seed}: {loaded:?}");
            assert!(on_time(took), "{seed}: {took:?}");
            world.storage.release();
            pool.end(&cache).await;
            finish(cache, reactor).await;
        });
    }
}

#[test]
fn blocks_in_host_memory_are_copied_together_and_fail_together() {
    sim::block_on(async {
        let (cache, reactor, world) = open_seeded(with_device().host_blocks(16), 1, 1, 1).await;
        fill(&cache).await;
        let mut pool = DevicePool::new(&cache, 16).await;
        let blocks: Vec<u8> = (0..16).collect();
        let batches = || world.copy.counts().started;
        let before = batches();
        let loaded = pool.load(&cache, &blocks).await;
        assert!(loaded.iter().all(|result| matches!(result, Ok(true))) && pool.has(&blocks), "{loaded:?}");
        assert_eq!(batches() - before, 1, "64 KiB");
        world.copy.set_failure(1.0);
        let loaded = pool.load(&cache, &blocks).await;
        world.copy.set_failure(0.0);
        assert!(loaded.iter().all(|result| matches!(result, Err(Error::Copy { .. }))), "{loaded:?}");
        let loaded = pool.load(&cache, &blocks).await;
        assert!(loaded.iter().all(|result| matches!(result, Ok(true))) && pool.has(&blocks), "{loaded:?}");
        pool.end(&cache).await;
        finish(cache, reactor).await;
    });
}
