//! A store at rest: what it is ([`inspect`]) and whether it is sound ([`verify`]), without a cache on it and
//! without a byte of it created or changed; and how to remove it ([`wipe`]).
//!
//! [`inspect`] and [`verify`] open the files read-only, `O_DIRECT` where that works, and take the store's lock shared:
//! they run beside each other, but not beside a cache, unless [`Options::allow_in_use`] says so. All of them block; in
//! async code, call them on a thread where that is allowed (`tokio::task::spawn_blocking`).
//!
//! ```
//! # fn main() -> kvhoist::Result<()> {
//! # let dir = tempfile::tempdir().expect("a directory");
//! # let config = kvhoist::Config {
//! #     direct_io: kvhoist::DirectIo::Prefer,
//! #     disks: vec![kvhoist::DiskPath { path: dir.path().into(), blocks: 8 }],
//! #     ..Default::default()
//! # };
//! # let cache = kvhoist::block_on(kvhoist::Cache::open(config))?;
//! # kvhoist::block_on(cache.close())?;
//! # let path = dir.path();
//! use kvhoist::store;
//! let report = store::verify(&[path], &store::Options::default(), |_| std::ops::ControlFlow::Continue(()))?;
//! assert!(report.is_clean(), "{:?}", report.faults.listed());
//! # Ok(())
//! # }
//! ```

mod engine;
mod fault;
mod inspect;
mod open;
mod sizing;
mod tables;
mod verify;
mod wipe;

pub use fault::{Fault, FaultKind, Faults};
pub use inspect::{Inspection, Member, inspect};
pub use open::Shape;
pub use sizing::{path_bytes, slots_within};
pub use verify::{Duplicate, Progress, Verification, verify};
pub use wipe::{Doomed, wipe};

use crate::{
    config::{DirectIo, StorageKind},
    error::{Error, Result},
};

/// How to look at a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// What serves the reads.
    pub storage: StorageKind,
    /// What to do where a path has no direct I/O.
    pub direct_io: DirectIo,
    /// Slots that are read at the same time, 1 to 1024. Each costs a buffer of 1 MiB at most.
    pub depth: u32,
    /// Look at a store that a cache has open, too. Blocks on the move then look damaged: what such a look finds is
    /// proven only by a second one with the cache closed.
    pub allow_in_use: bool,
    /// Faults, and duplicates, that are listed; all are counted.
    pub listed_max: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            storage: StorageKind::Auto,
            direct_io: DirectIo::Prefer,
            depth: 32,
            allow_in_use: false,
            listed_max: 20,
        }
    }
}

impl Options {
    fn validate(&self) -> Result<()> {
        if (1..=1024).contains(&self.depth) {
            return Ok(());
        }
        let (found, expected) = (self.depth.to_string(), "1 to 1024 slots at the same time".into());
        Err(Error::Argument { what: "depth", found, expected })
    }
}
