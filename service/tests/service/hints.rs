//! Hints of clients: what one client releases or keeps is released or kept for all clients of its space.

use std::time::{Duration, Instant};

use kvhoist::{BlockKey, Config, DirectIo, DiskPath, RemotePolicy, Tier, block_on};
use kvhoist_service::{Server, ServerConfig};

use crate::{
    common::{key, remote_store::MemoryStore},
    node::{BLOCK_BYTES, DISK_BLOCKS, HANG, HOST_BLOCKS, Node},
    pool_client::{POOL_BLOCKS, PoolClient},
};

/// Keys in one request, as the protocol's limit says.
const KEYS_MAX: usize = 4096;

fn keys(numbers: std::ops::Range<u64>) -> Vec<BlockKey> {
    numbers.map(key).collect()
}

/// Stores a chain of its own.
fn store(pool_client: &PoolClient, first: u64) {
    let places: Vec<_> = (0..POOL_BLOCKS).map(|at| pool_client.place(at)).collect();
    let stored = block_on(pool_client.client.store_from(&keys(first..first + POOL_BLOCKS), None, &places));
    stored.expect("a service").into_iter().for_each(|result| assert!(result.expect("stored")));
}

#[test]
fn released_blocks_are_evicted_first_and_kept_ones_last() {
    let node = Node::new();
    let [pool_client, other] = [PoolClient::new(&node.socket()), PoolClient::new(&node.socket())];
    // As many chains as there is room for, and a few slots.
    let slots = block_on(pool_client.client.stats()).expect("a service").tier(Tier::Disk).slots;
    let (all, spare) = (slots / POOL_BLOCKS * POOL_BLOCKS, (slots % POOL_BLOCKS) as usize);
    (0..all).step_by(POOL_BLOCKS as usize).for_each(|first| store(&pool_client, first));
    let (kept, cold, released) = (0..POOL_BLOCKS, POOL_BLOCKS..2 * POOL_BLOCKS, all - POOL_BLOCKS..all);
    let chain = POOL_BLOCKS as usize;
    let hour = Duration::from_secs(3600);
    assert_eq!(block_on(pool_client.client.keep(&keys(kept.clone()), hour)).expect("a service"), chain);
    assert_eq!(block_on(pool_client.client.release(&keys(released.clone()))).expect("a service"), chain);
    let resident = |numbers: std::ops::Range<u64>| {
        block_on(other.client.contains(&keys(numbers))).expect("a service").into_iter().filter(|there| *there).count()
    };
    store(&other, all);
    assert_eq!([released, cold.clone()].map(resident), [spare, chain], "the newest went before the coldest");
    store(&other, all + POOL_BLOCKS);
    assert_eq!([kept, cold].map(resident), [chain, spare], "the coldest went before the kept");
}

/// The second request releases the beginning of a chain whose end the first one released.
#[test]
fn a_chain_of_more_keys_than_a_request_has_is_released_whole() {
    let node = Node::new();
    let pool_client = PoolClient::new(&node.socket());
    store(&pool_client, 0);
    let mut chain = keys(0..POOL_BLOCKS);
    let missing = KEYS_MAX as u64 - POOL_BLOCKS / 2;
    chain.extend(keys(1_000_000..1_000_000 + missing));
    assert_eq!(block_on(pool_client.client.release(&chain)).expect("a service"), POOL_BLOCKS as usize);
}

#[test]
fn to_ask_whether_a_block_is_there_begins_no_request() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = MemoryStore::new(BLOCK_BYTES as u64);
    let mut config = ServerConfig::new(folder.path().join("socket"));
    config.paths = vec![folder.path().to_owned()];
    config.capacity_bytes = DiskPath::file_bytes(2 * DISK_BLOCKS, BLOCK_BYTES as u64);
    config.host_bytes = 4 * HOST_BLOCKS * BLOCK_BYTES as u64;
    // What is used a second time is written there.
    config.cache = Config::default().direct_io(DirectIo::Prefer).remote_policy(RemotePolicy::Reused);
    config.cache = config.cache.remote_store(store.clone()).remote_interval_s(3600);
    let socket = config.socket.clone();
    let server = Server::start(config).expect("a service");
    let [pool_client, other] = [PoolClient::new(&socket), PoolClient::new(&socket)];
    let request = || block_on(pool_client.client.match_len(&keys(0..4))).expect("a service");
    let load = |n| assert_eq!(pool_client.load(n, 1).expect("a service"), [true]);
    assert_eq!(request(), 0);
    pool_client.store(0, 2).expect("a service").into_iter().for_each(|result| assert!(result.expect("stored")));
    assert_eq!(block_on(other.client.contains(&keys(0..1))).expect("a service"), [true]);
    load(0);
    assert_eq!(request(), 2);
    load(1);
    let began = Instant::now();
    while store.objects().is_empty() {
        assert!(began.elapsed() < HANG, "block 1 was used twice");
        std::thread::yield_now();
    }
    let written: Vec<_> = store.objects().into_iter().map(|(name, _)| name).collect();
    assert!(written.len() == 1 && written[0].ends_with(&key(1).to_string()), "{written:?}");
    server.drain();
    server.wait().expect("a whole store");
}
