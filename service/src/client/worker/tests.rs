//! A service whose bytes the client does not understand.

use std::{
    cell::Cell,
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    sync::{Arc, atomic::AtomicUsize, mpsc},
    thread,
    time::Duration,
};

use tokio::{
    net::UnixStream as AsyncStream,
    runtime::Builder,
    sync::oneshot::{self, error::TryRecvError},
};

use super::Worker;
use crate::{
    client::{
        line::Line,
        options::ClientOptions,
        order::{Answer, Call, Counted, What},
    },
    error::{Error, Result, ServiceFault},
    protocol::{Blocks, HEADER_BYTES, Header, Hello, Limits, Reply, Request, SpaceDevice, Welcome},
    wire::{Dialed, Wire},
};

const PATIENCE: Duration = Duration::from_secs(60);
/// No header of a frame.
const NONSENSE: [u8; HEADER_BYTES] = [0xff; HEADER_BYTES];

/// The request that comes next.
fn next_request(stream: &mut UnixStream) -> (u64, Request) {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header).expect("a client");
    let header = Header::decode(&header).expect("a header");
    let mut body = vec![0; header.body_bytes as usize];
    stream.read_exact(&mut body).expect("a client");
    (header.id, Request::decode(header.kind, &body).expect("a request"))
}

/// A client that has connected, and the service's end of its connection. `patience`: its deadline, and how long it
/// waits after that. `again` is told when it dials once more, and nobody accepts it.
fn connects(patience: Duration, again: mpsc::Sender<()>) -> (UnixStream, Arc<Line>) {
    let (ours, mut theirs) = UnixStream::pair().expect("two sockets");
    ours.set_nonblocking(true).expect("set");
    theirs.set_read_timeout(Some(PATIENCE)).and_then(|()| theirs.set_write_timeout(Some(PATIENCE))).expect("set");
    let line = Arc::new(Line::new("a test".into(), patience, Some(patience)));
    let (first, connected) = oneshot::channel();
    let of_client = Arc::clone(&line);
    thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let ours = Cell::new(Some(ours));
        let dial = async move || match ours.take() {
            Some(ours) => Ok(Arc::new(Dialed::new(AsyncStream::from_std(ours)?)) as Arc<dyn Wire>),
            None => {
                let _nobody_waits = again.send(());
                Err(io::ErrorKind::WouldBlock.into())
            }
        };
        let (options, device) = (ClientOptions::new("tests", 4096), SpaceDevice::None);
        let (socket, places) = ("a test".into(), Arc::default());
        runtime.block_on(Worker { dial, socket, options, device, line: of_client, places }.run(first));
    });
    theirs.read_exact(&mut [0; Hello::BYTES]).expect("a hello");
    let welcome = Welcome::new(Ok(Hello::ours().version_max), Limits::new(8, 8, 1 << 20));
    theirs.write_all(&welcome.encode()).expect("a client");
    let (id, _attach) = next_request(&mut theirs);
    let attached = Reply::Attached { block_bytes: 4096, capacity_bytes: 0, host_bytes: 0 };
    theirs.write_all(&attached.encode(id)).expect("a client");
    connected.blocking_recv().expect("an answer").expect("connected");
    (theirs, line)
}

fn begin(line: &Line, request: &Request, what: What) -> oneshot::Receiver<Result<Reply>> {
    let (reply, answer) = oneshot::channel();
    let keeps = (Counted::new(&Arc::new(AtomicUsize::new(0)), 1).expect("the first"), None);
    let (frame, is_write, reply) = (request.encode(2), request.is_write(), Answer::Caller(reply));
    line.begin(Call { id: 2, frame, is_write, what, reply, keeps }).expect("it begins");
    answer
}

/// A client that loads into its memory: the service's end of its connection, and what the load comes to. `patience` as
/// of [`connects`].
fn loads(patience: Duration) -> (UnixStream, oneshot::Receiver<Result<Reply>>) {
    let (mut theirs, line) = connects(patience, mpsc::channel().0);
    let answer = begin(&line, &Request::Load(Blocks::default()), What::Move);
    assert!(matches!(next_request(&mut theirs), (2, Request::Load(_))));
    (theirs, answer)
}

#[test]
fn calls_wait_for_the_hang_up_of_a_service_that_sends_nonsense() {
    let (mut theirs, mut answer) = loads(PATIENCE);
    theirs.write_all(&NONSENSE).expect("a client");
    assert_eq!(theirs.read(&mut [0; 64]).expect("connected"), 0, "the client sends nothing more");
    theirs.write_all(&[0xff; 1 << 20]).expect("the client takes what comes until the hang-up");
    assert!(matches!(answer.try_recv(), Err(TryRecvError::Empty)), "the service may still use the memory");
    drop(theirs);
    match answer.blocking_recv().expect("an answer") {
        Err(Error::Service { fault: ServiceFault::Away, text }) => assert!(text.contains("nonsense"), "{text}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn memory_is_given_up_where_the_hang_up_after_nonsense_does_not_come() {
    let (mut theirs, answer) = loads(Duration::from_millis(20));
    theirs.write_all(&NONSENSE).expect("a client");
    match answer.blocking_recv().expect("an answer") {
        Err(Error::Service { fault: ServiceFault::Abandoned, .. }) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn memory_is_taken_back_at_once_while_nobody_accepts_the_client() {
    let (again, dials_again) = mpsc::channel();
    let (theirs, line) = connects(PATIENCE, again);
    drop(theirs);
    dials_again.recv_timeout(PATIENCE).expect("a client");
    let mut answer = begin(&line, &Request::Unregister { region: 1 }, What::Unregister(1));
    match answer.try_recv() {
        Ok(Ok(Reply::Done)) => {}
        other => panic!("{other:?}"),
    }
}
