//! Descriptors that clients send: too many for the service, unasked, or of the connection that they are sent on.

use std::{
    fs::File,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
};

use kvhoist::SharedMemory;
use kvhoist_service::internals::protocol::{RegionKind, Reply, Request};

use crate::{
    node::{BLOCK_BYTES, Node, Stopped},
    pool_client::PoolClient,
    raw::Raw,
    users::is_root,
};

/// Sets how many descriptors a process may have; returns the limit before.
fn limit(pid: u32, descriptors: u64) -> u64 {
    let mut limits = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes the limits of the process to `limits`, which outlives the call.
    let got = unsafe { libc::prlimit(pid.cast_signed(), libc::RLIMIT_NOFILE, std::ptr::null(), &raw mut limits) };
    assert_eq!(got, 0, "{}", std::io::Error::last_os_error());
    let before = std::mem::replace(&mut limits.rlim_cur, descriptors);
    // SAFETY: the kernel reads `limits`, which outlives the call.
    let set = unsafe { libc::prlimit(pid.cast_signed(), libc::RLIMIT_NOFILE, &raw const limits, std::ptr::null_mut()) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
    before
}

#[test]
fn a_client_whose_memory_cannot_be_received_is_told_what_to_raise() {
    let node = Node::new();
    let pool_client = PoolClient::new(&node.socket());
    let mut raw = Raw::attached(&node.socket());
    let pool = SharedMemory::new(BLOCK_BYTES).expect("memory");
    let len = pool.len() as u64;
    let register = Request::Register { region: 1, kind: RegionKind::Host, pin: false, offset: 0, len };
    let before = limit(node.process.pid(), 3);
    raw.send_with(&register.encode(2), &[pool.as_fd()]);
    let why = raw.goodbye();
    assert!(why.contains("more than one") && why.contains("LimitNOFILE"), "{why}");
    limit(node.process.pid(), before);
    pool_client.store(0, 4).expect("a service").into_iter().for_each(|result| assert!(result.expect("stored")));
    assert_eq!(pool_client.load(0, 4).expect("a service"), [true; 4]);
}

fn register(len: u64) -> Request {
    Request::Register { region: 1, kind: RegionKind::Host, pin: false, offset: 0, len }
}

#[test]
fn descriptors_that_nobody_asked_for_take_none_of_the_service() {
    // The clients are of the service's user here, and the kernel counts what a user has in flight against its limit.
    if !is_root() {
        return;
    }
    let node = Node::new();
    let pool_client = PoolClient::new(&node.socket());
    let raws: Vec<Raw> = (0..40).map(|_| Raw::attached(&node.socket())).collect();
    let held = node.held();
    // Room for a client more, with its memory.
    let before = limit(node.process.pid(), held.descriptors as u64 + 8);
    let file = File::open("/dev/null").expect("there");
    for raw in &raws {
        raw.try_send_with(&Request::Stats.encode(7), &[file.as_fd(); 100]);
        raw.try_send_with(&Request::Stats.encode(8), &[file.as_fd(); 100]);
    }
    for mut raw in raws {
        let why = raw.goodbye();
        assert!(why.contains("descriptors") && !why.contains("lost"), "{why}");
    }
    let pool = SharedMemory::new(BLOCK_BYTES).expect("memory");
    let mut raw = Raw::attached(&node.socket());
    assert!(matches!(raw.ask_with(2, &register(4096), pool.as_fd()), Reply::Registered { .. }));
    limit(node.process.pid(), before);
    pool_client.store(0, 4).expect("a service").into_iter().for_each(|result| assert!(result.expect("stored")));
}

/// Sends its own end along, in every way, and dies.
fn send_own_end(node: &Node, how: usize, other: &UnixStream) {
    let mut raw = if how == 0 { Raw::connect(&node.socket()) } else { Raw::attached(&node.socket()) };
    let own = raw.stream.try_clone().expect("a copy");
    let ends: [BorrowedFd<'_>; 2] = [own.as_fd(), other.as_fd()];
    match how {
        // From Linux 6.16 on it is not sent.
        0 => drop(raw.try_send_with(b"kvhoist", &ends[..1])),
        1 => raw.send_with(&register(4096).encode(2), &ends[..1]),
        2 => raw.send_with(&register(4096).encode(2)[..20], &ends[..1]),
        3 => raw.send_with(&Request::Sync.encode(2), &ends),
        _ => raw.send_with(&[register(4096).encode(2), register(4096).encode(3)].concat(), &ends[1..]),
    }
}

#[test]
fn a_connection_ends_with_its_client_that_sent_its_own_end_along() {
    let node = Node::new();
    let _pool_client = PoolClient::new(&node.socket());
    let held = node.held();
    for _ in 0..8 {
        let other = Raw::attached(&node.socket()).stream;
        for how in 0..5 {
            send_own_end(&node, how, &other);
        }
    }
    node.wait_for_clients(1);
    node.wait_for_held(&held);
}

/// However many frames come at once, and wherever the service's buffer ends.
#[test]
fn a_register_frame_behind_others_has_its_descriptor() {
    let node = Node::new();
    let pool = SharedMemory::new(BLOCK_BYTES).expect("memory");
    // Of 24 bytes each: the register frame begins at every place around the end of a buffer of 16 KiB.
    let (touch, unregister) = (Request::Touch { keys: Vec::new() }.encode(2), Request::Unregister { region: 1 });
    for most in [16 << 10, 32 << 10] {
        let mut raw = Raw::attached(&node.socket());
        for short in 0..4 {
            let frames = touch.repeat(most / touch.len() - short);
            let stopped = Stopped::new(node.process.pid());
            raw.send(&frames);
            raw.send_with(&register(4096).encode(3), &[pool.as_fd()]);
            drop(stopped);
            let registered = loop {
                match raw.reply().expect("a reply") {
                    (2, Reply::Done) => {}
                    (3, reply) => break reply,
                    other => panic!("{other:?}"),
                }
            };
            assert!(matches!(registered, Reply::Registered { .. }), "{registered:?}");
            assert_eq!(raw.ask(4, &unregister), Reply::Done);
        }
    }
}
