//! `Memory::pinned` moves a caller's memory into huge pages, and changes nothing of what it holds.

#[path = "../common/mod.rs"]
mod common;

use std::{
    fs,
    ops::Range,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use common::{SetOnDrop, config, directory, key, payload};
use kvhoist::{BlockKey, Cache, Memory, Segment, StorageKind, block_on};

const HUGE: usize = 2 << 20;
const BLOCK: usize = 256 << 10;
const BLOCKS: usize = 32;
const POOL: usize = BLOCKS * BLOCK;

/// Memory of small pages that begins, by its own account, half a block after a huge page.
struct Pool {
    mapping: *mut u8,
    start: *mut u8,
}

// SAFETY: plain memory; the threads of a test agree on who touches what.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

const MAPPED: usize = POOL + 2 * HUGE;

impl Pool {
    fn new() -> Self {
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address of the system's choice.
        let mapping = unsafe { libc::mmap(std::ptr::null_mut(), MAPPED, protection, flags, -1, 0) };
        assert_ne!(mapping, libc::MAP_FAILED);
        // SAFETY: our own mapping.
        assert_eq!(unsafe { libc::madvise(mapping, MAPPED, libc::MADV_NOHUGEPAGE) }, 0);
        let mapping: *mut u8 = mapping.cast();
        let start = mapping.wrapping_add(mapping.align_offset(HUGE) + BLOCK / 2);
        // SAFETY: within the mapping, which nothing else knows.
        unsafe { start.write_bytes(0x11, POOL) };
        Pool { mapping, start }
    }

    /// Bytes of its memory in huge pages.
    fn huge(&self) -> usize {
        let smaps = fs::read_to_string("/proc/self/smaps").expect("procfs");
        let (mut inside, mut kib) = (false, 0);
        for line in smaps.lines() {
            if let Some(range) = range(line) {
                inside = range.start >= self.mapping.addr() && range.end <= self.mapping.addr() + MAPPED;
            } else if let Some(rest) = line.strip_prefix("AnonHugePages:").filter(|_| inside) {
                kib += rest.trim().trim_end_matches(" kB").parse::<usize>().expect("a number");
            }
        }
        kib << 10
    }

    /// Has each of its huge pages mapped as small ones again: advice for a part of it does that.
    fn split(&self) {
        for at in (0..MAPPED).step_by(HUGE) {
            let part = self.mapping.wrapping_add(at + HUGE / 2).cast();
            // SAFETY: our own mapping; no advice here changes its bytes.
            assert_eq!(unsafe { libc::madvise(part, 4096, libc::MADV_NOHUGEPAGE) }, 0);
        }
    }

    fn place(&self, block: usize) -> Vec<Segment> {
        vec![Segment { ptr: self.start.wrapping_add(block * BLOCK), len: BLOCK }]
    }

    fn bytes(&self, blocks: Range<usize>) -> &[u8] {
        // SAFETY: within the mapping, initialized, and not written by the caller.
        unsafe { std::slice::from_raw_parts(self.start.add(blocks.start * BLOCK), blocks.len() * BLOCK) }
    }

    fn fill(&self, block: usize, bytes: &[u8]) {
        // SAFETY: within the mapping, and nothing else looks at this block now.
        unsafe { self.start.add(block * BLOCK).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: our own mapping; caches that knew it are closed.
        unsafe { libc::munmap(self.mapping.cast(), MAPPED) };
    }
}

/// The addresses of a mapping, of the line that begins it.
fn range(line: &str) -> Option<Range<usize>> {
    let (start, end) = line.split(' ').next()?.split_once('-')?;
    Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
}

/// Whether the system moves memory into huge pages at all: Linux 6.1 or later.
fn is_supported() -> bool {
    let pool = Pool::new();
    let start = pool.mapping.wrapping_add(pool.mapping.align_offset(HUGE)).cast();
    // SAFETY: advice that changes no bytes, for our own mapping.
    unsafe {
        libc::madvise(start, HUGE, libc::MADV_HUGEPAGE) == 0 && libc::madvise(start, HUGE, libc::MADV_COLLAPSE) == 0
    }
}

fn open(dir: &tempfile::TempDir, storage: StorageKind) -> Option<Cache> {
    let settings = config(dir, storage, 8, 2 * BLOCKS as u32).block_bytes(BLOCK).bypass_host(true);
    block_on(Cache::open(settings)).ok()
}

fn keys(blocks: Range<usize>) -> Vec<BlockKey> {
    blocks.map(|n| key(n as u64)).collect()
}

#[test]
fn a_pinned_region_lies_in_huge_pages_and_holds_what_it_held() {
    if !is_supported() {
        common::skip::skipped("this system moves no memory into huge pages");
        return;
    }
    for storage in [StorageKind::Blocking, StorageKind::Uring] {
        let (dir, pool) = (directory(), Pool::new());
        let Some(cache) = open(&dir, storage) else {
            common::skip::skipped(format_args!("this system refuses {storage:?}"));
            continue;
        };
        let before: Vec<u8> = pool.bytes(0..BLOCKS).iter().enumerate().map(|(n, _)| (n / 4096 * 7) as u8).collect();
        before.chunks(BLOCK).enumerate().for_each(|(n, bytes)| pool.fill(n, bytes));
        assert_eq!(pool.huge(), 0, "small pages were asked for");
        let (all, begun) = ((POOL - BLOCK / 2) / HUGE * HUGE, Instant::now());
        loop {
            // SAFETY: the pool outlives the cache.
            let memory = unsafe { Memory::host(pool.start, POOL) };
            let region = block_on(cache.register(memory.pinned(true))).expect("registered");
            let huge = pool.huge();
            assert!(pool.bytes(0..BLOCKS) == before, "no byte has changed");
            assert!(huge <= all, "no more than is wholly its own");
            if huge == all {
                break;
            }
            // A page that the kernel has in use elsewhere, or has no huge page for, is moved another time.
            assert!(begun.elapsed() < Duration::from_secs(60), "{huge} bytes are in huge pages, expected {all}");
            block_on(cache.unregister(&region)).expect("its own region");
        }
        block_on(cache.close()).expect("closed");
    }
}

/// What is stored from the first half and loaded into the second while both are moved again and again.
#[test]
fn moving_a_region_that_is_in_use_spoils_nothing() {
    let half = BLOCKS / 2;
    for storage in [StorageKind::Blocking, StorageKind::Uring] {
        let (dir, pool) = (directory(), Pool::new());
        let Some(cache) = open(&dir, storage) else {
            common::skip::skipped(format_args!("this system refuses {storage:?}"));
            continue;
        };
        // SAFETY: the pool outlives the cache.
        let memory = unsafe { Memory::host(pool.start, POOL) };
        let region = block_on(cache.register(memory)).expect("registered");
        let (from, to): (Vec<_>, Vec<_>) = (0..half).map(|n| (pool.place(n), pool.place(half + n))).unzip();
        let ended = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    pool.split();
                    block_on(kvhoist::internals::pin_region(&cache, &region)).expect("answered");
                }
            });
            let _end = SetOnDrop(&ended);
            for round in 0..6 {
                let first = round * half;
                (0..half).for_each(|n| pool.fill(n, &payload((first + n) as u64, BLOCK)));
                let keys = keys(first..first + half);
                let stored = block_on(cache.store_from(&keys, None, &from)).expect("asked");
                assert!(stored.into_iter().all(|result| result.expect("stored")));
                let loaded = block_on(cache.load_into(&keys, &to)).expect("asked");
                for (n, result) in loaded.into_iter().enumerate() {
                    assert!(result.expect("loaded"), "block {n} of round {round}");
                    let expected = payload((first + n) as u64, BLOCK);
                    assert!(pool.bytes(half + n..half + n + 1) == expected, "block {n} of round {round}");
                }
            }
        });
        block_on(cache.close()).expect("closed");
    }
}
