//! Closes, among calls of others.

use std::sync::{Arc, atomic::Ordering};

use shuttle::future::block_on;

use super::{
    any_world,
    world::{World, assert_is, check, config, give_up_some_time, key, payload},
};
use crate::{Cache, Error, WritePolicy};

/// A read may be on its way to an I/O thread when the cache is closed, or be ended by it.
#[test]
fn a_close_waits_for_nobody_for_ever() {
    check(|| {
        let world = World::new(config(0, 2, 4), 2, false);
        let callers = [0, 1].map(|n| {
            world.caller(async move |cache: Cache| match cache.fetch(&key(n)).await {
                Ok(lease) => assert_is(&lease.expect("on disk"), n),
                Err(error) => assert!(matches!(error, Error::Closed), "{error}"),
            })
        });
        block_on(world.cache.close()).expect("close");
        callers.into_iter().for_each(|caller| caller.join().expect("no panic"));
        world.ended();
    });
}

/// Every close waits for the end, whoever was first and whoever gave up.
#[test]
fn every_close_waits_for_the_end() {
    check(|| {
        let world = any_world();
        let stores = world.caller(async |cache: Cache| drop(cache.store(&key(0), None, &payload(0)).await));
        let closers = [0, 1].map(|_| {
            let has_ended = Arc::clone(&world.has_ended);
            world.caller(async move |cache: Cache| {
                drop(give_up_some_time(cache.close()).await);
                cache.close().await.expect("close");
                assert!(has_ended.load(Ordering::Acquire), "a close was answered, and the reactor is at work");
            })
        });
        closers.into_iter().chain([stores]).for_each(|caller| caller.join().expect("no panic"));
        world.ended();
    });
}

/// A hit selects its block for the disk while the cache closes: the close waits for no write that nobody carries out.
#[test]
fn a_hit_during_the_close_begins_no_write() {
    check(|| {
        let write_policy = WritePolicy::WriteThroughSelective;
        let world = World::new(config(0, 2, 4).write_policy(write_policy).selective_hits(1), 0, false);
        block_on(world.cache.store(&key(0), None, &payload(0))).expect("store");
        let hits = world.caller(async |cache: Cache| {
            let lease = cache.fetch(&key(0)).await;
            assert!(matches!(lease, Ok(Some(_)) | Err(Error::Closed)));
        });
        block_on(world.cache.close()).expect("close");
        hits.join().expect("no panic");
        world.ended();
    });
}
