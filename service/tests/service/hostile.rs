//! Clients that send nonsense, lie about their memory, or do not read: each is told, and no other notices.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd, FromRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    thread,
};

use kvhoist::ServiceFault;
use kvhoist_service::internals::protocol::{
    Blocks, FRAME_BYTES_MAX, Header, Hello, Place, RegionKind, Reply, Request, SpaceDevice,
};

use crate::{
    common::{Rng, key, seed},
    node::{BLOCK_BYTES, Node},
    pool_client::POOL_BLOCKS,
    raw::Raw,
    shared_node::SharedNode,
};

pub fn memfd(flags: libc::c_uint, len: u64) -> OwnedFd {
    // SAFETY: a name that ends with 0; the result is checked before it is used.
    let fd = unsafe { libc::memfd_create(c"hostile".as_ptr(), flags | libc::MFD_CLOEXEC) };
    assert!(fd >= 0, "{}", io::Error::last_os_error());
    // SAFETY: a descriptor just made, owned by nobody else.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(len).expect("a size");
    file.into()
}

pub fn register(region: u32, offset: u64, len: u64) -> Request {
    Request::Register { region, kind: RegionKind::Host, pin: true, offset, len }
}

fn load(region: u32, offset: u64, len: u32) -> Request {
    Request::Load(Blocks { keys: vec![key(0)], places: [[Place { region, offset, len }]].into_iter().collect() })
}

#[track_caller]
fn failed(reply: Reply, fault: ServiceFault) {
    let Reply::Failed(failure) = reply else { panic!("{reply:?}, expected {fault:?}") };
    assert!(failure.fault == fault && !failure.text.is_empty(), "{failure:?}, expected {fault:?}");
}

#[test]
fn memory_that_is_not_as_it_was_said_is_refused() {
    use ServiceFault::{Argument, Busy, Memory};
    let shared = SharedNode::new("120000 64");
    let held = shared.node.held();
    let mut raw = shared.attached();
    let good = memfd(libc::MFD_ALLOW_SEALING, 1 << 20);
    // Shorter than it was said to be.
    failed(raw.ask_with(2, &register(1, 0, 2 << 20), good.as_fd()), Memory);
    failed(raw.ask_with(3, &register(1, 0, 2 << 20), memfd(0, 1 << 20).as_fd()), Memory);
    failed(raw.ask_with(4, &register(1, 1, 4096), good.as_fd()), Memory);
    failed(raw.ask_with(5, &register(1, u64::MAX - 4095, 4096), good.as_fd()), Memory);
    // No memfd at all.
    failed(raw.ask_with(6, &register(1, 0, 4096), tempfile::tempfile().expect("a file").as_fd()), Memory);
    failed(raw.ask_with(7, &register(1, 0, 4096), raw.stream.try_clone().expect("a copy").as_fd()), Memory);
    failed(raw.ask(8, &register(1, 0, 4096)), Argument);
    // Memory of a GPU, and no client of one.
    let device = Request::RegisterDevice { region: 1, offset: 0, len: 4096, handle: [7; 64] };
    let Reply::Failed(refused) = raw.ask(21, &device) else { panic!("device memory was taken") };
    assert!(refused.fault == Memory && refused.text.contains("without a CUDA device"), "{refused:?}");
    // More than one client may have.
    failed(raw.ask_with(9, &register(1, 0, 65 << 20), good.as_fd()), Busy);
    failed(raw.ask_with(10, &register(1, 0, u64::MAX), good.as_fd()), Busy);
    for region in 1..=8 {
        assert!(matches!(raw.ask_with(20, &register(region, 0, 4096), good.as_fd()), Reply::Registered { .. }));
    }
    failed(raw.ask_with(11, &register(9, 0, 4096), good.as_fd()), Busy);
    failed(raw.ask_with(12, &register(8, 0, 4096), good.as_fd()), Argument);
    // It is taken away, which hurts nobody else.
    File::from(good).set_len(0).expect("no seal of the service's");
    shared.check();
    drop(raw);
    shared.node.wait_for_held(&held);
    shared.check();
}

#[test]
fn holes_in_a_clients_memory_hurt_nobody() {
    let shared = SharedNode::new("120000 64");
    let mut raw = shared.attached();
    let fd = memfd(libc::MFD_ALLOW_SEALING, 1 << 20);
    assert!(matches!(raw.ask_with(2, &register(1, 0, 1 << 20), fd.as_fd()), Reply::Registered { .. }));
    for id in 3..20 {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: plain system call on a descriptor that is ours.
        let refused = unsafe { libc::fallocate(std::os::fd::AsRawFd::as_raw_fd(&fd), mode, 0, 1 << 20) };
        assert_eq!(refused, 0, "{}", io::Error::last_os_error());
        let reply = raw.ask(id, &load(1, 0, BLOCK_BYTES as u32));
        assert_eq!(reply, Reply::Results(vec![Ok(true)]));
    }
    shared.check();
}

#[test]
fn memory_that_shrinks_under_the_service_hurts_its_client_alone() {
    let shared = SharedNode::new("120000 64");
    let held = shared.node.held();
    for life in 0..4 {
        let mut raw = shared.attached();
        let fd = memfd(0, 1 << 20);
        assert!(matches!(raw.ask_with(2, &register(1, 0, 1 << 20), fd.as_fd()), Reply::Registered { .. }));
        assert_eq!(raw.ask(3, &load(1, 0, BLOCK_BYTES as u32)), Reply::Results(vec![Ok(true)]));
        File::from(fd).set_len(if life % 2 == 0 { 0 } else { 4096 }).expect("it takes no seal");
        let place = [Place { region: 1, offset: 0, len: BLOCK_BYTES as u32 }];
        // The second block is others', who have stored it before.
        let mine = Blocks { keys: vec![key(1 << 40), key(0)], places: [place; 2].into_iter().collect() };
        let refused = |reply: Reply| {
            let refused = match &reply {
                Reply::Results(results) => results[0].is_err(),
                other => matches!(other, Reply::Failed(_)),
            };
            assert!(refused, "{reply:?}");
        };
        refused(raw.ask(4, &Request::Store { parent: None, blocks: mine.clone() }));
        refused(raw.ask(5, &load(1, 0, BLOCK_BYTES as u32)));
        let there = raw.ask(6, &Request::Contains { keys: mine.keys });
        assert_eq!(there, Reply::Flags(vec![false, true]), "nobody is served what was left of it, nor loses a block");
        shared.check();
    }
    shared.node.wait_for_held(&held);
    shared.check();
}

#[test]
fn places_outside_of_what_was_lent_are_refused() {
    use ServiceFault::Argument;
    let shared = SharedNode::new("120000 64");
    let mut raw = shared.attached();
    let block = BLOCK_BYTES as u32;
    let good = memfd(libc::MFD_ALLOW_SEALING, 1 << 20);
    failed(raw.ask(2, &load(1, 0, block)), Argument);
    assert!(matches!(raw.ask_with(3, &register(1, 0, 1 << 20), good.as_fd()), Reply::Registered { .. }));
    failed(raw.ask(4, &load(1, (1 << 20) - u64::from(block) + 1, block)), Argument);
    failed(raw.ask(5, &load(1, u64::MAX, block)), Argument);
    failed(raw.ask(6, &load(1, 0, block - 1)), Argument);
    failed(raw.ask(7, &load(1, 0, u32::MAX)), Argument);
    failed(raw.ask(8, &load(2, 0, block)), Argument);
    assert_eq!(raw.ask(9, &load(1, (1 << 20) - u64::from(block), block)), Reply::Results(vec![Ok(true)]));
    assert_eq!(raw.ask(10, &Request::Unregister { region: 1 }), Reply::Done);
    failed(raw.ask(11, &load(1, 0, block)), Argument);
    assert_eq!(raw.ask(12, &Request::Unregister { region: 77 }), Reply::Done);
    shared.check();
}

#[test]
fn requests_without_a_space_are_refused() {
    let shared = SharedNode::new("120000 64");
    let mut raw = Raw::greeted(&shared.node.socket());
    failed(raw.ask(1, &Request::Sync), ServiceFault::Argument);
    failed(raw.ask(2, &Request::MatchLen { keys: vec![key(0)] }), ServiceFault::Argument);
    let attach = |block_bytes| Request::Attach {
        namespace: "x".into(),
        block_bytes,
        capacity_bytes: 0,
        host_bytes: 0,
        shared: false,
        device: SpaceDevice::None,
    };
    failed(raw.ask(3, &attach(0)), ServiceFault::Argument);
    failed(raw.ask(4, &attach(u64::MAX)), ServiceFault::Argument);
    let mut attached = shared.attached();
    failed(attached.ask(3, &attach(4096)), ServiceFault::Argument);
    shared.check();
}

#[test]
fn an_id_that_is_in_flight_is_not_taken_twice() {
    let shared = SharedNode::new("120000 64");
    let mut raw = shared.attached();
    // One after the other is no matter.
    assert_eq!(raw.ask(2, &Request::Unregister { region: 7 }), Reply::Done);
    assert_eq!(raw.ask(2, &Request::Unregister { region: 7 }), Reply::Done);
    let twice = [Request::Sync.encode(5), Request::Sync.encode(5)].concat();
    raw.send(&twice);
    assert!(raw.goodbye().starts_with("Protocol: request id"));
    let mut raw = shared.attached();
    raw.send(&Request::Sync.encode(0));
    assert!(raw.goodbye().starts_with("Protocol: request id"));
    shared.check();
}

#[test]
fn other_versions_and_other_protocols_are_told_what_is_spoken_here() {
    let (shared, hasty) = (SharedNode::new("120000 64"), Node::with("300 64"));
    let refused = |node: &Node, bytes: &[u8]| {
        let mut raw = Raw::connect(&node.socket());
        raw.send(bytes);
        let welcome = raw.welcome();
        assert_eq!((welcome.version_min, welcome.version_max), (4, 4));
        let fault = welcome.answer.expect_err("refused");
        let why = raw.goodbye();
        assert!(why.starts_with(&format!("{fault:?}: ")), "{why}");
        fault
    };
    let node = &shared.node;
    assert_eq!(refused(node, &Hello { version_min: 5, version_max: 900 }.encode()), ServiceFault::Version);
    assert_eq!(refused(node, &Hello { version_min: 0, version_max: 3 }.encode()), ServiceFault::Version);
    assert_eq!(refused(node, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"), ServiceFault::Protocol);
    assert_eq!(refused(&hasty, b"kvhois"), ServiceFault::Timeout, "no whole hello within the patience");
    shared.check();
}

#[test]
fn nonsense_is_answered_with_a_goodbye() {
    let shared = SharedNode::new("120000 64");
    let header = |body_bytes, kind| Header { body_bytes, kind, id: 9 }.encode();
    let most = u32::MAX.to_le_bytes();
    let cases: [&[u8]; 5] = [
        &header(FRAME_BYTES_MAX as u32 + 1, 1),
        &header(0, 999),
        &[&header(4, 4)[..], &most].concat(),
        &[&header(5, 13)[..], &[0; 5]].concat(),
        &[0xff; 64],
    ];
    for bytes in cases {
        let mut raw = shared.attached();
        raw.send(bytes);
        assert!(raw.goodbye().starts_with("Protocol: "), "{bytes:02x?}");
    }
    let mut rng = Rng(seed());
    for _ in 0..50 {
        let mut raw = shared.attached();
        let len = 1 + rng.below(3000);
        let bytes: Vec<u8> = (0..len).map(|_| rng.next() as u8).collect();
        raw.send(&bytes);
        drop(raw);
    }
    // Descriptors that no frame wants.
    let mut raw = shared.attached();
    let fd = memfd(0, 4096);
    for id in 2..7 {
        // The service may have hung up on those before.
        _ = raw.try_send_with(&Request::Stats.encode(id), &[fd.as_fd(); 4]);
    }
    assert!(raw.goodbye().contains("descriptors"));
    shared.node.wait_for_clients(1);
    shared.check();
}

#[test]
fn a_client_that_never_reads_is_cut_off() {
    // More than a client takes on a busy machine, and less than the socket waits for the service.
    let shared = SharedNode::new("20000 64");
    shared.node.wait_for_clients(1);
    let held = shared.node.held();
    let mut raw = shared.attached();
    let keys: Vec<_> = (0..4096).map(key).collect();
    let request = Request::Contains { keys };
    let mut id = 1;
    // Until the service takes no more: its end of the socket is gone.
    loop {
        id += 1;
        if io::Write::write_all(&mut raw.stream, &request.encode(id)).is_err() {
            break;
        }
        shared.check();
    }
    shared.node.wait_for_clients(1);
    assert_eq!(shared.node.status().cut_off, 1);
    shared.node.wait_for_held(&held);
    shared.check();
}

#[test]
fn connections_past_the_limit_are_told_so() {
    let shared = SharedNode::new("120000 4");
    let socket = shared.node.socket();
    // With 8 that the service's own user has beyond the limit.
    let _others: Vec<Raw> = (0..3 + 8).map(|_| Raw::greeted(&socket)).collect();
    for _ in 0..2000 {
        let mut raw = Raw::connect(&socket);
        raw.send(&Hello::ours().encode());
        assert_eq!(raw.welcome().answer, Err(ServiceFault::Busy));
    }
    shared.check();
}

#[test]
fn a_request_waits_for_few_of_the_connections_that_come_and_go() {
    const REQUESTS: u64 = 100;
    let shared = SharedNode::new("120000 64");
    let socket = shared.node.socket();
    let mut raw = shared.attached();
    let (ended, connected) = (AtomicBool::new(false), AtomicU64::new(0));
    let during = thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Relaxed) {
                drop(UnixStream::connect(&socket).expect("a service that listens"));
                connected.fetch_add(1, Relaxed);
            }
        });
        while connected.load(Relaxed) < 1_000 {
            thread::yield_now();
        }
        let mut during: Vec<u64> = (0..REQUESTS)
            .map(|id| {
                let before = connected.load(Relaxed);
                raw.ask(2 + id, &Request::Contains { keys: vec![key(0)] });
                connected.load(Relaxed) - before
            })
            .collect();
        ended.store(true, Relaxed);
        during.sort_unstable();
        during
    });
    // A few a request, whenever this thread runs; thousands where the service accepts connections for as long as there
    // are any.
    let half = during[during.len() / 2];
    assert!(half < 100, "{half} connections or more in half of {REQUESTS} requests");
    shared.check();
}

#[test]
fn requests_past_the_limit_are_refused_and_the_others_answered() {
    let shared = SharedNode::new("120000 64");
    let mut raw = shared.attached();
    let frames: Vec<u8> = (2..402).flat_map(|id| Request::Sync.encode(id)).collect();
    raw.send(&frames);
    let mut answered = [0; 2];
    for _ in 2..402 {
        match raw.reply().expect("a reply").1 {
            Reply::Done => answered[0] += 1,
            Reply::Failed(failure) if failure.fault == ServiceFault::Busy => answered[1] += 1,
            other => panic!("{other:?}"),
        }
    }
    assert!(answered[0] >= 128, "{answered:?}");
    shared.check();
}

#[test]
fn bytes_of_requests_past_the_limit_are_refused() {
    let shared = SharedNode::new("120000 64");
    let mut raw = shared.attached();
    // Each takes 4,096 flushes, and has a frame of 128 KiB.
    let remove = Request::Remove { durable: true, keys: (1000..5096).map(key).collect() };
    let frames: Vec<u8> = (3..103).flat_map(|id| remove.encode(id)).collect();
    let mut sender = Raw { stream: raw.stream.try_clone().expect("a copy") };
    let sends = std::thread::spawn(move || sender.send(&frames));
    let refused = loop {
        match raw.reply().expect("a reply").1 {
            Reply::Results(_) => {}
            other => break other,
        }
    };
    failed(refused, ServiceFault::Busy);
    sends.join().expect("sent");
    drop(raw);
    shared.node.wait_for_clients(1);
    shared.check();
}

#[test]
fn a_canceled_load_says_what_was_moved() {
    let shared = SharedNode::new("120000 64");
    let mut raw = shared.attached();
    let good = memfd(libc::MFD_ALLOW_SEALING, 1 << 20);
    assert!(matches!(raw.ask_with(2, &register(1, 0, 1 << 20), good.as_fd()), Reply::Registered { .. }));
    let place = [Place { region: 1, offset: 0, len: BLOCK_BYTES as u32 }];
    let keys = (0..4000).map(|n| key(n % POOL_BLOCKS)).collect();
    let blocks = Blocks { keys, places: [place; 4000].into_iter().collect() };
    raw.send(&[Request::Load(blocks).encode(3), Request::Cancel { request: 3 }.encode(0)].concat());
    let (id, Reply::Results(results)) = raw.reply().expect("a reply") else { panic!("no results") };
    assert_eq!((id, results.len()), (3, 4000));
    let canceled = |result: &Result<bool, _>| match result {
        Err(kvhoist_service::internals::protocol::Failure { fault: ServiceFault::Canceled, .. }) => true,
        Ok(there) => !*there,
        Err(_) => false,
    };
    assert!(canceled(&results[3999]), "{:?}", results[3999]);
    assert_eq!(raw.ask(4, &Request::Unregister { region: 1 }), Reply::Done);
    shared.check();
}
