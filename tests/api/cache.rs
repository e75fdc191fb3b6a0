//! The cache as its callers see it, over the ring and over the thread pool.

use crate::common;

use bytes::Bytes;
use common::{BLOCK_BYTES, config, directory, fetch_verified, key, payload, store};
use kvhoist::{BlockKey, Cache, Config, DirectIo, Error, PrefixChain, Route, StorageKind, Tier, WritePolicy, block_on};

/// Runs a test over each storage engine.
macro_rules! over_both_engines {
    ($($name:ident),+ $(,)?) => {$(
        mod $name {
            #[test]
            fn over_the_ring() {
                super::super::block_on(super::super::$name(kvhoist::StorageKind::Uring));
            }
            #[test]
            fn over_threads() {
                super::super::block_on(super::super::$name(kvhoist::StorageKind::Blocking));
            }
        }
    )+};
}

mod engines {
    over_both_engines!(
        a_stored_block_is_fetched_from_every_tier,
        blocks_survive_a_restart,
        eviction_keeps_what_was_used_last,
        a_touched_block_outlives_one_that_was_not,
        a_full_disk_tier_evicts_leaves_first,
        a_removed_block_is_gone_after_a_restart_too,
        write_back_writes_what_must_leave,
        write_back_is_written_at_close,
        selective_writes_after_enough_hits,
        a_block_that_a_start_finds_corrupt_is_a_miss_and_its_slot_is_free,
        the_use_order_survives_a_restart,
        a_reservation_is_filled_in_place,
        a_lease_outlives_the_cache,
        sync_makes_everything_durable_without_close,
        prefetched_blocks_become_host_hits,
        several_paths_are_striped,
    );
}

async fn a_stored_block_is_fetched_from_every_tier(storage: StorageKind) {
    let dir = directory();
    let cache = Cache::open(config(&dir, storage, 4, 64).device_blocks(2)).await.expect("open");
    for n in 0..16 {
        store(&cache, n).await;
    }
    let lease = cache.fetch(&key(15)).await.expect("fetch").expect("resident");
    assert_eq!((lease.route(), lease[..] == payload(15, BLOCK_BYTES)), (Route::HostHit, true));
    let lease = cache.fetch(&key(0)).await.expect("fetch").expect("on disk");
    assert_eq!((lease.route(), lease[..] == payload(0, BLOCK_BYTES)), (Route::DiskToHost, true));
    drop(lease);
    for (n, route) in [(0, Route::HostToDevice), (1, Route::DiskToHostToDevice), (0, Route::DeviceHit)] {
        let lease = cache.fetch_to_device(&key(n)).await.expect("fetch").expect("resident");
        assert_eq!(lease.route(), route);
        let bytes = cache.read_device(&lease, Vec::new()).await.expect("read");
        assert!(bytes == payload(n, BLOCK_BYTES));
    }
    assert!(cache.fetch(&key(99)).await.expect("fetch").is_none());
    let stats = cache.stats();
    assert_eq!(stats.misses, 1);
    assert_eq!(stats.tier(Tier::Disk).resident, 16);
    assert_eq!(stats.route_blocks(Route::DiskToHost), 2);
    assert!(stats.direct_io, "a real file system has direct I/O");
    kvhoist::internals::validate(&cache).expect("valid");
    cache.close().await.expect("close");
}

async fn blocks_survive_a_restart(storage: StorageKind) {
    let dir = directory();
    let cache = Cache::open(config(&dir, storage, 4, 64)).await.expect("open");
    let chain = PrefixChain::new("a test").extend_tokens(&(0..40 * 4).collect::<Vec<_>>(), 4).expect("keys");
    for (n, key) in chain.iter().enumerate() {
        let parent = n.checked_sub(1).map(|parent| &chain[parent]);
        cache.store(key, parent, &payload(n as u64, BLOCK_BYTES)).await.expect("store");
    }
    cache.close().await.expect("close");
    let cache = Cache::open(config(&dir, storage, 4, 64)).await.expect("open again");
    let found = cache.match_prefix(&chain);
    assert_eq!(found.len(), 40);
    assert!(found.iter().all(|tier| *tier == Tier::Disk));
    for (n, key) in chain.iter().enumerate() {
        let lease = cache.fetch(key).await.expect("fetch").expect("stored before the restart");
        assert!(lease[..] == payload(n as u64, BLOCK_BYTES)[..]);
    }
    kvhoist::internals::validate(&cache).expect("valid");
    cache.close().await.expect("close");
}

async fn eviction_keeps_what_was_used_last(storage: StorageKind) {
    let dir = directory();
    let cache = Cache::open(config(&dir, storage, 4, 8)).await.expect("open");
    for n in 0..8 {
        store(&cache, n).await;
    }
    assert!(fetch_verified(&cache, 0).await);
    for n in 8..12 {
        store(&cache, n).await;
    }
    assert!(fetch_verified(&cache, 0).await, "used last");
    assert!(!fetch_verified(&cache, 1).await, "the coldest");
    assert_eq!(cache.stats().tier(Tier::Disk).evictions, 4);
    kvhoist::internals::validate(&cache).expect("valid");
    cache.close().await.expect("close");
}

async fn a_touched_block_outlives_one_that_was_not(storage: StorageKind) {
    let dir = directory();
    let cache = Cache::open(config(&dir, storage, 4, 4)).await.expect("open");
    for n in 0..4 {
        store(&cache, n).await;
    }
    cache.touch(&[key(0), key(99), key(1)]);
    store(&cache, 4).await;
    store(&cache, 5).await;
    let kept = (0..4).map(|n| cache.match_len(&[key(n)]) == 1).collect::<Vec<_>>();
    assert_eq!(kept, [true, true, false, false]);
    kvhoist::internals::validate(&cache).expect("sound");
}

async fn a_full_disk_tier_evicts_leaves_first(storage: StorageKind) {
    let dir = directory();
    let cache = Cache::open(config(&dir, storage, 2, 6)).await.expect("open");
    for n in 0..4 {
        let parent = (n > 0).then(|| key(n - 1));
        cache.store(&key(n), parent.as_ref(), &payload(n, BLOCK_BYTES)).await.expect("store");
    }
    for n in 10..14 {
        store(&cache, n).await;
    }
    let chain: Vec<BlockKey> = (0..4).map(key).collect();
    assert_eq!(cache.match_len(&chain), 2, "the chain loses its end, not its start");
    kvhoist::internals::validate(&cache).expect("valid");
    cache.close().await.expect("close");
}

async fn a_removed_block_is_gone_after_a_restart_too(storage: StorageKind) {
    let dir = directory();
    let cache = Cache::open(config(&dir, storage, 4, 16)).await.expect("open");
    for n in 0..4 {
        store(&cache, n).await;
    }
    let lease = cache.fetch(&key(1)).await.expect("fetch").expect("resident");
    assert!(cache.remove(&key(1)).await.expect("remove"));
    assert!(!cache.remove(&key(1)).await.expect("remove twice"));
    assert!(cache.fetch(&key(1)).await.expect("fetch").is_none());
    assert!(lease[..] == payload(1, BLOCK_BYTES)[..], "readers keep what they hold");
    store(&cache, 1).await;
    assert!(fetch_verified(&cache, 1).await, "stored anew while the old copy is leased");
    assert!(cache.remove(&key(1)).await.expect("remove"));
    drop(lease);
    kvhoist::internals::validate(&cache).expect("valid");
    cache.close().await.expect("close");
    let cache = Cache::open(config(&dir, storage, 4, 16)).await.expect("open again");
    assert!(!fetch_verified(&cache, 1).await);
    assert!(fetch_verified(&cache, 2).await);
    cache.close().await.expect("close");
}

async fn write_back_writes_what_must_leave(storage: StorageKind) {
    let dir = directory();
    let policy = WritePolicy::WriteBack;
    let cache = Cache::open(config(&dir, storage, 4, 64).write_policy(policy)).await.expect("open");
    for n in 0..32 {
        store(&cache, n).await;
    }
    for n in 0..32 {
        assert!(fetch_verified(&cache, n).await, "block {n} left host memory without reaching the disk");
    }
    cache.sync().await.expect("sync");
    assert_eq!(cache.stats().dirty, 0);
    kvhoist::internals::validate(&cache).expect("valid");
    cache.close().await.expect("close");
}

async fn write_back_is_written_at_close(storage: StorageKind) {
    let dir = directory();
    let policy = WritePolicy::WriteBack;
    let settings = config(&dir, storage, 16, 64).write_policy(policy);
    let cache = Cache::open(settings.clone()).await.expect("open");
    for n in 0..8 {
        store(&cache, n).await;
    }
    assert_eq!(cache.stats().tier(Tier::Disk).resident, 0, "nothing had to leave yet");
    cache.close().await.expect("close");
    let cache = Cache::open(settings).await.expect("open again");
    for n in 0..8 {
        assert!(fetch_verified(&cache, n).await);
    }
    cache.close().await.expect("close");
}

async fn selective_writes_after_enough_hits(storage: StorageKind) {
    let dir = directory();
    let policy = WritePolicy::WriteThroughSelective;
    let cache = Cache::open(config(&dir, storage, 8, 64).write_policy(policy)).await.expect("open");
    store(&cache, 0).await;
    store(&cache, 1).await;
    for _ in 0..2 {
        assert!(fetch_verified(&cache, 1).await);
    }
    cache.sync().await.expect("sync");
    cache.close().await.expect("close");
    let cache = Cache::open(config(&dir, storage, 8, 64).write_policy(policy)).await.expect("open");
    assert!(!fetch_verified(&cache, 0).await, "never hit, never written");
    assert!(fetch_verified(&cache, 1).await, "hit twice");
    cache.close().await.expect("close");
}

async fn a_block_that_a_start_finds_corrupt_is_a_miss_and_its_slot_is_free(storage: StorageKind) {
    let dir = directory();
    let cache = Cache::open(config(&dir, storage, 4, 16)).await.expect("open");
    for n in 0..8 {
        store(&cache, n).await;
    }
    cache.close().await.expect("close");
    let path = common::store_file(&dir);
    let mut bytes = std::fs::read(&path).expect("the store");
    let wanted = payload(3, BLOCK_BYTES);
    let at = bytes.windows(64).position(|window| window == &wanted[..64]).expect("block 3 is in the file");
    bytes[at + BLOCK_BYTES / 2] ^= 0x10;
    std::fs::write(&path, &bytes).expect("write it back");
    let cache = Cache::open(config(&dir, storage, 4, 16)).await.expect("open again");
    for n in 0..8 {
        assert_eq!(fetch_verified(&cache, n).await, n != 3);
    }
    let stats = cache.stats();
    assert_eq!((stats.checksum_failures, stats.changed_memory, stats.quarantined), (1, 0, 0));
    for n in 20..40 {
        store(&cache, n).await;
    }
    assert_eq!(cache.stats().tier(Tier::Disk).resident, 16, "no slot is out of use");
    kvhoist::internals::validate(&cache).expect("valid");
    cache.close().await.expect("close");
}

async fn the_use_order_survives_a_restart(storage: StorageKind) {
    let dir = directory();
    let cache = Cache::open(config(&dir, storage, 2, 8)).await.expect("open");
    for n in 0..8 {
        store(&cache, n).await;
    }
    assert!(fetch_verified(&cache, 0).await);
    cache.close().await.expect("close");
    let cache = Cache::open(config(&dir, storage, 2, 8)).await.expect("open again");
    store(&cache, 8).await;
    assert!(fetch_verified(&cache, 0).await, "used last before the restart");
    assert!(!fetch_verified(&cache, 1).await, "the coldest before the restart");
    cache.close().await.expect("close");
}

async fn a_reservation_is_filled_in_place(storage: StorageKind) {
    let dir = directory();
    let cache = Cache::open(config(&dir, storage, 4, 16)).await.expect("open");
    drop(cache.reserve().await.expect("reserve"));
    let mut reservation = cache.reserve().await.expect("reserve");
    assert!(reservation.iter().all(|byte| *byte == 0));
    reservation.copy_from_slice(&payload(7, BLOCK_BYTES));
    reservation.commit(&key(7), None).await.expect("commit");
    assert!(fetch_verified(&cache, 7).await);
    assert_eq!(cache.stats().tier(Tier::Disk).resident, 1);
    let error = cache.store(&key(8), None, &[0; 100]).await.expect_err("no block");
    assert!(matches!(error, Error::Argument { .. }), "{error}");
    kvhoist::internals::validate(&cache).expect("valid");
    cache.close().await.expect("close");
}

async fn a_lease_outlives_the_cache(storage: StorageKind) {
    let dir = directory();
    let cache = Cache::open(config(&dir, storage, 4, 16)).await.expect("open");
    store(&cache, 1).await;
    let lease = cache.fetch(&key(1)).await.expect("fetch").expect("resident");
    let bytes: Bytes = lease.into();
    let clone = bytes.clone();
    cache.close().await.expect("close");
    assert!(matches!(cache.fetch(&key(1)).await, Err(Error::Closed)));
    assert!(matches!(cache.store(&key(2), None, &payload(2, BLOCK_BYTES)).await, Err(Error::Closed)));
    drop(cache);
    drop(bytes);
    assert!(clone[..] == payload(1, BLOCK_BYTES)[..]);
}

async fn sync_makes_everything_durable_without_close(storage: StorageKind) {
    let dir = directory();
    let cache = Cache::open(config(&dir, storage, 4, 64)).await.expect("open");
    for n in 0..20 {
        store(&cache, n).await;
    }
    cache.sync().await.expect("sync");
    // A copy of the file is what a crash at this instant would leave.
    let copy = directory();
    std::fs::copy(common::store_file(&dir), common::store_file(&copy)).expect("copy");
    let crashed = Cache::open(config(&copy, storage, 4, 64)).await.expect("open the copy");
    for n in 0..20 {
        assert!(fetch_verified(&crashed, n).await);
    }
    crashed.close().await.expect("close");
    cache.close().await.expect("close");
}

async fn prefetched_blocks_become_host_hits(storage: StorageKind) {
    let dir = directory();
    let cache = Cache::open(config(&dir, storage, 8, 64)).await.expect("open");
    for n in 0..32 {
        store(&cache, n).await;
    }
    let keys: Vec<BlockKey> = (0..4).map(key).collect();
    assert_eq!(cache.prefetch(&keys).expect("prefetch"), 4);
    // A fetch joins the movement in flight: when it has resolved the block is in host memory.
    for n in 0..4 {
        assert!(fetch_verified(&cache, n).await);
    }
    for n in 0..4 {
        let lease = cache.fetch(&key(n)).await.expect("fetch").expect("resident");
        assert_eq!(lease.route(), Route::HostHit);
    }
    assert_eq!(cache.stats().route_blocks(Route::DiskToHost), 4, "each was read once");
    cache.close().await.expect("close");
}

/// On one processor, and with a caller that gives way to the reactor, a movement may have ended before the call that
/// started it has.
#[test]
fn a_prefetch_keeps_its_block_however_soon_the_movement_ends() {
    const ROUNDS: u64 = 1000;
    // SAFETY: plain calls with memory of this frame. They apply to this thread, and to those that it starts.
    unsafe {
        let mut one: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(libc::sched_getcpu().try_into().expect("a processor"), &mut one);
        assert_eq!(libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const one), 0);
    }
    // Reads of memory complete at once.
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
    let settings = config(&dir, StorageKind::Auto, ROUNDS as u32, ROUNDS as u32).direct_io(DirectIo::Prefer);
    block_on(async {
        let cache = Cache::open(settings.clone()).await.expect("open");
        for n in 0..ROUNDS {
            store(&cache, n).await;
        }
        cache.close().await.expect("close");
    });
    let cache = block_on(Cache::open(settings)).expect("open again, with nothing in host memory");
    // SAFETY: a plain call, for this thread alone: the reactor has been started.
    assert_eq!(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 19) }, 0);
    for n in 0..ROUNDS {
        assert_eq!(cache.prefetch(&[key(n)]).expect("open"), 1);
    }
    let begun = std::time::Instant::now();
    let resident = || cache.stats().tier(Tier::Host).resident;
    while resident() < ROUNDS && begun.elapsed().as_secs() < 60 {
        std::thread::yield_now();
    }
    assert_eq!(resident(), ROUNDS, "blocks were read and given up");
    for n in 0..ROUNDS {
        assert!(block_on(fetch_verified(&cache, n)));
    }
    block_on(cache.close()).expect("close");
}

async fn several_paths_are_striped(storage: StorageKind) {
    let dirs = [directory(), directory(), directory()];
    let mut settings = config(&dirs[0], storage, 4, 10);
    for dir in &dirs[1..] {
        settings.disk.paths.push(kvhoist::DiskPath::with_blocks(dir.path(), 10));
    }
    let cache = Cache::open(settings.clone()).await.expect("open");
    for n in 0..30 {
        store(&cache, n).await;
    }
    assert_eq!(cache.stats().tier(Tier::Disk).resident, 30);
    cache.close().await.expect("close");
    let cache = Cache::open(settings.clone()).await.expect("open again");
    for n in 0..30 {
        assert!(fetch_verified(&cache, n).await);
    }
    cache.close().await.expect("close");
    settings.disk.paths.swap(0, 1);
    let error = Cache::open(settings).await.expect_err("members in the wrong order");
    assert!(matches!(error, Error::Store { .. }), "{error}");
}

#[test]
fn a_block_larger_than_the_limits_of_bytes_in_flight_moves() {
    let dir = directory();
    let bytes = 33 << 20;
    block_on(async {
        let config = Config::default().block_bytes(bytes).host_blocks(1).disk(dir.path(), 3 * bytes as u64);
        let cache = Cache::open(config).await.expect("open");
        for n in 0..2 {
            cache.store(&key(n), None, &payload(n, bytes)).await.expect("store");
        }
        let lease = cache.fetch(&key(0)).await.expect("fetch").expect("on disk");
        assert_eq!((lease.route(), lease[..] == payload(0, bytes)), (Route::DiskToHost, true));
    });
}
