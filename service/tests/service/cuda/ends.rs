//! Services and clients that are killed in the middle of copies.

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use kvhoist::{
    Segment, block_on,
    internals::gpu::{DeviceBuffer, Gpu},
    internals::memory::DeviceMemory,
};
use kvhoist_service::{
    Client,
    internals::protocol::{Reply, Request, SpaceDevice},
};

use super::{BLOCKS, CudaService, Engine, block_bytes, lent, options, pool_bytes, wait_until_connected, with_gpu};
use crate::{
    common::{Rng, key, seed},
    killed::{a_moment, kills},
    node::{HANG, Process, Stopped, say},
    pool_client::is_away,
    raw::{Raw, attach},
};

/// What a client writes to its memory after the hang-up.
const MINE: u8 = 0x6b;
/// Far longer than a device takes for what it was asked before the kill.
const WAIT: Duration = Duration::from_millis(200);

#[test]
fn a_killed_service_writes_nothing_to_a_gpu_after_its_end_is_told() {
    with_gpu("ends::a_killed_service_writes_nothing_to_a_gpu_after_its_end_is_told", || {
        let (mut node, mut rng) = (CudaService::new(), Rng(seed()));
        let engine = Engine::new(&node);
        engine.store(0);
        let (keys, places): (Vec<_>, _) = ((0..BLOCKS).map(key).collect(), engine.places());
        for kill in 0..kills() {
            wait_until_connected(&engine.client);
            let ended = std::thread::scope(|scope| {
                let (client, keys, places) = (&engine.client, &keys, &places);
                let load = move || loop {
                    match block_on(client.load_into(keys, places)) {
                        Ok(results) if results.iter().all(|result| result.as_ref().is_ok_and(|there| *there)) => {}
                        Err(error) if is_away(&error) => return,
                        other => panic!("{other:?}"),
                    }
                };
                let loads: Vec<_> = (0..4).map(|_| scope.spawn(load)).collect();
                std::thread::sleep(Duration::from_millis(20));
                a_moment(&mut rng);
                node.process.send_kill();
                loads.into_iter().for_each(|load| load.join().expect("away"));
                Instant::now()
            });
            // From here on it is the client's.
            engine.fill(MINE);
            std::thread::sleep(WAIT);
            let wrong = engine.read(&engine.pool).iter().filter(|byte| **byte != MINE).count();
            assert_eq!(wrong, 0, "bytes that were written {:?} after the end was told, kill {kill}", ended.elapsed());
            node.process.kill();
            node.restart();
        }
        wait_until_connected(&engine.client);
        engine.load(0);
    });
}

#[test]
fn a_stream_that_waits_for_a_killed_service_goes_on() {
    with_gpu("ends::a_stream_that_waits_for_a_killed_service_goes_on", || {
        let mut node = CudaService::new();
        let engine = Engine::new(&node);
        engine.store(0);
        let stopped = Stopped::new(node.process.pid());
        let load = engine.begin_layers(0);
        engine.look_at(&load, 0);
        node.process.send_kill();
        drop(stopped);
        engine.synchronize();
        let (leading, error) = block_on(load.layer(0)).expect("there is such a layer");
        assert!(leading == 0 && error.is_some(), "{leading}: {error:?}");
        assert!(block_on(load.blocks()).iter().all(Result::is_err));
        node.process.kill();
        node.restart();
        wait_until_connected(&engine.client);
        engine.load_layers(0);
    });
}

/// A client's process that loads until it is killed.
pub fn load_for_ever(socket: &str) {
    let node = Path::new(socket);
    let client = block_on(Client::connect(node, options())).expect("a service with the GPU");
    let gpu = Gpu::open(0).expect("a GPU");
    let pool = DeviceBuffer::new(gpu, pool_bytes()).expect("memory");
    let _region = block_on(client.register_device(lent(&pool, 0, pool_bytes()))).expect("registered");
    let place = |n: u64| {
        vec![Segment { ptr: pool.base().as_ptr().wrapping_add(n as usize * block_bytes()), len: block_bytes() }]
    };
    let (keys, places): (Vec<_>, Vec<_>) = (0..BLOCKS).map(|n| (key(n), place(n))).unzip();
    loop {
        let loaded = block_on(client.load_into(&keys, &places)).expect("a service");
        assert!(loaded.iter().all(|result| matches!(result, Ok(true))), "{loaded:?}");
        say("next");
    }
}

#[test]
fn a_service_survives_clients_that_are_killed_in_the_middle_of_copies() {
    with_gpu("ends::a_service_survives_clients_that_are_killed_in_the_middle_of_copies", || {
        let (node, mut rng) = (CudaService::new(), Rng(seed()));
        let engine = Engine::new(&node);
        engine.store(0);
        for _ in 0..kills() {
            let mut other = Process::start(&format!("cuda-load {}", node.socket().display()));
            (0..3).for_each(|_| assert_eq!(other.word().as_deref(), Some("next")));
            a_moment(&mut rng);
            other.kill();
            engine.load_layers(0);
            engine.load(0);
        }
        let hang = Instant::now() + HANG;
        while kvhoist_service::status(&node.socket()).expect("alive").clients.len() > 2 {
            assert!(Instant::now() < hang, "its memory stays mapped");
            std::thread::yield_now();
        }
    });
}

/// Two at once for one number: the later one finds it taken when it is mapped.
#[test]
fn memory_that_is_mapped_in_vain_is_unmapped_where_no_client_waits() {
    with_gpu("ends::memory_that_is_mapped_in_vain_is_unmapped_where_no_client_waits", || {
        // The driver never ends what waits for a device that hangs.
        let node = CudaService::with(&[("DOUBLE_FAULT", "close")]);
        let gpu = Gpu::open(0).expect("a GPU");
        let [one, other] = [(); 2].map(|()| DeviceBuffer::new(Arc::clone(&gpu), pool_bytes()).expect("memory"));
        let register = |memory: &DeviceBuffer| {
            let (handle, offset) = gpu.export_memory(memory.base().as_ptr().addr(), 4096).expect("a handle");
            Request::RegisterDevice { region: 1, offset, len: 4096, handle }
        };
        let mut raw = Raw::attached_by(&node.socket(), &attach("tests", [0, 0], SpaceDevice::Cuda(gpu.device().uuid)));
        // Both in one turn.
        raw.send(&[register(&one).encode(2), register(&other).encode(3)].concat());
        let mut answers: Vec<Reply> = (0..2).map(|_| raw.reply().expect("a reply").1).collect();
        answers.sort_by_key(|answer| matches!(answer, Reply::Failed(_)));
        assert_eq!(answers[0], Reply::Registered { pinned: false });
        let Reply::Failed(refused) = &answers[1] else { panic!("{answers:?}") };
        assert!(refused.text.contains("region: found 1, which is registered"), "{}", refused.text);
        assert!(matches!(raw.ask(4, &Request::Stats), Reply::Stats(_)));
    });
}
