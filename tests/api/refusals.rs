//! A tier that thrashes refuses new blocks: counted, never an error, and what is served is right.

use crate::{common, remote};

use std::path::Path;

use common::{key, remote_store::MemoryStore};
use kvhoist::{BlockKey, Cache, Config, DirectIo, DiskPath, Eviction, RemotePolicy, Tier, block_on};

const BLOCK_BYTES: usize = 4096;
const SLOTS: u32 = 64;

fn config(dir: Option<&Path>, eviction_policy: Eviction) -> Config {
    Config::default()
        .block_bytes(BLOCK_BYTES)
        .host_blocks(if dir.is_some() { 16 } else { SLOTS })
        .disks(dir.map(|path| DiskPath::with_blocks(path, SLOTS)).into_iter().collect())
        .eviction_policy(eviction_policy)
        .direct_io(DirectIo::Prefer)
}

/// Chains of eight blocks, a fourth more than there are slots for, each in its turn; what is missing is stored.
/// Gives the hits.
fn cycle(cache: &Cache, rounds: u64) -> u64 {
    let mut hits = 0;
    for _ in 0..rounds {
        for chain in 0..10u64 {
            let keys: Vec<BlockKey> = (0..8).map(|n| key(1000 + chain * 8 + n)).collect();
            let found = cache.match_len(&keys);
            hits += found as u64;
            for (at, key) in keys.iter().enumerate() {
                if at < found {
                    let lease = block_on(cache.fetch(key)).expect("fetch").expect("it was matched");
                    assert_eq!((lease[0], lease[1]), (chain as u8, at as u8));
                    continue;
                }
                let mut data = vec![0; BLOCK_BYTES];
                (data[0], data[1]) = (chain as u8, at as u8);
                let parent = at.checked_sub(1).map(|parent| &keys[parent]);
                block_on(cache.store(key, parent, &data)).expect("a refusal is no error");
            }
        }
    }
    hits
}

/// Stores blocks that are never asked for.
fn scan(cache: &Cache) {
    for n in 0..200 {
        block_on(cache.store(&key(1_000_000 + n), None, &[7; BLOCK_BYTES])).expect("a refusal is no error");
    }
}

fn run(dir: Option<&Path>, policy: Eviction, tier: Tier) {
    let cache = block_on(Cache::open(config(dir, policy))).expect("open");
    let hits = cycle(&cache, 16);
    // What was seen before is taken in, whatever is refused.
    scan(&cache);
    let refused = cache.stats().tier(tier).refused;
    println!("{policy:?} in {tier}: {hits} hits, {refused} refused");
    match policy {
        Eviction::RbRefuse => assert!(refused > 0, "a scan of what is never asked for again is refused in part"),
        _ => assert_eq!(refused, 0, "only where it is set"),
    }
    kvhoist::internals::validate(&cache).expect("valid");
    block_on(cache.close()).expect("closed");
}

#[test]
fn host_memory_alone_refuses_what_is_new_while_it_thrashes() {
    run(None, Eviction::RbRefuse, Tier::Host);
    run(None, Eviction::Rb, Tier::Host);
}

#[test]
fn the_disk_tier_refuses_what_is_new_while_it_thrashes() {
    let dir = tempfile::tempdir().expect("a directory");
    run(Some(dir.path()), Eviction::RbRefuse, Tier::Disk);
    let dir = tempfile::tempdir().expect("a directory");
    run(Some(dir.path()), Eviction::Rb, Tier::Disk);
}

#[tokio::test]
async fn what_is_brought_from_the_remote_tier_is_not_refused() {
    let store = MemoryStore::new(8 * BLOCK_BYTES as u64);
    remote::write_chain(&store).await;
    let thrashing = |config: Config| config.eviction_policy(Eviction::RbRefuse).remote_policy(RemotePolicy::Never);
    let cache = remote::reader(&store, |config| thrashing(config).host_blocks(SLOTS)).await;
    let thrashed = cache.clone();
    let thrash = move || {
        cycle(&thrashed, 16);
        scan(&thrashed);
    };
    tokio::task::spawn_blocking(thrash).await.expect("no panic");
    assert!(cache.stats().tier(Tier::Host).refused > 0, "a scan of what is never asked for again is refused in part");
    let misses = cache.stats().misses;
    for n in 0..remote::BLOCKS {
        assert!(cache.fetch(&key(n)).await.expect("no error").is_some(), "block {n}");
    }
    assert_eq!(cache.stats().misses, misses);
    cache.close().await.expect("closed");
}
