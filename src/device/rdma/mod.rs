//! RDMA devices, through libibverbs (rdma-core).
//!
//! The library is loaded at run time, so the same binary runs on machines without it. [`devices`] lists them,
//! and each says why it cannot be used. Used for copies between host and device memory
//! ([`device::gdr`](crate::device::gdr)).

mod discover;
mod library;
mod ports;
mod sys;
mod sysfs;
mod verbs;

pub(crate) use discover::open;
pub use discover::{Device, Discovery, devices, discover};
pub(crate) use ports::LoopbackPath;
pub use ports::{Gid, GidKind, LinkLayer, Port};
pub(crate) use sys::{Completion, SIGNALLED, Sge, WorkRequest};
pub use sysfs::Distance;
pub(crate) use verbs::{CompletionQueue, MemoryRegion, ProtectionDomain, QueuePair, VerbsError, status_text};
