//! A simulated copy engine: virtual time, failures by chance from one seed.
//!
//! It runs in a current-thread tokio runtime with a paused
//! clock, inside a `LocalSet`. Every batch is a local task, so that it continues when its future is dropped, as
//! hardware does. It checks the contract of [`CopyBatch`]: destinations are filled with garbage until the copy is done,
//! and a copy panics if its source changed while it was in flight.

use std::{any::Any, cell::RefCell, collections::BTreeMap, ops::RangeInclusive, rc::Rc, sync::Arc, time::Duration};

use kvhoist::{
    Error, Segment,
    internals::{
        checksum::Digest,
        device::{CopyBatch, CopyEngine, Memcpy},
    },
};
use tokio::sync::oneshot;

use super::Rng;

/// Content of a destination until the copy is done, and after a failed copy.
const GARBAGE: u8 = 0xdc;

/// How the simulated copy engine behaves. The default is fast and free of faults.
#[derive(Debug, Clone)]
pub struct CopyOptions {
    /// Virtual time that a batch takes.
    pub latency: RangeInclusive<Duration>,
    /// The probability that a batch fails, and that a checksum fails, 0.0 to 1.0.
    pub failure: f64,
    /// Whether the device can compute checksums.
    pub checksums: bool,
}

impl Default for CopyOptions {
    fn default() -> Self {
        CopyOptions { latency: Duration::ZERO..=Duration::from_millis(3), failure: 0.0, checksums: false }
    }
}

/// Batches so far, by result.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CopyCounts {
    /// Batches started.
    pub started: u64,
    /// Batches completed without an error.
    pub done: u64,
    /// Batches failed.
    pub failed: u64,
    /// Checksums computed.
    pub sums: u64,
}

struct State {
    options: CopyOptions,
    rng: Rng,
    counts: CopyCounts,
    /// The memory of each batch in flight, by the number of its start.
    memory: BTreeMap<u64, Vec<(usize, usize)>>,
    memory_may_change: bool,
    stopped: bool,
}

/// A simulated copy engine and its handle; clones share all state.
#[derive(Clone)]
pub struct SimCopy(Rc<RefCell<State>>);

impl SimCopy {
    /// An engine that draws latencies and failures from `seed`.
    pub fn new(seed: u64, options: CopyOptions) -> Self {
        let (rng, counts, memory) = (Rng::new(seed), CopyCounts::default(), BTreeMap::new());
        let state = State { options, rng, counts, memory, memory_may_change: false, stopped: false };
        SimCopy(Rc::new(RefCell::new(state)))
    }

    /// Changes the failure probability of later batches.
    pub fn set_failure(&self, failure: f64) {
        self.0.borrow_mut().options.failure = failure;
    }

    /// Sets whether the device can compute checksums, for later blocks.
    pub fn set_checksums(&self, can: bool) {
        self.0.borrow_mut().options.checksums = can;
    }

    /// Whether a source may change while it is copied: its owner is another process. Otherwise that is a panic.
    pub fn set_memory_may_change(&self, may: bool) {
        self.0.borrow_mut().memory_may_change = may;
    }

    /// Fails every later batch, and reports that the device has stopped for good.
    pub fn stop(&self) {
        let State { options, stopped, .. } = &mut *self.0.borrow_mut();
        (options.failure, *stopped) = (1.0, true);
    }

    /// Batches so far, by result.
    pub fn counts(&self) -> CopyCounts {
        self.0.borrow().counts
    }

    /// Batches in flight.
    pub fn in_flight(&self) -> u64 {
        let counts = self.counts();
        counts.started - counts.done - counts.failed
    }

    /// True if a batch in flight uses a part of the range of memory.
    pub(crate) fn uses(&self, start: usize, len: usize) -> bool {
        let state = self.0.borrow();
        state.memory.values().flatten().any(|&(first, bytes)| first < start + len && start < first + bytes)
    }

    /// Draws how long the next operation takes, and whether it fails.
    fn draw(&self) -> (Duration, bool) {
        let State { options, rng, .. } = &mut *self.0.borrow_mut();
        let (min, max) = (options.latency.start().as_nanos() as u64, options.latency.end().as_nanos() as u64);
        (Duration::from_nanos(rng.between(min, max)), rng.chance(options.failure))
    }

    async fn finish(self, batch: CopyBatch, latency: Duration, fails: bool) -> (Result<(), Error>, CopyBatch) {
        let before = digest(&batch);
        spoil(&batch);
        tokio::time::sleep(latency).await;
        let is_same = self.0.borrow().memory_may_change || before == digest(&batch);
        assert!(is_same, "the source of a copy changed while it was in flight");
        if fails {
            self.0.borrow_mut().counts.failed += 1;
            return (Err(Error::Copy { engine: "sim", reason: "the simulation says so".into() }), batch);
        }
        let (result, batch) = Memcpy::new().copy(batch).await;
        self.0.borrow_mut().counts.done += 1;
        (result, batch)
    }
}

impl CopyEngine for SimCopy {
    fn name(&self) -> &'static str {
        "sim"
    }

    async fn copy(&self, batch: CopyBatch) -> (Result<(), Error>, CopyBatch) {
        let ends = batch.ops().iter().flat_map(|op| [(op.src.addr(), op.len), (op.dst.addr(), op.len)]).collect();
        let number = {
            let State { counts, memory, .. } = &mut *self.0.borrow_mut();
            counts.started += 1;
            memory.insert(counts.started, ends);
            counts.started
        };
        let (latency, fails) = self.draw();
        let (answer, answered) = oneshot::channel();
        let this = self.clone();
        tokio::task::spawn_local(async move {
            let done = this.clone().finish(batch, latency, fails).await;
            this.0.borrow_mut().memory.remove(&number);
            // The receiver may be gone; sending fails then, and dropping the batch frees the memory.
            drop(answer.send(done));
        });
        answered.await.expect("the task that answers lives as long as the runtime that polls this")
    }

    fn fault(&self) -> Option<String> {
        self.0.borrow().stopped.then(|| "the simulation stopped it".into())
    }

    fn checksums(&self) -> bool {
        self.0.borrow().options.checksums
    }

    async unsafe fn checksum(
        &self,
        segments: &[Segment],
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Option<Result<u64, Error>> {
        if !self.checksums() {
            return None;
        }
        let (latency, fails) = self.draw();
        let segments = segments.to_vec();
        let (answer, answered) = oneshot::channel();
        let this = self.clone();
        tokio::task::spawn_local(async move {
            tokio::time::sleep(latency).await;
            let mut digest = Digest::new();
            for segment in segments.iter().filter(|segment| segment.len > 0) {
                // SAFETY: the caller promises that the segments stay mapped and unwritten while `owner` lives; in
                // simulation every address is host memory.
                digest.update(unsafe { std::slice::from_raw_parts(segment.ptr.cast_const(), segment.len) });
            }
            drop(owner);
            let sum = digest.finish();
            this.0.borrow_mut().counts.sums += 1;
            let answered = match fails {
                false => Ok(sum),
                true => Err(Error::Copy { engine: "sim", reason: "the simulation says so".into() }),
            };
            // The receiver may be gone.
            drop(answer.send(answered));
        });
        Some(answered.await.expect("the task that answers lives as long as the runtime that polls this"))
    }

    fn cost(&self, _batch: &CopyBatch) -> Duration {
        *self.0.borrow().options.latency.end()
    }
}

fn digest(batch: &CopyBatch) -> u64 {
    let mut digest = Digest::new();
    for op in batch.ops().iter().filter(|op| op.len > 0) {
        // SAFETY: by the contract of `CopyBatch::new` the source is readable and unwritten while the batch lives; in
        // simulation every address is host memory.
        digest.update(unsafe { std::slice::from_raw_parts(op.src, op.len) });
    }
    digest.finish()
}

fn spoil(batch: &CopyBatch) {
    for op in batch.ops().iter().filter(|op| op.len > 0) {
        // SAFETY: by the contract of `CopyBatch::new` the destination is writable and untouched by others while the
        // batch lives; in simulation every address is host memory.
        unsafe { op.dst.write_bytes(GARBAGE, op.len) };
    }
}
