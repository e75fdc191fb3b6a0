//! Workers in virtual time: each is a task that runs the steps of a production worker, over a ring that is simulated.
//!
//! The queue, the list of sleepers, the wake-ups and the answers to the reactor are those of production. The seed draws
//! how many workers there are, how many of them transfer, how long each step takes, when a completed transfer is
//! noticed, and when a worker dies.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use kvhoist::internals::{
    io::OpKind,
    seams::{Completed, Driver, Pool, Step, Transfer, Waiter, Wake},
};
use tokio::sync::Notify;

use super::{
    storage::{Rng, Sim},
    world::World,
};

/// Starts the workers of a cache, as tasks of the current `LocalSet`. `None` for one seed of four: no workers.
pub(super) fn start(world: &World) -> Option<Arc<Pool>> {
    let mut rng = Rng::new(world.seed.rotate_left(32));
    let count = [0, 1, 2, 4][rng.below(4) as usize];
    if count == 0 {
        return None;
    }
    let wake_bytes = [0, 4096, 1 << 16][rng.below(3) as usize];
    // From a generator of its own, because seeds have been recorded.
    let rings = 1 + Rng::new(world.seed.rotate_left(16)).below(u64::from(count)) as u32;
    let pool = Arc::new(Pool::new(count, rings, wake_bytes));
    for number in 0..count {
        let worker = Worker { pool: Arc::clone(&pool), number, rings, world: world.clone(), rng: rng.fork() };
        tokio::task::spawn_local(worker.run());
    }
    Some(pool)
}

struct Worker {
    pool: Arc<Pool>,
    number: u32,
    /// The first so many workers transfer.
    rings: u32,
    world: World,
    rng: Rng,
}

impl Worker {
    async fn run(mut self) {
        while self.live().await {}
    }

    /// Works until the worker dies, as after a panic: then true, and another takes its place.
    async fn live(&mut self) -> bool {
        let mut ring = Ring::new(&self.world);
        if self.number >= self.rings {
            ring.transfers_max = 0;
        }
        let mut unsubmitted = false;
        loop {
            self.linger().await;
            match self.pool.step(self.number, &mut ring, &mut unsubmitted) {
                Step::Next => {}
                Step::Sleep => {
                    ring.poll();
                    unsubmitted = false;
                    ring.wake.notified().await;
                    self.linger().await;
                    self.pool.awake(self.number);
                }
                Step::End => return false,
            }
            if self.rng.chance(self.world.deaths) {
                self.pool.lose_work();
                ring.end().await;
                return true;
            }
        }
    }

    /// Lets other threads go first: for some turns, or for the virtual time of a wake-up or of a checksum.
    async fn linger(&mut self) {
        if self.rng.chance(0.1) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        for _ in 0..self.rng.below(4) {
            tokio::task::yield_now().await;
        }
    }
}

/// What the kernel has of a worker's transfers.
#[derive(Default)]
struct Kernel {
    /// Of each transfer.
    in_flight: Vec<OpKind>,
    completed: VecDeque<Completed<Waiter>>,
}

/// A ring over simulated disks.
struct Ring {
    disks: Sim,
    transfers_max: usize,
    /// Transfers that are not submitted.
    started: Vec<(Transfer, Waiter)>,
    kernel: Rc<RefCell<Kernel>>,
    wake: Arc<Notify>,
    /// As of [`World::read_sum_bytes`].
    read_sum_bytes: Rc<Cell<usize>>,
}

impl Ring {
    fn new(world: &World) -> Self {
        Ring {
            disks: world.storage.clone(),
            transfers_max: world.transfers_max,
            started: Vec::new(),
            kernel: Rc::default(),
            wake: Arc::default(),
            read_sum_bytes: Rc::clone(&world.read_sum_bytes),
        }
    }

    /// Drops all transfers, those in flight once the disk is done with their memory.
    async fn end(mut self) {
        self.poll();
        while !self.kernel.borrow().in_flight.is_empty() {
            self.wake.notified().await;
        }
    }
}

impl Driver for Ring {
    fn room(&self, kind: OpKind) -> usize {
        self.transfers_max.saturating_sub(self.in_flight(kind))
    }

    fn in_flight(&self, kind: OpKind) -> usize {
        let started = self.started.iter().filter(|(transfer, _)| transfer.kind == kind).count();
        started + self.kernel.borrow().in_flight.iter().filter(|&&other| other == kind).count()
    }

    fn start(&mut self, transfer: Transfer, waiter: Waiter) {
        if transfer.kind == OpKind::Read {
            self.read_sum_bytes.set(self.read_sum_bytes.get() + waiter.sum_bytes());
        }
        self.started.push((transfer, waiter));
    }

    fn poll(&mut self) {
        for (Transfer { kind, file, offset, buf }, tag) in self.started.drain(..) {
            self.kernel.borrow_mut().in_flight.push(kind);
            let (disks, kernel, wake) = (self.disks.clone(), Rc::clone(&self.kernel), Arc::clone(&self.wake));
            tokio::task::spawn_local(async move {
                let (result, buf) = disks.transfer_lent(kind, file.id, offset, buf).await;
                let mut kernel = kernel.borrow_mut();
                let at = kernel.in_flight.iter().position(|&other| other == kind).expect("it was entered");
                kernel.in_flight.swap_remove(at);
                kernel.completed.push_back(Completed { buf, result, tag });
                wake.notify_one();
            });
        }
    }

    fn has_completed(&self) -> bool {
        !self.kernel.borrow().completed.is_empty()
    }

    fn take_completed(&mut self) -> Option<Completed<Waiter>> {
        self.kernel.borrow_mut().completed.pop_front()
    }

    fn wake(&self) -> Wake {
        let wake = Arc::clone(&self.wake);
        Wake::by(move || wake.notify_one())
    }

    fn sleep(&mut self) {
        unreachable!("a worker that is a task sleeps in `Worker::live`");
    }
}
