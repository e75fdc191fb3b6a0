//! One end of a connection: frames in, frames out.

use std::{
    collections::VecDeque,
    future::poll_fn,
    io,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use super::{
    protocol::{HEADER_BYTES, Header, Malformed},
    wire::Wire,
};

/// Room for bytes that come, at least.
const RECEIVE_BYTES: usize = 16 << 10;
/// A buffer larger than this is given back once it is empty.
const KEPT_BYTES_MAX: usize = 256 << 10;
/// Descriptors that may have come and not been asked for.
const FDS_MAX: usize = 16;
/// Small frames share a buffer up to this size.
const SHARED_BYTES_MAX: usize = 32 << 10;

/// Why a connection is over.
#[derive(Debug)]
pub(super) enum LinkError {
    /// The peer has hung up, or the socket failed.
    Gone(io::Error),
    /// The peer sent bytes that are not of the protocol.
    Nonsense(String),
}

impl From<Malformed> for LinkError {
    fn from(malformed: Malformed) -> Self {
        LinkError::Nonsense(malformed.to_string())
    }
}

/// Bytes that have come and are not read yet.
#[derive(Default)]
struct Inbox {
    /// All of it may be received into; its length is not that of what has come.
    bytes: Vec<u8>,
    /// Bytes at the beginning that have been read.
    read: usize,
    /// Bytes at the beginning that have come.
    filled: usize,
    fds: VecDeque<OwnedFd>,
}

impl Inbox {
    fn unread(&self) -> &[u8] {
        &self.bytes[self.read..self.filled]
    }

    /// Room after the bytes that have come: for the rest of the frame that they begin, and for more.
    fn make_room(&mut self) {
        let header = self.unread().first_chunk().and_then(|header| Header::decode(header).ok());
        let rest = header
            .map_or(0, |header| (HEADER_BYTES + header.body_bytes as usize).saturating_sub(self.filled - self.read));
        let room = rest.max(RECEIVE_BYTES);
        if self.bytes.len() - self.filled < room {
            self.bytes.copy_within(self.read..self.filled, 0);
            (self.filled, self.read) = (self.filled - self.read, 0);
            if self.bytes.len() - self.filled < room {
                self.bytes.resize(self.filled + room, 0);
            }
        }
    }

    fn read(&mut self, len: usize) {
        self.read += len;
        if self.read == self.filled {
            (self.read, self.filled) = (0, 0);
            if self.bytes.len() > KEPT_BYTES_MAX {
                self.bytes = Vec::new();
            }
        }
    }
}

/// Frames on their way out.
struct Outgoing {
    bytes: Vec<u8>,
    sent: usize,
    /// Goes with the first byte.
    fd: Option<Arc<OwnedFd>>,
}

/// The receiving half of a connection's end.
pub(super) struct Receiver {
    wire: Arc<dyn Wire>,
    inbox: Inbox,
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

    /// Appends bytes to the outbox; `fd` goes with the first of them.
    pub(super) fn push(&mut self, bytes: Vec<u8>, fd: Option<Arc<OwnedFd>>) {
        self.outbox_bytes += bytes.len();
        let shared = self
            .outbox
            .back_mut()
            .filter(|last| fd.is_none() && last.fd.is_none() && last.bytes.len() + bytes.len() <= SHARED_BYTES_MAX);
        match shared {
            Some(last) => last.bytes.extend_from_slice(&bytes),
            None => self.outbox.push_back(Outgoing { bytes, sent: 0, fd }),
        }
    }

    /// Sends as much as the socket takes now; returns the number of bytes.
    pub(super) fn flush(&mut self) -> Result<usize, LinkError> {
        let mut flushed = 0;
        while let Some(first) = self.outbox.front_mut() {
            let fd = first.fd.as_ref().map(|fd| fd.as_fd());
            match self.wire.send(&first.bytes[first.sent..], fd) {
                Ok(sent) => {
                    first.fd = None;
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
    /// Receives available bytes; false if there are none.
    pub(super) fn receive(&mut self) -> Result<bool, LinkError> {
        let Receiver { wire, inbox } = self;
        inbox.make_room();
        match wire.receive(&mut inbox.bytes[inbox.filled..], &mut inbox.fds) {
            Ok(0) => Err(LinkError::Gone(io::ErrorKind::UnexpectedEof.into())),
            Ok(len) => {
                inbox.filled += len;
                if inbox.fds.len() > FDS_MAX {
                    return Err(LinkError::Nonsense(format!("{} descriptors that no frame wants", inbox.fds.len())));
                }
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => Err(LinkError::Nonsense(error.to_string())),
            Err(error) => Err(LinkError::Gone(error)),
        }
    }

    /// The oldest descriptor that came and was not taken.
    pub(super) fn take_fd(&mut self) -> Option<OwnedFd> {
        self.inbox.fds.pop_front()
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
        Link { receiver: Receiver { wire, inbox: Inbox::default() }, sender }
    }

    /// Hangs up. A service uses none of the client's memory from here on: its connections are not hung up otherwise, as
    /// long as its process or one of its rings lives ([`LateClose`](super::late_close::LateClose)).
    pub(super) fn hang_up(self) {
        self.sender.wire.hang_up();
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
