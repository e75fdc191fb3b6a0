//! A tiered cache for fixed-size blocks: GPU HBM, host DRAM, NVMe.
//!
//! See [`Cache`] for what callers hold, [`Config`] for what it is opened with, [`PrefixChain`] for keys, [`store`] for
//! looking at a store on disk without opening a cache on it.
//!
//! Nothing here spawns onto the caller's runtime: a reactor thread of the cache's own moves the blocks, so its futures
//! can be awaited anywhere, and on a plain thread with [`block_on`].

mod bits;
pub mod block;
mod block_on;
mod cache;
pub mod checksum;
pub mod config;
pub mod device;
pub mod disk;
pub mod error;
mod fork;
pub mod index;
pub mod io;
pub mod machine;
pub mod memory;
mod metrics;
mod mover;
mod runtime;
pub mod service;
mod shield;
pub mod size;
mod state;
pub mod store;
mod sync;
mod workers;

pub use block::{BlockKey, Layout, Namespace, PrefixChain, Route, Segment, Tier};
pub use block_on::block_on;
#[cfg(feature = "sim")]
pub use cache::sim;
pub use cache::{
    Builder, Cache, Completion, CompletionQueue, CopyStats, DeviceLease, LayerLoad, Lease, Loan, Region, Reservation,
    RouteStats, Stats, TierStats,
};
pub use config::{
    Config, CopyMethod, CopyPrefer, CufileMode, DeviceKind, DirectIo, DiskPath, Eviction, GdrMode, StorageKind,
    WritePolicy,
};
pub use device::{cuda as gpu, rdma};
pub use error::{Error, HeldSlots, Result, ServiceFault};
pub use index::PrefixMatch;
pub use mover::LayerDone;

/// The README's program compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;
