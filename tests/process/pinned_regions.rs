//! `Memory::pinned`: a caller's memory as buffers of the ring, coming and going while blocks move.
//!
//! One test, for what is pinned is counted for the whole process.

#[path = "../common/mod.rs"]
mod common;

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use common::{SetOnDrop, config, directory, key, payload};
use kvhoist::{
    BlockKey, Cache, Memory, Region, Route, Segment, StorageKind, block_on,
    internals::{io::AlignedBuf, pin_region},
};

const BLOCK: usize = 64 << 10;
/// The host tier and four pools, 5 MiB, are all pinned at a time: a user may lock 8 MiB where nobody has raised it.
const BLOCKS: usize = 16;
const POOL: usize = BLOCKS * BLOCK;

/// Memory for all blocks.
struct Pool {
    memory: AlignedBuf,
    places: Vec<Vec<Segment>>,
}

// SAFETY: each pool is used by one thread at a time.
unsafe impl Send for Pool {}

impl Pool {
    fn new() -> Self {
        let mut memory = AlignedBuf::zeroed(POOL);
        let start = memory.as_mut_ptr();
        let place = |block| vec![Segment { ptr: start.wrapping_add(block * BLOCK), len: BLOCK }];
        Pool { places: (0..BLOCKS).map(place).collect(), memory }
    }

    fn register(&mut self, cache: &Cache) -> Region {
        // SAFETY: the pool outlives the cache, and is looked at where no call on it is in flight.
        let memory = unsafe { Memory::host(self.memory.as_mut_ptr(), POOL) };
        block_on(cache.register(memory.pinned(true))).expect("registered")
    }

    /// Loads all blocks: how many were there. Those have the right bytes.
    fn load(&mut self, cache: &Cache) -> usize {
        self.memory.fill(0xee);
        let results = block_on(cache.load_into(&keys(), &self.places)).expect("asked");
        let mut there = 0;
        for (block, result) in results.into_iter().enumerate() {
            if result.expect("served") {
                assert!(self.memory[block * BLOCK..][..BLOCK] == payload(block as u64, BLOCK), "block {block}");
                there += 1;
            }
        }
        there
    }

    fn store(&mut self, cache: &Cache) {
        for block in 0..BLOCKS {
            self.memory[block * BLOCK..][..BLOCK].copy_from_slice(&payload(block as u64, BLOCK));
        }
        for result in block_on(cache.store_from(&keys(), None, &self.places)).expect("asked") {
            assert!(result.expect("stored"));
        }
    }

    /// Puts other pages in the place of those that it has.
    fn replace_pages(&mut self) {
        // SAFETY: whole pages of memory that is this pool's alone; what they held is gone.
        let refused = unsafe { libc::madvise(self.memory.as_mut_ptr().cast(), POOL, libc::MADV_DONTNEED) };
        assert_eq!(refused, 0, "{}", std::io::Error::last_os_error());
    }
}

fn keys() -> Vec<BlockKey> {
    (0..BLOCKS as u64).map(key).collect()
}

/// Bytes that the kernel has pinned for this process.
fn pinned() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("procfs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmPin:")).expect("a line of every process");
    let kib: usize = line.trim().trim_end_matches(" kB").parse().expect("a number");
    kib << 10
}

/// Waits until so much is pinned: a transfer in flight keeps what it began with until it ends.
#[track_caller]
fn assert_pinned(bytes: usize) {
    let began = Instant::now();
    while pinned() != bytes {
        assert!(began.elapsed() < Duration::from_secs(60), "{} bytes are pinned, expected {bytes}", pinned());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Other regions come and go, before and after the first in the table, while it is in use.
fn others_come_and_go(cache: &Cache, first: &mut Pool, arena: usize) {
    let done = AtomicBool::new(false);
    let done = &done;
    std::thread::scope(|scope| {
        let (used, ended) = (first, SetOnDrop(done));
        let reader = scope.spawn(move || {
            let mut rounds = 0;
            while !done.load(Ordering::Relaxed) || rounds < 3 {
                assert_eq!(used.load(cache), BLOCKS);
                rounds += 1;
            }
        });
        let mut others: Vec<Pool> = (0..3).map(|_| Pool::new()).collect();
        for turn in 0..6 {
            let mut regions: Vec<Region> = others.iter_mut().map(|pool| pool.register(cache)).collect();
            assert!(regions.iter().all(Region::is_pinned));
            assert_pinned(arena + 4 * POOL);
            // The one that goes leaves a hole, which the next is put into.
            let gone = turn % 3;
            block_on(cache.unregister(&regions.remove(gone))).expect("its own region");
            assert_pinned(arena + 3 * POOL);
            let again = others[gone].register(cache);
            assert!(again.is_pinned());
            for pool in &mut others {
                assert_eq!(pool.load(cache), BLOCKS);
            }
            regions.push(again);
            for region in regions {
                block_on(cache.unregister(&region)).expect("its own region");
            }
            assert_pinned(arena + POOL);
        }
        drop(ended);
        reader.join().expect("every load was right");
    });
}

/// Pages that are put in the place of pinned ones get nothing of what is read, so that all blocks are read again
/// through host slots.
fn pages_that_were_pinned_are_read_into(cache: &Cache, first: &mut Pool) {
    let mut other = Pool::new();
    let region_of_other = other.register(cache);
    assert!(region_of_other.is_pinned());
    other.replace_pages();
    let before = cache.stats();
    assert_eq!(other.load(cache), BLOCKS);
    let stats = cache.stats();
    let went = |route: Route| stats.route_blocks(route) - before.route_blocks(route);
    let went = [Route::DiskToRegion, Route::DiskToHost].map(went);
    assert_eq!(went, [0, BLOCKS as u64], "they were read through the page tables");
    assert_eq!((stats.checksum_failures, stats.quarantined), (0, 0), "the disk is not to blame");
    for key in keys() {
        assert!(block_on(cache.remove(&key)).expect("removed"), "the others go straight again");
    }
    first.store(cache);
    block_on(cache.unregister(&region_of_other)).expect("its own region");
    assert_eq!(first.load(cache), BLOCKS, "the others were not harmed");
}

#[test]
fn regions_are_pinned_and_given_back_while_blocks_move() {
    let dir = directory();
    // The reactor makes the transfers: its ring has the buffers.
    let settings = |storage| {
        config(&dir, storage, BLOCKS as u32, 2 * BLOCKS as u32).block_bytes(BLOCK).bypass_host(true).workers(0)
    };
    let cache = block_on(Cache::open(settings(StorageKind::Blocking))).expect("open");
    let mut first = Pool::new();
    let region = first.register(&cache);
    assert!(!region.is_pinned(), "threads have no use for it");
    first.store(&cache);
    block_on(cache.unregister(&region)).expect("its own region");
    block_on(cache.close()).expect("closed");

    let Ok(cache) = block_on(Cache::open(settings(StorageKind::Uring))) else {
        common::skip::skipped("this system refuses rings");
        return;
    };
    if !cache.stats().registered {
        common::skip::skipped("this system lets no memory be pinned");
        return;
    }
    let arena = pinned();
    let region = first.register(&cache);
    assert!(region.is_pinned());
    assert_pinned(arena + POOL);
    assert!(block_on(pin_region(&cache, &region)).expect("answered"));
    // Once, however often it is asked for.
    assert_pinned(arena + POOL);
    assert_eq!(first.load(&cache), BLOCKS);

    others_come_and_go(&cache, &mut first, arena);
    let stats = cache.stats();
    assert_eq!((stats.read_errors, stats.write_errors, stats.checksum_failures), (0, 0, 0));

    pages_that_were_pinned_are_read_into(&cache, &mut first);
    block_on(cache.unregister(&region)).expect("its own region");
    assert_pinned(arena);
    block_on(cache.close()).expect("closed");
}
