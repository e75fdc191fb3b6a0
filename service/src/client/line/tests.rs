//! Requests over sockets, among them some that take few bytes at a time.

use std::{
    io::{self, Read, Write},
    os::{
        fd::{AsRawFd, BorrowedFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
};

use futures_util::FutureExt;
use kvhoist::{BlockKey, SharedMemory};
use tokio::{
    net::UnixStream as AsyncStream,
    sync::oneshot,
    time::{Duration, Instant, timeout},
};

use super::{Amount, Line};
use crate::{
    client::{
        order::{Answer, Call, Counted, What},
        places::{Lent, Passed},
    },
    error::{Error, Result, ServiceFault},
    link::Link,
    protocol::{BlockPlaces, Blocks, HEADER_BYTES, Header, Limits, RegionKind, Reply, Request},
    wire::{Came, Dialed, Wire},
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
    begin_as(line, id, request, What::Plain)
}

fn begin_as(line: &Line, id: u64, request: &Request, what: What) -> oneshot::Receiver<Result<Reply>> {
    let (call, answer) = call(id, request, what);
    line.begin(call).expect("the line is up");
    answer
}

fn call(id: u64, request: &Request, what: What) -> (Call, oneshot::Receiver<Result<Reply>>) {
    let (reply, answer) = oneshot::channel();
    let keeps = (Counted::new(&Arc::new(AtomicUsize::new(0)), 1).expect("the first"), None);
    let (frame, is_write, reply) = (request.encode(id), request.is_write(), Answer::Caller(reply));
    (Call { id, frame, is_write, what, reply, keeps }, answer)
}

async fn sends_a_frame_in_parts() {
    let (ours, mut theirs) = narrow();
    let line = Line::new("a test".into(), PATIENCE, None);
    assert!(line.connect().is_some_and(|lent| lent.is_empty()));
    let Link { mut receiver, sender } = Link::new(Arc::new(Dialed::new(ours)));
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

#[tokio::test]
async fn a_frame_that_the_socket_takes_in_part_arrives_whole() {
    timeout(PATIENCE, sends_a_frame_in_parts()).await.expect("no hang");
}

/// Takes as many bytes as it has room for.
#[derive(Default)]
struct Narrow {
    room: AtomicUsize,
    taken: Mutex<Vec<u8>>,
}

impl Wire for Narrow {
    fn send(&self, bytes: &[u8], _fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
        let len = bytes.len().min(self.room.load(Ordering::Relaxed));
        if len == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.room.fetch_sub(len, Ordering::Relaxed);
        self.taken.lock().expect("one thread").extend_from_slice(&bytes[..len]);
        Ok(len)
    }

    fn receive(&self, _buf: &mut [u8]) -> io::Result<Came> {
        Err(io::ErrorKind::WouldBlock.into())
    }

    fn end(&self) {}

    fn hang_up(&self) {}

    fn poll_ready(&self, _context: &mut Context<'_>, _receive: bool, _send: bool) -> Poll<io::Result<()>> {
        Poll::Pending
    }
}

/// Whether the thread would go on without waiting.
fn is_woken(line: &Line) -> bool {
    line.woken.notified().now_or_never().is_some()
}

#[test]
fn the_thread_waits_while_the_socket_is_full() {
    let wire = Arc::new(Narrow::default());
    let Link { sender, .. } = Link::new(Arc::clone(&wire) as Arc<dyn Wire>);
    let line = Line::new("a socket".into(), PATIENCE, None);
    line.connected(sender, &Limits::new(8, 8, 1 << 20));
    wire.room.store(HEADER_BYTES + 3, Ordering::Relaxed);
    let requests = [(2, Request::Sync), (4, Request::Unregister { region: 7 }), (6, Request::Stats)];
    let _answers = requests.each_ref().map(|(id, request)| begin(&line, *id, request));
    assert!(is_woken(&line), "bytes are left, which the thread is to send");
    assert!(line.wait().to_send);
    assert!(!is_woken(&line), "the thread waits for the socket, and does not spin");
    assert_eq!(wire.taken.lock().expect("one thread").len(), HEADER_BYTES + 3);
    for _ in 0..1000 {
        wire.room.store(1, Ordering::Relaxed);
        line.wait();
    }
    assert!(!line.wait().to_send, "all is sent");
    let frames = requests.map(|(id, request)| request.encode(id)).concat();
    assert_eq!(*wire.taken.lock().expect("one thread"), frames);
}

#[test]
fn a_call_that_does_not_begin_tells_its_answer_why() {
    let line = Line::new("a test".into(), PATIENCE, None);
    let away = Error::service(ServiceFault::Unavailable, "a service that is away");
    line.lost(&away);
    let (call, answer) = call(2, &Request::Sync, What::Plain);
    let refused = line.begin(call).expect_err("the service is away").to_string();
    let told = answer.now_or_never().expect("ended").expect("not dropped").expect_err("it did not begin").to_string();
    assert!(refused == told && told.contains("a service that is away"), "{refused}, {told}");
}

#[test]
fn a_call_that_is_answered_leaves_no_deadline_behind() {
    let line = Line::new("a test".into(), PATIENCE, None);
    let _never_answered = begin(&line, 2, &Request::Sync);
    for id in (4..100).step_by(2) {
        let _answer = begin(&line, id, &Request::Sync);
        line.answered(id, Reply::Done);
        assert_eq!(line.lock().deadlines.len(), 1);
    }
}

#[tokio::test]
async fn memory_that_nobody_waits_for_is_taken_back_within_the_limit_of_requests() {
    let (ours, theirs) = UnixStream::pair().expect("two sockets");
    for socket in [&ours, &theirs] {
        socket.set_nonblocking(true).expect("set");
    }
    let line = Line::new("a test".into(), PATIENCE, None);
    assert!(line.connect().is_some_and(|lent| lent.is_empty()));
    let Link { receiver, sender } = Link::new(Arc::new(Dialed::new(AsyncStream::from_std(ours).expect("a reactor"))));
    receiver.ready(true).await.expect("connected");
    line.connected(sender, &Limits::new(1, 8, 0));
    let memory = SharedMemory::new(4096).expect("memory");
    let fd = Arc::new(memory.as_fd().try_clone_to_owned().expect("a descriptor"));
    let lent = Lent {
        number: 7,
        start: memory.as_ptr() as usize,
        len: 4096,
        passed: Passed::Memfd { fd, offset: 0, pin: false, kind: RegionKind::Host },
    };
    let register = Request::Register { region: 7, kind: RegionKind::Host, pin: false, offset: 0, len: 4096 };
    drop(begin_as(&line, 2, &register, What::Register(lent)));
    let _other = begin(&line, 4, &Request::Sync);
    // The other call has the one place; nobody waits for the memory any more.
    line.answered(2, Reply::Done);
    let mut came = Vec::new();
    read_available(&theirs, &mut came);
    assert!(came == [register.encode(2), Request::Sync.encode(4)].concat(), "one request at a time");
    line.answered(4, Reply::Done);
    came.clear();
    read_available(&theirs, &mut came);
    assert!(came == Request::Unregister { region: 7 }.encode(3));
}

#[test]
fn calls_that_are_dropped_unsent_leave_nothing() {
    let line = Line::new("a test".into(), PATIENCE, None);
    let stays = begin(&line, 0, &Request::Status);
    for id in 1..1000 {
        drop(begin(&line, id, &Request::Status));
        line.forget(id);
        assert!(line.lock().waiting.len() < 8, "after {id}");
    }
    assert!(line.lock().waiting.contains(&0));
    drop(stays);
}

/// The service hangs: memory that it has is not the caller's again because the client ends.
#[tokio::test]
async fn after_a_close_that_was_given_up_no_memory_is_said_to_be_free() {
    let Link { sender, .. } = Link::new(Arc::new(Narrow::default()));
    let line = Line::new("a test".into(), PATIENCE, Some(PATIENCE));
    line.connected(sender, &Limits::new(8, 8, 1 << 20));
    let moved = begin_as(&line, 2, &Request::Sync, What::Move);
    let unregister = Request::Unregister { region: 7 };
    let unregistered = begin_as(&line, 4, &unregister, What::Unregister(7));
    let (tell, closed) = oneshot::channel();
    line.close(Some(tell)).expect("it is open");
    line.lock().closed_by = Some(Instant::now());
    assert!(line.late(), "the service has not hung up in time");
    let is_abandoned = |error: &Error| matches!(error, Error::Service { fault: ServiceFault::Abandoned, .. });
    let take_back = |id: u64| line.begin(call(id, &unregister, What::Unregister(7)).0).expect_err("it never will be");
    assert!(is_abandoned(&take_back(6)));
    assert!(line.lost(&Error::service(ServiceFault::Away, "no hang-up after the close")));
    assert!(is_abandoned(&take_back(8)));
    line.closed();
    for answer in [moved, unregistered] {
        assert!(is_abandoned(&answer.await.expect("answered").expect_err("the service has the memory")));
    }
    assert!(is_abandoned(&closed.await.expect("answered").expect_err("it has not hung up")));
    assert!(is_abandoned(&take_back(10)) && is_abandoned(&line.close(None).expect_err("closed")));
    let other = line.begin(call(12, &Request::Sync, What::Plain).0).expect_err("closed");
    assert!(matches!(other, Error::Closed), "{other}");
}

/// Ids of the requests that were sent since, in order.
fn sent(wire: &Narrow) -> Vec<u64> {
    let bytes = std::mem::take(&mut *wire.taken.lock().expect("one thread"));
    let (mut rest, mut ids) = (&bytes[..], Vec::new());
    while let Some(header) = rest.first_chunk() {
        let header = Header::decode(header).expect("a frame");
        ids.push(header.id);
        rest = &rest[HEADER_BYTES + header.body_bytes as usize..];
    }
    ids
}

/// More stores than the service takes, of requests or of bytes: they have half of it, and keep their order.
#[test]
fn a_load_does_not_wait_for_stores_that_are_queued() {
    let blocks = || Blocks { keys: vec![BlockKey::new([7; 32])], places: [[]; 1].iter().collect::<BlockPlaces>() };
    let store = Request::Store { parent: None, blocks: blocks() };
    let bytes = store.encode(2).len();
    for most in [Amount { calls: 8, bytes: 1 << 20 }, Amount { calls: 1000, bytes: 8 * bytes }] {
        let wire = Arc::new(Narrow { room: AtomicUsize::new(1 << 20), ..Narrow::default() });
        let Link { sender, .. } = Link::new(Arc::clone(&wire) as Arc<dyn Wire>);
        let line = Line::new("a socket".into(), PATIENCE, None);
        line.connected(sender, &Limits::new(8, 8, 1 << 20));
        line.lock().sent_max = most;
        let mut answers: Vec<_> = (1..=20).map(|n| begin(&line, 2 * n, &store)).collect();
        answers.push(begin(&line, 42, &Request::Sync));
        assert_eq!(sent(&wire), [2, 4, 6, 8]);
        let load = Request::Load(blocks());
        answers.extend((22..=30).map(|n| begin(&line, 2 * n, &load)));
        assert_eq!(sent(&wire), [44, 46, 48, 50], "loads have the rest");
        // Whoever waits longest has the next place, but for stores beyond their half.
        let done = |id| line.answered(id, Reply::Done);
        done(44);
        assert_eq!(sent(&wire), [52]);
        line.forget(12);
        [2, 4].into_iter().for_each(done);
        assert_eq!(sent(&wire), [10, 14], "the order of stores");
        (46..=60).step_by(2).for_each(done);
        assert_eq!(sent(&wire), [54, 56, 58, 60]);
        for id in [6, 8, 10, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40] {
            done(id);
        }
        assert_eq!(sent(&wire), [16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42], "no store has left its half");
        done(42);
        let state = line.lock();
        assert!(state.pending.is_empty() && state.waiting.is_empty() && state.overtaken.is_empty());
        assert_eq!((state.sent.calls, state.sent.bytes, state.sent_writes.calls), (0, 0, 0));
    }
}

/// Else it would be answered before the service imports the memory, which takes a thread of its own.
#[tokio::test]
async fn memory_that_is_offered_again_is_taken_back_after_the_answer() {
    let (ours, theirs) = narrow();
    let line = Line::new("a test".into(), PATIENCE, None);
    let Link { receiver, sender } = Link::new(Arc::new(Dialed::new(ours)));
    receiver.ready(true).await.expect("connected");
    line.connected(sender, &Limits::new(8, 8, 1 << 20));
    let passed = Passed::Device { handle: [0; _], offset: 0 };
    line.lock().lent.insert(1, Lent { number: 1, start: 0, len: 4096, passed });
    let _reply = line.offer(1).expect("lent");
    let mut came = Vec::new();
    read_available(&theirs, &mut came);
    assert!(!came.is_empty(), "the offer is sent");
    let offer = line.lock().own_id;
    let back = Request::Unregister { region: 1 };
    let _answer = begin_as(&line, 2, &back, What::Unregister(1));
    came.clear();
    read_available(&theirs, &mut came);
    assert!(came.is_empty(), "the service has not answered");
    line.answered(offer, Reply::Registered { pinned: false });
    read_available(&theirs, &mut came);
    assert!(came.starts_with(&back.encode(2)), "{} bytes", came.len());
    assert!(line.offer(1).is_none(), "it is taken back");
}
