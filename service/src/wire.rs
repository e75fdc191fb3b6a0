//! The stream of bytes and descriptors below a connection.

use std::{
    future::{Future, ready},
    io,
    ops::Deref,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    pin::Pin,
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

/// A descriptor of a client. Its last close may take long, so it is closed where nobody waits for it.
pub struct Descriptor(Option<(OwnedFd, Close)>);

type Close = Box<dyn FnOnce(OwnedFd) + Send>;

impl Descriptor {
    /// `close` takes it in the end.
    pub fn new(fd: OwnedFd, close: impl FnOnce(OwnedFd) + Send + 'static) -> Self {
        Descriptor(Some((fd, Box::new(close))))
    }
}

impl Deref for Descriptor {
    type Target = OwnedFd;

    fn deref(&self) -> &OwnedFd {
        &self.0.as_ref().expect("taken by the drop only").0
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
    /// Sends as much as the stream takes now; `fd` goes with the first byte.
    ///
    /// # Errors
    /// [`WouldBlock`](io::ErrorKind::WouldBlock) if it takes nothing now; any other if the peer has hung up.
    fn send(&self, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<usize>;

    /// Receives available bytes into `buf`, unless a descriptor comes with them: they are in `buf` then, and stay in
    /// the stream.
    ///
    /// # Errors
    /// [`WouldBlock`](io::ErrorKind::WouldBlock) if there is nothing now.
    fn receive(&self, buf: &mut [u8]) -> io::Result<Came>;

    /// Receives that many bytes with their descriptor, after [`Came::Lent`].
    ///
    /// # Errors
    /// [`InvalidData`](io::ErrorKind::InvalidData) if the peer has sent more than one descriptor, or may send none.
    fn receive_lent(&self, _len: usize) -> Coming<'_> {
        Box::pin(ready(Err(io::Error::new(io::ErrorKind::InvalidData, "descriptors, of which none is expected here"))))
    }

    /// Says that nothing more comes from here. The peer's bytes still arrive.
    fn end(&self);

    /// Hangs up, whoever else holds this end of the stream.
    fn hang_up(&self);

    /// Whether one of the operations named is worth a try: a [`receive`](Self::receive), a [`send`](Self::send).
    fn poll_ready(&self, context: &mut Context<'_>, receive: bool, send: bool) -> Poll<io::Result<()>>;
}

/// A client's end: the service sends no descriptors.
impl Wire for UnixStream {
    fn send(&self, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<usize> {
        self.try_io(Interest::WRITABLE, || socket::send(self.as_fd(), bytes, fd))
    }

    fn receive(&self, buf: &mut [u8]) -> io::Result<Came> {
        let mut part = None;
        let received = self.try_io(Interest::READABLE, || {
            let len = socket::receive(self.as_fd(), buf)?;
            if len > 0 && len < buf.len() {
                // The socket is empty, which another call would have to find out. More bytes wake the reactor again.
                part = Some(Came::Bytes(len));
                return Err(io::ErrorKind::WouldBlock.into());
            }
            Ok(Came::Bytes(len))
        });
        part.map_or(received, Ok)
    }

    fn end(&self) {
        let _gone_already = shutdown(self, Shutdown::Write);
    }

    fn hang_up(&self) {
        let _gone_already = shutdown(self, Shutdown::Both);
    }

    fn poll_ready(&self, context: &mut Context<'_>, receive: bool, send: bool) -> Poll<io::Result<()>> {
        if receive && let Poll::Ready(ready) = self.poll_read_ready(context) {
            return Poll::Ready(ready);
        }
        if send { self.poll_write_ready(context) } else { Poll::Pending }
    }
}
