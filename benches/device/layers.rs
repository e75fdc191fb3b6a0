//! Layer-wise loads: when the first layer of a prefix is usable, and when all of it is there.

use std::{io, path::Path, sync::Arc, time::Instant};

use cudarc::driver::sys::{self, CUresult, CUstream};
use kvhoist::{
    BlockKey, Cache, Config, DiskPath, LayerLoad, Segment, block_on,
    internals::{
        gpu::{DeviceBuffer, Gpu},
        memory::DeviceMemory,
    },
};
use kvhoist_bench_kit::{
    drive::{Options, each, key, other, run_local, store_stamped},
    measure::Spread,
    pattern::verify,
};

use super::settings;

/// A prefix: so many blocks of 1 MiB, of so many layers of keys and values.
const BLOCKS: u64 = 64;
const BLOCK_BYTES: usize = 1 << 20;
const LAYERS: usize = 32;
const SEGMENT: usize = BLOCK_BYTES / LAYERS / 2;

pub fn run(options: &Options, gpu: &Arc<Gpu>) -> io::Result<()> {
    let pool = Pool::new(gpu)?;
    let cache = block_on(Cache::open(settings(options, BLOCK_BYTES, BLOCKS as u32, 1))).map_err(other)?;
    fill(&cache, BLOCKS)?;
    rounds(options, &pool, &cache, "host memory", |_| 0)?;
    block_on(cache.close()).map_err(other)?;
    // Each round its own prefix, which was not read since the cache was opened.
    let scratch = tempfile::tempdir_in(&options.dir)?;
    let all = BLOCKS * (options.rounds + 1);
    let settings = cold(options, scratch.path(), all as u32);
    let cache = block_on(Cache::open(settings.clone())).map_err(other)?;
    fill(&cache, all)?;
    block_on(cache.close()).map_err(other)?;
    let cache = block_on(Cache::open(settings)).map_err(other)?;
    rounds(options, &pool, &cache, "disk", |round| round * BLOCKS)?;
    block_on(cache.close()).map_err(other)
}

fn cold(options: &Options, dir: &Path, blocks: u32) -> Config {
    let disks = vec![DiskPath::with_blocks(dir, blocks)];
    settings(options, BLOCK_BYTES, BLOCKS as u32, 1).disks(disks)
}

fn fill(cache: &Cache, blocks: u64) -> io::Result<()> {
    let cache = cache.clone();
    run_local(each(0..blocks, 8, move |n| store_stamped(cache.clone(), n)))
}

/// Loads a prefix in every round, by a host that waits for layers and by a stream that does, in turn.
fn rounds(
    options: &Options,
    pool: &Pool,
    cache: &Cache,
    from: &str,
    first_block: impl Fn(u64) -> u64,
) -> io::Result<()> {
    // SAFETY: the pool outlives the cache's use of it (`unregister` below), and nothing else knows it.
    let lent = unsafe { kvhoist::Memory::device(pool.buffer.base().as_ptr(), pool.buffer.bytes()) };
    let region = kvhoist::block_on(cache.register(lent)).map_err(other)?;
    let mut times: [Vec<[f64; 2]>; 2] = Default::default();
    for round in 0..=options.rounds {
        let first = first_block(round);
        let by_stream = (round % 2) as usize;
        let time = pool.timed(cache, first, by_stream == 1)?;
        pool.check(first)?;
        if round > 0 {
            times[by_stream].push(time);
        }
    }
    for (waits, times) in ["its host", "its stream"].into_iter().zip(times).filter(|(_, times)| !times.is_empty()) {
        let of = |at: usize| Spread::of(times.iter().map(|time| time[at] * 1e3));
        let share = Spread::of(times.iter().map(|[first, all]| first / all * 100.0));
        let (first, all) = (of(0), of(1));
        println!(
            "64 MiB from {from}, {LAYERS} layers, waited for by {waits}: first layer after {:.2} ms, all after {:.2} \
             ms ({:.1} GB/s); share {:.1} % ({:.1}..{:.1}; bar 12 % from host memory)",
            first.median,
            all.median,
            pool.buffer.bytes() as f64 / all.median / 1e6,
            share.median,
            share.min,
            share.max,
        );
    }
    println!("every layer of every round verified on the device\n");
    block_on(cache.unregister(&region)).expect("its own region");
    Ok(())
}

/// A layer-first pool of the caller, and a stream of its own.
struct Pool {
    gpu: Arc<Gpu>,
    buffer: DeviceBuffer,
    stream: CUstream,
}

impl Pool {
    fn new(gpu: &Arc<Gpu>) -> io::Result<Pool> {
        let buffer = DeviceBuffer::new(Arc::clone(gpu), BLOCK_BYTES * BLOCKS as usize).map_err(other)?;
        gpu.make_current().map_err(other)?;
        let mut stream = std::ptr::null_mut();
        // SAFETY: the context is current; one handle is written, and destroyed when this is dropped.
        succeeded("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut stream, 1) })?;
        Ok(Pool { gpu: Arc::clone(gpu), buffer, stream })
    }

    /// Segment `s` of all blocks lie together; keys of all layers, then values of all layers.
    fn place(&self, block: usize, s: usize) -> Segment {
        let at = (s * BLOCKS as usize + block) * SEGMENT;
        Segment { ptr: self.buffer.base().as_ptr().wrapping_add(at), len: SEGMENT }
    }

    /// Seconds until the first layer and until the last one.
    fn timed(&self, cache: &Cache, first: u64, by_stream: bool) -> io::Result<[f64; 2]> {
        let keys: Vec<BlockKey> = (first..first + BLOCKS).map(key).collect();
        let places: Vec<Vec<Segment>> =
            (0..keys.len()).map(|block| (0..2 * LAYERS).map(|s| self.place(block, s)).collect()).collect();
        let layer_of: Vec<usize> = (0..2 * LAYERS).map(|s| s % LAYERS).collect();
        let started = Instant::now();
        let load = block_on(cache.load_layers(&keys, &places, &layer_of)).map_err(other)?;
        let wait =
            |layer: usize| if by_stream { self.wait_by_stream(&load, layer) } else { wait_by_host(&load, layer) };
        wait(0)?;
        let first_layer = started.elapsed().as_secs_f64();
        (1..LAYERS).try_for_each(wait)?;
        let all = started.elapsed().as_secs_f64();
        for result in block_on(load.blocks()) {
            if !result.map_err(other)? {
                return Err(other("a block is missing"));
            }
        }
        Ok([first_layer, all])
    }

    fn wait_by_stream(&self, load: &LayerLoad, layer: usize) -> io::Result<()> {
        // SAFETY: our own stream, of the primary context.
        unsafe { load.stream_wait(layer, self.stream.expose_provenance()) }.map_err(other)?;
        // SAFETY: as above; the context is current on this thread since the call before.
        succeeded("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.stream) })
    }

    /// Reads the pool back, not by the cache, and checks every stamp.
    fn check(&self, first: u64) -> io::Result<()> {
        self.gpu.make_current().map_err(other)?;
        let mut bytes = vec![0_u8; self.buffer.bytes()];
        let from = self.buffer.base().as_ptr().expose_provenance() as u64;
        // SAFETY: two ranges of the same length, and nothing is on its way to either.
        succeeded("cuMemcpyDtoH", unsafe { sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), from, bytes.len()) })?;
        let mut block = vec![0; BLOCK_BYTES];
        for at in 0..BLOCKS as usize {
            for (s, segment) in block.chunks_exact_mut(SEGMENT).enumerate() {
                segment.copy_from_slice(&bytes[(s * BLOCKS as usize + at) * SEGMENT..][..SEGMENT]);
            }
            verify(&block, first + at as u64)?;
        }
        Ok(())
    }
}

fn wait_by_host(load: &LayerLoad, layer: usize) -> io::Result<()> {
    let (leading, error) = block_on(load.layer(layer)).map_err(other)?;
    if leading == BLOCKS as usize { Ok(()) } else { Err(other(format!("layer {layer}: {leading}, {error:?}"))) }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.gpu.make_current().is_ok() {
            // SAFETY: our own stream, destroyed once; nothing is in it.
            unsafe { sys::cuStreamDestroy_v2(self.stream) };
        }
    }
}

pub fn succeeded(call: &str, result: CUresult) -> io::Result<()> {
    if result == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(other(format!("{call}: {result:?}"))) }
}
