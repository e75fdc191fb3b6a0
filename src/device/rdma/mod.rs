//! RDMA devices, through the verbs library of rdma-core.
//!
//! The library is looked for at run time: the same binary runs where there is none. [`discover`] says what a machine
//! has, and why not more. What is used for is copies between host and device memory
//! ([`device::gdr`](crate::device::gdr)).

mod discover;
mod library;
mod objects;
mod ports;
mod raw;
mod sysfs;

pub(crate) use discover::open;
pub use discover::{Device, Discovery, discover};
pub(crate) use objects::{CompletionQueue, MemoryRegion, ProtectionDomain, QueuePair, VerbsFault, status_text};
pub(crate) use ports::Path;
pub use ports::{Gid, GidKind, LinkLayer, Port};
pub(crate) use raw::{Completion, Piece, SIGNALLED, WorkRequest};
pub use sysfs::Distance;
