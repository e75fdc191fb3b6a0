//! What a client can do to hang the service's thread: descriptors whose close waits.

use std::{
    fs::{self, File},
    io::{self, IoSliceMut, Read, Write},
    mem::MaybeUninit,
    net::{TcpListener, TcpStream},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use kvhoist::{Error, ServiceFault, block_on};
use kvhoist_service::{
    Client,
    internals::protocol::{Hello, RegionKind, Reply, Request, SpaceDevice},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{OFlags, fcntl_setfl},
    io::Errno,
    net::{
        self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketAddrUnix, SocketFlags,
        SocketType,
    },
};

use crate::{
    common,
    node::{BLOCK_BYTES, HANG, Node, Process, Stopped, options, say},
    pool_client::PoolClient,
    raw::{Raw, attach},
};

/// Far more than a call takes, also on a busy machine, and far less than a close that lingers.
const SOON: Duration = Duration::from_secs(120);
const LINGER_S: libc::c_int = 600;

/// A TCP socket whose close waits for a peer that reads nothing, and that peer.
fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let mut ours = TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
    let (theirs, _) = listener.accept().expect("a peer");
    ours.set_nonblocking(true).expect("set");
    let bytes = vec![0; 1 << 20];
    while ours.write(&bytes).is_ok() {}
    let linger = libc::linger { l_onoff: 1, l_linger: LINGER_S };
    // SAFETY: the value outlives the call.
    let set = unsafe {
        let len = size_of_val(&linger) as libc::socklen_t;
        libc::setsockopt(ours.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, (&raw const linger).cast(), len)
    };
    assert_eq!(set, 0, "{}", io::Error::last_os_error());
    (ours.into(), theirs)
}

/// Calls of another client take no longer than usual.
fn serves(pool_client: &PoolClient, what: &str) {
    let begin = Instant::now();
    pool_client.store(0, 4).expect("a service").into_iter().for_each(|result| assert!(result.expect("stored")));
    assert_eq!(pool_client.load(0, 4).expect("a service"), [true; 4]);
    assert!(begin.elapsed() < SOON, "{what}: the service was hung for {:?}", begin.elapsed());
}

/// Sends lingering sockets whose last descriptors are those in the messages; their peers, whose end would end the wait.
fn send(pid: u32, raw: &Raw, bytes: &[u8], count: usize) -> Vec<TcpStream> {
    send_by(pid, count, |fds| {
        raw.try_send_with(bytes, fds).expect("a service that is connected");
    })
}

/// As [`send`], of a client that is not attached: from Linux 6.16 on its messages with descriptors are not sent.
/// Whether this one was.
fn send_before_attach(pid: u32, raw: &Raw, bytes: &[u8], count: usize) -> (Vec<TcpStream>, bool) {
    let mut is_sent = true;
    let peers = send_by(pid, count, |fds| {
        if let Err(error) = raw.try_send_flagged(bytes, fds, 0) {
            assert_eq!(error.raw_os_error(), Some(libc::EPERM), "{error}");
            is_sent = false;
            // A close in this process would wait.
            fds.iter().for_each(|fd| std::mem::forget(fd.try_clone_to_owned()));
        }
    });
    (peers, is_sent)
}

fn send_by(pid: u32, count: usize, send: impl FnOnce(&[BorrowedFd<'_>])) -> Vec<TcpStream> {
    let (sockets, peers): (Vec<_>, _) = (0..count).map(|_| lingering()).unzip();
    // It closes nothing before this process has closed its own descriptors.
    let stopped = Stopped::new(pid);
    let fds: Vec<_> = sockets.iter().map(AsFd::as_fd).collect();
    send(&fds);
    drop((sockets, stopped));
    peers
}

/// Whether the kernel has messages out of band on Unix sockets.
fn has_out_of_band() -> bool {
    let (stream, _peer) = UnixStream::pair().expect("a pair");
    match (Raw { stream }).try_send_flagged(b"!", &[], libc::MSG_OOB) {
        Ok(_) => true,
        Err(error) => {
            assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP), "{error}");
            false
        }
    }
}

fn register() -> Request {
    Request::Register { region: 1, kind: RegionKind::Host, pin: false, offset: 0, len: 4096 }
}

/// The client that sends them: a process that starts no other, which would have them too for a moment.
pub fn linger(socket: &Path, pid: u32, how: &str) {
    let frame = register().encode(2);
    let peers = match how {
        "one" => send(pid, &Raw::attached(socket), &Request::Sync.encode(3), 1),
        "registered" => {
            let mut raw = Raw::attached(socket);
            let peers = send(pid, &raw, &frame, 1);
            assert!(matches!(raw.reply().expect("a reply"), (2, Reply::Failed(_))));
            peers
        }
        "hello" => {
            let mut raw = Raw::connect(socket);
            let (peers, is_sent) = send_before_attach(pid, &raw, &Hello::ours().encode(), 1);
            assert!(!is_sent || raw.goodbye_of_hello().contains("no frame wants"));
            peers
        }
        "two" => {
            let mut raw = Raw::attached(socket);
            let peers = send(pid, &raw, &frame, 2);
            assert!(raw.goodbye().contains("more than one"));
            peers
        }
        // Out of band, before bytes that are no frame's either.
        "urgent" => {
            let mut raw = Raw::attached(socket);
            let peers = send_by(pid, 1, |fds| {
                raw.try_send_flagged(b"!", fds, libc::MSG_OOB).expect("a kernel that has it");
                raw.try_send_with(b"x", &[]).expect("a service that is connected");
            });
            assert!(raw.goodbye().contains("no frame wants"));
            peers
        }
        "part" | "unasked" => {
            let mut raw = Raw::attached(socket);
            let bytes = if how == "part" { frame[..9].to_vec() } else { Request::Sync.encode(3) };
            let peers = send(pid, &raw, &bytes, 100);
            assert!(raw.goodbye().contains("no frame wants"));
            peers
        }
        // Left in connections that are hung up at once, or not accepted.
        _ => {
            let one = |_| {
                let _stopped = Stopped::new(pid);
                send_before_attach(pid, &Raw::connect(socket), b"any", 2).0
            };
            (0..20).flat_map(one).collect()
        }
    };
    say("sent");
    // The kernel ends no wait of a process that ends.
    io::stdin().read_to_end(&mut Vec::new()).expect("the end of the input");
    drop(peers);
}

fn lingers(node: &Node, how: &str) -> Process {
    let mut process = Process::start(&format!("linger {} {} {how}", node.socket().display(), node.process.pid()));
    assert_eq!(process.word().as_deref(), Some("sent"), "{how}");
    process
}

#[test]
fn a_descriptor_whose_close_waits_hangs_nobody() {
    let node = Node::new();
    let pool_client = PoolClient::new(&node.socket());
    let mut processes = Vec::new();
    for how in ["registered", "unasked", "hello", "part", "two", "hung up", "registered"] {
        processes.push(lingers(&node, &how.replace(' ', "-")));
        serves(&pool_client, how);
    }
    // Connections are closed, too.
    processes.iter_mut().for_each(Process::kill);
    node.wait_for_clients(1);
}

/// From Linux 6.16 on: who may not attach holds up nobody by what nobody has received.
#[test]
fn a_client_sends_descriptors_once_it_is_attached() {
    let node = Node::new();
    let mut raw = Raw::greeted(&node.socket());
    let pool = kvhoist::SharedMemory::new(BLOCK_BYTES).expect("memory");
    match raw.try_send_flagged(&register().encode(1), &[pool.as_fd()], 0) {
        Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EPERM), "{error}"),
        Ok(_) => {
            let release = fs::read_to_string("/proc/sys/kernel/osrelease").expect("procfs");
            let mut numbers = release.split(['.', '-']).map_while(|number| number.parse::<u32>().ok());
            let version = (numbers.next(), numbers.next());
            assert!(version < (Some(6), Some(16)), "Linux {release} sends it");
            return common::skip::skipped("the kernel is older than 6.16");
        }
    }
    let attached = raw.ask(2, &attach("tests", [64, 16], SpaceDevice::None));
    assert!(matches!(attached, Reply::Attached { .. }), "{attached:?}");
    assert!(matches!(raw.ask_with(3, &register(), pool.as_fd()), Reply::Registered { .. }));
}

/// A message out of band is passed over by a peek, unless it is asked for in line.
#[test]
fn a_descriptor_out_of_band_hangs_nobody() {
    if !has_out_of_band() {
        return common::skip::skipped("the kernel has no messages out of band on Unix sockets (CONFIG_AF_UNIX_OOB)");
    }
    let node = Node::new();
    let pool_client = PoolClient::new(&node.socket());
    let _process = lingers(&node, "urgent");
    serves(&pool_client, "urgent");
}

#[test]
fn a_connection_past_the_limit_hangs_nobody() {
    let node = Node::with("120000 1");
    let pool_client = PoolClient::new(&node.socket());
    let _beyond: Vec<Raw> = (0..8).map(|_| Raw::greeted(&node.socket())).collect();
    assert!(Raw::connect(&node.socket()).goodbye_of_hello().contains("expected 1 at most"));
    let _process = lingers(&node, "refused");
    serves(&pool_client, "refused");
}

/// A library that is loaded before the system's: a file is not flushed as long as `HANGS` names one that is there.
const HANGS: &str = r#"
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
int fsync(int fd) {
    const char *hangs = getenv("HANGS");
    while (hangs && access(hangs, F_OK) == 0) usleep(1000);
    return syscall(SYS_fsync, fd);
}
"#;

#[test]
fn a_new_space_whose_file_system_hangs_hangs_nobody() {
    let folder = common::directory();
    let [source, library, hangs] = ["hangs.c", "hangs.so", "hangs"].map(|name| folder.path().join(name));
    fs::write(&source, HANGS).expect("written");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).args([&library, &source]);
    assert!(compiler.status().expect("Rust links with cc").success(), "it does not compile");
    let [library, of_hangs] = [&library, &hangs].map(|path| path.to_str().expect("text"));
    let node = Node::with_variables("120000 64", &[("LD_PRELOAD", library), ("HANGS", of_hangs)]);
    let pool_client = PoolClient::new(&node.socket());
    File::create(&hangs).expect("made");
    let mut raw = Raw::greeted(&node.socket());
    raw.send(&attach("slow", [64, 16], SpaceDevice::None).encode(1));
    while node.status().spaces.iter().all(|space| space.namespace != "slow") {
        thread::yield_now();
    }
    serves(&pool_client, "a new space");
    raw.stream.set_nonblocking(true).expect("set");
    assert!(raw.reply().is_err(), "its file is not flushed yet");
    raw.stream.set_nonblocking(false).expect("set");
    fs::remove_file(hangs).expect("there");
    let (_, reply) = raw.reply().expect("a reply");
    assert!(matches!(reply, Reply::Attached { .. }), "{reply:?}");
}

/// Attaches to a space with a device; returns what the service makes readable when it has let go of the client's
/// memory.
fn attached_with_device(node: &Node) -> (Raw, OwnedFd) {
    let mut raw = Raw::greeted(&node.socket());
    raw.send(&attach("tests", [0, 0], SpaceDevice::Simulated).encode(1));
    let (mut bytes, mut space) = ([0; 4096], [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))]);
    let (mut control, parts) = (RecvAncillaryBuffer::new(&mut space), &mut [IoSliceMut::new(&mut bytes)]);
    net::recvmsg(&raw.stream, parts, &mut control, RecvFlags::CMSG_CLOEXEC).expect("a reply");
    let rights = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds.collect::<Vec<_>>()),
        _ => None,
    });
    let [_process, released] = <[OwnedFd; 2]>::try_from(rights.expect("descriptors")).expect("two");
    (raw, released)
}

/// The service has the same descriptor: what a client sets of it, the service has, too.
#[test]
fn a_descriptor_to_which_the_service_cannot_write_hangs_nobody() {
    let node = Node::new();
    let pool_client = PoolClient::with_device(&node.socket());
    let (raw, released) = attached_with_device(&node);
    fcntl_setfl(&released, OFlags::empty()).expect("set");
    rustix::io::write(&released, &(u64::MAX - 1).to_ne_bytes()).expect("it has room for so much");
    drop(raw);
    node.wait_for_clients(1);
    serves(&pool_client, "a full eventfd");
    let (raw, released) = attached_with_device(&node);
    drop(raw);
    let mut wanted = [PollFd::new(&released, PollFlags::IN)];
    let patience = Timespec { tv_sec: HANG.as_secs() as i64, tv_nsec: 0 };
    assert_eq!(poll(&mut wanted, Some(&patience)), Ok(1), "a client is told that its memory is released");
}

/// The end of a service is the end of its connections, too.
#[test]
fn a_drain_waits_for_no_descriptor() {
    let mut node = Node::new();
    let _process = lingers(&node, "one");
    let begin = Instant::now();
    assert!(node.process.end().success());
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
}

/// The service waits for replies of its clients to be read, but while it drains not for one that reads none.
#[test]
fn a_drain_waits_little_for_a_client_that_does_not_read() {
    let mut node = Node::with("600000 64");
    let mut raw = Raw::attached(&node.socket());
    let keys: Vec<_> = (0..4096).map(crate::common::key).collect();
    let frame = Request::Contains { keys }.encode(2);
    raw.stream.set_nonblocking(true).expect("set");
    // Until the service reads no more, because replies of 1 MiB are left.
    let (mut full, mut at, hang) = (0, 0, Instant::now() + HANG);
    while full < 50 {
        full = match raw.stream.write(&frame[at..]) {
            Ok(len) => {
                at = (at + len) % frame.len();
                0
            }
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                node.status();
                full + 1
            }
        };
        assert!(Instant::now() < hang);
    }
    raw.stream.set_nonblocking(false).expect("set");
    let begin = Instant::now();
    assert!(node.process.end().success());
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    drop(raw);
}

/// Connects to a service that accepts nobody until the kernel keeps no more connections for it.
fn fill_backlog(socket: &Path) -> Vec<OwnedFd> {
    let (address, mut waiting) = (SocketAddrUnix::new(socket).expect("short"), Vec::new());
    loop {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let ours = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).expect("a socket");
        match net::connect(&ours, &address) {
            Ok(()) => waiting.push(ours),
            Err(Errno::AGAIN) => return waiting,
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn a_client_waits_for_a_service_that_accepts_nobody_for_a_time() {
    let node = Node::with("120000 1000");
    let stopped = Stopped::new(node.process.pid());
    let waiting = fill_backlog(&node.socket());
    let mut options = options();
    options.deadline = Duration::from_millis(200);
    match block_on(Client::connect(node.socket(), options.clone())) {
        Err(Error::Service { fault: ServiceFault::Timeout, text }) => {
            assert!(text.contains("accepted no connection within 0.2 s"), "{text}");
        }
        other => panic!("{other:?}"),
    }
    options.deadline = HANG;
    let socket = node.socket();
    let connects = thread::spawn(move || block_on(Client::connect(socket, options)));
    thread::sleep(Duration::from_millis(200));
    assert!(!connects.is_finished(), "the service has accepted nobody");
    drop((stopped, waiting));
    connects.join().expect("no panic").expect("a service");
}
