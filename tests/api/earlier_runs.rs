//! Stores of blocks that the disk has from an earlier run.

use common::{BLOCK_BYTES, config, damage, directory, fetch_verified, key, payload, store};
use kvhoist::{Cache, Memory, Route, Segment, StorageKind, block_on};

use crate::common;

/// The ways to store a block.
#[derive(Debug, Clone, Copy)]
enum Way {
    Store,
    Commit,
    StoreFrom,
}

async fn store_by(way: Way, cache: &Cache, n: u64) {
    let mut bytes = payload(n, BLOCK_BYTES);
    match way {
        Way::Store => cache.store(&key(n), None, &bytes).await.expect("stored"),
        Way::Commit => {
            let mut slot = cache.reserve().await.expect("a slot");
            slot.copy_from_slice(&bytes);
            slot.commit(&key(n), None).await.expect("stored");
        }
        Way::StoreFrom => {
            let segment = Segment { ptr: bytes.as_mut_ptr(), len: BLOCK_BYTES };
            // SAFETY: it outlives the region, and nothing writes to it.
            let region = cache.register(unsafe { Memory::host(segment.ptr, segment.len) }).await.expect("registered");
            let stored = cache.store_from(&[key(n)], None, &[vec![segment]]).await.expect("asked");
            assert!(stored.into_iter().all(|stored| stored.expect("stored")));
            cache.unregister(&region).await.expect("unregistered");
        }
    }
}

#[test]
fn a_store_that_returned_is_there_though_an_earlier_run_left_the_block_torn() {
    for storage in [StorageKind::Auto, StorageKind::Blocking] {
        for way in [Way::Store, Way::Commit, Way::StoreFrom] {
            let dir = directory();
            let opened = || async { Cache::open(config(&dir, storage, 4, 64)).await.expect("open") };
            block_on(async {
                let cache = opened().await;
                store(&cache, 1).await;
                store(&cache, 2).await;
                cache.close().await.expect("closed");
                // As the kill of a process leaves a block whose record it had written.
                damage(&dir, &payload(1, BLOCK_BYTES)[..64]);
                let cache = opened().await;
                let written =
                    cache.stats().route_blocks(Route::HostToDisk) + cache.stats().route_blocks(Route::RegionToDisk);
                store_by(way, &cache, 1).await;
                store_by(way, &cache, 2).await;
                let stats = cache.stats();
                let again = stats.route_blocks(Route::HostToDisk) + stats.route_blocks(Route::RegionToDisk) - written;
                assert_eq!((again, stats.stores_known), (1, 1), "{way:?}: what is whole is not written again");
                cache.close().await.expect("closed");
                let cache = opened().await;
                for n in [1, 2] {
                    assert!(fetch_verified(&cache, n).await, "{way:?}: block {n}");
                }
                cache.close().await.expect("closed");
            });
        }
    }
}
