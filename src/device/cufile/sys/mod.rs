//! NVIDIA's libcufile: transfers between files and device memory, in the best case without host memory between them.
//!
//! The library is looked for at run time and never linked. It always *works*: where neither nvidia-fs nor PCI
//! peer-to-peer is there it reads into memory of its own and copies, which it calls its compat mode and tells nobody.
//! Only its statistics say which of the two a transfer was; [`Driver::counters`] reads them.
//!
//! - [`Library`]: the functions, all there, and what their failures mean.
//! - [`Driver`]: the library initialised, once a process, by a thread that may be given up on.
//! - `Handle`, `Registration`, `Batch`: a file, a range of device memory, and up to 128 transfers, known to it.

mod driver;
mod library;
mod objects;
mod stats;

pub use driver::Driver;
pub use library::{CufileFault, Library};
pub use stats::Counters;

pub(crate) use objects::{Batch, BatchEntry, BatchEvent, Handle, Registration};
