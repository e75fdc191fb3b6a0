//! Bindings of NVIDIA's libcufile: transfers between files and device memory, at best without host memory in between.
//!
//! The library is loaded at run time and never linked. Transfers always work: without nvidia-fs and PCI peer-to-peer,
//! libcufile reads into host memory of its own and copies (compat mode), without reporting it. Only its statistics show
//! which path a transfer took; [`Driver::counters`] reads them.
//!
//! - [`Library`]: the functions, and the meaning of their errors.
//! - [`Driver`]: the initialized library, once per process, on a thread that can be abandoned.
//! - `Handle`, `Registration`, `Batch`: a registered file, a registered range of device memory, and a batch of
//!   transfers.

mod driver;
mod handles;
mod library;
mod stats;

pub use driver::Driver;
pub use library::{CufileError, Library};
pub use stats::Counters;

pub(crate) use handles::{Batch, BatchEntry, BatchEvent, Handle, Registration};
