//! Stores beyond the node: object stores and Redis.
//!
//! [`RemoteStore`] is what the cache asks of one; programs implement it.
//!
//! The rest is the remote tier as callers and the reactor share it: pure data behind a lock of its own. It is a source
//! behind a miss, and a sink beside the disk: blocks that it brings are stored as any new block (`mover/remote.rs`).

mod buffer;
pub(crate) mod format;
mod health;
mod presence;
mod removed;
mod store;
mod tier;
mod uploads;
mod wanted;
mod writes;

pub use buffer::ReadBuffer;
pub use store::{Capabilities, Created, Object, Page, RemoteError, RemoteFuture, RemoteStore};

pub(crate) use buffer::Slot;
pub(crate) use format::Space;
pub(crate) use health::FAILURES_MAX;
pub(crate) use presence::ReadBlock;
pub(crate) use tier::{Figures, Limits, Remote};
pub(crate) use wanted::{Batch, Read};
