//! Limits over all connections: clients that take all there is, and what is left to others.

use std::{
    fs::{self, File},
    io,
    os::{
        fd::{AsFd, FromRawFd, OwnedFd},
        unix::fs::PermissionsExt,
    },
    path::{Path, PathBuf},
    time::Instant,
};

use kvhoist::{Config, DirectIo, Error, ServiceFault, block_on};
use kvhoist_service::{
    Client, Server, ServerConfig,
    internals::protocol::{Blocks, Failure, Hello, Place, RegionKind, Reply, Request, SpaceDevice},
    remove_space, status,
};
use tempfile::TempDir;

use crate::{
    common::{self, key},
    node::{BLOCK_BYTES, DISK_BLOCKS, HANG, HOST_BLOCKS, Node, Process, options, say},
    pool_client::{POOL_BLOCKS, PoolClient},
    raw::{Raw, attach},
};

const TIB: u64 = 1 << 40;
/// The user that the service runs as where the tests run as root, whom no limit of processes holds.
const SERVICE_USER: u32 = 64_010;

/// A service in a process of its own: `SOCKET CLIENTS_USER SETTING...`.
pub fn run(words: &[&str]) {
    let [socket, clients_user, settings @ ..] = words else { panic!("{words:?}") };
    let mut config = ServerConfig::new(*socket);
    config.capacity_bytes = 16 * DISK_BLOCKS * BLOCK_BYTES as u64;
    config.host_bytes = 16 * HOST_BLOCKS * BLOCK_BYTES as u64;
    config.cache = Config::default().bypass_host(true).direct_io(DirectIo::Prefer);
    config.uids = vec![clients_user.parse().expect("a number")];
    for setting in settings {
        let (name, value) = setting.split_once('=').expect("a setting");
        let number = || value.parse::<u64>().expect("a number");
        match name {
            "path" => config.paths = vec![value.into()],
            "connections" => config.connections_max = number() as u32,
            "regions_total" => config.regions_total_max = Some(number() as u32),
            "address_bytes" => limit(libc::RLIMIT_AS, number()),
            "user" => become_user(number() as u32),
            _ => panic!("{setting}"),
        }
    }
    let server = Server::start(config).expect("a service");
    say("ready");
    for line in io::stdin().lines() {
        // A limit of processes.
        limit(libc::RLIMIT_NPROC, line.expect("text").parse().expect("a number"));
        say("limited");
    }
    server.drain();
    server.wait().expect("a whole store");
}

/// Limits what this process has.
fn limit(of: libc::__rlimit_resource_t, most: u64) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the limits outlive the calls.
    let refused = unsafe {
        let asked = libc::getrlimit(of, &raw mut limit);
        limit.rlim_cur = most.min(limit.rlim_max);
        [asked, libc::setrlimit(of, &raw const limit)]
    };
    assert_eq!(refused, [0; 2], "{}", io::Error::last_os_error());
}

fn become_user(user: u32) {
    // SAFETY: plain system calls.
    let refused = unsafe { [libc::setresgid(user, user, user), libc::setresuid(user, user, user)] };
    assert_eq!(refused, [0; 2], "{}", io::Error::last_os_error());
}

/// A service with limits, and its folders.
pub struct Limited {
    process: Process,
    pub socket: PathBuf,
    _folders: [TempDir; 2],
}

impl Limited {
    pub fn new(settings: &str) -> Self {
        let store = common::directory();
        let path = format!("path={}", store.path().display());
        Limited::start(store, &format!("{path} {settings}"))
    }

    /// Without a disk, as a user whom a limit of processes holds.
    fn without_disk() -> Self {
        let settings = if own_user() == 0 { format!("user={SERVICE_USER}") } else { String::new() };
        Limited::start(common::directory(), &settings)
    }

    fn start(store: TempDir, settings: &str) -> Self {
        let place = tempfile::tempdir().expect("a directory");
        fs::set_permissions(place.path(), fs::Permissions::from_mode(0o777)).expect("set");
        let socket = place.path().join("s");
        let role = format!("limited {} {} {settings}", socket.display(), own_user());
        let mut process = Process::start(role.trim_end());
        assert_eq!(process.word().as_deref(), Some("ready"));
        Limited { process, socket, _folders: [place, store] }
    }

    /// Lines of the service's mappings: all, and those of clients' memory.
    fn mappings(&self) -> (usize, usize) {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.process.pid())).expect("alive");
        (maps.lines().count(), maps.lines().filter(|line| line.contains("memfd:hostile")).count())
    }

    /// Limits how many processes and threads its user has.
    fn limit_processes(&mut self, most: u64) {
        self.process.tell(&most.to_string());
        assert_eq!(self.process.word().as_deref(), Some("limited"));
    }

    fn wait_until_nothing_hostile_is_mapped(&self) {
        let hang = Instant::now() + HANG;
        while self.mappings().1 > 0 {
            assert!(Instant::now() < hang, "{} mappings of clients that are gone", self.mappings().1);
            std::thread::yield_now();
        }
    }
}

fn own_user() -> u32 {
    // SAFETY: plain system call without arguments.
    unsafe { libc::geteuid() }
}

/// A memfd, whatever the machine has: it is empty.
pub fn memfd(flags: libc::c_uint, len: u64) -> OwnedFd {
    // SAFETY: a name that ends with 0; the result is checked before it is used.
    let fd = unsafe { libc::memfd_create(c"hostile".as_ptr(), flags | libc::MFD_CLOEXEC) };
    assert!(fd >= 0, "{}", io::Error::last_os_error());
    // SAFETY: a descriptor just made, owned by nobody else.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(len).expect("a size");
    file.into()
}

fn register(region: u32, len: u64) -> Request {
    Request::Register { region, kind: RegionKind::Host, pin: false, offset: 0, len }
}

/// Lends memory until the service refuses it; how often it did not, and why it does.
fn lend_all(raw: &mut Raw, len: u64) -> (u32, Failure) {
    for region in 0.. {
        match raw.ask_with(u64::from(region) + 2, &register(region, len), memfd(libc::MFD_ALLOW_SEALING, len).as_fd()) {
            Reply::Registered { .. } => {}
            Reply::Failed(failure) => return (region, failure),
            other => panic!("{other:?}"),
        }
    }
    unreachable!("some number is refused")
}

/// A client that comes late stores, and it and one that was there before load.
fn others_are_served(socket: &Path, neighbor: &PoolClient) {
    let late = PoolClient::new(socket);
    assert!(late.store(0, POOL_BLOCKS).expect("a service").iter().all(Result::is_ok));
    for pool_client in [&late, neighbor] {
        assert_eq!(pool_client.load(0, POOL_BLOCKS).expect("a service"), [true; POOL_BLOCKS as usize]);
    }
}

#[test]
fn connections_that_lend_a_tebibyte_each_leave_address_space_to_every_other() {
    let node = Limited::new("");
    let neighbor = PoolClient::new(&node.socket);
    let mut refused = 0;
    let greedy: Vec<Raw> = (0..167)
        .map(|_| {
            let mut raw = Raw::attached(&node.socket);
            let fd = memfd(libc::MFD_ALLOW_SEALING, TIB);
            match raw.ask_with(2, &register(1, TIB), fd.as_fd()) {
                Reply::Registered { .. } => {}
                Reply::Failed(failure) => {
                    assert!(failure.fault == ServiceFault::Busy && failure.text.contains("bytes"), "{failure:?}");
                    refused += 1;
                }
                other => panic!("{other:?}"),
            }
            raw
        })
        .collect();
    assert!((1..167).contains(&refused), "{refused} refused");
    others_are_served(&node.socket, &neighbor);
    drop(greedy);
    node.wait_until_nothing_hostile_is_mapped();
    let mut raw = Raw::attached(&node.socket);
    let lent = raw.ask_with(2, &register(1, TIB), memfd(libc::MFD_ALLOW_SEALING, TIB).as_fd());
    assert!(matches!(lent, Reply::Registered { .. }), "{lent:?}: what they had is there again");
}

#[test]
fn clients_that_lend_all_of_a_limited_address_space_leave_the_service_its_own_and_others_theirs() {
    let node = Limited::new("connections=16 address_bytes=17179869184");
    let neighbor = PoolClient::new(&node.socket);
    let mut lent = 0;
    let greedy: Vec<Raw> = (0..12)
        .map(|_| {
            let mut raw = Raw::attached(&node.socket);
            let (count, failure) = lend_all(&mut raw, 64 << 20);
            assert_eq!(failure.fault, ServiceFault::Busy, "{}", failure.text);
            lent += count;
            raw
        })
        .collect();
    assert!(lent >= 12, "{lent} regions of 64 MiB");
    others_are_served(&node.socket, &neighbor);
    // Frames that are announced, and do not come.
    let announced: Vec<Raw> = (0..2)
        .map(|_| {
            let mut raw = Raw::attached(&node.socket);
            let frame = Request::Remove { durable: false, keys: (0..4096).map(key).collect() }.encode(2);
            raw.send(&frame[..frame.len() / 2]);
            raw
        })
        .collect();
    drop((greedy, announced));
    node.wait_until_nothing_hostile_is_mapped();
    others_are_served(&node.socket, &neighbor);
}

#[test]
fn clients_that_lend_all_regions_there_are_leave_some_to_every_other() {
    let node = Limited::new("connections=16 regions_total=64");
    let neighbor = PoolClient::new(&node.socket);
    let _greedy: Vec<Raw> = (0..12)
        .map(|_| {
            let mut raw = Raw::attached(&node.socket);
            let (count, failure) = lend_all(&mut raw, 4096);
            assert!(count >= 2, "{count} regions: less than its part");
            assert!(failure.fault == ServiceFault::Busy && failure.text.contains("regions"), "{failure:?}");
            raw
        })
        .collect();
    others_are_served(&node.socket, &neighbor);
}

/// Every second page of `blocks` blocks, in one region.
fn every_second_page(blocks: u64) -> Blocks {
    let page = |block: u64, page: u64| Place { region: 1, len: 4096, offset: (block * 16 + page) * 8192 };
    let places = |block| (0..16).map(move |at| page(block, at));
    Blocks {
        keys: (0..blocks).map(|block| key((1 << 40) + block)).collect(),
        places: (0..blocks).map(places).collect(),
    }
}

#[test]
fn a_region_that_was_taken_away_costs_one_mapping_and_is_refused_from_then_on() {
    let node = Limited::new("");
    let neighbor = PoolClient::new(&node.socket);
    neighbor.store(0, POOL_BLOCKS).expect("a service");
    let (mappings, _) = node.mappings();
    let mut raw = Raw::attached(&node.socket);
    // More pages than a process may have mappings.
    let blocks = every_second_page(4096);
    let len = 4096 * 16 * 8192;
    let fd = memfd(0, len);
    assert!(matches!(raw.ask_with(2, &register(1, len), fd.as_fd()), Reply::Registered { .. }));
    File::from(fd).set_len(0).expect("it takes no seal");
    let Reply::Results(results) = raw.ask(3, &Request::Store { parent: None, blocks: blocks.clone() }) else {
        panic!("no results")
    };
    assert!(results.iter().all(Result::is_err), "zeros are no block");
    assert!(results.iter().any(|result| matches!(result, Err(failure) if failure.text.contains("shrunk"))));
    assert!(node.mappings().0 < mappings + 100, "{} mappings, before {mappings}", node.mappings().0);
    match raw.ask(4, &Request::Load(blocks.clone())) {
        Reply::Failed(failure) => assert!(failure.text.contains("shrunk"), "{failure:?}"),
        other => panic!("{other:?}"),
    }
    let there = raw.ask(5, &Request::Contains { keys: blocks.keys });
    assert!(matches!(there, Reply::Flags(flags) if flags.iter().all(|there| !there)), "zeros were stored");
    // Its number and its room are free again.
    let good = memfd(libc::MFD_ALLOW_SEALING, len);
    assert!(matches!(raw.ask_with(6, &register(1, len), good.as_fd()), Reply::Registered { .. }));
    others_are_served(&node.socket, &neighbor);
}

#[test]
fn a_service_that_gets_no_thread_serves_its_clients_and_takes_new_spaces_later() {
    let mut node = Limited::without_disk();
    let mut neighbor = Raw::attached(&node.socket);
    let len = 4 << 20;
    let fd = memfd(libc::MFD_ALLOW_SEALING, len);
    assert!(matches!(neighbor.ask_with(2, &register(1, len), fd.as_fd()), Reply::Registered { .. }));
    node.limit_processes(0);
    let blocks = |count: u64| {
        let place = |block| [Place { region: 1, len: BLOCK_BYTES as u32, offset: block * BLOCK_BYTES as u64 }];
        Blocks { keys: (0..count).map(key).collect(), places: (0..count).map(place).collect() }
    };
    for id in 3..20 {
        // Memory is pinned, taken back and left behind: each wants a thread.
        let crowd: Vec<Raw> = (0..8)
            .map(|_| {
                let mut raw = Raw::attached(&node.socket);
                for region in 0..4 {
                    let request = Request::Register { region, kind: RegionKind::Host, pin: true, offset: 0, len };
                    let fd = memfd(libc::MFD_ALLOW_SEALING, len);
                    let reply = raw.ask_with(2 + u64::from(region), &request, fd.as_fd());
                    assert!(matches!(reply, Reply::Registered { .. }), "{reply:?}");
                }
                raw.send(
                    &[Request::Unregister { region: 0 }.encode(7), Request::Unregister { region: 1 }.encode(8)]
                        .concat(),
                );
                raw
            })
            .collect();
        drop(crowd);
        let stored = neighbor.ask(2 * id, &Request::Store { parent: None, blocks: blocks(4) });
        assert_eq!(stored, Reply::Results(vec![Ok(true); 4]));
        assert_eq!(neighbor.ask(2 * id + 1, &Request::Load(blocks(4))), Reply::Results(vec![Ok(true); 4]));
    }
    let hang = Instant::now() + HANG;
    while node.mappings().1 > 1 {
        assert!(Instant::now() < hang, "{} mappings of clients that are gone", node.mappings().1);
        std::thread::yield_now();
    }
    // A new space has threads of its own.
    let attach = attach("another", [0, HOST_BLOCKS], SpaceDevice::None);
    let mut raw = Raw::greeted(&node.socket);
    match raw.ask(1, &attach) {
        Reply::Failed(failure) => assert!(failure.text.contains("thread"), "{failure:?}"),
        other => panic!("{other:?}"),
    }
    node.limit_processes(u64::MAX);
    let attached = raw.ask(2, &attach);
    assert!(matches!(attached, Reply::Attached { .. }), "{attached:?}: the failure is not for good");
}

/// Whoever has all connections, the service's own user sees who it is, and removes spaces.
#[test]
fn beyond_the_limit_of_connections_the_services_user_asks_and_attaches_to_nothing() {
    let node = Node::with("120000 2");
    let (neighbor, raw) = (PoolClient::new(&node.socket()), Raw::attached(&node.socket()));
    assert_eq!(node.status().clients.len(), 3, "two, and the one that asks");
    let busy = |refused: Error| match refused {
        Error::Service { fault: ServiceFault::Busy, text } => text,
        other => panic!("{other}"),
    };
    let refused = busy(block_on(Client::connect(node.socket(), options())).expect_err("no room"));
    assert!(refused.contains(&format!("user {} has ", own_user())), "{refused}");
    let refused = busy(remove_space(&node.socket(), "tests", BLOCK_BYTES as u64, false).expect_err("clients have it"));
    assert!(refused.contains("clients are attached"), "{refused}");
    let (mut idle, hang) = (Vec::new(), Instant::now() + HANG);
    while idle.len() < 8 {
        let mut raw = Raw::connect(&node.socket());
        raw.send(&Hello::ours().encode());
        // Those that asked before may still be there.
        match raw.welcome().answer {
            Ok(_) => idle.push(raw),
            Err(fault) => assert!(fault == ServiceFault::Busy && Instant::now() < hang, "{fault:?}"),
        }
    }
    let refused = busy(status(&node.socket()).expect_err("no more"));
    assert!(refused.contains("found 10 connections, expected 2 at most"), "{refused}");
    // One that came beyond the limit is a client once there is room.
    let mut last = idle.pop().expect("eight");
    drop((idle, raw, neighbor));
    let attach = attach("tests", [0, 0], SpaceDevice::None);
    for id in 1.. {
        match last.ask(id, &attach) {
            Reply::Attached { .. } => break,
            Reply::Failed(failure) if failure.fault == ServiceFault::Busy => assert!(Instant::now() < hang),
            other => panic!("{other:?}"),
        }
    }
}
