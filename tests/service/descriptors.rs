//! A service that may open no more files.

use kvhoist::{
    internals::service::protocol::{RegionKind, Request},
    service::SharedMemory,
};

use crate::{
    guest::Guest,
    node::{BLOCK_BYTES, Node},
    raw::Raw,
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
    let guest = Guest::new(&node.socket());
    let mut raw = Raw::attached(&node.socket());
    let pool = SharedMemory::new(BLOCK_BYTES).expect("memory");
    let len = pool.len() as u64;
    let register = Request::Register { region: 1, kind: RegionKind::Host, pin: false, offset: 0, len };
    let before = limit(node.process.pid(), 3);
    raw.send_with(&register.encode(2), &[pool.as_fd()]);
    let why = raw.goodbye();
    assert!(why.contains("more than 8") && why.contains("LimitNOFILE"), "{why}");
    limit(node.process.pid(), before);
    guest.store(0, 4).expect("a service").into_iter().for_each(|result| assert!(result.expect("stored")));
    assert_eq!(guest.load(0, 4).expect("a service"), [true; 4]);
}
