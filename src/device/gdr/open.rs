//! Opening: the device, its objects, the memory, the proof.

use std::{
    any::Any,
    cell::{Cell, OnceCell, RefCell},
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use tokio::sync::{Mutex, Notify};

use super::{
    DeviceAccess, GdrCopy, GdrState, GdrStatus, Inner, Phase,
    completion::Channel,
    proof::{Place, SCRATCH_BYTES, Scratch},
    queue::Queue,
    regions::Regions,
};
use crate::{
    device::{
        cuda::{Gpu, WriteFlush},
        rdma::{self, CompletionQueue, ProtectionDomain, QueuePair},
    },
    error::{Error, Result},
    memory::{Arena, DeviceMemory},
};

/// Pieces that one work request gathers: more make every work request larger in the device's queue.
const PIECES_MAX: u32 = 4;

/// How a [`GdrCopy`] is to work.
#[derive(Debug, Clone)]
pub struct GdrOptions {
    /// The RDMA device, by its name. `None`: the one nearest to the GPU.
    pub device: Option<String>,
    /// Work requests under way at most; fewer where the device takes fewer.
    pub depth_max: u32,
    /// Foreign regions that are registered at a time; the one that was unused for longest makes room.
    pub foreign_max: usize,
    /// Nothing may complete for so long while copies are under way: then they have failed. A device retries for half a
    /// second before it says so itself.
    pub stuck_after: Duration,
}

impl Default for GdrOptions {
    fn default() -> Self {
        GdrOptions { device: None, depth_max: 4096, foreign_max: 1024, stuck_after: Duration::from_secs(10) }
    }
}

/// What is registered with the RDMA device for as long as the engine is there.
#[derive(Default)]
pub struct GdrMemory {
    /// Host memory.
    pub arena: Option<Arc<Arena>>,
    /// Device memory, or host memory that plays it.
    pub pool: Option<Arc<dyn DeviceMemory>>,
    /// The device that it is on, where it is a CUDA one.
    pub gpu: Option<Arc<Gpu>>,
}

impl GdrCopy {
    /// Opens the RDMA device, registers the memory, and proves that bytes arrive both ways, at both ends of the pool:
    /// what is in the pool is lost. Registering commits and pins
    /// all of the memory; it takes about 25 ms a GiB where that is in huge pages. Inside a runtime with I/O and time.
    ///
    /// # Errors
    /// [`Error::Unavailable`]: no device, or one that does not do; what is missing, and what to do.
    pub async fn open(options: &GdrOptions, memory: GdrMemory) -> Result<Self> {
        let unavailable = |reason| Error::Unavailable { tier: "gdr", reason };
        let pool = memory.pool.clone();
        let inner = prepare(options, memory).map_err(unavailable)?;
        let mut proven = inner.queue.borrow_mut().connect();
        // Its own memory first, then the pool, in which there is nothing yet.
        let places = pool.iter().flat_map(Place::ends);
        for place in std::iter::once(inner.scratch.own_place()).chain(places) {
            if proven.is_ok() {
                proven = inner.prove(&place).await;
            }
        }
        if let Err(reason) = proven {
            inner.retired.set(true);
            return Err(unavailable(format!("{} did not pass its proof: {reason}", inner.device)));
        }
        *inner.phase.borrow_mut() = Phase::Up;
        inner.status.set(GdrState::On(inner.evidence.clone()));
        tracing::info!(evidence = inner.evidence, "copies can go through the RDMA device");
        Ok(GdrCopy { inner })
    }
}

fn prepare(options: &GdrOptions, memory: GdrMemory) -> std::result::Result<Rc<Inner>, String> {
    let GdrMemory { arena, pool, gpu } = memory;
    let flush = gpu.as_ref().map_or(WriteFlush::NotNeeded, |gpu| gpu.write_flush());
    if flush == WriteFlush::Unavailable {
        return Err(
            "the GPU needs writes of RDMA devices to be flushed, and its driver cannot; install a newer one".into()
        );
    }
    let discovery = rdma::discover();
    let gpu_address = gpu.as_ref().map(|gpu| gpu.device().pci_address.clone());
    let device = discovery.choose(options.device.as_deref(), gpu_address.as_deref())?;
    let path = device.path()?;
    let (context, limits) = rdma::open(&device.name)?;
    let told = |fault: rdma::VerbsFault| format!("{}: {fault}", device.name);
    let domain = ProtectionDomain::new(&context).map_err(told)?;
    let depth = options.depth_max.min(limits.work_requests).min(limits.completions.saturating_sub(1)).max(1);
    // A failure makes a completion of every work request: all of them must fit.
    let completions = CompletionQueue::new(&context, depth + 1).map_err(told)?;
    let fd = completions.fd();
    let qp = QueuePair::new(&domain, completions, depth, limits.pieces.min(PIECES_MAX)).map_err(told)?;

    // Where this ends early, what was made last goes first: regions before their memory.
    let mut keep: Vec<Arc<dyn Any + Send + Sync>> = Vec::new();
    let scratch = Scratch::new(gpu.as_ref())?;
    let regions = Regions::new(&domain, limits.region_bytes, options.foreign_max);
    let mut access = DeviceAccess::Simulated;
    let [host, scratch_device] = scratch.places();
    let mut add = |start: usize, len: usize, gpu: Option<&Gpu>| {
        // SAFETY: the scratch memory, the arena and the pool live as long as the engine, which drops the table before
        // them.
        let how = unsafe { regions.add(start, len, gpu) }?;
        access = how.unwrap_or(access);
        Ok::<_, String>(())
    };
    add(host, SCRATCH_BYTES, None)?;
    add(scratch_device, SCRATCH_BYTES, gpu.as_deref())?;
    if let Some(arena) = arena {
        keep.push(Arc::clone(&arena) as _);
        for &(start, bytes) in arena.chunks() {
            add(start.as_ptr().expose_provenance(), bytes, None)?;
        }
    }
    if let Some(pool) = pool {
        keep.push(Arc::new(Arc::clone(&pool)));
        add(pool.base().as_ptr().expose_provenance(), pool.bytes(), gpu.as_deref())?;
    }
    let distance =
        gpu_address.map_or_else(String::new, |gpu| format!(", {} away from the GPU", device.distance_to(&gpu)));
    let evidence = format!(
        "{device}: {path}, {} work requests deep, device memory by {}{distance}; bytes were proven to arrive both ways",
        qp.depth(),
        access.name(),
    );
    let channel =
        Channel::new(fd).map_err(|error| format!("{}: its channel cannot be waited for: {error}", device.name))?;
    Ok(Rc::new(Inner {
        channel,
        queue: RefCell::new(Queue::new(qp, path)),
        scratch,
        regions,
        phase: RefCell::new(Phase::Proving),
        status: GdrStatus::new(GdrState::Off("not proven yet".into())),
        evidence,
        access,
        device: device.name.clone(),
        retired: Cell::new(false),
        failed_at: Cell::new(None),
        polling: Cell::new(false),
        sleeping: Cell::new(false),
        wake: Notify::new(),
        registering: Mutex::new(()),
        stuck_after: options.stuck_after,
        times: OnceCell::new(),
        flush: flush == WriteFlush::ByDriver,
        landed: Cell::default(),
        gpu,
        _memory: keep,
    }))
}
