//! What a client is attached to: its space, and the device whose memory it lends.
//!
//! The kernel may hang up a killed service's connections before a GPU has ended its copies. So such a client gets two
//! descriptors: one of the service's process, and one that the service makes readable when it has let go of the
//! client's memory. After the hang-up, whichever is readable first ends the use.

use std::{os::fd::OwnedFd, rc::Rc, sync::Arc};

use kvhoist::{
    Error,
    internals::service::{Gpu, discover},
};
use rustix::event::{EventfdFlags, eventfd};

use super::{LOGGED_A_SECOND, Session};
use crate::{
    error::ServiceFault,
    link::Link,
    peers::own_uid,
    protocol::{FRAME_BYTES_MAX, Failure, Reply, SpaceDevice},
    seldom::Seldom,
    spaces::{Space, Spaces, Wanted},
    system::{System, on_thread},
    transfers::ClientTransfers,
    wire::Shared,
};

/// What a client is attached to.
pub(super) struct Entered {
    pub(super) space: Rc<Space>,
    /// What it asked for.
    pub(super) device: SpaceDevice,
    pub(super) gpu: Option<Arc<Gpu>>,
    pub(super) end: Option<DeviceEnd>,
}

/// What tells a client the end of the use of its device memory.
pub(super) struct DeviceEnd {
    process: Arc<OwnedFd>,
    released: Arc<OwnedFd>,
}

impl Entered {
    /// Attaches a client to a space, with the device that it asks for.
    pub(super) async fn new(spaces: &Rc<Spaces>, wanted: Wanted) -> Result<Self, Failure> {
        let (device, uid) = (wanted.device, wanted.uid);
        let gpu = open_gpu(spaces.system(), device, uid).await?;
        let end = if device == SpaceDevice::None { None } else { DeviceEnd::new(spaces.system())? };
        let space = spaces.attach(wanted).await?;
        if let Some(gpu) = &gpu {
            // The space's own, or another one.
            space.cache.add_gpu(Arc::clone(gpu)).await.map_err(|error| Failure::from(&error))?;
        }
        Ok(Entered { space, device, gpu, end })
    }
}

impl Session {
    /// Attaches the client to a space.
    pub(super) fn enter(&mut self, entered: Entered) -> Reply {
        let Entered { space, device, gpu, end } = entered;
        (self.device, self.device_end) = (device, end);
        let client = format!("process {} of user {}", self.connection.pid, self.connection.uid);
        let (bytes_max, account) = (self.state.config.bytes_in_flight_max, Rc::clone(&self.connection.account));
        let transfers = Rc::new(ClientTransfers::new(&space, bytes_max, client, account, gpu));
        space.clients.set(space.clients.get() + 1);
        self.connection.namespace.borrow_mut().clone_from(&space.namespace);
        *self.connection.transfers.borrow_mut() = Some(Rc::clone(&transfers));
        let Space { block_bytes, capacity_bytes, .. } = *space;
        let host_bytes = space.host_bytes();
        self.link.receiver.frame_bytes_max = FRAME_BYTES_MAX;
        static ATTACHED: Seldom = Seldom::at_most(LOGGED_A_SECOND);
        if let Some(others) = ATTACHED.turn() {
            let (id, pid, uid, space) =
                (self.connection.id(), self.connection.pid, self.connection.uid, &space.namespace);
            tracing::info!(id, pid, uid, space, block_bytes, others, "a client has attached");
        }
        let cache = space.cache.clone();
        self.defect = Box::pin(async move { cache.wait_ended().await });
        self.attached = Some((space, transfers));
        Reply::Attached { block_bytes, capacity_bytes, host_bytes }
    }
}

impl DeviceEnd {
    fn new(system: &dyn System) -> Result<Option<Self>, Failure> {
        let made = system.process().and_then(|process| {
            let released = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
            Ok(process.map(|process| DeviceEnd { process: Arc::new(process), released: Arc::new(released) }))
        });
        made.map_err(|error| {
            let text = format!(
                "device: found no descriptors for a client of device memory ({error}), expected pidfd_open (Linux 5.3 \
                 or later) and room for two"
            );
            Failure::new(ServiceFault::Unavailable, text)
        })
    }

    /// For the client.
    pub(super) fn descriptors(&self) -> [Shared; 2] {
        [self.process.clone(), self.released.clone()]
    }

    /// The service has let go of the client's memory. The client has this very eventfd, and may have filled it and made
    /// its writes wait: one that does not get through is told already.
    pub(super) fn tell(self, link: &Link) {
        link.aside(move || {
            let _told_already = rustix::io::write(&self.released, &1u64.to_ne_bytes());
        });
    }
}

/// The GPU that a client asks for.
async fn open_gpu(system: &dyn System, device: SpaceDevice, uid: u32) -> Result<Option<Arc<Gpu>>, Failure> {
    let SpaceDevice::Cuda(uuid) = device else { return Ok(None) };
    let own = own_uid();
    if uid != own {
        // The driver maps whatever memory a handle names, also a third process's.
        let text =
            format!("device: found a client of user {uid}, expected {own}: a service maps its own user's GPU memory");
        return Err(Failure::new(ServiceFault::Permission, text));
    }
    // Some 100 ms for the first client.
    let open = on_thread(system, move || {
        let discovery = discover();
        let found = discovery.device_of(&uuid);
        found.map_err(|reason| Error::unavailable("device", reason)).and_then(|device| Gpu::open(device.ordinal))
    });
    let opened = open.await.unwrap_or(Err(Error::Closed));
    opened.map(Some).map_err(|error| {
        let text =
            format!("the service: {error}; expected the client's GPU: run the service where that GPU is visible");
        Failure::new(ServiceFault::Unavailable, text)
    })
}
