//! What tests open a cache with: storage, copies and workers of their own.
//!
//! The simulation (`tests/simulation`) runs the cache, the reactor and recovery of production over these. Behind the
//! feature `sim`, hidden, and not part of the public interface: any version may change it.

use std::{
    any::Any,
    future::Future,
    rc::Rc,
    sync::{Arc, Weak},
};

use tokio::sync::mpsc;

pub use kvhoist_base::panics::log;

pub use crate::{
    io::{
        driver::{Driver, Wake},
        pool::{Pool, Step},
        transfer::{Completed, Transfer},
        uring::table::{Entry, Pinner, Table},
        waiter::Waiter,
    },
    state::{holds_lock, locks_taken, panic_under_lock},
};

use super::{
    Cache, Facts,
    deleted::Names,
    open::{End, Parts, Started, assemble, tell_end},
};
use crate::{
    block::Tier,
    config::Config,
    device::{CopyEngine, GdrState, GdrStatus},
    disk::Member,
    error::Result,
    io::{Storage, Workers},
    memory::Arena,
    metrics::Metrics,
    mover::{Mover, QueuedCommand, Urgent},
};

/// What a cache is opened over.
pub struct World<S, C> {
    /// The files of the disk tier.
    pub storage: S,
    /// The engine that copies between host and device memory.
    pub copy: C,
    /// The queue of the workers, which the caller runs by [`Pool::step`]. `None`: there are no workers.
    pub workers: Option<Arc<Pool>>,
    /// The files of `storage`, in its order.
    pub members: Vec<Member>,
    /// What addresses of reads and writes must be multiples of.
    pub memory_align_bytes: usize,
    /// Whether the arena is registered with `storage`.
    pub registered: bool,
    /// Seeds the hash of the index and the id of a new store.
    pub seed: u64,
}

/// Opens a cache over `world`. It makes progress while [`Reactor::run`] is polled, on the same thread.
///
/// # Errors
/// As [`Cache::open`].
pub async fn open<S: Storage, C: CopyEngine>(
    config: Config,
    arena: Arc<Arena>,
    world: World<S, C>,
) -> Result<(Cache, Reactor<S, C>)> {
    let World { storage, copy, workers, members, memory_align_bytes, registered, seed } = world;
    let metrics = Metrics::new(&config.namespace, config.block_bytes);
    let mut uuid = [0; 16];
    uuid[..8].copy_from_slice(&seed.to_le_bytes());
    let parts = Parts {
        storage,
        copy,
        workers: match workers {
            Some(pool) => Workers::stepped(pool, Arc::clone(&metrics.work_done)),
            None => Workers::none(),
        },
        device: crate::device::open::simulated(&config)?,
        metrics,
        members,
        facts: Facts {
            names: Names::default(),
            direct_io: true,
            registered,
            gpu: None,
            gdr: GdrStatus::new(GdrState::Off("this is a simulation".into())),
        },
        memory_align_bytes,
        uuid,
        seed,
    };
    let Started { cache, mover, commands, urgent, end } = assemble(config, arena, parts).await?;
    Ok((cache, Reactor { balance: Balance(mover), commands, urgent, end }))
}

/// The reactor of a cache, to be run.
pub struct Reactor<S, C> {
    balance: Balance<S, C>,
    commands: mpsc::UnboundedReceiver<QueuedCommand>,
    urgent: mpsc::UnboundedReceiver<Urgent>,
    end: End,
}

impl<S: Storage, C: CopyEngine> Reactor<S, C> {
    /// Checks the balance, also while the reactor runs and after it has ended.
    pub fn balance(&self) -> Balance<S, C> {
        self.balance.clone()
    }

    /// Can be upgraded as long as anything of the cache is left.
    pub fn remains(&self) -> Weak<dyn Any + Send + Sync> {
        self.balance.0.weak_shared()
    }

    /// Serves the cache until it is closed or dropped, waits for `quiet`, and then answers the callers of
    /// [`Cache::close`].
    pub async fn run(self, quiet: impl Future<Output = ()>) {
        let result = self.balance.0.run(self.commands, self.urgent).await;
        quiet.await;
        tell_end(&self.end, result);
    }
}

/// Checks whether the slots, pins and budgets of a cache add up.
pub struct Balance<S, C>(Rc<Mover<S, C>>);

impl<S, C> Clone for Balance<S, C> {
    fn clone(&self) -> Self {
        Balance(Rc::clone(&self.0))
    }
}

impl<S: Storage, C: CopyEngine> Balance<S, C> {
    /// Checks a cache at rest: every slot of every tier is free, full or quarantined, and only one of these; nothing is
    /// pinned, being filled, in flight or waited for; the byte budgets are whole; the dirty blocks are those to be
    /// written; host memory holds what was published.
    ///
    /// # Errors
    /// The first of these that does not hold.
    pub fn check(&self) -> std::result::Result<(), String> {
        self.0.check_idle()
    }
}

/// Checks a cache at rest as [`Balance::check`] does, without the reactor's side.
///
/// # Errors
/// The first condition that does not hold.
pub fn check_idle(cache: &Cache) -> std::result::Result<(), String> {
    cache.shared().check_idle()
}

/// Takes the disk or the device tier out of service, as after too many failures.
///
/// # Panics
/// For the host tier, which is always in service, and the remote tier.
pub fn retire(cache: &Cache, tier: Tier) {
    match tier {
        Tier::Disk => cache.shared().retire_disk("a test".into()),
        Tier::Device => {
            if cache.shared().retire_device("a test".into()) {
                cache.shared().drop_device_copies().for_each(drop);
            }
        }
        Tier::Host | Tier::Remote => panic!("found {tier}, expected the device or the disk tier"),
    }
}
