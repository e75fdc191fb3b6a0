//! Callers that wait for room among the commands, and are not polled when there is some.

use std::{
    future::{Future, poll_fn},
    pin::Pin,
    task::Poll,
};

use shuttle::future::block_on;

use super::{
    fetch,
    world::{World, below, check, config, key},
};
use crate::{Cache, Error, error::Result};

type Call = Pin<Box<dyn Future<Output = Result<()>>>>;

/// Room for one command at a time, and slots for all: an answer that is not taken keeps one.
fn narrow(stored: u32) -> World {
    World::new(config(3, 4, 4).movements_max(1), stored, false)
}

/// Calls that a caller begins, polls as often as the schedule wants it, and keeps. None is over, or they are fewer.
async fn begin(cache: &Cache) -> Vec<Call> {
    let mut calls: Vec<Call> = Vec::new();
    for n in 0..3 {
        let cache = cache.clone();
        calls.push(match below(2) {
            0 => Box::pin(async move { cache.sync().await }),
            _ => Box::pin(async move { cache.fetch_to_device(&key(n)).await.map(drop) }),
        });
    }
    for _ in 0..2 {
        let mut kept = Vec::new();
        for mut call in calls {
            let polled = poll_fn(|context| Poll::Ready(call.as_mut().poll(context)));
            match polled.await {
                Poll::Ready(result) => result.expect("the cache is open"),
                Poll::Pending => kept.push(call),
            }
        }
        calls = kept;
        shuttle::future::yield_now().await;
    }
    calls
}

#[test]
fn a_call_that_is_not_polled_holds_nobody_up() {
    check(|| {
        let world = narrow(3);
        let held = block_on(begin(&world.cache));
        let syncs = world.caller(async |cache: Cache| cache.sync().await.expect("sync"));
        let fetches = world.caller(async |cache: Cache| assert!(fetch(&cache, 2).await));
        [syncs, fetches].into_iter().for_each(|caller| caller.join().expect("no panic"));
        held.into_iter().for_each(|call| block_on(call).expect("it goes on"));
        world.end();
    });
}

#[test]
fn a_close_waits_for_no_call_that_is_not_polled() {
    check(|| {
        let world = narrow(3);
        let held = block_on(begin(&world.cache));
        let syncs = world.caller(async |cache: Cache| match cache.sync().await {
            Ok(()) | Err(Error::Closed) => {}
            Err(error) => panic!("{error}"),
        });
        block_on(world.cache.close()).expect("close");
        syncs.join().expect("no panic");
        for call in held {
            assert!(matches!(block_on(call), Ok(()) | Err(Error::Closed)));
        }
        world.ended();
    });
}

/// Reads of a device block, of which one at a time may be under way.
#[test]
fn a_read_that_is_not_polled_holds_no_other_read_up() {
    check(|| {
        let world = narrow(1);
        let lease = block_on(world.cache.fetch_to_device(&key(0))).expect("fetch").expect("on disk");
        let mut held: Vec<_> = (0..3).map(|_| Box::pin(world.cache.read_device(&lease, Vec::new()))).collect();
        block_on(poll_fn(|context| {
            held.retain_mut(|read| read.as_mut().poll(context).is_pending());
            Poll::Ready(())
        }));
        assert_eq!(block_on(world.cache.read_device(&lease, Vec::new())).expect("read"), super::payload(0));
        drop(held);
        drop(lease);
        world.end();
    });
}
