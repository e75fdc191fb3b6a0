//! The calls of a client, and what a second process sees of them.

use std::{
    os::unix::fs::{FileTypeExt, PermissionsExt},
    sync::Arc,
    time::{Duration, Instant},
};

use kvhoist::{BlockKey, Durations, Error, Route, Segment, ServiceFault, SharedMemory, Tier, block_on};
use kvhoist_service::{Client, ClientOptions};

use crate::{
    common::{key, payload},
    node::{BLOCK_BYTES, DISK_BLOCKS, HANG, Node, Process, connect, options, options_of},
    pool_client::{BLOCKS, POOL_BLOCKS, PoolClient},
};

fn keys(numbers: std::ops::Range<u64>) -> Vec<BlockKey> {
    numbers.map(key).collect()
}

#[test]
fn two_processes_share_one_space() {
    let node = Node::new();
    for role in ["store", "load"] {
        let mut process = Process::start(&format!("{role} {}", node.socket().display()));
        assert!(process.wait().success(), "{role}");
    }
    node.wait_for_clients(0);
    let status = node.status();
    let stats = status.spaces[0].stats.as_ref().expect("an open space");
    assert_eq!((status.spaces.len(), stats.stores), (1, BLOCKS));
    assert_eq!(stats.tier(Tier::Disk).hits, BLOCKS, "each was read once, straight");
    assert_eq!(stats.straight_bytes(), 2 * BLOCKS * BLOCK_BYTES as u64);
}

/// A space has its slots to itself, of host memory and of disk: the floor and the ceiling of what a tenant gets.
#[test]
fn a_scan_in_one_space_takes_nothing_from_another() {
    let node = Node::new();
    let [tenant, scanner] = ["tenant", "scanner"]
        .map(|space| PoolClient::of(block_on(Client::connect(&node.socket(), options_of(space))).expect("a service")));
    for first in (0..BLOCKS).step_by(POOL_BLOCKS as usize) {
        tenant
            .store(first, POOL_BLOCKS)
            .expect("a service")
            .into_iter()
            .for_each(|result| assert!(result.expect("stored")));
    }
    let tiers = || block_on(tenant.client.match_prefix(&keys(0..BLOCKS))).expect("a service");
    let begun = Instant::now();
    assert_eq!(block_on(tenant.client.prefetch(&keys(0..8))).expect("a service"), 8);
    while tiers()[..8] != [Tier::Host; 8] {
        assert!(begun.elapsed() < HANG, "{:?}", tiers());
        assert_eq!(tenant.load(0, 8).expect("a service"), [true; 8]);
    }
    let before = tiers();
    assert_eq!(before.len() as u64, BLOCKS);

    // The same keys, and more than the space of the scanner has slots for.
    for first in (0..2 * DISK_BLOCKS).step_by(POOL_BLOCKS as usize) {
        drop(scanner.store(first, POOL_BLOCKS).expect("a service"));
        block_on(scanner.client.prefetch(&keys(first..first + POOL_BLOCKS))).expect("a service");
        drop(scanner.load(first, POOL_BLOCKS).expect("a service"));
    }
    let [of_tenant, of_scanner] =
        [&tenant, &scanner].map(|pool_client| block_on(pool_client.client.stats()).expect("a service"));
    assert!([Tier::Host, Tier::Disk].iter().all(|tier| of_scanner.tier(*tier).evictions > 0), "{of_scanner:?}");
    assert!(Tier::ALL.iter().all(|tier| of_tenant.tier(*tier).evictions == 0), "{of_tenant:?}");
    assert_eq!(block_on(tenant.client.match_prefix(&keys(0..BLOCKS))).expect("a service"), before);
}

#[test]
fn a_block_that_many_clients_want_is_read_once() {
    const CLIENTS: usize = 8;
    let node = Node::new();
    let mut wanted = options();
    wanted.host_bytes = 0;
    let connect = || {
        let client = block_on(Client::connect(node.socket(), wanted.clone())).expect("a service");
        PoolClient::of(client)
    };
    let clients: Vec<PoolClient> = (0..CLIENTS).map(|_| connect()).collect();
    for first in (0..BLOCKS).step_by(POOL_BLOCKS as usize) {
        assert!(clients[0].store(first, POOL_BLOCKS).expect("a service").iter().all(Result::is_ok));
    }
    let begin = std::sync::Barrier::new(CLIENTS);
    std::thread::scope(|scope| {
        for pool_client in &clients {
            scope.spawn(|| {
                begin.wait();
                for first in (0..BLOCKS).step_by(POOL_BLOCKS as usize) {
                    assert_eq!(pool_client.load(first, POOL_BLOCKS).expect("a service"), [true; POOL_BLOCKS as usize]);
                }
            });
        }
    });
    let stats = block_on(clients[0].client.stats()).expect("a service");
    let copy = BLOCKS * BLOCK_BYTES as u64;
    assert!(stats.tier(Tier::Disk).bytes_out >= copy, "{stats:?}");
    assert!(
        stats.tier(Tier::Disk).bytes_out as f64 <= 1.05 * copy as f64,
        "{} bytes read of {copy}",
        stats.tier(Tier::Disk).bytes_out
    );
    drop(clients);
    // Alone again, straight, with no copy in the service.
    node.wait_for_clients(0);
    let alone = connect();
    block_on(alone.client.remove(&key(0))).expect("removed");
    alone.store(0, 1).expect("a service");
    assert_eq!(alone.load(0, 1).expect("a service"), [true]);
    let after = block_on(alone.client.stats()).expect("a service");
    assert_eq!(after.straight_bytes() - stats.straight_bytes(), 2 * BLOCK_BYTES as u64);
}

#[test]
fn clients_without_memory_leave_the_loads_of_others_straight() {
    let node = Node::new();
    let (pool_client, asks) = (PoolClient::new(&node.socket()), connect(&node.socket()));
    pool_client.store(0, 12).expect("a service").into_iter().for_each(|result| assert!(result.expect("stored")));
    let straight = || block_on(asks.stats()).expect("a service").straight_bytes() / BLOCK_BYTES as u64 - 12;
    assert_eq!((pool_client.load(0, 4).expect("a service"), straight()), (vec![true; 4], 4));
    let other = PoolClient::of(connect(&node.socket()));
    assert_eq!((pool_client.load(4, 4).expect("a service"), straight()), (vec![true; 4], 4));
    block_on(other.client.unregister(&other.region)).expect("unregistered");
    assert_eq!((pool_client.load(8, 4).expect("a service"), straight()), (vec![true; 4], 8));
}

#[test]
fn memory_that_cannot_be_passed_is_copied() {
    let node = Node::new();
    let mut small = options();
    small.bounce_bytes = 3 * BLOCK_BYTES;
    let client = block_on(Client::connect(node.socket(), small)).expect("a service");
    let mut own = vec![0u8; 16 * BLOCK_BYTES];
    (0..16).for_each(|at| own[at * BLOCK_BYTES..][..BLOCK_BYTES].copy_from_slice(&payload(at as u64, BLOCK_BYTES)));
    // SAFETY: it lives until it is unregistered.
    let memory = unsafe { kvhoist::Memory::host(own.as_mut_ptr(), own.len()) };
    let region = block_on(client.register(memory)).expect("registered");
    assert!(!region.is_shared() && !region.is_pinned());
    let start = own.as_mut_ptr();
    let segment = |at: usize, len| Segment { ptr: start.wrapping_add(at), len };
    let places: Vec<_> = (0..16).map(|at| vec![segment(at * BLOCK_BYTES, BLOCK_BYTES)]).collect();
    let stored = block_on(client.store_from(&keys(0..16), None, &places)).expect("a service");
    assert!(stored.iter().all(|result| matches!(result, Ok(true))), "{stored:?}");
    // Last in one place, in two pieces that lie the other way round.
    let half = BLOCK_BYTES / 2;
    let swapped = vec![segment(half, half), segment(0, half)];
    assert!(matches!(block_on(client.load_into(&[key(9)], &[swapped])).expect("a service")[..], [Ok(true)]));
    block_on(client.unregister(&region)).expect("unregistered");
    let expected = payload(9, BLOCK_BYTES);
    assert!(own[..half] == expected[half..] && own[half..BLOCK_BYTES] == expected[..half]);
    let refused = block_on(client.load_into(&[key(9)], &places[..1])).expect_err("given back");
    assert!(matches!(refused, Error::Argument { what: "segments", .. }), "{refused}");
    // What is lent for a call.
    let mut block = vec![0u8; BLOCK_BYTES];
    let place = [Segment { ptr: block.as_mut_ptr(), len: BLOCK_BYTES }];
    // SAFETY: the block outlives the region.
    let region = unsafe { client.lend(&place) }.expect("it is lent");
    let loaded = block_on(region.load_into(&[key(3)], &[place.to_vec()])).expect("a service");
    assert!(matches!(loaded[..], [Ok(true)]));
    block_on(client.unregister(&region)).expect("unregistered");
    let late = block_on(region.load_into(&[key(3)], &[place.to_vec()])).expect_err("given back");
    assert!(matches!(late, Error::Argument { what: "segments", .. }), "{late}");
    assert!(block == payload(3, BLOCK_BYTES));
}

#[test]
fn calls_at_once_find_no_block_of_another_in_what_they_have_copied() {
    /// So much that copying a block takes as long as the service takes for the next.
    const WIDE: usize = 1 << 20;
    let node = Node::new();
    let mut wide = ClientOptions::new("wide", WIDE);
    (wide.capacity_bytes, wide.host_bytes) = (8 * WIDE as u64, 2 * WIDE as u64);
    (wide.bounce_bytes, wide.deadline) = (2 * WIDE, HANG);
    let client = block_on(Client::connect(node.socket(), wide)).expect("a service");
    let moved = |n: u64, load: bool, block: &mut [u8]| {
        let place = [Segment { ptr: block.as_mut_ptr(), len: WIDE }];
        // SAFETY: the block outlives the region.
        let region = unsafe { client.lend(&place) }.expect("it is lent");
        let (keys, places) = ([key(n)], [place.to_vec()]);
        let results = match load {
            true => block_on(region.load_into(&keys, &places)),
            false => block_on(region.store_from(&keys, None, &places)),
        };
        assert!(matches!(results.expect("a service")[..], [Ok(true)]), "block {n}");
    };
    std::thread::scope(|scope| {
        for n in 0..6 {
            let moved = &moved;
            scope.spawn(move || {
                let expected = payload(n, WIDE);
                let mut block = expected.clone();
                moved(n, false, &mut block);
                for _ in 0..50 {
                    block.fill(0);
                    moved(n, true, &mut block);
                    assert!(block == expected, "block {n}");
                }
            });
        }
    });
}

#[test]
fn a_space_is_removed_when_nobody_has_it() {
    let node = Node::new();
    let pool_client = PoolClient::new(&node.socket());
    pool_client.store(0, POOL_BLOCKS).expect("a service");
    let before = node.status();
    let remove = |name, bytes| kvhoist_service::remove_space(&node.socket(), name, bytes, false);
    let fault = |result: Result<(), kvhoist::Error>| match result {
        Err(Error::Service { fault, .. }) => fault,
        other => panic!("{other:?}"),
    };
    assert_eq!(fault(remove("tests", BLOCK_BYTES as u64)), ServiceFault::Busy);
    let size = remove("tests", 4096).expect_err("a space has one block size");
    assert!(size.to_string().contains(&format!("{BLOCK_BYTES}-byte blocks")), "{size}");
    assert_eq!(fault(Err(size)), ServiceFault::Argument);
    assert_eq!(pool_client.load(0, 4).expect("a service"), [true; 4], "it stays");
    block_on(pool_client.client.close()).expect("closed");
    node.wait_for_clients(0);
    remove("tests", BLOCK_BYTES as u64).expect("removed");
    let after = node.status();
    assert_eq!((after.spaces.len(), after.capacity_left), (0, after.capacity_bytes));
    assert!(after.host_left == after.host_bytes && before.spaces.len() == 1);
    assert_eq!(node.folders(), 0, "nothing is left of it");
    let pool_client = PoolClient::new(&node.socket());
    assert_eq!(pool_client.load(0, 4).expect("a service"), [false; 4], "made anew");
}

#[test]
fn the_calls_are_those_of_the_cache() {
    let node = Node::new();
    let pool_client = PoolClient::new(&node.socket());
    let client = &pool_client.client;
    assert_eq!(pool_client.load(0, 4).expect("a service"), [false; 4], "nothing is there yet");
    pool_client.store(0, 8).expect("a service").into_iter().for_each(|result| assert!(result.expect("stored")));
    assert_eq!(block_on(client.match_len(&keys(0..12))).expect("a service"), 8);
    assert_eq!(block_on(client.match_prefix(&keys(0..12))).expect("a service"), [Tier::Disk; 8]);
    let there = block_on(client.contains(&[key(7), key(8), key(0)])).expect("a service");
    assert_eq!(there, [true, false, true]);
    block_on(client.sync()).expect("flushed");

    assert!(block_on(client.remove(&key(7))).expect("removed"));
    assert!(!block_on(client.remove_durably(&key(7))).expect("removed before"));
    assert_eq!(pool_client.load(6, 2).expect("a service"), [true, false]);

    assert_eq!(block_on(client.prefetch(&keys(0..2))).expect("a service"), 2);
    // A load joins the movement, and is a hit of the faster tier.
    assert_eq!(pool_client.load(0, 2).expect("a service"), [true; 2]);
    assert_eq!(block_on(client.match_prefix(&keys(0..2))).expect("a service"), [Tier::Host; 2]);
    let stats = block_on(client.stats()).expect("a service");
    assert_eq!((stats.stores, stats.misses, stats.tier(Tier::Disk).resident), (8, 5, 7));
    let durations = [Route::RegionToDisk, Route::DiskToHost, Route::HostHit].map(|route| stats.route_durations(route));
    assert_eq!(durations.map(Durations::count), [8, 2, 0]);
    assert!(durations[0].quantile(0.99) >= durations[0].quantile(0.5) && durations[0].sum() > Duration::ZERO);
    block_on(client.unregister(&pool_client.region)).expect("unregistered");
    block_on(client.unregister(&pool_client.region)).expect("once more");
    assert!(matches!(pool_client.load(0, 1), Err(Error::Argument { what: "segments", .. })), "in no region");
    block_on(client.close()).expect("closed");
    assert!(matches!(block_on(client.sync()), Err(Error::Closed)));
}

#[test]
fn a_region_of_another_client_is_refused() {
    let node = Node::new();
    let clients = [PoolClient::new(&node.socket()), PoolClient::new(&node.socket())];
    let refused = block_on(clients[0].client.unregister(&clients[1].region)).expect_err("not its own");
    assert!(matches!(refused, Error::Argument { what: "region", .. }), "{refused}");
    // Its own, which has the same number, is still there.
    clients[0].store(0, 1).expect("a service").into_iter().for_each(|result| assert!(result.expect("stored")));
    assert_eq!(clients[0].load(0, 1).expect("a service"), [true]);
}

#[test]
fn blocks_may_lie_in_pieces_of_several_regions_at_any_address() {
    let node = Node::new();
    let pool_client = PoolClient::new(&node.socket());
    let other = Arc::new(SharedMemory::new(1 << 20).expect("memory"));
    // SAFETY: nobody touches a block of it while the block is on its way.
    let lent = unsafe { kvhoist::Memory::shared(Arc::clone(&other)) };
    block_on(pool_client.client.register(lent.pinned(true))).expect("registered");
    let bytes = payload(1, BLOCK_BYTES);
    let (left, right) = bytes.split_at(1001);
    pool_client.pool.write(77, left);
    other.write(12_345, right);
    let place = |offset: usize| {
        vec![
            Segment { ptr: pool_client.pool.as_ptr().wrapping_add(offset), len: left.len() },
            Segment { ptr: other.as_ptr().wrapping_add(offset + 12_268), len: right.len() },
        ]
    };
    let stored = block_on(pool_client.client.store_from(&[key(1)], None, &[place(77)])).expect("a service");
    assert!(matches!(stored[..], [Ok(true)]), "{stored:?}");
    let loaded = block_on(pool_client.client.load_into(&[key(1)], &[place(100_001)])).expect("a service");
    assert!(matches!(loaded[..], [Ok(true)]), "{loaded:?}");
    let (mut found_left, mut found_right) = (vec![0; left.len()], vec![0; right.len()]);
    pool_client.pool.read(100_001, &mut found_left);
    other.read(112_269, &mut found_right);
    assert!(found_left == left && found_right == right);
}

#[test]
fn spaces_keep_apart_and_share_what_there_is() {
    let node = Node::new();
    let pool_client = PoolClient::new(&node.socket());
    pool_client.store(0, POOL_BLOCKS).expect("a service");
    let mut other = options();
    other.namespace = "another".into();
    let stranger = block_on(Client::connect(node.socket(), other.clone())).expect("room for it");
    assert_eq!(block_on(stranger.match_len(&keys(0..4))).expect("a service"), 0);
    let mut greedy = options();
    greedy.namespace = "greedy".into();
    greedy.capacity_bytes = 1 << 40;
    let refused = block_on(Client::connect(node.socket(), greedy)).expect_err("so much is not left");
    assert!(matches!(refused, Error::Service { fault: ServiceFault::Capacity, .. }), "{refused}");
    // Its disk would have been there.
    let mut greedy = options();
    (greedy.namespace, greedy.host_bytes) = ("greedy".into(), 1 << 40);
    block_on(Client::connect(node.socket(), greedy)).expect_err("so much memory is not left");
    let status = node.status();
    assert_eq!(status.spaces.len(), 2, "a space that could not be made leaves nothing: {:?}", status.spaces);
    assert_eq!(status.capacity_left, status.capacity_bytes / 2);
    assert_eq!(status.host_left, status.host_bytes / 2);
    // What a first client gets where it asks for nothing: all that is left.
    other.namespace = "the rest".into();
    (other.capacity_bytes, other.host_bytes) = (0, 0);
    let _rest = block_on(Client::connect(node.socket(), other)).expect("room for it");
    assert_eq!((node.status().capacity_left, node.status().host_left), (0, 0));
}

#[test]
fn a_space_and_its_blocks_are_there_after_a_restart() {
    let mut node = Node::new();
    let pool_client = PoolClient::new(&node.socket());
    pool_client.store(0, POOL_BLOCKS).expect("a service");
    let folder = node.status().spaces[0].folder.clone();
    // It would connect again, and open the space.
    block_on(pool_client.client.close()).expect("closed");
    assert!(node.process.end().success(), "a drain ends well");
    assert!(!node.socket().exists(), "nothing is left of the socket");
    node.restart();
    let status = node.status();
    assert_eq!((status.spaces.len(), &status.spaces[0].folder, &status.spaces[0].stats), (1, &folder, &None));
    assert_eq!(status.capacity_left, status.capacity_bytes * 3 / 4, "its disk stays its own");
    assert_eq!(PoolClient::new(&node.socket()).load(0, POOL_BLOCKS).expect("a service"), [true; POOL_BLOCKS as usize]);
}

#[test]
fn a_dropped_call_is_canceled_and_its_memory_comes_back() {
    let node = Node::new();
    let pool_client = PoolClient::new(&node.socket());
    for first in (0..BLOCKS).step_by(POOL_BLOCKS as usize) {
        pool_client.store(first, POOL_BLOCKS).expect("a service");
    }
    let mut dropped = 0;
    while dropped < 20 {
        let (keys, places) = (keys(0..1), [pool_client.place(0)]);
        let mut call = Box::pin(pool_client.client.load_into(&keys, &places));
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        // A thread that is put off in the middle of its poll may find the answer there already.
        dropped += usize::from(call.as_mut().poll(&mut context).is_pending());
    }
    block_on(pool_client.client.unregister(&pool_client.region)).expect("all have ended");
    let own = node.status().clients.into_iter().find(|client| client.namespace == "tests").expect("connected");
    assert_eq!((own.regions, own.region_bytes, own.bytes_in_flight), (0, 0, 0));
}

#[test]
fn the_socket_is_its_owners_and_one_service_has_it() {
    let node = Node::new();
    let found = std::fs::metadata(node.socket()).expect("there");
    assert!(found.file_type().is_socket() && found.permissions().mode() & 0o777 == 0o600, "{found:?}");
    let mut second = kvhoist_service::ServerConfig::new(node.socket());
    second.host_bytes = 1 << 20;
    let refused = kvhoist_service::Server::start(second).expect_err("it is in use");
    assert!(refused.to_string().contains("another service's"), "{refused}");
    node.status();
}
