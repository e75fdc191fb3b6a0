//! Calls about many blocks: what is there, all keys, many fetches, and an end to all of it.

use crate::common;

use std::collections::BTreeSet;

use common::{BLOCK_BYTES, config, directory, fetch_verified, key, payload, store, store_file};
use kvhoist::{BlockKey, Cache, Config, Error, StorageKind, block_on};

fn keys(cache: &Cache) -> BTreeSet<BlockKey> {
    let (all, set): (Vec<_>, BTreeSet<_>) = (cache.keys().collect(), cache.keys().collect());
    assert_eq!(all.len(), set.len(), "every key once");
    assert_eq!((all.len(), all.is_empty()), (cache.len(), cache.is_empty()));
    set
}

#[test]
fn every_resident_block_is_listed_whatever_tier_holds_it() {
    let directory = directory();
    block_on(async {
        let cache = Cache::open(config(&directory, StorageKind::Auto, 8, 64)).await.expect("open");
        assert_eq!(keys(&cache), BTreeSet::new());
        for n in 0..40 {
            store(&cache, n).await;
        }
        assert_eq!(keys(&cache), (0..40).map(key).collect(), "8 in host memory and on disk, 32 on disk only");
        assert!(cache.remove(&key(7)).await.expect("removed"));
        assert!(!cache.contains(&key(7)) && cache.contains(&key(8)));
        assert_eq!(cache.len(), 39);
        let before = cache.keys();
        cache.close().await.expect("closed");
        assert_eq!((before.count(), cache.keys().count(), cache.len()), (0, 0, 0), "a closed cache has nothing");
        assert!(!cache.contains(&key(8)));

        let again = Cache::open(config(&directory, StorageKind::Auto, 8, 64)).await.expect("open");
        assert_eq!(keys(&again).len(), 39, "recovered blocks are listed too");
        again.close().await.expect("closed");
    });
}

#[test]
fn keys_outlive_the_cache_and_keep_nothing_open() {
    let directory = directory();
    block_on(async {
        let cache = Cache::open(config(&directory, StorageKind::Auto, 8, 64)).await.expect("open");
        store(&cache, 1).await;
        let mut keys = cache.keys();
        drop(cache);
        // It gets the store when the first cache has closed it.
        let mut settings = config(&directory, StorageKind::Auto, 8, 64);
        settings.disk.lock_wait = std::time::Duration::from_secs(60);
        let again = Cache::open(settings).await.expect("open");
        assert_eq!(keys.next(), None);
        again.close().await.expect("closed");
    });
}

#[test]
fn what_was_cleared_is_gone_and_stays_so() {
    let directory = directory();
    block_on(async {
        let cache = Cache::open(config(&directory, StorageKind::Auto, 16, 600)).await.expect("open");
        for n in 0..500 {
            store(&cache, n).await;
        }
        let lease = cache.fetch(&key(3)).await.expect("fetch").expect("a hit");
        assert_eq!(cache.clear().await.expect("cleared"), 500);
        assert_eq!((cache.len(), cache.keys().count()), (0, 0));
        assert_eq!(*lease, payload(3, BLOCK_BYTES)[..], "a reader keeps its lease");
        drop(lease);
        assert_eq!(cache.clear().await.expect("cleared"), 0);
        for n in 0..500 {
            assert!(!fetch_verified(&cache, n).await);
        }
        store(&cache, 3).await;
        cache.close().await.expect("closed");
        assert!(matches!(cache.clear().await, Err(Error::Closed)));

        let again = Cache::open(config(&directory, StorageKind::Auto, 16, 600)).await.expect("open");
        assert_eq!(again.keys().collect::<Vec<_>>(), [key(3)], "no record names another block");
        assert!(fetch_verified(&again, 3).await);
        again.close().await.expect("closed");
    });
}

#[test]
fn many_fetches_answer_in_order_and_read_each_block_once() {
    let directory = directory();
    block_on(async {
        let cache = Cache::open(config(&directory, StorageKind::Auto, 32, 64)).await.expect("open");
        for n in 0..40 {
            store(&cache, n).await;
        }
        // Hits in host memory, reads from disk, a miss, and one block twice.
        let wanted = [39, 0, 1, 99, 2, 0, 38];
        let found = cache.fetch_many(&wanted.map(key)).await;
        assert_eq!(found.len(), wanted.len());
        for (n, block) in wanted.into_iter().zip(&found) {
            let block = block.as_ref().expect("no error").as_ref();
            assert_eq!(block.map(|lease| &lease[..]), (n != 99).then_some(&payload(n, BLOCK_BYTES)[..]), "block {n}");
        }
        let disk = *cache.stats().tier(kvhoist::Tier::Disk);
        assert_eq!(disk.bytes_out, 3 * BLOCK_BYTES as u64, "blocks 0, 1 and 2, each once");
        drop(found);
        assert!(cache.fetch_many(&[]).await.is_empty());
        cache.close().await.expect("closed");
        assert!(matches!(cache.fetch_many(&[key(0)]).await[..], [Err(Error::Closed)]));
    });
}

#[test]
fn more_blocks_than_host_memory_has_slots_are_refused_at_once() {
    let config = Config::default().block_bytes(4096).host_blocks(4);
    block_on(async {
        let cache = Cache::open(config).await.expect("open");
        let keys: Vec<_> = (0..5).map(key).collect();
        let refused = cache.fetch_many(&keys).await;
        assert_eq!(refused.len(), 5, "a result for each key");
        for result in refused {
            match result {
                Err(Error::Argument { what: "keys", found, expected }) => {
                    assert!(found.contains('5') && expected.contains('4'), "{found}, {expected}");
                }
                other => panic!("{other:?}"),
            }
        }
        assert!(cache.fetch_many(&keys[1..]).await.iter().all(|result| matches!(result, Ok(None))), "room");
        cache.close().await.expect("closed");
    });
}

#[test]
fn an_error_of_one_block_is_in_its_result() {
    let directory = directory();
    block_on(async {
        let cache = Cache::open(config(&directory, StorageKind::Auto, 16, 64)).await.expect("open");
        for n in 0..40 {
            store(&cache, n).await;
        }
        cache.sync().await.expect("synced");
        common::damage(&directory, &payload(5, BLOCK_BYTES));
        let found = cache.fetch_many(&[4, 5, 6].map(key)).await;
        let there: Vec<_> = found.iter().map(|block| block.as_ref().expect("no error").is_some()).collect();
        assert_eq!(there, [true, false, true], "a damaged block is a miss, and only that one");
        drop(found);
        cache.close().await.expect("closed");
        assert!(store_file(&directory).exists());
    });
}
