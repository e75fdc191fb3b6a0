//! Loads that complete layer by layer, in virtual time, with failing reads, rotting blocks and failing copies: what a
//! layer reports holds at that moment, and nothing is left over.

#[path = "../../common/mod.rs"]
mod common;

use std::time::Duration;

use common::{
    BLOCK_BYTES,
    layers::{LAYERS, Pool, load, with_device},
    store,
};
use kvhoist::{Config, DiskPath, internals::seams::locks_taken};
use kvhoist_simulation::sim::{self, CopyOptions, FaultRates, Rng, SimCopy, Simulated, World};

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
                let (leading, error) = load.layer(layer).await.expect("a layer");
                assert!(leading <= wanted.len() && (error.is_none() || leading < wanted.len()));
                (0..leading).for_each(|place| pool.assert_layer(place, wanted[place], layer));
                counts[0] += 1;
                counts[1] += u32::from(error.is_some());
                counts[2] += u32::from(leading > 0 && leading < wanted.len());
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
    world.copy = SimCopy::new(1, CopyOptions { latency: latency..=latency, ..CopyOptions::default() });
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

/// The reactor pins the blocks of a load that are in host memory, and gives them back, in turns.
#[test]
fn a_layered_load_of_many_blocks_lets_others_run() {
    const BLOCKS: u64 = 512;
    let settings = Config::default().block_bytes(BLOCK_BYTES).host_blocks(BLOCKS as u32);
    let settings = with_device(settings);
    let world = World::new(1, Vec::new());
    sim::block_on(async {
        let Simulated { cache, reactor } = sim::open(settings, &world).await.expect("open");
        for n in 0..BLOCKS {
            store(&cache, n).await;
        }
        let pool = Pool::new(BLOCKS as usize);
        let region = pool.register(&cache, true);
        let wanted: Vec<u64> = (0..BLOCKS).collect();
        let load = load(&cache, &pool, &wanted).await;
        let blocks = tokio::task::spawn_local(async move { load.blocks().await });
        let mut locks_max = 0;
        while !blocks.is_finished() {
            let before = locks_taken();
            tokio::time::advance(Duration::from_micros(100)).await;
            locks_max = locks_max.max(locks_taken() - before);
        }
        assert!(blocks.await.expect("no panic").iter().all(|block| matches!(block, Ok(true))), "all are there");
        assert!(locks_max < 16, "{locks_max} locks in one turn");
        cache.unregister(&region).await.expect("its own region");
        cache.close().await.ok();
        reactor.ended().await;
    });
}
