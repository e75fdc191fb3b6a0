//! The queue of work requests. Batches are cut into RDMA WRITEs, posted in chains, and completed by counting.
//!
//! Work requests are numbered from 0, and the connection completes them in order. Only some of them are signalled (see
//! [`chain`]). A completion of number n means that all work requests up to n are done; a batch is done when its
//! last work request is.

mod chain;

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use tokio::sync::oneshot;

use kvhoist_base::{
    error::{Error, Result},
    panics::log,
};

use super::regions::{RegionRefs, Regions};
use crate::{
    CopyBatch,
    rdma::{Completion, LoopbackPath, QueuePair, SIGNALLED, Sge, WorkRequest, status_text},
};

/// Work requests per post.
const CHAIN: usize = 64;

/// Chains posted per turn of the reactor: about 20 us.
const CHAINS_PER_TURN: usize = 4;

/// Largest work request in bytes: larger ones are not faster, and complete late.
const REQUEST_BYTES_MAX: usize = 1 << 20;

pub(super) type Answer = oneshot::Sender<(Result<()>, CopyBatch)>;

/// An accepted batch: all its ranges are registered.
pub(super) struct Accepted {
    pub(super) batch: CopyBatch,
    pub(super) regions: RegionRefs,
    pub(super) answer: Answer,
}

/// Completed batches, with their results.
pub(super) type Finished = Vec<(Accepted, Result<()>)>;

/// A batch whose work requests are posted in part.
struct Entering {
    accepted: Accepted,
    op: usize,
    offset: usize,
}

/// A batch whose work requests are all numbered.
struct PostedBatch {
    accepted: Accepted,
    /// One past the number of its last work request.
    end: u64,
    /// Why it failed, if it has.
    fault: Option<String>,
}

pub(super) struct Queue {
    qp: QueuePair,
    path: LoopbackPath,
    request_bytes_max: usize,
    chain: Box<[WorkRequest]>,
    sges: Box<[Sge]>,
    sges_max: usize,
    /// Range of `chain` that is built and not yet posted.
    unposted: std::ops::Range<usize>,
    /// Number of work requests posted so far.
    posted: u64,
    /// Number of work requests done.
    done: u64,
    /// One past the number of the last signalled work request.
    signalled: u64,
    /// Completions with smaller numbers are stale: they are from before the last reset.
    generation: u64,
    /// After a failure: one past the largest number that was flushed.
    flushed: u64,
    posted_batches: VecDeque<PostedBatch>,
    entering: Option<Entering>,
    /// Batches of which no work request is posted, in order.
    waiting: VecDeque<Accepted>,
    completions: Box<[Completion]>,
    /// Set by `fail`, until the next `connect`.
    failed: bool,
    /// When the queue last went from idle to busy.
    busy_since: Instant,
    /// A completion had an error: later ones do not say what was done.
    bad: bool,
}

impl Queue {
    pub(super) fn new(qp: QueuePair, path: LoopbackPath) -> Self {
        let sges_max = qp.sges() as usize;
        Queue {
            request_bytes_max: REQUEST_BYTES_MAX.min(path.message_bytes_max as usize),
            chain: vec![WorkRequest::WRITE; CHAIN].into(),
            sges: vec![Sge::default(); CHAIN * sges_max].into(),
            sges_max,
            unposted: 0..0,
            posted: 0,
            done: 0,
            signalled: 0,
            generation: 0,
            flushed: 0,
            posted_batches: VecDeque::with_capacity(CHAIN),
            entering: None,
            waiting: VecDeque::with_capacity(CHAIN),
            completions: vec![Completion::NONE; CHAIN].into(),
            failed: false,
            busy_since: Instant::now(),
            bad: false,
            qp,
            path,
        }
    }

    pub(super) fn qp(&self) -> &QueuePair {
        &self.qp
    }

    /// Enqueues a batch; [`post_pending`](Self::post_pending) starts it.
    pub(super) fn accept(&mut self, accepted: Accepted) {
        self.waiting.push_back(accepted);
    }

    /// True if the queue holds no batch.
    pub(super) fn is_idle(&self) -> bool {
        self.posted_batches.is_empty() && !self.has_more()
    }

    /// True while work requests are in flight or posted batches are unfinished.
    pub(super) fn has_posted(&self) -> bool {
        self.posted > self.done || !self.posted_batches.is_empty()
    }

    /// Time since the queue last became busy.
    pub(super) fn busy_for(&self) -> Duration {
        self.busy_since.elapsed()
    }

    /// True if batches wait for room.
    pub(super) fn has_more(&self) -> bool {
        self.entering.is_some() || !self.unposted.is_empty() || !self.waiting.is_empty()
    }

    /// Posts as much as there is room for, up to the limit of one turn of the reactor. True if there is more.
    ///
    /// # Errors
    /// Why the connection is broken.
    pub(super) fn post_pending(&mut self, regions: &Regions) -> Result<bool, String> {
        for _ in 0..CHAINS_PER_TURN {
            if self.unposted.is_empty() {
                let count = self.build(regions);
                self.unposted = 0..count;
            }
            if self.unposted.is_empty() || !self.post()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Posts the built requests; false if the device has no room now.
    fn post(&mut self) -> Result<bool, String> {
        let first = &raw mut self.chain[self.unposted.start];
        // SAFETY: `build` linked these work requests to one another and to entries within arrays of `self`, which stay
        // in place. The batches in `entering` and `posted_batches` hold the memory and its regions until the work is
        // done, or the queue pair is reset or destroyed.
        let (taken, fault) = match unsafe { self.qp.post(first) } {
            Ok(()) => (self.unposted.len(), None),
            Err(refused) => {
                let bytes = refused.first.addr().saturating_sub(first.addr());
                (usize::min(bytes / size_of::<WorkRequest>(), self.unposted.len()), Some(refused.fault))
            }
        };
        let taken_to = self.unposted.start + taken;
        let signals = |request: &&WorkRequest| request.flags & SIGNALLED != 0;
        if let Some(last) = self.chain[self.unposted.start..taken_to].iter().rev().find(signals) {
            self.signalled = last.id + 1;
        }
        if self.posted == self.done && taken > 0 {
            self.busy_since = Instant::now();
        }
        self.posted += taken as u64;
        self.unposted.start = taken_to;
        match fault {
            None => Ok(true),
            // An outstanding signalled request will complete and make room.
            Some(fault) if fault.errno() == libc::ENOMEM && self.signalled > self.done => Ok(false),
            Some(fault) => Err(fault.to_string()),
        }
    }

    /// Polls for completions and collects the finished batches. True if a completion arrived.
    ///
    /// # Errors
    /// The status of the first completion with an error.
    pub(super) fn poll_cq(&mut self, finished: &mut Finished) -> Result<bool, String> {
        let mut any = false;
        let mut result = Ok(());
        loop {
            let polled = self.qp.completions().poll(&mut self.completions);
            let count = match polled {
                Ok(count) => count,
                Err(fault) => {
                    result = result.and(Err(fault.to_string()));
                    0
                }
            };
            for at in 0..count {
                let completion = self.completions[at];
                result = result.and(self.completed(&completion));
            }
            any |= count > 0;
            if count < self.completions.len() {
                break;
            }
        }
        self.finish(finished);
        result.map(|()| any)
    }

    fn completed(&mut self, completion: &Completion) -> Result<(), String> {
        let Completion { id, status, vendor_error, .. } = *completion;
        if id < self.generation || id >= self.posted {
            // A smaller number is a stale completion from before a reset. A number that was never posted is a device
            // error.
            return if id < self.generation {
                Ok(())
            } else {
                Err(format!("a completion of a work request that was never posted ({id})"))
            };
        }
        self.flushed = self.flushed.max(id + 1);
        if self.failed || self.bad {
            return Ok(());
        }
        if status == 0 {
            self.done = self.done.max(id + 1);
            return Ok(());
        }
        // Requests before it are done; it and the later ones are not.
        self.done = self.done.max(id);
        self.bad = true;
        Err(format!("{} (status {status}, vendor error {vendor_error:#x})", status_text(status)))
    }

    fn finish(&mut self, finished: &mut Finished) {
        while self.posted_batches.front().is_some_and(|posted| posted.end <= self.done) {
            let PostedBatch { accepted, fault, .. } = self.posted_batches.pop_front().expect("it is in front");
            let result = fault.map_or(Ok(()), |reason| Err(failure(reason)));
            finished.push((accepted, result));
        }
    }

    /// Moves to the failed state. Waiting batches are answered; posted ones stay until [`drained`](Self::drained).
    pub(super) fn fail(&mut self, reason: &str, finished: &mut Finished) {
        self.failed = true;
        if let Err(fault) = self.qp.fail() {
            log(|| tracing::debug!(%fault, "the queue pair did not go to its error state"));
        }
        self.unposted = 0..0;
        if let Some(entering) = self.entering.take() {
            self.posted_batches.push_back(PostedBatch { accepted: entering.accepted, end: self.posted, fault: None });
        }
        for posted in &mut self.posted_batches {
            posted.end = posted.end.min(self.posted);
            posted.fault = Some(reason.to_owned());
        }
        finished.extend(self.waiting.drain(..).map(|accepted| (accepted, Err(failure(reason.to_owned())))));
    }

    /// True once all posted work requests have completed or were flushed.
    pub(super) fn drained(&self) -> bool {
        self.flushed == self.posted || self.done == self.posted
    }

    /// True after [`fail`](Self::fail), until the next [`connect`](Self::connect).
    pub(super) fn has_failed(&self) -> bool {
        self.failed
    }

    /// Resets the queue pair, after which posted work no longer touches memory, and returns all batches.
    ///
    /// # Errors
    /// The reset's error; the batches stay.
    pub(super) fn reset(&mut self, finished: &mut Finished) -> Result<(), String> {
        self.qp.reset().map_err(|fault| fault.to_string())?;
        self.finish_all(finished);
        Ok(())
    }

    /// Destroys the queue pair, with the same effect as [`reset`](Self::reset); it cannot be connected again.
    pub(super) fn destroy(&mut self, finished: &mut Finished) -> Result<(), String> {
        self.qp.destroy().map_err(|fault| fault.to_string())?;
        self.finish_all(finished);
        Ok(())
    }

    fn finish_all(&mut self, finished: &mut Finished) {
        self.generation = self.posted;
        (self.done, self.flushed, self.signalled) = (self.posted, self.posted, self.posted);
        self.finish(finished);
    }

    /// Connects a queue pair after a reset.
    pub(super) fn connect(&mut self) -> Result<(), String> {
        self.qp.connect(&self.path).map_err(|fault| fault.to_string())?;
        (self.failed, self.bad) = (false, false);
        Ok(())
    }

    /// Leaks the batches in flight, because the device does not release their memory.
    pub(super) fn leak(&mut self) {
        std::mem::forget(std::mem::take(&mut self.posted_batches));
    }
}

pub(super) fn failure(reason: String) -> Error {
    Error::copy("gdr", reason)
}
