//! Loads that complete layer by layer: what is said of a layer holds when it is said.

use crate::common;

use common::{
    BLOCK_BYTES, config, directory, key,
    layers::{LAYERS, Pool, load, with_device},
    store,
};
use kvhoist::{Cache, Config, Error, Segment, StorageKind, block_on};

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
                    let (leading, error) = load.layer(layer).await.expect("a layer");
                    assert!(leading == wanted.len() && error.is_none(), "{leading}, {error:?}");
                    wanted.iter().enumerate().for_each(|(place, &n)| pool.assert_layer(place, n, layer));
                }
                assert!(load.blocks().await.into_iter().all(|result| result.expect("loaded")));
            }
            cache.unregister(&region).await.expect("its own region");
            kvhoist::internals::validate(&cache).expect("valid");
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
            let (leading, error) = load.layer(layer).await.expect("a layer");
            assert!(leading == 3 && error.is_none(), "{leading}, {error:?}");
            (0..3).for_each(|n| pool.assert_layer(n as usize, n, layer));
        }
        let blocks: Vec<bool> = load.blocks().await.into_iter().map(|result| result.expect("no error")).collect();
        assert_eq!(blocks, [true, true, true, false, true, true], "those behind it are there too");
        let nothing = cache.load_layers(&[], &[], &[0]).await.expect("nothing to load");
        assert_eq!((nothing.layer(0).await.expect("a layer").0, nothing.blocks().await.len()), (0, 0));
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
