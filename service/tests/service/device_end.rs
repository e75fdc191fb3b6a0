//! Clients with device memory whose service is a double: the hang-up alone does not end the use of their memory.

use std::{
    io::{IoSlice, Read, Write},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    process::{Child, Command},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use kvhoist::{DeviceKind, Error, Memory, Segment, ServiceFault, SharedMemory, block_on};
use kvhoist_service::{
    Client, ClientOptions, ClientRegion,
    internals::protocol::{HEADER_BYTES, Header, Hello, Limits, Reply, Request, Welcome},
};
use rustix::{
    event::{EventfdFlags, eventfd},
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
    process::{Pid, PidfdFlags, pidfd_open},
};
use tempfile::TempDir;

use crate::{common::key, node::HANG};

const BLOCK_BYTES: usize = 4096;
/// Longer than a client takes that does not wait.
const SOON: Duration = Duration::from_millis(200);
/// Longer than a client takes to attach, also on a busy machine.
const DEADLINE: Duration = Duration::from_secs(10);

/// A process that lives until it is killed, in place of the service's.
struct Victim(Child);

impl Victim {
    fn new() -> Self {
        Victim(Command::new("sleep").arg("600").spawn().expect("a process"))
    }

    fn kill(&mut self) {
        self.0.kill().expect("killed");
        self.0.wait().expect("dead");
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// The service's end of a connection.
struct Double {
    listener: UnixListener,
    stream: UnixStream,
    released: OwnedFd,
    victim: Victim,
    _place: TempDir,
}

impl Double {
    /// A client of it, with its memory.
    fn with_client(give_up: Option<Duration>) -> (Self, Client, Arc<SharedMemory>, ClientRegion) {
        let place = tempfile::tempdir().expect("a directory");
        let path = place.path().join("s");
        let listener = UnixListener::bind(&path).expect("a socket");
        let mut options = ClientOptions::new("tests", BLOCK_BYTES);
        options.device = Some(DeviceKind::Simulated);
        // One that gives up does so after its deadline.
        (options.deadline, options.give_up) = (if give_up.is_some() { DEADLINE } else { HANG }, give_up);
        let memory = Arc::new(SharedMemory::new(BLOCK_BYTES).expect("memory"));
        let client = thread::spawn(move || block_on(Client::connect(path, options)).expect("admitted"));
        let mut double = Double::accept(listener, place);
        let client = client.join().expect("a client");
        let registers = {
            let (client, memory) = (client.clone(), Arc::clone(&memory));
            // SAFETY: nothing is moved there.
            thread::spawn(move || block_on(client.register_device(unsafe { Memory::shared(memory) })))
        };
        let (id, request) = double.request();
        assert!(matches!(request, Request::Register { .. }), "{request:?}");
        double.send(&Reply::Registered { pinned: false }.encode(id));
        let region = registers.join().expect("no panic").expect("registered");
        (double, client, memory, region)
    }

    fn accept(listener: UnixListener, place: TempDir) -> Self {
        let (mut stream, _) = listener.accept().expect("a client");
        let mut hello = [0; Hello::BYTES];
        stream.read_exact(&mut hello).expect("a hello");
        let version = Hello::decode(&hello).expect("a hello").common_version().expect("ours");
        stream.write_all(&Welcome::new(Ok(version), Limits::new(8, 8, 1 << 30)).encode()).expect("taken");
        let released = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
        let mut double = Double { listener, stream, released, victim: Victim::new(), _place: place };
        let (id, request) = double.request();
        assert!(matches!(request, Request::Attach { .. }), "{request:?}");
        let attached = Reply::Attached { block_bytes: BLOCK_BYTES as u64, capacity_bytes: 0, host_bytes: 1 << 20 };
        let pid = Pid::from_raw(double.victim.0.id().cast_signed()).expect("a process");
        let process = pidfd_open(pid, PidfdFlags::empty()).expect("it lives");
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = [process.as_fd(), double.released.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
        let frame = attached.encode(id);
        let sent = sendmsg(&double.stream, &[IoSlice::new(&frame)], &mut control, SendFlags::empty()).expect("taken");
        assert_eq!(sent, frame.len());
        double
    }

    fn request(&mut self) -> (u64, Request) {
        let mut header = [0; HEADER_BYTES];
        self.stream.read_exact(&mut header).expect("a frame");
        let header = Header::decode(&header).expect("a header");
        let mut body = vec![0; header.body_bytes as usize];
        self.stream.read_exact(&mut body).expect("its body");
        (header.id, Request::decode(header.kind, &body).expect("a request"))
    }

    fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("taken");
    }

    /// Hangs up, as the kernel does while a process ends.
    fn hang_up(&self) {
        self.stream.shutdown(std::net::Shutdown::Both).expect("connected");
    }
}

/// A load that the service has begun, on a thread of its own.
fn begin_load(
    double: &mut Double,
    client: &Client,
    memory: &Arc<SharedMemory>,
) -> thread::JoinHandle<Result<Vec<Result<bool, Error>>, Error>> {
    let (client, memory) = (client.clone(), Arc::clone(memory));
    let load = thread::spawn(move || {
        let place = vec![Segment { ptr: memory.as_ptr(), len: BLOCK_BYTES }];
        block_on(client.load_into(&[key(1)], &[place]))
    });
    let (_, request) = double.request();
    assert!(matches!(request, Request::Load(_)), "{request:?}");
    load
}

/// It is a promise that nothing happens: the time in which something would is waited for.
fn is_waiting<T>(load: &thread::JoinHandle<T>) -> bool {
    thread::sleep(SOON);
    !load.is_finished()
}

#[track_caller]
fn assert_fault<T: std::fmt::Debug>(result: Result<T, Error>, expected: ServiceFault) {
    match result {
        Err(Error::Service { fault, .. }) if fault == expected => {}
        other => panic!("{other:?}, expected {expected:?}"),
    }
}

#[test]
fn a_load_ends_when_the_process_of_its_service_is_gone() {
    let (mut double, client, memory, region) = Double::with_client(None);
    let load = begin_load(&mut double, &client, &memory);
    double.hang_up();
    assert!(is_waiting(&load), "the device may copy on while the process ends");
    // Also who takes the memory back waits for that; other calls do not.
    assert_fault(block_on(client.match_len(&[key(1)])), ServiceFault::Away);
    let unregister = thread::spawn(move || block_on(client.unregister(&region)));
    assert!(is_waiting(&unregister));
    double.victim.kill();
    assert_fault(load.join().expect("no panic"), ServiceFault::Away);
    unregister.join().expect("no panic").expect("its memory is free");
}

#[test]
fn a_service_that_lives_says_that_it_has_let_go() {
    let (mut double, client, memory, _region) = Double::with_client(None);
    let load = begin_load(&mut double, &client, &memory);
    double.hang_up();
    assert!(is_waiting(&load));
    rustix::io::write(&double.released, &1u64.to_ne_bytes()).expect("told");
    assert_fault(load.join().expect("no panic"), ServiceFault::Away);
    // It connects again.
    double.listener.accept().expect("the same client");
}

#[test]
fn memory_is_given_up_to_a_process_that_does_not_end() {
    let (mut double, client, memory, region) = Double::with_client(Some(Duration::from_millis(500)));
    let load = begin_load(&mut double, &client, &memory);
    double.hang_up();
    assert_fault(load.join().expect("no panic"), ServiceFault::Abandoned);
    let begin = Instant::now();
    assert_fault(block_on(client.unregister(&region)), ServiceFault::Abandoned);
    assert_fault(block_on(client.close()), ServiceFault::Abandoned);
    assert!(begin.elapsed() < 2 * HANG);
}

#[test]
fn bytes_that_no_service_sends_do_not_free_the_memory() {
    let (mut double, client, memory, _region) = Double::with_client(None);
    let load = begin_load(&mut double, &client, &memory);
    double.send(&[0xff; 64]);
    // The client hangs up, and waits: for the hang-up of its service, and for what tells of device memory.
    assert_eq!(double.stream.read(&mut [0; 16]).expect("the end"), 0);
    assert!(is_waiting(&load));
    double.hang_up();
    assert!(is_waiting(&load));
    rustix::io::write(&double.released, &1u64.to_ne_bytes()).expect("told");
    assert_fault(load.join().expect("no panic"), ServiceFault::Away);
}
