//! `kvhoist bench copy --engine gdr`: copies through an RDMA device, beside those of CUDA and the published figures.

use std::{any::Any, rc::Rc, sync::Arc, time::Instant};

use kvhoist::{
    Layout,
    internals::{
        device::{
            CopyBatch, CopyEngine, CopyOp, DevicePool, Memcpy,
            cuda::copy::{CudaCopy, CudaCopyOptions},
            gdr::{GdrCopy, GdrMemory, GdrOptions},
            rdma::discover,
        },
        gpu::{DeviceBuffer, Gpu},
        memory::{Arena, DeviceMemory},
    },
};
use serde_json::{Value, json};
use tokio::task::LocalSet;

use super::{
    copy::{Args, COPIES_MAX, median, scattered},
    table::{self, Table},
};
use crate::failure::Failure;

/// Sizes of the published table, in bytes.
const SIZES: [usize; 4] = [4 << 10, 16 << 10, 64 << 10, 1 << 20];

/// GB/s of unified-cache-management's pull request 958, from host to device: as they come, in the order of a stream,
/// and by CUDA. They are of other machines than this one.
const PUBLISHED: [(usize, [f64; 3]); 4] = [
    (4 << 10, [11.36, 7.61, 1.6]),
    (16 << 10, [42.83, 30.77, 5.84]),
    (64 << 10, [45.46, 44.88, 17.43]),
    (1 << 20, [45.84, 45.33, 48.34]),
];

/// Bytes of a batch on an RDMA device of software: it is looked at for correctness only, and takes its time.
const SOFTWARE_BYTES: usize = 4 << 20;

/// Copies of one batch of those that end in their order.
const STREAM_COPIES: usize = 64;

const SLOT_BYTES: usize = 1 << 20;

/// What is measured against.
enum Base {
    Cuda(CudaCopy),
    Processor(Memcpy),
}

struct Rig {
    gdr: GdrCopy,
    base: Base,
    arena: Arc<Arena>,
    pool: Arc<dyn DeviceMemory>,
    bytes: usize,
}

/// Runs it.
pub fn run(args: &Args) -> Result<(), Failure> {
    let gpu = Gpu::open(args.device).ok();
    let found = discover();
    let address = gpu.as_ref().map(|gpu| gpu.device().pci_address.clone());
    let chosen = found.choose(args.gdr_device.as_deref(), address.as_deref());
    let chosen = chosen.map_err(|reason| Failure::run(format!("--engine gdr: {reason}")))?;
    let software = chosen.pci_address.is_none();
    let label = match (&gpu, software) {
        (_, true) => "soft-RoCE, correctness only",
        (None, false) => "host memory plays the device: not what a GPU gives",
        (Some(_), false) => "host memory to a GPU and back",
    };
    let bytes = if software { args.batch_bytes.min(SOFTWARE_BYTES) } else { args.batch_bytes };
    let options = GdrOptions { device: Some(chosen.name.clone()), ..GdrOptions::default() };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::run(format!("cannot start a runtime: {error}")))?;
    let table = runtime.block_on(LocalSet::new().run_until(async {
        let rig = Rc::new(Rig::open(&options, gpu, bytes).await?);
        measure(args, rig, label).await
    }))?;
    table::print(&[table], args.json)
}

impl Rig {
    async fn open(options: &GdrOptions, gpu: Option<Arc<Gpu>>, bytes: usize) -> Result<Self, Failure> {
        let slots = bytes.div_ceil(SLOT_BYTES) as u32;
        // What is copied to the device, and what comes back.
        let mut arena = Arena::new(2 * slots, SLOT_BYTES)?;
        arena.populate()?;
        let arena = Arc::new(arena);
        let (pool, base): (Arc<dyn DeviceMemory>, _) = match &gpu {
            Some(gpu) => (
                Arc::new(DeviceBuffer::new(Arc::clone(gpu), slots as usize * SLOT_BYTES)?),
                Base::Cuda(CudaCopy::new(gpu, &arena, CudaCopyOptions { method: None, blocks_max: 16 })?),
            ),
            None => {
                let layout = Layout::contiguous(SLOT_BYTES)?;
                (DevicePool::simulated(slots, layout)?.shared_memory(), Base::Processor(Memcpy::new()))
            }
        };
        let memory = GdrMemory { arena: Some(Arc::clone(&arena)), pool: Some(Arc::clone(&pool)), gpu };
        let gdr = GdrCopy::open(options, memory).await?;
        Ok(Rig { gdr, base, arena, pool, bytes: slots as usize * SLOT_BYTES })
    }

    fn host(&self, half: usize) -> *mut u8 {
        self.arena.slot_ptr(0).as_ptr().wrapping_add(half * self.bytes)
    }

    #[expect(clippy::mut_from_ref, reason = "the arena is shared with the engine; no two halves are held at a time")]
    fn half(&self, half: usize) -> &mut [u8] {
        // SAFETY: a half of our own arena; looked at and filled while no copy is in flight.
        unsafe { std::slice::from_raw_parts_mut(self.host(half), self.bytes) }
    }

    /// Copies `range` of `count` copies between places that are scattered on both sides, differently.
    fn batch(
        &self,
        to_device: bool,
        half: usize,
        bytes: usize,
        count: usize,
        range: std::ops::Range<usize>,
    ) -> CopyBatch {
        let op = |at: usize| {
            let host = self.host(half).wrapping_add(scattered(at, 7919, count) * bytes);
            let device = self.pool.base().as_ptr().wrapping_add(scattered(at, 104_729, self.bytes / bytes) * bytes);
            if to_device {
                CopyOp { src: host, dst: device, len: bytes }
            } else {
                CopyOp { src: device, dst: host, len: bytes }
            }
        };
        let direction = if to_device { self.pool.promote_direction() } else { self.pool.demote_direction() };
        let owners: Vec<Arc<dyn Any + Send + Sync>> =
            vec![Arc::clone(&self.arena) as _, Arc::new(Arc::clone(&self.pool))];
        // SAFETY: the owners keep both sides; places are not used twice by the batches that are in flight together.
        unsafe { CopyBatch::new(range.map(op).collect(), direction, owners) }
    }

    /// GB/s of one batch of all copies.
    async fn at_once(
        &self,
        gdr: bool,
        to_device: bool,
        half: usize,
        bytes: usize,
        count: usize,
    ) -> Result<f64, Failure> {
        let batch = self.batch(to_device, half, bytes, count, 0..count);
        let started = Instant::now();
        let (result, _batch) = match (gdr, &self.base) {
            (true, _) => self.gdr.copy(batch).await,
            (false, Base::Cuda(engine)) => engine.copy(batch).await,
            (false, Base::Processor(engine)) => engine.copy(batch).await,
        };
        result?;
        Ok((count * bytes) as f64 / started.elapsed().as_secs_f64() / 1e9)
    }
}

/// GB/s of batches of [`STREAM_COPIES`], asked for together, that end in their order.
async fn in_stream(rig: &Rc<Rig>, to_device: bool, bytes: usize, count: usize) -> Result<f64, Failure> {
    let started = Instant::now();
    let tasks: Vec<_> = (0..count)
        .step_by(STREAM_COPIES)
        .map(|first| {
            let rig = Rc::clone(rig);
            tokio::task::spawn_local(async move {
                let batch = rig.batch(to_device, 0, bytes, count, first..(first + STREAM_COPIES).min(count));
                rig.gdr.copy(batch).await.0
            })
        })
        .collect();
    for task in tasks {
        task.await.map_err(|error| Failure::run(error.to_string()))??;
    }
    Ok((count * bytes) as f64 / started.elapsed().as_secs_f64() / 1e9)
}

async fn measure(args: &Args, rig: Rc<Rig>, label: &str) -> Result<Table, Failure> {
    let base = if matches!(rig.base, Base::Cuda(_)) { "cuda" } else { "memcpy" };
    let mut table = Table::new(
        format!("GB/s, medians of {} rounds; {label}; {}", args.rounds, rig.gdr.status().get()),
        vec![
            "bytes",
            "copies",
            "direction",
            "gdr",
            "gdr in stream order",
            base,
            "published",
            "published in order",
            "published cuda",
            "verified",
        ],
    );
    for bytes in SIZES {
        let count = (rig.bytes / bytes).min(COPIES_MAX);
        for to_device in [true, false] {
            let [mut plain, mut ordered, mut other] = [const { Vec::new() }; 3];
            // The first round warms up.
            for round in 0..=args.rounds {
                let figures = (
                    rig.at_once(true, to_device, 0, bytes, count).await?,
                    in_stream(&rig, to_device, bytes, count).await?,
                    rig.at_once(false, to_device, 0, bytes, count).await?,
                );
                if round > 0 {
                    plain.push(figures.0);
                    ordered.push(figures.1);
                    other.push(figures.2);
                }
            }
            verify(&rig, to_device, bytes, count).await?;
            let published = PUBLISHED.iter().find(|(of, _)| to_device && *of == bytes);
            let published = |at: usize| published.map_or(Value::Null, |(_, figures)| json!(figures[at]));
            let direction = if to_device { "to device" } else { "from device" };
            let mut cells = vec![json!(bytes), json!(count), json!(direction)];
            cells.extend([&plain, &ordered, &other].map(|figures| json!(median(figures))));
            cells.extend([published(0), published(1), published(2), json!(true)]);
            table.row(cells);
        }
    }
    Ok(table)
}

/// Whether what goes there by one engine and back by the other is what it was.
async fn verify(rig: &Rig, to_device: bool, bytes: usize, count: usize) -> Result<(), Failure> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64 ^ bytes as u64;
    for word in rig.half(0).chunks_exact_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_ne_bytes());
    }
    rig.half(1).fill(0);
    rig.at_once(to_device, true, 0, bytes, count).await?;
    rig.at_once(!to_device, false, 1, bytes, count).await?;
    let copied = count * bytes;
    if rig.half(0)[..copied] != rig.half(1)[..copied] {
        let direction = if to_device { "to" } else { "from" };
        return Err(Failure::run(format!("copies of {bytes} bytes {direction} the device brought wrong bytes")));
    }
    Ok(())
}
