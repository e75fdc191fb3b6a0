//! Blocks between the service and GPUs of its clients, and memory that is refused.

use kvhoist::{
    BlockKey, Error, Memory, Segment, ServiceFault, Tier, block_on,
    internals::gpu::{DeviceBuffer, Gpu},
    internals::memory::DeviceMemory,
};
use kvhoist_service::{Client, ClientOptions};

use super::{
    BLOCKS, CudaService, Engine, block_bytes, is_real, lent, options, pool_bytes, wait_until_connected, with_gpu,
};
use crate::common::{key, payload};

#[test]
fn blocks_move_between_the_service_and_a_gpu_of_its_client() {
    with_gpu("moves::blocks_move_between_the_service_and_a_gpu_of_its_client", || {
        let mut node = CudaService::new();
        let engine = Engine::new(&node);
        assert!(!engine.region.is_pinned());
        engine.store(0);
        engine.load(0);
        engine.load_layers(0);
        node.process.end();
        node.restart();
        wait_until_connected(&engine.client);
        let keys: Vec<BlockKey> = (0..BLOCKS).map(key).collect();
        let tiers = block_on(engine.client.match_prefix(&keys)).expect("a service");
        assert_eq!(tiers, [Tier::Disk; BLOCKS as usize], "the region is registered again");
        engine.load_layers(0);
        engine.load(0);
        block_on(engine.client.unregister(&engine.region)).expect("its own");
        let refused = block_on(engine.client.load_into(&keys, &engine.places())).expect_err("not registered");
        assert!(matches!(refused, Error::Argument { .. }), "{refused}");
    });
}

#[test]
fn two_clients_on_a_gpu_share_what_one_has_stored() {
    with_gpu("moves::two_clients_on_a_gpu_share_what_one_has_stored", || {
        let node = CudaService::new();
        let [one, other] = [(); 2].map(|()| Engine::new(&node));
        one.store(0);
        other.store(BLOCKS);
        std::thread::scope(|scope| {
            for (engine, first) in [(&one, BLOCKS), (&other, 0)] {
                let engine = Apart(engine);
                scope.spawn(move || {
                    let Apart(engine) = { engine };
                    for _ in 0..4 {
                        engine.load_layers(first);
                        engine.load(first);
                    }
                });
            }
        });
        drop(one.client);
        other.load(0);
    });
}

#[test]
fn clients_on_two_gpus_share_a_space() {
    with_gpu("moves::clients_on_two_gpus_share_a_space", || {
        // SAFETY: no other thread of this process reads its environment now.
        unsafe { std::env::set_var("DOUBLE_DEVICES", "2") };
        if Gpu::open(1).is_err() {
            return crate::common::skip::skipped("one GPU, and two are needed");
        }
        let mut node = CudaService::new();
        let engines = [0, 1].map(|ordinal| Engine::on(&node, ordinal));
        for (engine, first) in engines.iter().zip([0, BLOCKS]) {
            engine.store(first);
        }
        let each = |what: fn(&Engine, u64)| {
            std::thread::scope(|scope| {
                for (engine, first) in engines.iter().map(Apart).zip([BLOCKS, 0]) {
                    scope.spawn(move || {
                        let Apart(engine) = { engine };
                        (0..3).for_each(|_| what(engine, first));
                    });
                }
            });
        };
        each(Engine::load_layers);
        each(Engine::load);
        // Out of the drive, and with the other GPU as the space's first.
        node.process.end();
        node.restart();
        engines.iter().for_each(|engine| wait_until_connected(&engine.client));
        each(Engine::load);
        each(Engine::load_layers);
    });
}

/// A reference for one other thread.
struct Apart<'a>(&'a Engine);

// SAFETY: a stream may be used from any thread, and an engine is used by one at a time.
unsafe impl Send for Apart<'_> {}

#[test]
fn ranges_of_one_allocation_are_registered_one_by_one() {
    with_gpu("moves::ranges_of_one_allocation_are_registered_one_by_one", || {
        let node = CudaService::new();
        let engine = Engine::new(&node);
        engine.store(0);
        let (client, len) = (&engine.client, block_bytes());
        let register = |offset, len| block_on(client.register_device(lent(&engine.seen, offset, len)));
        let [first, second] = [len, 3 * len].map(|offset| register(offset, len).expect("beside the other"));
        register(len + 1, 16).expect_err("part of it is registered");
        let refused = register(pool_bytes() - len, len + (4 << 20)).expect_err("past its end").to_string();
        assert!(refused.contains("one allocation"), "{refused}");
        block_on(client.unregister(&first)).expect("its own");
        let place = vec![Segment { ptr: engine.seen.base().as_ptr().wrapping_add(3 * len), len }];
        let loaded = block_on(client.load_into(&[key(7)], &[place])).expect("a service");
        assert!(matches!(loaded[..], [Ok(true)]), "{loaded:?}");
        assert!(engine.read(&engine.seen)[3 * len..4 * len] == payload(7, len), "WRONG BYTES");
        block_on(client.unregister(&second)).expect("its own");
        // Nothing of it is mapped any more, and it is mapped anew.
        let again = register(0, pool_bytes()).expect("all of it");
        block_on(client.unregister(&again)).expect("its own");
    });
}

#[test]
fn memory_that_other_processes_cannot_map_is_refused_with_what_to_set() {
    with_gpu("moves::memory_that_other_processes_cannot_map_is_refused_with_what_to_set", || {
        let node = CudaService::new();
        let mut plain = options();
        plain.device = None;
        let gpu = Gpu::open(0).expect("a GPU");
        let memory = DeviceBuffer::new(gpu, 1 << 20).expect("memory");
        // The space has no device for a client that asks for none.
        let client = block_on(Client::connect(node.socket(), plain)).expect("a service");
        let refused = block_on(client.register_device(lent(&memory, 0, 4096))).expect_err("no device").to_string();
        assert!(refused.contains("without a device"), "{refused}");
        drop(client);
        let node = CudaService::new();
        let client = block_on(Client::connect(node.socket(), options())).expect("a service");
        let mut host = vec![0_u8; 4096];
        // SAFETY: nothing is moved there.
        let lent_host = unsafe { Memory::device(host.as_mut_ptr(), 4096) };
        let refused = block_on(client.register_device(lent_host)).expect_err("no device memory").to_string();
        assert!(refused.contains("device memory of this process"), "{refused}");
        if !is_real() {
            // SAFETY: no other thread of this process reads its environment now.
            unsafe { std::env::set_var("DOUBLE_FAULT", "ipc") };
            let refused = block_on(client.register_device(lent(&memory, 0, 4096))).expect_err("no handle").to_string();
            assert!(refused.contains("expandable_segments:False"), "{refused}");
        }
    });
}

#[test]
fn a_service_without_the_gpu_says_so() {
    with_gpu("moves::a_service_without_the_gpu_says_so", || {
        let node = CudaService::with(&[("DOUBLE_FAULT", "none"), ("CUDA_VISIBLE_DEVICES", "")]);
        let refused = block_on(Client::connect(node.socket(), options())).expect_err("no GPU");
        assert!(matches!(refused, Error::Service { fault: ServiceFault::Unavailable, .. }), "{refused}");
        let refused = refused.to_string();
        assert!(refused.contains("GPU-") && refused.contains("run the service where"), "{refused}");
        // A space of another kind is served.
        let mut plain = options();
        plain.device = None;
        block_on(Client::connect(node.socket(), plain)).expect("a service");
    });
}

#[test]
fn a_client_has_no_more_regions_than_it_may_however_many_it_asks_for_at_once() {
    with_gpu("moves::a_client_has_no_more_regions_than_it_may_however_many_it_asks_for_at_once", || {
        let node = CudaService::new();
        let client = block_on(Client::connect(node.socket(), options())).expect("a service with the GPU");
        let pool = DeviceBuffer::new(Gpu::open(0).expect("a GPU"), pool_bytes()).expect("memory");
        let asked = (0..300).map(|n| client.register_device(lent(&pool, n * 4096, 4096)));
        let answers = block_on(futures_util::future::join_all(asked));
        assert_eq!(answers.iter().filter(|answer| answer.is_ok()).count(), 256, "the limit that the service has");
        block_on(client.close()).expect("close");
    });
}

/// Its host memory is pinned: it has no slots for more.
#[test]
fn a_space_for_a_gpu_that_evicts_takes_no_memory_of_other_spaces() {
    with_gpu("moves::a_space_for_a_gpu_that_evicts_takes_no_memory_of_other_spaces", || {
        let node = CudaService::new();
        let mut plain = ClientOptions::new("plain", block_bytes());
        (plain.capacity_bytes, plain.host_bytes) = (pool_bytes() as u64, 0);
        let _plain = block_on(Client::connect(node.socket(), plain)).expect("all that is left");
        let engine = Engine::new(&node);
        let host = || {
            let status = kvhoist_service::status(&node.socket()).expect("a service");
            let spaces = status.spaces.iter().map(|space| (space.namespace.clone(), space.host_bytes));
            (spaces.collect::<Vec<_>>(), status.host_left)
        };
        let before = host();
        // More than it has room for in host memory.
        (0..8).for_each(|n| engine.store(n * BLOCKS));
        let stats = block_on(engine.client.stats()).expect("a service");
        assert!(stats.tier(Tier::Host).evictions > 2 * BLOCKS, "{stats:?}");
        assert_eq!(host(), before);
    });
}
