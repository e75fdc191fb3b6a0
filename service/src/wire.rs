//! The stream of bytes and descriptors below a connection.

use std::{
    future::{Future, ready},
    io,
    ops::Deref,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
};

use rustix::net::{Shutdown, shutdown};
use tokio::{io::Interest, net::UnixStream};

use super::socket;

/// What a stream has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Came {
    /// So many bytes, which are received. 0: the peer has hung up.
    Bytes(usize),
    /// So many bytes, with a descriptor or more. They can be read, and are not received yet.
    Lent(usize),
}

/// What came beside bytes.
#[derive(Debug)]
pub enum Lent {
    /// No descriptor.
    Nothing,
    /// Memory, of whatever kind.
    Memory(Descriptor),
    /// A descriptor of something else, which is closed.
    Other,
}

/// Bytes, and the descriptor that came with them.
pub type Coming<'a> = Pin<Box<dyn Future<Output = io::Result<(Vec<u8>, Lent)>> + Send + 'a>>;

/// A descriptor that is sent: whoever has it may be the last.
pub(super) type Shared = Arc<dyn AsFd + Send + Sync>;

/// A descriptor whose last close may take long, so it is closed where nobody waits for it.
pub struct Descriptor(Option<(OwnedFd, Close)>);

type Close = Box<dyn FnOnce(OwnedFd) + Send + Sync>;

impl Descriptor {
    /// `close` takes it in the end.
    pub fn new(fd: OwnedFd, close: impl FnOnce(OwnedFd) + Send + Sync + 'static) -> Self {
        Descriptor(Some((fd, Box::new(close))))
    }
}

impl Deref for Descriptor {
    type Target = OwnedFd;

    fn deref(&self) -> &OwnedFd {
        &self.0.as_ref().expect("taken by the drop only").0
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        OwnedFd::as_fd(self)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        if let Some((fd, close)) = self.0.take() {
            close(fd);
        }
    }
}

debug_fields!(Descriptor, descriptor => fd: descriptor.as_raw_fd());

/// One end of a stream between a client and a service: a Unix socket; in the simulation, a queue in memory. No call
/// waits but [`receive_lent`](Wire::receive_lent), and no end of the stream is used by two tasks that wait at a time.
pub trait Wire: Send + Sync {
    /// Sends as much as the stream takes now; descriptors, two at most, go with the first byte.
    ///
    /// # Errors
    /// [`WouldBlock`](io::ErrorKind::WouldBlock) if it takes nothing now; any other if the peer has hung up.
    fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize>;

    /// Receives available bytes into `buf`, unless a descriptor comes with them: they are in `buf` then, and stay in
    /// the stream.
    ///
    /// # Errors
    /// [`WouldBlock`](io::ErrorKind::WouldBlock) if there is nothing now.
    fn receive(&self, buf: &mut [u8]) -> io::Result<Came>;

    /// The peer may send descriptors from now on.
    ///
    /// # Errors
    /// [`InvalidData`](io::ErrorKind::InvalidData) if too many of its user's are not closed yet.
    fn take_descriptors(&self) -> io::Result<()> {
        Ok(())
    }

    /// Receives that many bytes with their descriptor, after [`Came::Lent`].
    ///
    /// # Errors
    /// [`InvalidData`](io::ErrorKind::InvalidData) if the peer has sent more than one descriptor, or may send none.
    fn receive_lent(&self, _len: usize) -> Coming<'_> {
        Box::pin(ready(Err(io::Error::new(io::ErrorKind::InvalidData, "descriptors, of which none is expected here"))))
    }

    /// The descriptors that the service has sent since this was asked, in order. A client asks.
    fn descriptors(&self) -> Vec<OwnedFd> {
        Vec::new()
    }

    /// Says that nothing more comes from here. The peer's bytes still arrive.
    fn end(&self);

    /// Hangs up, whoever else holds this end of the stream.
    fn hang_up(&self);

    /// Runs what a descriptor that the peer has, too, may hold up: where nobody waits for it, and each wait ends in a
    /// moment. A client's end waits.
    fn aside(&self, job: Box<dyn FnOnce() + Send>) {
        job();
    }

    /// Whether one of the operations named is worth a try: a [`receive`](Self::receive), a [`send`](Self::send).
    fn poll_ready(&self, context: &mut Context<'_>, receive: bool, send: bool) -> Poll<io::Result<()>>;
}

/// A client's end. Descriptors that nobody asks for are closed with it.
pub(super) struct Dialed {
    stream: UnixStream,
    came: Mutex<Vec<OwnedFd>>,
}

impl Dialed {
    pub(super) fn new(stream: UnixStream) -> Self {
        Dialed { stream, came: Mutex::default() }
    }
}

impl Wire for Dialed {
    fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
        send(&self.stream, bytes, fds)
    }

    fn receive(&self, buf: &mut [u8]) -> io::Result<Came> {
        let mut part = None;
        let mut came = self.came.lock().unwrap_or_else(PoisonError::into_inner);
        let keep = |fd| {
            // A message has two, and one message is waited for.
            came.truncate(1);
            came.push(fd);
        };
        let received = self.stream.try_io(Interest::READABLE, || {
            let (len, _) = socket::receive_all(self.stream.as_fd(), buf, keep)?;
            if len > 0 && len < buf.len() {
                // The socket is empty, which another call would have to find out. More bytes wake the reactor again.
                part = Some(Came::Bytes(len));
                return Err(io::ErrorKind::WouldBlock.into());
            }
            Ok(Came::Bytes(len))
        });
        part.map_or(received, Ok)
    }

    fn descriptors(&self) -> Vec<OwnedFd> {
        std::mem::take(&mut *self.came.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn end(&self) {
        end(&self.stream);
    }

    fn hang_up(&self) {
        hang_up(&self.stream);
    }

    fn poll_ready(&self, context: &mut Context<'_>, receive: bool, send: bool) -> Poll<io::Result<()>> {
        poll_ready(&self.stream, context, receive, send)
    }
}

pub(super) fn send(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    stream.try_io(Interest::WRITABLE, || socket::send(stream.as_fd(), bytes, fds))
}

pub(super) fn end(stream: &UnixStream) {
    let _gone_already = shutdown(stream, Shutdown::Write);
}

pub(super) fn hang_up(stream: &UnixStream) {
    let _gone_already = shutdown(stream, Shutdown::Both);
}

pub(super) fn poll_ready(
    stream: &UnixStream,
    context: &mut Context<'_>,
    receive: bool,
    send: bool,
) -> Poll<io::Result<()>> {
    if receive && let Poll::Ready(ready) = stream.poll_read_ready(context) {
        return Poll::Ready(ready);
    }
    if send { stream.poll_write_ready(context) } else { Poll::Pending }
}
