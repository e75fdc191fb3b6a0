//! A tiered cache for fixed-size blocks: GPU HBM, host DRAM, NVMe.
//!
//! [`Cache`] is the main type, [`Config`] its settings, [`PrefixChain`] makes keys, and [`store`] inspects a store on
//! disk without a cache.
//!
//! Nothing here spawns onto the caller's runtime: the cache's own reactor thread moves the blocks, so its futures can
//! be awaited anywhere, and on a plain thread with [`block_on`].

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
#[doc(hidden)]
pub use cache::seams;
pub use cache::{
    Cache, Completion, CompletionQueue, CopyStats, DeviceLease, Keys, LayerLoad, Lease, Loan, Region, Reservation,
    RouteStats, Stats, TierStats,
};
pub use config::{
    Capacity, Config, CopyMethod, CopyPrefer, CufileMode, DeviceConfig, DeviceKind, DirectIo, DiskConfig, DiskPath,
    Eviction, GdrMode, HostConfig, Limits, StorageKind, WritePolicy,
};
pub use device::{cuda as gpu, rdma};
pub use error::{Error, HeldSlots, Result, ServiceFault};
pub use index::PrefixMatch;
pub use mover::LayerDone;

/// Checks that the README's program compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeDoctests;
