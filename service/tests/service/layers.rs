//! Loads that complete layer by layer through the service, into host memory and a device's, and blocks that are pinned.

use std::{sync::Arc, time::Instant};

use kvhoist::{BlockKey, Error, Memory, Segment, ServiceFault, SharedMemory, Tier, block_on};
use kvhoist_service::{
    Client,
    internals::protocol::{BlockPlaces, Blocks, Place, RegionKind, Reply, Request, SpaceDevice},
};

use crate::{
    common::{key, payload},
    node::{BLOCK_BYTES, HANG, HOST_BLOCKS, Node, Stopped, options, options_of},
    pool_client::{LAYER_OF, POOL_BLOCKS, PoolClient, SEGMENT_BYTES, cut},
    raw::{Raw, attach},
};

const ALL: [bool; POOL_BLOCKS as usize] = [true; POOL_BLOCKS as usize];

#[test]
fn blocks_come_layer_by_layer_to_the_memory_of_each_client_of_a_space() {
    let mut node = Node::new();
    let [one, other] = [(); 2].map(|()| PoolClient::with_device(&node.socket()));
    one.store(0, POOL_BLOCKS).expect("a service").into_iter().for_each(|result| assert!(result.expect("stored")));
    // What one client has stored is in host memory for the other.
    let keys: Vec<BlockKey> = (0..POOL_BLOCKS).map(key).collect();
    let tiers = block_on(other.client.match_prefix(&keys)).expect("a service");
    assert_eq!(tiers, [Tier::Host; POOL_BLOCKS as usize]);
    assert_eq!(other.load_layers(0, POOL_BLOCKS).expect("a service"), ALL);
    assert_eq!(other.load(0, POOL_BLOCKS).expect("a service"), ALL);
    // The second half is nowhere.
    let half: Vec<bool> = (0..8).map(|at| at < 4).collect();
    assert_eq!(one.load_layers(POOL_BLOCKS - 4, 8).expect("a service"), half);
    drop((one, other));
    node.process.end();
    node.restart();
    let pool_client = PoolClient::with_device(&node.socket());
    let tiers = block_on(pool_client.client.match_prefix(&keys)).expect("a service");
    assert_eq!(tiers, [Tier::Disk; POOL_BLOCKS as usize]);
    assert_eq!(pool_client.load_layers(0, POOL_BLOCKS).expect("a service"), ALL);
}

#[test]
fn host_memory_is_loaded_layer_by_layer_too() {
    let node = Node::new();
    let pool_client = PoolClient::new(&node.socket());
    pool_client.store(0, POOL_BLOCKS).expect("a service");
    assert_eq!(pool_client.load_layers(0, POOL_BLOCKS).expect("a service"), ALL);
}

/// Pages of 64 tokens of 36 layers and of 64, K and V of each, whose layers lie between the tokens of a pool.
#[test]
fn a_block_in_as_many_places_as_pages_of_models_is_moved() {
    const PIECE: usize = 16;
    let node = Node::new();
    for count in [36 * 2 * 64, 64 * 2 * 64] {
        let mut options = options_of(&format!("{count} places"));
        options.block_bytes = count * PIECE;
        let client = block_on(Client::connect(&node.socket(), options)).expect("a service");
        let pool = Arc::new(SharedMemory::new(2 * count * PIECE).expect("memory"));
        // SAFETY: nobody touches a block of it while the block is on its way.
        let region = block_on(client.register(unsafe { Memory::shared(pool.clone()) })).expect("registered");
        let piece = |at: usize| Segment { ptr: pool.as_ptr().wrapping_add(at * PIECE), len: PIECE };
        let [from, to] = [0, 1].map(|at| vec![(0..count).map(|n| piece(2 * n + at)).collect::<Vec<_>>()]);
        let keys = [key(0)];
        let mut bytes = payload(0, 2 * count * PIECE);
        pool.write(0, &bytes);
        let stored = block_on(client.store_from(&keys, None, &from)).expect("a service");
        assert!(matches!(stored[..], [Ok(true)]), "{stored:?}");
        let loaded = block_on(client.load_into(&keys, &to)).expect("a service");
        assert!(matches!(loaded[..], [Ok(true)]), "{loaded:?}");
        bytes.chunks_mut(2 * PIECE).for_each(|pair| pair.copy_within(..PIECE, PIECE));
        let mut found = vec![0; bytes.len()];
        pool.read(0, &mut found);
        assert!(found == bytes, "{count} places");
        block_on(client.unregister(&region)).expect("its own");
    }
}

#[test]
fn all_layers_of_a_load_complete_when_the_service_dies() {
    let mut node = Node::new();
    let pool_client = PoolClient::with_device(&node.socket());
    pool_client.store(0, POOL_BLOCKS).expect("a service");
    let keys: Vec<BlockKey> = (0..POOL_BLOCKS).map(key).collect();
    let segments: Vec<_> = (0..POOL_BLOCKS).map(|at| cut(&pool_client.place(at)[0])).collect();
    let stopped = Stopped::new(node.process.pid());
    let load = pool_client.client.load_layers(&keys, &segments, &LAYER_OF).expect("it is up");
    node.process.kill();
    drop(stopped);
    for layer in 0..load.layers() {
        let (leading, error) = block_on(load.layer(layer)).expect("there is such a layer");
        assert!(leading == 0 && error.is_some(), "{leading} blocks of layer {layer}");
    }
    for result in block_on(load.blocks()) {
        let Err(Error::Service { fault: ServiceFault::Away, .. }) = result else { panic!("{result:?}") };
    }
    let refused = pool_client.client.load_layers(&keys, &segments, &LAYER_OF).expect_err("nobody answers");
    assert!(matches!(refused, Error::Service { fault: ServiceFault::Away, .. }), "{refused}");
    // The client has its memory again, and the next service gets it.
    node.restart();
    let hang = Instant::now() + HANG;
    while !pool_client.client.is_connected() {
        assert!(Instant::now() < hang);
        std::thread::yield_now();
    }
    assert_eq!(pool_client.load_layers(0, POOL_BLOCKS).expect("a service"), ALL);
}

#[test]
fn a_space_has_the_device_that_its_first_client_asked_for() {
    let node = Node::new();
    let plain = PoolClient::new(&node.socket());
    let mut wanted = options();
    wanted.device = Some(kvhoist::DeviceKind::Simulated);
    let refused = block_on(Client::connect(node.socket(), wanted)).expect_err("the space has no device").to_string();
    assert!(refused.contains("first client"), "{refused}");
    // SAFETY: nothing is moved there.
    let lent = unsafe { kvhoist::Memory::shared(SharedMemory::new(4096).expect("memory").into()) };
    let refused = block_on(plain.client.register_device(lent)).expect_err("no device").to_string();
    assert!(refused.contains("without a device"), "{refused}");
    let mut raw = Raw::attached(&node.socket());
    let register = Request::Register { region: 1, kind: RegionKind::Simulated, pin: false, offset: 0, len: 4096 };
    let memory = SharedMemory::new(4096).expect("memory");
    failed(raw.ask_with(2, &register, memory.as_fd()), ServiceFault::Memory);
}

#[track_caller]
pub fn failed(reply: Reply, fault: ServiceFault) {
    let Reply::Failed(failure) = reply else { panic!("{reply:?}, expected {fault:?}") };
    assert!(failure.fault == fault && !failure.text.is_empty(), "{failure:?}, expected {fault:?}");
}

/// A load of one block in four segments: region, offset of the block, and the layer of each segment.
fn load(region: u32, offset: u64, layer_of: &[u16]) -> Request {
    let place =
        |at: u64| Place { region, offset: offset.wrapping_add(at * SEGMENT_BYTES as u64), len: SEGMENT_BYTES as u32 };
    let blocks = Blocks { keys: vec![key(0)], places: [(0..4).map(place)].into_iter().collect() };
    Request::LoadLayers { layer_of: layer_of.to_vec(), blocks }
}

/// A load of blocks in four segments that lie alike, from an offset on, each shifted by so much.
fn shifted(region: u32, offset: u64, shifts: &[u64]) -> Request {
    let place =
        |at: u64| Place { region, offset: offset.wrapping_add(at * SEGMENT_BYTES as u64), len: SEGMENT_BYTES as u32 };
    let keys = (0..shifts.len() as u64).map(key).collect();
    let places = BlockPlaces::shifted(&[0, 1, 2, 3].map(place), shifts.to_vec());
    Request::LoadLayers { layer_of: LAYER_OF.map(|layer| layer as u16).to_vec(), blocks: Blocks { keys, places } }
}

#[test]
fn blocks_that_lie_alike_are_loaded_where_they_lie_and_refused_where_one_would_not() {
    let node = Node::new();
    let neighbor = PoolClient::with_device(&node.socket());
    neighbor.store(0, POOL_BLOCKS).expect("a service");
    let mut raw = attached_with_device(&node);
    let memory = SharedMemory::new(4 * BLOCK_BYTES).expect("memory");
    let (len, block) = (4 * BLOCK_BYTES as u64, BLOCK_BYTES as u64);
    let register = Request::Register { region: 9, kind: RegionKind::Simulated, pin: false, offset: 0, len };
    assert_eq!(raw.ask_with(2, &register, memory.as_fd()), Reply::Registered { pinned: false });
    let half = 1 << 63;
    let wrong = [
        shifted(1, 0, &[0]),
        shifted(9, 0, &[0, 3 * block + 1]),
        shifted(9, 0, &[0, block, 1_u64.wrapping_neg()]),
        shifted(9, 3 * block + 1, &[0]),
        // The outermost two lie in the region, and the one between them does not.
        shifted(9, half + block, &[half, half - 1, 0]),
        shifted(9, u64::MAX - block, &[0, u64::MAX]),
    ];
    for (at, request) in wrong.iter().enumerate() {
        failed(raw.ask(10 + at as u64, request), ServiceFault::Argument);
    }
    let mut bytes = vec![0xcc; 4 * BLOCK_BYTES];
    memory.read(0, &mut bytes);
    assert!(bytes.iter().all(|byte| *byte == 0), "nothing was written");
    // Block 0 lies third, block 1 first, block 2 last.
    raw.send(&shifted(9, block, &[block, block.wrapping_neg(), 2 * block]).encode(30));
    for expected in [
        Reply::Layer { layer: 0, leading: 3, failed: false },
        Reply::Layer { layer: 1, leading: 3, failed: false },
        Reply::Results(vec![Ok(true); 3]),
    ] {
        assert_eq!(raw.reply().expect("a reply"), (30, expected));
    }
    memory.read(0, &mut bytes);
    let found: Vec<&[u8]> = bytes.chunks(BLOCK_BYTES).collect();
    for (at, number) in [(0, 1), (2, 0), (3, 2)] {
        assert!(found[at] == payload(number, BLOCK_BYTES), "WRONG BYTES of block {number}");
    }
    assert!(found[1].iter().all(|byte| *byte == 0), "nobody's place");
}

#[test]
fn blocks_that_lie_unlike_each_other_come_layer_by_layer() {
    let node = Node::new();
    let pool_client = PoolClient::with_device(&node.socket());
    pool_client.store(0, POOL_BLOCKS).expect("a service");
    // The segments of every second block lie in reverse.
    let mut segments: Vec<_> = (0..POOL_BLOCKS).map(|at| cut(&pool_client.place(at)[0])).collect();
    segments.iter_mut().skip(1).step_by(2).for_each(|of_block| of_block.reverse());
    let keys: Vec<BlockKey> = (0..POOL_BLOCKS).map(key).collect();
    pool_client.pool.write(0, &vec![0x5a; POOL_BLOCKS as usize * BLOCK_BYTES]);
    let load = pool_client.client.load_layers(&keys, &segments, &LAYER_OF).expect("a service");
    assert!(block_on(load.blocks()).iter().all(|result| matches!(result, Ok(true))));
    for at in 0..POOL_BLOCKS {
        let mut bytes = vec![0; BLOCK_BYTES];
        pool_client.pool.read(at as usize * BLOCK_BYTES, &mut bytes);
        let mut parts: Vec<&[u8]> = bytes.chunks(SEGMENT_BYTES).collect();
        if at % 2 == 1 {
            parts.reverse();
        }
        assert!(parts.concat() == payload(at, BLOCK_BYTES), "WRONG BYTES of block {at}");
    }
}

#[test]
fn numbers_that_are_wrong_are_refused_before_anything_moves() {
    let node = Node::new();
    let neighbor = PoolClient::with_device(&node.socket());
    neighbor.store(0, POOL_BLOCKS).expect("a service");
    let mut raw = attached_with_device(&node);
    let memory = SharedMemory::new(2 * BLOCK_BYTES).expect("memory");
    let len = 2 * BLOCK_BYTES as u64;
    let register = Request::Register { region: 9, kind: RegionKind::Simulated, pin: false, offset: 0, len };
    assert_eq!(raw.ask_with(2, &register, memory.as_fd()), Reply::Registered { pinned: false });
    let good = LAYER_OF.map(|layer| layer as u16);
    let wrong = [
        // A region of another connection, and one that there is not.
        load(1, 0, &good),
        load(77, 0, &good),
        // Past the end, and past the end of all addresses.
        load(9, BLOCK_BYTES as u64 + 1, &good),
        load(9, u64::MAX - 10, &good),
        // Layers without a segment, too many, and other numbers of segments.
        load(9, 0, &[0, 2, 0, 2]),
        load(9, 0, &[0, 1, 2, u16::MAX]),
        load(9, 0, &[0, 1, 0]),
        load(9, 0, &[]),
    ];
    for (at, request) in wrong.iter().enumerate() {
        failed(raw.ask(10 + at as u64, request), ServiceFault::Argument);
    }
    let mut bytes = vec![0xcc; 2 * BLOCK_BYTES];
    memory.read(0, &mut bytes);
    assert!(bytes.iter().all(|byte| *byte == 0), "nothing was written");
    // And the right ones: each layer, then the result.
    raw.send(&load(9, 0, &good).encode(30));
    for expected in [
        Reply::Layer { layer: 0, leading: 1, failed: false },
        Reply::Layer { layer: 1, leading: 1, failed: false },
        Reply::Results(vec![Ok(true)]),
    ] {
        assert_eq!(raw.reply().expect("a reply"), (30, expected));
    }
    assert_eq!(neighbor.load_layers(0, POOL_BLOCKS).expect("a service"), ALL);
}

pub fn attached_with_device(node: &Node) -> Raw {
    Raw::attached_by(&node.socket(), &attach("tests", [0, 0], SpaceDevice::Simulated))
}

#[test]
fn clients_pin_a_quarter_of_the_host_memory_and_no_longer_than_they_live() {
    let node = Node::new();
    let [one, other] = [(); 2].map(|()| PoolClient::with_device(&node.socket()));
    one.store(0, POOL_BLOCKS).expect("a service");
    let keys: Vec<BlockKey> = (0..POOL_BLOCKS).map(key).collect();
    let most = one.client.pin(&keys, 3);
    let pins = block_on(most).expect("a service");
    assert_eq!(pins.count(), 3);
    let all = block_on(other.client.pin(&keys, usize::MAX)).expect("a service");
    let pinned = 3 + all.count();
    let host_slots = block_on(one.client.stats()).expect("a service").tier(Tier::Host).slots as usize;
    assert!(pinned <= host_slots / 4 && pinned >= HOST_BLOCKS as usize / 4, "{pinned} of {host_slots}");
    assert_eq!(block_on(one.client.pin(&keys, usize::MAX)).expect("a service").count(), 0, "no room");
    // Many other blocks come and go: those that are pinned stay.
    for first in (100..100 + 4 * host_slots as u64).step_by(POOL_BLOCKS as usize) {
        one.store(first, POOL_BLOCKS).expect("a service");
    }
    let in_host = |pool_client: &PoolClient, keys: &[BlockKey]| {
        let tiers = keys.iter().map(|key| block_on(pool_client.client.match_prefix(&[*key])).expect("a service"));
        tiers.filter(|tier| tier[..] == [Tier::Host]).count()
    };
    assert!(in_host(&other, &keys) >= all.count().max(3), "{} are left", in_host(&other, &keys));
    // The room is there again when pins are let go, and when a client has gone.
    drop(pins);
    assert_eq!(block_on(one.client.pin(&keys, 3)).expect("a service").count(), 3);
    std::mem::forget(all);
    block_on(other.client.close()).expect("closed");
    node.wait_for_clients(1);
    let again = block_on(one.client.pin(&keys, usize::MAX)).expect("a service");
    assert!(again.count() > 0, "the pins of a client that is gone are gone");
}
