//! `kvhoist bench copy`: the copy engine, without a cache around it.

use std::{path::PathBuf, sync::Arc, time::Instant};

use kvhoist::{
    CopyMethod,
    internals::{
        device::{
            CopyBatch, CopyEngine, CopyOp, Direction,
            cuda::copy::{CudaCopy, CudaCopyOptions},
        },
        gpu::{DeviceBuffer, Gpu},
        memory::{Arena, DeviceMemory},
    },
};
use serde_json::json;
use tokio::task::LocalSet;

use super::{
    plot::Plot,
    table::{self, Table},
};
use crate::{
    failure::Failure,
    size::{parse_bytes, show_bytes},
};

/// Flags of `kvhoist bench copy`.
#[derive(clap::Args)]
pub struct Args {
    /// The engine to measure.
    #[arg(long, value_name = "ENGINE", default_value = "cuda")]
    engine: Engine,
    /// RDMA device, with --engine gdr. Default: the nearest to the GPU.
    #[arg(long, value_name = "NAME")]
    #[cfg_attr(not(feature = "rdma"), allow(dead_code, reason = "of `--engine gdr`, which this build refuses"))]
    pub(super) gdr_device: Option<String>,
    /// Number of the CUDA device.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) device: u32,
    /// Sizes of the copies.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, value_delimiter = ',',
          default_value = "4KiB,16KiB,64KiB,256KiB,1MiB,16MiB")]
    bytes: Vec<usize>,
    /// Most bytes of one batch, which has at most 4096 copies.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, default_value = "512MiB")]
    pub(super) batch_bytes: usize,
    /// Numbers of thread blocks for the copy kernel; each is measured.
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "16,32,132")]
    blocks: Vec<u32>,
    /// Measured rounds, of which the median is printed.
    #[arg(long, value_name = "N", default_value_t = 7)]
    pub(super) rounds: usize,
    /// Print one JSON object instead of tables.
    #[arg(long)]
    pub(super) json: bool,
    /// Draw the speeds of `auto` into this SVG file.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

/// Engines that can be measured.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Engine {
    /// CUDA's three methods.
    Cuda,
    /// An RDMA device beside the GPU: the sizes of the published table. Without a GPU host memory plays it.
    Gdr,
}

/// Copies of one batch at most.
pub(super) const COPIES_MAX: usize = 4096;

/// Host memory is given out in slots of this size.
const SLOT_BYTES: usize = 16 << 20;

/// Bytes of a batch at most: there are three of them in memory.
const BATCH_BYTES_MAX: usize = 16 << 30;

/// Runs it.
pub fn run(args: &Args) -> Result<(), Failure> {
    if args.batch_bytes > BATCH_BYTES_MAX || args.rounds > 1000 {
        let (bytes, rounds) = (args.batch_bytes, args.rounds);
        return Err(Failure::usage(format!(
            "--batch-bytes, --rounds: found {bytes} and {rounds}, expected at most {BATCH_BYTES_MAX} and 1000"
        )));
    }
    if args.engine == Engine::Gdr {
        if args.batch_bytes < 1 << 20 || args.plot.is_some() || args.rounds == 0 {
            return Err(Failure::usage(
                "--engine gdr: expected a round, --batch-bytes of 1 MiB at least, and no --plot",
            ));
        }
        return super::gdr::run(args);
    }
    let sizes_fit = |&bytes: &usize| bytes > 0 && bytes <= args.batch_bytes;
    if !args.bytes.iter().all(sizes_fit) || args.rounds == 0 {
        return Err(Failure::usage("--bytes, --batch-bytes, --rounds: expected sizes up to the batch's, and a round"));
    }
    if let Some(blocks) = args.blocks.iter().find(|blocks| !(1..=1024).contains(*blocks)) {
        return Err(Failure::usage(format!("--blocks: found {blocks}, expected 1 to 1024")));
    }
    let mut plot = Plot::new(args.plot.as_deref(), "kvhoist bench copy, auto", "GB/s")?;
    let gpu = Gpu::open(args.device).map_err(|error| Failure::usage(error.to_string()))?;
    let slots = args.batch_bytes.div_ceil(SLOT_BYTES) as u32;
    // One arena for what is copied from the host, one for what comes back.
    let mut arena = Arena::new(2 * slots, SLOT_BYTES)?;
    arena.populate()?;
    let memory = Memory { arena: Arc::new(arena), device: DeviceBuffer::new(Arc::clone(&gpu), args.batch_bytes)? };
    memory.fill();
    let runtime = runtime()?;
    let mut tables = Vec::new();
    let table = runtime.block_on(LocalSet::new().run_until(ceiling(args, &gpu, &memory)))?;
    tables.push(table);
    for &blocks in &args.blocks {
        let table = runtime.block_on(LocalSet::new().run_until(measure(args, &gpu, &memory, blocks, &mut plot)))?;
        tables.push(table);
    }
    table::print(&tables, args.json)?;
    plot.write()
}

struct Memory {
    arena: Arc<Arena>,
    device: DeviceBuffer,
}

impl Memory {
    fn bytes(&self) -> usize {
        self.device.bytes()
    }

    /// The half that is copied from (0), or the half that is copied back to (1).
    fn host(&self, half: usize) -> *mut u8 {
        self.arena.slot_ptr(0).as_ptr().wrapping_add(half * (self.arena.bytes() / 2))
    }

    /// Bytes that differ from place to place.
    fn fill(&self) {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        for at in (0..self.bytes() / 8 * 8).step_by(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            // SAFETY: within the first half, aligned, known to this thread only.
            unsafe { self.host(0).add(at).cast::<u64>().write(state) };
        }
    }

    /// A batch of copies between places that are scattered on both sides, differently.
    fn batch(&self, direction: Direction, half: usize, bytes: usize, count: usize) -> CopyBatch {
        let places = self.bytes() / bytes;
        let op = |at: usize| {
            let host = self.host(half).wrapping_add(scattered(at, 7919, count) * bytes);
            let device = self.device.base().as_ptr().wrapping_add(scattered(at, 104_729, places) * bytes);
            match direction {
                Direction::HostToDevice => CopyOp { src: host, dst: device, len: bytes },
                _ => CopyOp { src: device, dst: host, len: bytes },
            }
        };
        let ops = (0..count).map(op).collect();
        // SAFETY: ranges of memory that lives until all batches have come back, and that only one batch at a time uses;
        // places are not used twice in a batch.
        unsafe { CopyBatch::new(ops, direction, vec![Arc::clone(&self.arena) as _]) }
    }
}

/// The place of a copy among `count`: a permutation if the stride and the count are coprime.
pub(super) fn scattered(at: usize, stride: usize, places: usize) -> usize {
    let gcd = |mut a: usize, mut b: usize| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    if gcd(stride, places) == 1 { at * stride % places } else { at }
}

async fn timed(engine: &CudaCopy, batch: CopyBatch) -> Result<f64, Failure> {
    let bytes = batch.bytes() as f64;
    let started = Instant::now();
    let (result, _batch) = engine.copy(batch).await;
    result?;
    Ok(bytes / started.elapsed().as_secs_f64() / 1e9)
}

/// The limit of the bus: one copy by the driver, as long as a whole batch.
async fn ceiling(args: &Args, gpu: &Arc<Gpu>, memory: &Memory) -> Result<Table, Failure> {
    let options = CudaCopyOptions { method: Some(CopyMethod::Loop), blocks_max: 1 };
    let engine = CudaCopy::new(gpu, &memory.arena, options)?;
    let mut table = Table::new(format!("{}; one long copy", gpu.device()), vec!["bytes", "to device", "from device"]);
    let mut cells = vec![json!(memory.bytes())];
    for direction in [Direction::HostToDevice, Direction::DeviceToHost] {
        let mut rounds = Vec::new();
        for _ in 0..=args.rounds {
            rounds.push(timed(&engine, memory.batch(direction, 0, memory.bytes(), 1)).await?);
        }
        cells.push(json!(median(&rounds[1..])));
    }
    table.row(cells);
    Ok(table)
}

async fn measure(args: &Args, gpu: &Arc<Gpu>, memory: &Memory, blocks: u32, plot: &mut Plot) -> Result<Table, Failure> {
    let started = Instant::now();
    let auto = CudaCopy::new(gpu, &memory.arena, CudaCopyOptions { method: None, blocks_max: blocks })?;
    let opened = started.elapsed().as_secs_f64();
    let title = format!("GB/s, medians of {} rounds; {blocks} thread blocks; opened in {opened:.2} s", args.rounds);
    let mut table = Table::new(
        title,
        vec![
            "bytes",
            "copies",
            "direction",
            "loop",
            "batch",
            "kernel",
            "auto",
            "auto min",
            "auto max",
            "auto is",
            "verified",
        ],
    );
    for &bytes in &args.bytes {
        let count = (memory.bytes() / bytes).min(COPIES_MAX);
        for (name, direction) in [("to device", Direction::HostToDevice), ("from device", Direction::DeviceToHost)] {
            let mut cells = vec![json!(bytes), json!(count), json!(name)];
            let mut verified = true;
            for method in CopyMethod::ALL {
                let options = CudaCopyOptions { method: Some(method), blocks_max: blocks };
                let Ok(engine) = CudaCopy::new(gpu, &memory.arena, options) else {
                    cells.push(serde_json::Value::Null);
                    continue;
                };
                cells.push(json!(median(&rounds(args, &engine, memory, direction, bytes, count).await?)));
                verified &= verify(memory, &auto, &engine, bytes, count, direction).await?;
            }
            let figures = rounds(args, &auto, memory, direction, bytes, count).await?;
            verified &= verify(memory, &auto, &auto, bytes, count, direction).await?;
            let quickest = auto.calibration().quickest(direction == Direction::HostToDevice, bytes, count);
            plot.bar(show_bytes(bytes as u64), &format!("{name}, {blocks} thread blocks"), median(&figures));
            cells.push(json!(median(&figures)));
            cells.push(json!(figures.iter().copied().fold(f64::INFINITY, f64::min)));
            cells.push(json!(figures.iter().copied().fold(0.0, f64::max)));
            cells.push(json!(quickest.name()));
            cells.push(json!(verified));
            table.row(cells);
            if !verified {
                return Err(Failure::run(format!("copies of {bytes} bytes {name} brought wrong bytes")));
            }
        }
    }
    Ok(table)
}

async fn rounds(
    args: &Args,
    engine: &CudaCopy,
    memory: &Memory,
    direction: Direction,
    bytes: usize,
    count: usize,
) -> Result<Vec<f64>, Failure> {
    let mut figures = Vec::new();
    for round in 0..=args.rounds {
        let figure = timed(engine, memory.batch(direction, 0, bytes, count)).await?;
        // The first warms up.
        if round > 0 {
            figures.push(figure);
        }
    }
    Ok(figures)
}

/// True if the bytes are the same after a copy to the device and back, one of them by the engine under test.
async fn verify(
    memory: &Memory,
    other: &CudaCopy,
    engine: &CudaCopy,
    bytes: usize,
    count: usize,
    direction: Direction,
) -> Result<bool, Failure> {
    let (to, from) = if direction == Direction::HostToDevice { (engine, other) } else { (other, engine) };
    let copied = count * bytes;
    // SAFETY: the second half of the arena, which nothing else uses now.
    let back = unsafe { std::slice::from_raw_parts_mut(memory.host(1), memory.bytes()) };
    back.fill(0);
    timed(to, memory.batch(Direction::HostToDevice, 0, bytes, count)).await?;
    timed(from, memory.batch(Direction::DeviceToHost, 1, bytes, count)).await?;
    // SAFETY: the first half, which is only read.
    let sent = unsafe { std::slice::from_raw_parts(memory.host(0), memory.bytes()) };
    // SAFETY: as above; the copies have come back.
    let back = unsafe { std::slice::from_raw_parts(memory.host(1), memory.bytes()) };
    Ok(sent[..copied] == back[..copied] && back[copied..].iter().all(|&byte| byte == 0))
}

/// A current-thread runtime, as the reactor's is.
fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .map_err(|error| Failure::run(format!("cannot start a runtime: {error}")))
}

/// The middle one of an odd number of values, or the mean of the middle two.
pub(super) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len().is_multiple_of(2) && middle > 0 {
        f64::midpoint(sorted[middle - 1], sorted[middle])
    } else {
        sorted.get(middle).copied().unwrap_or(f64::NAN)
    }
}
