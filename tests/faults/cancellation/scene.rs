//! A cache whose host tier is far smaller than what is stored, and what must hold when a call has been dropped.

use std::{sync::atomic::AtomicU64, sync::atomic::Ordering, time::Instant};

use kvhoist::{Cache, Config, Error, Segment, StorageKind, Tier};
use tempfile::TempDir;

use super::{
    common::{BLOCK_BYTES, config, directory, fetch_verified, key, payload, store},
    points::PATIENCE,
};

/// Blocks that are on disk in every scene.
pub const STORED: u64 = 16;
const DEVICE_SLOTS: u32 = 2;
const HOST_SLOTS: u32 = 4;
const DISK_SLOTS: u32 = 96;

/// The engines that this machine has.
pub fn engines() -> Vec<StorageKind> {
    let dir = directory();
    match kvhoist::block_on(Cache::open(config(&dir, StorageKind::Uring, 1, 1))) {
        Ok(cache) => {
            kvhoist::block_on(cache.close()).expect("close");
            vec![StorageKind::Uring, StorageKind::Blocking]
        }
        Err(Error::Config { field: "storage", found, .. }) => {
            super::common::skip::skipped(format_args!("this machine refuses the ring: {found}"));
            vec![StorageKind::Blocking]
        }
        Err(error) => panic!("{error}"),
    }
}

pub struct Scene {
    pub cache: Cache,
    pub dir: TempDir,
    pub settings: Config,
    next: AtomicU64,
}

impl Scene {
    pub async fn new(storage: StorageKind, change: impl FnOnce(&mut Config)) -> Scene {
        let dir = directory();
        let mut settings = config(&dir, storage, HOST_SLOTS, DISK_SLOTS).device_blocks(DEVICE_SLOTS);
        let cache = Cache::open(settings.clone()).await.expect("open");
        for n in 0..STORED {
            store(&cache, n).await;
        }
        cache.close().await.expect("close");
        change(&mut settings);
        let cache = Cache::open(settings.clone()).await.expect("open");
        Scene { cache, dir, settings, next: AtomicU64::new(0) }
    }

    /// A key of the stored ones that has no copy but the one on disk.
    pub async fn cold(&self) -> u64 {
        for _ in 0..4 * STORED {
            let n = self.next.fetch_add(1, Ordering::Relaxed) % STORED;
            if self.cache.match_prefix(&[key(n)]) == [Tier::Disk] {
                return n;
            }
            // What is read last pushes out what was read first.
            assert!(fetch_verified(&self.cache, (n + STORED / 2) % STORED).await);
        }
        panic!("every block is in memory, though {HOST_SLOTS} slots cannot hold {STORED}");
    }

    /// A key that was never used.
    pub fn fresh(&self) -> u64 {
        1000 + self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Waits until nothing is in flight, and checks that nothing is left over.
    pub async fn rest(&self) {
        rest(&self.cache).await;
    }

    /// Ends the scene; the store is whole afterwards.
    pub async fn end(self) {
        self.rest().await;
        self.cache.close().await.expect("close");
        let Scene { cache, dir, settings, .. } = self;
        let stats = cache.stats();
        assert_eq!((stats.checksum_failures, stats.read_errors, stats.write_errors), (0, 0, 0));
        balance(&cache).expect("closed, and nothing is left over");
        drop(cache);
        let cache = Cache::open(settings).await.expect("the store is whole");
        for n in 0..STORED {
            assert!(fetch_verified(&cache, n).await, "key {n} was stored");
        }
        cache.close().await.expect("close");
        drop(dir);
    }
}

/// Opens a store that a cache may still be closing: until then it is locked.
pub async fn reopen(settings: &Config) -> Cache {
    loop {
        match Cache::open(settings.clone()).await {
            Ok(cache) => return cache,
            Err(error) => assert!(error.to_string().contains("process"), "{error}"),
        }
        tokio::task::yield_now().await;
    }
}

/// Waits until nothing is in flight, and checks that nothing is left over.
pub async fn rest(cache: &Cache) {
    let started = Instant::now();
    while let Err(what) = balance(cache) {
        assert!(started.elapsed() < PATIENCE, "{what}: {:?}", cache.stats());
        tokio::task::yield_now().await;
    }
    kvhoist::internals::validate(cache).expect("valid");
}

/// Every slot, pin and flight accounted for.
#[cfg(feature = "sim")]
fn balance(cache: &Cache) -> Result<(), String> {
    kvhoist::internals::seams::check_idle(cache)
}

/// Every slot free or full: what can be seen from outside.
#[cfg(not(feature = "sim"))]
fn balance(cache: &Cache) -> Result<(), String> {
    let stats = cache.stats();
    let balances = Tier::ALL.iter().map(|&tier| stats.tier(tier)).all(|tier| tier.resident + tier.free == tier.slots);
    if balances { Ok(()) } else { Err("a slot leaked".into()) }
}

/// Memory of the test's own, in blocks, to be registered. Never moves.
pub struct Pool {
    memory: *mut u8,
    blocks: usize,
}

impl Pool {
    pub fn new(blocks: usize) -> Pool {
        Pool { memory: Box::leak(vec![0; blocks * BLOCK_BYTES].into_boxed_slice()).as_mut_ptr(), blocks }
    }

    pub fn register(&self, cache: &Cache) -> kvhoist::Region {
        // SAFETY: the memory is leaked; the tests touch it only when no movement uses it.
        let lent = unsafe { kvhoist::Memory::host(self.memory, self.blocks * BLOCK_BYTES) };
        kvhoist::block_on(cache.register(lent)).expect("register")
    }

    /// The place of one block, in two segments.
    pub fn place(&self, block: usize) -> Vec<Segment> {
        let half = BLOCK_BYTES / 2;
        let at = |offset: usize| Segment { ptr: self.memory.wrapping_add(block * BLOCK_BYTES + offset), len: half };
        vec![at(0), at(half)]
    }

    /// The bytes of one block. No movement may use them.
    pub fn bytes(&mut self, block: usize) -> &mut [u8] {
        // SAFETY: inside the leaked memory, which nothing else touches now, as the caller promises.
        unsafe { std::slice::from_raw_parts_mut(self.memory.add(block * BLOCK_BYTES), BLOCK_BYTES) }
    }
}

/// Lets others wait for the same block; they must get it whatever happens to the call that is dropped.
pub fn companions(cache: &Cache, n: u64) -> [tokio::task::JoinHandle<()>; 3] {
    let check = move |bytes: &[u8]| assert!(bytes == payload(n, BLOCK_BYTES), "wrong bytes for key {n}");
    let spawn = |cache: Cache| {
        tokio::spawn(async move {
            let lease = cache.fetch(&key(n)).await.expect("fetch").expect("stored");
            check(&lease);
        })
    };
    let onto_the_device = |cache: Cache| {
        tokio::spawn(async move {
            let lease = cache.fetch_to_device(&key(n)).await.expect("fetch").expect("stored");
            check(&cache.read_device(&lease, Vec::new()).await.expect("read"));
        })
    };
    [spawn(cache.clone()), spawn(cache.clone()), onto_the_device(cache.clone())]
}
