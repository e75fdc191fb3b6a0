//! One end of a connection: frames in, frames out.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use tokio::{io::Interest, net::UnixStream};

use super::{
    protocol::{HEADER_BYTES, Header, Malformed},
    socket,
};

/// Bytes taken from the socket at a time.
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
    bytes: Vec<u8>,
    /// Bytes at the beginning that have been read.
    read: usize,
    fds: VecDeque<OwnedFd>,
}

/// Frames on their way out.
struct Outgoing {
    bytes: Vec<u8>,
    sent: usize,
    /// Goes with the first byte.
    fd: Option<Arc<OwnedFd>>,
}

/// One end of a connection. Nothing here waits but [`ready`](Link::ready).
pub(super) struct Link {
    stream: UnixStream,
    inbox: Inbox,
    outbox: VecDeque<Outgoing>,
    outbox_bytes: usize,
}

impl Link {
    pub(super) fn new(stream: UnixStream) -> Self {
        Link { stream, inbox: Inbox::default(), outbox: VecDeque::new(), outbox_bytes: 0 }
    }

    /// Bytes that the peer has not taken yet.
    pub(super) fn outbox_bytes(&self) -> usize {
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
            let fd = first.fd.clone();
            let sent = self.stream.try_io(Interest::WRITABLE, || {
                socket::send(self.stream.as_fd(), &first.bytes[first.sent..], fd.as_ref().map(|fd| fd.as_fd()))
            });
            match sent {
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

    /// Receives available bytes; false if there are none.
    pub(super) fn receive(&mut self) -> Result<bool, LinkError> {
        let mut buf = [0; RECEIVE_BYTES];
        let Link { stream, inbox, .. } = self;
        let received = stream.try_io(Interest::READABLE, || socket::receive(stream.as_fd(), &mut buf, &mut inbox.fds));
        match received {
            Ok(0) => Err(LinkError::Gone(io::ErrorKind::UnexpectedEof.into())),
            Ok(len) => {
                inbox.bytes.extend_from_slice(&buf[..len]);
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
        let bytes = *self.inbox.bytes[self.inbox.read..].first_chunk()?;
        self.read(N);
        Some(bytes)
    }

    /// The next whole frame, if it has come, as `decode` reads it.
    pub(super) fn next_frame<T>(
        &mut self,
        decode: impl FnOnce(&Header, &[u8]) -> Result<T, Malformed>,
    ) -> Result<Option<(u64, T)>, LinkError> {
        let rest = &self.inbox.bytes[self.inbox.read..];
        let Some(header) = rest.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let header = Header::decode(header)?;
        let end = HEADER_BYTES + header.body_bytes as usize;
        let Some(body) = rest.get(HEADER_BYTES..end) else { return Ok(None) };
        let frame = decode(&header, body)?;
        self.read(end);
        Ok(Some((header.id, frame)))
    }

    fn read(&mut self, len: usize) {
        let inbox = &mut self.inbox;
        inbox.read += len;
        if inbox.read == inbox.bytes.len() {
            inbox.bytes.clear();
            inbox.bytes.shrink_to(KEPT_BYTES_MAX);
            inbox.read = 0;
        } else if inbox.read >= KEPT_BYTES_MAX {
            inbox.bytes.drain(..inbox.read);
            inbox.read = 0;
        }
    }

    /// Waits until the socket has something, or takes what is to go out. `listen`: whether what the peer sends is
    /// wanted now.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(super) async fn ready(&self, listen: bool) -> Result<(), LinkError> {
        let wanted = match (listen, self.outbox.is_empty()) {
            (true, true) => Interest::READABLE,
            (true, false) => Interest::READABLE | Interest::WRITABLE,
            (false, _) => Interest::WRITABLE,
        };
        self.stream.ready(wanted).await.map(drop).map_err(LinkError::Gone)
    }

    /// Says that nothing more comes from here. The peer's bytes are still taken.
    pub(super) fn end_output(&self) {
        // SAFETY: plain system call on a descriptor that the stream owns.
        let _gone_already = unsafe { libc::shutdown(std::os::fd::AsRawFd::as_raw_fd(&self.stream), libc::SHUT_WR) };
    }
}
