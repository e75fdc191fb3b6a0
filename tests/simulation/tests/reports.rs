//! What a sync reports of blocks that the disk refused.

mod scene;

use std::future::Future;

use kvhoist::{Cache, Config, Error, Segment, Tier, internals::io::OpKind};
use kvhoist_simulation::sim::{self, Fault, FaultRates, Reactor, Sim};
use scene::*;

async fn open_read_only(config: Config) -> (Cache, Reactor, Sim) {
    let (cache, reactor, disk) = open(config).await;
    disk.set_rates(FaultRates { write_error: 1.0, ..FaultRates::default() });
    for n in 100..103 {
        store(&cache, n).await.expect("visible");
        cache.sync().await.expect_err("the disk takes nothing");
    }
    disk.set_rates(FaultRates::default());
    assert!(cache.stats().disk_read_only.is_some(), "three writes failed in a row");
    // The records that could not be written then can be now.
    while let Err(error) = cache.sync().await {
        assert!(!matches!(error, Error::Closed), "{error}");
    }
    (cache, reactor, disk)
}

#[test]
fn a_sync_reports_what_a_read_only_disk_did_not_take() {
    sim::block_on(async {
        let (cache, reactor, _disk) = open_read_only(write_back()).await;
        let refused = cache.stats().writes_refused;
        store(&cache, 1).await.expect("visible");
        assert_eq!(cache.stats().writes_refused, refused + 1, "a refusal is counted");
        let synced = cache.sync().await;
        assert!(matches!(&synced, Err(Error::Refused { reason }) if reason.starts_with("1 block")), "{synced:?}");
        cache.sync().await.expect("it was reported, and nothing was stored since");
        store(&cache, 2).await.expect("visible");
        cache.close().await.expect_err("block 2 is on no disk, and nobody was told");
        reactor.ended().await;
    });
}

#[test]
fn a_write_back_that_failed_is_reported_by_the_next_sync_once() {
    sim::block_on(async {
        let (cache, reactor, _disk) = open_with_a_refusal().await;
        let synced = cache.sync().await;
        assert!(matches!(&synced, Err(Error::Refused { reason }) if reason.starts_with("1 block")), "{synced:?}");
        cache.sync().await.expect("it was reported");
        finish(cache, reactor).await;
    });
}

#[test]
fn a_refused_block_that_was_written_or_removed_since_is_not_reported() {
    sim::block_on(async {
        let watermarks = write_back().low_watermark(0.75).high_watermark(1.0);
        let (cache, reactor, disk) = open(watermarks.clone()).await;
        disk.set_rates(FaultRates { no_space: 1.0, ..FaultRates::default() });
        for n in 0..3 {
            store(&cache, n).await.expect("visible");
        }
        while cache.stats().writes_refused < 2 {
            a_while().await;
        }
        disk.set_rates(FaultRates::default());
        for n in 0..2 {
            store(&cache, n).await.expect("visible");
        }
        assert!(cache.remove(&key(2)).await.expect("removed"), "it was there");
        cache.sync().await.expect("what was refused is written by now, or was removed");
        for n in 0..2 {
            assert_eq!(found_after_power_cuts(&watermarks, &disk, n).await, POWER_CUTS, "block {n} was synced");
        }
        finish(cache, reactor).await;
    });
}

#[test]
fn a_sync_reports_a_refused_block_that_was_written_during_its_flush() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(write_back()).await;
        store(&cache, 0).await.expect("visible");
        disk.script_next(OpKind::Write, Fault::Error(28));
        disk.script_next(OpKind::Sync, Fault::Stall);
        let first = spawn(&cache, async |cache| cache.sync().await);
        a_while().await;
        assert_eq!((disk.stalled(), cache.stats().writes_refused), (1, 1), "it flushes, and the block is on no disk");
        store(&cache, 0).await.expect("visible");
        let second = spawn(&cache, async |cache| cache.sync().await);
        a_while().await;
        assert_eq!(cache.stats().tier(Tier::Disk).resident, 1, "the second sync has written it");
        disk.release();
        let synced = first.await.expect("no panic");
        assert!(matches!(&synced, Err(Error::Refused { .. })), "its flush does not cover the block: {synced:?}");
        drop(second.await.expect("no panic"));
        cache.sync().await.expect("it was reported, and is written and flushed");
        finish(cache, reactor).await;
    });
}

#[test]
fn a_store_that_reports_its_refusal_leaves_nothing_for_a_sync_to_report() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        disk.script_next(OpKind::Write, Fault::Error(5));
        store(&cache, 0).await.expect_err("the disk did not take it");
        cache.sync().await.expect("it was reported by the store");
        disk.script_next(OpKind::Write, Fault::Error(5));
        let abandoned = spawn(&cache, async |cache| store(&cache, 1).await);
        tokio::task::yield_now().await;
        abandoned.abort();
        a_while().await;
        let synced = cache.sync().await;
        assert!(matches!(&synced, Err(Error::Refused { .. })), "its store was dropped: {synced:?}");
        finish(cache, reactor).await;
    });
}

/// Nothing is tried once the disk takes no writes; whoever stores is told all the same, and nobody else.
#[test]
fn a_store_that_a_read_only_disk_refuses_leaves_nothing_for_a_sync_to_report() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        disk.set_rates(FaultRates { write_error: 1.0, ..FaultRates::default() });
        for n in 100..103 {
            store(&cache, n).await.expect_err("the disk takes nothing");
        }
        assert!(cache.stats().disk_read_only.is_some(), "three writes failed in a row");
        disk.set_rates(FaultRates::default());
        while let Err(error) = cache.sync().await {
            assert!(!matches!(error, Error::Closed), "{error}");
        }
        let refused = store(&cache, 0).await;
        assert!(matches!(refused, Err(Error::Unavailable { .. })), "{refused:?}");
        let mut reservation = cache.reserve().await.expect("a slot");
        reservation.copy_from_slice(&payload(1));
        let refused = reservation.commit(&key(1), None).await;
        assert!(matches!(refused, Err(Error::Unavailable { .. })), "{refused:?}");
        cache.sync().await.expect("both were told");
        finish(cache, reactor).await;
    });
}

async fn compute(cache: &Cache, n: u8) {
    let block = cache.get_or_fetch_with(&key(n), None, async || Ok::<_, Error>(payload(n))).await;
    assert_eq!(block.expect("a block, whatever becomes of its store"), payload(n));
}

#[test]
fn a_sync_reports_a_computed_block_that_the_disk_or_host_memory_refused() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        disk.script_next(OpKind::Write, Fault::Error(5));
        compute(&cache, 0).await;
        let refused = cache.sync().await;
        assert!(matches!(&refused, Err(Error::Refused { reason }) if reason.starts_with("1 block")), "{refused:?}");
        cache.sync().await.expect("it was reported");

        let mut held = Vec::new();
        for _ in 0..4 {
            held.push(cache.reserve().await.expect("a slot"));
        }
        compute(&cache, 1).await;
        drop(held);
        let refused = cache.sync().await;
        assert!(matches!(&refused, Err(Error::Refused { reason }) if reason.starts_with("1 block")), "{refused:?}");

        disk.script_next(OpKind::Write, Fault::Error(5));
        compute(&cache, 2).await;
        compute(&cache, 3).await;
        store(&cache, 2).await.expect("the disk is sound again");
        cache.sync().await.expect("block 2 was written since");
        for n in 2..4 {
            assert_eq!(found_after_power_cuts(&config(), &disk, n).await, POWER_CUTS, "block {n} was synced");
        }
        disk.script_next(OpKind::Write, Fault::Error(5));
        compute(&cache, 4).await;
        cache.close().await.expect_err("block 4 is on no disk, and nobody was told");
        reactor.ended().await;
    });
}

/// What a sync says when `ask` has had a block stored from registered memory, and the disk has refused it.
async fn sync_after_refused_store<F: Future<Output = ()>>(
    ask: impl FnOnce(Cache, Vec<Vec<Segment>>) -> F,
) -> Result<(), Error> {
    let (cache, reactor, disk) = open(config()).await;
    let pool = pool(&cache, 1).await;
    disk.script_next(OpKind::Write, Fault::Error(5));
    ask(cache.clone(), pool.places.clone()).await;
    assert_eq!(cache.stats().writes_refused, 1);
    let synced = cache.sync().await;
    cache.unregister(&pool.region).await.expect("its own region");
    finish(cache, reactor).await;
    synced
}

#[test]
fn a_sync_reports_refusals_whose_answer_nobody_took() {
    sim::block_on(async {
        let dropped = sync_after_refused_store(|cache, places| async move {
            let keys = [key(1)];
            let mut storing = Box::pin(cache.store_from(&keys, None, &places));
            std::future::poll_fn(|cx| {
                assert!(storing.as_mut().poll(cx).is_pending(), "the disk takes its time");
                std::task::Poll::Ready(())
            })
            .await;
            // By then it has been answered.
            a_while().await;
        });
        let dropped = dropped.await;
        assert!(matches!(&dropped, Err(Error::Refused { .. })), "its future was dropped: {dropped:?}");

        let undrained = sync_after_refused_store(|cache, places| async move {
            let queue = cache.completion_queue(1).expect("a queue");
            queue.submit_store(&[key(1)], None, &places).expect("submitted");
            a_while().await;
        });
        let undrained = undrained.await;
        assert!(matches!(&undrained, Err(Error::Refused { .. })), "its queue was dropped: {undrained:?}");

        let drained = sync_after_refused_store(|cache, places| async move {
            let queue = cache.completion_queue(1).expect("a queue");
            queue.submit_store(&[key(1)], None, &places).expect("submitted");
            a_while().await;
            assert!(queue.drain()[0].1[0].is_err(), "the disk did not take it");
        });
        drained.await.expect("it was reported by the queue");
    });
}

/// A cache that has block 0 in host memory: the disk refused it in the background, and nobody was told.
async fn open_with_a_refusal() -> (Cache, Reactor, Sim) {
    let watermarks = write_back().low_watermark(0.75).high_watermark(1.0);
    let (cache, reactor, disk) = open(watermarks).await;
    disk.script_next(OpKind::Write, Fault::Error(5));
    store(&cache, 0).await.expect("visible");
    store(&cache, 1).await.expect("visible, and one too many");
    while cache.stats().writes_refused == 0 {
        a_while().await;
    }
    (cache, reactor, disk)
}

#[test]
fn every_sync_under_way_reports_a_refused_block() {
    sim::block_on(async {
        let (cache, reactor, disk) = open_with_a_refusal().await;
        let syncing: Vec<_> = (0..3).map(|_| spawn(&cache, async |cache| cache.sync().await)).collect();
        tokio::task::yield_now().await;
        // One that gives up is owed nothing.
        let left = spawn(&cache, async |cache| cache.sync().await);
        tokio::task::yield_now().await;
        left.abort();
        for sync in syncing {
            let synced = sync.await.expect("no panic");
            assert!(matches!(synced, Err(Error::Refused { .. })), "block 0 is on no disk: {synced:?}");
        }
        cache.sync().await.expect("it began after the report");
        assert!(found_after_power_cuts(&write_back(), &disk, 0).await == 0, "block 0 was refused");
        finish(cache, reactor).await;
    });
}

#[test]
fn a_store_that_the_close_cut_off_takes_no_earlier_refusal_along() {
    sim::block_on(async {
        let (cache, reactor, _disk) = open_with_a_refusal().await;
        let pool = pool(&cache, 0).await;
        let places = pool.places.clone();
        // The reactor sees both at once, and the close first.
        let storing = spawn(&cache, async move |cache| cache.store_from(&[key(0)], None, &places).await);
        let closing = spawn(&cache, async |cache| cache.close().await);
        let stored = storing.await.expect("no panic").expect("asked");
        assert!(matches!(stored[..], [Err(Error::Closed)]), "{stored:?}");
        let closed = closing.await.expect("no panic");
        assert!(matches!(closed, Err(Error::Refused { .. })), "block 0 is on no disk: {closed:?}");
        drop(pool.region);
        reactor.ended().await;
    });
}

/// What a sync says after the disk refused a block that went straight to it, and whose store was dropped.
async fn sync_after_refused_straight_store(removes: fn(&Sim) -> bool) -> Result<(), Error> {
    let (cache, reactor, disk) = open(config().bypass_host(true)).await;
    let pool = pool(&cache, 1).await;
    let places = pool.places.clone();
    disk.script_next(OpKind::Write, Fault::StalledError(5));
    let storing = spawn(&cache, async move |cache| cache.store_from(&[key(1)], None, &places).await);
    a_while().await;
    assert_eq!(disk.stalled(), 1, "the block is being written");
    storing.abort();
    let removal = removes(&disk).then(|| spawn_remove(&cache, 1));
    a_while().await;
    disk.release();
    a_while().await;
    assert_eq!(cache.stats().writes_refused, 1);
    match removal {
        Some(removal) => drop(removal.await.expect("no panic").expect("no record names it")),
        None if removes(&disk) => drop(cache.remove(&key(1)).await.expect("no record names it")),
        None => {}
    }
    let synced = cache.sync().await;
    cache.unregister(&pool.region).await.expect("its own region");
    finish(cache, reactor).await;
    synced
}

#[test]
fn a_block_that_the_disk_refused_straight_is_reported_unless_it_was_removed() {
    sim::block_on(async {
        let kept = sync_after_refused_straight_store(|_| false).await;
        assert!(matches!(kept, Err(Error::Refused { .. })), "its store was dropped: {kept:?}");
        let under_way = sync_after_refused_straight_store(|_| true).await;
        under_way.expect("it was removed while it was written");
        let later = sync_after_refused_straight_store(|disk| disk.stalled() == 0).await;
        later.expect("it was removed when the disk had refused it");
    });
}

#[test]
fn a_sync_reports_a_block_that_did_not_come_from_the_device_to_be_written() {
    sim::block_on(async {
        let (cache, reactor, world) = open_world(write_back().device_blocks(1), 1, 20).await;
        store(&cache, 100).await.expect("stored");
        let on_device = cache.fetch_to_device(&key(100)).await.expect("copied").expect("it was stored");
        for _ in 0..2 {
            fill(&cache).await;
            cache.sync().await.expect("a sound disk");
        }
        assert_eq!(cache.match_prefix(&[key(100)]), [Tier::Device]);
        world.copy.set_failure(1.0);
        let fetching = spawn(&cache, async |cache| fetch(&cache, 100).await);
        a_while().await;
        assert_eq!(world.copy.in_flight(), 1, "in neither other tier: it is copied from the device");
        store(&cache, 100).await.expect("its write follows the copy");
        fetching.await.expect("no panic").expect_err("the copy fails");
        let synced = cache.sync().await;
        assert!(matches!(&synced, Err(Error::Refused { reason }) if reason.starts_with("1 block")), "{synced:?}");
        drop(on_device);
        finish(cache, reactor).await;
    });
}
