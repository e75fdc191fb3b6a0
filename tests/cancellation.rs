//! A future may be dropped after any poll: nothing leaks, nothing hangs, nobody else is hurt.

mod common;

use std::{
    future::Future,
    pin::pin,
    task::{Context, Waker},
};

use common::{BLOCK_BYTES, config, directory, fetch_verified, key, payload, store};
use kvhoist::{Cache, Config, StorageKind, Tier, WritePolicy};

/// Polls `future` up to `polls` times, yielding between, then drops it. True if it finished.
async fn poll_some(future: impl Future, polls: usize) -> bool {
    let mut future = pin!(future);
    for _ in 0..polls {
        if future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready() {
            return true;
        }
        tokio::task::yield_now().await;
    }
    false
}

#[tokio::test]
async fn every_future_may_be_dropped_after_any_poll() {
    for policy in [WritePolicy::WriteThrough, WritePolicy::WriteBack] {
        let dir = directory();
        let settings = Config { write_policy: policy, device_blocks: 2, ..config(&dir, StorageKind::Auto, 3, 32) };
        let cache = Cache::open(settings).await.expect("open");
        for n in 0..16 {
            store(&cache, n).await;
        }
        for polls in 0..12 {
            for n in 0..16 {
                let data = payload(100 + n, BLOCK_BYTES);
                poll_some(cache.fetch(&key(n)), polls).await;
                poll_some(cache.fetch_to_device(&key((n + 5) % 16)), polls).await;
                poll_some(cache.store(&key(100 + n), None, &data), polls).await;
                poll_some(cache.reserve(), polls).await;
                poll_some(cache.remove(&key(100 + (n + 8) % 16)), polls).await;
                poll_some(cache.sync(), polls.min(2)).await;
            }
            // Whoever stays still gets an answer, and the right one.
            for n in 0..16 {
                fetch_verified(&cache, n).await;
                fetch_verified(&cache, 100 + n).await;
            }
            cache.validate().expect("valid");
        }
        cache.close().await.expect("close");
        let stats = cache.stats();
        for tier in Tier::ALL {
            let tier_stats = stats.tier(tier);
            assert_eq!(tier_stats.resident + tier_stats.free, tier_stats.slots, "{tier}: a slot leaked");
        }
        assert_eq!(stats.checksum_failures, 0);
    }
}

#[tokio::test]
async fn the_last_waiter_may_leave_a_read_to_finish_alone() {
    let dir = directory();
    let cache = Cache::open(config(&dir, StorageKind::Auto, 4, 32)).await.expect("open");
    for n in 0..8 {
        store(&cache, n).await;
    }
    assert!(!poll_some(cache.fetch(&key(0)), 1).await, "the first poll starts the read");
    // The next one joins it or finds its result, whole.
    assert!(fetch_verified(&cache, 0).await);
    cache.validate().expect("valid");
    cache.close().await.expect("close");
}

#[tokio::test]
async fn a_cancelled_open_closes_the_store_again() {
    let dir = directory();
    poll_some(Cache::open(config(&dir, StorageKind::Auto, 4, 32)), 1).await;
    // The store is locked until the abandoned cache has closed it: wait for that, not for a time.
    let cache = loop {
        match Cache::open(config(&dir, StorageKind::Auto, 4, 32)).await {
            Ok(cache) => break cache,
            Err(error) => assert!(error.to_string().contains("process"), "{error}"),
        }
        tokio::task::yield_now().await;
    };
    cache.close().await.expect("close");
}

#[tokio::test]
async fn handles_dropped_without_close_leave_a_whole_store() {
    let dir = directory();
    let settings = Config { write_policy: WritePolicy::WriteBack, ..config(&dir, StorageKind::Auto, 32, 32) };
    let cache = Cache::open(settings.clone()).await.expect("open");
    for n in 0..16 {
        store(&cache, n).await;
    }
    drop(cache);
    let cache = loop {
        match Cache::open(settings.clone()).await {
            Ok(cache) => break cache,
            Err(error) => assert!(error.to_string().contains("process"), "{error}"),
        }
        tokio::task::yield_now().await;
    };
    for n in 0..16 {
        assert!(fetch_verified(&cache, n).await, "the background close writes what is dirty");
    }
    cache.close().await.expect("close");
}
