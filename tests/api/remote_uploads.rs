//! What is written to the remote store gets there, however often that failed, and nothing is sent for ever.

use std::sync::Arc;

use crate::common::{config, directory, key, payload, remote_store::MemoryStore};
use crate::remote::{BLOCK_BYTES, assert_serves, eventually, evicting, open, settings, write_chain};

use kvhoist::{Cache, Config, RemotePolicy, StorageKind, Tier, remote::RemoteError};

async fn store_one(cache: &Cache, n: u64) {
    cache.store(&key(n), None, &payload(n, BLOCK_BYTES)).await.expect("stored");
}

/// A request that uses a block.
async fn use_one(cache: &Cache, n: u64) {
    cache.match_len(&[key(n)]);
    assert_serves(cache, n).await;
}

fn written(cache: &Cache) -> u64 {
    cache.stats().tier(Tier::Remote).resident
}

fn unavailable() -> Option<RemoteError> {
    Some(RemoteError::Unavailable("on purpose".into()))
}

/// Waits until the store was listed so often from now on.
async fn listed(store: &MemoryStore, times: usize) {
    let (before, pages) = (store.pages(), store.objects().len() / 3 + 1);
    store.wait(|store| store.pages() > before + times * pages).await;
}

#[tokio::test]
async fn a_block_whose_write_failed_is_written_at_a_later_use() {
    for policy in [RemotePolicy::Reused, RemotePolicy::Stored] {
        let store = MemoryStore::new(BLOCK_BYTES as u64);
        store.fail_creations(unavailable());
        let cache = open(settings(&store).remote_policy(policy)).await;
        store_one(&cache, 0).await;
        use_one(&cache, 0).await;
        eventually("failed", async || cache.stats().remote_unsent > 0).await;
        assert_eq!(store.objects().len(), 0);
        store.fail_creations(None);
        use_one(&cache, 0).await;
        eventually("written", async || written(&cache) == 1).await;
        cache.close().await.expect("closed");
    }
}

#[tokio::test]
async fn a_block_whose_object_is_gone_is_written_at_a_later_use() {
    for policy in [RemotePolicy::Reused, RemotePolicy::Stored] {
        let store = MemoryStore::new(BLOCK_BYTES as u64);
        let cache = open(settings(&store).remote_policy(policy)).await;
        store_one(&cache, 0).await;
        for _ in 0..2 {
            use_one(&cache, 0).await;
        }
        eventually("written", async || written(&cache) == 1).await;
        store.delete_all();
        eventually("forgotten", async || written(&cache) == 0).await;
        use_one(&cache, 0).await;
        eventually("written again", async || written(&cache) == 1).await;
        cache.close().await.expect("closed");
    }
}

#[tokio::test]
async fn blocks_of_the_last_run_are_written_to_an_empty_store_as_they_are_used() {
    let directory = directory();
    let with_disk = |store: &Arc<MemoryStore>| -> Config {
        let mut config = config(&directory, StorageKind::Auto, 16, 32).block_bytes(BLOCK_BYTES);
        config.remote = settings(store).remote_policy(RemotePolicy::Reused).remote;
        config
    };
    let [first, second] = [(); 2].map(|()| MemoryStore::new(BLOCK_BYTES as u64));
    let cache = open(with_disk(&first)).await;
    store_one(&cache, 0).await;
    for _ in 0..2 {
        use_one(&cache, 0).await;
    }
    eventually("written", async || written(&cache) == 1).await;
    cache.close().await.expect("closed");
    let cache = open(with_disk(&second)).await;
    use_one(&cache, 0).await;
    eventually("written", async || written(&cache) == 1 && second.objects().len() == 1).await;
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn a_store_that_refuses_deletions_is_listed_and_gets_blocks_whose_write_failed() {
    let store = MemoryStore::new(BLOCK_BYTES as u64);
    write_chain(&store).await;
    store.refuse_deletions();
    store.fail_creations(unavailable());
    let cache = open(settings(&store).remote_bytes(1)).await;
    store_one(&cache, 100).await;
    eventually("failed", async || cache.stats().remote_unsent > 0).await;
    store.fail_creations(None);
    use_one(&cache, 100).await;
    eventually("written", async || store.has(&key(100))).await;
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn blocks_that_are_evicted_while_they_wait_to_be_written_are_counted() {
    let store = MemoryStore::new(BLOCK_BYTES as u64);
    let cache = open(settings(&store).host_blocks(4).remote_deadline_ms(600_000)).await;
    store.hold(&key(0));
    store_one(&cache, 0).await;
    eventually("the first is on its way", async || store.writes() == 1).await;
    for n in 1..9 {
        store_one(&cache, n).await;
    }
    store.release(&key(0));
    eventually("all are written or counted", async || written(&cache) + cache.stats().remote_unsent == 9).await;
    assert_eq!(written(&cache), 5, "the first, and those that are there");
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn a_store_that_refuses_blocks_is_left_alone_and_the_reason_is_told() {
    let (store, directory) = (MemoryStore::new(BLOCK_BYTES as u64), directory());
    store.fail_creations(Some(RemoteError::Refused("no permission".into())));
    let cache = open(evicting(&store, &directory)).await;
    for n in 0..32 {
        store_one(&cache, n).await;
    }
    eventually("told", async || cache.stats().remote_read_only.is_some()).await;
    assert_eq!(cache.stats().remote_read_only.as_deref(), Some("refused: no permission"));
    listed(&store, 3).await;
    assert!(store.writes() <= 4, "{} writes, expected those that were in flight", store.writes());
    assert!(cache.stats().remote_offers, "reads are another matter");
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn what_waits_for_a_store_that_is_away_is_written_once_it_is_back() {
    let store = MemoryStore::new(BLOCK_BYTES as u64);
    store.fail_creations(unavailable());
    let cache = open(settings(&store)).await;
    for n in 0..8 {
        store_one(&cache, n).await;
    }
    eventually("told", async || cache.stats().remote_read_only.is_some()).await;
    let reason = cache.stats().remote_read_only.expect("it stands down");
    assert!(reason.contains("requests in a row failed") && reason.contains("on purpose"), "{reason}");
    for n in 8..16 {
        store_one(&cache, n).await;
    }
    store.fail_creations(None);
    eventually("written", async || (8..16).all(|n| store.has(&key(n)))).await;
    assert_eq!(cache.stats().remote_read_only, None);
    for n in 0..8 {
        use_one(&cache, n).await;
    }
    eventually("all written", async || written(&cache) == 16).await;
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn blocks_of_damaged_objects_are_not_sent_again_until_the_objects_are_mended() {
    let store = MemoryStore::new(BLOCK_BYTES as u64);
    let cache = open(settings(&store)).await;
    for n in 0..8 {
        store_one(&cache, n).await;
    }
    eventually("written", async || written(&cache) == 8).await;
    cache.close().await.expect("closed");
    let objects = store.objects();
    for (name, bytes) in &objects {
        let mut damaged = bytes.to_vec();
        damaged[20] ^= 1;
        store.put(name.clone(), damaged.into());
    }
    let cache = open(settings(&store)).await;
    eventually("found", async || cache.stats().remote_invalid == 8).await;
    let before = store.writes();
    for _ in 0..3 {
        for n in 0..8 {
            store_one(&cache, n).await;
            use_one(&cache, n).await;
        }
        listed(&store, 1).await;
    }
    assert_eq!((store.writes() - before, cache.stats().remote_invalid, written(&cache)), (0, 8, 0));
    objects.into_iter().for_each(|(name, bytes)| store.put(name, bytes));
    eventually("offered", async || written(&cache) == 8).await;
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn a_store_that_lists_nothing_is_sent_each_block_once() {
    const BLOCKS: u64 = 4;
    for policy in [RemotePolicy::Reused, RemotePolicy::Stored] {
        let store = MemoryStore::new(BLOCK_BYTES as u64);
        store.refuse_listings(true);
        let mut before = 0;
        for is_there in [false, true] {
            let cache = open(settings(&store).remote_policy(policy)).await;
            eventually("listed", async || cache.stats().remote_errors > 0).await;
            for n in 0..BLOCKS {
                store_one(&cache, n).await;
                use_one(&cache, n).await;
            }
            eventually("sent", async || (store.writes() - before) as u64 >= BLOCKS).await;
            let settled = async || {
                let unsent = cache.stats().remote_unsent;
                if is_there { unsent >= BLOCKS } else { written(&cache) == BLOCKS }
            };
            eventually("settled", settled).await;
            for n in 0..BLOCKS {
                use_one(&cache, n).await;
            }
            // Listings begin as far apart as two looks at what was used.
            let listed = store.pages() + 2;
            eventually("listed", async || store.pages() >= listed).await;
            assert_eq!((store.writes() - before) as u64, BLOCKS, "{policy:?}, there before: {is_there}");
            before = store.writes();
            cache.close().await.expect("closed");
        }
        assert_eq!(store.objects().len() as u64, BLOCKS);
    }
}

#[tokio::test]
async fn nothing_is_sent_that_the_map_has_no_room_for() {
    const BLOCKS: u64 = 512;
    let store = MemoryStore::new(BLOCK_BYTES as u64);
    let config = settings(&store).host_blocks(BLOCKS as u32).remote_index_bytes(64 << 10).remote_interval_s(3600);
    let cache = open(config).await;
    for n in 0..BLOCKS {
        store_one(&cache, n).await;
    }
    let unlisted = || cache.stats().remote_unlisted;
    eventually("written, or not", async || store.writes() as u64 + unlisted() >= BLOCKS).await;
    // A write that was in flight when the map became full is both.
    let (sent, known) = (store.writes() as u64, written(&cache));
    assert!(sent <= known + 4 && known < BLOCKS / 2, "{sent} blocks were sent, of which {known} are known");
    let before = unlisted();
    for n in 0..BLOCKS {
        use_one(&cache, n).await;
    }
    eventually("noted", async || unlisted() > before).await;
    assert_eq!(store.writes() as u64, sent);
    cache.close().await.expect("closed");
}
