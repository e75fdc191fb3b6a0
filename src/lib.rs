//! A tiered cache for fixed-size blocks: GPU HBM, host DRAM, NVMe.
//!
//! ```
//! use kvhoist::{Cache, PrefixChain, block_on};
//!
//! # let directory = tempfile::tempdir()?;
//! let config = Cache::builder().namespace("llama-3-8b bf16").block_bytes(64 << 10).host_bytes(16 << 20);
//! let cache = block_on(config.disk(directory.path(), 64 << 20).open())?;
//! let tokens: Vec<u32> = (0..128).collect();
//! let keys = PrefixChain::new(&cache.config().namespace).extend_tokens(&tokens, 64)?; // 64 tokens a block
//! block_on(cache.store(&keys[0], None, &[7; 64 << 10]))?;
//! let resident = cache.match_prefix(&keys).len(); // leading blocks; no I/O
//! let block = block_on(cache.fetch(&keys[0]))?.expect("stored above"); // derefs to its bytes
//! assert_eq!((resident, block[0]), (1, 7));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`Cache`] is the main type, [`Config`] its settings, [`PrefixChain`] makes keys, and [`store::Store`] is a store on
//! disk without a cache.
//!
//! Nothing here spawns onto the caller's runtime: the cache's own reactor thread moves the blocks, so its futures can
//! be awaited anywhere, and on a plain thread with [`block_on`].
//!
//! The cargo features `cuda`, `cufile` and `rdma` are on by default and have the engines for CUDA devices. A service
//! without a GPU can leave them out.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

#[macro_use]
extern crate kvhoist_base;

mod block;
mod block_on;
mod cache;
mod config;
mod device;
mod disk;
#[doc(hidden)]
pub mod internals;
mod io;
mod machine;
mod metrics;
mod mover;
pub mod remote;
mod runtime;
mod shield;
mod size;
mod state;
pub mod store;
mod sync;
mod task;
mod urgency;

use kvhoist_base::{bits, checksum, error, fork, memory};
use kvhoist_index as index;

pub use block::Route;
pub use block_on::block_on;
pub use cache::{Cache, CompletionQueue, DeviceLease, LayerLoad, Lease, Region, Reservation, Stats, TierStats};
pub use config::{
    Capacity, Config, CopyMethod, CopyPrefer, DeviceConfig, DeviceKind, DirectIo, DiskConfig, DiskPath, EngineMode,
    Eviction, HostConfig, Limits, RemoteConfig, RemotePolicy, StorageKind, WritePolicy,
};
#[doc(inline)]
pub use kvhoist_base::block::{BlockGeometry, BlockKey, Layout, Namespace, PrefixChain, Segment, Tier};
#[doc(inline)]
pub use kvhoist_base::error::{Error, ServiceFault};
#[doc(inline)]
pub use kvhoist_base::memory::{Memory, SharedMemory};
pub use metrics::Durations;

/// The CUDA devices of this machine. Only with the cargo feature `cuda`.
#[cfg(feature = "cuda")]
pub mod gpu {
    pub use crate::device::cuda::Device;
}

/// The RDMA devices of this machine. Only with the cargo feature `rdma`.
#[cfg(feature = "rdma")]
pub mod rdma {
    pub use crate::device::rdma::Device;
}

/// Checks that the README's program compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
#[doc = include_str!("../docs/start/rust.md")]
struct ReadmeDoctests;
