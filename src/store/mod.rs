//! A store at rest: what it contains ([`Store::inspect`]) and whether it is intact ([`Store::verify`]), without opening
//! a cache and without creating or changing anything; and how to remove it ([`Store::wipe`]).
//!
//! [`Store::inspect`] and [`Store::verify`] open the files read-only, with `O_DIRECT` if possible, and take a shared
//! lock on the store: they can run concurrently, but not while a cache has the store open, unless
//! [`Store::allow_in_use`] is set. All of these functions block; in async code, call them on a blocking thread
//! (`tokio::task::spawn_blocking`).
//!
//! ```
//! # fn main() -> Result<(), kvhoist::Error> {
//! # let dir = tempfile::tempdir().expect("a directory");
//! # let config = kvhoist::Config::default().direct_io(kvhoist::DirectIo::Prefer).disk(dir.path(), 2 << 20);
//! # let cache = kvhoist::block_on(kvhoist::Cache::open(config))?;
//! # kvhoist::block_on(cache.close())?;
//! # let path = dir.path();
//! use std::ops::ControlFlow;
//!
//! use kvhoist::store::Store;
//!
//! let store = Store::at([path]);
//! println!("{} blocks", store.inspect()?.full);
//! let report = store.verify(|_| ControlFlow::Continue(()))?;
//! assert!(report.is_clean(), "{:?}", report.faults());
//! # Ok(())
//! # }
//! ```

mod engine;
mod fault;
mod inspect;
mod open;
mod tables;
mod verify;
mod wipe;

use std::path::{Path, PathBuf};

pub use fault::Fault;
pub use inspect::{Inspection, Member};
pub use open::Shape;
pub use verify::{Duplicate, Verification};

use crate::{
    config::{DirectIo, StorageKind},
    error::{Error, Result},
};

/// A store that no cache has open: its paths, and how they are read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Store {
    paths: Vec<PathBuf>,
    options: Options,
}

/// How a store is read.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Options {
    storage: StorageKind,
    direct_io: DirectIo,
    depth: u32,
    allow_in_use: bool,
    listed_max: usize,
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

impl Store {
    /// The store at `paths`: all of its files, directories or devices, in any order. Nothing is opened yet.
    pub fn at<P: Into<PathBuf>>(paths: impl IntoIterator<Item = P>) -> Self {
        Store { paths: paths.into_iter().map(Into::into).collect(), options: Options::default() }
    }

    /// The storage engine for reads; [`StorageKind::Auto`] by default.
    pub fn storage(mut self, storage: StorageKind) -> Self {
        self.options.storage = storage;
        self
    }

    /// What to do if a path has no direct I/O; [`DirectIo::Prefer`] by default.
    pub fn direct_io(mut self, direct_io: DirectIo) -> Self {
        self.options.direct_io = direct_io;
        self
    }

    /// Concurrent slot reads of [`verify`](Self::verify), 1 to 1024; 32 by default. Each needs a buffer of at most
    /// 1 MiB.
    pub fn depth(mut self, depth: u32) -> Self {
        self.options.depth = depth;
        self
    }

    /// Whether to read a store even if a cache has it open, or opens it meanwhile; not by default. Blocks that are
    /// being written then look damaged: confirm faults with a second run while the cache is closed.
    pub fn allow_in_use(mut self, allow_in_use: bool) -> Self {
        self.options.allow_in_use = allow_in_use;
        self
    }

    /// Largest number of faults, and of duplicates, to list; 20 by default. All are counted.
    pub fn listed_max(mut self, listed_max: usize) -> Self {
        self.options.listed_max = listed_max;
        self
    }

    fn paths(&self) -> Vec<&Path> {
        self.paths.iter().map(PathBuf::as_path).collect()
    }

    fn validate(&self) -> Result<()> {
        if (1..=1024).contains(&self.options.depth) {
            return Ok(());
        }
        Err(Error::argument("depth", self.options.depth, "1 to 1024 slots at the same time"))
    }
}
