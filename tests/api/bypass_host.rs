//! `Config::bypass_host`: blocks between disk and a caller's pool, with no copy in the host tier.

use crate::common;

use std::{
    fs::OpenOptions,
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, OpenOptionsExt},
    },
    path::Path,
};

use common::{config, damage, directory, key, payload, store_file};
use kvhoist::{
    Cache, Config, Region, Route, Segment, StorageKind, Tier, WritePolicy, block_on, internals::io::AlignedBuf,
};
use tempfile::TempDir;

const SEGMENT: usize = 64 << 10;
const BLOCK: usize = 2 * SEGMENT;
const BLOCKS: usize = 8;

/// An engine's pool: the keys of all blocks, then their values. Behind it, room to lie out of line.
struct Pool(AlignedBuf);

impl Pool {
    fn new() -> Self {
        Pool(AlignedBuf::zeroed(BLOCKS * BLOCK + 4096))
    }

    fn register(&mut self, cache: &Cache) -> Region {
        // SAFETY: the pool outlives the cache in every test, and is looked at where no call is in flight.
        let lent = unsafe { kvhoist::Memory::host(self.0.as_mut_ptr(), self.0.len()) };
        kvhoist::block_on(cache.register(lent)).expect("register")
    }

    /// Two segments a block, each `shift` bytes off its place.
    fn places(&mut self, shift: usize) -> Vec<Vec<Segment>> {
        let start = self.0.as_mut_ptr().wrapping_add(shift);
        let half = |at: usize| Segment { ptr: start.wrapping_add(at * SEGMENT), len: SEGMENT };
        (0..BLOCKS).map(|block| vec![half(block), half(BLOCKS + block)]).collect()
    }

    fn fill(&mut self, shift: usize) {
        for block in 0..BLOCKS {
            let payload = payload(block as u64, BLOCK);
            for (half, at) in [block, BLOCKS + block].into_iter().enumerate() {
                self.0[shift + at * SEGMENT..][..SEGMENT].copy_from_slice(&payload[half * SEGMENT..][..SEGMENT]);
            }
        }
    }

    fn holds(&self, block: usize) -> bool {
        let halves = [&self.0[block * SEGMENT..][..SEGMENT], &self.0[(BLOCKS + block) * SEGMENT..][..SEGMENT]];
        halves.concat() == payload(block as u64, BLOCK)
    }

    fn clear(&mut self) {
        self.0.fill(0xee);
    }
}

fn settings(dir: &TempDir, storage: StorageKind) -> Config {
    config(dir, storage, BLOCKS as u32, 2 * BLOCKS as u32).block_bytes(BLOCK).bypass_host(true)
}

fn keys() -> Vec<kvhoist::BlockKey> {
    (0..BLOCKS as u64).map(key).collect()
}

fn resident(cache: &Cache, tier: Tier) -> u64 {
    cache.stats().tier(tier).resident
}

fn store_all(cache: &Cache, places: &[Vec<Segment>]) {
    for result in block_on(cache.store_from(&keys(), None, places)).expect("asked") {
        assert!(result.expect("stored"));
    }
}

fn load_all(cache: &Cache, places: &[Vec<Segment>]) -> Vec<bool> {
    let results = block_on(cache.load_into(&keys(), places)).expect("asked");
    results.into_iter().map(|result| result.expect("served")).collect()
}

#[test]
fn blocks_go_straight_between_pool_and_disk() {
    for storage in [StorageKind::Uring, StorageKind::Blocking] {
        let (dir, mut pool) = (directory(), Pool::new());
        let cache = block_on(Cache::open(settings(&dir, storage))).expect("open");
        let region = pool.register(&cache);
        let places = pool.places(0);
        pool.fill(0);
        store_all(&cache, &places);
        assert_eq!((resident(&cache, Tier::Host), resident(&cache, Tier::Disk)), (0, BLOCKS as u64));
        store_all(&cache, &places);
        assert_eq!(resident(&cache, Tier::Disk), BLOCKS as u64, "known blocks are not written again");
        block_on(cache.close()).expect("close");
        drop(region);

        let cache = block_on(Cache::open(settings(&dir, storage))).expect("open again");
        let region = pool.register(&cache);
        pool.clear();
        assert_eq!(load_all(&cache, &places), [true; BLOCKS]);
        assert!((0..BLOCKS).all(|block| pool.holds(block)), "the right bytes");
        assert_eq!(resident(&cache, Tier::Host), 0);
        // A block that is in the host tier all the same is taken from there.
        let lease = block_on(cache.fetch(&key(3))).expect("served").expect("stored");
        assert_eq!(*lease, payload(3, BLOCK));
        pool.clear();
        assert_eq!(load_all(&cache, &places), [true; BLOCKS]);
        assert!((0..BLOCKS).all(|block| pool.holds(block)), "the right bytes");
        block_on(cache.unregister(&region)).expect("its own region");
        block_on(cache.close()).expect("close");
    }
}

/// Whether the drive reads into memory that begins `shift` bytes into a page, and writes from it. Found out by trying.
fn reaches(directory: &Path, shift: usize) -> bool {
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).create(true).custom_flags(libc::O_DIRECT);
    let file = options.open(directory.join("tried")).expect("a file with O_DIRECT");
    let mut memory = AlignedBuf::zeroed(2 * 4096);
    let memory = &mut memory[shift..][..4096];
    file.write_at(memory, 0).is_ok() && file.read_at(memory, 0).is_ok()
}

/// Pages of the file that the page cache has.
fn cached_pages(path: &Path) -> usize {
    let file = std::fs::File::open(path).expect("the store");
    let len = usize::try_from(file.metadata().expect("its size").len()).expect("it is small");
    let mut there = vec![0u8; len.div_ceil(4096)];
    // SAFETY: a new mapping, which nothing else knows; `there` has room for its pages; it is unmapped again.
    unsafe {
        let start = libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0);
        assert_ne!(start, libc::MAP_FAILED, "mapped");
        assert_eq!(libc::mincore(start, len, there.as_mut_ptr()), 0, "{}", std::io::Error::last_os_error());
        libc::munmap(start, len);
    }
    there.into_iter().filter(|page| page & 1 == 1).count()
}

fn went(cache: &Cache, route: Route) -> u64 {
    cache.stats().route_blocks(route)
}

#[test]
fn memory_goes_straight_where_the_drive_reaches_it() {
    for storage in [StorageKind::Uring, StorageKind::Blocking] {
        let mut straight = Vec::new();
        for shift in [0, 2048, 512, 64, 4, 1] {
            let (dir, tried, mut pool) = (directory(), directory(), Pool::new());
            let cache = block_on(Cache::open(settings(&dir, storage))).expect("open");
            let region = pool.register(&cache);
            let places = pool.places(shift);
            pool.fill(shift);
            store_all(&cache, &places);
            pool.clear();
            assert_eq!(load_all(&cache, &places), [true; BLOCKS]);
            pool.0.copy_within(shift..shift + BLOCKS * BLOCK, 0);
            assert!((0..BLOCKS).all(|block| pool.holds(block)), "the right bytes");
            assert_eq!(cached_pages(&store_file(&dir)), 0, "what was read and written left the page cache alone");
            let expected = if reaches(tried.path(), shift) { BLOCKS as u64 } else { 0 };
            let stats = cache.stats();
            assert_eq!(
                [went(&cache, Route::RegionToDisk), went(&cache, Route::DiskToRegion)],
                [expected; 2],
                "{storage:?}, memory {shift} bytes into a page; asked, the kernel said {}",
                stats.memory_align_bytes
            );
            assert_eq!((stats.read_errors, stats.write_errors), (0, 0), "nothing was tried that could not be");
            straight.push((shift, expected > 0));
            block_on(cache.unregister(&region)).expect("its own region");
            block_on(cache.close()).expect("close");
        }
        println!("{storage:?}, went straight by its place in a page: {straight:?}");
    }
}

#[test]
fn what_does_not_lie_for_direct_io_goes_through_the_host_tier() {
    for (shift, policy) in [(1, WritePolicy::WriteThrough), (0, WritePolicy::WriteBack)] {
        let (dir, mut pool) = (directory(), Pool::new());
        let settings = settings(&dir, StorageKind::Auto).write_policy(policy);
        let cache = block_on(Cache::open(settings)).expect("open");
        let region = pool.register(&cache);
        let places = pool.places(shift);
        pool.fill(shift);
        store_all(&cache, &places);
        assert_eq!(resident(&cache, Tier::Host), BLOCKS as u64, "shift {shift}, {policy:?}");
        pool.clear();
        assert_eq!(load_all(&cache, &places), [true; BLOCKS]);
        pool.0.copy_within(shift..shift + BLOCKS * BLOCK, 0);
        assert!((0..BLOCKS).all(|block| pool.holds(block)), "the right bytes");
        block_on(cache.unregister(&region)).expect("its own region");
        block_on(cache.close()).expect("close");
    }
}

#[test]
fn a_damaged_block_is_found_out_in_the_pool_and_never_served() {
    let (dir, mut pool) = (directory(), Pool::new());
    let settings = settings(&dir, StorageKind::Auto);
    let cache = block_on(Cache::open(settings.clone())).expect("open");
    let region = pool.register(&cache);
    let places = pool.places(0);
    pool.fill(0);
    store_all(&cache, &places);
    block_on(cache.close()).expect("close");
    drop(region);

    damage(&dir, &payload(5, BLOCK));
    let cache = block_on(Cache::open(settings)).expect("open again");
    let region = pool.register(&cache);
    pool.clear();
    let loaded = load_all(&cache, &places);
    assert!((0..BLOCKS).all(|block| loaded[block] == (block != 5)), "{loaded:?}");
    assert!((0..BLOCKS).all(|block| block == 5 || pool.holds(block)), "the right bytes");
    let stats = cache.stats();
    let faults = (stats.checksum_failures, stats.changed_memory, stats.quarantined);
    assert_eq!(faults, (1, 0, 0), "an earlier run stored it");
    assert!(block_on(cache.fetch(&key(5))).expect("served").is_none(), "it is gone");
    pool.fill(0);
    store_all(&cache, &places);
    pool.clear();
    assert_eq!(load_all(&cache, &places), [true; BLOCKS]);
    block_on(cache.unregister(&region)).expect("its own region");
    block_on(cache.close()).expect("close");
}

#[test]
fn callers_of_one_block_at_once_all_get_it() {
    let (dir, mut pool) = (directory(), Pool::new());
    let cache = block_on(Cache::open(settings(&dir, StorageKind::Auto))).expect("open");
    let region = pool.register(&cache);
    let places = pool.places(0);
    pool.fill(0);
    // The same block from every place, and by the other ways as well.
    let (one, many) = (key(0), vec![key(0); BLOCKS]);
    let same: Vec<Vec<Segment>> = vec![places[0].clone(); BLOCKS];
    let bytes = payload(0, BLOCK);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for result in block_on(cache.store_from(&many, None, &same)).expect("asked") {
                assert!(result.expect("stored"));
            }
        });
        block_on(cache.store(&one, None, &bytes)).expect("stored");
    });
    assert_eq!(resident(&cache, Tier::Disk), 1);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let results = block_on(cache.load_into(&many, &places)).expect("asked");
            assert!(results.iter().all(|result| matches!(result, Ok(true))), "{results:?}");
        });
        let lease = block_on(cache.fetch(&one)).expect("served").expect("stored");
        assert_eq!(*lease, bytes);
    });
    for block in 0..BLOCKS {
        let halves = [&pool.0[block * SEGMENT..][..SEGMENT], &pool.0[(BLOCKS + block) * SEGMENT..][..SEGMENT]];
        assert_eq!(halves.concat(), bytes, "place {block}");
    }
    kvhoist::internals::validate(&cache).expect("in order");
    block_on(cache.unregister(&region)).expect("its own region");
    block_on(cache.close()).expect("close");
}
