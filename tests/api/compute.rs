//! Of all callers that want a missing block, one computes it.

use crate::common;

use std::{
    future::{Future, pending},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    sync::atomic::{AtomicU32, Ordering},
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use common::{config, directory, key, payload};
use kvhoist::{Cache, Config, Error, StorageKind, block_on};
use tokio::sync::{Notify, oneshot};

const BLOCK_BYTES: usize = 4096;

type Block<'a> = Pin<Box<dyn Future<Output = Result<Bytes, Error>> + Send + 'a>>;

fn memory(waiters_max: u32) -> Cache {
    let config = Config::default().block_bytes(BLOCK_BYTES).host_blocks(8).waiters_max(waiters_max);
    block_on(Cache::open(config)).expect("open")
}

fn poll<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

/// A call that computes block 1 as `compute` does.
fn call<'a, C>(cache: &'a Cache, compute: impl FnOnce() -> C + Send + 'a) -> Block<'a>
where
    C: Future<Output = Result<Vec<u8>, Error>> + Send + 'a,
{
    Box::pin(async move { cache.get_or_fetch_with(&key(1), None, compute).await })
}

fn ready<'a>(cache: &'a Cache, computed: &'a AtomicU32) -> Block<'a> {
    call(cache, move || async {
        computed.fetch_add(1, Ordering::Relaxed);
        Ok(payload(1, BLOCK_BYTES))
    })
}

fn assert_is_block(result: Poll<Result<Bytes, Error>>) {
    match result {
        Poll::Ready(Ok(bytes)) => assert_eq!(bytes, payload(1, BLOCK_BYTES)),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_hundred_callers_compute_a_block_once() {
    let directory = directory();
    let cache = Cache::open(config(&directory, StorageKind::Auto, 16, 64)).await.expect("open");
    let (computed, all_wait) = (&*Box::leak(Box::new(AtomicU32::new(0))), &*Box::leak(Box::new(Notify::new())));
    let calls: Vec<_> = (0..100)
        .map(|_| {
            let cache = cache.clone();
            tokio::spawn(async move {
                let compute = || async {
                    computed.fetch_add(1, Ordering::Relaxed);
                    all_wait.notified().await;
                    Ok::<_, Error>(payload(1, common::BLOCK_BYTES))
                };
                cache.get_or_fetch_with(&key(1), Some(&key(0)), compute).await.expect("a block")
            })
        })
        .collect();
    all_wait.notify_one();
    for call in calls {
        assert_eq!(call.await.expect("no panic"), payload(1, common::BLOCK_BYTES));
    }
    assert_eq!(computed.load(Ordering::Relaxed), 1);
    assert!(common::fetch_verified(&cache, 1).await, "it is stored");
    cache.close().await.expect("closed");
}

#[test]
fn callers_that_wait_for_a_computation_count_as_hits_of_the_ratio() {
    let cache = memory(8);
    assert_eq!(cache.stats().hit_ratio(), 0.0);
    let (computed, (end, ended)) = (AtomicU32::new(0), oneshot::channel());
    let mut first = call(&cache, || async {
        ended.await.expect("sent");
        Ok(payload(1, BLOCK_BYTES))
    });
    let mut others: Vec<_> = (0..3).map(|_| ready(&cache, &computed)).collect();
    assert!(poll(&mut first).is_pending());
    others.iter_mut().for_each(|call| assert!(poll(call).is_pending()));
    end.send(()).expect("it computes");
    assert_is_block(Poll::Ready(block_on(first)));
    others.iter_mut().for_each(|call| assert_is_block(poll(call)));
    let stats = cache.stats();
    assert_eq!((computed.load(Ordering::Relaxed), stats.misses, stats.joined), (0, 4, 3));
    assert_eq!(stats.hit_ratio(), 0.75);
    block_on(cache.fetch(&key(1))).expect("fetched").expect("there");
    assert_eq!(cache.stats().hit_ratio(), 0.8);
}

#[test]
fn after_a_dropped_computation_the_first_waiter_that_is_polled_computes() {
    let (cache, computed) = (memory(10), AtomicU32::new(0));
    let mut first = call(&cache, pending);
    assert!(poll(&mut first).is_pending());
    let (mut second, mut third) = (call(&cache, || async { panic!("it is not polled") }), ready(&cache, &computed));
    assert!(poll(&mut second).is_pending() && poll(&mut third).is_pending());
    assert_eq!(computed.load(Ordering::Relaxed), 0, "one computation at a time");
    drop(first);
    assert_is_block(poll(&mut third));
    assert_is_block(poll(&mut second));
    assert_eq!(computed.load(Ordering::Relaxed), 1);
    block_on(cache.close()).expect("closed");
}

#[test]
fn a_waiter_that_is_not_polled_holds_up_neither_those_behind_it_nor_later_callers() {
    let (cache, computed) = (memory(10), AtomicU32::new(0));
    let (go, gone) = oneshot::channel::<()>();
    let mut first = call(&cache, || async {
        drop(gone.await);
        Ok(payload(1, BLOCK_BYTES))
    });
    assert!(poll(&mut first).is_pending());
    let (mut parked, mut behind) = (ready(&cache, &computed), ready(&cache, &computed));
    assert!(poll(&mut parked).is_pending() && poll(&mut behind).is_pending());
    drop(go);
    assert_is_block(poll(&mut first));
    assert_is_block(poll(&mut behind));
    assert_is_block(poll(&mut ready(&cache, &computed)));
    assert_eq!(computed.load(Ordering::Relaxed), 0, "the first caller's");
    block_on(cache.close()).expect("closed");
}

#[test]
fn a_computation_that_panics_hands_the_turn_over() {
    let (cache, computed) = (memory(10), AtomicU32::new(0));
    let (go, gone) = oneshot::channel::<()>();
    let mut first = call(&cache, || async {
        drop(gone.await);
        panic!("it is not to be computed")
    });
    assert!(poll(&mut first).is_pending());
    let mut second = ready(&cache, &computed);
    assert!(poll(&mut second).is_pending());
    drop(go);
    catch_unwind(AssertUnwindSafe(|| poll(&mut first))).expect_err("the caller's own panic");
    drop(first);
    assert_is_block(poll(&mut second));
    assert_eq!(computed.load(Ordering::Relaxed), 1);
    block_on(cache.close()).expect("closed");
}

#[test]
fn an_error_is_its_own_callers_alone() {
    let (cache, computed) = (memory(10), AtomicU32::new(0));
    let (go, gone) = oneshot::channel::<()>();
    let mut fails = call(&cache, || async {
        drop(gone.await);
        Err(Error::Busy { what: "the model", limit: 1, setting: "none" })
    });
    assert!(poll(&mut fails).is_pending());
    let (short_one, mut right) = (|| async { Ok(vec![1; 10]) }, ready(&cache, &computed));
    let mut short = call(&cache, short_one);
    assert!(poll(&mut short).is_pending() && poll(&mut right).is_pending());
    drop(go);
    assert!(matches!(poll(&mut fails), Poll::Ready(Err(Error::Busy { what: "the model", .. }))));
    assert!(
        matches!(poll(&mut short), Poll::Ready(Err(Error::Argument { what: "data", .. }))),
        "10 bytes are no block"
    );
    assert_is_block(poll(&mut right));
    assert_eq!(computed.load(Ordering::Relaxed), 1);
    block_on(cache.close()).expect("closed");
}

#[test]
fn a_caller_that_gives_up_waiting_is_passed_over() {
    let (cache, computed) = (memory(10), AtomicU32::new(0));
    let mut first = call(&cache, pending);
    assert!(poll(&mut first).is_pending());
    let (mut second, mut third) = (ready(&cache, &computed), ready(&cache, &computed));
    assert!(poll(&mut second).is_pending() && poll(&mut third).is_pending());
    drop(second);
    drop(first);
    assert_is_block(poll(&mut third));
    assert_eq!(computed.load(Ordering::Relaxed), 1);
    block_on(cache.close()).expect("closed");
}

#[test]
fn a_computed_block_is_stored_and_one_that_was_removed_is_computed_again() {
    let (cache, computed) = (memory(10), AtomicU32::new(0));
    for times in 1..=3 {
        assert_is_block(Poll::Ready(block_on(ready(&cache, &computed))));
        assert_is_block(Poll::Ready(block_on(ready(&cache, &computed))));
        assert_eq!(computed.load(Ordering::Relaxed), times, "the second call finds it");
        assert!(block_on(cache.remove(&key(1))).expect("removed"));
    }
    block_on(cache.close()).expect("closed");
}

/// A removal while block 1 is computed, or is stored by the caller that computed it.
fn remove_amid_a_computation(is_computed: bool) {
    let (cache, computed) = (memory(10), AtomicU32::new(0));
    let held: Vec<_> = (0..8).map(|_| block_on(cache.reserve()).expect("a slot")).collect();
    let (go, gone) = oneshot::channel::<()>();
    let mut before = call(&cache, || async {
        drop(gone.await);
        Ok(payload(9, BLOCK_BYTES))
    });
    assert!(poll(&mut before).is_pending());
    let mut waits = ready(&cache, &computed);
    let mut go = Some(go);
    if is_computed {
        drop(go.take());
        assert!(poll(&mut before).is_pending(), "it waits for a slot");
        assert!(matches!(poll(&mut waits), Poll::Ready(Ok(bytes)) if bytes == payload(9, BLOCK_BYTES)));
    } else {
        assert!(poll(&mut waits).is_pending());
    }
    block_on(cache.remove(&key(1))).expect("removed");
    let mut after = ready(&cache, &computed);
    assert!(poll(&mut after).is_pending(), "it waits for a slot");
    assert_eq!(computed.load(Ordering::Relaxed), 1, "computed anew, although the other computation goes on");
    drop((go, held));
    assert!(matches!(block_on(before), Ok(bytes) if bytes == payload(9, BLOCK_BYTES)), "its own");
    assert!(!cache.contains(&key(1)), "what was removed is not stored");
    assert_is_block(Poll::Ready(block_on(after)));
    if !is_computed {
        assert_is_block(Poll::Ready(block_on(waits)));
    }
    assert_eq!(computed.load(Ordering::Relaxed), 1);
    let lease = block_on(cache.fetch(&key(1))).expect("served").expect("stored");
    assert_eq!(lease[..], payload(1, BLOCK_BYTES));
    drop(lease);
    block_on(cache.close()).expect("closed");
}

#[test]
fn a_block_that_is_removed_while_it_is_computed_is_computed_anew() {
    remove_amid_a_computation(false);
}

#[test]
fn a_block_that_is_removed_before_it_is_stored_is_computed_anew() {
    remove_amid_a_computation(true);
}

#[test]
fn callers_that_wait_get_what_was_computed_although_it_is_stored_nowhere() {
    let (cache, computed) = (memory(10), AtomicU32::new(0));
    let (go, gone) = oneshot::channel::<()>();
    let mut first = call(&cache, || async {
        drop(gone.await);
        Ok(payload(1, BLOCK_BYTES))
    });
    assert!(poll(&mut first).is_pending());
    let mut second = ready(&cache, &computed);
    assert!(poll(&mut second).is_pending());
    block_on(cache.close()).expect("closed");
    drop(go);
    assert_is_block(poll(&mut first));
    assert_is_block(poll(&mut second));
    assert_eq!(computed.load(Ordering::Relaxed), 0, "the first caller's");
    assert!(!cache.contains(&key(1)));
    assert!(matches!(block_on(ready(&cache, &computed)), Err(Error::Closed)), "a new call is refused");
}

#[test]
fn more_callers_than_waiters_max_are_refused() {
    let cache = memory(2);
    let (mut first, mut second) = (call(&cache, pending), call(&cache, pending));
    assert!(poll(&mut first).is_pending() && poll(&mut second).is_pending());
    let mut third = call(&cache, pending);
    assert!(matches!(poll(&mut third), Poll::Ready(Err(Error::Busy { limit: 2, setting: "waiters_max", .. }))));
    drop(first);
    let mut fourth = pin!(call(&cache, pending));
    assert!(poll(&mut fourth).is_pending(), "there is room again");
    drop(second);
    block_on(cache.close()).expect("closed");
}
