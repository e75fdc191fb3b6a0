//! A client's connection for files: one request at a time, each with its reply.

use std::{
    io,
    mem::take,
    net::Shutdown,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
    time::Timespec,
};

use crate::{
    error::{Error, Result, ServiceFault},
    protocol::{HEADER_BYTES, Header, Reply, Request},
    query::nonsense,
    socket,
};

/// A connection that is shared by all threads.
pub(super) struct Line {
    path: PathBuf,
    stream: UnixStream,
    /// How long a call may take, all in all.
    patience: Duration,
    state: Mutex<State>,
    /// Wakes those that wait for the stream.
    freed: Condvar,
}

#[derive(Default)]
struct State {
    /// A call has the stream.
    is_taken: bool,
    /// Holds that are over, of which the service is told by whoever has the stream.
    over: Vec<u64>,
    /// Why the connection is of no use any more.
    broken: Option<Error>,
}

/// The stream, for one call.
struct Turn<'a> {
    line: &'a Line,
    deadline: Instant,
}

/// What ends a call.
enum Fault {
    /// Nothing of a reply came in time: it may come before that of a later call.
    Late(Error),
    /// The stream may be in the middle of a frame, or is over.
    Broken(Error),
}

impl Line {
    pub(super) fn new(path: PathBuf, stream: UnixStream, patience: Duration) -> Self {
        Line { path, stream, patience, state: Mutex::default(), freed: Condvar::new() }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Not held while anything is sent or received.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn lost(&self, error: &io::Error) -> Error {
        let fault = match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ServiceFault::Timeout,
            _ => ServiceFault::Away,
        };
        Error::service(fault, format!("{}: found {error}, expected a reply of the service", self.path.display()))
    }

    /// Ends the connection, at which the service lets go of all files. Later calls have the same error.
    fn end(&self, error: Error) {
        self.state().broken.get_or_insert(error);
        // One that is over already is as it should be.
        _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Asks for a hold, whose number is the request's: the reply, and the descriptor that comes with it. A hold that is
    /// not answered in time is let go of.
    pub(super) fn ask(&self, hold: u64, request: &Request) -> Result<(Reply, Option<OwnedFd>)> {
        let turn = self.turn()?;
        turn.send(&request.encode(hold)).and_then(|()| turn.reply(hold)).map_err(|fault| match fault {
            Fault::Late(error) => {
                // It may come to be held later.
                self.state().over.push(hold);
                error
            }
            Fault::Broken(error) => {
                self.end(error.clone());
                error
            }
        })
    }

    /// Lets go of a hold, without waiting for a call that has the stream.
    pub(super) fn let_go(&self, hold: u64) {
        let mut state = self.state();
        if state.broken.is_some() {
            return;
        }
        state.over.push(hold);
        if !state.is_taken {
            state.is_taken = true;
            drop(state);
            // Its end tells the service.
            drop(Turn { line: self, deadline: Instant::now() + self.patience });
        }
    }

    /// Waits for the stream.
    fn turn(&self) -> Result<Turn<'_>> {
        let deadline = Instant::now() + self.patience;
        let is_in_use = |state: &mut State| state.is_taken && state.broken.is_none();
        let waited = self.freed.wait_timeout_while(self.state(), self.patience, is_in_use);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = &state.broken {
            return Err(error.clone());
        }
        if state.is_taken {
            return Err(self.lost(&io::ErrorKind::TimedOut.into()));
        }
        state.is_taken = true;
        Ok(Turn { line: self, deadline })
    }

    /// Whether the service has hung up, whatever it sent before.
    pub(super) fn is_over(&self) -> bool {
        // Of a hang-up and an error the system tells unasked.
        let mut polled = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        poll(&mut polled, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }
}

impl Turn<'_> {
    fn send(&self, mut bytes: &[u8]) -> Result<(), Fault> {
        while !bytes.is_empty() {
            let sent = self.ready(PollFlags::OUT).and_then(|()| socket::send(self.line.stream.as_fd(), bytes, &[]));
            match sent {
                Ok(sent) => bytes = &bytes[sent..],
                Err(error) => self.check(&error, false)?,
            }
        }
        Ok(())
    }

    /// The reply to a request. Those to earlier ones, which were late, are passed over.
    fn reply(&self, id: u64) -> Result<(Reply, Option<OwnedFd>), Fault> {
        let broken = |malformed| Fault::Broken(nonsense(malformed));
        loop {
            let (mut header, mut fd) = ([0; HEADER_BYTES], None);
            self.receive(&mut header, true, &mut fd)?;
            let found = Header::decode(&header).map_err(broken)?;
            let mut body = vec![0; found.body_bytes as usize];
            self.receive(&mut body, false, &mut fd)?;
            if found.id != id && found.id != 0 {
                continue;
            }
            return match Reply::decode(found.kind, &body).map_err(broken)? {
                Reply::Goodbye(failure) => Err(Fault::Broken(failure.into())),
                reply => Ok((reply, fd)),
            };
        }
    }

    /// Fills `buf`, and keeps a descriptor that comes with its bytes.
    fn receive(&self, mut buf: &mut [u8], begins_reply: bool, fd: &mut Option<OwnedFd>) -> Result<(), Fault> {
        let all = buf.len();
        while !buf.is_empty() {
            let receive = |()| socket::receive_all(self.line.stream.as_fd(), buf, |came| *fd = Some(came));
            match self.ready(PollFlags::IN).and_then(receive) {
                Ok((0, _)) => return Err(Fault::Broken(self.line.lost(&io::ErrorKind::UnexpectedEof.into()))),
                Ok((bytes, _)) => buf = &mut buf[bytes..],
                Err(error) => self.check(&error, begins_reply && buf.len() == all)?,
            }
        }
        Ok(())
    }

    /// Waits for the stream until the deadline.
    fn ready(&self, flags: PollFlags) -> io::Result<()> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(|_| Errno::INVAL)?;
        match poll(&mut [PollFd::new(&self.line.stream, flags)], Some(&left))? {
            0 => Err(io::ErrorKind::TimedOut.into()),
            _ => Ok(()),
        }
    }

    /// Whether to go on after an error, and what it means where a reply may begin, or elsewhere.
    fn check(&self, error: &io::Error, begins_reply: bool) -> Result<(), Fault> {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(()),
            io::ErrorKind::TimedOut if begins_reply => Err(Fault::Late(self.line.lost(error))),
            _ => Err(Fault::Broken(self.line.lost(error))),
        }
    }
}

impl Drop for Turn<'_> {
    /// Tells the service which holds are over.
    fn drop(&mut self) {
        let mut state = self.line.state();
        while state.broken.is_none() && !state.over.is_empty() {
            let over = take(&mut state.over);
            drop(state);
            let frames: Vec<u8> = over.iter().flat_map(|hold| Request::LetGo { hold: *hold }.encode(0)).collect();
            // A service that does not take them lets go at the hang-up.
            if let Err(Fault::Late(error) | Fault::Broken(error)) = self.send(&frames) {
                self.line.end(error);
            }
            state = self.line.state();
        }
        state.is_taken = false;
        self.line.freed.notify_all();
    }
}
