//! Layer-wise loads into host memory: when the first layer of a prefix is in place, and when all of it is.
//!
//!     cargo bench --bench layers -- [disk|host]... [--rounds N] [--dir DIR]
//!
//! `disk`: beside the bare ring loop on the same places, in turns. The loop reads whole blocks, or a piece of each
//! block for each group of layers, in the order of the groups, and takes the checksum of each piece: the most that a
//! store with a checksum for each group could reach. The first layer is in place when its group is. `host`: the prefix
//! is in the cache's own memory.

use std::{
    cell::{OnceCell, RefCell},
    fs::{File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt,
    process::ExitCode,
    time::Instant,
};

use kvhoist::{
    BlockKey, Cache, Config, DiskPath, Memory, Segment, block_on,
    internals::{checksum::checksum, disk::format::stripe::Stripe},
};
use kvhoist_bench_kit::{
    drive::{self, Options, each, key, other, run_local, store_stamped},
    measure::Spread,
    pattern::{shuffled, verify},
    ring::{BareRing, Op, Setup},
    scratch::Slab,
};

/// A prefix: so many blocks of 1 MiB, of so many layers of keys and values.
const BLOCKS: u64 = 64;
const BLOCK_BYTES: usize = 1 << 20;
const LAYERS: usize = 32;
const SEGMENTS: usize = 2 * LAYERS;

/// Bytes that the bare loop has in flight.
const IN_FLIGHT: usize = 8 << 20;

/// Groups of layers: whole blocks, as many as a record has room for the checksums of, and each layer alone.
const GROUPS: [usize; 3] = [1, 4, LAYERS];

fn main() -> ExitCode {
    drive::main(&["disk", "host"], env!("CARGO_TARGET_TMPDIR"), |name, options| match name {
        "disk" => from_disk(options),
        _ => from_host(options),
    })
}

/// Seconds until the first layer and until the last one.
type Times = [f64; 2];

/// A contender: its round loads the prefix of that number.
struct Contender<'a> {
    name: String,
    round: Box<dyn FnMut(u64) -> io::Result<Times> + 'a>,
}

/// How the cache loads a prefix: by layers or not, into so many pieces of the caller's memory a block.
const LOADS: [(&str, bool, usize); 3] = [
    ("kvhoist load_layers", true, SEGMENTS),
    ("kvhoist load_into, layer-first", false, SEGMENTS),
    ("kvhoist load_into, whole blocks", false, 1),
];

fn from_disk(options: &Options) -> io::Result<()> {
    let scratch = tempfile::tempdir_in(&options.dir)?;
    // Each round of each contender has a prefix of its own, which was not read since the cache was opened.
    let prefixes = options.rounds + 1;
    let all = BLOCKS * prefixes * LOADS.len() as u64;
    let disks = vec![DiskPath::with_blocks(scratch.path(), all as u32)];
    let settings = Config::default().block_bytes(BLOCK_BYTES).host_blocks(BLOCKS as u32).disks(disks);
    let cache = block_on(Cache::open(settings.clone())).map_err(other)?;
    fill(&cache, all)?;
    block_on(cache.close()).map_err(other)?;
    let path = scratch.path().join("kvhoist.store");
    let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)?;
    let data_offset = Stripe::new(&settings).locate(0).1;
    let cache = &block_on(Cache::open(settings)).map_err(other)?;
    let pool = &RefCell::new(Pool::open(cache)?);
    let mut contenders = vec![bare(&file, data_offset, 1, false)?];
    for groups in GROUPS {
        contenders.push(bare(&file, data_offset, groups, true)?);
    }
    for (at, (name, by_layers, segments)) in (0..).zip(LOADS) {
        let round = move |round: u64| {
            let first = BLOCKS * (prefixes * at + round);
            pool.borrow_mut().timed(cache, round, first, by_layers, segments)
        };
        contenders.push(Contender { name: name.into(), round: Box::new(round) });
    }
    report(options.rounds, "disk", contenders)?;
    pool.borrow().close(cache)?;
    block_on(cache.close()).map_err(other)
}

fn from_host(options: &Options) -> io::Result<()> {
    let settings = Config::default().block_bytes(BLOCK_BYTES).host_blocks(BLOCKS as u32);
    let cache = &block_on(Cache::open(settings)).map_err(other)?;
    fill(cache, BLOCKS)?;
    let pool = &RefCell::new(Pool::open(cache)?);
    let contenders = LOADS.into_iter().map(|(name, by_layers, segments)| {
        let round = move |round| pool.borrow_mut().timed(cache, round, 0, by_layers, segments);
        Contender { name: name.into(), round: Box::new(round) }
    });
    report(options.rounds, "host memory", contenders.collect())?;
    pool.borrow().close(cache)?;
    block_on(cache.close()).map_err(other)
}

fn fill(cache: &Cache, blocks: u64) -> io::Result<()> {
    let stored = cache.clone();
    run_local(each(0..blocks, 8, move |n| store_stamped(stored.clone(), n)))?;
    block_on(cache.sync()).map_err(other)
}

/// The loop over a prefix's places: all blocks' pieces of the first group of layers, then of the next.
fn bare(file: &File, data_offset: u64, groups: usize, sums: bool) -> io::Result<Contender<'_>> {
    let piece_bytes = BLOCK_BYTES / groups;
    let pieces = BLOCKS as usize * groups;
    // A place for each piece: a model reads all of them afterwards.
    let mut ring = BareRing::open_over(piece_bytes, IN_FLIGHT / piece_bytes, pieces, Setup::Coop)?;
    let name = match sums {
        true => format!("bare ring, {groups} groups, checksums"),
        false => format!("bare ring, {groups} groups"),
    };
    let round = move |round: u64| {
        let first = data_offset + round * BLOCKS * BLOCK_BYTES as u64;
        let blocks: Vec<u64> = shuffled(round, BLOCKS).collect();
        let piece = |group: usize, block: u64| block * BLOCK_BYTES as u64 + (group * piece_bytes) as u64;
        let offsets = (0..groups).flat_map(|group| blocks.iter().map(move |&block| first + piece(group, block)));
        // Registering the file comes before the first read, and is no part of it.
        let started = OnceCell::new();
        let offsets = offsets.inspect(|_| _ = started.get_or_init(Instant::now));
        let (mut left, mut first_layer) = (BLOCKS, 0.0);
        let sample = ring.run(file, Op::Read, offsets, |offset, bytes| {
            if sums {
                std::hint::black_box(checksum(bytes));
            }
            if (offset - first) % (BLOCK_BYTES as u64) < piece_bytes as u64 {
                left -= 1;
                if left == 0 {
                    first_layer = started.get().map_or(0.0, |started| started.elapsed().as_secs_f64());
                }
            }
            Ok(())
        })?;
        Ok([first_layer, sample.seconds])
    };
    Ok(Contender { name, round: Box::new(round) })
}

/// Rounds in turns, and who goes first changes; the shares are those of the time of the first contender.
fn report(rounds: u64, from: &str, mut contenders: Vec<Contender<'_>>) -> io::Result<()> {
    let mut times: Vec<Vec<Times>> = contenders.iter().map(|_| Vec::new()).collect();
    for round in 0..=rounds {
        let count = contenders.len();
        for at in (0..count).map(|at| (at + round as usize) % count) {
            let time = (contenders[at].round)(round)?;
            // The first round warms up.
            if round > 0 {
                times[at].push(time);
            }
        }
    }
    let base: Vec<f64> = times[0].iter().map(|time| time[1]).collect();
    println!("64 MiB from {from}, {LAYERS} layers ({rounds} rounds; medians; shares are within a round)");
    for (Contender { name, .. }, times) in contenders.iter().zip(&times) {
        let ms = |at: usize| Spread::of(times.iter().map(|time| time[at] * 1e3)).median;
        let over_base = |at: usize| text(times.iter().zip(&base).map(|(time, base)| time[at] / base));
        println!("  {name:32} first layer {:6.2} ms, all {:6.2} ms", ms(0), ms(1));
        println!("    first of its own whole: {}", text(times.iter().map(|[first, all]| first / all)));
        println!("    over {}: first {}, all {}", contenders[0].name, over_base(0), over_base(1));
    }
    println!();
    Ok(())
}

fn text(values: impl Iterator<Item = f64>) -> String {
    let Spread { median, min, max } = Spread::of(values);
    format!("{median:.2} ({min:.2}..{max:.2})")
}

/// A layer-first pool of the caller, registered with the cache.
struct Pool {
    slab: Slab,
    region: kvhoist::Region,
}

impl Pool {
    fn open(cache: &Cache) -> io::Result<Pool> {
        let mut slab = Slab::new(BLOCK_BYTES, BLOCKS as usize)?;
        let base = slab.block(0).as_mut_ptr();
        // SAFETY: the slab outlives the cache's use of it: `close` unregisters the region before it is dropped, and an
        // error in between ends the process.
        let memory = unsafe { Memory::host(base, BLOCK_BYTES * BLOCKS as usize) };
        let region = block_on(cache.register(memory.pinned(true))).map_err(other)?;
        Ok(Pool { slab, region })
    }

    fn close(&self, cache: &Cache) -> io::Result<()> {
        block_on(cache.unregister(&self.region)).map_err(other)
    }

    /// Loads the prefix that begins with block `first`, and checks every stamp. Segment `s` of all blocks lie together:
    /// keys of all layers, then values of all layers.
    fn timed(&mut self, cache: &Cache, round: u64, first: u64, by_layers: bool, segments: usize) -> io::Result<Times> {
        (0..BLOCKS as usize).for_each(|block| self.slab.block(block).fill(0xEE));
        let base = self.slab.block(0).as_mut_ptr();
        let len = BLOCK_BYTES / segments;
        let order: Vec<u64> = shuffled(round, BLOCKS).collect();
        let keys: Vec<BlockKey> = order.iter().map(|block| key(first + block)).collect();
        let place = |block: u64, s: usize| Segment {
            ptr: base.wrapping_add((s * BLOCKS as usize + block as usize) * len),
            len,
        };
        let places: Vec<Vec<Segment>> =
            order.iter().map(|&block| (0..segments).map(|s| place(block, s)).collect()).collect();
        let times = match by_layers {
            true => load_layers(cache, &keys, &places),
            false => load_into(cache, &keys, &places),
        }?;
        self.check(first, len)?;
        Ok(times)
    }

    fn check(&mut self, first: u64, len: usize) -> io::Result<()> {
        let mut block = vec![0; BLOCK_BYTES];
        for at in 0..BLOCKS as usize {
            for (s, segment) in block.chunks_exact_mut(len).enumerate() {
                let from = (s * BLOCKS as usize + at) * len;
                segment.copy_from_slice(&self.slab.block(from / BLOCK_BYTES)[from % BLOCK_BYTES..][..len]);
            }
            verify(&block, first + at as u64)?;
        }
        Ok(())
    }
}

fn load_layers(cache: &Cache, keys: &[BlockKey], places: &[Vec<Segment>]) -> io::Result<Times> {
    let layer_of: Vec<usize> = (0..SEGMENTS).map(|s| s % LAYERS).collect();
    let started = Instant::now();
    let load = block_on(cache.load_layers(keys, places, &layer_of)).map_err(other)?;
    let wait = |layer: usize| match block_on(load.layer(layer)).map_err(other)? {
        (leading, None) if leading == keys.len() => Ok(()),
        (leading, error) => Err(other(format!("layer {layer}: {leading} blocks, {error:?}"))),
    };
    wait(0)?;
    let first_layer = started.elapsed().as_secs_f64();
    (1..LAYERS).try_for_each(wait)?;
    Ok([first_layer, started.elapsed().as_secs_f64()])
}

/// All layers at once.
fn load_into(cache: &Cache, keys: &[BlockKey], places: &[Vec<Segment>]) -> io::Result<Times> {
    let started = Instant::now();
    for result in block_on(cache.load_into(keys, places)).map_err(other)? {
        if !result.map_err(other)? {
            return Err(other("a block is missing"));
        }
    }
    Ok([started.elapsed().as_secs_f64(); 2])
}
