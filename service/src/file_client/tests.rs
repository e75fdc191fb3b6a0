//! A connection for files whose service is the test.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
};

use super::*;
use crate::protocol::{Failure, HEADER_BYTES, Header};

const SHORT: Duration = Duration::from_millis(50);
const LONG: Duration = Duration::from_secs(60);

fn connect(patience: Duration) -> (Line, UnixStream) {
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    theirs.set_read_timeout(Some(LONG)).expect("set");
    (Line::new("socket".into(), ours, patience), theirs)
}

/// The next request, and its id; `None` at the hang-up.
fn received(mut service: &UnixStream) -> Option<(u64, Request)> {
    let mut header = [0; HEADER_BYTES];
    service.read_exact(&mut header).ok()?;
    let header = Header::decode(&header).expect("a header");
    let mut body = vec![0; header.body_bytes as usize];
    service.read_exact(&mut body).expect("a body");
    Some((header.id, Request::decode(header.kind, &body).expect("a request")))
}

fn send(mut service: &UnixStream, bytes: &[u8]) {
    service.write_all(bytes).expect("connected");
}

/// What the replies of these tests are known by.
fn failed(text: &str) -> Reply {
    Reply::Failed(Failure::new(ServiceFault::Capacity, text))
}

fn fault(answered: Result<(Reply, Option<OwnedFd>)>) -> (ServiceFault, String) {
    match answered {
        Err(Error::Service { fault, text }) => (fault, text),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_reply_that_is_late_is_passed_over_and_its_hold_let_go_of() {
    let (line, service) = connect(SHORT);
    assert_eq!(fault(line.ask(1, &Request::Status)).0, ServiceFault::Timeout);
    send(&service, &[failed("late").encode(1), failed("in time").encode(2)].concat());
    assert_eq!(line.ask(2, &Request::Status).expect("a reply").0, failed("in time"));
    let found = [(1, Request::Status), (0, Request::LetGo { hold: 1 }), (2, Request::Status)];
    assert_eq!([(); 3].map(|()| received(&service).expect("sent")), found);
}

#[test]
fn a_connection_that_broke_has_the_same_error_at_once() {
    let reply = failed("whole").encode(1);
    let goodbye = Reply::Goodbye(Failure::new(ServiceFault::Draining, "the end")).encode(0);
    for (bytes, expected) in [
        (&reply[..5], ServiceFault::Timeout),
        (&reply[..HEADER_BYTES + 1], ServiceFault::Timeout),
        (&[0xff; HEADER_BYTES], ServiceFault::Protocol),
        (&goodbye, ServiceFault::Draining),
    ] {
        let (line, service) = connect(SHORT);
        send(&service, bytes);
        let found = fault(line.ask(1, &Request::Status));
        assert_eq!(found.0, expected);
        assert_eq!(fault(line.ask(2, &Request::Status)), found);
        line.let_go(7);
        assert!(line.is_over());
        assert_eq!((received(&service), received(&service)), (Some((1, Request::Status)), None));
    }
}

#[test]
fn threads_that_wait_for_the_connection_wait_no_longer_than_one_call() {
    // Longer than a thread waits for a processor on a busy machine.
    const PATIENCE: Duration = Duration::from_secs(10);
    let (line, _hangs) = connect(PATIENCE);
    let ask = |id| {
        let begun = Instant::now();
        (fault(line.ask(id, &Request::Status)).0, begun.elapsed())
    };
    let ended = thread::scope(|scope| {
        let asks = [1, 2, 3, 4].map(|id| scope.spawn(move || ask(id)));
        asks.map(|ask| ask.join().expect("no panic"))
    });
    for (fault, elapsed) in ended {
        assert!(fault == ServiceFault::Timeout && elapsed < 2 * PATIENCE, "{fault:?} after {elapsed:?}");
    }
}

#[test]
fn a_file_is_let_go_of_without_waiting_for_a_call_that_hangs() {
    let (line, service) = connect(LONG);
    thread::scope(|scope| {
        let asked = scope.spawn(|| line.ask(1, &Request::Status));
        assert_eq!(received(&service), Some((1, Request::Status)));
        let begun = Instant::now();
        line.let_go(7);
        line.let_go(8);
        assert!(begun.elapsed() < LONG / 2);
        send(&service, &failed("at last").encode(1));
        assert_eq!(asked.join().expect("no panic").expect("a reply").0, failed("at last"));
    });
    let found = [7, 8].map(|hold| (0, Request::LetGo { hold }));
    assert_eq!([(); 2].map(|()| received(&service).expect("sent")), found);
    line.let_go(9);
    assert_eq!(received(&service), Some((0, Request::LetGo { hold: 9 })));
}

#[test]
fn a_hang_up_is_seen_behind_what_nobody_has_read() {
    let (line, service) = connect(LONG);
    send(&service, &Reply::Goodbye(Failure::new(ServiceFault::Draining, "the end")).encode(0));
    assert!(!line.is_over());
    drop(service);
    assert!(line.is_over());
}

#[test]
fn a_file_whose_descriptor_had_no_room_is_let_go_of() {
    let (line, service) = connect(LONG);
    send(&service, &Reply::Held.encode(1));
    let file = SourceFile::open(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")).expect("it is there");
    match FileClient::of(line).hold(&file, false) {
        Err(Error::Service { fault: ServiceFault::Busy, text }) => assert!(text.contains("ulimit -n"), "{text}"),
        other => panic!("{other:?}"),
    }
    assert!(matches!(received(&service), Some((1, Request::Hold { .. }))));
    assert_eq!(received(&service), Some((0, Request::LetGo { hold: 1 })));
}
