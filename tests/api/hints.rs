//! What callers say of chains: what is over goes first and unwritten, what is kept goes last.

use crate::common;

use std::{path::Path, time::Duration};

use common::key;
use kvhoist::{BlockKey, Cache, Config, DirectIo, DiskPath, Eviction, Tier, WritePolicy, block_on};

const BLOCK_BYTES: usize = 4096;
const POLICIES: [Eviction; 2] = [Eviction::Lru, Eviction::Rb];
const LONG: Duration = Duration::from_secs(3600);

fn open(host_blocks: u32, eviction_policy: Eviction) -> Cache {
    let config = Config::default().block_bytes(BLOCK_BYTES).host_blocks(host_blocks).eviction_policy(eviction_policy);
    block_on(Cache::open(config)).expect("open")
}

/// Over a disk tier, to which blocks go when they leave host memory.
fn open_written_back(dir: &Path, host_blocks: u32) -> Cache {
    let config = Config::default()
        .block_bytes(BLOCK_BYTES)
        .host_blocks(host_blocks)
        .disks(vec![DiskPath::with_blocks(dir, 64)])
        .write_policy(WritePolicy::WriteBack)
        .direct_io(DirectIo::Prefer);
    block_on(Cache::open(config)).expect("open")
}

/// Stores a chain whose first blocks may be another's.
fn store(cache: &Cache, chain: &[BlockKey]) {
    for (at, key) in chain.iter().enumerate() {
        let parent = at.checked_sub(1).map(|at| &chain[at]);
        block_on(cache.store(key, parent, &[key.as_bytes()[0]; BLOCK_BYTES])).expect("stored");
    }
}

/// Stores as many new chains of one block, which nobody asks for again.
fn scan(cache: &Cache, blocks: u64) {
    let first = 1_000_000 + cache.stats().stores;
    (first..first + blocks).for_each(|n| store(cache, &[key(n)]));
}

fn chain(keys: impl IntoIterator<Item = u64>) -> Vec<BlockKey> {
    keys.into_iter().map(key).collect()
}

fn closed(cache: &Cache) {
    kvhoist::internals::validate(cache).unwrap_or_else(|what| panic!("{what}"));
    block_on(cache.close()).expect("closed");
}

#[test]
fn a_chain_that_is_over_goes_before_what_is_colder_and_leaves_what_it_shares() {
    for policy in POLICIES {
        let cache = open(8, policy);
        let [cold, one, other] = [chain([9]), chain([1, 2, 3]), chain([1, 2, 5, 6])];
        [&cold, &one, &other].into_iter().for_each(|chain| store(&cache, chain));
        assert_eq!(cache.release(&other), 2, "1 and 2 are the other chain's as well");
        // Two slots are free.
        scan(&cache, 3);
        assert_eq!(cache.match_len(&other), 3, "its end went first");
        scan(&cache, 1);
        assert_eq!([&cold, &one, &other].map(|chain| cache.match_len(chain)), [1, 3, 2]);
        assert_eq!(cache.stats().released, 2);
        closed(&cache);
    }
}

#[test]
fn a_prompt_that_chains_have_shared_is_not_over_with_the_last_of_them() {
    for policy in POLICIES {
        let cache = open(8, policy);
        let [one, other] = [chain([1, 2]), chain([1, 3])];
        [&one, &other].into_iter().for_each(|chain| store(&cache, chain));
        assert_eq!([cache.release(&one), cache.release(&other)], [1, 1], "{policy:?}");
        // Both ends go, and the prompt is as cold as its last use.
        scan(&cache, 7);
        assert_eq!([&one, &other].map(|chain| cache.match_len(chain)), [1, 1], "{policy:?}");
        closed(&cache);
    }
}

#[test]
fn a_use_takes_a_release_back_for_the_block_and_what_is_before_it() {
    let uses: [fn(&Cache, &[BlockKey]); 4] = [
        |cache, keys| drop(block_on(cache.fetch(&keys[1])).expect("fetch").expect("a hit")),
        |cache, keys| cache.touch(&keys[1..2]),
        |cache, keys| _ = cache.prefetch(&keys[1..2]).expect("prefetch"),
        |cache, keys| store(cache, &keys[..2]),
    ];
    for (policy, use_it) in POLICIES.into_iter().flat_map(|policy| uses.map(|use_it| (policy, use_it))) {
        let cache = open(4, policy);
        let [cold, keys] = [chain([9]), chain([1, 2, 3])];
        [&cold, &keys].into_iter().for_each(|chain| store(&cache, chain));
        assert_eq!(cache.release(&keys), 3);
        use_it(&cache, &keys);
        scan(&cache, 1);
        assert_eq!(cache.match_len(&keys), 2, "its third block is over still");
        scan(&cache, 1);
        assert_eq!((cache.match_len(&cold), cache.match_len(&keys)), (0, 2), "the colder one went");
        closed(&cache);
    }
}

#[test]
fn the_end_of_a_lease_is_no_use_that_takes_a_release_back() {
    for policy in POLICIES {
        let cache = open(3, policy);
        let [cold, keys] = [chain([9]), chain([1])];
        [&cold, &keys].into_iter().for_each(|chain| store(&cache, chain));
        let lease = block_on(cache.fetch(&keys[0])).expect("fetch").expect("a hit");
        assert_eq!(cache.release(&keys), 1);
        drop(lease);
        scan(&cache, 2);
        assert_eq!((cache.match_len(&cold), cache.match_len(&keys)), (1, 0));
        closed(&cache);
    }
}

#[test]
fn what_is_over_is_not_written_to_make_room_and_a_sync_writes_what_is_there() {
    let dir = tempfile::tempdir().expect("a directory");
    let cache = open_written_back(dir.path(), 4);
    let [over, rest] = [chain([1, 2]), chain([3])];
    [&over, &rest].into_iter().for_each(|chain| store(&cache, chain));
    assert_eq!(cache.release(&over), 2);
    // One slot is free, and the next is that of the chain that is over.
    (10..12).for_each(|n| store(&cache, &chain([n])));
    let stats = cache.stats();
    assert_eq!((stats.released_unwritten, stats.tier(Tier::Disk).resident), (1, 0), "nothing was written for it");
    assert_eq!((cache.match_len(&over), cache.match_len(&rest)), (1, 1));
    assert_eq!(cache.release(&rest), 1);
    block_on(cache.sync()).expect("synced");
    assert_eq!(cache.stats().tier(Tier::Disk).resident, 4, "a sync covers what is released and still here");
    closed(&cache);
    let cache = open_written_back(dir.path(), 4);
    assert_eq!(cache.match_len(&rest), 1);
    closed(&cache);
}

#[test]
fn what_is_kept_outlives_a_scan_within_its_share_and_its_time() {
    for policy in POLICIES {
        let cache = open(16, policy);
        let [kept, other] = [chain([1, 2, 3]), chain([4, 5, 6])];
        [&kept, &other].into_iter().for_each(|chain| store(&cache, chain));
        assert_eq!(cache.keep(&kept, LONG), 3);
        assert_eq!(cache.keep(&chain([77]), LONG), 0, "it is nowhere");
        assert_eq!(cache.release(&kept), 0, "it is kept");
        scan(&cache, 100);
        assert_eq!((cache.match_len(&kept), cache.match_len(&other)), (3, 0), "{policy:?}");
        assert_eq!(cache.stats().tier(Tier::Host).kept, 3);
        // A quarter of sixteen slots: of eight blocks the coldest go as all others do.
        let more = chain(10..15);
        store(&cache, &more);
        assert_eq!(cache.keep(&more, LONG), 5);
        assert_eq!(cache.stats().tier(Tier::Host).kept, 8);
        scan(&cache, 100);
        assert_eq!((cache.match_len(&kept), cache.match_len(&more)), (0, 4), "{policy:?}");
        closed(&cache);
    }
}

#[test]
fn what_is_kept_no_longer_goes_like_all_others_and_what_nothing_else_can_replace_goes_too() {
    for policy in POLICIES {
        let cache = open(8, policy);
        let [over, kept] = [chain([1]), chain([2])];
        [&over, &kept].into_iter().for_each(|chain| store(&cache, chain));
        assert_eq!([cache.keep(&over, Duration::ZERO), cache.keep(&kept, LONG)], [1, 1]);
        assert_eq!([cache.release(&over), cache.release(&kept)], [1, 0], "its time was up at once");
        scan(&cache, 20);
        assert_eq!((cache.match_len(&over), cache.match_len(&kept)), (0, 1), "its time was up at once");
        // Everything else is held.
        let held: Vec<_> = (0..7).map(|_| block_on(cache.reserve()).expect("a slot")).collect();
        store(&cache, &chain([50]));
        assert_eq!((cache.match_len(&kept), cache.match_len(&chain([50]))), (0, 1), "a preference, and no pin");
        drop(held);
        closed(&cache);
    }
}

#[test]
fn a_closed_cache_is_told_nothing() {
    let cache = open(4, Eviction::Lru);
    store(&cache, &chain([1]));
    block_on(cache.close()).expect("closed");
    assert_eq!((cache.release(&chain([1])), cache.keep(&chain([1]), LONG)), (0, 0));
}
