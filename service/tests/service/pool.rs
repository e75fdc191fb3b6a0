//! Host memory that moves between the spaces of a service, in a service of this process.

use std::{path::PathBuf, time::Instant};

use kvhoist::{Config, DirectIo, Tier, block_on};
use kvhoist_service::{Client, Server, ServerConfig, SpaceStatus};

use crate::{
    node::{BLOCK_BYTES, HANG, options_of, status_of},
    pool_client::{POOL_BLOCKS, PoolClient},
};

/// Host slots of the service, and what moves of them at a time.
const SLOTS: u64 = 64;
const STEP: u64 = 4;
/// Blocks of each space: more than the slots that one can have beside another.
const BLOCKS: u64 = 64;

struct Service {
    _folder: tempfile::TempDir,
    server: Server,
    socket: PathBuf,
}

impl Service {
    fn start(shares: &[String]) -> Self {
        Self::with(|config| config.shares = shares.iter().map(|share| share.parse().expect("a share")).collect())
    }

    fn with(set: impl FnOnce(&mut ServerConfig)) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let mut config = ServerConfig::new(folder.path().join("socket"));
        config.paths = vec![folder.path().to_owned()];
        config.capacity_bytes = 4 * kvhoist::DiskPath::file_bytes(BLOCKS, BLOCK_BYTES as u64);
        config.host_bytes = SLOTS * BLOCK_BYTES as u64;
        config.cache = Config::default().direct_io(DirectIo::Prefer);
        set(&mut config);
        let socket = config.socket.clone();
        Service { _folder: folder, server: Server::start(config).expect("a service"), socket }
    }

    /// A client of a space that asks for all host memory that is left, with its blocks stored.
    fn attach(&self, space: &str) -> PoolClient {
        let mut options = options_of(space);
        (options.capacity_bytes, options.host_bytes) = (kvhoist::DiskPath::file_bytes(BLOCKS, BLOCK_BYTES as u64), 0);
        let pool_client = PoolClient::of(block_on(Client::connect(&self.socket, options)).expect("a service"));
        for first in (0..BLOCKS).step_by(POOL_BLOCKS as usize) {
            let results = pool_client.store(first, POOL_BLOCKS).expect("a service");
            results.into_iter().for_each(|result| assert!(result.expect("stored")));
        }
        pool_client
    }

    fn space(&self, name: &str) -> SpaceStatus {
        let spaces = status_of(&self.socket).spaces;
        // All together never have more than there is, by the ledger and by the slots of the caches.
        let bytes: u64 = spaces.iter().map(|space| space.host_bytes).sum();
        let slots: u64 = spaces.iter().filter_map(|space| Some(space.stats.as_ref()?.tier(Tier::Host).slots)).sum();
        assert!(bytes <= SLOTS * BLOCK_BYTES as u64 && slots <= SLOTS, "{spaces:?}");
        spaces.into_iter().find(|space| space.namespace == name).expect("attached")
    }

    fn slots(&self, name: &str) -> u64 {
        self.space(name).host_bytes / BLOCK_BYTES as u64
    }

    /// Loads all blocks of a space, again and again, until it has so many slots.
    fn scan_until(&self, pool_client: &PoolClient, space: &str, slots: u64) {
        let begun = Instant::now();
        while self.slots(space) != slots {
            assert!(begun.elapsed() < HANG, "it has {} slots, expected {slots}", self.slots(space));
            scan(pool_client);
        }
    }

    fn end(self) {
        self.server.drain();
        self.server.wait().expect("a whole store");
    }
}

/// Loads all blocks once; all are there.
fn scan(pool_client: &PoolClient) {
    for first in (0..BLOCKS).step_by(POOL_BLOCKS as usize) {
        assert_eq!(pool_client.load(first, POOL_BLOCKS).expect("a service"), [true; POOL_BLOCKS as usize]);
    }
}

#[test]
fn host_memory_goes_to_the_space_that_uses_it_and_back() {
    let service = Service::start(&[]);
    let one = service.attach("one");
    assert_eq!(service.slots("one"), SLOTS);
    let other = service.attach("other");
    assert!(service.slots("other") >= STEP, "what a space has at least");
    service.scan_until(&other, "other", SLOTS - STEP);
    assert_eq!(service.slots("one"), STEP);
    service.scan_until(&one, "one", SLOTS - STEP);
    assert_eq!(service.slots("other"), STEP);
    scan(&other);
    service.end();
}

#[test]
fn a_scan_takes_no_memory_from_a_space_with_hits() {
    let service = Service::start(&[]);
    let hot = service.attach("hot");
    let scanner = service.attach("scan");
    let load_hot = || assert!(hot.load(0, POOL_BLOCKS).expect("a service").into_iter().all(|there| there));
    let round = || {
        for first in (0..BLOCKS).step_by(POOL_BLOCKS as usize) {
            scanner.load(first, POOL_BLOCKS).expect("a service");
            load_hot();
        }
    };
    // Its memory may move until its first hits.
    (0..4).for_each(|_| round());
    let (slots, read) = (service.slots("hot"), service.space("hot").stats.expect("open").tier(Tier::Disk).bytes_out);
    assert!(slots >= POOL_BLOCKS, "{slots}");
    (0..20).for_each(|_| round());
    assert_eq!(service.slots("hot"), slots);
    assert_eq!(service.space("hot").stats.expect("open").tier(Tier::Disk).bytes_out, read, "all hits");
    service.end();
}

#[test]
fn memory_that_moves_keeps_to_floors_and_ceilings() {
    let block = BLOCK_BYTES as u64;
    let shares = [format!("tenant:host={}..", 40 * block), format!("small:host=..{}", 16 * block)];
    let service = Service::start(&shares);
    let tenant = service.attach("tenant/kv");
    let small = service.attach("small");
    let any = service.attach("any");
    service.scan_until(&small, "small", 16);
    (0..10).for_each(|_| scan(&small));
    assert_eq!(service.slots("small"), 16, "its ceiling");
    // The rest, but for what each space keeps.
    service.scan_until(&any, "any", SLOTS - 40 - STEP);
    (0..10).for_each(|_| scan(&any));
    assert_eq!((service.slots("tenant/kv"), service.slots("small")), (40, STEP));
    scan(&tenant);
    service.end();
}

#[test]
fn memory_that_a_client_reserves_is_taken_back_and_kept() {
    let service = Service::start(&[]);
    let one = service.attach("one");
    let mut options = options_of("reserved");
    options.capacity_bytes = kvhoist::DiskPath::file_bytes(BLOCKS, BLOCK_BYTES as u64);
    options.host_bytes = 48 * BLOCK_BYTES as u64;
    let reserved = block_on(Client::connect(&service.socket, options)).expect("what it asked for");
    assert_eq!((service.slots("reserved"), service.slots("one")), (48, 16));
    (0..20).for_each(|_| scan(&one));
    assert_eq!(service.slots("reserved"), 48, "idle, and reserved");
    let mut options = options_of("more");
    options.capacity_bytes = kvhoist::DiskPath::file_bytes(BLOCKS, BLOCK_BYTES as u64);
    options.host_bytes = 16 * BLOCK_BYTES as u64;
    let refused = block_on(Client::connect(&service.socket, options)).expect_err("one keeps a step");
    assert!(refused.to_string().contains("bytes of host memory left"), "{refused}");
    drop(reserved);
    service.end();
}

#[test]
fn memory_that_does_not_move_is_what_a_client_asked_for() {
    // All that the machine has: no slots are made for it.
    let all = kvhoist_doctor::memory_bytes().expect("the kernel tells");
    let service = Service::with(|config| (config.move_host, config.host_bytes) = (false, all));
    let mut options = options_of("one");
    options.capacity_bytes = kvhoist::DiskPath::file_bytes(BLOCKS, BLOCK_BYTES as u64);
    options.host_bytes = 8 * BLOCK_BYTES as u64;
    let one = PoolClient::of(block_on(Client::connect(&service.socket, options)).expect("a service"));
    one.store(0, POOL_BLOCKS).expect("a service").into_iter().for_each(|stored| assert!(stored.expect("stored")));
    for _ in 0..BLOCKS {
        assert_eq!(one.load(0, POOL_BLOCKS).expect("a service"), [true; POOL_BLOCKS as usize]);
    }
    let spaces = status_of(&service.socket).spaces;
    assert_eq!(spaces.iter().map(|space| space.host_bytes).collect::<Vec<_>>(), [8 * BLOCK_BYTES as u64]);
    assert_eq!(spaces[0].stats.as_ref().expect("open").tier(Tier::Host).slots, 8);
    service.end();
}
