//! Loads that complete layer by layer: what is said of a layer holds when it is said.

mod common;

use common::{BLOCK_BYTES, config, directory, key, payload, store};
use kvhoist::{
    Cache, Config, Error, LayerLoad, Region, Segment, StorageKind,
    block::{Attention, BlockGeometry},
    block_on,
};

/// 4 layers of keys and values.
const MODEL: BlockGeometry =
    BlockGeometry { attention: Attention::Mha { kv_heads: 2, head_dim: 64 }, layers: 4, tokens: 8, dtype_bytes: 2 };
const LAYERS: usize = 4;
const SEGMENT: usize = BLOCK_BYTES / LAYERS / 2;

/// A layer-first pool of an engine. Never moves.
struct Pool {
    memory: *mut u8,
    blocks: usize,
}

impl Pool {
    fn new(blocks: usize) -> Pool {
        assert_eq!(MODEL.block_bytes().expect("a model"), BLOCK_BYTES);
        Pool { memory: Box::leak(vec![0xee; blocks * BLOCK_BYTES].into_boxed_slice()).as_mut_ptr(), blocks }
    }

    fn bytes(&self) -> usize {
        self.blocks * BLOCK_BYTES
    }

    fn register(&self, cache: &Cache, device: bool) -> Region {
        // SAFETY: the memory is leaked; it is looked at only where no movement uses it.
        let region = unsafe {
            match device {
                true => cache.register_device(self.memory, self.bytes()),
                false => cache.register_host(self.memory, self.bytes()),
            }
        };
        region.expect("register")
    }

    /// Segment `s` of all blocks lie together.
    fn places(&self) -> Vec<Vec<Segment>> {
        let place = |block: usize, s: usize| Segment {
            ptr: self.memory.wrapping_add((s * self.blocks + block) * SEGMENT),
            len: SEGMENT,
        };
        (0..self.blocks).map(|block| (0..2 * LAYERS).map(|s| place(block, s)).collect()).collect()
    }

    /// Fails unless this layer of this place is block `n`'s. Nothing may be on its way there.
    fn assert_layer(&self, place: usize, n: u64, layer: usize) {
        let whole = payload(n, BLOCK_BYTES);
        for s in [layer, LAYERS + layer] {
            let start = self.memory.wrapping_add((s * self.blocks + place) * SEGMENT);
            // SAFETY: inside the leaked memory, where nothing is on its way, as the caller promises.
            let found = unsafe { std::slice::from_raw_parts(start, SEGMENT) };
            assert!(found == &whole[s * SEGMENT..][..SEGMENT], "layer {layer} of block {n}");
        }
    }
}

async fn load(cache: &Cache, pool: &Pool, wanted: &[u64]) -> LayerLoad {
    let keys: Vec<_> = wanted.iter().map(|&n| key(n)).collect();
    let layer_of = MODEL.layer_of_segments().expect("a model");
    cache.load_layers(&keys, &pool.places()[..keys.len()], &layer_of).await.expect("taken on")
}

fn with_device(settings: Config) -> Config {
    settings.device_blocks(2).device(kvhoist::DeviceKind::Simulated)
}

/// Blocks of host memory and of the disk, to host memory and to a device, over both engines.
#[test]
fn every_layer_is_right_when_it_is_said_to_be_there() {
    for (storage, device) in [(StorageKind::Auto, true), (StorageKind::Blocking, false)] {
        block_on(async {
            let directory = directory();
            let cache = Cache::open(with_device(config(&directory, storage, 6, 16))).await.expect("open");
            for n in 0..16 {
                store(&cache, n).await;
            }
            let pool = Pool::new(12);
            let region = pool.register(&cache, device);
            for round in 0..10 {
                let wanted: Vec<u64> = (0..12).map(|at| (at + round * 5) % 16).collect();
                let load = load(&cache, &pool, &wanted).await;
                assert_eq!(load.layers(), LAYERS);
                for layer in 0..LAYERS {
                    let done = load.layer(layer).await.expect("a layer");
                    assert!(done.leading == wanted.len() && done.error.is_none(), "{done:?}");
                    wanted.iter().enumerate().for_each(|(place, &n)| pool.assert_layer(place, n, layer));
                }
                assert!(load.blocks().await.into_iter().all(|result| result.expect("loaded")));
            }
            cache.unregister(&region).await.expect("its own region");
            cache.validate().expect("valid");
            cache.close().await.expect("close");
        });
    }
}

#[test]
fn a_missing_block_is_told_of_in_every_layer() {
    block_on(async {
        let cache = Cache::open(Config::default().block_bytes(BLOCK_BYTES).host_blocks(8)).await;
        let cache = cache.expect("open");
        for n in 0..6 {
            store(&cache, n).await;
        }
        let pool = Pool::new(6);
        let region = pool.register(&cache, false);
        let load = load(&cache, &pool, &[0, 1, 2, 99, 4, 5]).await;
        for layer in 0..LAYERS {
            let done = load.layer(layer).await.expect("a layer");
            assert!(done.leading == 3 && done.error.is_none(), "{done:?}");
            (0..3).for_each(|n| pool.assert_layer(n as usize, n, layer));
        }
        let blocks: Vec<bool> = load.blocks().await.into_iter().map(|result| result.expect("no error")).collect();
        assert_eq!(blocks, [true, true, true, false, true, true], "those behind it are there too");
        let nothing = cache.load_layers(&[], &[], &[0]).await.expect("nothing to load");
        assert_eq!((nothing.layer(0).await.expect("a layer").leading, nothing.blocks().await.len()), (0, 0));
        cache.unregister(&region).await.expect("its own region");
        cache.close().await.expect("close");
    });
}

#[test]
fn wrong_arguments_are_refused_before_anything_moves() {
    block_on(async {
        let directory = directory();
        let cache = Cache::open(with_device(config(&directory, StorageKind::Blocking, 4, 4))).await.expect("open");
        store(&cache, 0).await;
        let (pool, other) = (Pool::new(2), Pool::new(2));
        let (region, device) = (pool.register(&cache, false), other.register(&cache, true));
        let places = pool.places();
        let refused = async |segments: &[Vec<Segment>], layer_of: &[usize]| {
            let keys: Vec<_> = (0..segments.len() as u64).map(key).collect();
            let error = cache.load_layers(&keys, segments, layer_of).await.expect_err("wrong");
            assert!(matches!(error, Error::Argument { .. }), "{error}");
            error.to_string()
        };
        let one = &places[..1];
        assert!(refused(one, &[]).await.contains("found 0 layers"));
        assert!(refused(one, &[0, 1, 2, 3]).await.contains("found 8 of block 0"));
        assert!(refused(one, &[0, 0, 2, 2, 0, 0, 2, 2]).await.contains("no segment of layer 1"));
        assert!(refused(one, &[0, 0, 0, 0, 0, 0, 0, usize::MAX]).await.contains("1024 at most"));
        let mixed = [places[0].clone(), other.places()[1].clone()];
        assert!(refused(&mixed, &[0; 8]).await.contains("host and device memory in one load"));
        let load = load(&cache, &pool, &[0]).await;
        assert!(matches!(load.layer(LAYERS).await, Err(Error::Argument { what: "layer", .. })));
        // SAFETY: there is no stream, and no device that could have one: the number is not looked at.
        let error = unsafe { load.stream_wait(0, 0) }.expect_err("no device").to_string();
        assert!(error.contains("a CUDA device only"), "{error}");
        assert!(load.poison_address(0).is_err());
        assert!(load.blocks().await.into_iter().all(|result| result.expect("loaded")));
        cache.unregister(&region).await.expect("its own region");
        cache.unregister(&device).await.expect("its own region");
        cache.close().await.expect("close");
        let closed = cache.load_layers(&[], &[], &[0]).await;
        assert!(matches!(closed, Err(Error::Closed)));
    });
}

/// In virtual time, with failing reads, rotting blocks and failing copies: whatever is said of a layer holds at that
/// moment, and nothing is left over.
#[cfg(feature = "sim")]
mod simulated {
    use std::time::Duration;

    use kvhoist::{
        Config, DiskPath,
        sim::{self, CopyOptions, FaultRates, Rng, SimCopy, Simulated, World},
    };

    use super::*;

    const STORED: u64 = 24;
    const SEEDS: u64 = 60;

    fn settings() -> Config {
        let disks = vec![DiskPath::with_blocks("simulated", 32)];
        with_device(Config::default().block_bytes(BLOCK_BYTES).host_blocks(12).disks(disks))
    }

    #[test]
    fn what_is_said_of_a_layer_holds_under_faults() {
        let (mut told, mut errors, mut partial) = (0, 0, 0);
        for seed in 0..SEEDS {
            let [t, e, p] = run(seed);
            told += t;
            errors += e;
            partial += p;
        }
        assert!(told > 500 && errors > 25 && partial > 50, "{told} layers, {errors} errors, {partial} in part");
    }

    /// Layers that were told of, those with an error, and those of which a part is there.
    fn run(seed: u64) -> [u32; 3] {
        let settings = settings();
        let world = World::new(seed, sim::blank_files(&settings));
        let mut rng = Rng::new(seed);
        let mut counts = [0; 3];
        sim::block_on(async {
            let Simulated { cache, reactor } = sim::open(settings, &world).await.expect("open");
            for n in 0..STORED {
                store(&cache, n).await;
            }
            world.storage.set_rates(FaultRates { read_error: 0.03, bit_flip: 0.03, ..FaultRates::default() });
            world.copy.set_failure(0.03);
            let pool = Pool::new(8);
            let device = rng.chance(0.5);
            let mut region = pool.register(&cache, device);
            for _ in 0..4 {
                let wanted: Vec<u64> = (0..8).map(|_| rng.below(STORED + 1)).collect();
                let load = load(&cache, &pool, &wanted).await;
                if rng.chance(0.2) {
                    // Nothing waits for it; it must not be in the way of the next one.
                    drop(load);
                    cache.unregister(&region).await.expect("its own region");
                    region = pool.register(&cache, device);
                    continue;
                }
                for layer in 0..LAYERS {
                    let done = load.layer(layer).await.expect("a layer");
                    assert!(done.leading <= wanted.len() && (done.error.is_none() || done.leading < wanted.len()));
                    (0..done.leading).for_each(|place| pool.assert_layer(place, wanted[place], layer));
                    counts[0] += 1;
                    counts[1] += u32::from(done.error.is_some());
                    counts[2] += u32::from(done.leading > 0 && done.leading < wanted.len());
                }
                for (place, result) in load.blocks().await.into_iter().enumerate() {
                    if matches!(result, Ok(true)) {
                        (0..LAYERS).for_each(|layer| pool.assert_layer(place, wanted[place], layer));
                    }
                }
            }
            cache.unregister(&region).await.expect("its own region");
            reactor.settle(Duration::from_secs(60)).await.unwrap_or_else(|what| panic!("seed {seed}: {what}"));
            cache.close().await.ok();
            reactor.ended().await;
        });
        counts
    }

    /// Blocks in host memory: each layer in its turn, so that the first is there after its share of the time.
    #[test]
    fn the_first_layer_does_not_wait_for_the_last() {
        let settings = settings().disks(Vec::new());
        let mut world = World::new(1, Vec::new());
        let latency = Duration::from_millis(10);
        world.copy = SimCopy::new(1, CopyOptions { latency: latency..=latency, failure: 0.0 });
        sim::block_on(async {
            let Simulated { cache, reactor: _reactor } = sim::open(settings, &world).await.expect("open");
            for n in 0..8 {
                store(&cache, n).await;
            }
            let pool = Pool::new(8);
            let region = pool.register(&cache, true);
            let started = tokio::time::Instant::now();
            let load = load(&cache, &pool, &[0, 1, 2, 3, 4, 5, 6, 7]).await;
            for layer in 0..LAYERS {
                load.layer(layer).await.expect("a layer");
                assert_eq!(started.elapsed(), latency * (layer as u32 + 1), "layer {layer}");
            }
            cache.unregister(&region).await.expect("its own region");
        });
    }
}
