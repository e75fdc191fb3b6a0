//! What callers ask of the reactor.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::{
    load::Numbered,
    progress::LayerJobs,
    region::RegionUse,
    results::CallResults,
    store::{FailedStore, StoreCall},
    submit::PlannedRead,
};
use crate::{
    block::{BlockKey, Tier},
    device::cuda::Gpu,
    error::Result,
    io::Summed,
    state::{PendingWrite, Pin, Room},
};

/// A command in the channel to the reactor, with the room that it takes up there.
pub(crate) type QueuedCommand = (Command, Room);

/// What callers ask of the reactor, through a channel of bounded [room](crate::state::Rooms).
pub(crate) enum Command {
    /// Make `key` resident in `to`. Its flight has begun.
    Promote { key: BlockKey, to: Tier },
    /// Copy blocks of a call into foreign memory, each with its number there: true for each that was copied.
    Load { jobs: Vec<Numbered>, results: Arc<CallResults> },
    /// Copy blocks into foreign memory, layer by layer.
    LoadLayers(LayerJobs),
    /// Store blocks of a call from foreign memory, each with its number there.
    StoreFrom { jobs: Vec<Numbered>, call: Arc<StoreCall> },
    /// Register a region with the storage; the answer says whether the kernel has pinned it.
    Register { region: RegionUse, reply: oneshot::Sender<bool> },
    /// Copy to and from memory of this GPU, too.
    AddGpu { gpu: Arc<Gpu>, reply: oneshot::Sender<Result<()>> },
    /// Write the record pages that name a block that was removed, or all that are out of date.
    Forget { key: Option<BlockKey>, reply: oneshot::Sender<Result<()>> },
    /// Flush what is written.
    Flush { reply: oneshot::Sender<Result<()>> },
    /// Write what is dirty and flush.
    Sync { reply: oneshot::Sender<Result<()>> },
}

/// Requests from holders of a slot. They never wait behind requests for a slot, or both could wait for ever: the
/// channel has no bound of its own. The number of pins bounds what it holds.
pub(crate) enum Urgent {
    /// Write a block to disk.
    Write(PendingWrite),
    /// Make the storage and the copy engine forget foreign memory that no movement uses. Done when the hold is dropped.
    GiveBack { region: RegionUse },
    /// End a read that a caller had submitted, with what came of it; nothing where its thread died.
    EndRead(Box<PlannedRead>, Summed),
    /// Record blocks of a call that I/O threads write and have checksummed, and end their stores with their payloads.
    EndStores { call: Arc<StoreCall>, group: usize },
    /// End a store whose write by an I/O thread has failed, or was lost.
    EndStore { call: Arc<StoreCall>, store: Box<FailedStore> },
    /// Load blocks whose reads to their caller's memory have failed.
    Load { jobs: Vec<Numbered>, results: Arc<CallResults> },
    /// Copy a device block into `buf`, which is resized to fit.
    ReadDevice(DeviceRead),
    /// Finish the movements in flight, write dirty blocks, flush, and end. The caller waits for the end itself, and
    /// does not have to wait for room in the channel.
    Close,
}

/// A read of a pinned device block.
pub(crate) struct DeviceRead {
    pub(crate) pin: Arc<Pin>,
    pub(crate) buf: Vec<u8>,
    /// One of [`Config::movements_max`](crate::Config::movements_max), given back when the copy has ended.
    pub(crate) room: Room,
    pub(crate) reply: oneshot::Sender<Result<Vec<u8>>>,
}

/// One result per block, in the order of the request, to the caller.
pub(crate) type Reply = Box<dyn FnOnce(Vec<Result<bool>>) + Send>;
