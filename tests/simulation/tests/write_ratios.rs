//! Hits and bytes written by write policy, with host memory for 2 % of a trace's blocks and a disk for 10 %, in virtual
//! time, LRU in both tiers: `KVHOIST_TRACE` names a trace, `KVHOIST_SHARE` another percentage of the disk,
//! `KVHOIST_POLICY` another eviction policy for `by_value`. A trace of millions of references takes minutes per row:
//! with `KVHOIST_WRITTEN`, the number of blocks that write-through writes, only the budget's row is measured.

mod scene;
#[path = "../../common/skip.rs"]
mod skip;

use std::{collections::HashSet, time::Duration};

use kvhoist::{BlockKey, Cache, Config, DiskPath, Eviction, Tier, WritePolicy};
use kvhoist_simulation::sim::{self, Sim, SimOptions, Simulated, World};
use tokio::time::Instant;

/// Blocks are small here; on disk each takes a slot of 4096 bytes.
const BLOCK_BYTES: usize = 64;
const SLOT_BYTES: u64 = 4096;
/// What a write of a block comes to in a budget: with the page of its record.
const WRITTEN_BYTES: f64 = 8192.0;

struct Request {
    at: Duration,
    chain: Vec<BlockKey>,
}

#[derive(Debug)]
struct Figures {
    hits: u64,
    written: u64,
    most_an_hour: u64,
}

fn key(n: u64) -> BlockKey {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&n.to_le_bytes());
    BlockKey::new(bytes)
}

fn number(line: &str, field: &str) -> Option<f64> {
    let rest = line.split_once(&format!("\"{field}\":"))?.1;
    rest.split([',', '}']).next()?.trim().parse().ok()
}

/// The full blocks of each request.
fn read(path: &str) -> Vec<Request> {
    let text = std::fs::read_to_string(path).expect("the trace can be read");
    let request = |line: &str| {
        let list = line.split_once("\"hash_ids\":").and_then(|(_, rest)| rest.split(['[', ']']).nth(1)).expect("ids");
        let ids = list.split(',').filter(|id| !id.trim().is_empty());
        let mut chain: Vec<_> = ids.map(|id| key(id.trim().parse().expect("a number"))).collect();
        if let Some(tokens) = number(line, "input_length") {
            chain.truncate(tokens as usize / 512);
        }
        let at = Duration::from_secs_f64(number(line, "timestamp").expect("a timestamp") / 1e3);
        Request { at, chain }
    };
    text.lines().map(request).filter(|request| !request.chain.is_empty()).collect()
}

/// Conversations that go on and come back, among prompts that never do, for three hours.
fn workload() -> Vec<Request> {
    let mut rng = sim::Rng::new(7);
    let mut lengths = [4u64; 40];
    (0..3000)
        .map(|n| {
            let chain = if rng.chance(0.67) {
                (0..20).map(|at| key(1_000_000 + n * 20 + at)).collect()
            } else {
                let user = rng.below(40);
                let length = &mut lengths[user as usize];
                *length = if *length > 24 { 4 } else { *length + 2 };
                (0..*length).map(|at| key(user * 1000 + at)).collect()
            };
            Request { at: Duration::from_secs(n * 4), chain }
        })
        .collect()
}

async fn serve(cache: &Cache, chain: &[BlockKey]) -> u64 {
    let matched = cache.match_prefix(chain).len();
    let mut leases = Vec::new();
    for key in &chain[..matched] {
        // The blocks before it may have taken the place of one that is in host memory only.
        let Some(lease) = cache.fetch(key).await.expect("a sound disk") else { break };
        assert_eq!(lease[..32], *key.as_bytes(), "the bytes of another block");
        leases.push(lease);
    }
    let found = leases.len();
    for (at, key) in chain.iter().enumerate().skip(found) {
        let mut bytes = vec![0; BLOCK_BYTES];
        bytes[..32].copy_from_slice(key.as_bytes());
        cache.store(key, at.checked_sub(1).map(|above| &chain[above]), &bytes).await.expect("a sound disk");
    }
    while leases.pop().is_some() {}
    found as u64
}

/// What all are compared with is LRU that writes through.
fn eviction(policy: WritePolicy) -> Eviction {
    let name = std::env::var("KVHOIST_POLICY").ok().filter(|_| policy == WritePolicy::ByValue);
    match name.as_deref().unwrap_or("lru") {
        "lru" => Eviction::Lru,
        "rb" => Eviction::Rb,
        "rb_refuse" => Eviction::RbRefuse,
        other => panic!("KVHOIST_POLICY: found {other}, expected lru, rb or rb_refuse"),
    }
}

fn replay(requests: &[Request], host: u32, disk: u32, policy: WritePolicy, budget: Option<u64>) -> Figures {
    let config = Config::default()
        .block_bytes(BLOCK_BYTES)
        .host_blocks(host)
        .disks(vec![DiskPath::with_blocks("simulated", disk)])
        .eviction_policy(eviction(policy))
        .write_policy(policy)
        .write_budget(budget);
    sim::block_on(async {
        let mut world = World::new(1, Vec::new());
        let latency = Duration::from_micros(10)..=Duration::from_micros(10);
        world.storage = Sim::new(1, sim::blank_files(&config), SimOptions { latency, ..SimOptions::default() });
        let Simulated { cache, reactor } = sim::open(config, &world).await.expect("blank files open");
        let began = Instant::now();
        let (mut hits, mut written) = (0, Vec::new());
        for Request { at, chain } in requests {
            tokio::time::sleep_until(began + *at).await;
            hits += serve(&cache, chain).await;
            written.push((*at, cache.stats().tier(Tier::Disk).bytes_in / BLOCK_BYTES as u64));
        }
        let mut most_an_hour = 0;
        let mut from = 0;
        for (at, now) in &written {
            while written[from].0 + Duration::from_secs(3600) < *at {
                from += 1;
            }
            most_an_hour = most_an_hour.max(now - written[from].1);
        }
        let written = cache.stats().tier(Tier::Disk).bytes_in / BLOCK_BYTES as u64;
        cache.close().await.expect("a sound disk");
        reactor.ended().await;
        Figures { hits, written, most_an_hour }
    })
}

/// Of host memory, and of the disk.
fn slots(requests: &[Request], share: f64) -> (u32, u32) {
    let distinct = requests.iter().flat_map(|request| &request.chain).collect::<HashSet<_>>().len() as f64;
    ((distinct * 0.02) as u32, (distinct * share / 100.0) as u32)
}

/// By value, with half of `written` blocks as the budget; and that budget, in blocks an hour.
fn half_of(written: u64, requests: &[Request], host: u32, disk: u32) -> (f64, Figures) {
    let hours = (requests[requests.len() - 1].at - requests[0].at).as_secs_f64().max(3600.0) / 3600.0;
    let an_hour = written as f64 / 2.0 / hours;
    let bytes_a_day = (an_hour * 24.0 * WRITTEN_BYTES) as u64;
    (an_hour, replay(requests, host, disk, WritePolicy::ByValue, Some(bytes_a_day)))
}

/// By write-through, by value, and by value with a budget of half of what write-through writes.
fn compare(name: &str, requests: &[Request], share: f64) -> [Figures; 3] {
    let (host, disk) = slots(requests, share);
    let references: usize = requests.iter().map(|request| request.chain.len()).sum();
    let through = replay(requests, host, disk, WritePolicy::WriteThrough, None);
    let by_value = replay(requests, host, disk, WritePolicy::ByValue, None);
    let (an_hour, within) = half_of(through.written, requests, host, disk);
    println!("{name}: {references} references, {host} slots in host memory, {disk} of {SLOT_BYTES} bytes on disk");
    for (policy, figures) in [("write_through", &through), ("by_value", &by_value), ("half the budget", &within)] {
        println!(
            "{policy:16} hits {:.4} ({:.3}), writes {:.4} ({:.3}) of references, most in an hour {:.3} of the budget",
            figures.hits as f64 / references as f64,
            figures.hits as f64 / through.hits as f64,
            figures.written as f64 / references as f64,
            figures.written as f64 / through.written as f64,
            figures.most_an_hour as f64 / an_hour,
        );
    }
    assert!(within.most_an_hour as f64 <= 1.1 * an_hour + 1.0, "{name}: {within:?}, {an_hour} blocks an hour");
    [through, by_value, within]
}

#[test]
fn by_value_writes_less_and_hits_no_less() {
    let [through, by_value, within] = compare("workload", &workload(), 5.0);
    assert!(by_value.written * 4 < through.written * 3, "{by_value:?}, written through {through:?}");
    assert!(by_value.hits >= through.hits, "{by_value:?}, written through {through:?}");
    assert!(within.hits * 100 >= through.hits * 97, "{within:?}, written through {through:?}");
}

#[test]
fn on_a_recorded_trace() {
    let Ok(path) = std::env::var("KVHOIST_TRACE") else {
        skip::skipped("KVHOIST_TRACE names no trace");
        return;
    };
    let share = std::env::var("KVHOIST_SHARE").map_or(10.0, |share| share.parse().expect("a percentage"));
    let requests = read(&path);
    let Ok(written) = std::env::var("KVHOIST_WRITTEN") else {
        compare(&path, &requests, share);
        return;
    };
    let (host, disk) = slots(&requests, share);
    let (an_hour, within) = half_of(written.parse().expect("a number of blocks"), &requests, host, disk);
    println!("{path}: {within:?} of {an_hour:.0} blocks an hour, {host} slots in host memory, {disk} on disk");
    assert!(within.most_an_hour as f64 <= 1.1 * an_hour + 1.0, "{path}: {within:?}, {an_hour} blocks an hour");
}
