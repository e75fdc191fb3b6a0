//! A caller's device memory, filled from disk and stored to it by libcufile through the cache's device slots.

use kvhoist::{
    Cache, Route, Segment, Stats, Tier, block_on,
    internals::{
        gpu::{DeviceBuffer, Gpu},
        memory::DeviceMemory,
    },
};

use super::{
    common::{self, BLOCK_BYTES, key, payload},
    doubles::{BLOCKS, ask, cold, config, open, with_double},
};

/// What the caller has in its memory while nothing of it is loaded.
const MINE: u8 = 0x3c;

/// A caller's pool: each block in two segments that are apart.
struct Pool(DeviceBuffer);

impl Pool {
    fn new() -> Self {
        let gpu = Gpu::open(0).expect("the double is a device");
        let pool = Pool(DeviceBuffer::new(gpu, BLOCKS as usize * BLOCK_BYTES).expect("memory"));
        pool.fill(&[MINE; BLOCK_BYTES]);
        pool
    }

    fn segments(&self, n: u64) -> Vec<Segment> {
        let half = BLOCK_BYTES / 2;
        let at = |place: usize| Segment { ptr: self.0.base().as_ptr().wrapping_add(place * half), len: half };
        vec![at(n as usize), at((BLOCKS + n) as usize)]
    }

    fn write(&self, n: u64, bytes: &[u8]) {
        for (segment, part) in self.segments(n).iter().zip(bytes.chunks(BLOCK_BYTES / 2)) {
            // SAFETY: memory of the pool, which is host memory under the double; no transfer uses it now.
            unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), segment.ptr, segment.len) };
        }
    }

    fn fill(&self, bytes: &[u8]) {
        (0..BLOCKS).for_each(|n| self.write(n, bytes));
    }

    fn read(&self, n: u64) -> Vec<u8> {
        let part = |segment: &Segment| {
            // SAFETY: as in `write`.
            unsafe { std::slice::from_raw_parts(segment.ptr.cast_const(), segment.len) }
        };
        self.segments(n).iter().flat_map(part).copied().collect()
    }

    fn all(&self) -> (Vec<kvhoist::BlockKey>, Vec<Vec<Segment>>) {
        ((0..BLOCKS).map(key).collect(), (0..BLOCKS).map(|n| self.segments(n)).collect())
    }

    /// Registers the pool for a call.
    fn lend<R>(&self, cache: &Cache, run: impl FnOnce() -> R) -> R {
        // SAFETY: the pool lives until the region is given back, and nothing else uses it until then.
        let lent = unsafe { kvhoist::Memory::device(self.0.base().as_ptr(), self.0.bytes()) };
        let region = kvhoist::block_on(cache.register(lent)).expect("registered");
        let result = run();
        block_on(cache.unregister(&region)).expect("its own region");
        result
    }

    /// Stores every block from the pool.
    fn store(&self, cache: &Cache) {
        (0..BLOCKS).for_each(|n| self.write(n, &payload(n, BLOCK_BYTES)));
        let (keys, segments) = self.all();
        let results = self.lend(cache, || block_on(cache.store_from(&keys, None, &segments)).expect("stored"));
        results.into_iter().enumerate().for_each(|(n, result)| assert!(result.expect("a store"), "block {n}"));
        self.fill(&[MINE; BLOCK_BYTES]);
    }

    /// Loads every block into the pool, and compares it.
    fn load(&self, cache: &Cache) {
        let (keys, segments) = self.all();
        let results = self.lend(cache, || block_on(cache.load_into(&keys, &segments)).expect("loaded"));
        for (n, result) in results.into_iter().enumerate() {
            assert!(result.expect("a load"), "block {n} is a miss");
            assert!(self.read(n as u64) == payload(n as u64, BLOCK_BYTES), "block {n} has other bytes");
        }
        self.fill(&[MINE; BLOCK_BYTES]);
    }
}

/// Closes the cache, whatever the library still has of it.
fn end(cache: Cache) -> Stats {
    kvhoist::internals::validate(&cache).expect("valid");
    block_on(cache.close()).expect("close");
    cache.stats()
}

#[test]
fn a_pool_is_filled_and_stored_without_host_memory() {
    with_double("regions::a_pool_is_filled_and_stored_without_host_memory", &["direct", "p2p"], |_| {
        let (directory, pool) = (common::directory(), Pool::new());
        let cache = open(config(&directory));
        pool.store(&cache);
        let stats = end(cache);
        assert_eq!(stats.route_blocks(Route::DeviceToDisk), BLOCKS, "{stats:?}");
        assert_eq!((stats.tier(Tier::Host).bytes_in, stats.stores), (0, BLOCKS));
        let cache = open(config(&directory));
        pool.load(&cache);
        let stats = end(cache);
        assert_eq!(stats.route_blocks(Route::DiskToDevice), BLOCKS, "{stats:?}");
        assert_eq!((stats.tier(Tier::Host).bytes_in, stats.cufile_errors, stats.checksum_failures), (0, 0, 0));
    });
}

#[test]
fn what_fails_goes_through_host_memory() {
    let modes = ["event", "ends", "wrong", "once", "hangwrite"];
    with_double("regions::what_fails_goes_through_host_memory", &modes, |mode| {
        let (directory, pool) = (common::directory(), Pool::new());
        let cache = open(config(&directory));
        assert!(cache.stats().cufile, "the self-test is no batch: {:?}", cache.stats());
        pool.store(&cache);
        pool.load(&cache);
        let stats = end(cache);
        // Of many requests in flight, the three that fail `once` may be three in a row, which end the route.
        assert!(!stats.cufile || mode == "once", "{stats:?}");
        assert_eq!((stats.checksum_failures, stats.quarantined, stats.write_errors), (0, 0, 0), "no fault of the disk");
        if mode == "hangwrite" {
            ask("release");
        }
        let reopened = (0..1000).find_map(|_| block_on(Cache::open(config(&directory))).ok());
        let cache = reopened.expect("the library has given the file back");
        pool.load(&cache);
        end(cache);
    });
}

/// Two threads store a block, the first from memory of the device, by a write that never returns.
#[test]
fn who_stores_the_same_block_hears_nothing_of_a_write_that_fails() {
    with_double("regions::who_stores_the_same_block_hears_nothing_of_a_write_that_fails", &["hangwrite"], |_| {
        let (directory, pool) = (common::directory(), Pool::new());
        let cache = open(config(&directory));
        pool.write(0, &payload(0, BLOCK_BYTES));
        let (keys, segments) = ([key(0)], [pool.segments(0)]);
        std::thread::scope(|scope| {
            let first = scope
                .spawn(|| pool.lend(&cache, || block_on(cache.store_from(&keys, None, &segments)).expect("asked")));
            while ask("in_flight") == 0 {
                std::thread::yield_now();
            }
            block_on(common::store(&cache, 0));
            assert!(first.join().expect("no panic").iter().all(|stored| matches!(stored, Ok(true))));
        });
        block_on(cache.sync()).expect("nothing was refused");
        let stats = end(cache);
        assert_eq!((stats.writes_refused, stats.stores_failed), (0, 0), "{stats:?}");
        ask("release");
        let reopened = (0..1000).find_map(|_| block_on(Cache::open(config(&directory))).ok());
        let cache = reopened.expect("the library has given the file back");
        assert!(cache.contains(&key(0)), "it is on disk");
        end(cache);
    });
}

#[test]
fn a_block_that_is_wrong_on_disk_is_a_miss_and_the_disks_fault() {
    with_double("regions::a_block_that_is_wrong_on_disk_is_a_miss_and_the_disks_fault", &["direct"], |_| {
        use std::os::unix::fs::FileExt;
        let (directory, pool) = (common::directory(), Pool::new());
        block_on(cold(config(&directory)).close()).expect("close");
        // Every slot's last byte.
        let file = std::fs::OpenOptions::new().write(true).open(common::store_file(&directory)).expect("the store");
        let bytes = file.metadata().expect("its size").len();
        (1..=256).for_each(|slot| file.write_all_at(&[0x5a], bytes - (slot - 1) * 16384 - 1).expect("written"));
        let cache = open(config(&directory));
        let (keys, segments) = pool.all();
        let results = pool.lend(&cache, || block_on(cache.load_into(&keys, &segments)).expect("loaded"));
        for (n, result) in results.into_iter().enumerate() {
            assert!(!result.expect("a miss is no error"), "block {n}");
        }
        let stats = end(cache);
        assert!(stats.cufile && stats.checksum_failures == BLOCKS, "{stats:?}");
    });
}

#[test]
fn a_call_that_comes_back_late_writes_to_no_memory_of_the_callers() {
    with_double("regions::a_call_that_comes_back_late_writes_to_no_memory_of_the_callers", &["hang"], |_| {
        let (directory, pool) = (common::directory(), Pool::new());
        let cache = cold(config(&directory).device_layout(None));
        pool.load(&cache);
        let stats = cache.stats();
        assert!(!stats.cufile && stats.cufile_stuck > 0, "{stats:?}");
        // The caller has its memory back and uses it for something else.
        ask("release");
        while cache.stats().cufile_stuck > 0 {
            std::thread::yield_now();
        }
        (0..BLOCKS).for_each(|n| assert!(pool.read(n) == [MINE; BLOCK_BYTES], "block {n} was written late"));
        end(cache);
    });
}
