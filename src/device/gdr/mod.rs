//! Copies between host and device memory by an RDMA device beside it (GPUDirect RDMA): no multiprocessor and no copy
//! engine of the device takes part.
//!
//! One reliable connection of a port with itself; every copy, either way, is an RDMA WRITE on it. A READ would do for
//! one direction, but devices take few of them at a time.
//!
//! Whether it is used is decided by a proof when it is opened: random bytes, both ways, looked at from the other side.
//! A copy that fails is answered with an error, as are all that were under way; whoever asked copies them another way
//! ([`AnyCopy`](super::AnyCopy) does). The connection is then reset and proven anew; a second failure within a
//! minute retires it.
//!
//! Memory is given back by nobody while the NIC may touch it: a batch under way belongs to the engine, with the regions
//! that it names, until its work has completed, or the connection was reset or destroyed.

mod calibrate;
mod completion;
mod open;
mod proof;
mod queue;
mod regions;
mod status;

pub use crate::config::GdrMode;
pub use open::{GdrMemory, GdrOptions};
pub use queue::Hold;
pub use regions::DeviceAccess;
pub use status::{GdrState, GdrStatus};

use std::{
    any::Any,
    cell::{Cell, OnceCell, RefCell},
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::{Mutex, Notify, oneshot};

use self::{
    calibrate::Times,
    completion::Channel,
    proof::{Place, Scratch},
    queue::{Accepted, Answer, Landed, Queue, failure},
    regions::Regions,
};
use super::{CopyBatch, CopyEngine, CopyRegion};
use crate::{
    block::Direction,
    device::{cuda::Gpu, rdma::MemoryRegion},
    error::Result,
};

/// Two failures within this time, and it is out of service.
const SECOND_FAILURE: Duration = Duration::from_secs(60);

/// How long the device may take to give back what was posted, once its connection has failed.
const DRAIN: Duration = Duration::from_secs(2);

/// The order in which a batch goes.
#[derive(Clone, Default)]
pub struct CopyOrder {
    /// Batches of one stream are done in the order in which they were asked for. Those of stream 0 are in no stream.
    pub stream: u64,
    /// What the batch waits for; others of its stream wait with it, those of other streams do not.
    pub after: Option<Rc<dyn Hold>>,
}

/// The engine. Lives on the reactor's thread, inside a runtime with I/O.
pub struct GdrCopy {
    inner: Rc<Inner>,
}

/// Where the connection is.
enum Phase {
    Up,
    /// It failed; what was posted is coming back.
    Draining {
        since: Instant,
        reason: String,
    },
    /// It was reset and is being proven.
    Proving,
    Retired,
}

struct Inner {
    // Dropped in this order: `Drop` has ended all work by then.
    channel: Channel,
    queue: RefCell<Queue>,
    regions: Regions,
    scratch: Scratch,
    phase: RefCell<Phase>,
    status: GdrStatus,
    /// What is told while it works.
    evidence: String,
    access: DeviceAccess,
    device: String,
    /// It is not to be proven anew.
    retired: Cell<bool>,
    /// The failure before this one.
    failed_at: Cell<Option<Instant>>,
    /// A task polls.
    polling: Cell<bool>,
    /// That task sleeps.
    sleeping: Cell<bool>,
    /// Wakes it for something other than a completion.
    wake: Notify,
    /// Held by whoever registers foreign memory: one after the other, so that none is registered twice.
    registering: Mutex<()>,
    /// How long nothing may complete.
    stuck_after: Duration,
    /// What copies take, where it was measured.
    times: OnceCell<Arc<Times>>,
    /// A flush is needed before the device may read what was written.
    flush: bool,
    /// Batches that are done and not yet answered. Kept for its room.
    landed: Cell<Landed>,
    gpu: Option<Arc<Gpu>>,
    /// Keep what is registered for good.
    _memory: Vec<Arc<dyn Any + Send + Sync>>,
}

impl GdrCopy {
    /// True while it takes copies.
    pub fn is_up(&self) -> bool {
        matches!(*self.inner.phase.borrow(), Phase::Up)
    }

    /// What can be told of it, from any thread.
    pub fn status(&self) -> &GdrStatus {
        &self.inner.status
    }

    /// The RDMA device's name.
    pub fn device(&self) -> &str {
        &self.inner.device
    }

    /// How device memory was made known to it.
    pub fn device_access(&self) -> DeviceAccess {
        self.inner.access
    }

    /// Whether all of the batch lies in memory that the NIC knows, or could be told of.
    pub fn covers(&self, batch: &CopyBatch) -> bool {
        let lies_in = |at: usize, len: usize, region: &CopyRegion| {
            at >= region.start() && at - region.start() <= region.len() && len <= region.len() - (at - region.start())
        };
        let known = |at: usize, len: usize| {
            self.inner.regions.holds(at, len) || batch.regions().iter().any(|region| lies_in(at, len, region))
        };
        batch.ops().iter().all(|op| known(op.src.addr(), op.len) && known(op.dst.addr(), op.len))
    }

    /// Copies all of `batch`, in this order; as [`CopyEngine::copy`] else.
    pub async fn copy_in(&self, order: CopyOrder, batch: CopyBatch) -> (Result<()>, CopyBatch) {
        match self.offer(order, batch).await {
            Offered::Copied(result, batch) => (result, batch),
            Offered::Refused(batch) if self.is_up() => {
                let reason = "memory that is not registered with the RDMA device";
                (Err(failure(reason.into())), batch)
            }
            Offered::Refused(batch) => (Err(failure(self.inner.status.get().to_string())), batch),
        }
    }

    /// The same, unless it cannot take the batch at all.
    pub(super) async fn offer(&self, order: CopyOrder, batch: CopyBatch) -> Offered {
        if !self.is_up() {
            return Offered::Refused(batch);
        }
        let batch = match batch.regions() {
            [] => batch,
            _ => self.inner.register(batch).await,
        };
        Rc::clone(&self.inner).submit(order, batch, Phase::is_up).await
    }
}

/// What became of a batch that was offered to the engine.
pub(super) enum Offered {
    /// It was copied, or failed.
    Copied(Result<()>, CopyBatch),
    /// It was not taken: some of its memory is not registered, or nothing is copied now.
    Refused(CopyBatch),
}

impl Phase {
    fn is_up(&self) -> bool {
        matches!(self, Phase::Up)
    }

    fn is_proving(&self) -> bool {
        matches!(self, Phase::Proving)
    }
}

impl CopyEngine for GdrCopy {
    fn name(&self) -> &'static str {
        "gdr"
    }

    async fn copy(&self, batch: CopyBatch) -> (Result<()>, CopyBatch) {
        self.copy_in(CopyOrder::default(), batch).await
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
            Some(times) => times.estimate(to_device, count, bytes),
            // What the fixed cost of a chain and 40 GB/s give.
            None => Duration::from_nanos(5_000 + bytes / 40),
        }
    }
}

/// Deregisters elsewhere: it takes time by the page.
async fn give_back(regions: Vec<MemoryRegion>) {
    if !regions.is_empty() {
        drop(tokio::task::spawn_blocking(move || drop(regions)).await);
    }
}

impl Inner {
    /// Registers the regions that a batch names and that the NIC does not know, elsewhere: pinning takes time by the
    /// page. One that is refused stays unknown.
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
        // The batch goes along: it keeps the memory.
        let registered = tokio::task::spawn_blocking(move || {
            let register = |region: &CopyRegion| {
                let gpu = gpu.as_deref().filter(|_| region.is_on_device());
                // SAFETY: by the contract of `CopyBatch::within` the region stays mapped until the engine forgets it;
                // the batch, which is here, keeps it until then.
                let made = unsafe { regions::register(&domain, region.start(), region.len(), gpu) };
                (*region, made.map(|(made, _)| made))
            };
            let made: Vec<_> = missing.iter().map(register).collect();
            (batch, made)
        });
        let (batch, made) = registered.await.expect("registration does not panic, and blocking tasks are not aborted");
        for made in made {
            match made {
                (region, Ok(made)) => give_back(self.regions.enter(&region, made)).await,
                (region, Err(reason)) => {
                    tracing::warn!(reason, "copies in a region go another way than through the RDMA device");
                    self.regions.refuse(&region);
                }
            }
        }
        batch
    }

    async fn submit(self: Rc<Self>, order: CopyOrder, batch: CopyBatch, may: fn(&Phase) -> bool) -> Offered {
        if !may(&self.phase.borrow()) {
            return Offered::Refused(batch);
        }
        let Some(holds) = self.regions.cover(&batch) else { return Offered::Refused(batch) };
        let (answer, answered): (Answer, _) = oneshot::channel();
        let accepted = Accepted { batch, holds, answer, after: order.after };
        let was_idle = !self.queue.borrow().is_flying();
        self.queue.borrow_mut().accept(order.stream, accepted);
        // While others are under way the task gathers what comes in one turn.
        if was_idle || self.sleeping.get() {
            self.turn();
        }
        if !self.polling.replace(true) {
            tokio::task::spawn_local(Rc::clone(&self).poll());
        } else if self.sleeping.get() && self.queue.borrow().has_more() {
            // What it waits for may have changed; completions wake it anyway.
            self.wake.notify_one();
        }
        drop(self);
        let (result, batch) = answered.await.expect("the engine answers every batch it took before it goes");
        Offered::Copied(result, batch)
    }

    /// Takes completions, answers what is done, posts what waits; true if there was a completion, or there is more to
    /// post.
    fn turn(self: &Rc<Self>) -> bool {
        let mut landed = self.landed.take();
        let mut queue = self.queue.borrow_mut();
        let mut any = false;
        let mut result = queue.harvest(&mut landed).map(|completed| any = completed);
        if !queue.has_failed() {
            result = result.and_then(|()| queue.pump(&self.regions, &mut landed).map(|more| any |= more));
            if let Err(reason) = &result {
                queue.fail(reason, &mut landed);
            }
        }
        drop(queue);
        if let Err(reason) = result {
            self.failed(reason);
        }
        self.answer(&mut landed);
        self.landed.set(landed);
        any
    }

    /// Answers batches; what was written to the device is made visible to it before.
    fn answer(&self, landed: &mut Landed) {
        let is_write = |(accepted, result): &(Accepted, Result<()>)| {
            result.is_ok() && accepted.batch.direction() == Direction::HostToDevice
        };
        let mut flushed = Ok(());
        if self.flush && landed.iter().any(is_write) {
            flushed = self.gpu.as_ref().map_or(Ok(()), |gpu| gpu.flush_writes());
        }
        for (accepted, result) in landed.drain(..) {
            let result = match &flushed {
                Err(reason) if accepted.batch.direction() == Direction::HostToDevice => Err(failure(reason.clone())),
                _ => result,
            };
            let Accepted { batch, holds, answer, .. } = accepted;
            drop(holds);
            // Nobody may be waiting any more; the batch goes in either case.
            drop(answer.send((result, batch)));
        }
    }

    /// Draws the first conclusion from a failure.
    fn failed(&self, reason: String) {
        let mut phase = self.phase.borrow_mut();
        if matches!(*phase, Phase::Draining { .. }) {
            return;
        }
        tracing::warn!(reason, device = self.device, "copies through the RDMA device failed");
        self.status.set(GdrState::Recovering(reason.clone()));
        *phase = Phase::Draining { since: Instant::now(), reason };
    }

    /// After a failure: when everything has come back, or has been taken from the device. False: not yet.
    fn ended(&self) -> Option<String> {
        let (since, reason) = match &*self.phase.borrow() {
            Phase::Draining { since, reason } => (*since, reason.clone()),
            _ => return None,
        };
        let mut landed = self.landed.take();
        let mut queue = self.queue.borrow_mut();
        let mut ended = None;
        if queue.drained() || since.elapsed() > DRAIN {
            // What came back is gone from the device; only then the connection's memory of it is.
            let gone = match queue.reset(&mut landed) {
                Ok(()) => Ok(()),
                Err(fault) => queue.destroy(&mut landed).map_err(|other| format!("{fault}; {other}")),
            };
            match gone {
                Ok(()) => ended = Some(reason),
                Err(fault) => {
                    tracing::error!(fault, "the RDMA device does not give memory back; it stays reserved");
                    *self.phase.borrow_mut() = Phase::Draining { since: Instant::now(), reason };
                }
            }
        }
        drop(queue);
        if ended.is_some() {
            *self.phase.borrow_mut() = Phase::Proving;
        }
        self.answer(&mut landed);
        self.landed.set(landed);
        ended
    }

    /// Proves the connection anew, or retires it.
    async fn recover(self: Rc<Self>, reason: String) {
        if self.retired.get() {
            *self.phase.borrow_mut() = Phase::Retired;
            return;
        }
        let now = Instant::now();
        let before = self.failed_at.replace(Some(now));
        if before.is_some_and(|before| now.duration_since(before) < SECOND_FAILURE) {
            return self.retire(format!("it failed twice within {SECOND_FAILURE:?}, the second time with: {reason}"));
        }
        let connected = self.queue.borrow_mut().connect();
        let proven = match connected {
            Ok(()) => self.prove(&self.scratch.own_place()).await,
            Err(fault) => Err(fault),
        };
        match proven {
            Ok(()) => {
                tracing::info!(device = self.device, "copies go through the RDMA device again");
                *self.phase.borrow_mut() = Phase::Up;
                self.status.set(GdrState::On(self.evidence.clone()));
            }
            Err(fault) => self.retire(format!("it failed ({reason}), and then did not pass its proof: {fault}")),
        }
    }

    fn retire(&self, reason: String) {
        tracing::warn!(reason, device = self.device, "no copies go through the RDMA device any more");
        self.retired.set(true);
        if !matches!(*self.phase.borrow(), Phase::Draining { .. }) {
            *self.phase.borrow_mut() = Phase::Retired;
        }
        self.status.set(GdrState::Retired(reason));
    }

    async fn prove(self: &Rc<Self>, place: &Place) -> std::result::Result<(), String> {
        let this = self;
        let copy = async move |batch| match Rc::clone(this).submit(CopyOrder::default(), batch, Phase::is_proving).await
        {
            Offered::Copied(result, _) => result.map_err(|error| error.to_string()),
            Offered::Refused(_) => Err("the connection has failed".to_owned()),
        };
        self.scratch.prove(place, copy).await
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let mut landed = self.landed.take();
        let queue = self.queue.get_mut();
        if queue.is_flying() && !queue.has_failed() {
            queue.fail("the engine is gone", &mut landed);
        }
        let started = Instant::now();
        while queue.is_flying() && !queue.drained() && started.elapsed() < DRAIN {
            // What it says of completions is of no use any more.
            drop(queue.harvest(&mut landed));
            std::thread::yield_now();
        }
        if let Err(fault) = queue.destroy(&mut landed) {
            tracing::error!(fault, "the RDMA device does not give memory back; it is left to it for good");
            queue.leak();
        }
    }
}
