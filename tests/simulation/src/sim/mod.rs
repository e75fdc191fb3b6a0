//! A whole cache in simulation: the same code as in production over a simulated disk and a simulated copy engine, on
//! the caller's own thread, in virtual time.
//!
//! ```
//! use kvhoist::{BlockKey, Config, DiskPath};
//! use kvhoist_simulation::sim;
//!
//! let disks = vec![DiskPath::with_blocks("simulated", 16)];
//! let config = Config::default().block_bytes(4096).host_blocks(4).disks(disks);
//! let world = sim::World::new(7, sim::blank_files(&config));
//! sim::block_on(async {
//!     let sim::Simulated { cache, reactor } = sim::open(config, &world).await?;
//!     let key = BlockKey::new([1; 32]);
//!     cache.store(&key, None, &[42; 4096]).await?;
//!     assert_eq!(cache.fetch(&key).await?.expect("stored")[0], 42);
//!     cache.close().await?;
//!     reactor.ended().await;
//!     reactor.check_idle().expect("every slot is accounted for");
//!     Ok::<(), kvhoist::Error>(())
//! })?;
//! # Ok::<(), kvhoist::Error>(())
//! ```
//!
//! The same seeds and the same calls in the same order give the same run: the thread is one, time is virtual, and
//! neither the index nor the movements take chance from anywhere else.

mod copy;
mod remote;
mod storage;
mod workers;
mod world;

pub use copy::{CopyCounts, CopyOptions, SimCopy};
pub use remote::{RemoteCounts, RemoteRates, SimRemote};
pub use storage::{Counts, Event, Fault, FaultKind, FaultRates, LogEntry, Memory, Rng, SECTOR_BYTES, Sim, SimOptions};
pub use world::World;

use std::{any::Any, cell::Cell, future::Future, rc::Rc, sync::Arc, time::Duration};

use kvhoist::{
    Cache, Config, Error,
    internals::{
        disk::{
            Member,
            format::{TABLE_OFFSET, stripe::Stripe},
        },
        io::FileId,
        memory::Arena,
        seams::{self, Balance},
    },
};
use storage::Locked;
use tokio::{sync::Notify, task::LocalSet};

/// Files of the right lengths, all zeros: those of a store that was never created.
///
/// # Panics
/// If the settings are not [valid](Config::validate).
pub fn blank_files(config: &Config) -> Vec<Vec<u8>> {
    file_bytes(config).into_iter().map(|bytes| vec![0; bytes]).collect()
}

/// How long each of [`blank_files`] is.
///
/// # Panics
/// As [`blank_files`].
pub fn file_bytes(config: &Config) -> Vec<usize> {
    Stripe::new(config).members().iter().map(|member| member.bytes as usize).collect()
}

/// Runs `future` on this thread in virtual time: the clock stands still while anything can run, and jumps to the next
/// timer when nothing can. What it spawned is dropped when it ends, as a crash would.
///
/// Where nothing can run and no timer is set it waits for ever: bound what may hang with `tokio::time::timeout`.
pub fn block_on<F: Future>(future: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = runtime.expect("a runtime without I/O needs nothing of the system");
    LocalSet::new().block_on(&runtime, future)
}

/// A simulated cache, and its reactor.
pub struct Simulated {
    /// The cache, as any other.
    pub cache: Cache,
    /// The reactor's side of it.
    pub reactor: Reactor,
}

/// How long the lock of a store is waited for, as with files.
const LOCK_WAIT: Duration = Duration::from_secs(1);
const LOCK_POLL: Duration = Duration::from_millis(5);

/// Opens a cache over `world`; the reactor is a task of the current `LocalSet`. Call inside [`block_on`].
/// [`Config::spin_us`] is taken for 0.
///
/// The files have a lock, as in production: one cache at a time has them open, until all that it began has ended.
///
/// # Errors
/// As [`Cache::open`].
pub async fn open(config: Config, world: &World) -> Result<Simulated, Error> {
    config.validate()?;
    // Virtual time stands still while the reactor spins.
    let config = config.spin_us(0);
    let arena = Arc::new(Arena::new(config.host_slots(), config.slot_bytes())?);
    let locked = lock(&config, &world.storage).await?;
    let keep_alive: Arc<dyn Any + Send + Sync> = Arc::clone(&arena) as _;
    // SAFETY: the chunks are the arena's for all its life, and the arena is what is kept.
    let registered = unsafe { world.storage.pin_arena(arena.chunks(), &keep_alive) };
    let parts = seams::World {
        storage: world.storage.clone(),
        copy: world.copy.clone(),
        workers: workers::start(world),
        members: members(&config, &world.storage),
        memory_align_bytes: world.storage.memory_align_bytes(),
        registered,
        seed: world.seed,
    };
    let (cache, running) = seams::open(config, arena, parts).await?;
    world.remains.replace(Some(running.remains()));
    let end = Rc::new(End::default());
    let reactor = Reactor { balance: running.balance(), world: world.clone(), end: Rc::clone(&end) };
    let world = world.clone();
    tokio::task::spawn_local(running.run(async move {
        quiet(&world).await;
        drop(locked);
        end.reached();
    }));
    Ok(Simulated { cache, reactor })
}

/// Waits until nobody else has the files open.
async fn lock(config: &Config, storage: &Sim) -> Result<Option<Locked>, Error> {
    let Some(disk) = config.disk.paths.first() else { return Ok(None) };
    let give_up = tokio::time::Instant::now() + LOCK_WAIT;
    loop {
        match storage.try_lock() {
            Some(locked) => return Ok(Some(locked)),
            None if tokio::time::Instant::now() < give_up => tokio::time::sleep(LOCK_POLL).await,
            None => {
                return Err(Error::Store {
                    path: disk.path.clone(),
                    found: "a lock on it: the store is open in another cache".into(),
                    expected: "a store that nobody has open".into(),
                    action: "close the other cache first".into(),
                });
            }
        }
    }
}

fn members(config: &Config, storage: &Sim) -> Vec<Member> {
    let stripe = Stripe::new(config);
    let files = (0..).map(FileId).zip(&config.disk.paths).zip(stripe.members());
    files
        .map(|((file, disk), geometry)| Member {
            path: disk.path.clone(),
            bytes: storage.file_bytes(file),
            device: false,
            // As far as it matters.
            zeroed: storage.begins_with_zeros(file, TABLE_OFFSET + geometry.table_bytes()),
        })
        .collect()
}

/// Waits for what is in flight, as the end of a real runtime does.
async fn quiet(world: &World) {
    while world.storage.in_flight() > 0 || world.copy.in_flight() > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[derive(Default)]
struct End {
    reached: Cell<bool>,
    told: Notify,
}

impl End {
    fn reached(&self) {
        self.reached.set(true);
        self.told.notify_waiters();
    }
}

/// The reactor's side of a simulated cache.
pub struct Reactor {
    balance: Balance<Sim, SimCopy>,
    world: World,
    end: Rc<End>,
}

impl Reactor {
    /// Resolves when the cache has been closed, or dropped, and all it began has ended.
    pub async fn ended(&self) {
        while !self.end.reached.get() {
            self.end.told.notified().await;
        }
    }

    /// True once the cache has been closed, or dropped, and all it began has ended.
    pub fn is_ended(&self) -> bool {
        self.end.reached.get()
    }

    /// Resolves when nothing is in flight and the balance holds, or with what is wrong with it after `patience` of
    /// virtual time. Nobody may call the cache meanwhile, and no lease may be alive.
    ///
    /// # Errors
    /// As [`check_idle`](Self::check_idle).
    pub async fn settle(&self, patience: Duration) -> Result<(), String> {
        let give_up = tokio::time::Instant::now() + patience;
        let mut pause = Duration::from_millis(1);
        loop {
            let balance = self.check_idle();
            if balance.is_ok() || tokio::time::Instant::now() >= give_up {
                return balance;
            }
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
    }

    /// Checks a cache at rest: every slot of every tier is free, full or quarantined and none is two of these; nothing
    /// is pinned, being filled, in flight or waited for; budgets are whole; dirty blocks are to be written; the bytes
    /// in host memory are those that were published.
    ///
    /// # Errors
    /// The first of it that does not hold, in words.
    pub fn check_idle(&self) -> Result<(), String> {
        let (io, copies) = (self.world.storage.in_flight(), self.world.copy.in_flight());
        if io > 0 || copies > 0 {
            return Err(format!("{io} operations and {copies} copies are in flight"));
        }
        self.balance.check()
    }
}
