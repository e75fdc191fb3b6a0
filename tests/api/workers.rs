//! `Config::workers`: reads, writes, checksums and copies on worker threads, for blocks that come together.

use crate::common;

use common::{config, damage, directory, key, payload};
use kvhoist::{BlockKey, Cache, Config, Region, Segment, StorageKind, block_on, internals::io::AlignedBuf};
use tempfile::TempDir;

const BLOCK: usize = 256 << 10;
const BLOCKS: usize = 48;

/// An engine's pool of one block after the other.
struct Pool(AlignedBuf);

impl Pool {
    fn filled() -> Self {
        let mut memory = AlignedBuf::zeroed(BLOCKS * BLOCK);
        memory.chunks_mut(BLOCK).zip(0..).for_each(|(block, n)| block.copy_from_slice(&payload(n, BLOCK)));
        Pool(memory)
    }

    fn register(&mut self, cache: &Cache) -> Region {
        // SAFETY: the pool outlives the cache in every test, and is looked at where no call is in flight.
        let lent = unsafe { kvhoist::Memory::host(self.0.as_mut_ptr(), self.0.len()) };
        kvhoist::block_on(cache.register(lent)).expect("register")
    }

    /// Each block as so many segments, so that it goes straight to disk (one) or through a host slot (many).
    fn places(&mut self, segments: usize) -> Vec<Vec<Segment>> {
        let len = BLOCK / segments;
        let start = self.0.as_mut_ptr();
        let segment = |at: usize| Segment { ptr: start.wrapping_add(at * len), len };
        (0..BLOCKS).map(|block| (block * segments..(block + 1) * segments).map(segment).collect()).collect()
    }

    fn holds(&self, n: usize) -> bool {
        self.0[n * BLOCK..][..BLOCK] == payload(n as u64, BLOCK)
    }
}

fn settings(dir: &TempDir, storage: StorageKind, workers: u32) -> Config {
    let slots = BLOCKS as u32;
    config(dir, storage, slots, slots).block_bytes(BLOCK).bypass_host(true).workers(workers)
}

fn keys() -> Vec<BlockKey> {
    (0..BLOCKS as u64).map(key).collect()
}

fn all(results: Vec<Result<bool, kvhoist::Error>>) -> Vec<bool> {
    results.into_iter().map(|result| result.expect("no error")).collect()
}

/// Stores all blocks by a cache of its own.
fn store_all(settings: Config, pool: &mut Pool, places: &[Vec<Segment>]) {
    let cache = block_on(Cache::open(settings)).expect("open");
    let region = pool.register(&cache);
    assert_eq!(all(block_on(cache.store_from(&keys(), None, places)).expect("stored")), [true; BLOCKS]);
    block_on(cache.close()).expect("close");
    drop(region);
}

/// Stores all blocks and loads them with a cache of its own each, so that they come from disk. Returns the pieces of
/// work that workers did for the load.
fn round_trip(storage: StorageKind, workers: u32, segments: usize) -> u64 {
    let (dir, mut pool) = (directory(), Pool::filled());
    let places = pool.places(segments);
    store_all(settings(&dir, storage, workers), &mut pool, &places);

    let cache = block_on(Cache::open(settings(&dir, storage, workers))).expect("open again");
    let region = pool.register(&cache);
    pool.0.fill(0xee);
    assert_eq!(all(block_on(cache.load_into(&keys(), &places)).expect("loaded")), [true; BLOCKS]);
    assert!((0..BLOCKS).all(|n| pool.holds(n)), "the right bytes");
    let done = cache.stats().work_done;
    block_on(cache.unregister(&region)).expect("unregistered");
    block_on(cache.close()).expect("close");
    done
}

#[test]
fn blocks_that_come_together_are_verified_and_copied_by_workers() {
    for storage in [StorageKind::Uring, StorageKind::Blocking] {
        for segments in [1, 16] {
            let done = round_trip(storage, 2, segments);
            assert!(done > BLOCKS as u64 / 4, "{storage:?}, {segments} segments: {done} pieces of work");
        }
    }
}

#[test]
fn without_workers_the_reactor_does_it_all() {
    for segments in [1, 16] {
        assert_eq!(round_trip(StorageKind::Auto, 0, segments), 0, "{segments} segments");
    }
}

#[test]
fn a_block_that_is_alone_is_not_handed_over() {
    let (dir, mut pool) = (directory(), Pool::filled());
    let places = pool.places(1);
    let cache = block_on(Cache::open(settings(&dir, StorageKind::Auto, 2))).expect("open");
    let region = pool.register(&cache);
    for (key, place) in keys().iter().zip(&places) {
        let one = || (std::slice::from_ref(key), std::slice::from_ref(place));
        assert_eq!(all(block_on(cache.store_from(one().0, None, one().1)).expect("stored")), [true]);
        assert_eq!(all(block_on(cache.load_into(one().0, one().1)).expect("loaded")), [true]);
    }
    assert_eq!(cache.stats().work_done, 0);
    block_on(cache.unregister(&region)).expect("unregistered");
    block_on(cache.close()).expect("close");
}

/// Stores and loads the first 16 KiB of so many blocks, in a call each. Returns the pieces of work that workers did.
fn round_trip_of_small(blocks: usize) -> u64 {
    const SMALL: usize = 16 << 10;
    let (dir, mut pool) = (directory(), Pool::filled());
    let mut places = pool.places(1);
    places.truncate(blocks);
    places.iter_mut().for_each(|place| place[0].len = SMALL);
    let cache = block_on(Cache::open(settings(&dir, StorageKind::Uring, 2).block_bytes(SMALL))).expect("open");
    let region = pool.register(&cache);
    let stored = block_on(cache.store_from(&keys()[..blocks], None, &places)).expect("stored");
    assert_eq!(all(stored), vec![true; blocks]);
    pool.0.fill(0xee);
    assert_eq!(all(block_on(cache.load_into(&keys()[..blocks], &places)).expect("loaded")), vec![true; blocks]);
    let here = |n: usize| pool.0[n * BLOCK..][..SMALL] == payload(n as u64, BLOCK)[..SMALL];
    assert!((0..blocks).all(here), "the right bytes");
    let done = cache.stats().work_done;
    block_on(cache.unregister(&region)).expect("unregistered");
    block_on(cache.close()).expect("close");
    done
}

#[test]
fn small_blocks_are_moved_by_workers_if_there_are_many() {
    let done = round_trip_of_small(BLOCKS);
    assert!(done > BLOCKS as u64, "{done} pieces of work for {BLOCKS} stores and as many loads");
    assert_eq!(round_trip_of_small(4), 0, "a few are not worth waking a thread");
}

#[test]
fn workers_find_every_damaged_block() {
    for segments in [1, 16] {
        let (dir, mut pool) = (directory(), Pool::filled());
        let places = pool.places(segments);
        store_all(settings(&dir, StorageKind::Auto, 3), &mut pool, &places);
        for n in (0..BLOCKS as u64).step_by(5) {
            damage(&dir, &payload(n, BLOCK)[..64]);
        }

        let cache = block_on(Cache::open(settings(&dir, StorageKind::Auto, 3))).expect("open again");
        let region = pool.register(&cache);
        pool.0.fill(0xee);
        let found = all(block_on(cache.load_into(&keys(), &places)).expect("asked"));
        for (n, found) in found.into_iter().enumerate() {
            assert_eq!(found, n % 5 != 0, "block {n}");
            assert!(!found || pool.holds(n), "block {n}: the right bytes");
        }
        assert_eq!(cache.stats().checksum_failures, BLOCKS.div_ceil(5) as u64);
        block_on(cache.unregister(&region)).expect("unregistered");
        block_on(cache.close()).expect("close");
    }
}

#[test]
fn blocks_that_are_fetched_together_are_read_by_workers_and_damaged_ones_are_found() {
    let (dir, mut pool) = (directory(), Pool::filled());
    let places = pool.places(1);
    store_all(settings(&dir, StorageKind::Uring, 2), &mut pool, &places);
    damage(&dir, &payload(7, BLOCK)[..64]);

    let mut failures = 0;
    until_workers_help(|| {
        let cache = block_on(Cache::open(settings(&dir, StorageKind::Uring, 2))).expect("open again");
        at_once(|n| {
            let found = block_on(cache.fetch(&key(n))).expect("no error").map(|lease| lease.to_vec());
            assert_eq!(found, (n != 7).then(|| payload(n, BLOCK)), "block {n}");
        });
        let stats = cache.stats();
        failures += stats.checksum_failures;
        block_on(cache.close()).expect("close");
        stats.work_done
    });
    assert_eq!(failures, 1, "it is gone once it was found");
}

#[test]
fn loads_that_are_given_up_leave_their_memory_to_the_workers_until_the_kernel_is_done() {
    let (dir, mut pool) = (directory(), Pool::filled());
    let places = pool.places(1);
    let cache = block_on(Cache::open(settings(&dir, StorageKind::Uring, 2))).expect("open");
    let region = pool.register(&cache);
    all(block_on(cache.store_from(&keys(), None, &places)).expect("stored"));
    for polls in 1..20 {
        let (keys, places) = (keys(), places.clone());
        let mut load = Box::pin(cache.load_into(&keys, &places));
        for _ in 0..polls {
            let waker = std::task::Context::from_waker(std::task::Waker::noop());
            if load.as_mut().poll(&mut { waker }).is_ready() {
                break;
            }
            std::thread::yield_now();
        }
    }
    // Waits for what is in flight: the pool is ours after that.
    block_on(cache.unregister(&region)).expect("unregistered");
    pool.0.fill(0xee);
    assert!(pool.0.iter().all(|&byte| byte == 0xee), "nothing writes there any more");
    let region = pool.register(&cache);
    assert_eq!(all(block_on(cache.load_into(&keys(), &places)).expect("loaded")), [true; BLOCKS]);
    assert!((0..BLOCKS).all(|n| pool.holds(n)), "the right bytes");
    block_on(cache.unregister(&region)).expect("unregistered");
    block_on(cache.close()).expect("close");
}

/// Calls `run` for every block at the same time, each from a thread of its own.
fn at_once(run: impl Fn(u64) + Sync) {
    std::thread::scope(|scope| {
        let run = &run;
        let callers: Vec<_> = (0..BLOCKS as u64).map(|n| scope.spawn(move || run(n))).collect();
        callers.into_iter().for_each(|caller| caller.join().expect("no panic"));
    });
}

/// Repeats `run` until workers have done a good part of it: they do as many pieces of work as it returns. On a busy
/// machine its callers may run one after the other, and each block is alone then.
fn until_workers_help(mut run: impl FnMut() -> u64) {
    let begun = std::time::Instant::now();
    loop {
        let done = run();
        if done > BLOCKS as u64 / 4 {
            return;
        }
        assert!(begun.elapsed().as_secs() < 60, "{done} pieces of work");
    }
}

#[test]
fn blocks_that_are_stored_together_are_written_by_workers() {
    let dir = directory();
    let cache = block_on(Cache::open(settings(&dir, StorageKind::Uring, 2))).expect("open");
    until_workers_help(|| {
        at_once(|n| _ = block_on(cache.remove(&key(n))).expect("removed"));
        let before = cache.stats().work_done;
        // Their callers compute the checksums.
        at_once(|n| block_on(cache.store(&key(n), None, &payload(n, BLOCK))).expect("stored"));
        cache.stats().work_done - before
    });
    block_on(cache.close()).expect("close");

    let cache = block_on(Cache::open(settings(&dir, StorageKind::Uring, 0))).expect("open again");
    for n in 0..BLOCKS as u64 {
        let lease = block_on(cache.fetch(&key(n))).expect("no error").expect("it was stored");
        assert_eq!(*lease, payload(n, BLOCK), "block {n}");
    }
    block_on(cache.close()).expect("close");
}

/// What a store at rest has of the blocks: the right bytes, or a miss.
fn found(dir: &TempDir) -> Vec<bool> {
    let cache = block_on(Cache::open(settings(dir, StorageKind::Uring, 0))).expect("open again");
    let find = |n: u64| {
        let lease = block_on(cache.fetch(&key(n))).expect("no error");
        lease.map(|lease| assert_eq!(*lease, payload(n, BLOCK), "block {n}")).is_some()
    };
    let found = (0..BLOCKS as u64).map(find).collect();
    assert_eq!(cache.stats().checksum_failures, 0, "no record is there without its block");
    block_on(cache.close()).expect("close");
    found
}

#[test]
fn stores_that_are_given_up_leave_their_memory_to_the_workers_until_the_kernel_is_done() {
    for polls in [1, 3, 7] {
        let (dir, mut pool) = (directory(), Pool::filled());
        let places = pool.places(1);
        let cache = block_on(Cache::open(settings(&dir, StorageKind::Uring, 2))).expect("open");
        let region = pool.register(&cache);
        let keys = keys();
        {
            let mut store = Box::pin(cache.store_from(&keys, None, &places));
            for _ in 0..polls {
                let waker = std::task::Context::from_waker(std::task::Waker::noop());
                if store.as_mut().poll(&mut { waker }).is_ready() {
                    break;
                }
                std::thread::yield_now();
            }
        }
        // Waits for what is in flight: the pool is ours after that, and what is on disk was read before.
        block_on(cache.unregister(&region)).expect("unregistered");
        pool.0.fill(0xee);
        block_on(cache.close()).expect("close");
        found(&dir);
    }
}

#[test]
fn blocks_that_are_removed_while_workers_write_them_are_not_there_later() {
    for round in 0..4 {
        let (dir, mut pool) = (directory(), Pool::filled());
        let places = pool.places(1);
        let cache = block_on(Cache::open(settings(&dir, StorageKind::Uring, 3))).expect("open");
        let region = pool.register(&cache);
        std::thread::scope(|scope| {
            let (keys, cache) = (keys(), &cache);
            let (places, each) = (&places, keys.clone());
            let store = scope.spawn(move || all(block_on(cache.store_from(&each, None, places)).expect("stored")));
            while !store.is_finished() {
                for key in keys.iter().skip(round).step_by(3) {
                    block_on(cache.remove(key)).expect("removed");
                }
            }
            assert_eq!(store.join().expect("no panic"), [true; BLOCKS]);
        });
        let there: Vec<bool> = keys().iter().map(|key| cache.contains(key)).collect();
        assert!((0..BLOCKS).all(|n| there[n] || n % 3 == round % 3), "blocks that nobody removed: {there:?}");
        block_on(cache.unregister(&region)).expect("unregistered");
        block_on(cache.close()).expect("close");
        assert_eq!(found(&dir), there);
    }
}

#[test]
fn memory_that_takes_no_bytes_is_an_error_of_each_of_its_blocks() {
    let (dir, mut pool) = (directory(), Pool::filled());
    let places = pool.places(1);
    store_all(settings(&dir, StorageKind::Auto, 2), &mut pool, &places);

    let cache = block_on(Cache::open(settings(&dir, StorageKind::Auto, 2))).expect("open again");
    let region = pool.register(&cache);
    let protect = |access| {
        // SAFETY: pages of the pool, which nothing touches meanwhile.
        let result = unsafe { libc::mprotect(pool.0.as_ptr().cast_mut().cast(), BLOCK, access) };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    };
    protect(libc::PROT_READ);
    let loaded = block_on(cache.load_into(&keys(), &places)).expect("asked");
    protect(libc::PROT_READ | libc::PROT_WRITE);
    let refused = loaded[0].as_ref().expect_err("it cannot be written").to_string();
    assert!(refused.contains("read into the caller's memory"), "{refused}");
    assert!(loaded[1..].iter().all(|loaded| matches!(loaded, Ok(true))), "the others are loaded");
    assert_eq!(cache.stats().checksum_failures, 0, "it says nothing about the disk");
    block_on(cache.unregister(&region)).expect("unregistered");
    block_on(cache.close()).expect("close");
}
