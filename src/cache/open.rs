//! Opening: memory, files, records, and the reactor's thread.

mod index;

use std::{
    hash::{BuildHasher, RandomState},
    rc::Rc,
    sync::{Arc, atomic::Ordering},
    thread,
};

use tokio::sync::{mpsc, oneshot, watch};

use self::index::{empty, refused, restore};
use super::{Cache, Facts, OpenCache, computations::Computations, deleted::Names, exported, regions::Regions};
use crate::{
    block::{FileId, Tier},
    config::{Config, HeldFile},
    device::{self, AnyCopy, CopyEngine, DevicePool, Memcpy},
    disk::{self, DiskSlots, Member, RecoveredRecord, StoreFile, Threads, Unkept},
    error::{Error, Result},
    fork::HomeBound,
    index::Index,
    io::{Files, Storage, ThreadPlan, Workers},
    machine,
    memory::{Arena, huge::Prefault},
    metrics::Metrics,
    mover::{Ends, Mover, QueuedCommand, Submitter, Urgent},
    runtime::{Reactor, refuse_size_signal},
    shield::{log, shield},
    state::Shared,
};

impl Config {
    /// Opens the cache.
    ///
    /// # Errors
    /// As [`Cache::open`].
    ///
    /// # Cancel safety
    /// As [`Cache::open`].
    pub fn open(self) -> impl Future<Output = Result<Cache>> + Send {
        Cache::open(self)
    }
}

pub(super) async fn open(config: Config) -> Result<Cache> {
    config.validate()?;
    let names = config.names_of_sizes();
    let (opened, receiver) = oneshot::channel();
    thread::Builder::new()
        .name("kvhoist-reactor".into())
        .spawn(move || run_reactor(config, opened))
        .map_err(|source| Error::io("start the reactor's thread", "", source))?;
    let opened = shield(receiver).await.unwrap_or(Err(Error::Closed));
    opened.map_err(|error| error.with_settings_named(&names))
}

/// The reactor's thread, from the first file opened to the last one closed.
fn run_reactor(config: Config, opened: oneshot::Sender<Result<Cache>>) {
    // Before any thread is started from here.
    refuse_size_signal();
    // Declared before the reactor, so that the files are closed after it also where it panics.
    let mut files = Vec::new();
    let reactor = match Reactor::new(&config) {
        Ok(reactor) => reactor,
        Err(error) => return drop(opened.send(Err(error))),
    };
    let ended = reactor.block_on(serve(&reactor, config, &mut files, opened));
    // The runtime waits for the kernel, then the files are closed and the store's lock released:
    // whoever is told that the cache is closed may open the store again.
    drop(reactor);
    drop(files);
    if let Some((end, result)) = ended {
        tell_end(&end, result);
    }
}

/// Tells every caller that closes the cache, or writes it to the log where none can any more.
pub(super) fn tell_end(end: &End, result: Result<()>) {
    if let Err(watch::error::SendError(Some(Err(error)))) = end.send(Some(result)) {
        log(|| tracing::error!(%error, "the last handle of the cache was dropped, and not all of it is on disk"));
    }
}

/// Opens the cache and runs its mover. The files are the caller's, to be closed when the kernel is done with them.
async fn serve(
    reactor: &Reactor,
    config: Config,
    files: &mut Vec<StoreFile>,
    opened: oneshot::Sender<Result<Cache>>,
) -> Option<(End, Result<()>)> {
    let paths = config.disk.paths.clone();
    let started = match start(reactor, config, files).await {
        Ok(started) => started,
        Err(error) => {
            drop(opened.send(Err(error)));
            return None;
        }
    };
    let Started { cache, mover, commands, urgent, end } = started;
    log_open(&cache);
    let namespace = cache.config().namespace.clone();
    // A caller that is gone drops the cache, which ends `run`.
    drop(opened.send(Ok(cache)));
    let result = mover.run(commands, urgent).await;
    // A file that nobody else has any more ends with its descriptor.
    let result = result.and_then(|()| Names::of(files).check_all(&paths));
    log(|| tracing::info!(namespace, "the cache is closed"));
    Some((end, result))
}

/// A healthy start, in a line.
fn log_open(cache: &Cache) {
    let (config, stats) = (cache.config(), cache.stats());
    let (host, disk) = (stats.tier(Tier::Host), stats.tier(Tier::Disk));
    log(|| {
        tracing::info!(
            namespace = config.namespace,
            block_bytes = config.block_bytes,
            host_slots = host.slots,
            disk_slots = disk.slots,
            resident = disk.resident,
            storage = &*stats.storage,
            direct_io = stats.direct_io,
            registered = stats.registered,
            "the cache is open"
        );
    });
}

/// Where the end of a cache is told, and what that came to.
pub(super) type End = watch::Sender<Option<Result<()>>>;

/// A cache, and what its reactor is to run.
pub(super) struct Started<S, C> {
    pub(super) cache: Cache,
    pub(super) mover: Rc<Mover<S, C>>,
    pub(super) commands: mpsc::UnboundedReceiver<QueuedCommand>,
    pub(super) urgent: mpsc::UnboundedReceiver<Urgent>,
    pub(super) end: End,
}

/// What a cache is put together from, besides its settings.
pub(super) struct Parts<S, C> {
    pub(super) storage: S,
    pub(super) copy: C,
    pub(super) workers: Rc<Workers>,
    /// The slots of the device tier, in memory that `copy` can reach.
    pub(super) device: Option<DevicePool>,
    pub(super) metrics: Metrics,
    /// The storage's files, in its order.
    pub(super) members: Vec<Member>,
    pub(super) facts: Facts,
    /// What addresses of direct reads and writes must be multiples of.
    pub(super) memory_align_bytes: usize,
    /// The id of the store, should it have to be created.
    pub(super) uuid: [u8; 16],
    /// Seeds the hash of the index.
    pub(super) seed: u64,
}

async fn start(reactor: &Reactor, config: Config, files: &mut Vec<StoreFile>) -> Result<Started<Files, AnyCopy>> {
    // The memory first: where it is refused, no file is touched.
    let arena = Arc::new(Arena::new(config.host_slots(), config.slot_bytes())?);
    exported::describe();
    let metrics = Metrics::new(&config.namespace, config.block_bytes);
    let paths: Vec<_> = config.disk.paths.iter().map(|disk| disk.path.clone()).collect();
    let near = machine::near_node(&paths).map(|near| near.processors).unwrap_or_default();
    let plan = ThreadPlan {
        workers: config.worker_threads(),
        rings: if reactor.has_ring() { config.transferring_threads(machine::drives(&paths)) } else { 0 },
        callers: if reactor.has_ring() || paths.is_empty() { 0 } else { config.disk.blocking_threads as u32 },
        near,
        held: config.disk.rings_hold.as_ref().map(HeldFile::file),
    };
    let workers = Workers::start(plan, Arc::clone(&metrics.work_done))
        .map_err(|source| Error::io("start", "the worker threads", source))?;
    let host_copies = Memcpy::with_workers(Rc::clone(&workers));
    let device::Opened { pool, gpu, copy, gdr } = device::open(&config, &arena, &metrics.copies, host_copies).await?;
    let mut unkept = None;
    if !config.disk.paths.is_empty() {
        let (opened, new) = disk::open_files_unkept(&config)?;
        (*files, unkept) = (opened, Some(new));
        exported::export_wear(&config);
    }
    let direct_io = !files.is_empty() && files.iter().all(|file| file.direct);
    let memory_align_bytes = files.iter().map(|file| file.memory_align_bytes).max().unwrap_or(1);
    let handles = files.iter().map(|file| Arc::clone(&file.file)).collect();
    let storage = reactor
        .storage(handles, (!config.host.parks).then_some(&arena), Rc::clone(&workers))
        .map_err(|source| Error::io("start the storage engine", "", source))?;
    let handles = files.iter().map(|file| Arc::clone(&file.file)).collect();
    let device_in_use = gpu.clone();
    let names = Names::of(files);
    let parts = Parts {
        facts: Facts { names, direct_io, registered: storage.registered(), gpu, gdr },
        memory_align_bytes,
        storage,
        copy,
        workers,
        device: pool,
        metrics,
        members: files.iter().map(StoreFile::member).collect(),
        uuid: disk::random_uuid()?,
        // Random, so that nobody can aim keys at one bucket of the index.
        seed: RandomState::new().hash_one(0u64),
    };
    let started = assemble(config, arena, parts).await?;
    // The files are a store by now, which libcufile can be tried on.
    started.mover.open_cufile(device_in_use, handles, direct_io).await?;
    unkept.into_iter().for_each(Unkept::keep);
    Ok(started)
}

/// Puts a cache together over any storage and any copy engine.
pub(super) async fn assemble<S: Storage, C: CopyEngine>(
    config: Config,
    arena: Arc<Arena>,
    parts: Parts<S, C>,
) -> Result<Started<S, C>> {
    let Parts { storage, copy, workers, device, metrics, members, facts, memory_align_bytes, uuid, seed } = parts;
    let mut index = empty(seed, &config)?;
    let (mut slots, mut generation, mut is_new) = (None, 1, false);
    if !config.disk.paths.is_empty() {
        let recovered = recover(&storage, &members, &config, uuid, &workers, &mut index).await?;
        metrics.records_bad.add(recovered.counts.bad);
        (slots, generation, is_new) = (Some(recovered.slots), recovered.next_generation, recovered.is_new);
    }
    let storage_name = if config.disk.paths.is_empty() { "none" } else { storage.name() };
    let mut shared = Shared::new(config, arena, device, index, slots, generation, metrics);
    shared.memory_align_bytes = memory_align_bytes;
    let shared = Arc::new(shared);
    shared.registered.store(storage.registered(), Ordering::Release);
    // A reactor that polls before it sleeps is to be used.
    let pool = workers.pool().filter(|_| shared.config.spin_us == 0);
    let files: Option<Vec<_>> = (0..members.len()).map(|at| storage.file(FileId(u16::try_from(at).ok()?))).collect();
    let threads = pool.cloned().zip(files);
    let (sender, commands) = mpsc::unbounded_channel();
    let (urgent_sender, urgent) = mpsc::unbounded_channel();
    let (end, told) = watch::channel(None);
    let ends = Ends::new(Arc::clone(&shared), urgent_sender);
    let reads_end = threads.is_some().then(|| Arc::clone(&ends));
    let mover = Mover::new(Arc::clone(&shared), reads_end, storage, copy, workers, is_new);
    let inner = OpenCache {
        shared,
        submitter: Submitter::new(ends, sender, threads),
        end: told,
        regions: Regions::default(),
        computations: Computations::new(),
        storage_name,
        facts,
    };
    let cache = Cache { inner: Arc::new(HomeBound::new(inner)) };
    Ok(Started { cache, mover, commands, urgent, end })
}

/// Records are decoded by any thread there is, which also has the memory of their entries cleared: no caller needs one
/// before the store is open, and each is half of what an entry costs.
struct Decoding<'a> {
    workers: &'a Workers,
    entries: Arc<Prefault>,
}

impl Threads for Decoding<'_> {
    fn any(&self) -> bool {
        self.workers.any()
    }

    fn run<T: Send + 'static>(
        &self,
        bytes: u64,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> impl Future<Output = Option<T>> {
        self.workers.run(bytes, work)
    }

    fn decoded(&self) -> impl Fn(usize) + Send + 'static {
        let entries = Arc::clone(&self.entries);
        move |records| entries.next(records * Index::ENTRY_BYTES)
    }
}

/// Enters the blocks of the disk tier into the index.
async fn recover<S: Storage>(
    storage: &S,
    members: &[Member],
    config: &Config,
    uuid: [u8; 16],
    workers: &Workers,
    index: &mut Index,
) -> Result<disk::recovery::Recovered> {
    let [(start, len), _map] = index.reserved();
    let decoding = Decoding { workers, entries: Arc::new(Prefault::new(start, len)) };
    let enter = &mut |slots: &mut DiskSlots, page: &[RecoveredRecord]| {
        index.prefetch_keys(page.iter().flat_map(|record| [Some(&record.key), record.parent.as_ref()]).flatten());
        page.iter().for_each(|record| restore(index, slots, record));
    };
    let recovered = disk::recovery::open(storage, members, config, uuid, &decoding, enter).await?;
    index.restored(Tier::Disk);
    if config.values_writes() {
        let slots = u32::try_from(config.disk_slots()).unwrap_or(u32::MAX);
        index.value_writes(slots).map_err(|bytes| refused(config, bytes))?;
    }
    Ok(recovered)
}
