//! The tier beyond the node: what one cache wrote to a store another serves, and never a wrong byte.

use crate::common;

use std::{sync::Arc, time::Duration};

use common::{
    config, directory, key, payload,
    remote_store::{MemoryStore, Trouble},
};
use kvhoist::{BlockKey, Cache, Config, Memory, RemotePolicy, Segment, StorageKind, Tier, remote::RemoteError};

pub(crate) const BLOCK_BYTES: usize = 4096;
pub(crate) const BLOCKS: u64 = 20;

pub(crate) fn settings(store: &Arc<MemoryStore>) -> Config {
    let config = Config::default().block_bytes(BLOCK_BYTES).host_blocks(64).remote_interval_s(1);
    config.remote_store(Arc::clone(store) as _).remote_policy(RemotePolicy::Stored).remote_deadline_ms(60_000)
}

pub(crate) async fn open(config: Config) -> Cache {
    Cache::open(config).await.expect("open")
}

pub(crate) fn keys() -> Vec<BlockKey> {
    (0..BLOCKS).map(key).collect()
}

/// Waits for what the cache does in the background, a minute at most.
pub(crate) async fn eventually(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let began = std::time::Instant::now();
    while !is_so().await {
        assert!(began.elapsed() < Duration::from_secs(60), "{what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Has a cache write a chain to the store, and ends it.
pub(crate) async fn write_chain(store: &Arc<MemoryStore>) {
    // Blocks that are kept are written together, in full objects, however slowly they were stored.
    let cache = open(settings(store).remote_policy(RemotePolicy::Reused)).await;
    let mut parent = None;
    for n in 0..BLOCKS {
        cache.store(&key(n), parent.as_ref(), &payload(n, BLOCK_BYTES)).await.expect("stored");
        parent = Some(key(n));
    }
    cache.keep(&keys(), Duration::from_secs(60));
    store.wait(|store| store.bytes() > BLOCKS as usize * BLOCK_BYTES).await;
    eventually("written", async || cache.stats().tier(Tier::Remote).resident == BLOCKS).await;
    cache.close().await.expect("closed");
}

/// A cache that knows what the store has.
pub(crate) async fn reader(store: &Arc<MemoryStore>, change: impl FnOnce(Config) -> Config) -> Cache {
    let cache = open(change(settings(store))).await;
    eventually("listed", async || cache.stats().tier(Tier::Remote).resident == BLOCKS).await;
    cache
}

pub(crate) async fn assert_serves(cache: &Cache, n: u64) {
    let block = cache.fetch(&key(n)).await.expect("no error").expect("brought");
    assert_eq!(block[..], payload(n, BLOCK_BYTES), "block {n}");
}

#[tokio::test]
async fn what_one_cache_stored_another_serves_in_few_reads_after_the_first_is_gone() {
    let store = MemoryStore::new(8 * BLOCK_BYTES as u64);
    write_chain(&store).await;
    assert_eq!(store.objects().len(), 3, "two full objects, and the rest");

    let cache = reader(&store, |config| config).await;
    let tables = store.reads();
    assert_eq!(tables, 3, "a table of each object; their writer knew them");
    assert_eq!(cache.match_prefix(&keys()), [Tier::Remote; BLOCKS as usize]);
    assert_eq!(store.reads(), tables, "a look-up asks nobody");
    for (n, block) in cache.fetch_many(&keys()).await.into_iter().enumerate() {
        let block = block.expect("no error").expect("brought");
        assert_eq!(block[..], payload(n as u64, BLOCK_BYTES));
    }
    assert_eq!(store.reads(), tables + 3, "a read an object");
    let stats = cache.stats();
    // A block that came with an earlier one before it was asked for is a hit of host memory.
    let hits = stats.tier(Tier::Remote).hits + stats.tier(Tier::Host).hits;
    assert_eq!((hits, stats.misses, stats.stores), (BLOCKS, 0, 0), "{stats:?}");
    assert_eq!(stats.tier(Tier::Remote).bytes_out, BLOCKS * BLOCK_BYTES as u64);
    assert_eq!(cache.match_prefix(&keys()), [Tier::Host; BLOCKS as usize]);
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn what_is_brought_goes_to_disk_and_a_block_that_many_want_is_read_once() {
    let store = MemoryStore::new(8 * BLOCK_BYTES as u64);
    write_chain(&store).await;
    let directory = directory();
    let with_disk = |before: Config| -> Config {
        let mut config = config(&directory, StorageKind::Auto, 64, 64).block_bytes(BLOCK_BYTES);
        (config.remote, config.namespace) = (before.remote, before.namespace);
        config
    };
    let cache = reader(&store, with_disk).await;
    let tables = store.reads();
    store.set(Trouble::Slow(Duration::from_millis(50)));
    let calls: Vec<_> = (0..32)
        .map(|_| {
            let cache = cache.clone();
            tokio::spawn(async move { assert_serves(&cache, 3).await })
        })
        .collect();
    for call in calls {
        call.await.expect("served");
    }
    assert_eq!(store.reads(), tables + 1);
    cache.sync().await.expect("written");
    assert_eq!(cache.stats().tier(Tier::Disk).resident, 1);
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn loads_and_prefetches_bring_blocks_too() {
    let store = MemoryStore::new(8 * BLOCK_BYTES as u64);
    write_chain(&store).await;
    let cache = reader(&store, |config| config).await;
    assert_eq!(cache.prefetch(&keys()[..4]).expect("open"), 4);
    eventually("prefetched", async || cache.match_prefix(&keys()[..4]) == [Tier::Host; 4]).await;
    let mut pool = vec![0; BLOCKS as usize * BLOCK_BYTES];
    // SAFETY: the pool lives until the region is unregistered, and nobody touches it during the load.
    let memory = unsafe { Memory::host(pool.as_mut_ptr(), pool.len()) };
    let region = cache.register(memory).await.expect("registered");
    let places: Vec<_> =
        pool.chunks_mut(BLOCK_BYTES).map(|part| vec![Segment { ptr: part.as_mut_ptr(), len: BLOCK_BYTES }]).collect();
    let loaded = cache.load_into(&keys(), &places).await.expect("valid");
    cache.unregister(&region).await.expect("unregistered");
    assert!(loaded.iter().all(|loaded| matches!(loaded, Ok(true))), "{loaded:?}");
    for (n, block) in pool.chunks(BLOCK_BYTES).enumerate() {
        assert_eq!(block, payload(n as u64, BLOCK_BYTES));
    }
    let stats = cache.stats();
    assert_eq!((stats.hit_ratio(), stats.misses), (1.0, 0));
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn wrong_bytes_are_a_miss_and_are_forgotten() {
    let store = MemoryStore::new(8 * BLOCK_BYTES as u64);
    write_chain(&store).await;
    // No listing amid the trouble.
    let cache = reader(&store, |config| config.remote_interval_s(3600)).await;
    store.set(Trouble::Corrupts(7));
    assert!(cache.fetch(&key(3)).await.expect("no error").is_none());
    store.set(Trouble::CutsOff);
    assert!(cache.fetch(&key(9)).await.expect("no error").is_none());
    store.set(Trouble::None);
    let stats = cache.stats();
    assert_eq!((stats.misses, stats.remote_missed), (2, 2), "{stats:?}");
    assert!(stats.remote_invalid >= 2, "{stats:?}");
    assert_eq!(cache.match_prefix(&keys()).len(), 3, "the block is offered no more");
    assert_serves(&cache, 4).await;
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn an_object_that_is_gone_is_a_miss_and_one_that_is_not_an_object_is_passed_over() {
    let store = MemoryStore::new(8 * BLOCK_BYTES as u64);
    write_chain(&store).await;
    let cache = reader(&store, |config| config.remote_interval_s(3600)).await;
    let objects = store.objects();
    store.delete_all();
    assert!(cache.fetch(&key(3)).await.expect("no error").is_none());
    assert_eq!(cache.stats().remote_stale, 1);
    assert_eq!(cache.stats().tier(Tier::Remote).resident, BLOCKS - 8, "all blocks of the object are forgotten");
    cache.close().await.expect("closed");

    // The second object under the name of the first, a cut one, a changed table, and noise.
    store.put(objects[0].0.clone(), objects[1].1.clone());
    store.put(objects[1].0.clone(), objects[1].1.slice(..objects[1].1.len() - 1));
    let mut changed = objects[2].1.to_vec();
    changed[165] ^= 1; // of the first block's checksum
    store.put(objects[2].0.clone(), changed.into());
    store.put(objects[2].0.clone() + "x", "noise".into());
    let cache = open(settings(&store)).await;
    eventually("listed", async || cache.stats().remote_invalid >= 4).await;
    assert_eq!(cache.stats().tier(Tier::Remote).resident, 0);
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn a_removed_block_does_not_come_back() {
    let store = MemoryStore::new(8 * BLOCK_BYTES as u64);
    write_chain(&store).await;
    let cache = reader(&store, |config| config.remote_deadline_ms(600_000)).await;
    // Removed while it is on its way.
    store.hold(&key(0));
    let before = store.reads();
    let fetch = tokio::spawn({
        let cache = cache.clone();
        async move { cache.fetch(&key(2)).await.expect("no error").is_none() }
    });
    eventually("asked for", async || store.reads() > before).await;
    assert!(!cache.remove(&key(2)).await.expect("removed"), "it was in no tier of the node");
    store.release(&key(0));
    assert!(fetch.await.expect("ended"), "what was read before the removal is not served");
    let listings = |store: &MemoryStore| store.objects().len();
    assert_eq!(listings(&store), 3);
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert!(!cache.contains(&key(2)), "a listing does not bring it back");
    assert!(cache.contains(&key(3)));
    cache.clear().await.expect("cleared");
    assert_eq!(cache.match_len(&keys()), 0);
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn a_store_that_is_away_is_a_miss_then_nobody_waits_for_it_and_it_comes_back() {
    let troubles = [
        Trouble::Hangs,
        Trouble::Fails(RemoteError::Refused("403".into())),
        Trouble::Fails(RemoteError::Throttled("503".into())),
        Trouble::Panics,
    ];
    for trouble in troubles {
        let store = MemoryStore::new(8 * BLOCK_BYTES as u64);
        write_chain(&store).await;
        // Only what never ends runs into it: nothing else takes as long, also on a busy machine.
        let deadline_ms = if matches!(trouble, Trouble::Hangs) { 2_000 } else { 60_000 };
        let settings = |config: Config| config.remote_interval_s(3600).remote_deadline_ms(deadline_ms);
        let cache = reader(&store, settings).await;
        store.set(trouble.clone());
        for n in 0..3 {
            assert!(cache.fetch(&key(n)).await.expect("a miss, and no error").is_none(), "{trouble:?}");
            eventually("noted", async || cache.stats().remote_errors > n).await;
        }
        cache.store(&key(100), None, &payload(100, BLOCK_BYTES)).await.expect("stored");
        // Between two trials, of which each begins later than the one before. One that begins meanwhile asks.
        eventually("nobody asks it", async || {
            let (asked, stats) = (store.reads(), cache.stats());
            let stands_down = stats.remote_standing_down.is_some() && !stats.remote_offers;
            let is_offered = cache.match_len(&keys()) > 0;
            assert_serves(&cache, 100).await;
            assert!(cache.fetch(&key(5)).await.expect("no error").is_none(), "{trouble:?}");
            stands_down && !is_offered && store.reads() == asked
        })
        .await;
        store.set(Trouble::None);
        eventually("tried again", async || cache.fetch(&key(6)).await.expect("no error").is_some()).await;
        eventually("offered again", async || cache.stats().remote_offers).await;
        let block = cache.fetch(&key(7)).await.expect("no error");
        assert!(block.is_some(), "{trouble:?} {:?}", cache.stats());
        drop(block);
        cache.close().await.expect("closed");
    }
}

#[tokio::test]
async fn a_store_that_is_slower_than_computing_stands_down_and_comes_back() {
    let store = MemoryStore::new(8 * BLOCK_BYTES as u64);
    write_chain(&store).await;
    let cache = reader(&store, |config| config.recompute_us(50_000).remote_interval_s(3600)).await;
    store.set(Trouble::Slow(Duration::from_millis(200)));
    assert_eq!(cache.match_len(&keys()), BLOCKS as usize, "nothing is measured");
    assert_serves(&cache, 0).await;
    eventually("measured", async || !cache.stats().remote_offers).await;
    // Between two trials, of which each begins later than the one before. One that begins meanwhile brings a block.
    let mut n = 1;
    eventually("nobody waits for it", async || {
        let offered = cache.match_len(&keys()[n as usize..]);
        let is_brought = cache.fetch(&key(n)).await.expect("no error").is_some();
        n += u64::from(is_brought);
        offered == 0 && !is_brought
    })
    .await;
    let reason = cache.stats().remote_standing_down.expect("it stands down");
    assert!(reason.contains("50.0 ms of computing it"), "{reason}");
    store.set(Trouble::None);
    eventually("offered again", async || {
        n = n % (BLOCKS - 1) + 1;
        cache.fetch(&key(n)).await.expect("no error");
        cache.stats().remote_offers
    })
    .await;
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn blocks_used_twice_or_kept_are_written_and_no_others() {
    let store = MemoryStore::new(8 * BLOCK_BYTES as u64);
    let cache = open(settings(&store).remote_policy(RemotePolicy::Reused)).await;
    for n in 0..6 {
        cache.store(&key(n), None, &payload(n, BLOCK_BYTES)).await.expect("stored");
    }
    for n in [1, 3] {
        cache.match_len(&[key(n)]);
        assert_serves(&cache, n).await;
    }
    cache.keep(&[key(5)], Duration::from_secs(60));
    store.wait(|store| store.objects().len() >= 3).await;
    eventually("written", async || cache.stats().tier(Tier::Remote).resident == 3).await;
    assert_eq!(
        [0, 1, 2, 3, 4, 5].map(|n| store.objects().iter().any(|(name, _)| name.ends_with(&key(n).to_string()))),
        [false, true, false, true, false, true]
    );
    cache.close().await.expect("closed");
}

/// Settings with a disk of 32 blocks, which are written to the store before they are evicted.
pub(crate) fn evicting(store: &Arc<MemoryStore>, directory: &tempfile::TempDir) -> Config {
    let mut config = config(directory, StorageKind::Auto, 4, 32).block_bytes(BLOCK_BYTES);
    config.remote = settings(store).remote_policy(RemotePolicy::Evicted).remote;
    config
}

#[tokio::test]
async fn blocks_are_written_before_the_disk_evicts_them() {
    let store = MemoryStore::new(8 * BLOCK_BYTES as u64);
    let directory = directory();
    let cache = open(evicting(&store, &directory)).await;
    // Chains of 8 blocks.
    let store_one = async |n: u64| {
        let parent = (!n.is_multiple_of(8)).then(|| key(n - 1));
        cache.store(&key(n), parent.as_ref(), &payload(n, BLOCK_BYTES)).await.expect("stored");
    };
    for n in 0..24 {
        store_one(n).await;
    }
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(store.objects().len(), 0, "there is room for 8 blocks, as many as are looked for");
    let mut written = 0;
    for n in 24..48 {
        store_one(n).await;
        if n < 28 {
            continue;
        }
        // Of the next 8 that are evicted more than half are written.
        let evicted = (n + 1).saturating_sub(32);
        let what = format!("written after block {n}");
        eventually(&what, async || cache.stats().tier(Tier::Remote).resident >= evicted + 4).await;
        written = cache.stats().tier(Tier::Remote).resident;
    }
    let objects = store.objects().len() as u64;
    assert!(written / objects >= 2, "{written} blocks in {objects} objects");
    let tiers: Vec<_> = (0..48).map(|n| cache.match_prefix(&[key(n)]).first().copied()).collect();
    assert!(tiers.iter().all(Option::is_some), "lost: {tiers:?}");
    let evicted: Vec<_> = (0..48).filter(|n| tiers[*n as usize] == Some(Tier::Remote)).collect();
    assert!(evicted.len() >= 16, "{evicted:?}");
    assert_eq!(cache.stats().remote_unsent, 0, "nothing was evicted before it was written");
    for n in evicted {
        assert_serves(&cache, n).await;
    }
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn blocks_are_written_before_the_disk_evicts_them_also_where_the_store_has_most_others() {
    let store = MemoryStore::new(BLOCK_BYTES as u64);
    let is_new = |n: u64| n.is_multiple_of(3);
    let store_one = async |cache: &Cache, n| {
        cache.store(&key(n), None, &payload(n, BLOCK_BYTES)).await.expect("stored");
    };
    let writer = open(settings(&store)).await;
    for n in (0..60).filter(|n| !is_new(*n)) {
        store_one(&writer, n).await;
    }
    eventually("written", async || writer.stats().tier(Tier::Remote).resident == 40).await;
    writer.close().await.expect("closed");
    let directory = directory();
    let cache = open(evicting(&store, &directory)).await;
    eventually("listed", async || cache.stats().tier(Tier::Remote).resident == 40).await;
    for n in 0..60 {
        store_one(&cache, n).await;
        // Those among the next 4 that are evicted are written.
        let soon = (n + 5).saturating_sub(32);
        let written = 40 + (0..soon).filter(|n| is_new(*n)).count() as u64;
        let what = format!("written after block {n}");
        eventually(&what, async || cache.stats().tier(Tier::Remote).resident >= written).await;
    }
    assert!((0..60).all(|n| cache.contains(&key(n))), "some were evicted before they were written");
    cache.close().await.expect("closed");
}
