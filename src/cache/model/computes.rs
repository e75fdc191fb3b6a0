//! Callers that compute what is missing, in every interleaving.

use std::{
    cell::Cell,
    future::{Future, poll_fn},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    task::Poll,
};

use tokio::sync::oneshot;

use super::world::{BLOCK_BYTES, World, assert_is, below, check, config, give_up_some_time, key, payload};
use crate::{Cache, Error};

/// A computation in progress.
struct Computing<'a>(&'a AtomicU32);

impl<'a> Computing<'a> {
    fn begin(computing: &'a AtomicU32) -> Self {
        assert_eq!(computing.fetch_add(1, Ordering::Relaxed), 0, "one computation at a time");
        Computing(computing)
    }
}

impl Drop for Computing<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A call that computes block 0 in a few turns; now and then it fails.
async fn get(cache: &Cache, computing: &AtomicU32, may_fail: bool) -> Result<(), Error> {
    let compute = || async {
        let _computing = Computing::begin(computing);
        for _ in 0..below(3) {
            shuttle::future::yield_now().await;
        }
        if may_fail && below(2) == 0 {
            return Err(Error::Busy { what: "the model", limit: 1, setting: "none" });
        }
        Ok(payload(0))
    };
    let bytes = cache.get_or_fetch_with(&key(0), None, compute).await?;
    assert_is(&bytes, 0);
    Ok(())
}

/// Callers that stay, that leave and that fail: one computes at a time, and each who stays gets the block.
#[test]
fn whoever_stays_gets_the_block_that_one_computes() {
    check(|| {
        let world = World::new(config(0, 2, 4), 0, false);
        let computing = Arc::<AtomicU32>::default();
        let call = |may_leave: bool, may_fail: bool| {
            let computing = Arc::clone(&computing);
            world.caller(async move |cache: Cache| {
                if may_leave {
                    drop(give_up_some_time(get(&cache, &computing, false)).await);
                } else if let Err(error) = get(&cache, &computing, may_fail).await {
                    assert!(may_fail && matches!(error, Error::Busy { what: "the model", .. }), "{error}");
                }
            })
        };
        let callers = [call(false, false), call(true, false), call(false, true), call(true, false)];
        callers.into_iter().for_each(|caller| caller.join().expect("no panic"));
        world.end();
    });
}

/// A waiter that is not polled holds nobody up.
#[test]
fn a_waiter_that_is_not_polled_holds_nobody_up() {
    check(|| {
        let world = World::new(config(0, 2, 4), 0, false);
        let (done, is_done) = oneshot::channel::<()>();
        let computing = Arc::<AtomicU32>::default();
        let others = Arc::clone(&computing);
        let computes = world.caller(async move |cache: Cache| {
            drop(give_up_some_time(get(&cache, &others, false)).await);
        });
        let parks = world.caller(async |cache: Cache| {
            let computes = Cell::new(false);
            let wanted = key(0);
            let compute = || async {
                computes.set(true);
                Ok::<_, Error>(payload(0))
            };
            let mut call = Box::pin(cache.get_or_fetch_with(&wanted, None, compute));
            let is_ready = poll_fn(|context| Poll::Ready(call.as_mut().poll(context).is_ready())).await;
            if !is_ready && computes.get() {
                assert_is(&call.await.expect("a block"), 0);
            } else {
                is_done.await.expect("the other tells");
            }
        });
        let stays = world.caller(async move |cache: Cache| {
            get(&cache, &computing, false).await.expect("a block");
            _ = done.send(());
        });
        [computes, parks, stays].into_iter().for_each(|caller| caller.join().expect("no panic"));
        world.end();
    });
}

/// Whoever asks after a removal gets no bytes whose computation began before it.
#[test]
fn a_removal_is_about_what_is_being_computed_too() {
    check(|| {
        let world = World::new(config(0, 2, 4), 0, false);
        let epoch = Arc::<AtomicU32>::default();
        let compute = async |cache: &Cache, epoch: &AtomicU32| -> u8 {
            let compute = || async {
                let began = epoch.load(Ordering::Relaxed) as u8;
                for _ in 0..below(3) {
                    shuttle::future::yield_now().await;
                }
                Ok::<_, Error>(vec![began; BLOCK_BYTES])
            };
            cache.get_or_fetch_with(&key(0), None, compute).await.expect("a block")[0]
        };
        let callers = [(); 2].map(|()| {
            let epoch = Arc::clone(&epoch);
            world.caller(async move |cache: Cache| _ = give_up_some_time(compute(&cache, &epoch)).await)
        });
        let removes = world.caller(async move |cache: Cache| {
            shuttle::future::yield_now().await;
            epoch.store(1, Ordering::Relaxed);
            cache.remove(&key(0)).await.expect("removed");
            assert_eq!(compute(&cache, &epoch).await, 1, "computed before the removal");
        });
        callers.into_iter().chain([removes]).for_each(|caller| caller.join().expect("no panic"));
        world.end();
    });
}
