//! The stream of bytes and descriptors below a connection.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    task::{Context, Poll},
};

use rustix::net::{Shutdown, shutdown};
use tokio::{io::Interest, net::UnixStream};

use super::socket;

/// One end of a stream between a client and a service: a Unix socket; in the simulation, a queue in memory. No call
/// waits, and no end of the stream is used by two tasks that wait at a time.
pub trait Wire: Send + Sync {
    /// Sends as much as the stream takes now; `fd` goes with the first byte.
    ///
    /// # Errors
    /// [`WouldBlock`](io::ErrorKind::WouldBlock) if it takes nothing now; any other if the peer has hung up.
    fn send(&self, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<usize>;

    /// Receives available bytes into `buf`, and appends descriptors that come with them to `fds`. 0 bytes: the peer has
    /// hung up.
    ///
    /// # Errors
    /// [`WouldBlock`](io::ErrorKind::WouldBlock) if there is nothing now;
    /// [`InvalidData`](io::ErrorKind::InvalidData) if the peer has sent too many descriptors.
    fn receive(&self, buf: &mut [u8], fds: &mut VecDeque<OwnedFd>) -> io::Result<usize>;

    /// Says that nothing more comes from here. The peer's bytes still arrive.
    fn end(&self);

    /// Hangs up, whoever else holds this end of the stream.
    fn hang_up(&self);

    /// Whether one of the operations named is worth a try: a [`receive`](Self::receive), a [`send`](Self::send).
    fn poll_ready(&self, context: &mut Context<'_>, receive: bool, send: bool) -> Poll<io::Result<()>>;
}

impl Wire for UnixStream {
    fn send(&self, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<usize> {
        self.try_io(Interest::WRITABLE, || socket::send(self.as_fd(), bytes, fd))
    }

    fn receive(&self, buf: &mut [u8], fds: &mut VecDeque<OwnedFd>) -> io::Result<usize> {
        let (fds_before, mut part) = (fds.len(), None);
        let received = self.try_io(Interest::READABLE, || {
            let len = socket::receive(self.as_fd(), buf, fds)?;
            if len > 0 && len < buf.len() && fds.len() == fds_before {
                // The socket is empty, which another call would have to find out. More bytes wake the reactor again. A
                // message with descriptors ends a call, whatever comes after it.
                part = Some(len);
                return Err(io::ErrorKind::WouldBlock.into());
            }
            Ok(len)
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
