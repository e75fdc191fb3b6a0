//! Blocks to and from a CUDA device through the cache, beside what the disk gives to a bare ring loop in the same run.
//!
//!     cargo bench --bench device -- [hit|load|disk|store]... [--rounds N] [--spin-us N] [--dir DIR]
//!
//! Without a name all of them run. Needs a CUDA device.

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
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Instant,
};

use bare::{
    BareRing, Op, Setup,
    measure::{Entrant, Sample, Series, Spread, Stopwatch, interleave, ratio, table},
    pattern::{Rng, shuffled, stamp, verify},
    scratch::Scratch,
};
use kvhoist::{
    BlockKey, Cache, Config, DeviceKind, DiskPath, Segment, block_on,
    gpu::{DeviceBuffer, Gpu},
    tier::{device::DeviceMemory, disk::format::stripe::Stripe},
};

const FILE_BYTES: u64 = 512 << 20;

/// [`Config::spin_us`] of every cache, from the flag.
static SPIN_US: AtomicU32 = AtomicU32::new(0);

const NAMES: [&str; 4] = ["hit", "load", "disk", "store"];

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
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(error) => {
            eprintln!("skipped: {error}");
            return ExitCode::SUCCESS;
        }
    };
    println!("{}\n", gpu.device());
    SPIN_US.store(spin_us, Ordering::Relaxed);
    if names.is_empty() {
        names = NAMES.map(String::from).to_vec();
    }
    for name in names {
        let result = match name.as_str() {
            "hit" => hit(),
            "load" => load(&gpu, rounds),
            "disk" => [128 << 10, 1 << 20].into_iter().try_for_each(|bytes| disk(&dir, bytes, 32, rounds)),
            _ => [128 << 10, 1 << 20].into_iter().try_for_each(|bytes| store(&gpu, &dir, bytes, 32, rounds)),
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
    let mut rng = Rng::new(n);
    bytes.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&rng.next_u64().to_le_bytes()));
    BlockKey::new(bytes)
}

fn other(error: impl ToString) -> io::Error {
    io::Error::other(error.to_string())
}

fn run_local<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    tokio::task::LocalSet::new().block_on(&runtime, future)
}

fn settings(block_bytes: usize, host_blocks: u32, device_blocks: u32) -> Config {
    Config {
        block_bytes,
        host_blocks,
        device_blocks,
        device: DeviceKind::Cuda,
        spin_us: SPIN_US.load(Ordering::Relaxed),
        ..Config::default()
    }
}

/// Runs `task` with every number of `order`, `depth` at a time.
async fn each<F: Future<Output = io::Result<()>> + 'static>(
    order: impl Iterator<Item = u64> + 'static,
    depth: usize,
    task: impl Fn(u64) -> F + 'static,
) -> io::Result<()> {
    let (order, task) = (Rc::new(RefCell::new(order)), Rc::new(task));
    let one = || {
        let (order, task) = (Rc::clone(&order), Rc::clone(&task));
        tokio::task::spawn_local(async move {
            loop {
                let next = order.borrow_mut().next();
                let Some(n) = next else { return Ok::<(), io::Error>(()) };
                task(n).await?;
            }
        })
    };
    let tasks: Vec<_> = (0..depth).map(|_| one()).collect();
    for task in tasks {
        task.await.map_err(other)??;
    }
    Ok(())
}

async fn store_stamped(cache: Cache, n: u64) -> io::Result<()> {
    let mut block = cache.reserve_for_overwrite().await.map_err(other)?;
    stamp(&mut block, n);
    block.commit(&key(n), None).await.map_err(other)
}

async fn to_device(cache: Cache, n: u64) -> io::Result<()> {
    let lease = cache.fetch_to_device(&key(n)).await.map_err(other)?;
    lease.map(drop).ok_or_else(|| other(format!("block {n} is missing")))
}

/// Fetches a block to the device and reads it back from there.
async fn check_on_device(cache: Cache, n: u64) -> io::Result<()> {
    let lease = cache.fetch_to_device(&key(n)).await.map_err(other)?;
    let lease = lease.ok_or_else(|| other(format!("block {n} is missing")))?;
    let bytes = cache.read_device(&lease, Vec::new()).await.map_err(other)?;
    verify(&bytes, n)
}

/// One block of 128 KiB from host memory to the device, from the call to the waking of the caller.
fn hit() -> io::Result<()> {
    let (blocks, slots) = (4096_u64, 64);
    let cache = block_on(Cache::open(settings(128 << 10, blocks as u32, slots))).map_err(other)?;
    let storing = cache.clone();
    run_local(each(0..blocks, 8, move |n| store_stamped(storing.clone(), n)))?;
    let mut micros = Vec::new();
    for n in shuffled(1, blocks).chain(shuffled(2, blocks)) {
        let started = Instant::now();
        block_on(to_device(cache.clone(), n))?;
        micros.push(started.elapsed().as_secs_f64() * 1e6);
    }
    let mut steady = micros.split_off(blocks as usize);
    steady.sort_by(f64::total_cmp);
    let at = |share: f64| steady[((steady.len() - 1) as f64 * share) as usize];
    let (p50, p90, p99) = (at(0.5), at(0.9), at(0.99));
    println!("host hit to device, 128 KiB, one at a time: p50 {p50:.1} us (bar 20), p90 {p90:.1}, p99 {p99:.1}");
    let checking = cache.clone();
    run_local(each(0..blocks, 8, move |n| check_on_device(checking.clone(), n)))?;
    println!("all {blocks} blocks verified on the device\n");
    block_on(cache.close()).map_err(other)
}

/// Prefixes of 64 MiB in host memory into a pool of the caller, cut into many segments.
fn load(gpu: &Arc<Gpu>, rounds: u64) -> io::Result<()> {
    let (block_bytes, blocks) = (1 << 20, 64_u64);
    let cache = block_on(Cache::open(settings(block_bytes, blocks as u32, 1))).map_err(other)?;
    let storing = cache.clone();
    run_local(each(0..blocks, 8, move |n| store_stamped(storing.clone(), n)))?;
    let pool = DeviceBuffer::new(Arc::clone(gpu), block_bytes * blocks as usize).map_err(other)?;
    // SAFETY: the pool outlives the cache's use of it (`unregister` below), and nobody else knows it.
    let region = unsafe { cache.register_device(pool.base().as_ptr(), pool.bytes()) }.map_err(other)?;
    let keys: Vec<BlockKey> = (0..blocks).map(key).collect();
    for segments_per_block in [1_usize, 64, 256] {
        let len = block_bytes / segments_per_block;
        // Layer-first: segment `s` of all blocks lie together.
        let segment = |block: usize, s: usize| Segment {
            ptr: pool.base().as_ptr().wrapping_add((s * blocks as usize + block) * len),
            len,
        };
        let places: Vec<Vec<Segment>> =
            (0..blocks as usize).map(|block| (0..segments_per_block).map(|s| segment(block, s)).collect()).collect();
        let mut speeds = Vec::new();
        for _ in 0..=rounds {
            let started = Instant::now();
            let results = block_on(cache.load_into(&keys, &places)).map_err(other)?;
            for result in results {
                assert!(result.map_err(other)?, "resident");
            }
            speeds.push(pool.bytes() as f64 / started.elapsed().as_secs_f64() / 1e9);
        }
        let Spread { median, min, max } = Spread::of(speeds.into_iter().skip(1));
        println!("load_into of 64 MiB in segments of {} KiB: {median:.1} GB/s ({min:.1}..{max:.1})", len >> 10);
    }
    println!();
    block_on(cache.unregister(region));
    block_on(cache.close()).map_err(other)
}

fn measured(bytes: u64, run: impl FnOnce() -> io::Result<()>) -> io::Result<Sample> {
    let watch = Stopwatch::start();
    run()?;
    Ok(watch.stop(bytes))
}

fn print(title: &str, all: &[Series]) {
    println!("{}", table(title, all));
    println!("throughput of the bare loop: {:.3}\n", ratio(&all[1], &all[0], Sample::mib_per_s));
}

/// Cold blocks from disk to the device.
fn disk(dir: &Path, block_bytes: usize, depth: usize, rounds: u64) -> io::Result<()> {
    let scratch = tempfile::tempdir_in(dir)?;
    let blocks = FILE_BYTES / block_bytes as u64;
    let mut settings = settings(block_bytes, depth as u32 * 2, depth as u32 * 2);
    settings.disks = vec![DiskPath { path: scratch.path().to_owned(), blocks: blocks as u32 }];
    let cache = block_on(Cache::open(settings.clone())).map_err(other)?;
    let storing = cache.clone();
    run_local(each(0..blocks, depth, move |n| store_stamped(storing.clone(), n)))?;
    block_on(cache.sync()).map_err(other)?;
    let path = scratch.path().join("kvhoist.store");
    let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)?;
    let data_offset = Stripe::new(&settings).locate(0).1;
    let mut ring = BareRing::open(block_bytes, depth, Setup::Coop)?;
    let bare = Entrant::new("bare ring, to host", move |round| {
        let offsets = shuffled(round, blocks).map(|n| data_offset + n * block_bytes as u64);
        ring.run(&file, Op::Read, offsets, |_, _| Ok(()))
    });
    let ours = cache.clone();
    let kvhoist = Entrant::new("kvhoist, to device", move |round| {
        let cache = ours.clone();
        measured(FILE_BYTES, || run_local(each(shuffled(!round, blocks), depth, move |n| to_device(cache.clone(), n))))
    });
    let series = interleave(rounds, &mut [bare, kvhoist])?;
    print(&format!("disk to device, {}: {} KiB, {depth} in flight", dir.display(), block_bytes >> 10), &series);
    let checking = cache.clone();
    run_local(each(0..blocks, depth, move |n| check_on_device(checking.clone(), n)))?;
    println!("all {blocks} blocks verified on the device\n");
    block_on(cache.close()).map_err(other)
}

/// Blocks of a pool on the device to disk, written through.
fn store(gpu: &Arc<Gpu>, dir: &Path, block_bytes: usize, depth: usize, rounds: u64) -> io::Result<()> {
    let scratch = tempfile::tempdir_in(dir)?;
    let blocks = FILE_BYTES / block_bytes as u64;
    let mut settings = settings(block_bytes, depth as u32 * 2, depth as u32 * 2);
    settings.disks = vec![DiskPath { path: scratch.path().to_owned(), blocks: blocks as u32 }];
    let cache = block_on(Cache::open(settings)).map_err(other)?;
    let pool = DeviceBuffer::new(Arc::clone(gpu), FILE_BYTES as usize).map_err(other)?;
    // SAFETY: the pool outlives the cache's use of it (`unregister` below), and nobody else knows it.
    let region = unsafe { cache.register_device(pool.base().as_ptr(), pool.bytes()) }.map_err(other)?;
    let base = pool.base().as_ptr().expose_provenance();
    let place = move |n: u64| {
        let ptr = std::ptr::with_exposed_provenance_mut(base + (n % blocks) as usize * block_bytes);
        vec![vec![Segment { ptr, len: block_bytes }]]
    };
    // What is in the pool: stamped blocks, brought there by the cache itself.
    let filling = cache.clone();
    run_local(each(0..blocks, depth, move |n| {
        let cache = filling.clone();
        async move {
            store_stamped(cache.clone(), n).await?;
            let loaded = cache.load_into(&[key(n)], &place(n)).await.map_err(other)?;
            loaded.into_iter().try_for_each(|result| result.map(drop)).map_err(other)
        }
    }))?;
    let file = Scratch::filled(dir, block_bytes, blocks)?;
    let mut ring = BareRing::open(block_bytes, depth, Setup::Coop)?;
    let bare = Entrant::new("bare ring, from host", move |_| {
        let offsets = (0..blocks).map(|n| n * block_bytes as u64);
        ring.run(file.file(), Op::Write, offsets, |_, _| Ok(()))
    });
    let (ours, next) = (cache.clone(), Cell::new(blocks));
    let kvhoist = Entrant::new("kvhoist, from device", |_| {
        let (cache, from) = (ours.clone(), next.replace(next.get() + blocks));
        measured(FILE_BYTES, || {
            run_local(each(from..from + blocks, depth, move |n| {
                let cache = cache.clone();
                async move {
                    let stored = cache.store_from(&[key(n)], None, &place(n)).await.map_err(other)?;
                    stored.into_iter().try_for_each(|result| result.map(drop)).map_err(other)
                }
            }))
        })
    });
    let series = interleave(rounds, &mut [bare, kvhoist])?;
    print(&format!("device to disk, {}: {} KiB, {depth} in flight", dir.display(), block_bytes >> 10), &series);
    let (checking, from) = (cache.clone(), next.get() - blocks);
    run_local(each(from..from + blocks, depth, move |n| {
        let cache = checking.clone();
        async move {
            let lease = cache.fetch(&key(n)).await.map_err(other)?;
            verify(&lease.ok_or_else(|| other(format!("block {n} is missing")))?, n % blocks)
        }
    }))?;
    println!("all {blocks} acknowledged blocks of the last round found and verified\n");
    block_on(cache.unregister(region));
    block_on(cache.close()).map_err(other)
}
