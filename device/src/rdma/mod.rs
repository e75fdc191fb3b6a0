//! RDMA devices, through libibverbs (rdma-core).
//!
//! The library is loaded at run time, so the same binary runs on machines without it. [`Device::all`] lists the
//! devices, and [`Device::obstacle`] says why one cannot be used. Used for copies between host and device memory
//! ([`device::gdr`](crate::gdr)).

mod discover;
mod library;
mod ports;
mod queue_pair;
mod sys;
mod sysfs;
mod verbs;
mod work;

pub(crate) use discover::open;
pub use discover::{Device, Discovery, discover};
pub(crate) use ports::LoopbackPath;
pub use ports::{Gid, GidKind, LinkLayer, Port};
pub(crate) use queue_pair::QueuePair;
pub use sysfs::Distance;
pub(crate) use verbs::{CompletionQueue, MemoryRegion, ProtectionDomain, VerbsError, status_text};
pub(crate) use work::{Completion, SIGNALLED, Sge, WorkRequest};
