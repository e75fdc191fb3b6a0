//! Loads that complete layer by layer, and the memory that they fill.

use kvhoist::{BlockGeometry, Cache, Config, LayerLoad, Region, Segment};

use super::{BLOCK_BYTES, key, payload};

/// 4 layers of keys and values.
pub const MODEL: BlockGeometry = BlockGeometry::Mha { kv_heads: 2, head_dim: 64, layers: 4, tokens: 8, dtype_bytes: 2 };
pub const LAYERS: usize = 4;
pub const SEGMENT: usize = BLOCK_BYTES / LAYERS / 2;

/// A layer-first pool of an engine. Never moves.
pub struct Pool {
    memory: *mut u8,
    blocks: usize,
}

impl Pool {
    pub fn new(blocks: usize) -> Pool {
        assert_eq!(MODEL.block_bytes().expect("a model"), BLOCK_BYTES);
        Pool { memory: Box::leak(vec![0xee; blocks * BLOCK_BYTES].into_boxed_slice()).as_mut_ptr(), blocks }
    }

    pub fn bytes(&self) -> usize {
        self.blocks * BLOCK_BYTES
    }

    pub fn register(&self, cache: &Cache, device: bool) -> Region {
        // SAFETY: the memory is leaked; it is looked at only where no movement uses it.
        let memory = unsafe {
            match device {
                true => kvhoist::Memory::device(self.memory, self.bytes()),
                false => kvhoist::Memory::host(self.memory, self.bytes()),
            }
        };
        kvhoist::block_on(cache.register(memory)).expect("register")
    }

    /// Segment `s` of all blocks lie together.
    pub fn places(&self) -> Vec<Vec<Segment>> {
        let place = |block: usize, s: usize| Segment {
            ptr: self.memory.wrapping_add((s * self.blocks + block) * SEGMENT),
            len: SEGMENT,
        };
        (0..self.blocks).map(|block| (0..2 * LAYERS).map(|s| place(block, s)).collect()).collect()
    }

    /// Fails unless this layer of this place is block `n`'s. Nothing may be on its way there.
    pub fn assert_layer(&self, place: usize, n: u64, layer: usize) {
        let whole = payload(n, BLOCK_BYTES);
        for s in [layer, LAYERS + layer] {
            let start = self.memory.wrapping_add((s * self.blocks + place) * SEGMENT);
            // SAFETY: inside the leaked memory, where nothing is on its way, as the caller promises.
            let found = unsafe { std::slice::from_raw_parts(start, SEGMENT) };
            assert!(found == &whole[s * SEGMENT..][..SEGMENT], "layer {layer} of block {n}");
        }
    }
}

pub async fn load(cache: &Cache, pool: &Pool, wanted: &[u64]) -> LayerLoad {
    let keys: Vec<_> = wanted.iter().map(|&n| key(n)).collect();
    let layer_of = MODEL.layer_of_segments().expect("a model");
    cache.load_layers(&keys, &pool.places()[..keys.len()], &layer_of).await.expect("taken on")
}

pub fn with_device(settings: Config) -> Config {
    settings.device_blocks(2).device(kvhoist::DeviceKind::Simulated)
}
