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

use kvhoist::internals::service::HeldFile;
use rustix::{
    cmsg_space,
    net::{
        AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recv,
        sendmsg, socketpair,
    },
};
use tokio::net::UnixStream;

use super::accepted::Aside;

/// Connections in a message: the kernel takes 253 descriptors.
const MESSAGE_CONNECTIONS_MAX: usize = 128;
/// Connections that a message has room for, as long as all of them fit into few messages: the queue takes some 270, and
/// a connection that comes waits for two of them.
const MESSAGE_CONNECTIONS: usize = 16;

/// Keeps connections open until the rings of the service are gone.
pub(super) struct LateClose {
    /// What the rings hold.
    queue: Arc<OwnedFd>,
    /// Sends to the queue.
    door: OwnedFd,
    /// The connections of each message in the queue, but for those that are being taken out.
    messages: VecDeque<Vec<Weak<UnixStream>>>,
    /// The connections of all messages.
    kept: usize,
    /// Takes messages out of the queue: the last close of a connection closes what its client sent and nobody received.
    aside: Arc<Aside>,
}

impl LateClose {
    pub(super) fn new(aside: Arc<Aside>) -> io::Result<Self> {
        let (queue, door) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok(LateClose { queue: Arc::new(queue), door, messages: VecDeque::new(), kept: 0, aside })
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
        // Before anything is sent: where the system keeps no more, these may be why.
        let is_over =
            |message: &&Vec<Weak<UnixStream>>| message.iter().all(|connection| connection.strong_count() == 0);
        self.take_out(self.messages.iter().take_while(is_over).count());
        let room = (self.kept / 32).clamp(MESSAGE_CONNECTIONS, MESSAGE_CONNECTIONS_MAX);
        let mut connections = vec![Arc::clone(connection)];
        // The oldest messages, two at most, are sent again without the connections that are over: few are in the queue
        // for long, and no connection waits until all messages were sent again.
        let (mut heads, mut sent_again) = (0, 0);
        while heads < 2
            && let Some(message) = self.messages.get(heads)
        {
            let live: Vec<_> = message.iter().filter_map(Weak::upgrade).collect();
            if connections.len() + live.len() <= room {
                connections.extend(live);
            } else if heads == 0 {
                self.send(&live)?;
                sent_again = 1;
            } else {
                break;
            }
            heads += 1;
        }
        let sent = self.send(&connections);
        // Also where that failed: each further attempt would send the same ones again.
        self.take_out(if sent.is_ok() { heads } else { sent_again });
        sent
    }

    fn send(&mut self, connections: &[Arc<UnixStream>]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MESSAGE_CONNECTIONS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors: Vec<_> = connections.iter().map(|connection| connection.as_fd()).collect();
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)), "a message has room for them");
        sendmsg(&self.door, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
        self.messages.push_back(connections.iter().map(Arc::downgrade).collect());
        self.kept += connections.len();
        Ok(())
    }

    /// Drops the oldest messages. What is open of them was sent again before, so that each open connection is in the
    /// queue at every moment.
    fn take_out(&mut self, heads: usize) {
        if heads == 0 {
            return;
        }
        self.kept -= self.messages.drain(..heads).map(|message| message.len()).sum::<usize>();
        let queue = Arc::clone(&self.queue);
        // The listener lets few of these jobs wait. The kernel closes descriptors for which there is no room.
        self.aside.close_by(move || {
            for _ in 0..heads {
                let _was_sent = recv(&queue, &mut [0], RecvFlags::DONTWAIT);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{ErrorKind, Read},
        os::unix::net::UnixStream as StdStream,
    };

    use tokio::sync::oneshot;

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

    /// Fills the queue, up to so many messages more, with some that hold no connection.
    fn fill(late: &LateClose, room: usize) {
        while rustix::net::send(&late.door, &[0], SendFlags::DONTWAIT).is_ok() {}
        for _ in 0..room {
            recv(&late.queue, &mut [0], RecvFlags::DONTWAIT).expect("one is there");
        }
    }

    /// Waits until messages are received that were taken out.
    async fn taken_out(late: &LateClose) {
        let (tell, told) = oneshot::channel();
        late.aside.close_by(move || tell.send(()).expect("the test waits"));
        told.await.expect("a thread");
    }

    #[tokio::test]
    async fn a_queue_without_room_takes_connections_again_once_those_before_are_over() {
        let mut late = LateClose::new(Aside::start().expect("threads")).expect("a pair of sockets");
        let before: Vec<_> = (0..40).map(|_| connect()).collect();
        for (ours, _) in &before {
            late.keep(ours).expect("in flight");
        }
        taken_out(&late).await;
        fill(&late, 0);
        let (ours, _theirs) = connect();
        late.keep(&ours).expect_err("no room");
        assert!(late.kept >= 40);
        drop(before);
        drop(late.keep(&ours));
        taken_out(&late).await;
        late.keep(&ours).expect("room, where those before were");
        assert!(late.kept <= 2, "{} are kept for one", late.kept);
    }

    #[tokio::test]
    async fn attempts_that_fail_send_no_connection_again_and_again() {
        let mut late = LateClose::new(Aside::start().expect("threads")).expect("a pair of sockets");
        let live: Vec<_> = (0..MESSAGE_CONNECTIONS).map(|_| connect()).collect();
        let streams: Vec<_> = live.iter().map(|(ours, _)| Arc::clone(ours)).collect();
        fill(&late, 2);
        late.send(&streams).expect("room for two");
        let (ours, _theirs) = connect();
        late.keep(&ours).expect_err("those before have taken it");
        assert_eq!((late.kept, late.messages.len()), (live.len(), 1));
    }

    /// Connections come and go in a drawn order; the service's own descriptors are closed at last, as by a kill.
    #[tokio::test]
    async fn connections_are_open_until_nobody_holds_the_queue() {
        let mut late = LateClose::new(Aside::start().expect("threads")).expect("a pair of sockets");
        let held = late.held();
        let (mut live, mut over) = (Vec::new(), Vec::new());
        for n in 0..600_u64 {
            let (ours, theirs) = connect();
            late.aside.room().await;
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
        assert_eq!(kept, late.kept);
        assert!(kept <= 2 * live.len(), "{kept} connections are kept, of which {} are open", live.len());
        assert!(late.messages.len() <= 64, "{} messages", late.messages.len());
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
