//! What callers ask of the reactor.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::{
    progress::LayerJobs,
    region::{Job, RegionUse},
};
use crate::{
    block::{BlockKey, Tier},
    error::Result,
    state::{PendingWrite, Pin},
};

/// What callers ask of the reactor, through a bounded channel.
pub(crate) enum Command {
    /// Make `key` resident in `to`. Its flight has begun.
    Promote { key: BlockKey, to: Tier },
    /// Copy blocks into foreign memory: true for each that was copied.
    Load { jobs: Vec<Job>, reply: Reply },
    /// Copy blocks into foreign memory, layer by layer.
    LoadLayers(LayerJobs),
    /// Store blocks from foreign memory: true for each that was stored.
    StoreFrom { jobs: Vec<Job>, reply: Reply },
    /// Have the storage keep a region at hand; whether it then does.
    Register { region: RegionUse, reply: oneshot::Sender<bool> },
    /// Have the storage let go of a region that no movement uses. Done when the hold is dropped.
    Unregister { region: RegionUse },
    /// Write the record pages that name a block which is not there any more.
    Forget { key: BlockKey, reply: oneshot::Sender<Result<()>> },
    /// Flush what is written.
    Flush { reply: oneshot::Sender<Result<()>> },
    /// Write what is dirty and flush.
    Sync { reply: oneshot::Sender<Result<()>> },
}

/// What those ask who hold a slot already. They never wait behind those who want one, or both could
/// wait for ever: the channel has no bound of its own. It never holds more than there are pins.
pub(crate) enum Urgent {
    /// Write a block to disk.
    Write(PendingWrite),
    /// Take foreign memory, which no movement uses, from the hands of the copy engine. Done when the hold is dropped.
    GiveBack { region: RegionUse },
    /// Copy a device block into `buf`, which is resized to fit.
    ReadDevice(DeviceRead),
    /// Finish what is under way, write what is dirty, flush, and end. Whoever asks waits for the end itself, and need
    /// not wait for room in the channel to ask.
    Close,
}

/// A read of a pinned device block.
pub(crate) struct DeviceRead {
    pub(crate) pin: Arc<Pin>,
    pub(crate) buf: Vec<u8>,
    /// One of [`Config::movements_max`](crate::Config::movements_max), given back when the copy has ended.
    pub(crate) permit: OwnedSemaphorePermit,
    pub(crate) reply: oneshot::Sender<Result<Vec<u8>>>,
}

/// One result per block, in the order of the request, to whoever asked.
pub(crate) type Reply = Box<dyn FnOnce(Vec<Result<bool>>) + Send>;
