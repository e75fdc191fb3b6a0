//! Hang-ups that come after the last transfer, also if the service is killed.
//!
//! The kernel closes the descriptors of a killed process at once, and ends the transfers of its rings later. A client
//! uses its memory again at the hang-up, so a connection must last longer than the rings. They hold a socket open
//! (`Config::disk.rings_hold`), and in that socket's queue lies a descriptor of each connection, in flight from the
//! service to itself and never received. The kernel drops the queue with its socket, when the last ring is gone.
//! Transfers by system calls and copies need no ring: a process's descriptors are closed after its last thread, which
//! does not end in the middle of a transfer.

use std::{
    collections::VecDeque,
    io,
    io::IoSlice,
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Weak},
};

use rustix::{
    cmsg_space,
    net::{
        AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recv,
        sendmsg, socketpair,
    },
};
use tokio::net::UnixStream;

use super::accepted::Aside;
use crate::config::HeldFile;

/// Connections in a message: the kernel takes 253 descriptors.
const MESSAGE_CONNECTIONS_MAX: usize = 128;
/// Messages in the queue before they are merged. The kernel takes some 270 small ones.
const MESSAGES_MAX: usize = 100;
/// Connections that are over may stay in the queue until there are more of them than of others, and than this.
const OVER_MAX: usize = 8;

/// Keeps connections open until the rings of the service are gone.
pub(super) struct LateClose {
    /// What the rings hold.
    queue: Arc<OwnedFd>,
    /// Sends to the queue.
    door: OwnedFd,
    /// The connections of each message in the queue.
    messages: VecDeque<Vec<Weak<UnixStream>>>,
    /// Takes messages out of the queue: the last close of a connection closes what its client sent and nobody received.
    aside: Arc<Aside>,
}

impl LateClose {
    pub(super) fn new(aside: Arc<Aside>) -> io::Result<Self> {
        let (queue, door) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok(LateClose { queue: Arc::new(queue), door, messages: VecDeque::new(), aside })
    }

    /// What every ring must hold that may write to clients' memory.
    pub(super) fn held(&self) -> HeldFile {
        HeldFile::new(Arc::clone(&self.queue))
    }

    /// From now on the peer of this connection sees a hang-up if the connection is shut down, or when the process and
    /// its rings are gone.
    ///
    /// # Errors
    /// The system's: too many descriptors of this user are in flight, say.
    pub(super) fn keep(&mut self, connection: &Arc<UnixStream>) -> io::Result<()> {
        let all = self.messages.iter().flatten();
        let (live, over) = all.fold((0, 0), |(live, over), connection| match connection.strong_count() {
            0 => (live, over + 1),
            _ => (live + 1, over),
        });
        if over > OVER_MAX.max(live) || self.messages.len() >= MESSAGES_MAX {
            self.merge()?;
        }
        self.send(vec![Arc::clone(connection)])
    }

    fn send(&mut self, connections: Vec<Arc<UnixStream>>) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MESSAGE_CONNECTIONS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors: Vec<_> = connections.iter().map(|connection| connection.as_fd()).collect();
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)), "a message has room for them");
        sendmsg(&self.door, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
        self.messages.push_back(connections.iter().map(Arc::downgrade).collect());
        Ok(())
    }

    /// Drops the connections that are over from the queue, and puts the others into fewer messages. Each of the others
    /// is in the queue at every moment: it is sent again before the message that it came with is dropped.
    fn merge(&mut self) -> io::Result<()> {
        let mut left = self.messages.len();
        while left > 0 {
            let (mut live, mut heads) = (Vec::new(), 0);
            for message in self.messages.iter().take(left) {
                let more: Vec<_> = message.iter().filter_map(Weak::upgrade).collect();
                if live.len() + more.len() > MESSAGE_CONNECTIONS_MAX {
                    break;
                }
                live.extend(more);
                heads += 1;
            }
            if !live.is_empty() {
                self.send(live)?;
            }
            self.messages.drain(..heads);
            let queue = Arc::clone(&self.queue);
            // Each was sent before: there are as many. The kernel closes descriptors for which there is no room.
            self.aside.close_by(move || {
                for _ in 0..heads {
                    let _was_sent = recv(&queue, &mut [0], RecvFlags::DONTWAIT);
                }
            });
            left -= heads;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{ErrorKind, Read},
        os::unix::net::UnixStream as StdStream,
    };

    use super::*;

    /// A connection as the service has it, and its client.
    fn connect() -> (Arc<UnixStream>, StdStream) {
        let (ours, theirs) = StdStream::pair().expect("a pair");
        ours.set_nonblocking(true).and_then(|()| theirs.set_nonblocking(true)).expect("set");
        (Arc::new(UnixStream::from_std(ours).expect("in a runtime")), theirs)
    }

    fn is_open(mut client: &StdStream) -> bool {
        match client.read(&mut [0]) {
            Ok(0) => false,
            Err(error) if error.kind() == ErrorKind::WouldBlock => true,
            other => panic!("{other:?}"),
        }
    }

    /// Connections come and go in a drawn order; the service's own descriptors are closed at last, as by a kill.
    #[tokio::test]
    async fn connections_are_open_until_nobody_holds_the_queue() {
        let mut late = LateClose::new(Aside::start().expect("threads")).expect("a pair of sockets");
        let held = late.held();
        let (mut live, mut over) = (Vec::new(), Vec::new());
        for n in 0..600_u64 {
            let (ours, theirs) = connect();
            late.keep(&ours).expect("in flight");
            live.push((ours, theirs));
            // Two of three come and go; some from the middle.
            if n % 3 != 0 {
                let (ours, theirs) = live.swap_remove((n.wrapping_mul(0x9e37_79b9) % live.len() as u64) as usize);
                rustix::net::shutdown(&ours, rustix::net::Shutdown::Both).expect("connected");
                assert!(!is_open(&theirs), "shut down");
                over.push(theirs);
            }
        }
        let kept = late.messages.iter().flatten().count();
        assert!(kept <= 2 * live.len() + OVER_MAX + 1, "{kept} connections are kept, of which {} are open", live.len());
        assert!(late.messages.len() <= MESSAGES_MAX, "{} messages", late.messages.len());
        drop(late);
        let clients: Vec<_> = live.into_iter().map(|(_, theirs)| theirs).collect();
        assert!(clients.iter().all(is_open), "the queue is held");
        drop(held);
        // Nobody holds the queue, once the messages before are taken out.
        for mut client in clients {
            client.set_nonblocking(false).expect("set");
            assert_eq!(client.read(&mut [0]).expect("the end"), 0);
        }
    }
}
