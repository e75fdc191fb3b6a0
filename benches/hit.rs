//! One call, again and again: what it costs in instructions and, undisturbed, in time.
//!
//!     cargo bench --bench hit -- fetch|miss|chain|len8|match8|match128|disk|store ROUNDS [lru|rb]
//!     valgrind --tool=callgrind target/release/deps/hit-HASH fetch 1; and the same with 5: the difference, by 4 rounds
//!
//! `chain` matches 128 blocks, then fetches them. `disk` fetches blocks that were evicted, each of which evicts
//! another; `store` stores blocks, each of which evicts one from memory and one from disk. Both tiers are full, and the
//! reactor makes the transfers itself. Prints the least time of a call among the rounds: on a busy machine most rounds
//! are interrupted. The instructions of a call are the difference of two runs, divided by that of the calls.

use std::{hint::black_box, path::Path, process::ExitCode, time::Instant};

use kvhoist::{BlockKey, Cache, Config, DirectIo, DiskPath, Eviction, Route, block_on};
use kvhoist_bench_kit::drive::key;

/// Blocks of the cache, and of a round. Their entries fit the processor's second cache.
const BLOCKS: usize = 4096;
const CHAIN: usize = 128;
/// Blocks of host memory over a disk tier with room for [`BLOCKS`].
const HOST_BLOCKS: usize = BLOCKS / 8;
const BLOCK_BYTES: usize = 4096;

const CALLS: [&str; 8] = ["fetch", "miss", "chain", "len8", "match8", "match128", "disk", "store"];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let rounds = args.get(1).and_then(|rounds| rounds.parse::<u32>().ok()).filter(|rounds| *rounds > 0);
    let (Some(what), Some(rounds)) = (args.first(), rounds) else {
        eprintln!("expected a call and a number of rounds: {} ROUNDS [lru|rb]", CALLS.join("|"));
        return ExitCode::FAILURE;
    };
    let policy = if args.get(2).is_some_and(|policy| policy == "lru") { Eviction::Lru } else { Eviction::Rb };
    if !CALLS.contains(&what.as_str()) {
        eprintln!("found {what}, expected one of {}", CALLS.join(", "));
        return ExitCode::FAILURE;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let over_disk = matches!(what.as_str(), "disk" | "store").then_some(folder.path());
    let (cache, keys) = filled(policy, over_disk);
    let mut least = f64::INFINITY;
    for number in 1..=u64::from(rounds) {
        let others: Vec<BlockKey> = (0..BLOCKS as u64).map(|n| key(number * BLOCKS as u64 + n)).collect();
        let begun = Instant::now();
        let calls = round(&cache, what, &keys, &others);
        least = least.min(begun.elapsed().as_nanos() as f64 / calls as f64);
    }
    println!("{what}: {least:.1} ns a call at the least, {rounds} rounds");
    block_on(cache.close()).expect("close");
    ExitCode::SUCCESS
}

/// A cache full of chains, in memory or over a disk.
fn filled(policy: Eviction, folder: Option<&Path>) -> (Cache, Vec<BlockKey>) {
    let settings = Config::default().block_bytes(BLOCK_BYTES).eviction_policy(policy);
    let settings = match folder {
        None => settings.host_blocks(BLOCKS as u32),
        Some(folder) => settings
            .host_blocks(HOST_BLOCKS as u32)
            .disks(vec![DiskPath::with_blocks(folder, BLOCKS as u32)])
            .direct_io(DirectIo::Prefer)
            .workers(0),
    };
    let cache = block_on(Cache::open(settings)).expect("a cache");
    let keys: Vec<BlockKey> = (0..BLOCKS as u64).map(key).collect();
    store_all(&cache, &keys);
    (cache, keys)
}

/// Makes the calls of a round, on the stored `keys` or on `others`. Returns their number.
fn round(cache: &Cache, what: &str, keys: &[BlockKey], others: &[BlockKey]) -> usize {
    let chains = || keys.chunks_exact(CHAIN);
    match what {
        "fetch" => fetch_all(cache, keys, true),
        "miss" => fetch_all(cache, others, false),
        "disk" => block_on(async {
            for key in keys {
                let block = cache.fetch(key).await.expect("fetch").expect("it is on disk");
                assert_eq!(black_box(block).route(), Route::DiskToHost);
            }
        }),
        "store" => store_all(cache, others),
        "chain" => chains().for_each(|chain| {
            assert_eq!(cache.match_len(chain), CHAIN);
            fetch_all(cache, chain, true);
        }),
        "len8" => chains().for_each(|chain| assert_eq!(black_box(cache.match_len(&chain[..8])), 8)),
        "match8" => chains().for_each(|chain| assert_eq!(black_box(cache.match_prefix(&chain[..8])).len(), 8)),
        "match128" => chains().for_each(|chain| assert_eq!(black_box(cache.match_prefix(chain)).len(), CHAIN)),
        _ => unreachable!("one of the calls"),
    }
    if matches!(what, "len8" | "match8" | "match128") { BLOCKS / CHAIN } else { BLOCKS }
}

/// Stores blocks in chains.
fn store_all(cache: &Cache, keys: &[BlockKey]) {
    block_on(async {
        for chain in keys.chunks(CHAIN) {
            let parents = std::iter::once(None).chain(chain.iter().map(Some));
            for (key, parent) in chain.iter().zip(parents) {
                cache.store(key, parent, &[0; BLOCK_BYTES]).await.expect("stored");
            }
        }
    });
}

fn fetch_all(cache: &Cache, keys: &[BlockKey], resident: bool) {
    block_on(async {
        for key in keys {
            assert_eq!(black_box(cache.fetch(key).await.expect("fetch")).is_some(), resident);
        }
    });
}
