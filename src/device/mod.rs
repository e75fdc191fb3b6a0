//! Devices, and the copy engines that move bytes between host and device memory, behind one trait.
//!
//! [`DevicePool`] is where the slots of the device tier lie. [`AnyCopy`] is whichever engine serves: [`cuda`] or
//! [`gdr`], or [`Memcpy`] where host memory plays the device. [`cufile`] moves blocks between disk and device.

mod any;
pub mod cuda;
pub mod cufile;
pub mod gdr;
mod memcpy;
mod pair;
mod pool;
pub mod rdma;
mod region;
#[cfg(feature = "sim")]
pub mod sim;

pub use crate::block::{CopyOp, Direction};
pub use any::AnyCopy;
pub use memcpy::Memcpy;
pub use pair::pair_segments;
pub use pool::{DevicePool, PoolLayout};
pub use region::CopyRegion;

use std::{any::Any, cell::Cell, future::Future, sync::Arc, time::Duration};

use crate::{block::Segment, error::Result};

/// Copies that start together and complete together, with what keeps their memory alive.
pub struct CopyBatch {
    ops: Vec<CopyOp>,
    /// Sum of their lengths: asked for on the way of every copy, where another pass over thousands would be felt.
    bytes: u64,
    direction: Direction,
    /// Dropped with the batch, when the hardware is done with the memory.
    _owners: Vec<Arc<dyn Any + Send + Sync>>,
    prompt: bool,
    regions: Vec<CopyRegion>,
}

impl CopyBatch {
    /// A batch of copies whose ranges do not overlap.
    ///
    /// # Safety
    /// Until the batch is dropped every `src` range must stay readable and unwritten, every `dst`
    /// range must stay writable and untouched by others, and `owners` must keep both mapped.
    pub unsafe fn new(ops: Vec<CopyOp>, direction: Direction, owners: Vec<Arc<dyn Any + Send + Sync>>) -> Self {
        let bytes = ops.iter().map(|op| op.len as u64).sum();
        CopyBatch { ops, bytes, direction, _owners: owners, prompt: false, regions: Vec::new() }
    }

    /// The same, for somebody who waits for this batch while others come after it: an engine that lets batches go
    /// together joins few to it.
    #[must_use]
    pub fn prompt(self) -> Self {
        CopyBatch { prompt: true, ..self }
    }

    /// The same, whose ranges lie in these regions where they are not the cache's own.
    ///
    /// # Safety
    /// Each region must stay mapped, and to the same memory, until every engine that the batch was given to has been
    /// told to [`forget`](CopyEngine::forget) it, or is gone.
    #[must_use]
    pub unsafe fn within(self, regions: Vec<CopyRegion>) -> Self {
        CopyBatch { regions, ..self }
    }

    /// The regions that it touches and that are not the cache's own.
    pub fn regions(&self) -> &[CopyRegion] {
        &self.regions
    }

    /// Whether somebody waits for this one.
    pub fn is_prompt(&self) -> bool {
        self.prompt
    }

    /// The copies.
    pub fn ops(&self) -> &[CopyOp] {
        &self.ops
    }

    /// Which way they go.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// Sum of their lengths.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// A batch with one owner, which comes back as what it is: engines know owners without a type.
pub(crate) struct OwnedBatch<O> {
    batch: CopyBatch,
    owner: Arc<O>,
}

impl<O: Send + Sync + 'static> OwnedBatch<O> {
    /// # Safety
    /// As of [`CopyBatch::new`].
    pub(crate) unsafe fn new(ops: Vec<CopyOp>, direction: Direction, owner: O) -> Self {
        let owner = Arc::new(owner);
        // SAFETY: the caller's promise.
        let batch = unsafe { CopyBatch::new(ops, direction, vec![Arc::clone(&owner) as _]) };
        OwnedBatch { batch, owner }
    }

    /// As [`CopyBatch::prompt`].
    pub(crate) fn prompt(self) -> Self {
        OwnedBatch { batch: self.batch.prompt(), ..self }
    }

    /// As [`CopyBatch::within`].
    ///
    /// # Safety
    /// As of [`CopyBatch::within`].
    pub(crate) unsafe fn within(self, regions: Vec<CopyRegion>) -> Self {
        // SAFETY: the caller's promise.
        OwnedBatch { batch: unsafe { self.batch.within(regions) }, ..self }
    }

    /// Sum of the lengths of the copies.
    pub(crate) fn bytes(&self) -> u64 {
        self.batch.bytes()
    }

    /// Copies all of it, or says why not; the destination is then undefined.
    pub(crate) async fn copy<C: CopyEngine>(self, engine: &C) -> (Result<()>, O) {
        let (result, batch) = engine.copy(self.batch).await;
        drop(batch);
        (result, Arc::into_inner(self.owner).expect("every engine gives the whole batch back"))
    }
}

/// Says that no task of an engine polls any longer, also where it is dropped with its runtime.
struct Polling<'a>(&'a Cell<bool>);

impl Drop for Polling<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

/// Copies batches between memories; completes on the reactor.
///
/// Dropping a returned future abandons the result; the batch and its owners live until the
/// hardware is done with them.
pub trait CopyEngine: 'static {
    /// The name shown in metrics and by `kvhoist doctor`.
    fn name(&self) -> &'static str;

    /// Copies all of `batch`, or says why not; the destination is then undefined.
    fn copy(&self, batch: CopyBatch) -> impl Future<Output = (Result<()>, CopyBatch)>;

    /// Why it cannot copy to and from the device any more, once it cannot.
    fn fault(&self) -> Option<String> {
        None
    }

    /// Forgets a region that batches lay in: it may be unmapped when this has resolved. No batch in it may be under
    /// way, nor come later.
    fn forget(&self, region: &CopyRegion) -> impl Future<Output = ()> {
        let _ = region;
        std::future::ready(())
    }

    /// The checksum of device memory, in this order, by the device itself. `None` where it cannot; then nothing was
    /// done. `owner` is dropped when the device is done with the memory.
    ///
    /// # Safety
    /// While `owner` lives the segments must stay mapped device memory that nobody writes to.
    unsafe fn checksum(
        &self,
        segments: &[Segment],
        owner: Arc<dyn Any + Send + Sync>,
    ) -> impl Future<Output = Option<Result<u64>>> {
        let _ = (segments, owner);
        std::future::ready(None)
    }

    /// What the batch is expected to take.
    fn cost(&self, batch: &CopyBatch) -> Duration;
}
