//! [`Cache`]: what callers hold.

// The first, and apart from the others: the page of `Cache` has the methods in the order of its modules.
mod calls;

mod blocks;
mod computations;
mod compute;
mod deleted;
mod durable;
mod exported;
mod fetch;
mod hints;
mod layers;
mod lease;
#[cfg(all(test, feature = "sim"))]
mod model;
mod moves;
mod open;
mod park;
mod queue;
mod ranges;
mod region;
mod regions;
#[cfg(feature = "sim")]
pub mod seams;
mod stats;

pub use exported::{Kind, Metric, Sample, WEAR, metrics};
pub use layers::{LayerLoad, LayerReports};
pub use lease::{DeviceLease, Lease, Reservation};
pub use park::Parked;
pub use queue::CompletionQueue;
pub use ranges::Ranges;
pub use region::{Region, pin_region};
pub use regions::MemoryOwner;
pub use stats::{Stats, TierStats, validate};

use std::sync::Arc;

use tokio::sync::{oneshot, watch};

use crate::{
    error::{Error, Result},
    fork::HomeBound,
    mover::{Command, QueuedCommand, Submitter, Urgent},
    shield::shield,
    state::{Pin, Room, Shared},
};

/// A tiered cache of fixed-size blocks.
///
/// Cheap to clone; usable from any thread and any async runtime. When the last handle is dropped
/// the cache writes what it must and closes in the background; [`close`](Cache::close) waits for
/// that. Leases may outlive the cache.
///
/// A forked child cannot use it: the reactor's thread and the memory stay with the parent. To drop there what was
/// inherited, this and leases, reservations and queues, does nothing.
#[derive(Clone)]
pub struct Cache {
    inner: Arc<HomeBound<OpenCache>>,
}

/// What the handles of a cache share.
struct OpenCache {
    shared: Arc<Shared>,
    submitter: Arc<Submitter>,
    end: watch::Receiver<Option<Result<()>>>,
    regions: regions::Regions,
    /// Blocks that callers compute.
    computations: computations::Computations,
    storage_name: &'static str,
    facts: Facts,
}

/// What a cache was opened with, beside its settings.
struct Facts {
    names: deleted::Names,
    direct_io: bool,
    /// The arena was registered with the ring.
    registered: bool,
    /// The device, where it is a CUDA one.
    gpu: Option<Arc<crate::device::cuda::Gpu>>,
    /// Whether copies go through an RDMA device.
    gdr: crate::device::GdrStatus,
}

impl Cache {
    /// Waits for the end of the reactor: the result of every `close`.
    async fn ended(&self) -> Result<()> {
        let mut end = self.inner.end.clone();
        let ended = shield(end.wait_for(Option::is_some)).await.ok();
        ended.and_then(|result| result.clone()).unwrap_or(Err(Error::Closed))
    }

    async fn ask(&self, command: impl FnOnce(oneshot::Sender<Result<()>>) -> Command) -> Result<()> {
        let (reply, receiver) = oneshot::channel();
        self.send((command(reply), self.room().await?));
        shield(receiver).await.unwrap_or(Err(Error::Closed))
    }

    /// Room for a command to the reactor, up to the deadline.
    async fn room(&self) -> Result<Room> {
        self.shared().room(&self.shared().commands, "room for a command").await
    }

    /// Sends a command. One that finds no reactor is dropped, and its reply.
    fn send(&self, command: QueuedCommand) {
        drop(self.inner.submitter.commands.send(command));
    }

    /// Refuses what is not one block.
    fn check_length(&self, data: &[u8]) -> Result<()> {
        let block_bytes = self.config().block_bytes;
        if data.len() == block_bytes {
            return Ok(());
        }
        Err(Error::argument("data", format!("{} bytes", data.len()), format!("one block of {block_bytes} bytes")))
    }

    fn send_urgent(&self, request: Urgent) -> Result<()> {
        self.inner.submitter.ends.urgent.send(request).map_err(|_| Error::Closed)
    }

    fn need_device(&self) -> Result<()> {
        if self.inner.shared.device.is_some() {
            return Ok(());
        }
        let reason = "the cache was opened with device_blocks = 0".to_owned();
        Err(Error::unavailable("device", reason))
    }

    fn shared(&self) -> &Arc<Shared> {
        &self.inner.shared
    }
}

debug_fields!(Cache, cache => config: cache.config());

/// A pin is all that keeps a slot from being reused: it may be dropped on any thread.
const _: fn() = || {
    fn sendable<T: Send + Sync + 'static>() {}
    sendable::<Cache>();
    sendable::<Pin>();
};
