//! A client that changes its memory while blocks are stored from it: its own blocks are misses, and nothing else is
//! lost to anyone.

use std::{
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::Instant,
};

use kvhoist::{BlockKey, Config, DirectIo, block_on};
use kvhoist_service::{Server, ServerConfig, SpaceStats};

use crate::{
    common::key,
    node::{BLOCK_BYTES, DISK_BLOCKS, HANG, HOST_BLOCKS, connect},
    pool_client::{POOL_BLOCKS, PoolClient},
};

/// Fewer than the blocks that change.
const QUARANTINE_MAX: u32 = 8;
/// Blocks of one client that change, before its stores are copied.
const CHANGED_MAX: u64 = 16;
/// The first block of the client that changes its memory.
const HOSTILE: u64 = 1_000;

fn start(folder: &Path) -> (Server, PathBuf) {
    let mut config = ServerConfig::new(folder.join("socket"));
    config.paths = vec![folder.to_owned()];
    config.capacity_bytes = 2 * DISK_BLOCKS * BLOCK_BYTES as u64;
    config.host_bytes = 2 * HOST_BLOCKS * BLOCK_BYTES as u64;
    config.cache = Config::default().bypass_host(true).direct_io(DirectIo::Prefer).quarantine_max(QUARANTINE_MAX);
    let socket = config.socket.clone();
    (Server::start(config).expect("a service"), socket)
}

fn stats(pool_client: &PoolClient) -> SpaceStats {
    block_on(pool_client.client.stats()).expect("a service")
}

/// Stores blocks while another thread writes to all of them.
fn store_changing(pool_client: &PoolClient, first: u64) {
    let keys: Vec<BlockKey> = (first..first + POOL_BLOCKS).map(key).collect();
    let places: Vec<_> = (0..POOL_BLOCKS).map(|at| pool_client.place(at)).collect();
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut byte = 0;
            while !ended.load(Relaxed) {
                byte += 1;
                for word in 0..POOL_BLOCKS as usize * BLOCK_BYTES / 4096 {
                    pool_client.pool.write(word * 4096, &[byte as u8; 8]);
                }
            }
        });
        block_on(pool_client.client.store_from(&keys, None, &places)).expect("a service");
        ended.store(true, Relaxed);
    });
}

/// Which of these blocks another client finds.
fn found(pool_client: &PoolClient, first: u64) -> Vec<bool> {
    let keys: Vec<BlockKey> = (first..first + POOL_BLOCKS).map(key).collect();
    let places: Vec<_> = (0..POOL_BLOCKS).map(|at| pool_client.place(at)).collect();
    let results = block_on(pool_client.client.load_into(&keys, &places)).expect("a service");
    results.into_iter().map(|result| result.expect("a miss is no error")).collect()
}

fn check(neighbor: &PoolClient) {
    assert_eq!(neighbor.load(0, POOL_BLOCKS).expect("a service"), [true; POOL_BLOCKS as usize]);
    let found = stats(neighbor);
    assert_eq!((found.quarantined, found.disk_trouble()), (0, None), "the drive did nothing");
}

/// Its blocks are misses for all, its later stores are copied and right, and the disk serves everyone all the while.
#[test]
fn blocks_of_changed_memory_are_charged_to_their_client() {
    let folder = tempfile::tempdir().expect("a folder");
    let (server, socket) = start(folder.path());
    let [neighbor, hostile] = [(); 2].map(|()| PoolClient::of(connect(&socket)));
    neighbor.store(0, POOL_BLOCKS).expect("a service");
    let begun = Instant::now();
    let mut first = HOSTILE;
    while stats(&neighbor).changed_memory < CHANGED_MAX {
        assert!(begun.elapsed() < HANG, "{:?}", stats(&neighbor));
        store_changing(&hostile, first);
        found(&neighbor, first);
        first += POOL_BLOCKS;
        check(&neighbor);
    }
    let before = stats(&neighbor);
    for _ in 0..10 {
        store_changing(&hostile, first);
        assert_eq!(found(&neighbor, first), [true; POOL_BLOCKS as usize], "copied before it was stored");
        first += POOL_BLOCKS;
    }
    let after = stats(&neighbor);
    assert_eq!((after.changed_memory, after.straight_bytes()), (before.changed_memory, before.straight_bytes()));
    // Others store in place as before.
    neighbor.store(2 * HOSTILE, POOL_BLOCKS).expect("a service");
    assert!(stats(&neighbor).straight_bytes() > after.straight_bytes(), "{:?}", stats(&neighbor));
    check(&neighbor);
    drop((neighbor, hostile));
    server.drain();
    server.wait().expect("a whole store");
}

/// Blocks that were never read before a restart are no fault of the drive after it, either.
#[test]
fn blocks_of_changed_memory_are_no_fault_of_the_drive_after_a_restart() {
    let folder = tempfile::tempdir().expect("a folder");
    let begun = Instant::now();
    let mut changed = 0;
    while changed <= u64::from(QUARANTINE_MAX) {
        assert!(begun.elapsed() < HANG, "{changed}");
        let (server, socket) = start(folder.path());
        let hostile = PoolClient::of(connect(&socket));
        let at = |part: u64| HOSTILE + part * POOL_BLOCKS;
        for part in 0..8 {
            let keys: Vec<BlockKey> = (at(part)..at(part + 1)).map(key).collect();
            for key in &keys {
                block_on(hostile.client.remove(key)).expect("a service");
            }
            store_changing(&hostile, at(part));
        }
        drop(hostile);
        server.drain();
        server.wait().expect("a whole store");
        let (server, socket) = start(folder.path());
        let pool_client = PoolClient::of(connect(&socket));
        (0..8).for_each(|part| drop(found(&pool_client, at(part))));
        let after = stats(&pool_client);
        assert_eq!((after.quarantined, after.disk_trouble()), (0, None), "{after:?}");
        changed += after.checksum_failures;
        drop(pool_client);
        server.drain();
        server.wait().expect("a whole store");
    }
}
