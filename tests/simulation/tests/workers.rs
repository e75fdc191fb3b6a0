//! Worker threads in simulation: work takes virtual time, ends in any order, and is lost now and then.

use std::time::Duration;

use kvhoist::{
    BlockKey, Cache, Config, DiskPath, Memory, Segment, Tier,
    internals::io::{FileId, OpKind},
};
use kvhoist_simulation::sim::{self, Fault};

const BLOCKS: u8 = 24;

fn key(n: u8) -> BlockKey {
    BlockKey::new([n + 1; 32])
}

/// Pieces of work that workers did while blocks were prefetched from disk and fetched, where each step kills its
/// worker with the probability `deaths`.
fn run(seed: u64, deaths: f64) -> u64 {
    let config = Config::default()
        .block_bytes(4096)
        .host_blocks(u32::from(BLOCKS))
        .disks(vec![DiskPath::with_blocks("simulated", u32::from(BLOCKS))]);
    let mut world = sim::World::new(seed, sim::blank_files(&config));
    world.deaths = deaths;
    sim::block_on(async {
        let sim::Simulated { cache, reactor } = sim::open(config.clone(), &world).await.expect("open");
        for n in 0..BLOCKS {
            cache.store(&key(n), None, &[n; 4096]).await.expect("store");
        }
        cache.close().await.expect("close");
        reactor.ended().await;

        let sim::Simulated { cache, reactor } = sim::open(config, &world).await.expect("open again");
        let keys: Vec<_> = (0..BLOCKS).map(key).collect();
        assert_eq!(cache.prefetch(&keys).expect("asked"), usize::from(BLOCKS));
        for n in 0..BLOCKS {
            let lease = cache.fetch(&key(n)).await.expect("fetch").expect("stored");
            assert_eq!(*lease, [n; 4096]);
        }
        let stats = cache.stats();
        assert_eq!(stats.tier(Tier::Host).resident, u64::from(BLOCKS));
        cache.close().await.expect("close");
        reactor.ended().await;
        reactor.check_idle().expect("every slot is accounted for");
        stats.work_done
    })
}

#[test]
fn seeds_decide_whether_there_are_workers_and_their_order() {
    let done: Vec<u64> = (0..32).map(|seed| run(seed, 0.0)).collect();
    assert!(done.contains(&0), "worlds without workers: {done:?}");
    assert!(
        done.iter().any(|&done| done >= u64::from(BLOCKS) - 4),
        "workers verify blocks that come together: {done:?}"
    );
    assert_eq!(done, (0..32).map(|seed| run(seed, 0.0)).collect::<Vec<_>>(), "a seed repeats its run");
}

#[test]
fn what_a_dying_worker_has_in_hand_is_done_again() {
    let steady: u64 = (0..32).map(|seed| run(seed, 0.0)).sum();
    let dying: u64 = (0..32).map(|seed| run(seed, 0.4)).sum();
    assert!(0 < dying && dying < steady, "{dying} pieces of work done by dying workers, {steady} by others");
}

/// Loads blocks from disk to a device, all at once. Returns how many checksums the device computed, and how many bytes
/// workers checksummed after they had read them.
fn sums_of_loads(seed: u64, device_has_checksums: bool) -> (u64, usize) {
    let config = Config::default()
        .block_bytes(4096)
        .host_blocks(u32::from(BLOCKS))
        .device_blocks(u32::from(BLOCKS))
        .disks(vec![DiskPath::with_blocks("simulated", u32::from(BLOCKS))]);
    let mut world = sim::World::new(seed, sim::blank_files(&config));
    world.deaths = 0.0;
    let options = sim::CopyOptions { checksums: device_has_checksums, ..sim::CopyOptions::default() };
    world.copy = sim::SimCopy::new(seed, options);
    sim::block_on(async {
        let sim::Simulated { cache, reactor } = sim::open(config.clone(), &world).await.expect("open");
        for n in 0..BLOCKS {
            cache.store(&key(n), None, &[n; 4096]).await.expect("store");
        }
        cache.close().await.expect("close");
        reactor.ended().await;

        let sim::Simulated { cache, reactor } = sim::open(config, &world).await.expect("open again");
        let load = |n| {
            let cache = cache.clone();
            tokio::task::spawn_local(async move {
                let lease = cache.fetch_to_device(&key(n)).await.expect("fetch").expect("stored");
                assert_eq!(cache.read_device(&lease, Vec::new()).await.expect("read"), [n; 4096]);
            })
        };
        let loads: Vec<_> = (0..BLOCKS).map(load).collect();
        for load in loads {
            load.await.expect("no panic");
        }
        cache.close().await.expect("close");
        reactor.ended().await;
    });
    (world.copy.counts().sums, world.read_sum_bytes.get())
}

#[test]
fn a_block_bound_for_a_device_is_checksummed_once_on_the_device_if_it_can() {
    for seed in 0..32 {
        assert_eq!(sums_of_loads(seed, true), (u64::from(BLOCKS), 0), "seed {seed}");
    }
    let without: Vec<_> = (0..32).map(|seed| sums_of_loads(seed, false)).collect();
    assert!(without.iter().all(|(by_device, _)| *by_device == 0), "{without:?}");
    // Without that, workers checksum what they read: so the counter counts.
    assert!(without.iter().any(|(_, by_workers)| *by_workers > 4096 * usize::from(BLOCKS) / 2), "{without:?}");
}

#[repr(C, align(4096))]
struct Pages([[u8; 4096]; BLOCKS as usize]);

/// Stores blocks from a caller's memory and removes every other block meanwhile, then kills the process. Returns which
/// blocks the cache had, which it has when it is opened again, and the pieces of work that workers did.
fn remove_while_storing(seed: u64) -> (Vec<bool>, Vec<bool>, u64) {
    let config = Config::default()
        .block_bytes(4096)
        .host_blocks(2)
        .bypass_host(true)
        .disks(vec![DiskPath::with_blocks("simulated", u32::from(BLOCKS))]);
    let world = sim::World::new(seed, sim::blank_files(&config));
    let keys: Vec<_> = (0..BLOCKS).map(key).collect();
    let mut pages = Box::new(Pages(std::array::from_fn(|n| [n as u8; 4096])));
    sim::block_on(async {
        let sim::Simulated { cache, reactor } = sim::open(config.clone(), &world).await.expect("open");
        let start = pages.0.as_mut_ptr().cast::<u8>();
        // SAFETY: the pages live for longer than the cache, and nobody touches them until they are unregistered.
        let memory = unsafe { Memory::host(start, size_of::<Pages>()) };
        let region = cache.register(memory).await.expect("registered");
        let places: Vec<_> =
            (0..keys.len()).map(|n| vec![Segment { ptr: start.wrapping_add(n * 4096), len: 4096 }]).collect();
        let remove = async {
            for key in keys.iter().step_by(2) {
                tokio::time::sleep(Duration::from_millis(seed % 4)).await;
                cache.remove(key).await.expect("removed");
            }
        };
        let (stored, ()) = tokio::join!(cache.store_from(&keys, None, &places), remove);
        assert!(stored.expect("one call").iter().all(Result::is_ok));
        let there = keys.iter().map(|key| cache.contains(key)).collect();
        let killed = sim::World::new(seed, vec![world.storage.contents(FileId(0))]);

        let work_done = cache.stats().work_done;
        cache.unregister(&region).await.expect("unregistered");
        cache.close().await.expect("close");
        reactor.ended().await;
        reactor.check_idle().expect("every slot is accounted for");

        let sim::Simulated { cache, reactor } = sim::open(config, &killed).await.expect("open again");
        let later = keys.iter().map(|key| cache.contains(key)).collect();
        cache.close().await.expect("close");
        reactor.ended().await;
        (there, later, work_done)
    })
}

#[test]
fn a_block_that_is_removed_while_a_worker_writes_it_is_not_there_after_a_kill() {
    let (mut work_done, mut removed) = (0, 0);
    for seed in 0..64 {
        let (there, later, work) = remove_while_storing(seed);
        assert_eq!(there, later, "seed {seed}");
        work_done += work;
        removed += there.iter().filter(|there| !**there).count();
    }
    assert!(work_done > 0 && removed > 0, "{work_done} pieces of work by workers, {removed} blocks removed");
}

/// Stores blocks from a caller's memory, the first of whose payloads stalls. Returns how many of the blocks a process
/// that was killed then had recorded without their payloads.
fn recorded_beside_a_stalled_payload(seed: u64) -> usize {
    let config = Config::default()
        .block_bytes(4096)
        .host_blocks(2)
        .bypass_host(true)
        .disks(vec![DiskPath::with_blocks("simulated", u32::from(BLOCKS))]);
    let mut world = sim::World::new(seed, sim::blank_files(&config));
    world.deaths = 0.0;
    let keys: Vec<_> = (0..8).map(key).collect();
    let mut pages = Box::new(Pages(std::array::from_fn(|n| [n as u8 + 1; 4096])));
    sim::block_on(async {
        let sim::Simulated { cache, reactor } = sim::open(config.clone(), &world).await.expect("open");
        let start = pages.0.as_mut_ptr().cast::<u8>();
        // SAFETY: the pages live for longer than the cache, and nobody touches them until they are unregistered.
        let memory = unsafe { Memory::host(start, size_of::<Pages>()) };
        let region = cache.register(memory).await.expect("registered");
        let place = |n: usize| vec![Segment { ptr: start.wrapping_add(n * 4096), len: 4096 }];
        let places: Vec<_> = (0..keys.len()).map(place).collect();
        world.storage.script_next(OpKind::Write, Fault::Stall);
        let mut storing = Box::pin(cache.store_from(&keys, None, &places));
        let waited = tokio::time::timeout(Duration::from_millis(50), &mut storing).await;
        assert!(waited.is_err(), "seed {seed}: answered with a payload in flight");
        assert_eq!(world.storage.stalled(), 1, "seed {seed}");
        let file = world.storage.contents(FileId(0));
        let missing = |cache: &Cache| keys.iter().filter(|key| !cache.contains(key)).count();
        assert!(missing(&cache) > 0, "seed {seed}: a block is visible before its payload");
        world.storage.release();
        let stored = tokio::time::timeout(Duration::from_secs(1), storing).await.expect("nothing stalls any more");
        assert!(stored.expect("one call").iter().all(|stored| matches!(stored, Ok(true))));
        assert_eq!(missing(&cache), 0, "seed {seed}");
        cache.unregister(&region).await.expect("unregistered");
        cache.close().await.expect("close");
        reactor.ended().await;
        reactor.check_idle().expect("every slot is accounted for");

        let killed = sim::World::new(seed, vec![file]);
        let sim::Simulated { cache, reactor } = sim::open(config, &killed).await.expect("open again");
        let mut without_payload = 0;
        for (n, key) in keys.iter().enumerate() {
            let is_recorded = cache.contains(key);
            match cache.fetch(key).await.expect("a miss is no error") {
                Some(lease) => assert_eq!(*lease, [n as u8 + 1; 4096], "seed {seed}: block {n}"),
                None => without_payload += usize::from(is_recorded),
            }
        }
        cache.close().await.expect("close");
        reactor.ended().await;
        without_payload
    })
}

#[test]
fn a_record_that_is_there_before_its_payload_makes_no_block_visible() {
    let recorded: Vec<_> = (0..64).map(recorded_beside_a_stalled_payload).collect();
    assert!(recorded.contains(&1) && recorded.iter().all(|&blocks| blocks <= 1), "one payload stalls: {recorded:?}");
}

/// The end of a run whose cache was closed while workers had work.
struct Closed {
    /// Pieces of work that workers had done when the close began, and at the end.
    work_done: [u64; 2],
    /// Blocks that were served, of those requested.
    served: usize,
    /// Blocks that the cache has when it is opened again.
    later: usize,
}

/// Stores every block, and closes the cache.
async fn store_all(config: &Config, world: &sim::World) {
    let sim::Simulated { cache, reactor } = sim::open(config.clone(), world).await.expect("open");
    for n in 0..BLOCKS {
        cache.store(&key(n), None, &[n; 4096]).await.expect("store");
    }
    cache.close().await.expect("close");
    reactor.ended().await;
}

/// Fetches half of the blocks and loads the others into a caller's memory, and closes the cache meanwhile, `after` some
/// time. Each step kills its worker with the probability `deaths`.
fn close_while_workers_work(seed: u64, after: Duration, deaths: f64) -> Closed {
    let config = Config::default()
        .block_bytes(4096)
        .host_blocks(u32::from(BLOCKS))
        .bypass_host(true)
        .disks(vec![DiskPath::with_blocks("simulated", u32::from(BLOCKS))]);
    let mut world = sim::World::new(seed, sim::blank_files(&config));
    let keys: Vec<_> = (0..BLOCKS).map(key).collect();
    let mut pages = Box::new(Pages([[0xee; 4096]; BLOCKS as usize]));
    sim::block_on(async {
        store_all(&config, &world).await;
        world.deaths = deaths;
        let sim::Simulated { cache, reactor } = sim::open(config.clone(), &world).await.expect("open again");
        let start = pages.0.as_mut_ptr().cast::<u8>();
        // SAFETY: the pages live for longer than the cache, and are touched only after its close.
        let memory = unsafe { Memory::host(start, size_of::<Pages>()) };
        let _region = cache.register(memory).await.expect("registered");
        let (loaded, fetched) = keys.split_at(keys.len() / 2);
        let places: Vec<_> =
            (0..loaded.len()).map(|n| vec![Segment { ptr: start.wrapping_add(n * 4096), len: 4096 }]).collect();
        let fetches: Vec<_> = fetched
            .iter()
            .map(|key| {
                let (cache, key) = (cache.clone(), *key);
                tokio::task::spawn_local(
                    async move { cache.fetch(&key).await.map(|lease| lease.map(|lease| lease[0])) },
                )
            })
            .collect();
        let close = async {
            tokio::time::sleep(after).await;
            let before = cache.stats().work_done;
            cache.close().await.expect("close");
            before
        };
        let (loads, before) = tokio::join!(cache.load_into(loaded, &places), close);
        // The caller's memory is its own again after the close.
        let here = pages.0.to_vec();
        let loads = loads.into_iter().flatten().enumerate().filter(|(_, result)| matches!(result, Ok(true)));
        let mut served = loads.map(|(n, _)| assert_eq!(here[n], [n as u8; 4096], "block {n}")).count();
        for (n, fetch) in (loaded.len()..).zip(fetches) {
            match fetch.await.expect("no panic") {
                Ok(first) => assert_eq!(first, Some(n as u8), "block {n}"),
                Err(error) => {
                    assert!(matches!(error, kvhoist::Error::Closed), "{error}");
                    continue;
                }
            }
            served += 1;
        }
        let ended = tokio::time::timeout(Duration::from_secs(60), reactor.ended()).await;
        ended.expect("the close waits for the workers, and they end");
        reactor.check_idle().expect("every slot is accounted for");
        let work_done = [before, cache.stats().work_done];
        drop((cache, reactor));
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(here == pages.0, "a worker wrote to the caller's memory after the close");

        let sim::Simulated { cache, reactor } = sim::open(config, &world).await.expect("open a third time");
        let later = keys.iter().filter(|key| cache.contains(key)).count();
        cache.close().await.expect("close");
        reactor.ended().await;
        Closed { work_done, served, later }
    })
}

#[test]
fn a_close_waits_for_the_work_of_workers_also_of_those_that_die() {
    for deaths in [0.0, 0.3] {
        let (mut afterwards, mut served, mut refused) = (0, 0, 0);
        for seed in 0..48 {
            let ended = close_while_workers_work(seed, Duration::from_micros(seed * 197 % 2000), deaths);
            assert_eq!(ended.later, usize::from(BLOCKS), "seed {seed}");
            afterwards += ended.work_done[1] - ended.work_done[0];
            served += ended.served;
            refused += usize::from(BLOCKS) - ended.served;
        }
        let all =
            format!("{deaths}: {afterwards} pieces of work after the close began, {served} served, {refused} refused");
        assert!(afterwards > 0 && served > 0 && refused > 0, "{all}");
    }
}
