//! Requests over a real socket that takes few bytes at a time.

use std::{
    io::{self, Read, Write},
    os::{fd::AsRawFd, unix::net::UnixStream},
    sync::{Arc, atomic::AtomicUsize},
};

use tokio::{
    net::UnixStream as AsyncStream,
    sync::oneshot,
    time::{Duration, timeout},
};

use super::Line;
use crate::{
    block::BlockKey,
    error::Result,
    service::{
        client::order::{Call, Counted, What},
        link::Link,
        protocol::{Limits, Reply, Request},
    },
};

const PATIENCE: Duration = Duration::from_secs(60);

/// A socket whose kernel buffer is as small as it can be, and its peer.
fn narrow() -> (AsyncStream, UnixStream) {
    let (ours, theirs) = UnixStream::pair().expect("two sockets");
    for socket in [&ours, &theirs] {
        socket.set_nonblocking(true).expect("set");
    }
    let least: libc::c_int = 1;
    // SAFETY: plain system call on a descriptor that is open; the value outlives it.
    let set = unsafe {
        let bytes = size_of_val(&least) as libc::socklen_t;
        libc::setsockopt(ours.as_raw_fd(), libc::SOL_SOCKET, libc::SO_SNDBUF, (&raw const least).cast(), bytes)
    };
    assert_eq!(set, 0, "{}", io::Error::last_os_error());
    (AsyncStream::from_std(ours).expect("a reactor"), theirs)
}

/// Appends the bytes that have come.
fn read_available(mut from: &UnixStream, to: &mut Vec<u8>) {
    let mut part = [0; 4096];
    while let Ok(len @ 1..) = from.read(&mut part) {
        to.extend_from_slice(&part[..len]);
    }
}

fn begin(line: &Line, id: u64, request: &Request) -> oneshot::Receiver<Result<Reply>> {
    let (reply, answer) = oneshot::channel();
    let counted = Counted::new(&Arc::new(AtomicUsize::new(0)), 1).expect("the first");
    let call = Call { id, frame: request.encode(id), what: What::Plain, reply, keeps: (counted, None) };
    line.begin(call).expect("the line is up");
    answer
}

async fn sends_a_frame_in_parts() {
    let (ours, mut theirs) = narrow();
    let line = Line::new("a test".into(), PATIENCE);
    assert!(line.connect().is_some_and(|lent| lent.is_empty()));
    let (mut receiver, sender) = Link::new(Arc::new(ours)).split();
    receiver.ready(true).await.expect("connected");
    line.connected(sender, &Limits::new(8, 8, 0));

    let long = Request::Contains { keys: (0..4096u16).map(|n| BlockKey::new([n as u8; 32])).collect() };
    let first = begin(&line, 2, &long);
    let sent = long.encode(2);
    let mut came = Vec::new();
    read_available(&theirs, &mut came);
    assert!(!came.is_empty() && came.len() < sent.len(), "{} of {} bytes were taken", came.len(), sent.len());
    // Behind a frame of which a part is sent.
    let second = begin(&line, 4, &Request::Sync);
    let sent = [sent, Request::Sync.encode(4)].concat();
    while came.len() < sent.len() {
        let wait = line.wait();
        let before = came.len();
        read_available(&theirs, &mut came);
        if came.len() == before {
            assert!(wait.to_send, "{before} of {} bytes came, and the thread does not know of the others", sent.len());
            receiver.ready(true).await.expect("connected");
        }
    }
    assert!(came == sent, "the bytes of two frames, in order");

    for (id, reply) in [(2, Reply::Flags(vec![true; 4096])), (4, Reply::Done)] {
        theirs.write_all(&reply.encode(id)).expect("room");
    }
    while !line.lock().pending.is_empty() {
        receiver.ready(false).await.expect("connected");
        receiver.receive().expect("connected");
        while let Some((id, reply)) =
            receiver.next_frame(|header, body| Reply::decode(header.kind, body)).expect("good")
        {
            line.answered(id, reply);
        }
    }
    assert_eq!(first.await.expect("answered").expect("served"), Reply::Flags(vec![true; 4096]));
    assert_eq!(second.await.expect("answered").expect("served"), Reply::Done);
}

#[test]
fn a_frame_that_the_socket_takes_in_part_arrives_whole() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async { timeout(PATIENCE, sends_a_frame_in_parts()).await.expect("no hang") });
}
