//! Closes, and last handles that go, in every phase of every call; and what outlives the cache.

use std::{future::Future, pin::Pin, task::Context, task::Poll, task::Waker};

use bytes::Bytes;
use kvhoist::{Cache, Error, StorageKind, WritePolicy};

use super::{
    common::{BLOCK_BYTES, config, directory, fetch_verified, key, payload, store},
    points::{Point, at_every_point, bounded, drop_at},
    scene::{Pool, STORED, Scene, engines, reopen},
};

/// A call in flight, on a handle of its own.
type Call = Pin<Box<dyn Future<Output = Result<(), Error>>>>;

/// Polls of a call before the cache is closed around it.
const PHASES: u32 = 4;

/// Every kind of call, begun.
async fn calls(scene: &Scene, pool: &Pool) -> Vec<(&'static str, Call)> {
    let cache = || scene.cache.clone();
    let cold = [scene.cold().await, scene.cold().await, scene.cold().await];
    let fresh: [u64; 4] = std::array::from_fn(|_| scene.fresh());
    let place = pool.place(0);
    let from = pool.place(1);
    let (fetches, promotes, loads, removes, stores, gathers) = (cache(), cache(), cache(), cache(), cache(), cache());
    let (syncs, reserves) = (cache(), cache());
    let check = |bytes: &[u8], n| assert!(bytes == payload(n, BLOCK_BYTES), "wrong bytes for key {n}");
    vec![
        (
            "fetch",
            Box::pin(async move {
                check(&fetches.fetch(&key(cold[0])).await?.expect("stored"), cold[0]);
                Ok(())
            }),
        ),
        (
            "fetch_to_device",
            Box::pin(async move {
                let lease = promotes.fetch_to_device(&key(cold[1])).await?.expect("stored");
                check(&promotes.read_device(&lease, Vec::new()).await?, cold[1]);
                Ok(())
            }),
        ),
        (
            "load_into",
            Box::pin(async move {
                let results = loads.load_into(&[key(cold[2])], &[place]).await?;
                results.into_iter().try_for_each(|result| result.map(|found| assert!(found, "stored")))
            }),
        ),
        ("remove", Box::pin(async move { removes.remove(&key(fresh[3])).await.map(|found| assert!(!found)) })),
        ("store", Box::pin(async move { stores.store(&key(fresh[0]), None, &payload(fresh[0], BLOCK_BYTES)).await })),
        (
            "store_from",
            Box::pin(async move {
                let results = gathers.store_from(&[key(fresh[1])], None, &[from]).await?;
                results.into_iter().try_for_each(|result| result.map(|stored| assert!(stored)))
            }),
        ),
        ("sync", Box::pin(async move { syncs.sync().await })),
        (
            "reserve and commit",
            Box::pin(async move {
                let mut reserved = reserves.reserve_for_overwrite().await?;
                reserved.copy_from_slice(&payload(fresh[2], BLOCK_BYTES));
                reserved.commit(&key(fresh[2]), None).await
            }),
        ),
    ]
}

fn poll(call: &mut Call) -> Option<Result<(), Error>> {
    match call.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => Some(result),
        Poll::Pending => None,
    }
}

fn answered(what: &str, result: Result<(), Error>) {
    match result {
        Ok(()) | Err(Error::Closed) => {}
        Err(error) => panic!("{what}: {error}"),
    }
}

/// Every call at once, each polled so many times when the cache is closed: all are answered, rightly or with `Closed`.
async fn close_in_phase(engine: StorageKind, policy: WritePolicy, phase: u32) {
    let scene = Scene::new(engine, |settings| settings.disk.write_policy = policy).await;
    let pool = Pool::new(2);
    let _region = pool.register(&scene.cache);
    let mut under_way = Vec::new();
    for (what, mut call) in calls(&scene, &pool).await {
        let mut result = None;
        for _ in 0..phase {
            result = result.or_else(|| poll(&mut call));
            tokio::task::yield_now().await;
            if result.is_some() {
                break;
            }
        }
        match result {
            Some(result) => answered(what, result),
            None => under_way.push((what, call)),
        }
    }
    bounded("close", scene.cache.close()).await.expect("close");
    for (what, call) in under_way {
        answered(what, bounded(what, call).await);
    }
    assert!(matches!(scene.cache.fetch(&key(0)).await, Err(Error::Closed)));
    scene.end().await;
}

#[tokio::test]
async fn a_close_in_every_phase_of_every_call() {
    for engine in engines() {
        for policy in [WritePolicy::WriteThrough, WritePolicy::WriteBack] {
            for phase in 0..PHASES {
                close_in_phase(engine, policy, phase).await;
            }
        }
    }
}

/// The calls are dropped in that phase, and with them the last handles: the cache closes itself.
#[tokio::test]
async fn the_last_handle_goes_in_every_phase_of_every_call() {
    for engine in engines() {
        for phase in 0..PHASES {
            let scene = Scene::new(engine, |settings| settings.disk.write_policy = WritePolicy::WriteBack).await;
            let pool = Pool::new(2);
            drop(pool.register(&scene.cache));
            let mut calls = calls(&scene, &pool).await;
            for (what, call) in &mut calls {
                let results = (0..phase).find_map(|_| poll(call));
                answered(what, results.unwrap_or(Ok(())));
            }
            let Scene { cache, settings, dir, .. } = scene;
            // What was never polled again was never answered, and must hold nothing up.
            drop(cache);
            drop(calls);
            let cache = bounded("the background close", reopen(&settings)).await;
            for n in 0..STORED {
                assert!(fetch_verified(&cache, n).await, "key {n} was stored");
            }
            cache.close().await.expect("close");
            drop(dir);
        }
    }
}

/// A close that is dropped goes on; another one waits for the same end, and so does a second at the same time.
#[tokio::test]
async fn a_close_that_is_given_up_goes_on() {
    for engine in engines() {
        at_every_point("close", true, async |point| {
            let dir = directory();
            let settings = config(&dir, engine, 8, 32).write_policy(WritePolicy::WriteBack);
            let cache = Cache::open(settings.clone()).await.expect("open");
            for n in 0..4 {
                store(&cache, n).await;
            }
            let done = drop_at(point, cache.close()).await.transpose().expect("close").is_some();
            let (first, second) = tokio::join!(cache.close(), cache.close());
            first.and(second).expect("close");
            drop(cache);
            let cache = reopen(&settings).await;
            for n in 0..4 {
                assert!(fetch_verified(&cache, n).await, "the close wrote it");
            }
            cache.close().await.expect("close");
            done
        })
        .await;
    }
}

/// A caller that waits for a slot when the cache is closed gets an error, though no slot ever becomes free.
#[tokio::test]
async fn who_waits_for_a_slot_is_told_of_the_close() {
    for engine in engines() {
        let scene = Scene::new(engine, |_| {}).await;
        let mut held = Vec::new();
        for _ in 0..scene.settings.host_slots() {
            held.push(scene.cache.reserve_for_overwrite().await.expect("reserve"));
        }
        let waiting: Vec<_> = (0..3)
            .map(|n| {
                let cache = scene.cache.clone();
                tokio::spawn(async move {
                    match n {
                        0 => cache.reserve().await.map(drop),
                        1 => cache.store(&key(5000), None, &payload(5000, BLOCK_BYTES)).await,
                        _ => cache.fetch(&key(0)).await.map(drop),
                    }
                })
            })
            .collect();
        tokio::task::yield_now().await;
        bounded("close", scene.cache.close()).await.expect("close");
        for caller in waiting {
            let result = bounded("an answer", caller).await.expect("no panic");
            assert!(matches!(result, Err(Error::Closed)), "{result:?}");
        }
        for reserved in held {
            let late = reserved.commit(&key(6000), None).await;
            assert!(matches!(late, Err(Error::Closed)), "{late:?}");
        }
        scene.end().await;
    }
}

/// Leases, device leases and `Bytes` are good for as long as they live: after the close, after the last handle, after
/// the reactor, and while another cache serves the same store.
#[tokio::test]
async fn leases_outlive_the_cache() {
    for engine in engines() {
        for close in [false, true] {
            let Scene { cache, settings, dir, .. } = Scene::new(engine, |_| {}).await;
            let lease = cache.fetch(&key(0)).await.expect("fetch").expect("stored");
            let bytes: Bytes = cache.fetch(&key(1)).await.expect("fetch").expect("stored").into_bytes();
            let part = bytes.slice(1000..2000);
            let device = cache.fetch_to_device(&key(2)).await.expect("fetch").expect("stored");
            // One more is on its way, and its caller never comes back for it.
            drop_at(Point { polls: 1, woken: false }, cache.fetch(&key(3))).await;
            if close {
                cache.close().await.expect("close");
                let refused = cache.read_device(&device, Vec::new()).await;
                assert!(matches!(refused, Err(Error::Closed)), "{refused:?}");
            }
            drop(cache);
            let cache = bounded("the background close", reopen(&settings)).await;
            for n in 0..STORED {
                assert!(fetch_verified(&cache, n).await, "leases keep no block from the next cache");
            }
            assert!(lease[..] == payload(0, BLOCK_BYTES)[..]);
            drop(bytes);
            assert!(part[..] == payload(1, BLOCK_BYTES)[1000..2000]);
            let segments = device.segments();
            // SAFETY: the device is simulated in host memory, and the lease pins the slot.
            let on_device = unsafe { std::slice::from_raw_parts(segments[0].ptr, segments[0].len) };
            assert!(segments.len() == 1 && on_device == payload(2, BLOCK_BYTES));
            // The last of each unmaps the memory of a cache that is long gone, on whatever thread.
            let elsewhere = std::thread::spawn(move || drop((lease, device)));
            elsewhere.join().expect("dropped");
            assert!(part[..] == payload(1, BLOCK_BYTES)[1000..2000], "the last one still holds it");
            drop(part);
            cache.close().await.expect("close");
            drop(dir);
        }
    }
}

/// A reservation is a handle: the cache stays open for it, and it can be committed.
#[tokio::test]
async fn a_reservation_keeps_the_cache_open() {
    for engine in engines() {
        let Scene { cache, settings, dir, .. } = Scene::new(engine, |_| {}).await;
        let mut reserved = cache.reserve_for_overwrite().await.expect("reserve");
        drop(cache);
        reserved.copy_from_slice(&payload(77, BLOCK_BYTES));
        reserved.commit(&key(77), None).await.expect("commit");
        let cache = bounded("the background close", reopen(&settings)).await;
        assert!(fetch_verified(&cache, 77).await);
        cache.close().await.expect("close");
        drop(dir);
    }
}
