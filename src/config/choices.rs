//! The settings that are one of a few choices.

pub use kvhoist_device::{CopyMethod, EngineMode};
pub use kvhoist_index::Eviction;
use serde::{Deserialize, Serialize};

/// When a stored block is written to disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum WritePolicy {
    /// Immediately; `store` resolves when the block is written to disk (but not flushed).
    #[default]
    WriteThrough,
    /// After [`selective_hits`](super::DiskConfig::selective_hits) hits; `store` resolves when the block is visible.
    WriteThroughSelective,
    /// When the block is evicted from host memory, or at `sync`; `store` resolves when the block is visible.
    WriteBack,
    /// As `WriteBack`, but only blocks that are worth a write: of blocks used as often and as deep in their chains, at
    /// least a quarter is requested again while the disk tier would hold them. A block is written after the blocks
    /// above it, and no more is written than [`write_budget`](super::DiskConfig::write_budget) allows. Other blocks are
    /// dropped when host memory needs their slots, which is counted
    /// ([`Stats::writes_declined`](crate::Stats::writes_declined)) and no error. `sync` and `close` decide on all
    /// blocks that are not on disk yet, and write and flush those that are worth it; the others stay in host memory
    /// only, and are lost at `close`. A block that is used again before it is dropped is decided on anew. Takes about
    /// 32 bytes of memory per slot of the disk tier.
    ByValue,
}

impl WritePolicy {
    /// Every choice.
    #[doc(hidden)]
    pub const ALL: &[WritePolicy] =
        &[WritePolicy::WriteThrough, WritePolicy::WriteThroughSelective, WritePolicy::WriteBack, WritePolicy::ByValue];
}

/// Which blocks are written to the remote tier, behind everything that a caller awaits. No `sync` and no `close` waits
/// for that: what is still to be written at a close is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RemotePolicy {
    /// Blocks that were used in two requests, and those that are [kept](crate::Cache::keep).
    #[default]
    Reused,
    /// Every block that is stored: another node may need it soon.
    Stored,
    /// Blocks that the last tier of the node (disk, or host memory without one) evicts next, before it does: as far as
    /// `remote_upload_bytes_per_s` keeps up with the evictions.
    Evicted,
    /// None: the store is only read.
    Never,
}

impl RemotePolicy {
    /// Every choice.
    #[doc(hidden)]
    pub const ALL: &[RemotePolicy] =
        &[RemotePolicy::Reused, RemotePolicy::Stored, RemotePolicy::Evicted, RemotePolicy::Never];
}

/// The I/O engine of the disk tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum StorageKind {
    /// io_uring, or the thread pool (with a warning) if io_uring is unavailable.
    #[default]
    Auto,
    /// io_uring, or an error.
    Uring,
    /// A pool of threads that call `pread` and `pwrite`.
    Blocking,
}

impl StorageKind {
    /// Every choice.
    #[doc(hidden)]
    pub const ALL: &[StorageKind] = &[StorageKind::Auto, StorageKind::Uring, StorageKind::Blocking];
}

/// The memory of the device tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum DeviceKind {
    /// A CUDA device, or host memory that plays one (with a warning) if there is none.
    #[default]
    Auto,
    /// Host memory that plays a device.
    Simulated,
    /// A CUDA device, or an error.
    Cuda,
}

/// Which copy engine to prefer if two are about equally fast.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum CopyPrefer {
    /// The engine expected to finish first.
    Latency,
    /// The engine with fewer bytes in flight.
    #[default]
    Throughput,
    /// The engine that occupies no multiprocessor and no copy engine of the GPU: an RDMA device, even if it takes up to
    /// twice as long.
    SpareGpu,
}

/// What to do if a path has no direct I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum DirectIo {
    /// Refuse to open.
    #[default]
    Require,
    /// Use the page cache, with a warning.
    Prefer,
}

impl DirectIo {
    /// Every choice.
    #[doc(hidden)]
    pub const ALL: &[DirectIo] = &[DirectIo::Require, DirectIo::Prefer];
}
