//! Two nodes with one store, killed at random: no wrong byte, and nothing lost of what a node has acknowledged.

use std::{
    collections::BTreeSet,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use kvhoist_bench_kit::pattern::Rng;

use crate::{
    common::double::Double,
    node::{Node, NodeClient, payload},
    s3_url,
};

/// Chains that both nodes store and load, each of so many blocks.
const CHAINS: u64 = 24;
const CHAIN_BLOCKS: u64 = 8;

/// Seconds of the test: 15, or as the environment says.
fn seconds() -> u64 {
    let said = std::env::var("KVHOIST_REMOTE_KILL_S").ok();
    said.map_or(15, |text| text.parse().expect("KVHOIST_REMOTE_KILL_S is a number of seconds"))
}

/// What the threads of the test have seen.
#[derive(Default)]
struct Seen {
    ended: AtomicBool,
    loaded: AtomicU64,
    /// Loaded from a node that had not stored them.
    shared: AtomicU64,
}

/// Stores and loads chains on a node, whoever kills it meanwhile.
fn work(node: &Mutex<Node>, seen: &Seen, seed: u64) {
    let folder = node.lock().expect("no panic").folder.clone();
    let (mut random, mut client, mut acknowledged) = (Rng::new(seed), None, BTreeSet::new());
    while !seen.ended.load(Ordering::Relaxed) {
        let Some(connected) = client.take().or_else(|| NodeClient::connect(folder.path()).ok()) else {
            thread::sleep(Duration::from_millis(5));
            continue;
        };
        let first = random.below(CHAINS) * CHAIN_BLOCKS;
        let blocks = first..first + CHAIN_BLOCKS;
        // Each chain has a node that stores it, so that the other one's are the store's.
        let is_own = (first / CHAIN_BLOCKS) % 2 == seed % 2;
        if is_own && random.below(3) == 0 {
            let Ok(stored) = connected.try_store(blocks.clone()) else { continue };
            acknowledged.extend(blocks.zip(stored).filter(|(_, is_stored)| *is_stored).map(|(n, _)| n));
        } else {
            let Ok(loaded) = connected.try_load(blocks.clone()) else { continue };
            for (n, is_loaded) in blocks.zip(loaded) {
                assert!(is_loaded || !acknowledged.contains(&n), "seed {seed}: block {n} was acknowledged and is lost");
                if is_loaded {
                    assert!(connected.bytes(n) == payload(n), "seed {seed}: block {n} has wrong bytes");
                    seen.loaded.fetch_add(1, Ordering::Relaxed);
                    seen.shared.fetch_add(u64::from(!is_own), Ordering::Relaxed);
                }
            }
        }
        client = Some(connected);
    }
}

#[test]
fn nodes_that_are_killed_serve_no_wrong_byte_and_lose_nothing_acknowledged() {
    let double = Double::start();
    let url = s3_url(&double);
    let seed = u64::from(std::process::id());
    println!("seed {seed}; KVHOIST_REMOTE_KILL_S={} is as long", seconds());
    let nodes = [(); 2].map(|()| Mutex::new(Node::start(&url, &[])));
    let (seen, mut kills) = (Seen::default(), 0);
    thread::scope(|scope| {
        let workers: Vec<_> = nodes
            .iter()
            .zip(seed..)
            .map(|(node, seed)| {
                scope.spawn({
                    let seen = &seen;
                    move || work(node, seen, seed)
                })
            })
            .collect();
        let (mut random, until) = (Rng::new(!seed), Instant::now() + Duration::from_secs(seconds()));
        // Longer where a busy machine starts few services in the time.
        let hang = until + Duration::from_secs(180);
        let goes_on = |kills| {
            let is_enough = kills >= 3 && seen.shared.load(Ordering::Relaxed) > 0;
            Instant::now() < if is_enough { until } else { hang }
        };
        while goes_on(kills) && !workers.iter().any(thread::ScopedJoinHandle::is_finished) {
            thread::sleep(Duration::from_millis(random.below(1500)));
            nodes[random.below(2) as usize].lock().expect("no panic").restart();
            kills += 1;
        }
        seen.ended.store(true, Ordering::Relaxed);
    });
    let (loaded, shared) = (seen.loaded.into_inner(), seen.shared.into_inner());
    println!("{kills} kills, {loaded} blocks loaded, {shared} of them stored by the other node");
    assert!(kills >= 3 && shared > 0, "{kills} kills, {loaded} loaded, {shared} shared");
    let objects = double.state.objects.lock().expect("no panic").clone();
    assert!(!objects.is_empty());
}
