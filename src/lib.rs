//! A tiered cache for fixed-size blocks: GPU HBM, pinned host DRAM, NVMe.

pub mod block;
pub mod checksum;
pub mod config;
pub mod error;
pub mod io;
pub mod tier;

pub use config::Config;
pub use error::{Error, Result};
