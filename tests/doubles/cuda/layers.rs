//! Loads that complete layer by layer, and streams of the caller that wait for layers.

use std::{
    fs::OpenOptions,
    task::{Context, Poll, Waker},
};

use cudarc::driver::sys;
use kvhoist::{Cache, CopyMethod, DiskPath, Error, LayerLoad, Region, Segment, block_on, internals::gpu::Gates};

use super::*;

const BLOCKS: usize = 16;
const LAYERS: usize = 4;
const SEGMENT: usize = BLOCK_BYTES / LAYERS / 2;

/// Layers of the segments of a block: all keys, then all values.
const LAYER_OF: [usize; 2 * LAYERS] = [0, 1, 2, 3, 0, 1, 2, 3];

/// A layer-first pool on the device, and a stream of the caller.
struct Engine {
    gpu: std::sync::Arc<Gpu>,
    pool: DeviceBuffer,
    seen: DeviceBuffer,
    stream: sys::CUstream,
    region: Region,
}

impl Engine {
    fn new(cache: &Cache) -> Engine {
        let gpu = Gpu::open(0).expect("the double is a device");
        let memory = || DeviceBuffer::new(gpu.clone(), BLOCKS * BLOCK_BYTES).expect("memory");
        let (pool, seen) = (memory(), memory());
        gpu.make_current().expect("a context");
        let mut stream = std::ptr::null_mut();
        // SAFETY: the context is current; a handle is written.
        let created = unsafe { sys::cuStreamCreateWithPriority(&mut stream, 0, 0) };
        assert_eq!(created, sys::CUresult::CUDA_SUCCESS);
        // SAFETY: the pool lives until the cache is closed, and nothing else uses it.
        let lent = unsafe { kvhoist::Memory::device(pool.base().as_ptr(), pool.bytes()) };
        let region = kvhoist::block_on(cache.register(lent)).expect("registered");
        Engine { gpu, pool, seen, stream, region }
    }

    /// Segment `s` of all blocks lie together.
    fn places(&self) -> Vec<Vec<Segment>> {
        let place = |block: usize, s: usize| Segment {
            ptr: self.pool.base().as_ptr().wrapping_add((s * BLOCKS + block) * SEGMENT),
            len: SEGMENT,
        };
        (0..BLOCKS).map(|block| (0..LAYER_OF.len()).map(|s| place(block, s)).collect()).collect()
    }

    fn load(&self, cache: &Cache, wanted: &[u64]) -> LayerLoad {
        let keys: Vec<_> = wanted.iter().map(|&n| key(n)).collect();
        block_on(cache.load_layers(&keys, &self.places()[..keys.len()], &LAYER_OF)).expect("taken on")
    }

    /// Puts behind a layer, in the stream, what a model would do: look at all of it.
    fn look_at(&self, load: &LayerLoad, layer: usize) {
        // SAFETY: our own stream.
        unsafe { load.stream_wait(layer, self.stream.expose_provenance()) }.expect("waits");
        for s in (0..LAYER_OF.len()).filter(|&s| LAYER_OF[s] == layer) {
            let offset = s * BLOCKS * SEGMENT;
            let [from, to] = [&self.pool, &self.seen].map(|memory| memory.base().as_ptr().wrapping_add(offset));
            let [from, to] = [from, to].map(|address| address.expose_provenance() as u64);
            self.gpu.make_current().expect("a context");
            // SAFETY: ranges of two buffers that live until the stream has passed the copy.
            let put = unsafe { sys::cuMemcpyAsync(to, from, BLOCKS * SEGMENT, self.stream) };
            assert_eq!(put, sys::CUresult::CUDA_SUCCESS);
        }
    }

    fn synchronize(&self) -> sys::CUresult {
        // SAFETY: our own stream.
        unsafe { sys::cuStreamSynchronize(self.stream) }
    }

    fn is_passed(&self) -> bool {
        // SAFETY: our own stream.
        unsafe { sys::cuStreamQuery(self.stream) == sys::CUresult::CUDA_SUCCESS }
    }

    /// What the stream saw of a layer of a block.
    fn seen(&self, block: usize, layer: usize) -> Vec<u8> {
        let at = |s: usize| {
            let start = self.seen.base().as_ptr().wrapping_add((s * BLOCKS + block) * SEGMENT);
            // SAFETY: the double's device memory is host memory; the stream has passed its copies.
            unsafe { std::slice::from_raw_parts(start, SEGMENT) }.to_vec()
        };
        [at(layer), at(LAYERS + layer)].concat()
    }

    fn assert_seen(&self, block: usize, n: u64, layer: usize) {
        let whole = payload(n, BLOCK_BYTES);
        let part = |s: usize| &whole[s * SEGMENT..][..SEGMENT];
        let expected = [part(layer), part(LAYERS + layer)].concat();
        assert!(self.seen(block, layer) == expected, "layer {layer} of block {block} when its stream went on");
    }

    fn end(self, cache: &Cache) {
        let Engine { gpu, pool, seen, stream, region } = self;
        block_on(cache.unregister(&region)).expect("its own region");
        block_on(cache.close()).expect("close");
        gpu.make_current().expect("a context");
        // SAFETY: our own stream, destroyed once.
        unsafe { sys::cuStreamDestroy_v2(stream) };
        drop((pool, seen));
    }
}

fn poison(load: &LayerLoad, layer: usize) -> u32 {
    let address = load.poison_address(layer).expect("a device");
    // SAFETY: the double's addresses are the host's; the handle lives.
    unsafe { std::ptr::with_exposed_provenance::<u32>(address as usize).read_volatile() }
}

fn open(copy: Option<CopyMethod>) -> Cache {
    let cache = block_on(Cache::open(config(4).copy(copy))).expect("the double is a device");
    (0..BLOCKS as u64).for_each(|n| block_on(common::store(&cache, n)));
    cache
}

const ALL: [u64; BLOCKS] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

#[test]
fn a_stream_goes_on_when_its_layer_is_there() {
    with_double("layers::a_stream_goes_on_when_its_layer_is_there", "", || {
        for copy in CopyMethod::ALL {
            let cache = open(Some(copy));
            let engine = Engine::new(&cache);
            for round in 0..6 {
                let mut wanted = ALL;
                wanted.rotate_left(round);
                let load = engine.load(&cache, &wanted);
                (0..LAYERS).for_each(|layer| engine.look_at(&load, layer));
                assert_eq!(engine.synchronize(), sys::CUresult::CUDA_SUCCESS);
                for layer in 0..LAYERS {
                    (0..BLOCKS).for_each(|block| engine.assert_seen(block, wanted[block], layer));
                    let (leading, error) = block_on(load.layer(layer)).expect("a layer");
                    assert!(leading == BLOCKS && error.is_none(), "{leading}, {error:?}");
                    assert_eq!(poison(&load, layer), 0);
                }
                assert!(block_on(load.blocks()).into_iter().all(|result| result.expect("loaded")));
            }
            engine.end(&cache);
        }
    });
}

/// The first layer is complete, and its stream goes on, while all others are still being copied.
#[test]
fn layers_are_complete_one_by_one() {
    with_double("layers::layers_are_complete_one_by_one", "", || {
        let cache = open(None);
        let engine = Engine::new(&cache);
        allow_events(1);
        let load = engine.load(&cache, &ALL);
        engine.look_at(&load, 0);
        assert_eq!(engine.synchronize(), sys::CUresult::CUDA_SUCCESS);
        (0..BLOCKS).for_each(|block| engine.assert_seen(block, ALL[block], 0));
        assert_eq!(block_on(load.layer(0)).expect("a layer").0, BLOCKS);
        let mut context = Context::from_waker(Waker::noop());
        for layer in 1..LAYERS {
            let later = std::pin::pin!(load.layer(layer));
            assert!(matches!(later.poll(&mut context), Poll::Pending), "layer {layer} is not there");
            engine.look_at(&load, layer);
        }
        assert!(!engine.is_passed(), "the stream waits");
        allow_events(i32::MAX);
        assert_eq!(engine.synchronize(), sys::CUresult::CUDA_SUCCESS);
        (0..BLOCKS).for_each(|block| engine.assert_seen(block, ALL[block], LAYERS - 1));
        // A wait for a layer that is complete is none.
        engine.look_at(&load, 1);
        assert_eq!(engine.synchronize(), sys::CUresult::CUDA_SUCCESS);
        engine.end(&cache);
    });
}

#[test]
fn a_layer_does_not_wait_for_the_copies_of_others_because_a_block_is_missing() {
    with_double("layers::a_layer_does_not_wait_for_the_copies_of_others_because_a_block_is_missing", "", || {
        let cache = open(None);
        let engine = Engine::new(&cache);
        allow_events(1);
        let load = engine.load(&cache, &[0, 1, 1000]);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        let in_time = async { tokio::time::timeout(std::time::Duration::from_secs(20), load.layer(0)).await };
        assert_eq!(runtime.block_on(in_time).expect("it is copied").expect("a layer").0, 2);
        let later = std::pin::pin!(load.layer(1));
        assert!(matches!(later.poll(&mut Context::from_waker(Waker::noop())), Poll::Pending), "it is not there");
        allow_events(i32::MAX);
        engine.end(&cache);
    });
}

/// Layers that are long enough not to go together are complete one by one from the first to the last.
#[test]
fn long_layers_do_not_wait_for_each_other() {
    with_double("layers::long_layers_do_not_wait_for_each_other", "", || {
        // 1.25 MiB a layer, or 640 KiB each second one: two that wait for a place in a stream would fit in a launch.
        const LAYERS: usize = 8;
        for second in [80 << 10, 40 << 10] {
            let lens: [usize; LAYERS] = std::array::from_fn(|layer| if layer % 2 == 0 { 80 << 10 } else { second });
            let block_bytes = lens.iter().sum();
            let settings = config(1).block_bytes(block_bytes).device_layout(None);
            let cache = block_on(Cache::open(settings)).expect("a device");
            let pool = DeviceBuffer::new(Gpu::open(0).expect("a device"), 16 * block_bytes).expect("memory");
            // SAFETY: the pool lives until the cache is closed, and nothing else uses it.
            let lent = unsafe { kvhoist::Memory::device(pool.base().as_ptr(), pool.bytes()) };
            let region = kvhoist::block_on(cache.register(lent)).expect("registered");
            (0..16).for_each(|n| block_on(common::store(&cache, n)));
            let keys = ALL.map(key);
            let place = |block: usize, layer: usize| {
                let at = 16 * lens[..layer].iter().sum::<usize>() + block * lens[layer];
                Segment { ptr: pool.base().as_ptr().wrapping_add(at), len: lens[layer] }
            };
            let places = ALL.map(|block| (0..LAYERS).map(|layer| place(block as usize, layer)).collect::<Vec<_>>());
            for complete in 1..LAYERS {
                allow_events(complete as i32);
                let load = block_on(cache.load_layers(&keys, &places, &[0, 1, 2, 3, 4, 5, 6, 7])).expect("taken on");
                (0..complete).for_each(|layer| assert_eq!(block_on(load.layer(layer)).expect("a layer").0, 16));
                // Time for one that was launched together with the last of these.
                std::thread::sleep(std::time::Duration::from_millis(20));
                let next = std::pin::pin!(load.layer(complete));
                assert!(matches!(next.poll(&mut Context::from_waker(Waker::noop())), Poll::Pending));
                allow_events(i32::MAX);
                assert!(block_on(load.blocks()).into_iter().all(|result| result.expect("loaded")));
            }
            block_on(cache.unregister(&region)).expect("its own region");
            block_on(cache.close()).expect("close");
        }
    });
}

#[test]
fn a_block_that_is_missing_poisons_its_layers_and_lets_streams_go() {
    with_double("layers::a_block_that_is_missing_poisons_its_layers_and_lets_streams_go", "", || {
        let cache = open(None);
        let engine = Engine::new(&cache);
        let mut wanted = ALL;
        wanted[5] = 1000;
        let load = engine.load(&cache, &wanted);
        (0..LAYERS).for_each(|layer| engine.look_at(&load, layer));
        assert_eq!(engine.synchronize(), sys::CUresult::CUDA_SUCCESS);
        for layer in 0..LAYERS {
            let (leading, error) = block_on(load.layer(layer)).expect("a layer");
            assert!(leading == 5 && error.is_none(), "{leading}, {error:?}");
            assert_eq!(poison(&load, layer), 6);
            (0..5).for_each(|block| engine.assert_seen(block, wanted[block], layer));
        }
        let blocks: Vec<bool> = block_on(load.blocks()).into_iter().map(|result| result.expect("no error")).collect();
        assert_eq!(blocks, ALL.map(|n| n != 5));
        // Also if the word was not requested before the layer was complete.
        let load = engine.load(&cache, &wanted);
        block_on(load.blocks());
        (0..LAYERS).for_each(|layer| assert_eq!(poison(&load, layer), 6));
        engine.end(&cache);
    });
}

/// Blocks on disk: one whose bytes rotted is a miss, one that cannot be read is an error. No stream hangs.
#[test]
fn a_block_that_cannot_be_read_poisons_its_layers_and_lets_streams_go() {
    with_double("layers::a_block_that_cannot_be_read_poisons_its_layers_and_lets_streams_go", "", || {
        for rotten in [true, false] {
            let directory = common::directory();
            let disks = vec![DiskPath::with_blocks(directory.path(), BLOCKS as u32)];
            let settings = config(4).disks(disks);
            let cache = block_on(Cache::open(settings.clone())).expect("the double is a device");
            (0..BLOCKS as u64).for_each(|n| block_on(common::store(&cache, n)));
            block_on(cache.close()).expect("close");
            drop(cache);
            let cache = block_on(Cache::open(settings)).expect("opened again");
            let file = OpenOptions::new().write(true).open(common::store_file(&directory)).expect("the store");
            let bytes = file.metadata().expect("its length").len();
            if rotten {
                // The last slot, whichever block is there.
                std::os::unix::fs::FileExt::write_all_at(&file, &[0x5a; 100], bytes - 200).expect("written");
            } else {
                file.set_len(bytes - 4096).expect("cut");
            }
            let engine = Engine::new(&cache);
            let load = engine.load(&cache, &ALL);
            (0..LAYERS).for_each(|layer| engine.look_at(&load, layer));
            assert_eq!(engine.synchronize(), sys::CUresult::CUDA_SUCCESS);
            let blocks = block_on(load.blocks());
            let lost = blocks.iter().position(|result| !matches!(result, Ok(true))).expect("one is lost");
            assert_eq!(blocks.iter().filter(|result| matches!(result, Ok(true))).count(), BLOCKS - 1);
            assert!(if rotten {
                matches!(blocks[lost], Ok(false))
            } else {
                matches!(blocks[lost], Err(Error::Io { .. }))
            });
            for layer in 0..LAYERS {
                let (leading, error) = block_on(load.layer(layer)).expect("a layer");
                assert!(leading == lost && error.is_none() == rotten, "{leading}, {error:?}");
                assert_eq!(poison(&load, layer), lost as u32 + 1);
                (0..lost).for_each(|block| engine.assert_seen(block, ALL[block], layer));
            }
            engine.end(&cache);
        }
    });
}

/// A load goes on without its handle, and also to the end of its cache.
#[test]
fn a_load_that_nobody_holds_lets_its_streams_go() {
    with_double("layers::a_load_that_nobody_holds_lets_its_streams_go", "", || {
        for round in 0..12 {
            let cache = open(None);
            let engine = Engine::new(&cache);
            let load = engine.load(&cache, &ALL);
            (0..LAYERS).for_each(|layer| engine.look_at(&load, layer));
            if round % 2 == 0 {
                drop(load);
                assert_eq!(engine.synchronize(), sys::CUresult::CUDA_SUCCESS);
                (0..LAYERS).for_each(|layer| engine.assert_seen(BLOCKS - 1, ALL[BLOCKS - 1], layer));
            } else {
                // Closed with loads in flight: what was lost is said to be, and no stream hangs.
                block_on(cache.close()).expect("close");
                assert_eq!(engine.synchronize(), sys::CUresult::CUDA_SUCCESS);
                for layer in 0..LAYERS {
                    let (leading, error) = block_on(load.layer(layer)).expect("a layer");
                    assert_eq!(poison(&load, layer) == 0, leading == BLOCKS, "{leading}, {error:?}");
                    (0..leading).for_each(|block| engine.assert_seen(block, ALL[block], layer));
                }
            }
            engine.end(&cache);
        }
    });
}

/// Gates are used again by later loads, and by then nothing waits for the earlier values.
#[test]
fn a_stream_that_comes_late_to_a_wait_goes_on() {
    with_double("layers::a_stream_that_comes_late_to_a_wait_goes_on", "", || {
        let cache = open(None);
        let engine = Engine::new(&cache);
        let first = engine.load(&cache, &ALL);
        for layer in 0..LAYERS {
            // SAFETY: our own stream, which is not queried before the end.
            unsafe { first.stream_wait(layer, engine.stream.expose_provenance()) }.expect("waits");
        }
        block_on(first.blocks());
        drop(first);
        // A load with the same gates, which stays closed for as long as no event is reached.
        allow_events(0);
        let second = engine.load(&cache, &ALL);
        assert_eq!(poison(&second, 0), 0);
        assert_eq!(engine.synchronize(), sys::CUresult::CUDA_SUCCESS, "the first load's layers are there");
        engine.look_at(&second, 0);
        assert!(!engine.is_passed(), "the second's are not");
        allow_events(i32::MAX);
        assert_eq!(engine.synchronize(), sys::CUresult::CUDA_SUCCESS);
        engine.end(&cache);
    });
}

#[test]
fn a_device_that_stops_ends_every_load() {
    with_double("layers::a_device_that_stops_ends_every_load", "", || {
        let cache = open(None);
        let engine = Engine::new(&cache);
        allow_events(1);
        let load = engine.load(&cache, &ALL);
        engine.look_at(&load, LAYERS - 1);
        assert_eq!(block_on(load.layer(0)).expect("a layer").0, BLOCKS);
        stop_device();
        for layer in 1..LAYERS {
            let (leading, error) = block_on(load.layer(layer)).expect("a layer");
            assert!(leading == 0 && matches!(error, Some(Error::Copy { .. })), "{leading}, {error:?}");
            assert_eq!(poison(&load, layer), 1, "opened, and poisoned");
        }
        assert!(block_on(load.blocks()).iter().all(|result| matches!(result, Err(Error::Copy { .. }))));
        // The next load has nowhere to go, and says so.
        let next = engine.load(&cache, &ALL);
        let (leading, error) = block_on(next.layer(0)).expect("a layer");
        assert!(leading == 0 && error.is_some(), "{leading}, {error:?}");
        block_on(cache.unregister(&engine.region)).expect("its own region");
        block_on(cache.close()).expect("close");
    });
}

/// Pinning memory may wait for the streams that wait.
#[test]
fn no_wait_of_a_stream_pins_memory() {
    with_double("layers::no_wait_of_a_stream_pins_memory", "", || {
        let gpu = Gpu::open(0).expect("the double is a device");
        assert!(matches!(Gates::take(&gpu, 1), Err(Error::Unavailable { .. })), "no cache has opened the device");
        let cache = open(None);
        let pins = ask_double(c"double_pins", 0);
        let taken: Vec<_> = (0..64).map(|_| Gates::take(&gpu, 1024).expect("there are 65,536")).collect();
        assert!(matches!(Gates::take(&gpu, 1), Err(Error::Busy { .. })));
        drop(taken);
        drop(Gates::take(&gpu, 1024).expect("given back"));
        assert_eq!(ask_double(c"double_pins", 0), pins);
        block_on(cache.close()).expect("close");
    });
}
