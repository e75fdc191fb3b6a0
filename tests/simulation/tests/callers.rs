//! What one caller does, and what others see of it.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use kvhoist::{BlockKey, Cache, Config, DiskPath, Error};
use kvhoist_simulation::sim::{self, Reactor, Sim, SimOptions, Simulated, World};
use tokio::task::spawn_local;

const BLOCK_BYTES: usize = 4096;
const DEADLINE: Duration = Duration::from_millis(400);

fn config(host_blocks: u32) -> Config {
    Config::default()
        .block_bytes(BLOCK_BYTES)
        .host_blocks(host_blocks)
        .device_blocks(1)
        .disks(vec![DiskPath::with_blocks("simulated", 16)])
        .deadline_ms(DEADLINE.as_millis() as u64)
}

fn key(n: u8) -> BlockKey {
    BlockKey::new([n; 32])
}

/// A cache with blocks `0..8` on disk, the last few in host memory too.
async fn open(config: Config) -> (Cache, Reactor) {
    let mut world = World::new(1, Vec::new());
    let latency = Duration::from_millis(1)..=Duration::from_millis(1);
    world.storage = Sim::new(1, sim::blank_files(&config), SimOptions { latency, ..SimOptions::default() });
    let Simulated { cache, reactor } = sim::open(config, &world).await.expect("blank files open");
    for n in 0..8 {
        cache.store(&key(n), None, &[n; BLOCK_BYTES]).await.expect("stored");
    }
    (cache, reactor)
}

/// Closes, which hangs where a flight never ends.
async fn finish(cache: Cache, reactor: Reactor) {
    let closed = tokio::time::timeout(DEADLINE * 10, cache.close()).await;
    closed.expect("a close waits for nobody for ever").expect("closed");
    reactor.ended().await;
    reactor.settle(Duration::from_secs(60)).await.expect("balanced after the end");
}

struct Panics;

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        panic!("a waker that panics, on purpose");
    }
}

fn poll_with<F: Future>(future: Pin<&mut F>, waker: &Waker) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(waker))
}

#[test]
fn a_waker_that_panics_leaves_other_callers_their_answers() {
    sim::block_on(async {
        let (cache, reactor) = open(config(4)).await;
        let wanted = key(0);
        let mut theirs = Box::pin(cache.fetch(&wanted));
        assert!(poll_with(theirs.as_mut(), &Waker::from(Arc::new(Panics))).is_pending());
        for _ in 0..2 {
            let lease = cache.fetch(&key(0)).await.expect("another's waker is none of ours").expect("stored");
            assert!(*lease == [0; BLOCK_BYTES]);
        }
        let lease = theirs.await.expect("its answer is there all the same").expect("stored");
        assert!(*lease == [0; BLOCK_BYTES]);
        drop(lease);
        finish(cache, reactor).await;
    });
}

#[test]
fn a_waker_that_panics_does_not_end_the_movement_that_frees_its_slot() {
    sim::block_on(async {
        let (cache, reactor) = open(config(1)).await;
        let storing = cache.clone();
        let stored = spawn_local(async move { storing.store(&key(9), None, &[9; BLOCK_BYTES]).await });
        tokio::time::sleep(Duration::from_micros(500)).await;
        // The only slot is being written to disk, and comes free when the write ends.
        let mut theirs = Box::pin(cache.reserve());
        assert!(poll_with(theirs.as_mut(), &Waker::from(Arc::new(Panics))).is_pending());
        tokio::time::sleep(Duration::from_millis(5)).await;
        let stored = tokio::time::timeout(DEADLINE * 2, stored).await.expect("the flight lands");
        stored.expect("no panic").expect("the write has landed");
        drop(theirs.await.expect("its slot is there all the same"));
        let lease = cache.fetch(&key(9)).await.expect("served").expect("stored");
        assert!(*lease == [9; BLOCK_BYTES]);
        drop(lease);
        finish(cache, reactor).await;
    });
}

#[test]
fn a_waker_that_panics_does_not_reach_who_frees_its_slot() {
    sim::block_on(async {
        let (cache, reactor) = open(config(1)).await;
        let held = cache.reserve().await.expect("the only slot");
        let mut theirs = Box::pin(cache.reserve());
        assert!(poll_with(theirs.as_mut(), &Waker::from(Arc::new(Panics))).is_pending());
        // Would unwind here.
        drop(held);
        drop(theirs.await.expect("its slot is there all the same"));
        finish(cache, reactor).await;
    });
}

#[test]
fn who_waits_for_a_slot_that_callers_hold_is_told_what_they_hold() {
    sim::block_on(async {
        let (cache, reactor) = open(config(3)).await;
        let leases = [7, 7, 6].map(|n| {
            let cache = cache.clone();
            spawn_local(async move { cache.fetch(&key(n)).await.expect("fetched").expect("stored") })
        });
        let mut held = Vec::new();
        for lease in leases {
            held.push(lease.await.expect("no panic"));
        }
        let reservation = cache.reserve().await.expect("the last slot");
        let error = cache.fetch(&key(0)).await.expect_err("no slot comes free");
        let Error::Timeout { what: "a host slot", leases, reservations, slots, setting, .. } = error else {
            panic!("{error:?}")
        };
        assert_eq!((leases, reservations, slots, setting), (3, 1, 3, "host_blocks"));
        let text = error.to_string();
        assert!(text.contains("3 leases and 1 reservations") && text.contains("`host_blocks`"), "{text}");
        drop((held, reservation));
        let on_device = cache.fetch_to_device(&key(0)).await.expect("a slot is free").expect("stored");
        let error = cache.fetch_to_device(&key(1)).await.expect_err("the only device slot is leased");
        let Error::Timeout { leases, reservations, setting, .. } = error else { panic!("{error:?}") };
        assert_eq!((leases, reservations, setting), (1, 0, "device_blocks"));
        drop(on_device);
        finish(cache, reactor).await;
    });
}
