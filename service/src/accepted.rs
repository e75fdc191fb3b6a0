//! The service's end of a connection, whose peer may send anything.
//!
//! Descriptors come into this process only with a whole register frame, one at a time, and on a [`Brief`] thread. The
//! service's thread looks first: a peek names no descriptor, but says that there is one. What the frame does not want
//! stays in the socket, and goes with it.

use std::{
    collections::BTreeMap,
    io,
    ops::Deref,
    os::fd::{AsFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd},
    sync::{Arc, Mutex, MutexGuard},
    task::{Context, Poll},
    thread,
};

use rustix::{fs::fcntl_get_seals, net::sockopt::set_socket_oobinline};
use tokio::{
    io::Interest,
    net::{UnixListener, UnixStream},
    sync::oneshot,
};

use super::{
    brief::Brief,
    socket,
    wire::{self, Came, Coming, Descriptor, Lent, Wire},
};

/// Descriptors of one user that may be closing. The close of a file runs code of its file system, which a user may
/// have written (FUSE), and no signal ends it.
const CLOSING_MAX: u32 = 4;

/// Where descriptors of clients are received and closed.
pub(super) struct Aside {
    receives: Brief,
    closes: Arc<Brief>,
    /// By user: descriptors that were no memory and are not closed yet.
    closing: Mutex<BTreeMap<u32, u32>>,
}

impl Aside {
    pub(super) fn start() -> io::Result<Arc<Self>> {
        let (receives, closes) = (Brief::start("kvhoist-receive")?, Arc::new(Brief::start("kvhoist-close")?));
        Ok(Arc::new(Aside { receives, closes, closing: Mutex::default() }))
    }

    /// Waits until another connection may be accepted: those that are over are being closed.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(super) async fn room(&self) {
        self.closes.room().await;
    }

    fn closing(&self) -> MutexGuard<'_, BTreeMap<u32, u32>> {
        self.closing.lock().expect("nothing panics under it")
    }

    /// Receives bytes that a descriptor comes with.
    fn take(self: &Arc<Self>, stream: &UnixStream, len: usize, uid: u32) -> io::Result<(Vec<u8>, Lent)> {
        let refuse = |text: String| Err(io::Error::new(io::ErrorKind::InvalidData, text));
        let closing = self.closing().get(&uid).copied().unwrap_or(0);
        if closing >= CLOSING_MAX {
            let text = "descriptors that are no memory and are not closed yet; end whoever serves their file system";
            return refuse(format!("user {uid} has sent {closing} {text}"));
        }
        let mut bytes = vec![0; len];
        let (len, fd, lost) = socket::receive_one(stream.as_fd(), &mut bytes)?;
        bytes.truncate(len);
        // Asked of the kernel's own files only: a file system that a user has written does not see the question.
        let lent = match fd {
            Some(fd) if fcntl_get_seals(&fd).is_ok() => Lent::Memory(self.descriptor(fd)),
            Some(fd) => {
                self.close(fd, uid);
                Lent::Other
            }
            None => Lent::Nothing,
        };
        if lost {
            return refuse(
                "descriptors of a message were lost: it had more than one, or this process may open no more (raise \
                 LimitNOFILE, `ulimit -n`)"
                    .into(),
            );
        }
        Ok((bytes, lent))
    }

    /// Runs what may close descriptors of clients.
    pub(super) fn close_by(&self, job: impl FnOnce() + Send + 'static) {
        self.closes.run(job);
    }

    fn descriptor(&self, fd: OwnedFd) -> Descriptor {
        let closes = Arc::clone(&self.closes);
        Descriptor::new(fd, move |fd| closes.run(move || drop(fd)))
    }

    /// Closes a descriptor of an unknown kind on a thread of its own, which may take for ever.
    fn close(self: &Arc<Self>, fd: OwnedFd, uid: u32) {
        *self.closing().entry(uid).or_default() += 1;
        let (this, fd) = (Arc::clone(self), fd.into_raw_fd());
        let close = move || {
            // SAFETY: the descriptor was owned by the caller, who gave it up, and is closed here only.
            drop(unsafe { OwnedFd::from_raw_fd(fd) });
            let mut closing = this.closing();
            if let Some(count) = closing.get_mut(&uid) {
                *count -= 1;
            }
            closing.retain(|_, count| *count > 0);
        };
        if let Err(error) = thread::Builder::new().name("kvhoist-discard".into()).spawn(close) {
            tracing::error!(%error, uid, "a descriptor of a client stays open: no thread to close it");
        }
    }
}

/// A socket that admits connections. Those that wait in it may hold descriptors, so it is closed aside as well.
pub(super) struct Listener(Option<UnixListener>, Arc<Aside>);

impl Listener {
    pub(super) fn new(listener: UnixListener, aside: Arc<Aside>) -> Self {
        Listener(Some(listener), aside)
    }

    /// The next connection; nothing of what it sends is received yet.
    ///
    /// # Cancel safety
    /// No connection is lost.
    pub(super) async fn accept(&self) -> io::Result<UnixStream> {
        self.1.room().await;
        let listener = self.0.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        Ok(listener.accept().await?.0)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let listener = self.0.take();
        self.1.closes.run(move || drop(listener));
    }
}

/// The service's end of a connection. Dropping it hangs up.
pub(super) struct Accepted {
    /// Taken by the drop.
    stream: Option<Arc<UnixStream>>,
    uid: u32,
    aside: Arc<Aside>,
}

impl Accepted {
    /// # Errors
    /// The system's: the connection is hung up.
    pub(super) fn new(stream: UnixStream, uid: u32, aside: Arc<Aside>) -> io::Result<Self> {
        let accepted = Accepted { stream: Some(Arc::new(stream)), uid, aside };
        // A peek passes over a message out of band (MSG_OOB), and the receive of the bytes behind it drops the message,
        // with its descriptors. In line, it is peeked at and received as any other.
        set_socket_oobinline(accepted.as_fd(), true)?;
        Ok(accepted)
    }
}

impl Deref for Accepted {
    type Target = Arc<UnixStream>;

    fn deref(&self) -> &Self::Target {
        self.stream.as_ref().expect("taken by the drop only")
    }
}

impl Drop for Accepted {
    fn drop(&mut self) {
        let Some(stream) = self.stream.take() else { return };
        // The peer sees the hang-up, however many others are closed first, and whoever holds this end besides
        // ([`LateClose`](super::late_close::LateClose)).
        wire::hang_up(&stream);
        self.aside.closes.run(move || drop(stream));
    }
}

impl Wire for Accepted {
    fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
        wire::send(self, bytes, fds)
    }

    fn receive(&self, buf: &mut [u8]) -> io::Result<Came> {
        let mut part = None;
        let received = self.try_io(Interest::READABLE, || {
            let (len, has_descriptors) = socket::peek(self.as_fd(), buf)?;
            if has_descriptors {
                return Ok(Came::Lent(len));
            }
            // The bytes that were peeked at, and no others: nobody else receives here.
            let len = if len > 0 { socket::receive(self.as_fd(), &mut buf[..len])? } else { 0 };
            if len > 0 && len < buf.len() {
                // The socket is empty, which another call would have to find out. More bytes wake the reactor again.
                part = Some(Came::Bytes(len));
                return Err(io::ErrorKind::WouldBlock.into());
            }
            Ok(Came::Bytes(len))
        });
        part.map_or(received, Ok)
    }

    fn receive_lent(&self, len: usize) -> Coming<'_> {
        let (stream, aside, uid) = (Arc::clone(self), Arc::clone(&self.aside), self.uid);
        let (tell, told) = oneshot::channel();
        self.aside.receives.run(move || drop(tell.send(aside.take(&stream, len, uid))));
        Box::pin(async move { told.await.unwrap_or(Err(io::ErrorKind::BrokenPipe.into())) })
    }

    fn end(&self) {
        wire::end(self);
    }

    fn hang_up(&self) {
        wire::hang_up(self);
    }

    fn poll_ready(&self, context: &mut Context<'_>, receive: bool, send: bool) -> Poll<io::Result<()>> {
        wire::poll_ready(self, context, receive, send)
    }
}
