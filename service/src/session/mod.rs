//! One client's connection, from its hello to its hang-up.

mod attached;
mod farewell;
mod pins;
mod requests;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap, future::pending, panic::AssertUnwindSafe, pin::Pin, rc::Rc, sync::Arc, time::Duration,
};

use futures_util::FutureExt;
use kvhoist::{Error, Lease};
use tokio::{
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    task::JoinSet,
    time::{Instant, sleep_until},
};

pub(super) use self::farewell::refuse;
use self::{
    attached::{DeviceEnd, Entered},
    farewell::{refusal, tell},
};
use super::{
    link::{Link, LinkError, Received},
    protocol::{Failure, Hello, Reply, SpaceDevice, Welcome, set_id},
    seldom::Seldom,
    spaces::{Space, files::Hold},
    state::{Connection, ServiceState},
    transfers::{Cancel, ClientTransfers},
    wire::{Shared, Wire},
};
use crate::error::ServiceFault;

/// Bytes of a frame before the client is attached to a space.
const FRAME_BYTES_UNATTACHED: usize = 4096;
/// Clients whose coming and going is logged in a second: the ranks of an engine come together.
const LOGGED_A_SECOND: u32 = 32;
/// How long a client has to read its last replies, all of them, while the service drains.
const FAREWELL: Duration = Duration::from_secs(1);

/// Why a session ends.
enum End {
    /// The client has hung up.
    Gone,
    /// The client gets the reason and is cut off.
    Cut(Failure),
    /// The service ends, and all requests are answered.
    Drained,
}

impl End {
    fn failed() -> Self {
        End::Cut(Failure::new(ServiceFault::Io, "the service failed in the middle of a request"))
    }
}

impl From<LinkError> for End {
    fn from(error: LinkError) -> Self {
        match error {
            LinkError::Gone(_) => End::Gone,
            LinkError::Nonsense(text) => End::Cut(Failure::new(ServiceFault::Protocol, text)),
        }
    }
}

/// What a layer of a load came to, with the id of its request.
type LayerOf = (u64, Reply);

/// The end of a request.
struct Ended {
    id: u64,
    result: Outcome,
}

enum Outcome {
    Reply(Reply),
    Attached(Result<Entered, Failure>),
    Held(Result<Hold, Failure>),
    /// A whole frame, which other clients get too.
    Status(Rc<[u8]>),
}

struct Session {
    state: Rc<ServiceState>,
    connection: Rc<Connection>,
    link: Link,
    tasks: JoinSet<Ended>,
    /// Requests in flight.
    requests: BTreeMap<u64, Cancel>,
    /// The bytes of their frames.
    request_bytes: BTreeMap<u64, usize>,
    /// The client's space and its transfers, once it is attached.
    attached: Option<(Rc<Space>, Rc<ClientTransfers>)>,
    /// The end of the space's cache, by a defect.
    defect: Pin<Box<dyn Future<Output = ()>>>,
    attaching: bool,
    /// A status is in flight: nothing more is read, so that a client has one at a time.
    awaits_status: bool,
    /// Whose memory it lends beside host memory.
    device: SpaceDevice,
    device_end: Option<DeviceEnd>,
    /// Files that the client holds, by the ids of its requests.
    held: BTreeMap<u64, Hold>,
    /// Blocks that it has pinned, by the ids of its requests.
    pinned: BTreeMap<u64, Vec<Lease>>,
    /// What layers of loads came to, by the ids of their requests.
    layers: (UnboundedSender<LayerOf>, UnboundedReceiver<LayerOf>),
    /// The handshake is done.
    greeted: bool,
    /// It has attached to a space, or held a file.
    is_client: bool,
    /// When the client last read a part of its replies, or had read all.
    taken: Instant,
    /// When the service drained, and every request of the client was answered.
    last_replies: Option<Instant>,
}

/// Serves a connection until it ends, and unmaps the client's memory before it hangs up. True if it was a client's: it
/// has attached to a space, or held a file.
pub(super) async fn serve(state: Rc<ServiceState>, connection: Rc<Connection>, wire: Arc<dyn Wire>) -> bool {
    let mut link = Link::new(wire);
    link.receiver.frame_bytes_max = FRAME_BYTES_UNATTACHED;
    link.receiver.count_in(&state.unread);
    let mut session = Session {
        link,
        tasks: JoinSet::new(),
        requests: BTreeMap::new(),
        request_bytes: BTreeMap::new(),
        attached: None,
        defect: Box::pin(pending()),
        attaching: false,
        awaits_status: false,
        device: SpaceDevice::None,
        device_end: None,
        held: BTreeMap::new(),
        pinned: BTreeMap::new(),
        layers: unbounded_channel(),
        greeted: false,
        is_client: false,
        taken: Instant::now(),
        last_replies: None,
        state,
        connection,
    };
    let run = async {
        match session.greet().await {
            Ok(()) => session.run().await,
            Err(end) => end,
        }
    };
    // After a panic under a cache's lock each look into that cache is one, too. What was begun for the client goes on.
    let end = AssertUnwindSafe(run).catch_unwind().await.unwrap_or_else(|_| End::failed());
    session.finish(end).await
}

impl Session {
    fn stall(&self) -> Duration {
        Duration::from_millis(self.state.config.stall_ms)
    }

    /// The handshake.
    async fn greet(&mut self) -> Result<(), End> {
        let deadline = Instant::now() + self.stall();
        let hello: [u8; Hello::BYTES] = loop {
            if let Some(bytes) = self.link.receiver.take_bytes() {
                break bytes;
            }
            tokio::select! { biased;
                () = self.state.drains() => return Err(End::Drained),
                ready = self.link.ready(true) => ready?,
                () = sleep_until(deadline) => {
                    return Err(End::Cut(Failure::new(ServiceFault::Timeout, "no hello came in time")));
                }
            }
            self.state.turn().await;
            self.receive().await?;
        };
        let hello = Hello::decode(&hello).map_err(LinkError::from)?;
        let Some(version) = hello.common_version() else {
            let Hello { version_min, version_max } = hello;
            let text = format!("versions {version_min} to {version_max}, of which none is spoken here");
            return Err(End::Cut(Failure::new(ServiceFault::Version, text)));
        };
        self.link.sender.push(Welcome::new(Ok(version), self.state.limits()).encode(), None);
        self.greeted = true;
        Ok(())
    }

    async fn run(&mut self) -> End {
        loop {
            match self.turn().await {
                Ok(()) => {}
                Err(end) => return end,
            }
        }
    }

    /// Handles received frames, sends replies, and waits for more of either.
    async fn turn(&mut self) -> Result<(), End> {
        let (draining, listens) = (self.state.is_draining(), self.listens());
        let has_more = listens && self.handle_frames()?;
        self.flush()?;
        if has_more {
            // There may be more frames; other sessions have their turn first.
            tokio::task::yield_now().await;
            return self.reap();
        }
        let outbox = self.link.sender.bytes();
        if !listens && self.listens() {
            // The client took its replies. Frames may have come before, for which the socket wakes nobody again.
            return Ok(());
        }
        if draining && outbox == 0 && self.requests.is_empty() {
            return Err(End::Drained);
        }
        let mut stalled = self.taken + self.stall();
        if draining && self.requests.is_empty() {
            stalled = stalled.min(*self.last_replies.get_or_insert_with(Instant::now) + FAREWELL);
        }
        let io = async {
            match listens || outbox > 0 {
                true => self.link.ready(listens).await,
                false => pending().await,
            }
        };
        tokio::select! { biased;
            () = &mut self.defect => Err(End::Cut(Failure::from(&Error::Closed))),
            Some((id, layer)) = self.layers.1.recv() => {
                self.reply(id, &layer);
                Ok(())
            }
            joined = self.tasks.join_next(), if !self.tasks.is_empty() => {
                let ended = joined.and_then(Result::ok);
                self.end(ended)
            }
            // Before more is received: a client that never stops sending would keep what has no room.
            () = self.link.receiver.is_crowded_out() => {
                let text = "busy: long frames of other connections have no room; send a frame at once";
                Err(End::Cut(Failure::new(ServiceFault::Busy, text)))
            }
            ready = io => {
                ready?;
                if listens { self.receive().await } else { Ok(()) }
            }
            () = self.state.drains(), if !draining => Ok(()),
            () = sleep_until(stalled), if outbox > 0 => {
                let patience = if draining { FAREWELL } else { self.stall() };
                let text = format!("{outbox} bytes of replies were not taken for {patience:?}");
                Err(End::Cut(Failure::new(ServiceFault::Timeout, text)))
            }
        }
    }

    /// Receives bytes, and the descriptor that a register frame comes with.
    async fn receive(&mut self) -> Result<(), End> {
        let receiver = &mut self.link.receiver;
        if let Received::Lent(len) = receiver.receive()? {
            receiver.receive_lent(len).await?;
        }
        if receiver.is_full() {
            // There may be more of a long frame; other sessions have their turn first.
            tokio::task::yield_now().await;
        }
        Ok(())
    }

    /// Answers all requests that have ended.
    fn reap(&mut self) -> Result<(), End> {
        while let Some(joined) = self.tasks.try_join_next() {
            self.end(joined.ok())?;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), End> {
        if self.link.sender.flush()? > 0 {
            self.taken = Instant::now();
        }
        Ok(())
    }

    fn reply(&mut self, id: u64, reply: &Reply) {
        self.reply_with(id, reply, None);
    }

    /// Replies with descriptors.
    fn reply_with(&mut self, id: u64, reply: &Reply, fds: impl IntoIterator<Item = Shared>) {
        self.push(reply.encode(id), fds);
    }

    fn push(&mut self, frame: Vec<u8>, fds: impl IntoIterator<Item = Shared>) {
        if self.link.sender.bytes() == 0 {
            self.taken = Instant::now();
        }
        self.link.sender.push(frame, fds);
    }

    /// Answers a request whose task has ended; `None`: it panicked.
    fn end(&mut self, ended: Option<Ended>) -> Result<(), End> {
        let Some(Ended { id, result }) = ended else {
            return Err(End::failed());
        };
        // Before the reply that ends the request.
        while let Ok((id, layer)) = self.layers.1.try_recv() {
            self.reply(id, &layer);
        }
        self.requests.remove(&id);
        self.request_bytes.remove(&id);
        self.connection.requests.set(self.requests.len() as u32);
        let reply = match result {
            Outcome::Reply(reply) => reply,
            Outcome::Attached(Ok(entered)) => {
                let reply = match self.link.receiver.take_descriptors() {
                    Ok(()) => self.enter(entered),
                    Err(error) => {
                        self.attaching = false;
                        self.reply(id, &Reply::Failed(Failure::new(ServiceFault::Busy, error.to_string())));
                        return Ok(());
                    }
                };
                self.is_client = true;
                let fds: Vec<_> = self.device_end.iter().flat_map(DeviceEnd::descriptors).collect();
                self.reply_with(id, &reply, fds);
                return Ok(());
            }
            Outcome::Attached(Err(failure)) => {
                self.attaching = false;
                Reply::Failed(failure)
            }
            Outcome::Held(Ok(hold)) => {
                self.is_client = true;
                self.reply_with(id, &Reply::Held, Some(hold.memory() as Shared));
                self.held.insert(id, hold);
                return Ok(());
            }
            Outcome::Held(Err(failure)) => Reply::Failed(failure),
            Outcome::Status(frame) => {
                self.awaits_status = false;
                let mut frame = frame.to_vec();
                set_id(&mut frame, id);
                self.push(frame, None);
                return Ok(());
            }
        };
        self.reply(id, &reply);
        if let Some((space, _)) = &self.attached {
            self.state.spaces.balance(space);
        }
        Ok(())
    }

    /// Sends the reason, unmaps the client's memory, and hangs up.
    async fn finish(mut self, end: End) -> bool {
        let goodbye = match end {
            End::Gone => None,
            End::Drained => Some(Failure::new(ServiceFault::Draining, "the service is ending; connect again later")),
            End::Cut(failure) => {
                self.state.cut_off.set(self.state.cut_off.get() + 1);
                static CUT_OFF: Seldom = Seldom::new();
                if let Some(others) = CUT_OFF.turn() {
                    tracing::warn!(reason = %failure.text, uid = self.connection.uid, others, "a client was cut off");
                }
                Some(failure)
            }
        };
        if let Some(failure) = goodbye {
            let bytes = match self.greeted {
                true => Reply::Goodbye(failure).encode(0),
                false => refusal(&self.state, failure),
            };
            self.link.sender.push(bytes, None);
            tell(&mut self.link).await;
        }
        self.state.turn().await;
        // Blocks that were not begun are dropped here. Movements in flight hold their regions.
        self.tasks.shutdown().await;
        if let Some((space, transfers)) = self.attached.take() {
            self.unpin_all(&space).await;
            transfers.regions.release_all().await;
            space.clients.set(space.clients.get() - 1);
            static GONE: Seldom = Seldom::at_most(LOGGED_A_SECOND);
            if let Some(others) = GONE.turn() {
                let (id, pid, space, clients) =
                    (self.connection.id(), self.connection.pid, &space.namespace, space.clients.get());
                tracing::info!(id, pid, space, clients, others, "a client has gone");
            }
        }
        if let Some(end) = self.device_end.take() {
            end.tell(&self.link);
        }
        self.link.hang_up();
        self.is_client
    }
}
