//! The cache against the bare ring loop on the same file, in interleaved rounds; and what it does without a disk.
//!
//!     cargo bench --bench engine -- [disk|tmpfs|store|hits|idle|start]... [--rounds N] [--spin-us N] [--dir DIR]
//!
//! Without a name all of them run.

mod bare;

use std::{
    cell::{Cell, RefCell},
    env,
    fs::OpenOptions,
    io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process::ExitCode,
    rc::Rc,
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use bare::{
    BareRing, Op, Setup,
    measure::{Entrant, Sample, Series, Stopwatch, interleave, ratio, table},
    pattern::{shuffled, stamp, verify},
    scratch::Scratch,
};
use kvhoist::{BlockKey, Cache, Config, DiskPath, block_on, tier::disk::format::stripe::Stripe};

const FILE_BYTES: u64 = 512 << 20;

/// [`Config::spin_us`] of every cache, from the flag.
static SPIN_US: AtomicU32 = AtomicU32::new(0);

const NAMES: [&str; 6] = ["disk", "tmpfs", "store", "hits", "idle", "start"];

fn main() -> ExitCode {
    let (mut names, mut rounds, mut spin_us, mut dir) = (Vec::new(), 7, 0, PathBuf::from(env!("CARGO_TARGET_TMPDIR")));
    let mut args = env::args().skip(1).filter(|arg| arg != "--bench");
    while let Some(arg) = args.next() {
        match (arg.as_str(), NAMES.contains(&arg.as_str())) {
            (_, true) => names.push(arg),
            ("--rounds", _) => rounds = args.next().and_then(|n| n.parse().ok()).unwrap_or(rounds),
            ("--spin-us", _) => spin_us = args.next().and_then(|n| n.parse().ok()).unwrap_or(spin_us),
            ("--dir", _) => dir = args.next().map_or(dir, PathBuf::from),
            _ => {
                eprintln!("found {arg}, expected {NAMES:?}, --rounds N, --spin-us N or --dir DIR");
                return ExitCode::FAILURE;
            }
        }
    }
    SPIN_US.store(spin_us, Ordering::Relaxed);
    if names.is_empty() {
        names = NAMES.map(String::from).to_vec();
    }
    for name in names {
        let result = match name.as_str() {
            "disk" => [(128 << 10, 8), (128 << 10, 32), (1 << 20, 8)]
                .into_iter()
                .try_for_each(|(block_bytes, depth)| fetch(&dir, block_bytes, depth, rounds)),
            "tmpfs" => fetch(Path::new("/dev/shm"), 128 << 10, 8, rounds),
            "store" => store(&dir, 128 << 10, 32, rounds),
            "hits" => hits(),
            "idle" => idle(&dir),
            _ => start(&dir, rounds.min(5)),
        };
        if let Err(error) = result {
            eprintln!("{name}: {error}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

fn key(n: u64) -> BlockKey {
    let mut bytes = [0; 32];
    let mut rng = bare::pattern::Rng::new(n);
    bytes.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&rng.next_u64().to_le_bytes()));
    BlockKey::new(bytes)
}

fn config(dir: &Path, block_bytes: usize, host_blocks: u32, disk_blocks: u32) -> Config {
    let disks = vec![DiskPath { path: dir.to_owned(), blocks: disk_blocks }];
    Config { block_bytes, host_blocks, disks, spin_us: SPIN_US.load(Ordering::Relaxed), ..Config::default() }
}

fn other(error: impl ToString) -> io::Error {
    io::Error::other(error.to_string())
}

/// Stores blocks `from..to`, `depth` at a time.
async fn store_range(cache: &Cache, from: u64, to: u64, depth: usize) -> io::Result<()> {
    let next = Rc::new(Cell::new(from));
    each(depth, || {
        let (cache, next) = (cache.clone(), Rc::clone(&next));
        async move {
            loop {
                let n = next.get();
                if n >= to {
                    return Ok(());
                }
                next.set(n + 1);
                let mut block = cache.reserve_for_overwrite().await.map_err(other)?;
                stamp(&mut block, n);
                block.commit(&key(n), None).await.map_err(other)?;
            }
        }
    })
    .await
}

/// Fetches and checks blocks, `depth` at a time.
async fn fetch_all(cache: &Cache, order: impl Iterator<Item = u64> + 'static, depth: usize) -> io::Result<()> {
    let order = Rc::new(RefCell::new(order));
    each(depth, || {
        let (cache, order) = (cache.clone(), Rc::clone(&order));
        async move {
            loop {
                let next = order.borrow_mut().next();
                let Some(n) = next else { return Ok(()) };
                let lease = cache.fetch(&key(n)).await.map_err(other)?;
                verify(&lease.ok_or_else(|| other(format!("block {n} is missing")))?, n)?;
            }
        }
    })
    .await
}

async fn each<F: Future<Output = io::Result<()>> + 'static>(depth: usize, task: impl Fn() -> F) -> io::Result<()> {
    let tasks: Vec<_> = (0..depth).map(|_| tokio::task::spawn_local(task())).collect();
    for task in tasks {
        task.await.map_err(other)??;
    }
    Ok(())
}

fn run_local<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    tokio::task::LocalSet::new().block_on(&runtime, future)
}

fn measured(bytes: u64, run: impl FnOnce() -> io::Result<()>) -> io::Result<Sample> {
    let watch = Stopwatch::start();
    run()?;
    Ok(watch.stop(bytes))
}

fn print(title: &str, all: &[Series]) {
    println!("{}", table(title, all));
    let throughput = ratio(&all[1], &all[0], Sample::mib_per_s);
    println!("throughput of the bare loop: {throughput:.3}\n");
}

fn fetch(dir: &Path, block_bytes: usize, depth: usize, rounds: u64) -> io::Result<()> {
    let scratch = tempfile::tempdir_in(dir)?;
    let blocks = FILE_BYTES / block_bytes as u64;
    let host_blocks = depth as u32 * 2;
    let settings = config(scratch.path(), block_bytes, host_blocks, blocks as u32);
    let cache = block_on(Cache::open(settings.clone())).map_err(other)?;
    run_local(store_range(&cache, 0, blocks, depth))?;
    block_on(cache.sync()).map_err(other)?;
    let path = scratch.path().join("kvhoist.store");
    let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)?;
    let data_offset = Stripe::new(&settings).locate(0).1;
    let mut ring = BareRing::open(block_bytes, depth, Setup::Coop)?;
    let bare = Entrant::new("bare ring", move |round| {
        let offsets = shuffled(round, blocks).map(|n| data_offset + n * block_bytes as u64);
        // Which block is in which slot is the cache's business: the bare loop looks at as many places of each.
        ring.run(&file, Op::Read, offsets, |_, block| {
            let stamped = block.chunks(4096).all(|page| page.iter().take(8).any(|byte| *byte != 0));
            if stamped { Ok(()) } else { Err(other("an empty page where every slot is full")) }
        })
    });
    let ours = cache.clone();
    let kvhoist = Entrant::new("kvhoist fetch", move |round| {
        // An order of its own: the same one would find in the host's caches what the bare loop just read.
        measured(FILE_BYTES, || run_local(fetch_all(&ours, shuffled(!round, blocks), depth)))
    });
    let series = interleave(rounds, &mut [bare, kvhoist])?;
    print(&format!("fetch, {}: {} KiB, QD{depth}", dir.display(), block_bytes >> 10), &series);
    block_on(cache.close()).map_err(other)
}

fn store(dir: &Path, block_bytes: usize, depth: usize, rounds: u64) -> io::Result<()> {
    let scratch = tempfile::tempdir_in(dir)?;
    let blocks = FILE_BYTES / block_bytes as u64;
    let settings = config(scratch.path(), block_bytes, depth as u32 * 2, blocks as u32);
    let cache = block_on(Cache::open(settings)).map_err(other)?;
    // Both files are written once before, so that no round pays for the file system's first allocation.
    let file = Scratch::filled(dir, block_bytes, blocks)?;
    run_local(store_range(&cache, 0, blocks, depth))?;
    block_on(cache.sync()).map_err(other)?;
    let mut ring = BareRing::open(block_bytes, depth, Setup::Coop)?;
    let bare = Entrant::new("bare ring", move |_| {
        let offsets = (0..blocks).map(|n| n * block_bytes as u64);
        ring.run(file.file(), Op::Write, offsets, |offset, block| {
            stamp(block, offset / block_bytes as u64);
            Ok(())
        })
    });
    let (ours, mut next) = (cache.clone(), blocks);
    let kvhoist = Entrant::new("kvhoist store", |_| {
        let from = next;
        next += blocks;
        measured(FILE_BYTES, || run_local(store_range(&ours, from, from + blocks, depth)))
    });
    let series = interleave(rounds, &mut [bare, kvhoist])?;
    print(&format!("write-through store, {}: {} KiB, QD{depth}", dir.display(), block_bytes >> 10), &series);
    println!("record pages written per block stored: {:.3}", cache.stats().record_writes as f64 / next as f64);
    // Every block of the last round was acknowledged and nothing has come after it.
    run_local(fetch_all(&cache, next - blocks..next, depth))?;
    println!("all {blocks} acknowledged blocks of the last round found and verified\n");
    block_on(cache.close()).map_err(other)
}

/// The middle one of `rounds` timings of `n` operations, nanoseconds an operation.
fn median_ns(rounds: usize, n: u64, mut run: impl FnMut()) -> f64 {
    let mut timings: Vec<f64> = (0..rounds)
        .map(|_| {
            let started = Instant::now();
            run();
            started.elapsed().as_nanos() as f64 / n as f64
        })
        .collect();
    timings.sort_by(f64::total_cmp);
    timings[rounds / 2]
}

fn hits() -> io::Result<()> {
    let blocks = 16_384u64;
    let settings = Config {
        block_bytes: 4096,
        host_blocks: blocks as u32,
        spin_us: SPIN_US.load(Ordering::Relaxed),
        ..Config::default()
    };
    let cache = block_on(Cache::open(settings)).map_err(other)?;
    let keys: Vec<BlockKey> = (0..blocks).map(key).collect();
    let data = vec![0; 4096];
    for (n, key) in keys.iter().enumerate() {
        let parent = (!n.is_multiple_of(128)).then(|| &keys[n - 1]);
        block_on(cache.store(key, parent, &data)).map_err(other)?;
    }
    let ns = median_ns(9, blocks * 8, || {
        block_on(async {
            for _ in 0..8 {
                for key in &keys {
                    std::hint::black_box(cache.fetch(key).await.expect("fetch").expect("resident"));
                }
            }
        });
    });
    println!("host hits through fetch, one thread: {:.2} M/s ({ns:.0} ns each; bar 5 M/s)", 1e3 / ns);
    for (length, bar_us) in [(8, 0.3), (32, 1.0), (128, 4.0)] {
        let chains = blocks / 128;
        let ns = median_ns(9, chains * 64, || {
            for _ in 0..64 {
                for chain in keys.chunks_exact(128) {
                    assert_eq!(std::hint::black_box(cache.match_prefix(&chain[..length])).len(), length);
                }
            }
        });
        println!("match_prefix of {length} resident keys: {:.2} us (bar {bar_us} us)", ns / 1e3);
    }
    println!();
    block_on(cache.close()).map_err(other)
}

fn idle(dir: &Path) -> io::Result<()> {
    let scratch = tempfile::tempdir_in(dir)?;
    let cache = block_on(Cache::open(config(scratch.path(), 128 << 10, 64, 256))).map_err(other)?;
    run_local(store_range(&cache, 0, 64, 8))?;
    let watch = Stopwatch::start();
    std::thread::sleep(Duration::from_secs(10));
    println!("idle for 10 s: {:.2} ms of CPU (bar 10 ms)\n", watch.stop(0).cpu_seconds * 1e3);
    block_on(cache.close()).map_err(other)
}

/// Opening a store of a million records, against reading its record table and nothing else.
fn start(dir: &Path, rounds: u64) -> io::Result<()> {
    let scratch = tempfile::tempdir_in(dir)?;
    let records = 1u32 << 20;
    let settings = config(scratch.path(), 4096, 256, records);
    let cache = block_on(Cache::open(settings.clone())).map_err(other)?;
    run_local(store_range(&cache, 0, records.into(), 128))?;
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
    let series = interleave(rounds, &mut [bare, kvhoist])?;
    print("start-up with 1 Mi records (bar: 3 times the reading of the table)", &series);
    let times = ratio(&series[0], &series[1], Sample::mib_per_s);
    println!("opening takes {times:.2} times the reading\n");
    Ok(())
}
