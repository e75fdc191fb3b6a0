//! What was removed here is not offered here again, whatever becomes of its object.

use std::{sync::Arc, time::Duration};

use crate::common::{
    directory, key, payload,
    remote_store::{MemoryStore, Trouble},
};
use crate::remote::{BLOCK_BYTES, BLOCKS, eventually, evicting, keys, open, reader, settings, write_chain};

use kvhoist::{Cache, RemotePolicy, Route, Tier, remote::RemoteError};

/// Waits until the store was listed twice from now on.
async fn listed_twice(store: &MemoryStore) {
    let before = store.pages();
    eventually("listed", async || store.pages() >= before + 2 * BLOCKS as usize / 8 + 2).await;
}

/// Has blocks 0 and 1 written in one object, which waits until block 0 is released.
async fn begin_writing_two(store: &Arc<MemoryStore>) -> Cache {
    // Blocks that are kept are written together.
    let config = settings(store).remote_policy(RemotePolicy::Reused).remote_deadline_ms(600_000);
    let cache = open(config).await;
    store.hold(&key(0));
    cache.store(&key(0), None, &payload(0, BLOCK_BYTES)).await.expect("stored");
    cache.store(&key(1), Some(&key(0)), &payload(1, BLOCK_BYTES)).await.expect("stored");
    cache.keep(&[key(0), key(1)], Duration::from_secs(60));
    eventually("begun", async || store.writes() == 1).await;
    cache
}

async fn remove(cache: &Cache, n: u64) {
    cache.remove(&key(n)).await.expect("removed");
    assert!(!cache.contains(&key(n)));
}

#[tokio::test]
async fn a_block_that_was_removed_while_it_was_written_is_not_offered() {
    let store = MemoryStore::new(8 * BLOCK_BYTES as u64);
    let cache = begin_writing_two(&store).await;
    remove(&cache, 0).await;
    store.release(&key(0));
    eventually("known", async || cache.stats().remote_writes == 1).await;
    assert_eq!(store.objects().len(), 1, "it stays for other nodes");
    assert!(!cache.contains(&key(0)), "what it is stored with next may be something else");
    assert_eq!(cache.stats().tier(Tier::Remote).resident, 1, "the other block is offered");
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn a_removed_block_stays_so_after_its_object_was_found_damaged() {
    let store = MemoryStore::new(8 * BLOCK_BYTES as u64);
    write_chain(&store).await;
    let cache = reader(&store, |config| config).await;
    remove(&cache, 2).await;
    store.set(Trouble::CutsOff);
    assert!(cache.fetch(&key(3)).await.expect("no error").is_none());
    store.set(Trouble::None);
    listed_twice(&store).await;
    assert!(!cache.contains(&key(2)) && cache.contains(&key(3)), "a listing that finds it sound brings back the other");
    assert!(cache.contains(&key(9)), "of another object");
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn a_removed_block_stays_so_where_the_store_refuses_to_delete() {
    let store = MemoryStore::new(8 * BLOCK_BYTES as u64);
    write_chain(&store).await;
    store.refuse_deletions();
    let cache = open(settings(&store).remote_bytes(10 * BLOCK_BYTES as u64)).await;
    eventually("refused", async || cache.stats().remote_errors > 0).await;
    assert_eq!(cache.match_len(&keys()), BLOCKS as usize, "what is not deleted is offered");
    for n in 0..8 {
        remove(&cache, n).await;
    }
    let before = cache.stats().remote_errors;
    eventually("refused again", async || cache.stats().remote_errors > before + 1).await;
    assert!((0..8).all(|n| !cache.contains(&key(n))), "a listing does not bring them back");
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn a_removed_block_stays_so_after_a_read_of_its_object_found_none() {
    let store = MemoryStore::new(8 * BLOCK_BYTES as u64);
    write_chain(&store).await;
    let cache = reader(&store, |config| config).await;
    remove(&cache, 2).await;
    store.set(Trouble::Fails(RemoteError::NotFound));
    assert!(cache.fetch(&key(3)).await.expect("no error").is_none());
    assert_eq!(cache.stats().remote_stale, 1);
    store.set(Trouble::None);
    eventually("known again", async || cache.contains(&key(3))).await;
    assert!(!cache.contains(&key(2)), "a listing does not bring it back");
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn removed_blocks_stay_so_after_a_listing_without_their_objects_until_they_are_written_anew() {
    let store = MemoryStore::new(8 * BLOCK_BYTES as u64);
    write_chain(&store).await;
    let cache = reader(&store, |config| config).await;
    let resident = || cache.stats().tier(Tier::Remote).resident;
    let objects = store.objects();
    let away_for_a_listing = async |left: u64| {
        store.delete_all();
        // The second of these pages is all of a listing.
        let before = store.pages();
        eventually("forgotten", async || resident() == 0 && store.pages() >= before + 2).await;
        objects.iter().for_each(|(name, bytes)| store.put(name.clone(), bytes.clone()));
        listed_twice(&store).await;
        assert_eq!(resident(), left);
    };
    remove(&cache, 2).await;
    away_for_a_listing(BLOCKS - 1).await;
    cache.store(&key(2), None, &payload(2, BLOCK_BYTES)).await.expect("stored");
    eventually("offered again", async || resident() == BLOCKS).await;
    cache.clear().await.expect("cleared");
    away_for_a_listing(0).await;
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn a_block_that_was_removed_while_an_answer_was_lost_is_not_offered() {
    let store = MemoryStore::new(8 * BLOCK_BYTES as u64);
    store.set(Trouble::LosesAnAnswer);
    let cache = begin_writing_two(&store).await;
    remove(&cache, 0).await;
    store.release(&key(0));
    eventually("known", async || cache.stats().tier(Tier::Remote).resident > 0).await;
    assert!(!cache.contains(&key(0)), "what it is stored with next may be something else");
    assert_eq!(cache.stats().tier(Tier::Remote).resident, 1, "the other block is offered");
    cache.close().await.expect("closed");
}

/// A cache that wrote a block to the store, where it is the only one of its object, and has removed it since.
async fn removed_one(store: &Arc<MemoryStore>) -> Cache {
    let cache = open(settings(store).remote_interval_s(3600)).await;
    cache.store(&key(0), None, &payload(0, BLOCK_BYTES)).await.expect("stored");
    eventually("written", async || cache.stats().tier(Tier::Remote).resident == 1).await;
    remove(&cache, 0).await;
    assert_eq!(cache.stats().tier(Tier::Remote).resident, 0);
    cache
}

#[tokio::test]
async fn a_removed_block_whose_object_is_still_there_is_offered_once_it_is_stored_with_the_same_bytes() {
    for removes_all in [false, true] {
        let store = MemoryStore::new(BLOCK_BYTES as u64);
        let cache = removed_one(&store).await;
        cache.store(&key(0), None, &payload(1, BLOCK_BYTES)).await.expect("stored");
        eventually("noticed", async || cache.stats().remote_unsent == 1).await;
        assert_eq!(cache.stats().tier(Tier::Remote).resident, 0, "the store has other bytes");
        match removes_all {
            true => _ = cache.clear().await.expect("cleared"),
            false => _ = cache.remove(&key(0)).await.expect("removed"),
        }
        cache.store(&key(0), None, &payload(0, BLOCK_BYTES)).await.expect("stored");
        eventually("offered", async || cache.stats().tier(Tier::Remote).resident == 1).await;
        assert_eq!((store.writes(), cache.stats().remote_unsent), (1, 1), "nothing was sent for it");
        cache.close().await.expect("closed");
    }
}

#[tokio::test]
async fn a_removed_block_is_offered_after_it_was_written_anew_and_the_answer_lost() {
    let store = MemoryStore::new(8 * BLOCK_BYTES as u64);
    write_chain(&store).await;
    let cache = reader(&store, |config| config).await;
    remove(&cache, 2).await;
    store.set(Trouble::LosesAnAnswer);
    cache.store(&key(2), None, &payload(2, BLOCK_BYTES)).await.expect("stored");
    store.wait(|store| store.objects().len() == 4).await;
    eventually("offered", async || cache.stats().tier(Tier::Remote).resident == BLOCKS).await;
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn blocks_whose_objects_are_there_and_are_not_offered_are_tried_once_before_they_are_evicted() {
    let store = MemoryStore::new(BLOCK_BYTES as u64);
    let directory = directory();
    let cache = open(evicting(&store, &directory).remote_interval_s(3600)).await;
    let store_all = async |first: u64, payloads: u64| {
        for n in 0..32 {
            cache.store(&key(first + n), None, &payload(payloads + n, BLOCK_BYTES)).await.expect("stored");
        }
    };
    let unsent = || cache.stats().remote_unsent;
    // Nothing is read or sent any more: of how many blocks it was depends on when the task looked.
    let settled = async || {
        let figures = || (store.writes(), cache.stats().route_blocks(Route::DiskToHost), unsent());
        eventually("none of them is tried again", async || {
            let before = figures();
            // Longer than between two looks for blocks that are evicted next.
            tokio::time::sleep(Duration::from_millis(2500)).await;
            figures() == before
        })
        .await;
    };
    // Of the blocks that are evicted next each is an object.
    store_all(0, 0).await;
    eventually("written", async || cache.stats().tier(Tier::Remote).resident > 0).await;
    settled().await;
    cache.clear().await.expect("cleared");
    store_all(0, 100).await;
    eventually("tried", async || unsent() > 0).await;
    settled().await;
    let (writes, objects) = (store.writes(), store.objects());
    assert_eq!(writes, objects.len(), "no byte was sent in vain");
    // What is no object, under the names of all others.
    cache.clear().await.expect("cleared");
    let prefix = objects[0].0.rsplit_once('/').expect("a prefix").0;
    (64..96).for_each(|n| store.put(format!("{prefix}/{}", key(n)), "noise".into()));
    let tried = unsent();
    store_all(64, 200).await;
    eventually("tried", async || unsent() > tried).await;
    settled().await;
    eventually("each of them once", async || {
        let (stats, tried) = (cache.stats(), unsent() - tried);
        ((store.writes() - writes) as u64, stats.remote_invalid, stats.remote_errors) == (tried, tried, 0)
    })
    .await;
    assert_eq!(cache.stats().tier(Tier::Remote).resident, 0);
    cache.close().await.expect("closed");
}
