//! Copies between host and device memory through an RDMA device (GPUDirect RDMA), without multiprocessors or copy
//! engines of the GPU.
//!
//! The engine uses one reliable connection of a port with itself. Every copy, in either direction, is an RDMA WRITE:
//! devices allow only few outstanding READs.
//!
//! A self-test at open decides whether the engine is used: random bytes go both ways and are compared on the other
//! side. After a failed copy, all copies in flight fail, and the caller copies those
//! batches with another engine. The connection is then reset and tested again; a second failure within a minute retires
//! the engine.
//!
//! Memory is never freed while the NIC may touch it: the engine owns a batch in flight and the regions it names until
//! its work has completed, or the connection was reset or destroyed.

mod calibrate;
mod completion;
mod open;
mod queue;
mod recovery;
mod regions;
mod self_test;

pub use crate::{EngineMode, GdrOptions};
pub use open::GdrMemory;

use std::{
    any::Any,
    cell::{Cell, OnceCell, RefCell},
    rc::Rc,
    sync::{self, Arc},
    thread,
    time::{Duration, Instant},
};

use tokio::sync::{Mutex, Notify, oneshot};

use kvhoist_base::{block::Direction, error::Result, panics::log};

use self::{
    calibrate::TimesByWay,
    completion::Channel,
    queue::{Accepted, Answer, Finished, Queue, failure},
    regions::Regions,
    self_test::Scratch,
};
use super::{CopyBatch, CopyEngine, CopyRegion, GdrStatus, Offered};
use crate::{cuda::Gpu, rdma::MemoryRegion};

/// How long posted work may take to be flushed after a failure.
const DRAIN: Duration = Duration::from_secs(2);

/// The GDR copy engine. Lives on the reactor's thread, inside a runtime with I/O. Batches complete in the order of
/// their submission.
pub struct GdrCopy {
    inner: Rc<Inner>,
}

/// State of the connection.
enum Phase {
    Up,
    /// The connection failed; posted work is being flushed.
    Draining {
        since: Instant,
        reason: String,
        /// The device did not release the memory.
        refused: bool,
    },
    /// The connection was reset and its self-test runs.
    Testing,
    Retired,
}

impl Phase {
    fn is_up(&self) -> bool {
        matches!(self, Phase::Up)
    }

    fn is_testing(&self) -> bool {
        matches!(self, Phase::Testing)
    }
}

struct Inner {
    // Fields drop in this order; `Drop` has ended all work before.
    channel: Channel,
    queue: RefCell<Queue>,
    regions: Regions,
    scratch: Scratch,
    phase: RefCell<Phase>,
    status: GdrStatus,
    /// Status text while the engine is up.
    detail: String,
    device: String,
    /// Set when the engine must not recover.
    retired: Cell<bool>,
    /// Time of the previous failure.
    failed_at: Cell<Option<Instant>>,
    /// The polling task runs.
    polling: Cell<bool>,
    /// The polling task sleeps.
    sleeping: Cell<bool>,
    /// Wakes the polling task for an event other than a completion.
    wake: Notify,
    /// Serializes the registration of callers' memory, so that no region is registered twice.
    registering: Mutex<()>,
    /// Copies have failed if nothing completes for this long.
    stuck_after: Duration,
    /// Measured copy durations, once calibrated.
    times: OnceCell<Arc<TimesByWay>>,
    /// The device must be flushed before it may read what was written.
    flush: bool,
    /// Completed batches not yet answered. Kept for its capacity.
    finished: Cell<Finished>,
    gpu: Option<Arc<Gpu>>,
    /// Owners of permanently registered memory.
    _memory: Vec<Arc<dyn Any + Send + Sync>>,
}

impl GdrCopy {
    /// True while the engine takes copies.
    pub fn is_up(&self) -> bool {
        matches!(*self.inner.phase.borrow(), Phase::Up)
    }

    /// Status, readable from any thread.
    pub fn status(&self) -> &GdrStatus {
        &self.inner.status
    }

    /// Name of the RDMA device.
    pub fn device(&self) -> &str {
        &self.inner.device
    }

    /// Copies all of `batch`, or hands it back if the engine cannot take it.
    pub async fn offer(&self, batch: CopyBatch) -> Offered {
        if !self.is_up() {
            return Offered::Refused(batch);
        }
        let batch = match batch.regions() {
            [] => batch,
            _ => self.inner.register(batch).await,
        };
        Rc::clone(&self.inner).submit(batch, Phase::is_up).await
    }
}

impl CopyEngine for GdrCopy {
    fn name(&self) -> &'static str {
        "gdr"
    }

    async fn copy(&self, batch: CopyBatch) -> (Result<()>, CopyBatch) {
        match self.offer(batch).await {
            Offered::Copied(result, batch) => (result, batch),
            Offered::Refused(batch) if self.is_up() => {
                let reason = "memory that is not registered with the RDMA device";
                (Err(failure(reason.into())), batch)
            }
            Offered::Refused(batch) => (Err(failure(self.inner.status.get().to_string())), batch),
        }
    }

    fn fault(&self) -> Option<String> {
        matches!(*self.inner.phase.borrow(), Phase::Retired).then(|| self.inner.status.get().to_string())
    }

    async fn forget(&self, region: &CopyRegion) {
        give_back(self.inner.regions.forget(region).into_iter().collect()).await;
    }

    fn cost(&self, batch: &CopyBatch) -> Duration {
        let to_device = batch.direction() != Direction::DeviceToHost;
        let (count, bytes) = (batch.ops().len(), batch.bytes());
        match self.inner.times.get() {
            Some(times) => {
                let mean_bytes = usize::try_from(bytes / count.max(1) as u64).unwrap_or(usize::MAX);
                times[usize::from(!to_device)].estimate(mean_bytes, count).unwrap_or(Duration::MAX)
            }
            // Before calibration: a fixed cost per batch and 40 GB/s.
            None => Duration::from_nanos(5_000 + bytes / 40),
        }
    }
}

/// Deregisters on another thread: deregistration takes time per page.
async fn give_back(regions: Vec<MemoryRegion>) {
    if !regions.is_empty() {
        apart(move || drop(regions)).await;
    }
}

/// Runs work on a thread of its own; here, where the system starts none: slowly is better than not at all.
async fn apart<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (answer, answered) = oneshot::channel();
    let work = Arc::new(sync::Mutex::new(Some(move || drop(answer.send(work())))));
    let take = |work: &sync::Mutex<Option<_>>| work.lock().expect("nothing panics under it").take();
    let theirs = Arc::clone(&work);
    let run = move || take(&theirs).into_iter().for_each(|work| work());
    if thread::Builder::new().name("kvhoist-gdr".into()).spawn(run).is_err() {
        take(&work).into_iter().for_each(|work| work());
    }
    answered.await.expect("registration does not panic, and the work answers")
}

impl Inner {
    /// Registers the batch's regions that the NIC does not know, on another thread: pinning takes time per page. A
    /// region that cannot be registered stays unknown.
    async fn register(&self, batch: CopyBatch) -> CopyBatch {
        if self.regions.missing(&batch).is_empty() {
            return batch;
        }
        let _turn = self.registering.lock().await;
        let missing = self.regions.missing(&batch);
        if missing.is_empty() {
            return batch;
        }
        let (domain, gpu) = (Arc::clone(self.regions.domain()), self.gpu.clone());
        // The closure owns the batch, which keeps the memory.
        let registered = apart(move || {
            let register = |region: &CopyRegion| {
                let gpu = gpu.as_deref().filter(|_| region.is_on_device());
                // SAFETY: by the contract of `CopyBatch::within` the region stays mapped until the engine forgets it;
                // the closure owns the batch, which keeps it until then.
                let made = unsafe { regions::register(&domain, region.start(), region.len(), gpu) };
                (*region, made.map(|(made, _)| made))
            };
            let made: Vec<_> = missing.iter().map(register).collect();
            (batch, made)
        });
        let (batch, made) = registered.await;
        for made in made {
            match made {
                (region, Ok(made)) => give_back(self.regions.enter(&region, made)).await,
                (region, Err(reason)) => {
                    self.regions.refuse(&region);
                    log(|| {
                        tracing::warn!(
                            reason,
                            "a region could not be registered with the RDMA device; its copies use another engine"
                        );
                    });
                }
            }
        }
        batch
    }

    async fn submit(self: Rc<Self>, batch: CopyBatch, may: fn(&Phase) -> bool) -> Offered {
        if !may(&self.phase.borrow()) {
            return Offered::Refused(batch);
        }
        let Some(regions) = self.regions.cover(&batch) else { return Offered::Refused(batch) };
        let (answer, answered): (Answer, _) = oneshot::channel();
        let accepted = Accepted { batch, regions, answer };
        let was_idle = !self.queue.borrow().has_posted();
        self.queue.borrow_mut().accept(accepted);
        // While work is in flight, the polling task gathers the batches of one turn.
        if was_idle || self.sleeping.get() {
            self.turn();
        }
        if !self.polling.replace(true) {
            tokio::task::spawn_local(Rc::clone(&self).poll());
        } else if self.sleeping.get() && self.queue.borrow().has_more() {
            // One turn posts only so many; completions wake the task anyway.
            self.wake.notify_one();
        }
        drop(self);
        let (result, batch) = answered.await.expect("the engine answers every accepted batch before it is dropped");
        Offered::Copied(result, batch)
    }

    /// Polls completions, answers finished batches, and posts waiting ones. True if a completion arrived or more can be
    /// posted.
    fn turn(self: &Rc<Self>) -> bool {
        let mut finished = self.finished.take();
        let mut queue = self.queue.borrow_mut();
        let mut any = false;
        let mut result = queue.poll_cq(&mut finished).map(|completed| any = completed);
        if !queue.has_failed() {
            result = result.and_then(|()| queue.post_pending(&self.regions).map(|more| any |= more));
            if let Err(reason) = &result {
                queue.fail(reason, &mut finished);
            }
        }
        drop(queue);
        self.answer(&mut finished);
        self.finished.set(finished);
        if let Err(reason) = result {
            self.failed(reason);
        }
        any
    }

    /// Answers batches, after flushing writes so that the device can see them.
    fn answer(&self, finished: &mut Finished) {
        let is_write = |(accepted, result): &(Accepted, Result<()>)| {
            result.is_ok() && accepted.batch.direction() == Direction::HostToDevice
        };
        let mut flushed = Ok(());
        if self.flush && finished.iter().any(is_write) {
            flushed = self.gpu.as_ref().map_or(Ok(()), |gpu| gpu.flush_writes());
        }
        for (accepted, result) in finished.drain(..) {
            let result = match &flushed {
                Err(reason) if accepted.batch.direction() == Direction::HostToDevice => Err(failure(reason.clone())),
                _ => result,
            };
            let Accepted { batch, regions, answer } = accepted;
            drop(regions);
            // The receiver may be gone; the batch is dropped then.
            drop(answer.send((result, batch)));
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let mut finished = self.finished.take();
        let queue = self.queue.get_mut();
        if queue.has_posted() && !queue.has_failed() {
            queue.fail("the engine was dropped", &mut finished);
        }
        let started = Instant::now();
        while queue.has_posted() && !queue.drained() && started.elapsed() < DRAIN {
            // Errors of these completions no longer matter.
            drop(queue.poll_cq(&mut finished));
            std::thread::yield_now();
        }
        if let Err(fault) = queue.destroy(&mut finished) {
            queue.leak();
            log(|| tracing::error!(fault, "the RDMA device does not release memory; the memory is leaked"));
        }
    }
}
