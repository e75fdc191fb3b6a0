//! Worker threads: reads and writes of the disk tier, checksums, and copies of host memory.
//!
//! Checksums and copies run at a few GB/s per core, and an operation on the reactor's ring costs some microseconds. On
//! the reactor they would limit the whole cache to one core, however many drives there are, so movements hand them to
//! workers. A worker has a ring of its own and computes the checksum while the block is in its processor's cache: after
//! a read, or before a write. Handing work over costs two wake-ups, 20 to 400 us on virtual machines, so a lone block
//! stays on the reactor, as do all blocks if there are no workers.
//!
//! Where io_uring is refused, further threads make every operation of the disk tier by system calls.

#[cfg(test)]
mod tests;

use std::{
    cell::Cell,
    io,
    os::fd::{AsFd, OwnedFd},
    panic::{AssertUnwindSafe, catch_unwind},
    rc::Rc,
    sync::{Arc, mpsc},
    thread::{self, JoinHandle},
};

use tokio::sync::oneshot;

use super::{
    driver::{Takes, ThreadDriver},
    pool::{Pool, WAKE_BYTES},
    ring::Ring,
    transfer::Transfer,
    waiter::{Transferred, Waiter},
};
use crate::{
    metrics::Count,
    shield::{caught, log},
    urgency::Urgency,
};

/// Least work worth handing over to threads: about 8 us.
const WORK_BYTES_MIN: u64 = 64 << 10;

/// The reactor's handle to the workers. Idle workers sleep. Dropping the handle ends the threads after the queued work.
pub(crate) struct Workers {
    /// Their queue; `None` without workers: all work is done on the reactor.
    pool: Option<Arc<Pool>>,
    threads: Vec<JoinHandle<()>>,
    /// Some of the workers transfer.
    transfers: bool,
    /// Units of work in flight, on workers and on the reactor.
    busy: Cell<u32>,
    /// Least work worth handing over.
    work_bytes_min: u64,
    /// Units of work done by workers.
    done: Arc<Count>,
}

/// Which threads to start.
#[derive(Default)]
pub(crate) struct ThreadPlan {
    /// Threads for checksums and copies.
    pub(crate) workers: u32,
    /// How many threads read and write, each by a ring of its own, if the kernel allows it. The workers are the first
    /// of them.
    pub(crate) rings: u32,
    /// Further threads, which [read and write](taken_by_calls) by system calls.
    pub(crate) callers: u32,
    /// The processors near the drives, where the threads run if this process may use any of them.
    pub(crate) near: Vec<usize>,
    /// A file that the rings hold open.
    pub(crate) held: Option<Arc<OwnedFd>>,
}

/// Binds this thread to those of the processors that it may use, if there are any.
fn run_on(processors: &[usize]) {
    // SAFETY: a set of processors is plain data, and all zeros is the empty set.
    let (mut allowed, mut wanted): (libc::cpu_set_t, libc::cpu_set_t) = unsafe { std::mem::zeroed() };
    let bytes = size_of::<libc::cpu_set_t>();
    // SAFETY: `allowed` is writable and has this size; 0 is the calling thread.
    if unsafe { libc::sched_getaffinity(0, bytes, &raw mut allowed) } != 0 {
        return;
    }
    for &processor in processors.iter().filter(|&&processor| processor < libc::CPU_SETSIZE as usize) {
        // SAFETY: the number is below the size of the sets.
        if unsafe { libc::CPU_ISSET(processor, &allowed) } {
            // SAFETY: as above.
            unsafe { libc::CPU_SET(processor, &mut wanted) };
        }
    }
    // SAFETY: `wanted` is readable and has this size. An empty set is refused, and the thread runs where it may.
    unsafe { libc::sched_setaffinity(0, bytes, &raw const wanted) };
}

/// What a worker takes; the first `callers` transfer by system calls. A quarter of these, rounded up, only read: a
/// write that the drive hangs on holds its thread, and no read waits for a write. A lone one does both.
fn taken_by_calls(worker: u32, callers: u32) -> Takes {
    let reads_alone = callers.div_ceil(4).min(callers.saturating_sub(1));
    match worker {
        _ if worker >= callers => Takes::None,
        _ if worker < reads_alone => Takes::Reads,
        _ => Takes::All,
    }
}

/// A ring for this thread, if the kernel allows one.
fn ring(held: Option<&OwnedFd>) -> Option<Ring<Waiter>> {
    let refused = |error: &io::Error| log(|| tracing::warn!(%error, "a worker has no ring"));
    Ring::new(held.map(AsFd::as_fd)).inspect_err(refused).ok()
}

/// Runs a worker to its end, on its thread, with the driver that it was given at first. After a panic it gets another
/// ring by `renew`, if it had one. If that is refused, the worker transfers by system calls: the queue has transfers
/// for it.
fn run(pool: &Pool, worker: u32, mut driver: ThreadDriver, renew: impl Fn() -> Option<Ring<Waiter>>) {
    let (takes, has_ring) = (driver.takes, driver.ring.is_some());
    loop {
        // After a panic, transfers in flight are dropped once the kernel is done with them, and their waiters are
        // notified.
        let ended = catch_unwind(AssertUnwindSafe(move || {
            let mut driver = driver;
            pool.run(worker, &mut driver);
        }));
        if ended.is_ok() {
            return;
        }
        log(|| tracing::error!("a worker thread panicked and restarts"));
        let ring = if has_ring { caught(&renew).flatten() } else { None };
        driver = ring.map_or_else(|| ThreadDriver::without_ring(takes), ThreadDriver::with);
    }
}

impl Workers {
    /// No workers: all work is done on the reactor.
    pub(crate) fn none() -> Rc<Self> {
        Rc::new(Workers::with(None, WORK_BYTES_MIN, Arc::new(Count::unexported())))
    }

    fn with(pool: Option<Arc<Pool>>, work_bytes_min: u64, done: Arc<Count>) -> Self {
        Workers { pool, threads: Vec::new(), transfers: false, busy: Cell::new(0), work_bytes_min, done }
    }

    /// Starts threads. `done` counts their work. Call on the reactor.
    ///
    /// # Errors
    /// The system's error, if it cannot start a thread.
    pub(crate) fn start(plan: ThreadPlan, done: Arc<Count>) -> io::Result<Rc<Self>> {
        let ThreadPlan { workers: computing, rings, callers, near, held } = plan;
        // Without such threads, callers are for the disk alone.
        let work_bytes_min = if computing == 0 { u64::MAX } else { WORK_BYTES_MIN };
        let count = computing.max(rings) + callers;
        if count == 0 {
            return Ok(Rc::new(Workers::with(None, work_bytes_min, done)));
        }
        let wake_bytes = match (computing, callers) {
            // Its only thread is for reads that the reactor need not know of.
            (0, 0) => u64::MAX,
            (_, 0) => WAKE_BYTES,
            // A system call occupies its thread, for as long as the drive likes: each transfer wakes another thread.
            _ => 0,
        };
        let pool = Arc::new(Pool::new(count, callers + rings, wake_bytes));
        // Set before the threads start: if a later one cannot start, dropping this ends the earlier ones.
        let mut workers = Workers::with(Some(Arc::clone(&pool)), work_bytes_min, done);
        let (tell, told) = mpsc::channel();
        for worker in 0..count {
            let (pool, tell, near, held) = (Arc::clone(&pool), tell.clone(), near.clone(), held.clone());
            let run = move || {
                run_on(&near);
                let renew = || ring(held.as_deref());
                let ring = if (callers..callers + rings).contains(&worker) { renew() } else { None };
                let without_ring = || ThreadDriver::without_ring(taken_by_calls(worker, callers));
                let driver = ring.map_or_else(without_ring, ThreadDriver::with);
                // The starting thread waits for all of these messages.
                let _ = tell.send(driver.takes != Takes::None);
                drop(tell);
                run(&pool, worker, driver, renew);
            };
            workers.threads.push(thread::Builder::new().name(format!("kvhoist-work-{worker}")).spawn(run)?);
        }
        drop(tell);
        workers.transfers = told.iter().fold(false, |any, one| any | one);
        Ok(Rc::new(workers))
    }

    /// Workers that the caller runs, by the steps of `pool`. Call on the reactor.
    #[cfg(feature = "sim")]
    pub(crate) fn stepped(pool: Arc<Pool>, done: Arc<Count>) -> Rc<Self> {
        let mut workers = Workers::with(Some(pool), 1, done);
        workers.transfers = true;
        Rc::new(workers)
    }

    /// Counts a unit of work as in flight until the guard is dropped.
    pub(crate) fn enter(self: &Rc<Self>) -> Busy {
        self.busy.set(self.busy.get() + 1);
        Busy(Rc::clone(self))
    }

    /// True while work is in flight.
    pub(crate) fn is_busy(&self) -> bool {
        self.busy.get() > 0
    }

    /// True if there are workers and this many bytes are worth handing over.
    pub(crate) fn take(&self, bytes: u64) -> bool {
        self.pool.is_some() && bytes >= self.work_bytes_min
    }

    /// True if there are threads, if only for reads that callers start.
    pub(crate) fn any(&self) -> bool {
        self.pool.is_some()
    }

    /// Runs `work` on a worker; `bytes` is its size. `None` if there is no worker, or if `work` panicked: it then has
    /// been dropped with all it owned, and no part of it still runs.
    ///
    /// Dropping the future does not stop the work: `work` owns the memory it touches.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        bytes: u64,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let pool = self.pool.as_ref()?;
        let (answer, answered) = oneshot::channel();
        let done = Arc::clone(&self.done);
        let work = move || {
            let result = catch_unwind(AssertUnwindSafe(work)).ok();
            done.add(u64::from(result.is_some()));
            // The movement may be gone, and what it had may be the last owner of something that panics.
            _ = caught(|| drop(answer.send(result)));
        };
        pool.push_work(bytes, Box::new(work));
        answered.await.ok().flatten()
    }

    /// The queue of the workers, if some of them read and write.
    pub(crate) fn pool(&self) -> Option<&Arc<Pool>> {
        self.pool.as_ref().filter(|_| self.transfers)
    }

    /// Reads or writes all of a buffer on a worker, which also computes the checksum of its first `sum_bytes` bytes: of
    /// what it has read, or before it writes. `None` if no worker transfers, or if the worker died: the kernel is then
    /// done with the memory, which has been dropped, and a block that was written may be there, in part, or not at all.
    ///
    /// Dropping the future does not stop the transfer, which keeps its memory.
    pub(crate) async fn transfer(&self, urgency: Urgency, transfer: Transfer, sum_bytes: usize) -> Option<Transferred> {
        let pool = self.pool()?;
        let (waiter, answered) = Waiter::new(sum_bytes);
        pool.push_transfer(urgency, transfer, waiter).wake();
        let transferred = answered.await.ok()?;
        self.done.add(1);
        Some(transferred)
    }
}

impl Drop for Workers {
    /// Waits for the queued work: it may touch memory that is unmapped afterwards.
    fn drop(&mut self) {
        self.pool.iter().for_each(|pool| pool.close());
        for thread in self.threads.drain(..) {
            // The threads do not panic: `run` catches panics of the work.
            drop(thread.join());
        }
    }
}

/// A guard for a unit of work in flight.
pub(crate) struct Busy(Rc<Workers>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.busy.set(self.0.busy.get() - 1);
    }
}
