//! A client that takes its memory away amid stores: what was to be stored costs the drives nothing.

use std::{fs::File, os::fd::AsFd};

use kvhoist::{Config, DirectIo, Tier};
use kvhoist_service::{
    Server, ServerConfig, SpaceStats,
    internals::protocol::{Blocks, Place, Reply, Request},
};

use crate::{
    common::{self, key},
    hostile::{memfd, register},
    node::{BLOCK_BYTES, DISK_BLOCKS, HOST_BLOCKS},
    pool_client::{POOL_BLOCKS, PoolClient},
    raw::Raw,
};

/// The first block of the client that takes its memory away.
const HOSTILE: u64 = 1_000;

fn stats(raw: &mut Raw) -> SpaceStats {
    match raw.ask(3, &Request::Stats) {
        Reply::Stats(stats) => *stats,
        other => panic!("{other:?}"),
    }
}

/// Bytes of blocks that came into the tiers, and writes that failed.
fn written(stats: &SpaceStats) -> [u64; 4] {
    let [host, disk] = [Tier::Host, Tier::Disk].map(|tier| stats.tier(tier).bytes_in);
    [host, disk, stats.write_errors, stats.writes_refused]
}

/// Stores blocks in so many parts each, of memory that is gone.
fn store(raw: &mut Raw, blocks: u64, parts: u64) {
    let bytes = blocks * BLOCK_BYTES as u64;
    let fd = memfd(0, bytes);
    assert!(matches!(raw.ask_with(2, &register(1, 0, bytes), fd.as_fd()), Reply::Registered { .. }));
    File::from(fd).set_len(0).expect("it takes no seal");
    let part = BLOCK_BYTES as u64 / parts;
    let place = |at: u64| Place { region: 1, offset: at * part, len: part as u32 };
    let places = (0..blocks).map(|block| (0..parts).map(move |of| place(block * parts + of))).collect();
    let keys = (HOSTILE..HOSTILE + blocks).map(key).collect();
    match raw.ask(4, &Request::Store { parent: None, blocks: Blocks { keys, places } }) {
        Reply::Results(results) => assert!(results.iter().all(Result::is_err), "{results:?}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn blocks_of_memory_that_was_taken_away_are_not_written() {
    for workers in [0, 2] {
        let folder = common::directory();
        let mut config = ServerConfig::new(folder.path().join("socket"));
        config.paths = vec![folder.path().to_owned()];
        config.capacity_bytes = 2 * DISK_BLOCKS * BLOCK_BYTES as u64;
        config.host_bytes = 2 * HOST_BLOCKS * BLOCK_BYTES as u64;
        config.cache = Config::default().bypass_host(true).direct_io(DirectIo::Prefer).workers(workers);
        let server = Server::start(config).expect("a service");
        let neighbor = PoolClient::new(server.socket());
        neighbor.store(0, POOL_BLOCKS).expect("a service");
        // Copied to host memory first; in place; and a lone one.
        for (blocks, parts) in [(64, 16), (64, 1), (1, 1)] {
            let mut raw = Raw::attached(server.socket());
            let before = stats(&mut raw);
            store(&mut raw, blocks, parts);
            assert_eq!(written(&stats(&mut raw)), written(&before), "{parts} parts a block, {workers} workers");
            assert_eq!(neighbor.load(0, POOL_BLOCKS).expect("a service"), [true; POOL_BLOCKS as usize]);
        }
        drop(neighbor);
        server.drain();
        server.wait().expect("a whole store");
    }
}
