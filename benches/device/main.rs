//! Blocks to and from a CUDA device through the cache, beside what the disk gives to a bare ring loop in the same run.
//!
//!     cargo bench --bench device -- [hit|load|layers|completion|disk|store]... [--rounds N] [--spin-us N] [--dir DIR]
//!
//! Without a name all of them run. Needs a CUDA device.

mod completion;
mod layers;

use std::{
    io,
    process::ExitCode,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use kvhoist::{
    BlockKey, Cache, Config, DeviceKind, Segment, block_on,
    internals::{
        gpu::{DeviceBuffer, Gpu},
        memory::DeviceMemory,
    },
};
use kvhoist_bench_kit::{
    drive::{self, Options, check_on_device, each, key, other, run_local, store_stamped, to_device},
    measure::Spread,
    pattern::shuffled,
    routes::{Shape, Way},
};

const FILE_BYTES: u64 = 512 << 20;

const NAMES: [&str; 6] = ["hit", "load", "layers", "completion", "disk", "store"];

fn main() -> ExitCode {
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(error) => {
            eprintln!("skipped: {error}");
            return ExitCode::SUCCESS;
        }
    };
    println!("{}\n", gpu.device());
    drive::main(&NAMES, env!("CARGO_TARGET_TMPDIR"), |name, options| match name {
        "hit" => hit(options),
        "load" => load(options, &gpu),
        "layers" => layers::run(options, &gpu),
        "completion" => completion::run(options, &gpu),
        "disk" => routes(options, Way::DiskToDevice(DeviceKind::Cuda)),
        _ => routes(options, Way::DeviceToDisk(DeviceKind::Cuda)),
    })
}

fn settings(options: &Options, block_bytes: usize, host_blocks: u32, device_blocks: u32) -> Config {
    Config::default()
        .block_bytes(block_bytes)
        .host_blocks(host_blocks)
        .device_blocks(device_blocks)
        .device(DeviceKind::Cuda)
        .spin_us(options.spin_us)
}

/// Cold blocks from disk to the device, or blocks of a pool on the device to disk, beside the bare ring loop.
fn routes(options: &Options, way: Way) -> io::Result<()> {
    for block_bytes in [128 << 10, 1 << 20] {
        let Options { dir, rounds, spin_us, .. } = options;
        let (dir, rounds, spin_us) = (dir.clone(), *rounds, *spin_us);
        let shape = Shape { dir, block_bytes, depth: 32, file_bytes: FILE_BYTES, rounds, spin_us };
        println!("{}", shape.measure(way, &mut || Ok(()))?.text());
    }
    Ok(())
}

/// One block of 128 KiB from host memory to the device, from the call to the waking of the caller.
fn hit(options: &Options) -> io::Result<()> {
    let (blocks, slots) = (4096_u64, 64);
    let cache = block_on(Cache::open(settings(options, 128 << 10, blocks as u32, slots))).map_err(other)?;
    let storing = cache.clone();
    run_local(each(0..blocks, 8, move |n| store_stamped(storing.clone(), n)))?;
    let times = |order: &mut dyn Iterator<Item = u64>, pause: Duration| -> io::Result<Vec<f64>> {
        let time = |n| {
            thread::sleep(pause);
            let started = Instant::now();
            block_on(to_device(cache.clone(), n))?;
            Ok(started.elapsed().as_secs_f64() * 1e6)
        };
        order.map(time).collect()
    };
    times(&mut shuffled(1, blocks), Duration::ZERO)?;
    for (when, pause) in [("one after the other", Duration::ZERO), ("after 2 ms of rest", Duration::from_millis(2))] {
        let mut times = times(&mut shuffled(2, blocks), pause)?;
        times.sort_by(f64::total_cmp);
        let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
        let (p50, p90, p99) = (at(0.5), at(0.9), at(0.99));
        println!("host hit to device, 128 KiB, {when}: p50 {p50:.1} us, p90 {p90:.1}, p99 {p99:.1}");
    }
    let checking = cache.clone();
    run_local(each(0..blocks, 8, move |n| check_on_device(checking.clone(), n)))?;
    println!("all {blocks} blocks verified on the device\n");
    block_on(cache.close()).map_err(other)
}

/// Prefixes of 64 MiB in host memory into a pool of the caller, cut into many segments.
fn load(options: &Options, gpu: &Arc<Gpu>) -> io::Result<()> {
    let (block_bytes, blocks) = (1 << 20, 64_u64);
    let cache = block_on(Cache::open(settings(options, block_bytes, blocks as u32, 1))).map_err(other)?;
    let storing = cache.clone();
    run_local(each(0..blocks, 8, move |n| store_stamped(storing.clone(), n)))?;
    let pool = DeviceBuffer::new(Arc::clone(gpu), block_bytes * blocks as usize).map_err(other)?;
    // SAFETY: the pool outlives the cache's use of it (`unregister` below), and nothing else knows it.
    let lent = unsafe { kvhoist::Memory::device(pool.base().as_ptr(), pool.bytes()) };
    let region = kvhoist::block_on(cache.register(lent)).map_err(other)?;
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
        for _ in 0..=options.rounds {
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
    block_on(cache.unregister(&region)).expect("its own region");
    block_on(cache.close()).map_err(other)
}
