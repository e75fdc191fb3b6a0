//! A crash at any instant: what the next start serves is what was completely stored, or a miss.

mod common;

use std::{
    io::{BufRead, BufReader, Read, Write},
    os::unix::fs::FileExt,
    process::{Command, Stdio},
};

use common::{BLOCK_BYTES, Rng, config, directory, fetch_verified, key, payload, store, store_file};
use kvhoist::{Cache, StorageKind, Tier, WritePolicy, block_on};

const CHILD: &str = "KVHOIST_CRASH_CHILD";
const SLOTS: u32 = 64;

/// Not a test of its own: what the child process of the next one runs, under load until it is killed.
#[test]
fn child() {
    let Ok(directory) = std::env::var(CHILD) else { return };
    let settings = kvhoist::Config {
        block_bytes: BLOCK_BYTES,
        host_blocks: 8,
        disks: vec![kvhoist::DiskPath { path: directory.into(), blocks: SLOTS }],
        write_policy: WritePolicy::WriteThrough,
        ..kvhoist::Config::default()
    };
    let cache = block_on(Cache::open(settings)).expect("open");
    let mut out = std::io::stdout().lock();
    for n in 0.. {
        block_on(store(&cache, n));
        if n % 16 == 15 {
            block_on(cache.sync()).expect("sync");
            // The parent reads what was acknowledged as durable.
            writeln!(out, "synced {n}").expect("a parent that reads");
            out.flush().expect("a parent that reads");
        }
    }
}

#[test]
fn a_killed_process_leaves_what_it_stored_or_a_miss() {
    let mut rng = Rng(common::seed());
    let kills = std::env::var("KVHOIST_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(10);
    let dir = directory();
    for kill in 0..kills {
        let synced = run_and_kill(dir.path(), 1 + rng.below(4), rng.below(3_000));
        let settings = config(&dir, StorageKind::Auto, 8, SLOTS);
        let cache = block_on(Cache::open(settings)).expect("a killed process leaves a store that opens");
        let mut served = 0;
        for n in 0..synced + 2_000 {
            served += u64::from(block_on(fetch_verified(&cache, n)));
        }
        // The newest blocks before the last sync cannot have been evicted by more than what came after it; those that
        // the child stored later may have taken the place of older ones.
        let stats = cache.stats();
        assert!(served > 0, "kill {kill}: nothing of {synced} synced blocks is served");
        assert!(stats.tier(Tier::Disk).resident <= u64::from(SLOTS));
        block_on(cache.close()).expect("close");
    }
}

/// Runs the child until it has synced `syncs` times and then some, and kills it. The last block known to be synced.
fn run_and_kill(directory: &std::path::Path, syncs: u64, spins: u64) -> u64 {
    let mut child = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "child", "--nocapture", "--test-threads", "1"])
        .env(CHILD, directory)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("spawn");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let mut synced = 0;
    for _ in 0..syncs {
        let line = lines.by_ref().map_while(Result::ok).find(|line| line.contains("synced "));
        let line = line.expect("the child stores until it is killed");
        let (_, n) = line.split_once("synced ").expect("found above");
        synced = n.parse().expect("a number");
    }
    // A random while longer, so that the kill comes at any point of a store.
    for _ in 0..spins * 100 {
        std::hint::spin_loop();
    }
    child.kill().expect("SIGKILL");
    child.wait().expect("reaped");
    // What it printed before the end counts too.
    let mut rest = String::new();
    drop(lines.into_inner_text(&mut rest));
    let last = rest.lines().filter_map(|line| line.split_once("synced ")?.1.parse().ok()).next_back();
    last.unwrap_or(synced)
}

trait IntoInnerText {
    fn into_inner_text(self, rest: &mut String) -> std::io::Result<usize>;
}

impl<R: Read> IntoInnerText for std::io::Lines<BufReader<R>> {
    fn into_inner_text(self, rest: &mut String) -> std::io::Result<usize> {
        for line in self.map_while(Result::ok) {
            rest.push_str(&line);
            rest.push('\n');
        }
        Ok(rest.len())
    }
}

/// Copies of the file taken while it is written are what crashes at those instants could leave, and worse: a copy sees
/// later pages later.
#[test]
fn copies_taken_under_load_serve_only_right_bytes() {
    let dir = directory();
    let cache = block_on(Cache::open(config(&dir, StorageKind::Auto, 8, SLOTS))).expect("open");
    block_on(store(&cache, 0));
    let writer = {
        let cache = cache.clone();
        std::thread::spawn(move || (1..600).for_each(|n| block_on(store(&cache, n))))
    };
    let mut copies = 0;
    while !writer.is_finished() {
        let copy = directory();
        std::fs::copy(store_file(&dir), store_file(&copy)).expect("copy");
        let crashed = block_on(Cache::open(config(&copy, StorageKind::Auto, 8, SLOTS))).expect("open the copy");
        for n in 0..600 {
            // A torn block is a miss; `fetch_verified` panics on a wrong byte.
            block_on(fetch_verified(&crashed, n));
        }
        crashed.validate().expect("valid");
        block_on(crashed.close()).expect("close");
        copies += 1;
    }
    writer.join().expect("the writer ends");
    assert!(copies > 0);
    block_on(cache.close()).expect("close");
}

/// Every kind of place in the file, damaged one at a time: a miss or a refusal, never wrong bytes.
#[test]
fn damage_anywhere_is_a_miss_or_a_refusal() {
    let dir = directory();
    let cache = block_on(Cache::open(config(&dir, StorageKind::Auto, 4, 16))).expect("open");
    for n in 0..16 {
        block_on(store(&cache, n));
    }
    block_on(cache.close()).expect("close");
    let whole = std::fs::read(store_file(&dir)).expect("the store");
    let block = payload(0, BLOCK_BYTES);
    let data = whole.windows(64).position(|window| window == &block[..64]).expect("block 0 is in the file") as u64;
    let mut rng = Rng(common::seed());
    let mut places = vec![0, 8, 12, 16, 40, 88, 500, 504, 4096, 4104, 4600];
    places.extend((0..32).map(|field| 8192 + 128 * 3 + field * 4));
    places.extend([data, data + 1, data + BLOCK_BYTES as u64 - 1]);
    places.extend((0..20).map(|_| rng.below(whole.len() as u64)));
    for place in places {
        let hurt = directory();
        std::fs::write(store_file(&hurt), &whole).expect("copy");
        let file = std::fs::OpenOptions::new().write(true).open(store_file(&hurt)).expect("open");
        file.write_all_at(&[whole[place as usize] ^ 1 << rng.below(8)], place).expect("damage");
        drop(file);
        match block_on(Cache::open(config(&hurt, StorageKind::Auto, 4, 16))) {
            Err(error) => assert!(matches!(error, kvhoist::Error::Store { .. }), "at {place}: {error}"),
            Ok(cache) => {
                let served = (0..16).filter(|n| block_on(fetch_verified(&cache, *n))).count();
                assert!(served >= 15, "at {place}: one damaged byte cost {} blocks", 16 - served);
                block_on(cache.close()).expect("close");
            }
        }
    }
    assert!(block_on(async { cache.fetch(&key(0)).await }).is_err(), "the first cache is closed");
}
