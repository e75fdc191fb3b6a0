use std::{
    io::Read,
    os::{fd::AsRawFd, unix::net::UnixStream as StdStream},
    sync::mpsc,
};

use futures_util::FutureExt;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{MemfdFlags, memfd_create},
};

use super::*;

/// The service's end of a connection, and its client's.
fn connection() -> (UnixStream, StdStream) {
    let (ours, theirs) = StdStream::pair().expect("a pair");
    ours.set_nonblocking(true).expect("set");
    (UnixStream::from_std(ours).expect("in a runtime"), theirs)
}

/// A connection of this user is over, with a descriptor in it that was not received: the other end of the pipe.
fn end_with_descriptor(aside: &Arc<Aside>, uid: u32) -> io::PipeReader {
    let (ours, theirs) = connection();
    let (reader, writer) = io::pipe().expect("a pipe");
    socket::send(theirs.as_fd(), b"not received", &[writer.as_fd()]).expect("room");
    drop(Accepted::new(ours, uid, Arc::clone(aside)).expect("set"));
    reader
}

/// Where a user's file system does not end a close, the descriptors of others are closed and received all the same.
#[tokio::test]
async fn a_close_that_never_ends_is_waited_for_by_its_user_alone() {
    let aside = Aside::start().expect("threads");
    let (end, ends) = mpsc::channel::<()>();
    aside.discard(1, Discard::Unreceived, move || _ = ends.recv());
    let mut of_first: Vec<_> = (0..Discard::Unreceived.most()).map(|_| end_with_descriptor(&aside, 1)).collect();
    let mut of_other = end_with_descriptor(&aside, 2);
    assert_eq!(of_other.read(&mut [0]).expect("closed"), 0);
    tokio::time::timeout(Duration::from_secs(60), aside.room()).await.expect("others are accepted");
    for uid in [1, 2] {
        let (end, _theirs) = connection();
        let accepted = Accepted::new(end, uid, Arc::clone(&aside)).expect("set");
        let refused = accepted.take_descriptors().err().map(|error| error.to_string());
        let is_told = refused.as_ref().is_some_and(|text| text.contains("user 1 has ended 12"));
        assert_eq!((refused.is_some(), is_told), (uid == 1, uid == 1), "user {uid}: {refused:?}");
    }
    drop(end);
    for reader in &mut of_first {
        assert_eq!(reader.read(&mut [0]).expect("closed"), 0);
    }
    // Its thread ends with its jobs.
    let begin = Instant::now();
    while aside.discards().get(&(1, Discard::Unreceived)).is_some_and(|thread| thread.waiting() > 0) {
        assert!(begin.elapsed() < Duration::from_secs(60));
        std::thread::yield_now();
    }
    aside.discard(3, Discard::Unreceived, || ());
    assert!(!aside.discards().contains_key(&(1, Discard::Unreceived)));
}

/// Whose connections ended with descriptors of memory, which takes long to be freed.
#[tokio::test]
async fn memory_of_a_user_is_received_while_connections_of_that_user_are_closed() {
    let aside = Aside::start().expect("threads");
    let (ours, theirs) = connection();
    let memory = memfd_create(c"test", MemfdFlags::CLOEXEC).expect("a memfd");
    let ((other, _writer), (end, ends)) = (io::pipe().expect("a pipe"), mpsc::channel::<()>());
    aside.discard(1, Discard::Unreceived, move || _ = ends.recv());
    let ended: Vec<_> = (0..Discard::Unreceived.most()).map(|_| end_with_descriptor(&aside, 1)).collect();
    let accepted = Accepted::new(ours, 1, Arc::clone(&aside)).expect("set");
    let register = |fd: BorrowedFd<'_>| {
        socket::send(theirs.as_fd(), b"register", &[fd]).expect("room");
        accepted.receive_lent(8)
    };
    assert!(matches!(register(memory.as_fd()).await, Ok((_, Lent::Memory(_)))));
    // What was received and is no memory is another matter: few closes of it may wait, and so many are waited for.
    let (release, held) = mpsc::channel::<()>();
    aside.discard(1, Discard::Received, move || _ = held.recv());
    assert!(matches!(register(other.as_fd()).await, Ok((_, Lent::Other))));
    let refused = register(memory.as_fd()).await.map(drop).expect_err("closes that do not end").to_string();
    assert!(refused.contains("user 1 has sent 2 descriptors"), "{refused}");
    let mut received = accepted.receive_lent(8);
    assert!((&mut received).now_or_never().is_none(), "it was refused at once");
    drop(release);
    assert!(matches!(received.await, Ok((_, Lent::Memory(_)))));
    drop((end, ended));
}

/// Each of all connections that there may be ended with one.
#[tokio::test]
async fn the_closes_of_one_user_hold_up_no_other_users_connection() {
    let aside = Aside::start().expect("threads");
    let (end, ends) = mpsc::channel::<()>();
    aside.discard(1, Discard::Unreceived, move || _ = ends.recv());
    let connections = 4096 + Discard::Unreceived.most();
    (0..connections).for_each(|_| aside.discard(1, Discard::Unreceived, || ()));
    aside.room().now_or_never().expect("there is room");
    (connections..=DISCARDS_MAX).for_each(|_| aside.discard(1, Discard::Unreceived, || ()));
    assert!(aside.room().now_or_never().is_none(), "it has a limit");
    drop(end);
}

/// None is closed where others wait.
#[tokio::test]
async fn descriptors_that_no_frame_wants_are_closed_by_the_thread_of_their_user() {
    let aside = Aside::start().expect("threads");
    let (ours, theirs) = connection();
    let (end, ends) = mpsc::channel::<()>();
    aside.discard(1, Discard::Received, move || _ = ends.recv());
    let (mut reader, writer) = io::pipe().expect("a pipe");
    let more = writer.try_clone().expect("a copy");
    socket::send(theirs.as_fd(), b"register", &[writer.as_fd(), more.as_fd()]).expect("room");
    drop((writer, more));
    let refused = aside.take(&ours, 8, 1).map(drop).expect_err("refused").to_string();
    assert!(refused.contains("more than one"), "{refused}");
    let mut look = [PollFd::new(&reader, PollFlags::IN)];
    assert_eq!(poll(&mut look, Some(&Timespec::default())).expect("polled"), 0, "its thread has not come to them");
    drop(end);
    assert_eq!(reader.read(&mut [0]).expect("closed"), 0);
}

/// The last close of a huge memfd frees its pages. Others' closes and connections do not wait for it.
#[tokio::test]
async fn memory_that_came_with_a_frame_is_closed_by_the_thread_of_its_user() {
    let aside = Aside::start().expect("threads");
    let (ours, theirs) = connection();
    let (end, ends) = mpsc::channel::<()>();
    aside.discard(1, Discard::Memory, move || _ = ends.recv());
    let memory = memfd_create(c"of the user's thread", MemfdFlags::CLOEXEC).expect("a memfd");
    socket::send(theirs.as_fd(), b"register", &[memory.as_fd()]).expect("room");
    let (_, Lent::Memory(lent)) = aside.take(&ours, 8, 1).expect("received") else { panic!("it is memory") };
    let name = format!("/proc/self/fd/{}", lent.as_raw_fd());
    let is_open = || std::fs::read_link(&name).is_ok_and(|file| file.to_string_lossy().contains("of the user's"));
    drop((lent, memory));
    let (tell, told) = mpsc::channel();
    aside.close_by(move || tell.send(()).expect("the test waits"));
    told.recv().expect("what all closes wait for has ended");
    assert!(is_open(), "its thread has not come to it");
    // As many as of closes that may never end.
    (0..=DISCARDS_MAX).for_each(|_| aside.discard(1, Discard::Memory, || ()));
    aside.room().now_or_never().expect("others are accepted");
    let accepted = Accepted::new(ours, 1, Arc::clone(&aside)).expect("set");
    let refused = accepted.receive_lent(8).await.map(drop).expect_err("no more of that user").to_string();
    assert!(refused.contains("descriptors of memory that are not closed yet"), "{refused}");
    drop(end);
    let begin = Instant::now();
    while is_open() {
        assert!(begin.elapsed() < Duration::from_secs(60));
        std::thread::yield_now();
    }
}
