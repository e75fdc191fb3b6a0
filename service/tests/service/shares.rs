//! Floors and ceilings of tenants, in a service of this process.

use std::cell::Cell;

use kvhoist::{BlockKey, Config, DirectIo, DiskPath, Error, ServiceFault, Tier, block_on};
use kvhoist_service::{Client, Server, ServerConfig, remove_space};

use crate::{
    common::{Rng, key, seed},
    node::{BLOCK_BYTES, HOST_BLOCKS, options_of, status_of},
    pool_client::{POOL_BLOCKS, PoolClient},
};

fn keys(numbers: std::ops::Range<u64>) -> Vec<BlockKey> {
    numbers.map(key).collect()
}

fn store_blocks(pool_client: &PoolClient, blocks: u64) {
    for first in (0..blocks).step_by(POOL_BLOCKS as usize) {
        let results = pool_client.store(first, POOL_BLOCKS).expect("a service");
        results.into_iter().for_each(|result| assert!(result.expect("stored")));
    }
}

/// A scanner comes first and asks for everything; the tenant comes later and finds its floor, and no scan takes it.
#[test]
fn a_tenant_that_comes_late_has_its_floor_and_keeps_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let host_bytes = HOST_BLOCKS * BLOCK_BYTES as u64;
    let [floor, rest] = [2, 4].map(|pools| DiskPath::file_bytes(pools * POOL_BLOCKS, BLOCK_BYTES as u64));
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
    let scanner = PoolClient::of(connect("scanner", 0, 0).expect("what is left"));
    let tenant = PoolClient::of(connect("tenant/kv", 0, 0).expect("its floor"));
    let sizes = status_of(&socket).spaces;
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
    let [of_tenant, of_scanner] =
        [&tenant, &scanner].map(|pool_client| block_on(pool_client.client.stats()).expect("a service"));
    assert!(of_scanner.tier(Tier::Disk).evictions > 0 && of_tenant.tier(Tier::Disk).evictions == 0, "{of_tenant:?}");
    assert_eq!(
        block_on(tenant.client.match_len(&keys(0..2 * POOL_BLOCKS))).expect("a service") as u64,
        2 * POOL_BLOCKS
    );
    server.drain();
    server.wait().expect("a whole store");
}

/// Blocks of a tenant that are in host memory stay there, whatever a scanner stores and loads.
#[test]
fn a_scan_evicts_nothing_of_a_tenants_host_memory() {
    let folder = tempfile::tempdir().expect("a folder");
    let host_bytes = HOST_BLOCKS * BLOCK_BYTES as u64;
    let mut config = ServerConfig::new(folder.path().join("socket"));
    config.paths = vec![folder.path().to_owned()];
    config.capacity_bytes = 2 * DiskPath::file_bytes(16 * POOL_BLOCKS, BLOCK_BYTES as u64);
    config.host_bytes = 3 * host_bytes;
    config.cache = Config::default().direct_io(DirectIo::Prefer);
    config.shares = vec![format!("tenant:host={host_bytes}..{host_bytes}").parse().expect("a share")];
    let socket = config.socket.clone();
    let server = Server::start(config).expect("a service");
    let pool_client = |space: &str, host_bytes: u64| {
        let mut options = options_of(space);
        (options.capacity_bytes, options.host_bytes) =
            (DiskPath::file_bytes(16 * POOL_BLOCKS, BLOCK_BYTES as u64), host_bytes);
        PoolClient::of(block_on(Client::connect(&socket, options)).expect("within its share"))
    };
    let (scanner, tenant) = (pool_client("scanner", 0), pool_client("tenant", 0));
    let host = |pool_client: &PoolClient| {
        let stats = block_on(pool_client.client.stats()).expect("a service");
        let tier = stats.tier(Tier::Host);
        (tier.resident, tier.evictions)
    };
    store_blocks(&tenant, POOL_BLOCKS);
    let before = host(&tenant);
    assert_eq!(before, (HOST_BLOCKS, 0), "its host memory is full, and nothing was evicted");
    store_blocks(&scanner, 16 * POOL_BLOCKS);
    for first in (0..16 * POOL_BLOCKS).step_by(POOL_BLOCKS as usize) {
        scanner.load(first, POOL_BLOCKS).expect("a service");
    }
    assert!(host(&scanner).1 > 0, "the scanner has evicted blocks of its own");
    assert_eq!(host(&tenant), before);
    server.drain();
    server.wait().expect("a whole store");
}

/// Floor and ceiling of each tenant, in units of disk and of host memory; everybody else has neither.
const TENANTS: [(&str, [(u64, u64); 2]); 2] = [("a", [(6, 10), (8, 24)]), ("b", [(4, 24), (0, 12)])];
/// What there is of both.
const UNITS: [u64; 2] = [24, 48];
/// The least that a space has of both.
const LEAST: [u64; 2] = [1, 2];

/// What spaces have, by name: units of disk and of host memory.
type Spaces = std::collections::BTreeMap<String, [u64; 2]>;

fn tenant_of(space: &str) -> Option<usize> {
    TENANTS.iter().position(|(name, _)| space.split('/').next() == Some(name))
}

fn taken(spaces: &Spaces, of: usize, tenant: Option<usize>) -> u64 {
    spaces.iter().filter(|(name, _)| tenant_of(name) == tenant).map(|(_, units)| units[of]).sum()
}

/// What a space may have of one of the two: what neither other spaces have nor other tenants are owed, below the
/// ceiling of its own tenant.
fn available(spaces: &Spaces, of: usize, space: &str) -> u64 {
    let tenant = tenant_of(space);
    let all: u64 = spaces.values().map(|units| units[of]).sum();
    let owed: u64 = (0..TENANTS.len())
        .filter(|other| Some(*other) != tenant)
        .map(|other| TENANTS[other].1[of].0.saturating_sub(taken(spaces, of, Some(other))))
        .sum();
    let below_ceiling = tenant.map_or(u64::MAX, |own| TENANTS[own].1[of].1 - taken(spaces, of, tenant));
    (UNITS[of] - all - owed).min(below_ceiling)
}

/// Spaces of two tenants and of others come and go in a service; after each call every floor can still be had and no
/// ceiling is exceeded, of disk and of host memory. A space that asks for no more than that leaves is not refused.
#[test]
fn drawn_spaces_keep_every_floor_and_ceiling() {
    let folder = tempfile::tempdir().expect("a folder");
    // Host memory moves by the block.
    let units = [DiskPath::file_bytes(8, BLOCK_BYTES as u64), BLOCK_BYTES as u64];
    let mut config = ServerConfig::new(folder.path().join("socket"));
    config.paths = vec![folder.path().to_owned()];
    (config.capacity_bytes, config.host_bytes) = (UNITS[0] * units[0], UNITS[1] * units[1]);
    config.cache = Config::default().direct_io(DirectIo::Prefer);
    let share = |(name, bounds): (&str, [(u64, u64); 2])| {
        let bytes = |of: usize, count: u64| if count == 0 { String::new() } else { (count * units[of]).to_string() };
        let [disk, host] = [0, 1].map(|of| format!("{}..{}", bytes(of, bounds[of].0), bytes(of, bounds[of].1)));
        format!("{name}:disk={disk},host={host}").parse().expect("a share")
    };
    config.shares = TENANTS.map(share).to_vec();
    let socket = config.socket.clone();
    let server = Server::start(config).expect("a service");
    let (mut rng, mut expected, refused) = (Rng(seed()), Spaces::new(), Cell::new(0));
    // Some draws leave room for nearly all spaces for long.
    for step in (0..800).take_while(|step| *step < 80 || refused.get() <= 5) {
        let space = ["a", "a/x", "b", "b/x", "c", "d"][rng.below(6) as usize];
        if expected.remove(space).is_some() {
            // Its client has hung up, which the service may not have seen yet.
            while let Err(error) = remove_space(&socket, space, BLOCK_BYTES as u64, false) {
                assert!(matches!(error, Error::Service { fault: ServiceFault::Busy, .. }), "{error}");
            }
        } else {
            let wanted = [rng.below(9), 2 * rng.below(9)];
            let left = [0, 1].map(|of| available(&expected, of, space));
            let mut options = options_of(space);
            (options.capacity_bytes, options.host_bytes) = (wanted[0] * units[0], wanted[1] * units[1]);
            let [fits_disk, fits_host] = [0, 1].map(|of| wanted[of].max(LEAST[of]) <= left[of]);
            match block_on(Client::connect(&socket, options)) {
                // Host memory that other spaces have not reserved is taken from them.
                Ok(_) if fits_disk => {
                    let disk = if wanted[0] == 0 { left[0] } else { wanted[0] };
                    expected.insert(space.into(), [disk, wanted[1]]);
                }
                Err(Error::Service { fault: ServiceFault::Capacity, .. }) if !fits_disk || !fits_host => {
                    refused.update(|refused| refused + 1);
                }
                other => panic!("step {step}: {space} wants {wanted:?} of {left:?}: {:?}", other.map(drop)),
            }
        }
        let spaces = status_of(&socket).spaces.into_iter();
        let found: Spaces = spaces
            .map(|space| (space.namespace, [space.capacity_bytes / units[0], space.host_bytes / units[1]]))
            .collect();
        let of_disk = |spaces: &Spaces| spaces.iter().map(|(name, units)| (name.clone(), units[0])).collect::<Vec<_>>();
        assert_eq!(of_disk(&found), of_disk(&expected), "step {step}");
        for of in [0, 1] {
            let all: u64 = found.values().map(|units| units[of]).sum();
            let owed = (0..TENANTS.len()).map(|tenant| {
                let (floor, ceiling) = TENANTS[tenant].1[of];
                let has = taken(&found, of, Some(tenant));
                assert!(has <= ceiling, "step {step}: {has} units above the ceiling of {ceiling}: {found:?}");
                floor.saturating_sub(has)
            });
            assert!(all + owed.sum::<u64>() <= UNITS[of], "step {step}: a floor cannot be had any more: {found:?}");
        }
        expected = found;
    }
    assert!(refused.get() > 5, "{} refusals: nothing was scarce", refused.get());
    server.drain();
    server.wait().expect("a whole store");
}
