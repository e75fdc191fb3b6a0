//! Opening the engine: the device, its verbs objects, the memory regions, the self-test.

use std::{
    any::Any,
    cell::{Cell, OnceCell, RefCell},
    rc::Rc,
    sync::Arc,
};

use tokio::sync::{Mutex, Notify};

use kvhoist_base::{
    error::{Error, Result},
    memory::{Arena, DeviceMemory},
    panics::log,
};

use super::{
    super::{GdrState, GdrStatus},
    GdrCopy, Inner, Phase,
    completion::Channel,
    queue::Queue,
    regions::{DeviceAccess, Regions},
    self_test::{Place, SCRATCH_BYTES, Scratch},
};
use crate::{
    EngineMode, GdrOptions,
    cuda::{Gpu, WriteFlush},
    rdma::{self, CompletionQueue, ProtectionDomain, QueuePair},
};

/// Scatter/gather entries per work request: more would make every work request larger in the device's queue.
const SGES_MAX: u32 = 4;

/// Memory that stays registered with the RDMA device as long as the engine exists.
#[derive(Default)]
pub struct GdrMemory {
    /// Host memory.
    pub arena: Option<Arc<Arena>>,
    /// Device memory, or host memory of a simulated device.
    pub pool: Option<Arc<dyn DeviceMemory>>,
    /// The GPU of `pool`, if it is a CUDA device.
    pub gpu: Option<Arc<Gpu>>,
}

impl GdrCopy {
    /// Opens the engine. In mode `auto` it measures its copies, so that it takes those
    /// that it makes faster than the other engine.
    ///
    /// # Errors
    /// As of [`open`](Self::open).
    pub async fn open_for(
        mode: EngineMode,
        options: &GdrOptions,
        arena: &Arc<Arena>,
        pool: Arc<dyn DeviceMemory>,
        gpu: Option<Arc<Gpu>>,
    ) -> Result<Self> {
        let memory = GdrMemory { arena: Some(Arc::clone(arena)), pool: Some(Arc::clone(&pool)), gpu };
        let engine = Self::open(options, memory).await?;
        if mode == EngineMode::Auto {
            engine.calibrate(arena, &pool).await?;
        }
        Ok(engine)
    }

    /// Opens the RDMA device, registers the memory, and runs the self-test at both ends of the pool, which overwrites
    /// what is there. Registration commits and pins all of the memory; it takes about 25 ms per GiB of huge pages. Must
    /// be called inside a runtime with I/O and time.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if there is no usable device or the self-test fails; the reason says what is missing and
    /// what to do.
    pub async fn open(options: &GdrOptions, memory: GdrMemory) -> Result<Self> {
        let unavailable = |reason| Error::unavailable("gdr", reason);
        let pool = memory.pool.clone();
        let inner = prepare(options, memory).map_err(unavailable)?;
        let mut tested = inner.queue.borrow_mut().connect();
        // Tests the scratch memory first, then the pool, which is still unused.
        let places = pool.iter().flat_map(Place::ends);
        for place in std::iter::once(inner.scratch.own_place()).chain(places) {
            if tested.is_ok() {
                tested = inner.self_test(&place).await;
            }
        }
        if let Err(reason) = tested {
            inner.retired.set(true);
            return Err(unavailable(format!("{} failed its self-test: {reason}", inner.device)));
        }
        *inner.phase.borrow_mut() = Phase::Up;
        inner.status.set(GdrState::On(inner.detail.clone()));
        log(|| tracing::info!(detail = inner.detail, "the RDMA device can copy"));
        Ok(GdrCopy { inner })
    }
}

/// Registers the engine's own memory, the host arena and the device pool, and returns how the device memory is
/// registered.
fn register(
    regions: &Regions,
    scratch: &Scratch,
    arena: Option<&Arena>,
    pool: Option<&dyn DeviceMemory>,
    gpu: Option<&Gpu>,
) -> std::result::Result<DeviceAccess, String> {
    let mut access = DeviceAccess::Simulated;
    let mut add = |start: usize, len: usize, gpu: Option<&Gpu>| {
        // SAFETY: the scratch memory, the arena and the pool live as long as the engine, which drops the table first.
        let how = unsafe { regions.add(start, len, gpu) }?;
        access = how.unwrap_or(access);
        Ok::<_, String>(())
    };
    let [host, device] = scratch.places();
    add(host, SCRATCH_BYTES, None)?;
    add(device, SCRATCH_BYTES, gpu)?;
    for &(start, bytes) in arena.iter().flat_map(|arena| arena.chunks()) {
        add(start.as_ptr().expose_provenance(), bytes, None)?;
    }
    if let Some(pool) = pool {
        add(pool.base().as_ptr().expose_provenance(), pool.bytes(), gpu)?;
    }
    Ok(access)
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
    let named = |fault: rdma::VerbsError| format!("{}: {fault}", device.name);
    let domain = ProtectionDomain::new(&context).map_err(named)?;
    let depth = options.depth_max.min(limits.work_requests).min(limits.completions.saturating_sub(1)).max(1);
    // A failure completes every work request: the queue must have room for all of them.
    let completions = CompletionQueue::new(&context, depth + 1).map_err(named)?;
    let fd = completions.fd();
    let qp = QueuePair::new(&domain, completions, depth, limits.sges.min(SGES_MAX)).map_err(named)?;

    // On an early return, locals drop in reverse order: regions before their memory.
    let mut keep: Vec<Arc<dyn Any + Send + Sync>> = Vec::new();
    let scratch = Scratch::new(gpu.as_ref())?;
    let regions = Regions::new(&domain, limits.region_bytes, options.registered_max);
    keep.extend(arena.iter().map(|arena| Arc::clone(arena) as _));
    keep.extend(pool.iter().map(|pool| Arc::new(Arc::clone(pool)) as _));
    let access = register(&regions, &scratch, arena.as_deref(), pool.as_deref(), gpu.as_deref())?;
    let distance =
        gpu_address.map_or_else(String::new, |gpu| format!(", {} away from the GPU", device.distance_to(&gpu)));
    let detail = format!(
        "{device}: {path}, {} work requests deep, device memory by {}{distance}; the self-test copied bytes both ways",
        qp.depth(),
        access.name(),
    );
    let channel = Channel::new(fd)
        .map_err(|error| format!("{}: its completion channel cannot be polled: {error}", device.name))?;
    Ok(Rc::new(Inner {
        channel,
        queue: RefCell::new(Queue::new(qp, path)),
        scratch,
        regions,
        phase: RefCell::new(Phase::Testing),
        status: GdrStatus::new(GdrState::Off("not tested yet".into())),
        detail,
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
        finished: Cell::default(),
        gpu,
        _memory: keep,
    }))
}
