//! One call in host memory, again and again: what it costs in instructions and, undisturbed, in time.
//!
//!     cargo bench --bench hit -- fetch|miss|chain|len8|match8|match128 ROUNDS [lru|rb]
//!     valgrind --tool=callgrind target/release/deps/hit-HASH fetch 1; and the same with 5: the difference, by 4 rounds
//!
//! `chain` matches 128 blocks, then fetches them. Prints the least time of a call among the rounds: on a busy machine
//! most rounds are interrupted. The instructions of a call are the difference of two runs, divided by that of the
//! calls.

use std::{hint::black_box, process::ExitCode, time::Instant};

use kvhoist::{BlockKey, Cache, Config, Eviction, block_on};
use kvhoist_bench_kit::drive::key;

/// Blocks of the cache, and of a round. Their entries fit the processor's second cache.
const BLOCKS: usize = 4096;
const CHAIN: usize = 128;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let rounds = args.get(1).and_then(|rounds| rounds.parse::<u32>().ok()).filter(|rounds| *rounds > 0);
    let (Some(what), Some(rounds)) = (args.first(), rounds) else {
        eprintln!("expected a call and a number of rounds: fetch|miss|chain|len8|match8|match128 ROUNDS [lru|rb]");
        return ExitCode::FAILURE;
    };
    let policy = if args.get(2).is_some_and(|policy| policy == "lru") { Eviction::Lru } else { Eviction::Rb };
    let (cache, keys) = filled(policy);
    let absent: Vec<BlockKey> = (BLOCKS..2 * BLOCKS).map(|n| key(n as u64)).collect();
    let mut least = f64::INFINITY;
    for _ in 0..rounds {
        let begun = Instant::now();
        let Some(calls) = round(&cache, what, &keys, &absent) else {
            eprintln!("found {what}, expected fetch, miss, chain, len8, match8 or match128");
            return ExitCode::FAILURE;
        };
        least = least.min(begun.elapsed().as_nanos() as f64 / calls as f64);
    }
    println!("{what}: {least:.1} ns a call at the least, {rounds} rounds");
    block_on(cache.close()).expect("close");
    ExitCode::SUCCESS
}

/// A cache full of chains.
fn filled(policy: Eviction) -> (Cache, Vec<BlockKey>) {
    let settings = Config::default().block_bytes(4096).host_blocks(BLOCKS as u32).eviction_policy(policy);
    let cache = block_on(Cache::open(settings)).expect("a cache in memory");
    let keys: Vec<BlockKey> = (0..BLOCKS).map(|n| key(n as u64)).collect();
    for (n, key) in keys.iter().enumerate() {
        let parent = (!n.is_multiple_of(CHAIN)).then(|| &keys[n - 1]);
        block_on(cache.store(key, parent, &[0; 4096])).expect("stored");
    }
    (cache, keys)
}

/// Makes the calls of a round; their number, or `None` for a call that there is not.
fn round(cache: &Cache, what: &str, keys: &[BlockKey], absent: &[BlockKey]) -> Option<usize> {
    let chains = || keys.chunks_exact(CHAIN);
    match what {
        "fetch" => fetch_all(cache, keys, true),
        "miss" => fetch_all(cache, absent, false),
        "chain" => chains().for_each(|chain| {
            assert_eq!(cache.match_len(chain), CHAIN);
            fetch_all(cache, chain, true);
        }),
        "len8" => chains().for_each(|chain| assert_eq!(black_box(cache.match_len(&chain[..8])), 8)),
        "match8" => chains().for_each(|chain| assert_eq!(black_box(cache.match_prefix(&chain[..8])).len(), 8)),
        "match128" => chains().for_each(|chain| assert_eq!(black_box(cache.match_prefix(chain)).len(), CHAIN)),
        _ => return None,
    }
    Some(if matches!(what, "fetch" | "miss" | "chain") { BLOCKS } else { BLOCKS / CHAIN })
}

fn fetch_all(cache: &Cache, keys: &[BlockKey], resident: bool) {
    block_on(async {
        for key in keys {
            assert_eq!(black_box(cache.fetch(key).await.expect("fetch")).is_some(), resident);
        }
    });
}
