//! Device memory, and the copy engines between host and device memory, behind one trait.
//!
//! [`DevicePool`] holds the slots of the device tier. [`cuda`] and [`gdr`] copy between them and host memory;
//! [`cufile`] transfers blocks between disk and device.
//!
//! A build can leave out each engine by its cargo feature ([`ENGINES`]). A module in `stub/` then takes the engine's
//! place, with the same names, for types that have no values. So no code outside this folder depends on the features.

#[macro_use]
extern crate kvhoist_base;

mod choices;
#[cfg(feature = "cuda")]
mod cost;
#[cfg_attr(not(feature = "cuda"), path = "stub/cuda.rs")]
pub mod cuda;
#[cfg_attr(not(feature = "cufile"), path = "stub/cufile.rs")]
pub mod cufile;
#[cfg(any(feature = "cufile", feature = "rdma"))]
mod dynamic;
#[cfg_attr(not(feature = "rdma"), path = "stub/gdr.rs")]
pub mod gdr;
mod pair;
mod pool;
#[cfg(feature = "rdma")]
pub mod rdma;
mod region;
mod status;
mod transfer;

pub use choices::{CopyMethod, CudaCopyOptions, EngineMode, GdrOptions};
pub use kvhoist_base::block::{CopyOp, Direction};
pub use pair::pair_segments;
pub use pool::{DevicePool, PoolLayout};
pub use region::CopyRegion;
pub use status::{GdrState, GdrStatus};

use std::{any::Any, future::Future, sync::Arc, time::Duration};

use kvhoist_base::{
    block::Segment,
    error::{Error, Result},
};

use cuda::Gpu;

/// The cargo features of the engines, and whether this build has them.
pub const ENGINES: [(&str, bool); 3] =
    [("cuda", cfg!(feature = "cuda")), ("cufile", cfg!(feature = "cufile")), ("rdma", cfg!(feature = "rdma"))];

/// The names of the copy engines, and of the processor that copies without one: labels of metrics.
pub const COPY_ENGINES: [&str; 3] = ["memcpy", "cuda", "gdr"];

/// The engines of this build, and those that it left out, in words.
pub fn engines_in_words() -> String {
    let names = |built| {
        let names: Vec<&str> = ENGINES.iter().filter(|engine| engine.1 == built).map(|engine| engine.0).collect();
        names.join(", ")
    };
    match (names(true).as_str(), names(false).as_str()) {
        (built, "") => format!("built with {built}"),
        ("", left_out) => format!("built without {left_out}"),
        (built, left_out) => format!("built with {built}; without {left_out}"),
    }
}

/// Why the engine of this cargo feature cannot be used; `None` if this build has it.
pub fn left_out(feature: &str) -> Option<String> {
    let is_built = ENGINES.contains(&(feature, true));
    (!is_built).then(|| not_built(feature))
}

fn not_built(feature: &str) -> String {
    format!("this build of kvhoist has no cargo feature `{feature}`; build it with `--features {feature}`")
}

/// Copies that start together and complete together, with owners that keep their memory alive.
pub struct CopyBatch {
    ops: Vec<CopyOp>,
    /// Sum of the lengths. Kept because every copy asks for it, and a batch can hold thousands of copies.
    bytes: u64,
    direction: Direction,
    /// Dropped with the batch, when the hardware is done with the memory.
    _owners: Vec<Arc<dyn Any + Send + Sync>>,
    prompt: bool,
    regions: Vec<CopyRegion>,
}

impl CopyBatch {
    /// A batch of copies. Where destinations overlap, any of their bytes may be there in the end.
    ///
    /// # Safety
    /// Until the batch is dropped every `src` range must stay readable and unwritten, every `dst`
    /// range must stay writable and untouched by others, and `owners` must keep both mapped.
    pub unsafe fn new(ops: Vec<CopyOp>, direction: Direction, owners: Vec<Arc<dyn Any + Send + Sync>>) -> Self {
        let bytes = ops.iter().map(|op| op.len as u64).sum();
        CopyBatch { ops, bytes, direction, _owners: owners, prompt: false, regions: Vec::new() }
    }

    /// Marks the batch as latency-critical: a caller waits for it alone while further batches follow. An engine that
    /// groups batches puts few others in its group.
    #[must_use]
    pub fn prompt(self) -> Self {
        CopyBatch { prompt: true, ..self }
    }

    /// Names the registered regions that the ranges lie in, apart from the cache's own memory.
    ///
    /// # Safety
    /// Each region must stay mapped to the same memory until every engine that received the batch has been asked to
    /// [`forget`](CopyEngine::forget) the region, or has been dropped.
    #[must_use]
    pub unsafe fn within(self, regions: Vec<CopyRegion>) -> Self {
        CopyBatch { regions, ..self }
    }

    /// Registered regions that the ranges lie in, apart from the cache's own memory.
    pub fn regions(&self) -> &[CopyRegion] {
        &self.regions
    }

    /// Whether the batch is [latency-critical](Self::prompt).
    pub fn is_prompt(&self) -> bool {
        self.prompt
    }

    /// The copies.
    pub fn ops(&self) -> &[CopyOp] {
        &self.ops
    }

    /// Direction of all copies.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// Sum of the lengths in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// A batch with one owner, which is returned with its type; engines see untyped owners.
pub struct OwnedBatch<O> {
    batch: CopyBatch,
    owner: Arc<O>,
}

impl<O: Send + Sync + 'static> OwnedBatch<O> {
    /// # Safety
    /// As for [`CopyBatch::new`].
    pub unsafe fn new(ops: Vec<CopyOp>, direction: Direction, owner: O) -> Self {
        let owner = Arc::new(owner);
        // SAFETY: the caller upholds the same contract.
        let batch = unsafe { CopyBatch::new(ops, direction, vec![Arc::clone(&owner) as _]) };
        OwnedBatch { batch, owner }
    }

    /// As [`CopyBatch::prompt`].
    pub fn prompt(self) -> Self {
        OwnedBatch { batch: self.batch.prompt(), ..self }
    }

    /// As [`CopyBatch::within`].
    ///
    /// # Safety
    /// As for [`CopyBatch::within`].
    pub unsafe fn within(self, regions: Vec<CopyRegion>) -> Self {
        // SAFETY: the caller upholds the same contract.
        OwnedBatch { batch: unsafe { self.batch.within(regions) }, ..self }
    }

    /// Sum of the lengths of the copies.
    pub fn bytes(&self) -> u64 {
        self.batch.bytes()
    }

    /// As [`CopyEngine::is_of_tier`].
    pub fn is_of_tier<C: CopyEngine>(&self, engine: &C) -> bool {
        engine.is_of_tier(&self.batch)
    }

    /// Copies all of it and returns the owner. After an error the destination is undefined.
    pub async fn copy<C: CopyEngine>(self, engine: &C) -> (Result<()>, O) {
        let (result, batch) = engine.copy(self.batch).await;
        drop(batch);
        (result, Arc::into_inner(self.owner).expect("every engine returns the whole batch"))
    }
}

/// Result of offering a batch to an engine that may refuse it.
pub enum Offered {
    /// The batch was copied, or failed.
    Copied(Result<()>, CopyBatch),
    /// The batch was not taken: part of its memory is not registered, or the engine is not up.
    Refused(CopyBatch),
}

/// Copies batches between memories; completes on the reactor.
///
/// Dropping a returned future abandons the result; the batch and its owners live until the
/// hardware is done with them.
pub trait CopyEngine: 'static {
    /// The name shown in metrics and by `kvhoist doctor`.
    fn name(&self) -> &'static str;

    /// Copies all of `batch`. After an error the destination is undefined.
    fn copy(&self, batch: CopyBatch) -> impl Future<Output = (Result<()>, CopyBatch)>;

    /// Whether the batch's device is the one that [`fault`](Self::fault) speaks of: of several, that of the device
    /// tier.
    fn is_of_tier(&self, batch: &CopyBatch) -> bool {
        let _ = batch;
        true
    }

    /// Why the engine can no longer copy to and from the device, once it cannot.
    fn fault(&self) -> Option<String> {
        None
    }

    /// Copies to and from memory of this GPU, too, from now on. Blocks the thread for some 300 ms, the first time.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with the reason.
    fn add_gpu(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let _ = gpu;
        Err(Error::unavailable("device", "this cache was opened without a CUDA device"))
    }

    /// Drops the engine's registration of a region. The region may be unmapped once this resolves. No batch in the
    /// region may be in flight or be submitted later.
    fn forget(&self, region: &CopyRegion) -> impl Future<Output = ()> {
        let _ = region;
        std::future::ready(())
    }

    /// Whether the device can compute checksums of blocks. A block on its way there is then verified there alone.
    fn checksums(&self) -> bool {
        false
    }

    /// Checksums `segments`, in order, on the device. `None` if the engine cannot; it has then done nothing. `owner` is
    /// dropped when the device is done with the memory.
    ///
    /// # Safety
    /// While `owner` lives the segments must stay mapped device memory that nothing writes to.
    unsafe fn checksum(
        &self,
        segments: &[Segment],
        owner: Arc<dyn Any + Send + Sync>,
    ) -> impl Future<Output = Option<Result<u64>>> {
        let _ = (segments, owner);
        std::future::ready(None)
    }

    /// Expected duration of the batch.
    fn cost(&self, batch: &CopyBatch) -> Duration;
}
