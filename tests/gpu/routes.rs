//! Blocks through the cache: disk, host memory, device slots, a caller's pool, for every layout and method.

use kvhoist::{BlockGeometry, BlockKey, CopyMethod, Layout, Segment, Tier};

use super::*;
use crate::common::{key, payload};

const BLOCKS: u64 = 24;
const SLOTS: u32 = 6;

/// Layouts of one block each, with the name that a failure shows.
fn layouts() -> Vec<(&'static str, Layout)> {
    let mha = BlockGeometry::Mha { kv_heads: 2, head_dim: 64, layers: 16, tokens: 16, dtype_bytes: 2 };
    let mla = BlockGeometry::Mla { latent_dim: 576, layers: 5, tokens: 16, dtype_bytes: 2 };
    vec![
        ("one piece", Layout::contiguous(128 << 10).expect("a layout")),
        ("MHA, layer first", mha.layer_first().expect("a layout")),
        ("MHA, page first", mha.page_first().expect("a layout")),
        ("MLA, layer first", mla.layer_first().expect("a layout")),
        ("MLA, page first", mla.page_first().expect("a layout")),
        ("odd", Layout::new(vec![1, 4095, 4100, 3, 100, 65_537, 2, 26_000]).expect("a layout")),
        ("one byte", Layout::contiguous(1).expect("a layout")),
        ("16 MiB", Layout::contiguous(16 << 20).expect("a layout")),
    ]
}

#[test]
fn every_byte_by_every_route_layout_and_method() {
    let Some(gpu) = device() else { return };
    for copy in [None].into_iter().chain(CopyMethod::ALL.map(Some)) {
        for (name, layout) in layouts() {
            let what = format!("{name}, copied by {}", copy.map_or("auto", CopyMethod::name));
            routes(&gpu, copy, &layout, &what);
        }
    }
}

fn routes(gpu: &Arc<Gpu>, copy: Option<CopyMethod>, layout: &Layout, what: &str) {
    let directory = directory();
    let block_bytes = layout.block_bytes();
    let settings = config(&directory, block_bytes, SLOTS, BLOCKS as u32).copy(copy).device_layout(layout.clone());
    let cache = open(settings.clone());
    (0..BLOCKS).for_each(|n| block_on(common::store(&cache, n)));
    // Cold and warm: from disk, from host memory, from the slot.
    for n in (0..BLOCKS).chain((0..BLOCKS).rev()).chain(BLOCKS - 3..BLOCKS) {
        let lease = block_on(cache.fetch_to_device(&key(n))).expect("fetch").expect("stored");
        let bytes = block_on(cache.read_device(&lease, Vec::new())).expect("read");
        assert_same(&bytes, &payload(n, block_bytes), &format!("{what}: block {n} by {}", lease.route()));
    }
    let keys: Vec<BlockKey> = (0..BLOCKS).map(key).collect();
    let (pool, places, expected) = scattered(gpu, layout);
    let region = pool.register(&cache);
    let loaded = block_on(cache.load_into(&keys, &places)).expect("loads");
    assert!(loaded.into_iter().all(|result| result.expect("loaded")), "{what}");
    assert_same(&pool.read(), &expected, &format!("{what}: into a pool"));
    for key in &keys {
        assert!(block_on(cache.remove(key)).expect("remove"));
    }
    let stored = block_on(cache.store_from(&keys, None, &places)).expect("stores");
    assert!(stored.into_iter().all(|result| result.expect("stored")), "{what}");
    block_on(cache.unregister(&region)).expect("its own region");
    for n in 0..BLOCKS {
        let lease = block_on(cache.fetch(&key(n))).expect("fetch").expect("stored");
        assert_same(&lease, &payload(n, block_bytes), &format!("{what}: block {n} from a pool, by {}", lease.route()));
    }
    kvhoist::internals::validate(&cache).expect("valid");
    block_on(cache.close()).expect("close");
    drop(cache);
    let cache = open(settings);
    assert_eq!(cache.stats().tier(Tier::Disk).resident, BLOCKS, "{what}");
    for n in 0..BLOCKS {
        let lease = block_on(cache.fetch_to_device(&key(n))).expect("fetch").expect("stored");
        let bytes = block_on(cache.read_device(&lease, Vec::new())).expect("read");
        assert_same(&bytes, &payload(n, block_bytes), &format!("{what}: block {n} after a restart"));
    }
    block_on(cache.close()).expect("close");
}

/// A pool in which segment `s` of all blocks lie together, with a few bytes between any two, and what it holds when
/// every block is there.
fn scattered(gpu: &Arc<Gpu>, layout: &Layout) -> (Pool, Vec<Vec<Segment>>, Vec<u8>) {
    let gap = 5;
    let bytes = BLOCKS as usize * (layout.block_bytes() + gap * layout.segments().len());
    let pool = Pool::new(gpu, bytes);
    let mut expected = vec![UNTOUCHED; bytes];
    let mut places = vec![Vec::new(); BLOCKS as usize];
    let (mut at, mut start) = (3, 0);
    for &len in layout.segments() {
        for (block, segments) in places.iter_mut().enumerate() {
            segments.push(Segment { ptr: pool.base().wrapping_add(at), len });
            expected[at..at + len].copy_from_slice(&payload(block as u64, layout.block_bytes())[start..start + len]);
            at += len + gap;
        }
        start += len;
    }
    (pool, places, expected)
}

/// Movements of many blocks in flight at once, in both directions.
#[test]
fn many_threads_get_the_right_bytes() {
    let Some(_gpu) = device() else { return };
    let directory = directory();
    let cache = open(config(&directory, 64 << 10, 16, 64));
    (0..64).for_each(|n| block_on(common::store(&cache, n)));
    let seed = common::seed();
    let threads: Vec<_> = (0..8_u64)
        .map(|thread| {
            let cache = cache.clone();
            std::thread::spawn(move || {
                let mut rng = common::Rng(seed ^ (thread << 32));
                for _ in 0..200 {
                    let n = rng.below(64);
                    let lease = block_on(cache.fetch_to_device(&key(n))).expect("fetch").expect("stored");
                    let bytes = block_on(cache.read_device(&lease, Vec::new())).expect("read");
                    assert_same(&bytes, &payload(n, 64 << 10), &format!("block {n}"));
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().expect("no wrong byte"));
    kvhoist::internals::validate(&cache).expect("valid");
    block_on(cache.close()).expect("close");
}
