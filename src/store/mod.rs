//! A store at rest: what it contains ([`inspect`]) and whether it is intact ([`verify`]), without opening a cache and
//! without creating or changing anything; and how to remove it ([`wipe`]).
//!
//! [`inspect`] and [`verify`] open the files read-only, with `O_DIRECT` if possible, and take a shared lock on the
//! store: they can run concurrently, but not while a cache has the store open, unless [`Options::allow_in_use`] is set.
//! All of these functions block; in async code, call them on a blocking thread (`tokio::task::spawn_blocking`).
//!
//! ```
//! # fn main() -> kvhoist::Result<()> {
//! # let dir = tempfile::tempdir().expect("a directory");
//! # let config = kvhoist::Config::default().direct_io(kvhoist::DirectIo::Prefer).disk(dir.path(), 1 << 20);
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

/// Options of [`inspect`] and [`verify`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The storage engine for reads.
    pub storage: StorageKind,
    /// What to do if a path has no direct I/O.
    pub direct_io: DirectIo,
    /// Concurrent slot reads, 1 to 1024. Each needs a buffer of at most 1 MiB.
    pub depth: u32,
    /// Read a store even if a cache has it open. Blocks that are being written then look damaged: confirm faults with a
    /// second run while the cache is closed.
    pub allow_in_use: bool,
    /// Largest number of faults, and of duplicates, to list; all are counted.
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
        Err(Error::argument("depth", self.depth, "1 to 1024 slots at the same time"))
    }
}
