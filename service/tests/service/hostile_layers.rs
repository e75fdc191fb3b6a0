//! Clients that misuse loads layer by layer and pins: each is told, and no other notices.

use std::{fs::File, io, os::fd::AsFd, sync::Arc};

use kvhoist::{BlockKey, ServiceFault, SharedMemory, Tier, block_on};
use kvhoist_service::internals::protocol::{Blocks, Place, RegionKind, Reply, Request};

use crate::{
    common::key,
    hostile::memfd,
    layers::{attached_with_device, failed},
    node::BLOCK_BYTES,
    pool_client::{LAYER_OF, POOL_BLOCKS, SEGMENT_BYTES},
    raw::Raw,
    shared_node::SharedNode,
};

/// The region that a hostile client lends, which has room for so many blocks.
const REGION: u32 = 9;
const BLOCKS: u64 = 8;

/// The blocks of the space that clients may pin in all.
fn pins_max(shared: &SharedNode) -> usize {
    block_on(shared.neighbor.client.stats()).expect("a service").tier(Tier::Host).slots as usize / 4
}

fn register() -> Request {
    let len = BLOCKS * BLOCK_BYTES as u64;
    Request::Register { region: REGION, kind: RegionKind::Simulated, pin: false, offset: 0, len }
}

fn lend(raw: &mut Raw, id: u64, memory: &SharedMemory) {
    assert_eq!(raw.ask_with(id, &register(), memory.as_fd()), Reply::Registered { pinned: false });
}

/// A load of all blocks that the region has room for.
fn load() -> Request {
    let place = |at: u64| Place { region: REGION, offset: at * SEGMENT_BYTES as u64, len: SEGMENT_BYTES as u32 };
    let segments = LAYER_OF.len() as u64;
    let places = (0..BLOCKS).map(|block| (0..segments).map(move |at| place(block * segments + at)));
    let blocks = Blocks { keys: (0..BLOCKS).map(key).collect(), places: places.collect() };
    Request::LoadLayers { layer_of: LAYER_OF.map(|layer| layer as u16).to_vec(), blocks }
}

/// The reply that ends a request, behind those that tell of its layers.
fn end_of(raw: &mut Raw, id: u64) -> Reply {
    loop {
        match raw.reply().expect("a reply") {
            (_, Reply::Layer { .. }) => {}
            (found, reply) => {
                assert_eq!(found, id, "{reply:?}");
                return reply;
            }
        }
    }
}

#[test]
fn floods_of_pins_stay_within_the_share_and_end_with_their_client() {
    let shared = SharedNode::with_device("120000 64");
    let mut raw = attached_with_device(&shared.node);
    let (most, mut pinned) = (pins_max(&shared), 0);
    // One block many times counts once.
    assert_eq!(raw.ask(2, &Request::Pin { most: u32::MAX, keys: vec![key(0); 4096] }), Reply::Count(1));
    raw.send(&Request::LetGo { hold: 2 }.encode(0));
    // All blocks, and one block many times.
    let floods = [(0..4096).map(key).collect::<Vec<BlockKey>>(), vec![key(0); 4096]];
    for id in 2..202 {
        let Reply::Count(count) = raw.ask(id, &Request::Pin { most: u32::MAX, keys: floods[id as usize % 2].clone() })
        else {
            panic!("no count")
        };
        pinned += count as usize;
    }
    assert!(pinned == most && most > 0, "{pinned} pins, {most} at most");
    // An id that pins is taken, and what does not pin is let go of without harm.
    failed(raw.ask(2, &Request::Pin { most: 1, keys: vec![key(0)] }), ServiceFault::Argument);
    for hold in [0, 1, 77, u64::MAX] {
        raw.send(&Request::LetGo { hold }.encode(0));
    }
    let all: Vec<BlockKey> = (0..POOL_BLOCKS).map(key).collect();
    let others = || block_on(shared.neighbor.client.pin(&all, usize::MAX)).expect("a service").count();
    assert_eq!(others(), 0, "none is left");
    shared.check();
    // Let go twice, the first one's pins are free once.
    let let_go = Request::LetGo { hold: 2 }.encode(0);
    raw.send(&[let_go.clone(), let_go].concat());
    assert!(matches!(raw.ask(300, &Request::Stats), Reply::Stats(_)));
    assert_eq!(others(), most);
    drop(raw);
    shared.node.wait_for_clients(1);
    assert_eq!(others(), most, "a client that is gone pins nothing");
    shared.check();
}

#[test]
fn memory_that_is_taken_back_while_layers_come_is_written_no_more() {
    let shared = SharedNode::with_device("120000 64");
    let mut raw = attached_with_device(&shared.node);
    let memory = SharedMemory::new(BLOCKS as usize * BLOCK_BYTES).expect("memory");
    for round in 0..60 {
        let id = 10 + 10 * round;
        lend(&mut raw, id, &memory);
        let frames = [
            load().encode(id + 1),
            load().encode(id + 2),
            Request::Unregister { region: REGION }.encode(id + 3),
            // Of a region that is leaving.
            load().encode(id + 4),
        ];
        raw.send(&frames.concat());
        let mut ends = 0;
        while ends < frames.len() {
            match raw.reply().expect("a reply") {
                (_, Reply::Layer { .. }) => continue,
                (found, Reply::Done) => {
                    assert_eq!(found, id + 3);
                    // The client's own bytes, from now on.
                    memory.write(0, &vec![0xee; memory.len()]);
                }
                (found, Reply::Results(results)) => {
                    assert!(found < id + 3 && results.iter().all(|result| *result == Ok(true)), "{found}: {results:?}");
                }
                (_, reply) => failed(reply, ServiceFault::Argument),
            }
            ends += 1;
        }
        let mut bytes = vec![0; memory.len()];
        memory.read(0, &mut bytes);
        assert!(bytes.iter().all(|byte| *byte == 0xee), "round {round}: written to after it was taken back");
    }
    shared.check();
}

#[test]
fn a_client_that_reads_of_no_layer_is_cut_off() {
    // More than a client takes on a busy machine, and less than the socket waits for the service.
    let shared = SharedNode::with_device("20000 64");
    shared.node.wait_for_clients(1);
    let held = shared.node.held();
    let mut raw = attached_with_device(&shared.node);
    lend(&mut raw, 2, &SharedMemory::new(BLOCKS as usize * BLOCK_BYTES).expect("memory"));
    // A block in as many layers as there may be, all but one of no bytes: each is told of by a frame.
    let place = |len| Place { region: REGION, offset: 0, len };
    let places: Vec<Place> = (0..1024).map(|at| place(if at == 0 { BLOCK_BYTES as u32 } else { 0 })).collect();
    let blocks = Blocks { keys: vec![key(0)], places: [places].into_iter().collect() };
    let request = Request::LoadLayers { layer_of: (0..1024).collect(), blocks };
    let mut id = 2;
    // Until the service takes no more: its end of the socket is gone.
    loop {
        id += 1;
        if io::Write::write_all(&mut raw.stream, &request.encode(id)).is_err() {
            break;
        }
        shared.check();
    }
    shared.node.wait_for_clients(1);
    assert_eq!(shared.node.status().cut_off, 1);
    shared.node.wait_for_held(&held);
    shared.check();
}

#[test]
fn a_devices_memory_that_shrinks_hurts_its_client_alone() {
    let shared = SharedNode::with_device("120000 64");
    let held = shared.node.held();
    for life in 0..6 {
        let mut raw = attached_with_device(&shared.node);
        let fd = memfd(0, BLOCKS * BLOCK_BYTES as u64);
        assert_eq!(raw.ask_with(2, &register(), fd.as_fd()), Reply::Registered { pinned: false });
        raw.send(&load().encode(3));
        if life % 2 == 0 {
            assert_eq!(end_of(&mut raw, 3), Reply::Results(vec![Ok(true); BLOCKS as usize]));
        }
        File::from(fd).set_len(if life < 3 { 0 } else { 4096 }).expect("it takes no seal");
        if life % 2 == 1 {
            // Before it shrank or after: at any time.
            assert!(matches!(end_of(&mut raw, 3), Reply::Results(_) | Reply::Failed(_)));
        }
        raw.send(&load().encode(4));
        let refused = match end_of(&mut raw, 4) {
            Reply::Results(results) => results.iter().all(Result::is_err),
            reply => matches!(reply, Reply::Failed(_)),
        };
        assert!(refused, "life {life}");
        shared.check();
    }
    shared.node.wait_for_held(&held);
    shared.check();
}

#[test]
fn loads_past_the_limits_are_answered_every_one() {
    const LOADS: u64 = 400;
    let shared = SharedNode::with_device("120000 64");
    let mut raw = attached_with_device(&shared.node);
    let memory = Arc::new(SharedMemory::new(BLOCKS as usize * BLOCK_BYTES).expect("memory"));
    lend(&mut raw, 2, &memory);
    let canceled = (3..3 + LOADS).step_by(3).flat_map(|id| Request::Cancel { request: id }.encode(0));
    let frames: Vec<u8> = (3..3 + LOADS).flat_map(|id| load().encode(id)).chain(canceled).collect();
    let mut sender = Raw { stream: raw.stream.try_clone().expect("a copy") };
    let sends = std::thread::spawn(move || sender.send(&frames));
    let (mut ends, mut moved) = (0, 0);
    while ends < LOADS {
        match raw.reply().expect("a reply").1 {
            Reply::Layer { .. } => continue,
            Reply::Results(results) => {
                let whole = results.iter().all(|result| *result == Ok(true));
                let none = results
                    .iter()
                    .all(|result| matches!(result, Err(failure) if failure.fault == ServiceFault::Canceled));
                assert!(whole || none, "{results:?}");
                moved += u64::from(whole);
            }
            reply => failed(reply, ServiceFault::Busy),
        }
        ends += 1;
    }
    sends.join().expect("sent");
    assert!(moved > 0);
    assert_eq!(raw.ask(3 + LOADS, &Request::Unregister { region: REGION }), Reply::Done);
    shared.check();
}
