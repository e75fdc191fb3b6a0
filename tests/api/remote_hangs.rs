//! A store beyond the node that hangs, or is slow, leaves the memory of the node to its callers, and its requests to
//! those who wait.

use std::{future::poll_fn, pin::pin, task::Poll, time::Duration};

use crate::common::{
    key, payload,
    remote_store::{MemoryStore, Trouble},
};
use crate::remote::{BLOCK_BYTES, BLOCKS, eventually, keys, open, reader, settings, write_chain};

use kvhoist::{Cache, Config, Error, RemotePolicy, Tier, remote::RemoteError};

/// Holds so many blocks of host memory at once.
async fn assert_room(cache: &Cache, blocks: u64) {
    let mut held = Vec::new();
    for n in 100..100 + blocks {
        cache.store(&key(n), None, &payload(n, BLOCK_BYTES)).await.expect("stored");
        held.push(cache.fetch(&key(n)).await.expect("no error").expect("resident"));
    }
}

/// Settings of a cache that has these slots, and more that others have the memory of.
fn parking(config: Config, slots: u32, parked: u32) -> Config {
    let mut config = config.host_blocks(slots + parked);
    config.host.parks = true;
    config
}

#[tokio::test]
async fn reads_that_hang_hold_a_quarter_of_the_host_memory_that_there_is_now() {
    for others in [0, 48] {
        let store = MemoryStore::new(8 * BLOCK_BYTES as u64);
        write_chain(&store).await;
        let late = |config: Config| config.deadline_ms(2000).remote_deadline_ms(600_000).remote_interval_s(3600);
        let cache = reader(&store, |config| parking(late(config), 16, others)).await;
        let mut parked = cache.parked();
        assert_eq!(parked.park(others as usize), others as usize);
        store.set(Trouble::Hangs);
        let asked = store.reads();
        let fetch = tokio::spawn({
            let cache = cache.clone();
            async move { cache.fetch_many(&keys()[..16]).await.len() }
        });
        eventually("asked", async || store.reads() > asked).await;
        assert_room(&cache, 12).await;
        fetch.abort();
        cache.close().await.expect("closed");
    }
}

#[tokio::test]
async fn a_prefetch_that_fails_and_finds_no_memory_to_be_repeated_is_a_failure() {
    let store = MemoryStore::new(8 * BLOCK_BYTES as u64);
    write_chain(&store).await;
    let late = |config: Config| config.host_blocks(4).remote_interval_s(3600).remote_deadline_ms(600_000);
    let cache = reader(&store, late).await;
    store.hold(&key(0));
    let asked = store.reads();
    assert_eq!(cache.prefetch(&[key(0)]).expect("begun"), 1);
    eventually("asked", async || store.reads() > asked).await;
    store.set(Trouble::Fails(RemoteError::Throttled("503".into())));
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(cache.reserve().await.expect("a slot"));
    }
    // It waits, and gets the slot that the read gives back.
    let mut last = pin!(cache.reserve());
    assert!(poll_fn(|context| Poll::Ready(last.as_mut().poll(context).is_pending())).await);
    store.release(&key(0));
    held.push(last.await.expect("a slot"));
    eventually("told", async || cache.stats().remote_errors > 0).await;
    drop(held);
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn a_block_that_a_caller_waits_for_finds_slots_beside_a_prefetch() {
    let store = MemoryStore::new(8 * BLOCK_BYTES as u64);
    write_chain(&store).await;
    let cache = reader(&store, |config| config.remote_interval_s(3600).remote_deadline_ms(600_000)).await;
    let asked = store.reads();
    // As many blocks as reads of the store have slots, in fewer requests than it has at a time.
    [0, 8].into_iter().for_each(|n| store.hold(&key(n)));
    assert_eq!(cache.prefetch(&keys()[..16]).expect("begun"), 16);
    eventually("asked", async || store.reads() > asked).await;
    let block = cache.fetch(&key(19)).await.expect("no error").expect("it does not wait");
    assert_eq!(block[..], payload(19, BLOCK_BYTES));
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn writes_that_hang_pin_an_eighth_of_the_host_memory_that_there_is_now() {
    for others in [0, 64] {
        let store = MemoryStore::new(4 * BLOCK_BYTES as u64);
        store.set(Trouble::Hangs);
        // Written once all are stored, however slowly: an object less at a time would not take an eighth.
        let late = settings(&store).remote_policy(RemotePolicy::Reused).remote_deadline_ms(600_000).deadline_ms(2000);
        let cache = open(parking(late, 64, others)).await;
        let mut parked = cache.parked();
        assert_eq!(parked.park(others as usize), others as usize);
        for n in 0..BLOCKS {
            cache.store(&key(n), n.checked_sub(1).map(key).as_ref(), &payload(n, BLOCK_BYTES)).await.expect("stored");
        }
        cache.keep(&keys(), Duration::from_secs(60));
        eventually("written", async || store.writes() == 4).await;
        assert_room(&cache, 56).await;
        cache.close().await.expect("closed");
    }
}

#[tokio::test]
async fn a_store_that_answers_in_time_brings_all_of_a_call_that_takes_longer() {
    let store = MemoryStore::new(BLOCK_BYTES as u64);
    write_chain(&store).await;
    let cache = reader(&store, |config| config.remote_interval_s(3600).remote_deadline_ms(4_000)).await;
    // Four at a time: five times a second for all, of the 4 s that a request may take.
    store.set(Trouble::Slow(Duration::from_secs(1)));
    for (n, block) in cache.fetch_many(&keys()).await.into_iter().enumerate() {
        let block = block.expect("no error").expect("brought");
        assert_eq!(block[..], payload(n as u64, BLOCK_BYTES));
    }
    let stats = cache.stats();
    assert_eq!((stats.remote_errors, stats.remote_missed, stats.misses), (0, 0, 0), "{stats:?}");
    cache.close().await.expect("closed");
}

/// Prefetched, it is no later than a block that was not.
#[tokio::test]
async fn a_block_of_a_prefetch_does_not_wait_for_the_others_once_a_caller_waits_for_it() {
    let store = MemoryStore::new(BLOCK_BYTES as u64);
    write_chain(&store).await;
    let late = |config: Config| config.remote_interval_s(3600).remote_deadline_ms(600_000).deadline_ms(4_000);
    let cache = reader(&store, late).await;
    let before = store.reads();
    let wanted = 9;
    (0..16).filter(|n| *n != wanted).for_each(|n| store.hold(&key(n)));
    assert_eq!(cache.prefetch(&keys()[..16]).expect("begun"), 16);
    eventually("asked", async || store.reads() == before + 2).await;
    let block = cache.fetch(&key(wanted)).await.expect("no error").expect("brought before all of these");
    assert_eq!(block[..], payload(wanted, BLOCK_BYTES));
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn a_prefetch_leaves_the_room_of_movements_to_callers() {
    let store = MemoryStore::new(BLOCK_BYTES as u64);
    write_chain(&store).await;
    let few = |config: Config| config.movements_max(8).background_max(8);
    let cache = reader(&store, |config| few(config).remote_interval_s(3600).remote_deadline_ms(600_000)).await;
    (0..8).for_each(|n| store.hold(&key(n)));
    assert_eq!(cache.prefetch(&keys()[..8]).expect("begun"), 8);
    assert_eq!(cache.prefetch(&keys()[8..9]).expect("begun"), 0, "as many as there may be");
    let block = cache.fetch(&key(19)).await.expect("no error").expect("offered, and the store has it");
    assert_eq!(block[..], payload(19, BLOCK_BYTES));
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn prefetches_that_wait_for_one_another_say_nothing_of_the_store() {
    let store = MemoryStore::new(BLOCK_BYTES as u64);
    write_chain(&store).await;
    let cache = reader(&store, |config| config.recompute_us(200_000).remote_interval_s(3600)).await;
    store.set(Trouble::Slow(Duration::from_millis(50)));
    // Two at a time: the last ones come after half a second.
    for n in 0..19 {
        assert_eq!(cache.prefetch(&[key(n)]).expect("begun"), 1);
    }
    eventually("prefetched", async || cache.match_prefix(&keys()[..19]) == [Tier::Host; 19]).await;
    let block = cache.fetch(&key(19)).await.expect("no error").expect("50 ms are less than 200 ms");
    assert_eq!(block[..], payload(19, BLOCK_BYTES));
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn a_block_that_a_caller_waits_for_does_not_wait_for_a_whole_prefetch() {
    let store = MemoryStore::new(BLOCK_BYTES as u64);
    write_chain(&store).await;
    let late = |config: Config| config.remote_interval_s(3600).remote_deadline_ms(600_000);
    let cache = reader(&store, late).await;
    let before = store.reads();
    (0..16).for_each(|n| store.hold(&key(n)));
    assert_eq!(cache.prefetch(&keys()[..16]).expect("begun"), 16);
    eventually("asked", async || store.reads() > before).await;
    let block = cache.fetch(&key(19)).await.expect("no error").expect("brought before all of these");
    assert_eq!(block[..], payload(19, BLOCK_BYTES));
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn the_end_of_a_prefetch_does_not_end_the_wait_for_a_block_that_is_brought_again() {
    let store = MemoryStore::new(8 * BLOCK_BYTES as u64);
    write_chain(&store).await;
    let cache = reader(&store, |config| config.remote_interval_s(3600).remote_deadline_ms(600_000)).await;
    // The read of the second object of the prefetch takes longer.
    store.hold(&key(8));
    let asked = store.reads();
    assert_eq!(cache.prefetch(&[key(0), key(8)]).expect("begun"), 2);
    eventually("the first came", async || cache.match_prefix(&[key(0)]) == [Tier::Host]).await;
    eventually("the second is asked for", async || store.reads() == asked + 2).await;
    for n in 100..164 {
        cache.store(&key(n), None, &payload(n, BLOCK_BYTES)).await.expect("stored");
    }
    assert_eq!(cache.match_prefix(&[key(0)]), [Tier::Remote], "it was evicted");
    store.hold(&key(0));
    let fetch = tokio::spawn({
        let cache = cache.clone();
        async move { cache.fetch(&key(0)).await }
    });
    eventually("asked again", async || store.reads() == asked + 3).await;
    store.release(&key(8));
    eventually("the prefetch ended", async || cache.match_prefix(&[key(8)]) == [Tier::Host]).await;
    store.release(&key(0));
    let block = fetch.await.expect("ended").expect("no error").expect("brought");
    assert_eq!(block[..], payload(0, BLOCK_BYTES));
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn a_wait_for_host_memory_is_no_failure_of_the_store() {
    let store = MemoryStore::new(8 * BLOCK_BYTES as u64);
    write_chain(&store).await;
    let cache = reader(&store, |config| config.host_blocks(4).remote_interval_s(3600).remote_deadline_ms(3_000)).await;
    let mut held = Vec::new();
    for n in 100..104 {
        cache.store(&key(n), None, &payload(n, BLOCK_BYTES)).await.expect("stored");
        held.push(cache.fetch(&key(n)).await.expect("no error").expect("resident"));
    }
    let fetch = tokio::spawn({
        let cache = cache.clone();
        async move { cache.fetch(&key(0)).await }
    });
    // Longer than a request may take.
    tokio::time::sleep(Duration::from_millis(3_500)).await;
    held.pop();
    let block = fetch.await.expect("ended").expect("no error").expect("brought");
    assert_eq!(block[..], payload(0, BLOCK_BYTES));
    assert_eq!(cache.stats().remote_errors, 0);
    drop(held);
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn who_waits_for_the_remote_tier_past_the_deadline_has_a_miss() {
    let store = MemoryStore::new(8 * BLOCK_BYTES as u64);
    write_chain(&store).await;
    let late = |config: Config| config.remote_interval_s(3600).remote_deadline_ms(600_000);
    let cache = reader(&store, |config| late(config).deadline_ms(200)).await;
    store.hold(&key(0));
    let fetch = tokio::time::timeout(Duration::from_secs(60), async { cache.fetch(&key(0)).await });
    assert!(fetch.await.expect("in time").expect("no error").is_none());
    cache.close().await.expect("closed");
}

#[tokio::test]
async fn waiters_that_left_make_room_and_one_too_many_is_told_so() {
    let store = MemoryStore::new(8 * BLOCK_BYTES as u64);
    write_chain(&store).await;
    let late = |config: Config| config.remote_interval_s(3600).remote_deadline_ms(600_000);
    let cache = reader(&store, |config| late(config).waiters_max(2)).await;
    store.hold(&key(0));
    let fetch = async || cache.fetch(&key(0)).await;
    for _ in 0..5 {
        tokio::time::timeout(Duration::from_millis(20), fetch()).await.expect_err("it waits");
    }
    let third = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(matches!(fetch().await, Err(Error::Busy { setting: "waiters_max", .. })));
        store.release(&key(0));
    };
    let (first, second, ()) = tokio::join!(fetch(), fetch(), third);
    for block in [first, second] {
        assert_eq!(block.expect("no error").expect("brought")[..], payload(0, BLOCK_BYTES));
    }
    cache.close().await.expect("closed");
}
