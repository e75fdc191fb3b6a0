//! The service's end of a connection, whose peer may send anything.
//!
//! Descriptors come into this process only with a whole register frame, and on a [`Brief`] thread. The
//! service's thread looks first: a peek names no descriptor, but says that there is one. What the frame does not want
//! stays in the socket, and is dropped with all else that was not received, on a thread of its user.

use std::{
    collections::BTreeMap,
    io,
    ops::Deref,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex, MutexGuard},
    task::{Context, Poll},
    time::{Duration, Instant},
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

/// Closes that may never end and may wait, of all users, before no more connections are accepted: each keeps a
/// descriptor of this process. One user has fewer where connections take descriptors once they are attached only: one
/// for each of 4,096 connections, the most that there may be, and what [`Discard::most`] allows. Several users may have
/// more.
const DISCARDS_MAX: usize = 5120;
/// How often it is looked whether fewer of them wait.
const DISCARDS_LOOK: Duration = Duration::from_millis(10);
/// A register frame waits so long, at most, until its user has fewer of them than [`Discard::most`]: longer only where
/// closes do not end.
const DISCARD_WAIT: Duration = Duration::from_secs(1);

/// Where descriptors whose close may take long are until they are closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Discard {
    /// In this process, and memory, the last close of which takes 100s of ms a few GiB. Each such close ends.
    Memory,
    /// In this process, which has room for few, and no memory: a register frame may come with 253.
    Received,
    /// In a connection that has ended. Those of many end together, and are closed in a moment.
    Unreceived,
}

impl Discard {
    /// Closes of one user that may wait when more could come of that user.
    fn most(self) -> usize {
        match self {
            Discard::Received => 2,
            Discard::Memory | Discard::Unreceived => 128,
        }
    }
}

/// Where descriptors of clients are received and closed.
pub(super) struct Aside {
    receives: Brief,
    closes: Brief,
    /// By user: closes that may take long. That of a file runs code of its file system, which that user may have
    /// written (FUSE), that of memory frees all its pages, and no signal ends either: others' must not wait for it.
    discards: Mutex<BTreeMap<(u32, Discard), Brief>>,
}

impl Aside {
    pub(super) fn start() -> io::Result<Arc<Self>> {
        let (receives, closes) = (Brief::start("kvhoist-receive")?, Brief::start("kvhoist-close")?);
        Ok(Arc::new(Aside { receives, closes, discards: Mutex::default() }))
    }

    /// Waits until another connection may be accepted: those that are over are being closed.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(super) async fn room(&self) {
        self.closes.room().await;
        while self.unending() > DISCARDS_MAX {
            tokio::time::sleep(DISCARDS_LOOK).await;
        }
    }

    /// Closes that wait, of all users, and may never end.
    fn unending(&self) -> usize {
        let discards = self.discards();
        let unending = discards.iter().filter(|((_, from), _)| *from != Discard::Memory);
        unending.map(|(_, thread)| thread.waiting()).sum()
    }

    fn discards(&self) -> MutexGuard<'_, BTreeMap<(u32, Discard), Brief>> {
        self.discards.lock().expect("nothing panics under it")
    }

    /// Refuses descriptors of a user of whom too many are not closed yet.
    fn check_closing(&self, uid: u32, from: Discard) -> io::Result<()> {
        let closing = self.discards().get(&(uid, from)).map_or(0, Brief::waiting);
        let most = from.most();
        if closing < most {
            return Ok(());
        }
        let found = match from {
            Discard::Memory => format!("user {uid} has sent {closing} descriptors of memory that"),
            Discard::Received => format!("user {uid} has sent {closing} descriptors that are no memory and"),
            Discard::Unreceived => format!("user {uid} has ended {closing} connections with descriptors that"),
        };
        let mend = match from {
            Discard::Memory => "connect again later",
            Discard::Received | Discard::Unreceived => "end whoever serves their files",
        };
        let text = format!("{found} are not closed yet, expected fewer than {most}; {mend}");
        Err(io::Error::new(io::ErrorKind::InvalidData, text))
    }

    /// Receives bytes that a descriptor comes with.
    fn take(self: &Arc<Self>, stream: &UnixStream, len: usize, uid: u32) -> io::Result<(Vec<u8>, Lent)> {
        let refuse = |text: String| Err(io::Error::new(io::ErrorKind::InvalidData, text));
        let (mut bytes, mut fds) = (vec![0; len], Vec::new());
        let (len, lost) = socket::receive_all(stream.as_fd(), &mut bytes, |fd| fds.push(fd))?;
        bytes.truncate(len);
        let is_one = fds.len() <= 1 && !lost;
        // Asked of the kernel's own files only: a file system that a user has written does not see the question.
        let lent = match fds.pop_if(|fd| is_one && fcntl_get_seals(fd).is_ok()) {
            Some(fd) => Lent::Memory(self.descriptor(fd, uid)),
            None if fds.is_empty() => Lent::Nothing,
            None => {
                self.discard(uid, Discard::Received, move || drop(fds));
                Lent::Other
            }
        };
        if !is_one {
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

    fn descriptor(self: &Arc<Self>, fd: OwnedFd, uid: u32) -> Descriptor {
        let aside = Arc::clone(self);
        let close = move |fd| {
            let here = Arc::clone(&aside);
            // The user's thread may have to be started: not by the service's own.
            aside.closes.run(move || here.discard(uid, Discard::Memory, move || drop(fd)));
        };
        Descriptor::new(fd, close)
    }

    /// Runs what closes descriptors of a user, on a thread of that user.
    fn discard(&self, uid: u32, from: Discard, job: impl FnOnce() + Send + 'static) {
        let mut discards = self.discards();
        discards.retain(|other, thread| *other == (uid, from) || thread.waiting() > 0);
        if let Some(thread) = discards.get(&(uid, from)) {
            return thread.run(job);
        }
        // Accepts take the lock, and the system may take its time to start a thread.
        drop(discards);
        match Brief::start("kvhoist-discard") {
            // Another may have been started meanwhile.
            Ok(thread) => self.discards().entry((uid, from)).or_insert(thread).run(job),
            Err(error) => {
                tracing::warn!(%error, uid, "found no thread to close a client's descriptors");
                job();
            }
        }
    }

    /// Receives what nobody has received of a connection that is over, and closes it.
    fn drain(&self, stream: Arc<UnixStream>, uid: u32) {
        let mut bytes = [0; 16 << 10];
        loop {
            match socket::peek(stream.as_fd(), &mut bytes) {
                Ok((_, true)) => {
                    return self.discard(uid, Discard::Unreceived, move || socket::drain(stream.as_fd()));
                }
                Ok((len @ 1.., false)) => drop(socket::receive(stream.as_fd(), &mut bytes[..len])),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                _ => return,
            }
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
        let (aside, uid) = (Arc::clone(&self.aside), self.uid);
        // The last close may be that of [`LateClose`](super::late_close::LateClose): no descriptor is left for it.
        self.aside.closes.run(move || aside.drain(stream, uid));
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

    fn take_descriptors(&self) -> io::Result<()> {
        self.aside.check_closing(self.uid, Discard::Unreceived)?;
        socket::take_descriptors(self.as_fd(), true);
        Ok(())
    }

    fn receive_lent(&self, len: usize) -> Coming<'_> {
        let (stream, aside, uid) = (Arc::clone(self), Arc::clone(&self.aside), self.uid);
        Box::pin(async move {
            let begin = Instant::now();
            loop {
                let (tell, told) = oneshot::channel();
                let (stream, here) = (Arc::clone(&stream), Arc::clone(&aside));
                aside.receives.run(move || {
                    let mut closing = [Discard::Memory, Discard::Received].into_iter();
                    let may_come = closing.try_for_each(|from| here.check_closing(uid, from));
                    drop(tell.send(may_come.map(|()| here.take(&stream, len, uid))));
                });
                match told.await.unwrap_or(Err(io::ErrorKind::BrokenPipe.into())) {
                    Ok(came) => return came,
                    // Nothing is received yet.
                    Err(_) if begin.elapsed() < DISCARD_WAIT => tokio::time::sleep(DISCARDS_LOOK).await,
                    Err(too_many) => return Err(too_many),
                }
            }
        })
    }

    fn end(&self) {
        wire::end(self);
    }

    fn hang_up(&self) {
        wire::hang_up(self);
    }

    fn aside(&self, job: Box<dyn FnOnce() + Send>) {
        self.aside.closes.run(job);
    }

    fn poll_ready(&self, context: &mut Context<'_>, receive: bool, send: bool) -> Poll<io::Result<()>> {
        wire::poll_ready(self, context, receive, send)
    }
}

#[cfg(test)]
mod tests;
