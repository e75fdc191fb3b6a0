//! Layer-wise loads: streams that wait on the device, and the words that tell kernels what went wrong.

use kvhoist::{BlockKey, CopyMethod, LayerLoad, Segment};

use super::*;
use crate::common::{key, payload};

const BLOCKS: usize = 48;
const LAYERS: usize = 16;
const SEGMENT: usize = 16 << 10;
const BLOCK_BYTES: usize = 2 * LAYERS * SEGMENT;

/// A pool, a copy of what a stream found in it, and that stream.
struct Engine {
    pool: Pool,
    seen: Pool,
    /// The poison words of all layers, as the stream found them.
    words: Pool,
    stream: sys::CUstream,
}

impl Engine {
    fn new(gpu: &Arc<Gpu>) -> Engine {
        let [pool, seen] = [0, 1].map(|_| Pool::new(gpu, BLOCKS * BLOCK_BYTES));
        let words = Pool::new(gpu, LAYERS * 4);
        let mut stream = std::ptr::null_mut();
        // SAFETY: the context is current since the pools were made; a handle is written.
        succeeded(unsafe { sys::cuStreamCreate(&mut stream, 1) });
        Engine { pool, seen, words, stream }
    }

    /// Segment `s` of all blocks lie together: keys of all layers, then values of all layers.
    fn places(&self) -> Vec<Vec<Segment>> {
        let place = |block: usize, s: usize| Segment {
            ptr: self.pool.base().wrapping_add((s * BLOCKS + block) * SEGMENT),
            len: SEGMENT,
        };
        (0..BLOCKS).map(|block| (0..2 * LAYERS).map(|s| place(block, s)).collect()).collect()
    }

    fn load(&self, cache: &Cache, wanted: &[u64]) -> LayerLoad {
        let keys: Vec<BlockKey> = wanted.iter().map(|&n| key(n)).collect();
        let layer_of: Vec<usize> = (0..2 * LAYERS).map(|s| s % LAYERS).collect();
        block_on(cache.load_layers(&keys, &self.places(), &layer_of)).expect("taken on")
    }

    /// What a model would do: for every layer wait, then look at it and at its word. Nothing here waits on the host.
    fn look_at_all(&self, load: &LayerLoad) {
        for layer in 0..LAYERS {
            // SAFETY: our own stream, of the primary context.
            unsafe { load.stream_wait(layer, self.stream.expose_provenance()) }.expect("waits");
            for s in [layer, LAYERS + layer] {
                let offset = (s * BLOCKS * SEGMENT) as u64;
                let (to, from) = (self.seen.address() + offset, self.pool.address() + offset);
                // SAFETY: ranges of pools that outlive the stream's work.
                succeeded(unsafe { sys::cuMemcpyAsync(to, from, BLOCKS * SEGMENT, self.stream) });
            }
            let word = load.poison_address(layer).expect("a device");
            let to = self.words.address() + layer as u64 * 4;
            // SAFETY: words of gates are never given back; the pool outlives the stream's work.
            succeeded(unsafe { sys::cuMemcpyAsync(to, word, 4, self.stream) });
        }
    }

    fn synchronize(&self) {
        // SAFETY: our own stream.
        succeeded(unsafe { sys::cuStreamSynchronize(self.stream) });
    }

    /// Checks what the stream saw of the leading blocks, and the words of all layers.
    fn check(&self, wanted: &[u64], leading: usize, word: u32, what: &str) {
        let seen = self.seen.read();
        for (block, &n) in wanted.iter().enumerate().take(leading) {
            let whole = payload(n, BLOCK_BYTES);
            for s in 0..2 * LAYERS {
                let found = &seen[(s * BLOCKS + block) * SEGMENT..][..SEGMENT];
                assert_same(found, &whole[s * SEGMENT..][..SEGMENT], &format!("{what}: block {n}, segment {s}"));
            }
        }
        let words = self.words.read();
        for (layer, found) in words.chunks_exact(4).enumerate() {
            let found = u32::from_ne_bytes(found.try_into().expect("4 bytes"));
            assert_eq!(found, word, "{what}: the word of layer {layer}");
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // SAFETY: our own stream, destroyed once.
        unsafe { sys::cuStreamDestroy_v2(self.stream) };
    }
}

/// From host memory and from disk, by every method: a stream that goes on finds its layer whole.
#[test]
fn streams_find_their_layers_whole() {
    let Some(gpu) = device() else { return };
    for copy in [None].into_iter().chain(CopyMethod::ALL.map(Some)) {
        let directory = directory();
        let cache = open(config(&directory, BLOCK_BYTES, BLOCKS as u32, 2 * BLOCKS as u32).copy(copy));
        (0..2 * BLOCKS as u64).for_each(|n| block_on(common::store(&cache, n)));
        let engine = Engine::new(&gpu);
        let region = engine.pool.register(&cache);
        // All from disk, all from host memory, and some of each.
        for (round, first) in [0, 0, 24, 24, 48, 0].into_iter().enumerate() {
            let wanted: Vec<u64> = (first..first + BLOCKS as u64).collect();
            let what = format!("round {round}, copied by {}", copy.map_or("auto", CopyMethod::name));
            [&engine.pool, &engine.seen, &engine.words].into_iter().for_each(Pool::clear);
            let load = engine.load(&cache, &wanted);
            engine.look_at_all(&load);
            engine.synchronize();
            engine.check(&wanted, BLOCKS, 0, &what);
            assert!(block_on(load.blocks()).into_iter().all(|result| result.expect("loaded")), "{what}");
        }
        block_on(cache.unregister(&region)).expect("its own region");
        block_on(cache.close()).expect("close");
    }
}

/// A block that is missing, and one that rotted on disk: streams go on, and the words say how much is there.
#[test]
fn what_is_not_there_is_told_to_kernels() {
    let Some(gpu) = device() else { return };
    let directory = directory();
    let settings = config(&directory, BLOCK_BYTES, BLOCKS as u32, BLOCKS as u32);
    let cache = open(settings.clone());
    (0..BLOCKS as u64).for_each(|n| block_on(common::store(&cache, n)));
    let engine = Engine::new(&gpu);
    let region = engine.pool.register(&cache);
    let mut wanted: Vec<u64> = (0..BLOCKS as u64).collect();
    wanted[7] = 1000;
    let load = engine.load(&cache, &wanted);
    engine.look_at_all(&load);
    engine.synchronize();
    engine.check(&wanted, 7, 8, "a missing block");
    block_on(cache.unregister(&region)).expect("its own region");
    block_on(cache.close()).expect("close");
    drop(cache);
    let cache = open(settings);
    let file = std::fs::OpenOptions::new().write(true).open(common::store_file(&directory)).expect("the store");
    let end = file.metadata().expect("its length").len();
    // In the last slot, whichever block is there.
    std::os::unix::fs::FileExt::write_all_at(&file, &[0x5a; 64], end - 4096).expect("written");
    let region = engine.pool.register(&cache);
    let wanted: Vec<u64> = (0..BLOCKS as u64).collect();
    let load = engine.load(&cache, &wanted);
    engine.look_at_all(&load);
    engine.synchronize();
    let blocks: Vec<bool> = block_on(load.blocks()).into_iter().map(|result| result.expect("a miss")).collect();
    let rotten = blocks.iter().position(|&is_there| !is_there).expect("one rotted");
    assert_eq!(blocks.iter().filter(|&&is_there| !is_there).count(), 1);
    engine.check(&wanted, rotten, rotten as u32 + 1, "a rotten block");
    block_on(cache.unregister(&region)).expect("its own region");
    block_on(cache.close()).expect("close");
}

/// Handles that are dropped and caches that are closed with loads in flight: no stream hangs.
#[test]
fn no_stream_is_left_waiting() {
    let Some(gpu) = device() else { return };
    let engine = Engine::new(&gpu);
    for round in 0..6 {
        let directory = directory();
        let cache = open(config(&directory, BLOCK_BYTES, BLOCKS as u32, BLOCKS as u32));
        (0..BLOCKS as u64).for_each(|n| block_on(common::store(&cache, n)));
        let region = engine.pool.register(&cache);
        let wanted: Vec<u64> = (0..BLOCKS as u64).collect();
        let load = engine.load(&cache, &wanted);
        engine.look_at_all(&load);
        let load = match round % 3 {
            0 => Some(load),
            _ => None,
        };
        if round % 3 != 1 {
            block_on(cache.close()).expect("close");
        }
        engine.synchronize();
        drop(load);
        block_on(cache.unregister(&region)).expect("its own region");
        block_on(cache.close()).expect("close");
    }
}
