//! One end of a connection: frames in, frames out.

use std::{collections::VecDeque, future::poll_fn, io, os::fd::OwnedFd, sync::Arc, time::Duration};

use tokio::time::sleep;

use super::{
    inbox::{Inbox, Unread},
    protocol::{FRAME_BYTES_MAX, HEADER_BYTES, Header, Malformed, Request},
    wire::{Came, Lent, Shared, Wire},
};

/// Small frames share a buffer up to this size.
const SHARED_BYTES_MAX: usize = 32 << 10;
/// Bytes that are thrown away at a time.
const DISCARDED_BYTES: usize = 4096;
/// How long to wait after a failure of this process before the socket is read again.
const RETRY: Duration = Duration::from_millis(10);

/// Why a connection is over.
#[derive(Debug)]
pub(super) enum LinkError {
    /// The peer has hung up, or the socket failed.
    Gone(io::Error),
    /// The peer sent bytes that are not of the protocol.
    Nonsense(String),
}

impl LinkError {
    /// Whether a service that lives uses none of its client's memory any longer: it has hung up, or is waited for no
    /// more. Any other failure is this process's own.
    pub(super) fn ends_the_use_of_memory(&self) -> bool {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, TimedOut, UnexpectedEof};
        let LinkError::Gone(error) = self else { return false };
        matches!(error.kind(), UnexpectedEof | ConnectionReset | BrokenPipe | TimedOut)
    }
}

impl From<Malformed> for LinkError {
    fn from(malformed: Malformed) -> Self {
        LinkError::Nonsense(malformed.to_string())
    }
}

/// Frames on their way out.
struct Outgoing {
    bytes: Vec<u8>,
    sent: usize,
    /// They go with the first byte.
    fds: Vec<Shared>,
}

/// The receiving half of a connection's end.
pub(super) struct Receiver {
    wire: Arc<dyn Wire>,
    inbox: Inbox,
    /// What came beside bytes, for the next register frame.
    lent: Option<Lent>,
    /// Bytes that a frame may have after its header now.
    pub(super) frame_bytes_max: usize,
}

/// What [`Receiver::receive`] has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Received {
    Nothing,
    Bytes,
    /// So many bytes can be had with [`Receiver::receive_lent`]: a descriptor comes with them.
    Lent(usize),
}

/// The sending half.
pub(super) struct Sender {
    wire: Arc<dyn Wire>,
    outbox: VecDeque<Outgoing>,
    outbox_bytes: usize,
}

/// One end of a connection. A client's is hung up when both halves are dropped. Nothing here waits but
/// [`ready`](Link::ready).
pub(super) struct Link {
    pub(super) receiver: Receiver,
    pub(super) sender: Sender,
}

impl Sender {
    /// Bytes that the peer has not taken yet.
    pub(super) fn bytes(&self) -> usize {
        self.outbox_bytes
    }

    /// Appends bytes to the outbox; descriptors, two at most, go with the first of them.
    pub(super) fn push(&mut self, bytes: Vec<u8>, fds: impl IntoIterator<Item = Shared>) {
        self.outbox_bytes += bytes.len();
        let fds: Vec<_> = fds.into_iter().collect();
        let shared = self
            .outbox
            .back_mut()
            .filter(|last| fds.is_empty() && last.fds.is_empty() && last.bytes.len() + bytes.len() <= SHARED_BYTES_MAX);
        match shared {
            Some(last) => last.bytes.extend_from_slice(&bytes),
            None => self.outbox.push_back(Outgoing { bytes, sent: 0, fds }),
        }
    }

    /// Sends as much as the socket takes now; returns the number of bytes.
    pub(super) fn flush(&mut self) -> Result<usize, LinkError> {
        let mut flushed = 0;
        while let Some(first) = self.outbox.front_mut() {
            let fds: Vec<_> = first.fds.iter().map(|fd| fd.as_fd()).collect();
            match self.wire.send(&first.bytes[first.sent..], &fds) {
                Ok(sent) => {
                    first.fds.clear();
                    first.sent += sent;
                    flushed += sent;
                    self.outbox_bytes -= sent;
                    if first.sent == first.bytes.len() {
                        self.outbox.pop_front();
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(LinkError::Gone(error)),
            }
        }
        Ok(flushed)
    }

    /// Says that nothing more comes from here. The peer's bytes are still taken.
    pub(super) fn end(&self) {
        self.wire.end();
    }
}

impl Receiver {
    /// The peer may send descriptors from now on.
    pub(super) fn take_descriptors(&self) -> io::Result<()> {
        self.wire.take_descriptors()
    }

    /// Receives available bytes.
    pub(super) fn receive(&mut self) -> Result<Received, LinkError> {
        let Receiver { wire, inbox, .. } = self;
        match wire.receive(inbox.room()) {
            Ok(Came::Bytes(0) | Came::Lent(0)) => Err(gone()),
            Ok(Came::Bytes(len)) => {
                inbox.fill(len);
                Ok(Received::Bytes)
            }
            Ok(Came::Lent(len)) => Ok(Received::Lent(len)),
            Err(error) => failed(error),
        }
    }

    /// Receives bytes with their descriptor, if they hold the register frame that it comes with.
    pub(super) async fn receive_lent(&mut self, len: usize) -> Result<Received, LinkError> {
        let is_register =
            |header: &Header, body: &[u8]| matches!(Request::decode(header.kind, body), Ok(Request::Register { .. }));
        let unasked = |found: &str| LinkError::Nonsense(format!("descriptors: found {found}, expected one a register"));
        if self.lent.is_some() {
            return Err(unasked("one behind another"));
        }
        if !self.inbox.would_hold(len, is_register) {
            if len == self.inbox.room().len() {
                // The frame may go on behind these bytes: of what has come, the socket shows more the next time.
                self.inbox.more_room();
                return Ok(Received::Nothing);
            }
            return Err(unasked("some that no frame wants"));
        }
        let (bytes, lent) = match self.wire.receive_lent(len).await {
            Ok(came) => came,
            Err(error) => return failed(error),
        };
        if bytes.is_empty() {
            return Err(gone());
        }
        self.inbox.append(&bytes);
        self.lent = Some(lent);
        Ok(Received::Bytes)
    }

    /// Resolves when the peer has hung up. What still comes is thrown away.
    ///
    /// # Cancel safety
    /// What has come is lost.
    pub(super) async fn hang_up(&self) {
        let mut thrown_away = vec![0; DISCARDED_BYTES];
        loop {
            let came = match self.ready(false).await {
                Ok(()) => self.wire.receive(&mut thrown_away).map_or_else(failed, |came| match came {
                    Came::Bytes(0) | Came::Lent(0) => Err(gone()),
                    _ => Ok(Received::Bytes),
                }),
                Err(error) => Err(error),
            };
            match came {
                Err(error) if error.ends_the_use_of_memory() => return,
                Err(_) => sleep(RETRY).await,
                Ok(_) => {}
            }
        }
    }

    /// Whether what was received left no room for more.
    pub(super) fn is_full(&self) -> bool {
        self.inbox.is_full()
    }

    /// What came with the frame that was read.
    pub(super) fn take_lent(&mut self) -> Lent {
        self.lent.take().unwrap_or(Lent::Nothing)
    }

    /// The descriptors that have come since this was asked, in order: a client's [`Wire`] has them.
    pub(super) fn descriptors(&self) -> Vec<OwnedFd> {
        self.wire.descriptors()
    }

    /// Counts the bytes of long frames among those of other connections; the oldest frame of all is cut off where they
    /// are too many.
    pub(super) fn count_in(&mut self, unread: &Unread) {
        self.inbox.count_in(unread);
    }

    /// Resolves when this connection's frame was the oldest and there was no room for others.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(super) async fn is_crowded_out(&self) {
        self.inbox.is_crowded_out().await;
    }

    /// The next `N` bytes, if they have come.
    pub(super) fn take_bytes<const N: usize>(&mut self) -> Option<[u8; N]> {
        let bytes = *self.inbox.unread().first_chunk()?;
        self.inbox.read(N);
        Some(bytes)
    }

    /// The next whole frame, if it has come, as `decode` reads it.
    pub(super) fn next_frame<T>(
        &mut self,
        decode: impl FnOnce(&Header, &[u8]) -> Result<T, Malformed>,
    ) -> Result<Option<(u64, T)>, LinkError> {
        let rest = self.inbox.unread();
        let Some(header) = rest.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let header = Header::decode(header)?;
        if header.body_bytes as usize > self.frame_bytes_max {
            let text = format!("at most {}: attach first", self.frame_bytes_max);
            return Err(LinkError::Nonsense(format!(
                "frame length: found {} bytes, expected {text}",
                header.body_bytes
            )));
        }
        let end = HEADER_BYTES + header.body_bytes as usize;
        let Some(body) = rest.get(HEADER_BYTES..end) else { return Ok(None) };
        let frame = decode(&header, body)?;
        self.inbox.read(end);
        Ok(Some((header.id, frame)))
    }

    /// Waits until the socket has something, or, if bytes are `to_send`, takes some.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(super) async fn ready(&self, to_send: bool) -> Result<(), LinkError> {
        poll_fn(|context| self.wire.poll_ready(context, true, to_send)).await.map_err(LinkError::Gone)
    }
}

impl Link {
    pub(super) fn new(wire: Arc<dyn Wire>) -> Self {
        let sender = Sender { wire: Arc::clone(&wire), outbox: VecDeque::new(), outbox_bytes: 0 };
        let receiver = Receiver { wire, inbox: Inbox::default(), lent: None, frame_bytes_max: FRAME_BYTES_MAX };
        Link { receiver, sender }
    }

    /// Hangs up. A service uses none of the client's memory from here on: its connections are not hung up otherwise, as
    /// long as its process or one of its rings lives ([`LateClose`](super::late_close::LateClose)).
    pub(super) fn hang_up(self) {
        self.sender.wire.hang_up();
    }

    /// Runs what may wait for the peer, on a thread that ends each wait in a moment.
    pub(super) fn aside(&self, job: impl FnOnce() + Send + 'static) {
        self.sender.wire.aside(Box::new(job));
    }

    /// Waits until the socket has something, or takes what is to go out. `listen`: whether what the peer sends is
    /// wanted now.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(super) async fn ready(&self, listen: bool) -> Result<(), LinkError> {
        let to_send = !listen || self.sender.bytes() > 0;
        let wire = &self.sender.wire;
        poll_fn(|context| wire.poll_ready(context, listen, to_send)).await.map_err(LinkError::Gone)
    }
}

fn gone() -> LinkError {
    LinkError::Gone(io::ErrorKind::UnexpectedEof.into())
}

fn failed(error: io::Error) -> Result<Received, LinkError> {
    match error.kind() {
        io::ErrorKind::WouldBlock => Ok(Received::Nothing),
        io::ErrorKind::Interrupted => Ok(Received::Bytes),
        io::ErrorKind::InvalidData => Err(LinkError::Nonsense(error.to_string())),
        _ => Err(LinkError::Gone(error)),
    }
}
