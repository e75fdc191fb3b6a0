//! What callers ask of the reactor, and what it begins then.

use std::{rc::Rc, sync::Arc};

use tokio::sync::oneshot;

use super::{
    Active, Mover,
    load::Numbered,
    load_call::Coming,
    progress::LayerJobs,
    region::RegionUse,
    results::CallResults,
    store::{FailedStore, StoreCall},
    submit::PlannedRead,
};
use crate::{
    block::{BlockKey, Tier},
    device::{CopyEngine, cuda::Gpu},
    error::Result,
    io::{Storage, Transferred},
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
    /// Copy blocks into foreign memory, layer by layer. Its caller makes the jobs once it has sent this: waking a
    /// sleeping reactor takes as long.
    LoadLayers(oneshot::Receiver<LayerJobs>),
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
    EndRead(Box<PlannedRead>, Option<Transferred>),
    /// Record blocks of a call that I/O threads write and have checksummed, and end their stores with their payloads.
    EndStores { call: Arc<StoreCall>, group: usize },
    /// End a store whose write by an I/O thread has failed, or was lost.
    EndStore { call: Arc<StoreCall>, store: Box<FailedStore> },
    /// Load blocks whose reads to their caller's memory have failed, and copy those that I/O threads read to host slots
    /// as they arrive there.
    Load { jobs: Vec<Numbered>, coming: Vec<Coming>, results: Arc<CallResults> },
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

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Begins what a command asks for.
    pub(super) fn start(self: &Rc<Self>, command: Command) {
        let this = Rc::clone(self);
        match command {
            Command::Promote { key, to } => self.spawn(this.promote(key, to)),
            Command::Load { jobs, results } => self.load(jobs, Vec::new(), results),
            Command::LoadLayers(load) => self.spawn(this.load_layers(load)),
            Command::StoreFrom { jobs, call } => drop(self.spawn_part(this.store_from(jobs, call, Active::new(self)))),
            // If its caller is gone, the memory may be unmapped.
            Command::Register { reply, .. } if reply.is_closed() => {}
            Command::Register { region, reply } => {
                self.register(&region);
                let _ = reply.send(region.is_fixed() && self.storage.registered());
            }
            Command::AddGpu { gpu, reply } => drop(reply.send(self.copy.add_gpu(&gpu))),
            Command::Forget { key, reply } => self.spawn(async move {
                drop(reply.send(this.forget_records(key.as_ref()).await));
            }),
            Command::Flush { reply } => self.spawn(async move {
                drop(reply.send(this.flush().await));
            }),
            Command::Sync { reply } => self.spawn(async move {
                drop(reply.send(this.sync().await));
            }),
        }
    }

    pub(super) fn start_urgent(self: &Rc<Self>, request: Urgent) {
        let this = Rc::clone(self);
        match request {
            Urgent::Write(write) => self.spawn(this.write(write)),
            Urgent::GiveBack { region } => self.spawn(async move {
                this.unregister(&region);
                if let Some(known) = region.lasting {
                    this.copy.forget(&known).await;
                }
                drop(region);
            }),
            Urgent::ReadDevice(DeviceRead { pin, buf, room, reply }) => self.spawn(async move {
                let result = this.read_device(pin, buf).await;
                drop(room);
                drop(reply.send(result));
            }),
            Urgent::Load { jobs, coming, results } => self.load(jobs, coming, results),
            Urgent::EndRead(read, result) => self.spawn(this.end_submitted(read, result)),
            Urgent::EndStores { call, group } => self.spawn(this.end_stores(call, group)),
            Urgent::EndStore { call, store } => self.spawn(this.end_store(call, store)),
            // It is already closing.
            Urgent::Close => {}
        }
    }
}
