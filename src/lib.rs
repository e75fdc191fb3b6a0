//! A tiered cache for fixed-size blocks: GPU HBM, pinned host DRAM, NVMe.

pub mod block;
mod block_on;
mod cache;
pub mod checksum;
pub mod config;
pub mod copy;
pub mod error;
pub mod index;
pub mod io;
mod metrics;
mod mover;
mod sync;
pub mod tier;

pub use block::{BlockKey, Layout, Namespace, PrefixChain, Route, Segment, Tier};
pub use block_on::block_on;
pub use cache::{
    Builder, Cache, Completion, CompletionQueue, DeviceLease, Lease, Region, Reservation, RouteStats, Stats, TierStats,
};
pub use config::{Config, DirectIo, DiskPath, StorageKind, WritePolicy};
pub use error::{Error, Result};
pub use index::PrefixMatch;
