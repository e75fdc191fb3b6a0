//! What a model stands on: a cache whose reactor, callers and storage are threads and memory of the model checker's.

use std::{
    fs::File,
    future::Future,
    io,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
};

use shuttle::{
    rand::Rng,
    scheduler::{PctScheduler, RandomScheduler, Scheduler},
    thread::JoinHandle,
};
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::LocalSet,
};

use crate::{
    BlockKey, Cache, Config, DiskPath, Layout, Tier,
    block::{FileId, OpKind},
    cache::{
        Facts, OpenCache,
        computations::Computations,
        deleted::Names,
        open::{End, tell_end},
        regions::Regions,
    },
    checksum::checksum,
    device::{DevicePool, GdrState, GdrStatus, Memcpy},
    disk::{DiskSlots, format::stripe::Stripe},
    error::Result,
    fork::HomeBound,
    index::{Index, Used},
    io::{
        OpenFile, Pool, Storage, Workers,
        model::{Bytes, run_io_thread},
    },
    memory::{Arena, Lent},
    metrics::{Count, Metrics},
    mover::{Ends, Mover, Submitter},
    state::Shared,
};

pub(super) const BLOCK_BYTES: usize = 4096;

/// Executions of each model under each scheduler, unless the environment says otherwise.
const ITERATIONS: usize = 80;

/// Stacks hold futures of a debug build.
const STACK_BYTES: usize = 1 << 20;

/// Priorities that change in an execution under the second scheduler.
const PCT_DEPTH: usize = 3;

/// Runs `model` under many schedules. A failure prints the one that failed.
///
/// `KVHOIST_MODEL_ITERATIONS` is how many; `KVHOIST_MODEL_SCHEDULE` runs one schedule again.
pub(super) fn check(model: fn()) {
    if let Ok(schedule) = std::env::var("KVHOIST_MODEL_SCHEDULE") {
        let scheduler = shuttle::scheduler::ReplayScheduler::new_from_encoded(schedule.trim());
        return run(scheduler, model);
    }
    let iterations = std::env::var("KVHOIST_MODEL_ITERATIONS").ok();
    let iterations = iterations.map_or(ITERATIONS, |n| n.parse().expect("KVHOIST_MODEL_ITERATIONS is a number"));
    run(RandomScheduler::new(iterations), model);
    run(PctScheduler::new(PCT_DEPTH, iterations), model);
}

fn run(scheduler: impl Scheduler + 'static, model: fn()) {
    let mut config = shuttle::Config::new();
    config.stack_size = STACK_BYTES;
    shuttle::Runner::new(scheduler, config).run(model);
}

/// A number below `limit`, of the schedule's choice.
pub(super) fn below(limit: u32) -> u32 {
    shuttle::rand::thread_rng().gen_range(0..limit)
}

pub(super) fn key(n: u32) -> BlockKey {
    BlockKey::new(std::array::from_fn(|i| n as u8 ^ i as u8))
}

/// The block of key `n`: every byte tells which it is.
pub(super) fn payload(n: u32) -> Vec<u8> {
    (0..BLOCK_BYTES).map(|i| (i as u8).wrapping_mul(31) ^ (n as u8)).collect()
}

pub(super) fn assert_is(bytes: &[u8], n: u32) {
    assert!(bytes == payload(n), "wrong bytes for key {n}");
}

/// Files in memory. Every operation takes a few turns of the reactor.
struct Memory(Bytes);

impl Memory {
    fn bytes(&self) -> std::sync::MutexGuard<'_, Vec<u8>> {
        self.0.lock().expect("nothing panics under it")
    }

    async fn turns(&self) {
        for _ in 0..below(3) {
            shuttle::thread::yield_now();
            tokio::task::yield_now().await;
        }
    }
}

impl Memory {
    fn move_bytes(&self, kind: OpKind, offset: usize, buf: &Lent) {
        let mut bytes = self.bytes();
        let file = &mut bytes[offset..][..buf.len()];
        match kind {
            // SAFETY: memory that was lent for a read is the operation's alone.
            OpKind::Read => unsafe { std::slice::from_raw_parts_mut(buf.as_ptr(), buf.len()) }.copy_from_slice(file),
            // SAFETY: nobody writes to memory that was lent for a write.
            OpKind::Write => file.copy_from_slice(unsafe { std::slice::from_raw_parts(buf.as_ptr(), buf.len()) }),
            OpKind::Sync => {}
        }
    }
}

impl Storage for Memory {
    fn name(&self) -> &'static str {
        "memory"
    }

    async fn transfer(&self, kind: OpKind, _: FileId, offset: u64, buf: Lent) -> io::Result<()> {
        self.turns().await;
        self.move_bytes(kind, offset as usize, &buf);
        self.turns().await;
        Ok(())
    }
}

/// A cache of few slots, and the thread of its reactor.
pub(super) struct World {
    pub(super) cache: Cache,
    /// The reactor does nothing any more.
    pub(super) has_ended: Arc<AtomicBool>,
    reactor: JoinHandle<()>,
}

/// The queue of the I/O thread that callers submit to, in every other execution, and its file.
type IoThread = Option<(Arc<Pool>, Bytes)>;

/// Settings of few slots, so that everything is contended for; in every other execution writes wait for each other.
pub(super) fn config(device_blocks: u32, host_blocks: u32, disk_blocks: u32) -> Config {
    let writes = if below(2) == 0 { 1 } else { 1 << 20 };
    Config::default()
        .write_bytes_in_flight_max(writes)
        .movements_max(4)
        .block_bytes(BLOCK_BYTES)
        .device_blocks(device_blocks)
        .host_blocks(host_blocks)
        .disks(vec![DiskPath::with_blocks("memory", disk_blocks)])
}

impl World {
    /// A cache whose disk tier holds the blocks of the keys below `stored`; with `chain`, each the parent of the next.
    pub(super) fn new(config: Config, stored: u32, chain: bool) -> World {
        let (sender, mut receiver) = oneshot::channel();
        let has_ended = Arc::new(AtomicBool::new(false));
        let ending = Arc::clone(&has_ended);
        let bytes = Bytes::default();
        let pool = (below(2) == 0).then(|| Arc::new(Pool::new(1, 1, 0)));
        let io_thread: IoThread = pool.map(|pool| (pool, Arc::clone(&bytes)));
        let reactor = shuttle::thread::spawn(move || {
            let running =
                io_thread.clone().map(|(pool, bytes)| shuttle::thread::spawn(move || run_io_thread(&pool, &bytes)));
            // Its clock is never looked at: no deadline passes that could hide a lost wake-up.
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
            let runtime = runtime.expect("a runtime without I/O needs nothing of the system");
            let _context = runtime.enter();
            let local = LocalSet::new();
            let (end, result) = shuttle::future::block_on(local.run_until(serve(
                config,
                stored,
                chain,
                (bytes, io_thread.clone(), sender),
            )));
            drop(local);
            if let (Some(running), Some((pool, _))) = (running, io_thread) {
                pool.close();
                running.join().expect("the I/O thread does not panic");
            }
            ending.store(true, Ordering::Release);
            tell_end(&end, result);
        });
        let cache = loop {
            match receiver.try_recv() {
                Ok(cache) => break cache,
                Err(oneshot::error::TryRecvError::Empty) => shuttle::thread::yield_now(),
                Err(closed) => panic!("{closed}"),
            }
        };
        World { cache, has_ended, reactor }
    }

    /// The reactor's watch looks at its clock, which says that all movements of now take too long.
    pub(super) fn time_out(&self) -> JoinHandle<()> {
        self.caller(async |cache: Cache| {
            let begun = cache.shared().begun.load(std::sync::atomic::Ordering::Relaxed);
            shuttle::future::yield_now().await;
            cache.shared().give_up_overdue(begun).await;
        })
    }

    /// Drops this handle, and lets the reactor end when the others are gone.
    pub(super) fn leave(self) {
        let World { cache, reactor, .. } = self;
        let shared = Arc::clone(cache.shared());
        drop(cache);
        reactor.join().expect("the reactor does not panic");
        check_idle(&shared);
    }

    /// A thread of a caller.
    pub(super) fn caller<F: Future<Output = ()>>(
        &self,
        call: impl FnOnce(Cache) -> F + Send + 'static,
    ) -> JoinHandle<()> {
        let cache = self.cache.clone();
        shuttle::thread::spawn(move || shuttle::future::block_on(call(cache)))
    }

    /// Closes the cache and checks that nothing is left over.
    pub(super) fn end(self) {
        shuttle::future::block_on(self.cache.close()).expect("close");
        self.ended();
    }

    /// The same for a cache that was closed, or is being closed.
    pub(super) fn ended(self) {
        let World { cache, reactor, .. } = self;
        reactor.join().expect("the reactor does not panic");
        check_idle(cache.shared());
    }
}

/// Every slot is accounted for, nothing is held, and nothing went wrong.
fn check_idle(shared: &Arc<Shared>) {
    shared.check_idle().expect("balance");
    let metrics = &shared.metrics;
    let failures = [&metrics.checksum_failures, &metrics.read_errors, &metrics.write_errors, &metrics.writes_refused];
    assert_eq!(failures.map(Count::get), [0; 4], "nothing fails here");
}

async fn serve(
    config: Config,
    stored: u32,
    chain: bool,
    (bytes, io_thread, sender): (Bytes, IoThread, oneshot::Sender<Cache>),
) -> (End, Result<()>) {
    let stripe = Stripe::new(&config);
    let mut file = vec![0; stripe.members()[0].bytes as usize];
    let mut slots = DiskSlots::new(stripe, [7; 16], true).expect("memory for a few slots");
    let mut index = Index::new(1);
    for n in 0..stored {
        let parent = (chain && n > 0).then(|| key(n - 1));
        let id = index
            .restore(key(n), parent, Tier::Disk, n, Used { last: u64::from(n) + 1, uses: 1 })
            .expect("stored once");
        slots.restore(n, id.as_u32(), checksum(&payload(n)), u64::from(n) + 1);
        file[slots.locate(n).1 as usize..][..BLOCK_BYTES].copy_from_slice(&payload(n));
    }
    index.restored(Tier::Disk);
    let arena = Arc::new(Arena::new(config.host_slots(), config.slot_bytes()).expect("few slots"));
    let layout = || Layout::contiguous(BLOCK_BYTES).expect("one segment");
    let device =
        (config.device_slots() > 0).then(|| DevicePool::simulated(config.device_slots(), layout()).expect("few"));
    let shared = Shared::new(
        config,
        arena,
        device,
        index,
        Some(slots),
        u64::from(stored) + 1,
        Metrics::new("model", BLOCK_BYTES),
    );
    let shared = Arc::new(shared);
    *bytes.lock().expect("nothing panics under it") = file;
    let storage = Memory(bytes);
    let mover = Mover::new(Arc::clone(&shared), None, storage, Memcpy::new(), Workers::none(), true);
    let (commands, requests) = mpsc::unbounded_channel();
    let (urgent, urgent_requests) = mpsc::unbounded_channel();
    let (end, told) = watch::channel(None);
    let file = || OpenFile { file: Arc::new(File::open("/dev/null").expect("a file")), id: FileId(0), by_calls: false };
    let ends = Ends::new(Arc::clone(&shared), urgent);
    let threads = io_thread.map(|(pool, _)| (pool, vec![file()]));
    let inner = OpenCache {
        shared,
        submitter: Submitter::new(ends, commands, threads),
        end: told,
        regions: Regions::default(),
        computations: Computations::new(),
        storage_name: "memory",
        facts: Facts {
            names: Names::default(),
            direct_io: true,
            registered: false,
            gpu: None,
            gdr: GdrStatus::new(GdrState::Off(String::new())),
        },
    };
    drop(sender.send(Cache { inner: Arc::new(HomeBound::new(inner)) }));
    (end, mover.run(requests, urgent_requests).await)
}

/// Polls `future` a few times, as the schedule wants it, and drops it. Its outcome, if it came to one.
pub(super) async fn give_up_some_time<F: Future>(future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    for _ in 0..below(5) {
        let output = std::future::poll_fn(|context| match future.as_mut().poll(context) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending => Poll::Ready(None),
        });
        if let Some(output) = output.await {
            return Some(output);
        }
        shuttle::future::yield_now().await;
    }
    None
}
