//! Every async call of the cache, dropped at every point: others who want the same are served, the same call made anew
//! completes, and nothing is left over.

use kvhoist::{StorageKind, WritePolicy};

use super::{
    common::{BLOCK_BYTES, fetch_verified, key, payload},
    points::{Point, at_every_point, drop_at},
    scene::{Pool, STORED, Scene, companions, engines},
};

/// Runs `test` over every engine, each in a scene of its own.
fn on_every_engine(change: fn(&mut kvhoist::Config), test: impl AsyncFn(&Scene)) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    for engine in engines() {
        runtime.block_on(async {
            let scene = Scene::new(engine, change).await;
            test(&scene).await;
            scene.end().await;
        });
    }
}

fn unchanged(_: &mut kvhoist::Config) {}

#[test]
fn fetch() {
    on_every_engine(unchanged, async |scene| {
        for company in [false, true] {
            at_every_point("fetch", true, async |point| {
                let n = scene.cold().await;
                let others = company.then(|| companions(&scene.cache, n));
                // Half of the company is there before, half of it comes after.
                tokio::task::yield_now().await;
                let found = drop_at(point, scene.cache.fetch(&key(n))).await;
                let done = found.is_some();
                if let Some(lease) = found {
                    assert!(lease.expect("fetch").expect("stored")[..] == payload(n, BLOCK_BYTES)[..]);
                }
                let late = company.then(|| companions(&scene.cache, n));
                for other in others.into_iter().chain(late).flatten() {
                    other.await.expect("served");
                }
                // Before anybody asks again, and so picks up what was left lying.
                scene.rest().await;
                assert!(fetch_verified(&scene.cache, n).await);
                scene.rest().await;
                done
            })
            .await;
        }
    });
}

#[test]
fn fetch_to_device() {
    on_every_engine(unchanged, async |scene| {
        for company in [false, true] {
            at_every_point("fetch_to_device", true, async |point| {
                let n = scene.cold().await;
                let others = company.then(|| companions(&scene.cache, n));
                tokio::task::yield_now().await;
                let found = drop_at(point, scene.cache.fetch_to_device(&key(n))).await;
                let done = found.is_some();
                drop(found.map(|lease| lease.expect("fetch").expect("stored")));
                for other in others.into_iter().flatten() {
                    other.await.expect("served");
                }
                scene.rest().await;
                let lease = scene.cache.fetch_to_device(&key(n)).await.expect("fetch").expect("stored");
                let bytes = scene.cache.read_device(&lease, Vec::new()).await.expect("read");
                assert!(bytes == payload(n, BLOCK_BYTES));
                drop(lease);
                scene.rest().await;
                done
            })
            .await;
        }
    });
}

#[test]
fn read_device() {
    on_every_engine(unchanged, async |scene| {
        at_every_point("read_device", true, async |point| {
            let n = scene.cold().await;
            let lease = scene.cache.fetch_to_device(&key(n)).await.expect("fetch").expect("stored");
            let read = drop_at(point, scene.cache.read_device(&lease, Vec::new())).await;
            let done = read.is_some();
            if let Some(bytes) = read {
                assert!(bytes.expect("read") == payload(n, BLOCK_BYTES));
            }
            drop(lease);
            scene.rest().await;
            done
        })
        .await;
    });
}

fn store_with(policy: fn(&mut kvhoist::Config), there_and_back: bool) {
    on_every_engine(policy, async |scene| {
        at_every_point("store", there_and_back, async |point| {
            let n = scene.fresh();
            let data = payload(n, BLOCK_BYTES);
            let done = drop_at(point, scene.cache.store(&key(n), None, &data)).await.is_some();
            if point.polls > 0 {
                // Visible after the copy, which the first poll makes; two more store it meanwhile.
                let again = [(); 2].map(|()| {
                    let (cache, data) = (scene.cache.clone(), data.clone());
                    tokio::spawn(async move { cache.store(&key(n), None, &data).await })
                });
                for store in again {
                    store.await.expect("no panic").expect("store");
                }
                assert!(fetch_verified(&scene.cache, n).await);
            } else {
                assert!(!fetch_verified(&scene.cache, n).await, "nothing was asked for");
            }
            scene.cache.remove(&key(n)).await.expect("remove");
            scene.rest().await;
            done
        })
        .await;
    });
}

#[test]
fn store() {
    store_with(unchanged, true);
}

#[test]
fn store_without_waiting_for_the_disk() {
    store_with(|settings| settings.disk.write_policy = WritePolicy::WriteBack, false);
    store_with(|settings| settings.disk.write_policy = WritePolicy::WriteThroughSelective, false);
}

#[test]
fn commit() {
    on_every_engine(unchanged, async |scene| {
        at_every_point("commit", true, async |point| {
            let n = scene.fresh();
            let mut reserved = scene.cache.reserve_for_overwrite().await.expect("reserve");
            reserved.copy_from_slice(&payload(n, BLOCK_BYTES));
            let done = drop_at(point, reserved.commit(&key(n), None)).await.is_some();
            assert_eq!(fetch_verified(&scene.cache, n).await, point.polls > 0);
            scene.cache.remove(&key(n)).await.expect("remove");
            scene.rest().await;
            done
        })
        .await;
    });
}

/// Callers that wait for a slot and leave, before one comes free and after: it goes to one who stays.
#[test]
fn reserve() {
    on_every_engine(unchanged, async |scene| {
        at_every_point("reserve", true, async |point| {
            let hot = hold_every_slot(scene).await;
            let mut hot = hot.into_iter();
            let leaves = tokio::spawn({
                let cache = scene.cache.clone();
                async move {
                    let zeros = drop_at(point, cache.reserve()).await.transpose().expect("reserve");
                    assert!(zeros.as_ref().is_none_or(|slot| slot.iter().all(|&byte| byte == 0)));
                    zeros.is_some()
                }
            });
            tokio::task::yield_now().await;
            let stays = tokio::spawn({
                let cache = scene.cache.clone();
                async move { drop(cache.reserve().await.expect("reserve")) }
            });
            tokio::task::yield_now().await;
            assert!(!stays.is_finished(), "there is no slot");
            // One slot, and who waits longest for it is about to leave.
            drop(hot.next());
            let done = leaves.await.expect("no panic");
            stays.await.expect("the slot is passed on");
            drop(hot);
            scene.rest().await;
            done
        })
        .await;
    });
}

async fn hold_every_slot(scene: &Scene) -> Vec<kvhoist::Reservation> {
    let mut held = Vec::new();
    for _ in 0..scene.settings.host_slots() {
        held.push(scene.cache.reserve_for_overwrite().await.expect("reserve"));
    }
    held
}

#[test]
fn remove() {
    on_every_engine(unchanged, async |scene| {
        at_every_point("remove", true, async |point| {
            let n = scene.fresh();
            scene.cache.store(&key(n), None, &payload(n, BLOCK_BYTES)).await.expect("store");
            let reader = scene.cache.fetch(&key(n)).await.expect("fetch").expect("stored");
            let done = drop_at(point, scene.cache.remove(&key(n))).await.is_some();
            assert_eq!(scene.cache.match_len(&[key(n)]) == 0, point.polls > 0, "forgotten at the first poll");
            assert!(reader[..] == payload(n, BLOCK_BYTES)[..], "readers keep their leases");
            drop(reader);
            // Stored anew while the record of the old copy may be on its way.
            scene.cache.store(&key(n), None, &payload(n, BLOCK_BYTES)).await.expect("store");
            assert!(fetch_verified(&scene.cache, n).await);
            assert!(scene.cache.remove(&key(n)).await.expect("remove"));
            scene.rest().await;
            done
        })
        .await;
    });
}

#[test]
fn sync() {
    on_every_engine(
        |settings| settings.disk.write_policy = WritePolicy::WriteBack,
        async |scene| {
            at_every_point("sync", true, async |point| {
                let n = scene.fresh();
                scene.cache.store(&key(n), None, &payload(n, BLOCK_BYTES)).await.expect("store");
                let done = drop_at(point, scene.cache.sync()).await.transpose().expect("sync").is_some();
                scene.cache.sync().await.expect("another's sync is not hurt");
                assert_eq!(scene.cache.stats().dirty, 0);
                scene.cache.remove(&key(n)).await.expect("remove");
                scene.rest().await;
                done
            })
            .await;
        },
    );
}

/// A load goes on when its future is dropped, into memory that is in use until `unregister` has resolved: not a byte is
/// written there afterwards.
#[test]
fn load_into_and_unregister() {
    on_every_engine(unchanged, async |scene| {
        let mut pool = Pool::new(3);
        at_every_point("load_into", true, async |point| {
            let region = pool.register(&scene.cache);
            let places: Vec<_> = (0..3).map(|block| pool.place(block)).collect();
            let wanted = [scene.cold().await, scene.fresh(), 0];
            let keys = wanted.map(key);
            let done = drop_at(point, scene.cache.load_into(&keys, &places)).await;
            let loaded = done.is_some();
            let results = done.transpose().expect("arguments").into_iter().flatten();
            let results: Vec<bool> = results.map(|result| result.expect("load")).collect();
            scene.cache.unregister(&region).await.expect("its own region");
            if loaded {
                assert_eq!(results, [true, false, true]);
                assert!(pool.bytes(0) == payload(wanted[0], BLOCK_BYTES));
            }
            (0..3).for_each(|block| pool.bytes(block).fill(0xee));
            assert!(fetch_verified(&scene.cache, wanted[0]).await);
            scene.rest().await;
            assert!((0..3).all(|block| pool.bytes(block).iter().all(|&byte| byte == 0xee)), "written after all");
            loaded
        })
        .await;
    });
}

/// Layer by layer: the call that begins the load, and each of its futures, dropped at every point. The load goes on,
/// describes itself, and writes not a byte after `unregister` has resolved.
#[test]
fn load_layers_and_what_it_gives() {
    on_every_engine(unchanged, async |scene| {
        let mut pool = Pool::new(3);
        for dropped in ["load_layers", "layer", "blocks"] {
            // The first of them is over at its first poll where the channel has room.
            at_every_point(dropped, dropped != "load_layers", async |point| {
                let region = pool.register(&scene.cache);
                let places: Vec<_> = (0..3).map(|block| pool.place(block)).collect();
                let wanted = [scene.cold().await, scene.fresh(), 0];
                let keys = wanted.map(key);
                let begin = scene.cache.load_layers(&keys, &places, &[0, 1]);
                let load = match dropped {
                    "load_layers" => drop_at(point, begin).await.transpose().expect("arguments"),
                    _ => Some(begin.await.expect("arguments")),
                };
                let done = match (&load, dropped) {
                    (Some(load), "layer") => drop_at(point, load.layer(1)).await.is_some(),
                    (Some(load), "blocks") => drop_at(point, load.blocks()).await.is_some(),
                    _ => load.is_some(),
                };
                if let Some(load) = load.filter(|_| done) {
                    for layer in 0..2 {
                        let (leading, error) = load.layer(layer).await.expect("a layer");
                        assert!(leading == 1 && error.is_none(), "{leading}, {error:?}");
                    }
                    let results: Vec<bool> =
                        load.blocks().await.into_iter().map(|result| result.expect("load")).collect();
                    assert_eq!(results, [true, false, true]);
                    assert!(pool.bytes(0) == payload(wanted[0], BLOCK_BYTES));
                }
                scene.cache.unregister(&region).await.expect("its own region");
                (0..3).for_each(|block| pool.bytes(block).fill(0xee));
                assert!(fetch_verified(&scene.cache, wanted[0]).await);
                scene.rest().await;
                assert!((0..3).all(|block| pool.bytes(block).iter().all(|&byte| byte == 0xee)), "written after all");
                done
            })
            .await;
        }
    });
}

#[test]
fn store_from() {
    on_every_engine(unchanged, async |scene| {
        let mut pool = Pool::new(2);
        at_every_point("store_from", true, async |point| {
            let fresh = [scene.fresh(), scene.fresh()];
            fresh.iter().enumerate().for_each(|(at, &n)| pool.bytes(at).copy_from_slice(&payload(n, BLOCK_BYTES)));
            let region = pool.register(&scene.cache);
            let places: Vec<_> = (0..2).map(|block| pool.place(block)).collect();
            let done = drop_at(point, scene.cache.store_from(&fresh.map(key), None, &places)).await;
            scene.cache.unregister(&region).await.expect("its own region");
            // The copy that was taken is whole, whatever happens to its source now.
            (0..2).for_each(|block| pool.bytes(block).fill(0xee));
            for n in fresh {
                // Once asked for it is stored, if not yet; bounded, as every attempt is.
                while !fetch_verified(&scene.cache, n).await && point.polls > 0 {
                    tokio::task::yield_now().await;
                }
                assert!(point.polls > 0 || scene.cache.match_len(&[key(n)]) == 0, "never asked for");
                scene.cache.remove(&key(n)).await.expect("remove");
            }
            scene.rest().await;
            done.is_some()
        })
        .await;
    });
}

/// The region is forgotten at the first poll. A load that holds it goes on, and is over when the cache is closed.
#[test]
fn unregister() {
    on_every_engine(unchanged, async |scene| {
        at_every_point("unregister", false, async |point| {
            let pool = Pool::new(1);
            let region = pool.register(&scene.cache);
            let (n, place) = (scene.cold().await, [pool.place(0)]);
            drop_at(Point { polls: 1, woken: false }, scene.cache.load_into(&[key(n)], &place)).await;
            let done = drop_at(point, scene.cache.unregister(&region)).await.is_some();
            let refused = scene.cache.load_into(&[key(n)], &place).await;
            assert_eq!(refused.is_err(), point.polls > 0, "forgotten at the first poll");
            scene.rest().await;
            done
        })
        .await;
    });
}

/// The completions of a queue are never taken.
#[test]
fn a_queue_that_is_dropped_under_way() {
    on_every_engine(unchanged, async |scene| {
        let pool = Pool::new(1);
        let region = pool.register(&scene.cache);
        for _ in 0..STORED {
            let n = scene.cold().await;
            let queue = scene.cache.completion_queue(4).expect("a queue");
            queue.submit_load(&[key(n)], &[pool.place(0)]).expect("submit");
            drop(queue);
            assert!(fetch_verified(&scene.cache, n).await);
        }
        scene.cache.unregister(&region).await.expect("its own region");
    });
}

/// What `StorageKind::Auto` picks is one of the engines above.
#[test]
fn the_engines_are_those_of_production() {
    assert!(engines().contains(&StorageKind::Blocking));
}
