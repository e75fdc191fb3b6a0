//! Floors and ceilings of tenants, in a service of this process.

use kvhoist::{
    BlockKey, Config, DirectIo, Error, ServiceFault, Tier, block_on,
    service::{Client, Server, ServerConfig, status},
    store,
};

use crate::{
    common::key,
    guest::{Guest, POOL_BLOCKS},
    node::{BLOCK_BYTES, HOST_BLOCKS, options_of},
};

fn keys(numbers: std::ops::Range<u64>) -> Vec<BlockKey> {
    numbers.map(key).collect()
}

fn store_blocks(guest: &Guest, blocks: u64) {
    for first in (0..blocks).step_by(POOL_BLOCKS as usize) {
        let results = guest.store(first, POOL_BLOCKS).expect("a service");
        results.into_iter().for_each(|result| assert!(result.expect("stored")));
    }
}

/// A scanner comes first and asks for everything; the tenant comes later and finds its floor, and no scan takes it.
#[test]
fn a_tenant_that_comes_late_has_its_floor_and_keeps_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let host_bytes = HOST_BLOCKS * BLOCK_BYTES as u64;
    let [floor, rest] = [2, 4].map(|pools| store::path_bytes(pools * POOL_BLOCKS, BLOCK_BYTES as u64));
    let mut config = ServerConfig::new(folder.path().join("socket"));
    config.paths = vec![folder.path().to_owned()];
    (config.capacity_bytes, config.host_bytes) = (floor + rest, 2 * host_bytes);
    config.cache = Config::default().bypass_host(true).direct_io(DirectIo::Prefer);
    config.shares = vec![format!("tenant:disk={floor}..{floor},host={host_bytes}..").parse().expect("a share")];
    let socket = config.socket.clone();
    let server = Server::start(config).expect("a service");

    let connect = |space: &str, capacity_bytes: u64, host_bytes: u64| {
        let mut options = options_of(space);
        (options.capacity_bytes, options.host_bytes) = (capacity_bytes, host_bytes);
        block_on(Client::connect(&socket, options))
    };
    let scanner = Guest::of(connect("scanner", 0, 0).expect("what is left"));
    let tenant = Guest::of(connect("tenant/kv", 0, 0).expect("its floor"));
    let sizes = status(&socket).expect("a service").spaces;
    let size_of = |name: &str| {
        let space = sizes.iter().find(|space| space.namespace == name).expect("attached");
        (space.capacity_bytes, space.host_bytes)
    };
    assert_eq!((size_of("scanner"), size_of("tenant/kv")), ((rest, host_bytes), (floor, host_bytes)));
    match connect("tenant/other", 1, 1) {
        Err(Error::Service { fault: ServiceFault::Capacity, text }) => {
            assert!(text.contains("found 0 bytes"), "{text}");
        }
        other => panic!("above the ceiling: {other:?}"),
    }

    store_blocks(&tenant, 2 * POOL_BLOCKS);
    store_blocks(&scanner, 16 * POOL_BLOCKS);
    let [of_tenant, of_scanner] = [&tenant, &scanner].map(|guest| block_on(guest.client.stats()).expect("a service"));
    assert!(of_scanner.tier(Tier::Disk).evictions > 0 && of_tenant.tier(Tier::Disk).evictions == 0, "{of_tenant:?}");
    assert_eq!(
        block_on(tenant.client.match_len(&keys(0..2 * POOL_BLOCKS))).expect("a service") as u64,
        2 * POOL_BLOCKS
    );
    server.drain();
    server.wait().expect("a whole store");
}
