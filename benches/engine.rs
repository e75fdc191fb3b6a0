//! The cache against the bare ring loop on the same file, in interleaved rounds; and what it does without a disk.
//!
//!     cargo bench --bench engine -- [disk|tmpfs|store|pool|hits|idle|start]... [--rounds N] [--spin-us N] [--dir DIR]
//!
//! Without a name all of them run. `hits` compares the eviction policies, in turns.

use std::{
    fs::OpenOptions,
    io,
    os::unix::fs::OpenOptionsExt,
    path::Path,
    process::ExitCode,
    time::{Duration, Instant},
};

use kvhoist::{BlockKey, Cache, Config, DiskPath, Eviction, block_on};
use kvhoist_bench_kit::{
    drive::{self, Options, each, key, other, run_local, store_stamped},
    measure::{Entrant, Sample, Stopwatch, interleave, ratio, table},
    ring::{BareRing, Op, Setup},
    routes::{Shape, Way},
};

const FILE_BYTES: u64 = 512 << 20;

/// Pages of 64 tokens of llama70b with 8 ranks, DeepSeek-V3 and llama8b.
const POOL_BLOCKS: [usize; 3] = [2_621_440, 4_497_408, 8 << 20];

const NAMES: [&str; 7] = ["disk", "tmpfs", "store", "pool", "hits", "idle", "start"];

fn main() -> ExitCode {
    drive::main(&NAMES, env!("CARGO_TARGET_TMPDIR"), |name, options| match name {
        "disk" => [(128 << 10, 1), (128 << 10, 8), (128 << 10, 32), (1 << 20, 8)]
            .into_iter()
            .try_for_each(|(block_bytes, depth)| route(options, &options.dir, Way::DiskToHost, block_bytes, depth)),
        "tmpfs" => route(options, Path::new("/dev/shm"), Way::DiskToHost, 128 << 10, 8),
        "store" => route(options, &options.dir, Way::HostToDisk, 128 << 10, 32),
        "pool" => POOL_BLOCKS.into_iter().try_for_each(|block_bytes| {
            [Way::DiskToPool, Way::PoolToDisk]
                .into_iter()
                .try_for_each(|way| route(options, &options.dir, way, block_bytes, 8))
        }),
        "hits" => hits(options),
        "idle" => idle(options),
        _ => start(options),
    })
}

fn route(options: &Options, dir: &Path, way: Way, block_bytes: usize, depth: usize) -> io::Result<()> {
    let Options { rounds, spin_us, .. } = *options;
    let shape = Shape { dir: dir.to_owned(), block_bytes, depth, file_bytes: FILE_BYTES, rounds, spin_us };
    println!("{}", shape.measure(way, &mut || Ok(()))?.text());
    Ok(())
}

fn config(options: &Options, dir: &Path, block_bytes: usize, host_blocks: u32, disk_blocks: u32) -> Config {
    let disks = vec![DiskPath::with_blocks(dir, disk_blocks)];
    Config::default().block_bytes(block_bytes).host_blocks(host_blocks).disks(disks).spin_us(options.spin_us)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Nanoseconds an operation of `run`, `n` operations, with each policy: the rounds in turns, the middle one of each.
/// And the middle one of the ratios within a round, operations a second with the last policy over the first.
fn policies_in_turns(rounds: u64, n: u64, mut run: impl FnMut(&HostOnly)) -> io::Result<([f64; 2], f64)> {
    let caches = [HostOnly::open(Eviction::Lru)?, HostOnly::open(Eviction::Rb)?];
    let mut timings = [Vec::new(), Vec::new()];
    for round in 0..=rounds {
        // Who goes first changes: a processor that warms up favors the second.
        for at in if round % 2 == 0 { [0, 1] } else { [1, 0] } {
            let started = Instant::now();
            run(&caches[at]);
            timings[at].push(started.elapsed().as_nanos() as f64 / n as f64);
        }
    }
    let ratios = timings[0].iter().zip(&timings[1]).skip(1).map(|(lru, rb)| lru / rb).collect();
    // The first round warms the caches of the processor.
    let ns = timings.map(|timings| median(timings[1..].to_vec()));
    for HostOnly { cache, .. } in &caches {
        block_on(cache.close()).map_err(other)?;
    }
    Ok((ns, median(ratios)))
}

/// A cache in memory that holds chains of 128 blocks, and nothing is missing.
struct HostOnly {
    cache: Cache,
    keys: Vec<BlockKey>,
}

impl HostOnly {
    const BLOCKS: u64 = 16_384;

    fn open(eviction_policy: Eviction) -> io::Result<Self> {
        let settings =
            Config::default().block_bytes(4096).host_blocks(Self::BLOCKS as u32).eviction_policy(eviction_policy);
        let cache = block_on(Cache::open(settings)).map_err(other)?;
        let keys: Vec<BlockKey> = (0..Self::BLOCKS).map(key).collect();
        let data = vec![0; 4096];
        for (n, key) in keys.iter().enumerate() {
            let parent = (!n.is_multiple_of(128)).then(|| &keys[n - 1]);
            block_on(cache.store(key, parent, &data)).map_err(other)?;
        }
        Ok(HostOnly { cache, keys })
    }

    fn fetch_all(&self) {
        block_on(async {
            for key in &self.keys {
                std::hint::black_box(self.cache.fetch(key).await.expect("fetch").expect("resident"));
            }
        });
    }

    /// As an engine does: each chain is matched, then fetched.
    fn match_and_fetch_all(&self) {
        for chain in self.keys.chunks_exact(128) {
            assert_eq!(self.cache.match_len(chain), 128);
            block_on(async {
                for key in chain {
                    std::hint::black_box(self.cache.fetch(key).await.expect("fetch").expect("resident"));
                }
            });
        }
    }
}

/// Bar of what a policy may cost: operations a second with RB over LRU.
const POLICY_BAR: f64 = 0.97;

fn hits(options: &Options) -> io::Result<()> {
    let rounds = options.rounds.max(9);
    let blocks = HostOnly::BLOCKS;
    println!("{:<44} {:>10} {:>10} {:>9}", "in host memory, one thread", "lru", "rb", "rb/lru");
    let (ns, ratio) = policies_in_turns(rounds, blocks * 8, |host| (0..8).for_each(|_| host.fetch_all()))?;
    let rates = ns.map(|ns| 1e3 / ns);
    println!("{:<44} {:>10.2} {:>10.2} {ratio:>9.3}", "fetch, M/s (bar 5)", rates[0], rates[1]);
    let mut worst = ratio;
    let (ns, ratio) = policies_in_turns(rounds, blocks * 8, |host| (0..8).for_each(|_| host.match_and_fetch_all()))?;
    let rates = ns.map(|ns| 1e3 / ns);
    println!("{:<44} {:>10.2} {:>10.2} {ratio:>9.3}", "match and fetch 128, M blocks/s", rates[0], rates[1]);
    worst = worst.min(ratio);
    for (length, bar_us) in [(8, 0.3), (32, 1.0), (128, 4.0)] {
        let (ns, ratio) = policies_in_turns(rounds, blocks / 128 * 64, |host| {
            for _ in 0..64 {
                for chain in host.keys.chunks_exact(128) {
                    assert_eq!(std::hint::black_box(host.cache.match_prefix(&chain[..length])).len(), length);
                }
            }
        })?;
        let what = format!("match_prefix of {length} keys, us (bar {bar_us})");
        println!("{what:<44} {:>10.2} {:>10.2} {ratio:>9.3}", ns[0] / 1e3, ns[1] / 1e3);
        worst = worst.min(ratio);
    }
    let verdict = if worst >= POLICY_BAR { "holds" } else { "MISSED" };
    println!("rb over lru is {worst:.3} at the least; the bar of {POLICY_BAR} {verdict}\n");
    Ok(())
}

fn store_blocks(cache: &Cache, blocks: u64, depth: usize) -> io::Result<()> {
    let cache = cache.clone();
    run_local(each(0..blocks, depth, move |n| store_stamped(cache.clone(), n)))
}

fn idle(options: &Options) -> io::Result<()> {
    let scratch = tempfile::tempdir_in(&options.dir)?;
    let cache = block_on(Cache::open(config(options, scratch.path(), 128 << 10, 64, 256))).map_err(other)?;
    store_blocks(&cache, 64, 8)?;
    let watch = Stopwatch::start();
    std::thread::sleep(Duration::from_secs(10));
    println!("idle for 10 s: {:.2} ms of CPU (bar 10 ms)\n", watch.stop(0).cpu_seconds * 1e3);
    block_on(cache.close()).map_err(other)
}

/// Opening a store of a million records, against reading its record table and nothing else.
fn start(options: &Options) -> io::Result<()> {
    let scratch = tempfile::tempdir_in(&options.dir)?;
    let records = 1u32 << 20;
    let settings = config(options, scratch.path(), 4096, 256, records);
    let cache = block_on(Cache::open(settings.clone())).map_err(other)?;
    store_blocks(&cache, records.into(), 128)?;
    block_on(cache.close()).map_err(other)?;
    let path = scratch.path().join("kvhoist.store");
    let (table_offset, chunk) = (8192, 1 << 20);
    let bare_path = path.clone();
    let bare = Entrant::new("read the table", move |_| {
        let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&bare_path)?;
        let mut ring = BareRing::open(chunk, 2, Setup::Coop)?;
        let offsets = (0..u64::from(records) * 128 / chunk as u64).map(|n| table_offset + n * chunk as u64);
        ring.run(&file, Op::Read, offsets, |_, _| Ok(()))
    });
    let kvhoist = Entrant::new("kvhoist open", move |_| {
        let watch = Stopwatch::start();
        let cache = block_on(Cache::open(settings.clone())).map_err(other)?;
        let sample = watch.stop(u64::from(records) * 128);
        let resident = cache.stats().tier(kvhoist::Tier::Disk).resident;
        assert_eq!(resident, u64::from(records));
        block_on(cache.close()).map_err(other)?;
        Ok(sample)
    });
    let series = interleave(options.rounds.min(5), &mut [bare, kvhoist])?;
    println!("{}", table("start-up with 1 Mi records (bar: 3 times the reading of the table)", &series));
    let times = ratio(&series[0], &series[1], Sample::mib_per_s);
    println!("opening takes {times:.2} times the reading\n");
    Ok(())
}
