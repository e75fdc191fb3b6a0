//! Opens that are given up: the store is locked until the abandoned cache has closed it, and whole then.

use kvhoist::{Cache, WritePolicy};

use super::{
    common::{config, directory, fetch_verified, store},
    points::{at_every_point, bounded, drop_at},
    scene::{engines, reopen},
};

#[tokio::test]
async fn an_open_that_is_given_up_closes_the_store_again() {
    for engine in engines() {
        let dir = directory();
        let settings = config(&dir, engine, 4, 32);
        let cache = Cache::open(settings.clone()).await.expect("open");
        store(&cache, 1).await;
        cache.close().await.expect("close");
        at_every_point("open", true, async |point| {
            let opened = drop_at(point, Cache::open(settings.clone())).await.transpose().expect("open");
            let done = opened.is_some();
            drop(opened);
            let cache = reopen(&settings).await;
            assert!(fetch_verified(&cache, 1).await);
            cache.close().await.expect("close");
            done
        })
        .await;
    }
}

#[tokio::test]
async fn a_first_open_that_is_given_up_leaves_a_store_or_none() {
    for engine in engines() {
        at_every_point("open", false, async |point| {
            let dir = directory();
            let settings = config(&dir, engine, 4, 32);
            let done = drop_at(point, Cache::open(settings.clone())).await.transpose().expect("open").is_some();
            let cache = reopen(&settings).await;
            store(&cache, 1).await;
            cache.close().await.expect("close");
            done
        })
        .await;
    }
}

#[tokio::test]
async fn handles_dropped_without_close_leave_a_whole_store() {
    for engine in engines() {
        let dir = directory();
        let settings = config(&dir, engine, 32, 32).write_policy(WritePolicy::WriteBack);
        let cache = Cache::open(settings.clone()).await.expect("open");
        for n in 0..16 {
            store(&cache, n).await;
        }
        drop(cache);
        let cache = bounded("the background close", reopen(&settings)).await;
        for n in 0..16 {
            assert!(fetch_verified(&cache, n).await, "the background close writes what is dirty");
        }
        cache.close().await.expect("close");
    }
}
