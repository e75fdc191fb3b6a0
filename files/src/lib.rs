//! Ranges of any file, to and from host and GPU memory, at the speed of the drives.
//!
//! [`read`] takes a list of ranges (file, offset, length, target) and returns a [`Transfer`], which threads carry out
//! in the order of each drive's files: it can be waited for, awaited, watched range by range, and cancelled.
//! [`write`](fn@write) writes a whole file from pieces of memory, or nothing; [`write_at`] and [`write_into`] change
//! ranges in place.
//!
//! Neighboring ranges are read together, in pieces of [`Options::piece_bytes`]. What the page cache has is copied from
//! there; the rest is read with direct I/O, which leaves the page cache alone, straight into host memory that is
//! aligned as the file is, and through bounce buffers otherwise: file offsets, addresses and lengths need no alignment.
//! A file system without direct I/O is read through the page cache. Bytes for a GPU pass through pinned bounce buffers,
//! of which a process keeps as many as it needed at once, or come straight from the drive by libcufile ([`Mode`]).
//! [`Report`] says which bytes took which way.
//!
//! [`safetensors`] reads the header of that format.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("weights");
//! use kvhoist_files::{Memory, Options, Range, SourceFile};
//!
//! std::fs::write(&path, [7; 10_000])?;
//! let file = SourceFile::open(&path)?;
//! let mut bytes = vec![0_u8; 3_000];
//! let ranges = vec![Range { file: 0, offset: 5, len: 3_000, address: bytes.as_mut_ptr() as usize }];
//! // SAFETY: `bytes` is not touched until the transfer has ended.
//! let transfer = unsafe { kvhoist_files::read(vec![file], ranges, Memory::Host, &Options::default()) }?;
//! let report = transfer.wait()?;
//! assert_eq!((report.bytes, bytes), (3_000, vec![7; 3_000]));
//! # Ok(())
//! # }
//! ```

mod bounce;
#[cfg_attr(not(feature = "cuda"), path = "absent.rs")]
mod cuda;
mod cufile;
mod error;
mod file;
mod held;
#[doc(hidden)]
pub mod internals;
mod memory;
mod plan;
mod process;
mod queues;
pub mod safetensors;
mod shared;
mod transfer;
mod worker;
mod write;

pub use error::Error;
pub use file::SourceFile;
pub use held::{Arrival, FileIdentity};
pub use memory::Memory;
pub use plan::Range;
pub use shared::{Progress, Report};
pub use transfer::{Canceller, Mode, Options, Transfer, read};
pub use write::{write, write_at, write_into};

/// Results of this crate.
pub type Result<T> = std::result::Result<T, Error>;
