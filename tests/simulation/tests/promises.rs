//! What store, sync, remove and close promise where writes fail or are under way.

mod scene;

use std::{future::Future, time::Duration};

use kvhoist::{Cache, Config, Error, Route, Segment, Tier, WritePolicy, internals::io::OpKind};
use kvhoist_simulation::sim::{self, Fault, FaultRates, Reactor, Sim, Simulated, World};
use scene::*;
use tokio::task::{JoinHandle, spawn_local};

fn write_back() -> Config {
    config().write_policy(WritePolicy::WriteBack)
}

/// Runs a call on a handle of its own.
fn spawn<T: 'static, F: Future<Output = T> + 'static>(
    cache: &Cache,
    call: impl FnOnce(Cache) -> F + 'static,
) -> JoinHandle<T> {
    spawn_local(call(cache.clone()))
}

/// Lets everything run that the disk does not hold up.
async fn a_while() {
    tokio::time::sleep(Duration::from_millis(10)).await;
}

fn started(disk: &Sim, kind: OpKind) -> u64 {
    disk.counts().started[kind as usize]
}

/// What the next start finds, where the power fails now.
async fn open_after_power_cut(config: Config, disk: &Sim) -> (Cache, Reactor) {
    let world = World::new(3, disk.crash());
    let Simulated { cache, reactor } = sim::open(config, &world).await.expect("a store opens after a power cut");
    (cache, reactor)
}

/// How often the block is there after a power cut, of so many.
async fn found_after_power_cuts(config: &Config, disk: &Sim, n: u8) -> usize {
    let mut found = 0;
    for _ in 0..POWER_CUTS {
        let (later, reactor) = open_after_power_cut(config.clone(), disk).await;
        found += usize::from(fetch(&later, n).await.expect("served"));
        finish(later, reactor).await;
    }
    found
}

const POWER_CUTS: usize = 12;

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

/// What a sync says when `ask` has had a block stored from registered memory, and the disk has refused it.
async fn sync_after_refused_store<F: Future<Output = ()>>(
    ask: impl FnOnce(Cache, Vec<Vec<Segment>>) -> F,
) -> Result<(), Error> {
    let mut memory = vec![1u8; BLOCK_BYTES];
    let (cache, reactor, disk) = open(config()).await;
    // SAFETY: the memory outlives the cache, and nobody writes to it.
    let lent = unsafe { kvhoist::Memory::host(memory.as_mut_ptr(), BLOCK_BYTES) };
    let region = kvhoist::block_on(cache.register(lent, Default::default())).expect("registered");
    disk.script_next(OpKind::Write, Fault::Error(5));
    ask(cache.clone(), vec![vec![Segment { ptr: memory.as_mut_ptr(), len: BLOCK_BYTES }]]).await;
    assert_eq!(cache.stats().writes_refused, 1);
    let synced = cache.sync().await;
    cache.unregister(&region).await.expect("its own region");
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
            assert!(queue.drain()[0].results[0].is_err(), "the disk did not take it");
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
        let mut memory = payload(0);
        let (cache, reactor, _disk) = open_with_a_refusal().await;
        let start = memory.as_mut_ptr();
        // SAFETY: the memory outlives the cache, and nobody writes to it.
        let lent = unsafe { kvhoist::Memory::host(start, BLOCK_BYTES) };
        let region = kvhoist::block_on(cache.register(lent, Default::default())).expect("registered");
        let places = vec![vec![Segment { ptr: start, len: BLOCK_BYTES }]];
        // The reactor sees both at once, and the close first.
        let storing = spawn(&cache, async move |cache| cache.store_from(&[key(0)], None, &places).await);
        let closing = spawn(&cache, async |cache| cache.close().await);
        let stored = storing.await.expect("no panic").expect("asked");
        assert!(matches!(stored[..], [Err(Error::Closed)]), "{stored:?}");
        let closed = closing.await.expect("no panic");
        assert!(matches!(closed, Err(Error::Refused { .. })), "block 0 is on no disk: {closed:?}");
        drop(region);
        reactor.ended().await;
    });
}

/// What a sync says after the disk refused a block that went straight to it, and whose store was dropped.
async fn sync_after_refused_straight_store(removes: fn(&Sim) -> bool) -> Result<(), Error> {
    let mut memory = vec![1u8; 2 * BLOCK_BYTES];
    let (cache, reactor, disk) = open(config().bypass_host(true)).await;
    let start = memory.as_mut_ptr().wrapping_add(memory.as_ptr().align_offset(4096));
    // SAFETY: the memory outlives the cache, and nobody writes to it.
    let lent = unsafe { kvhoist::Memory::host(start, BLOCK_BYTES) };
    let region = kvhoist::block_on(cache.register(lent, Default::default())).expect("registered");
    disk.script_next(OpKind::Write, Fault::StalledError(5));
    let places = vec![vec![Segment { ptr: start, len: BLOCK_BYTES }]];
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
    cache.unregister(&region).await.expect("its own region");
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
fn after_a_flush_that_failed_no_sync_answers_for_what_it_was_to_cover() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        store(&cache, 1).await.expect("a sound disk");
        disk.script_next(OpKind::Sync, Fault::Error(5));
        let first = cache.sync().await;
        assert!(matches!(first, Err(Error::Io { op: "sync", .. })), "{first:?}");
        let found = found_after_power_cuts(&config(), &disk, 1).await;
        let second = cache.sync().await;
        assert!(found < POWER_CUTS && second.is_err(), "{second:?}, and block 1 is there {found} times");
        let closed = cache.close().await;
        assert!(closed.is_err(), "{closed:?}");
        reactor.ended().await;
        assert!(found_after_power_cuts(&config(), &disk, 1).await < POWER_CUTS, "the kernel does not try again");
    });
}

#[test]
fn a_flush_that_fails_after_its_deadline_is_known_to_later_syncs() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        store(&cache, 0).await.expect("a sound disk");
        disk.script_next(OpKind::Sync, Fault::StalledError(5));
        let first = cache.sync().await;
        assert!(matches!(first, Err(Error::Timeout { .. })), "{first:?}");
        disk.release();
        a_while().await;
        let second = cache.sync().await;
        assert!(matches!(second, Err(Error::Io { op: "sync", .. })), "{second:?}");
        finish(cache, reactor).await;
    });
}

#[test]
fn syncs_share_a_flush_that_began_after_all_of_them() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        store(&cache, 1).await.expect("a sound disk");
        let before = started(&disk, OpKind::Sync);
        disk.script_next(OpKind::Sync, Fault::Stall);
        let first = spawn(&cache, async |cache| cache.sync().await);
        a_while().await;
        store(&cache, 2).await.expect("a sound disk");
        let later: Vec<_> = (0..8).map(|_| spawn(&cache, async |cache| cache.sync().await)).collect();
        a_while().await;
        disk.release();
        first.await.expect("no panic").expect("synced");
        for sync in later {
            sync.await.expect("no panic").expect("synced");
        }
        assert_eq!(started(&disk, OpKind::Sync) - before, 2, "one under way, and one for all who came meanwhile");
        assert_eq!(found_after_power_cuts(&config(), &disk, 2).await, POWER_CUTS, "the first flush does not cover it");
        finish(cache, reactor).await;
    });
}

#[test]
fn a_sync_waits_for_writes_under_way() {
    sim::block_on(async {
        for dropped in [false, true] {
            let (cache, reactor, disk) = open(config()).await;
            disk.script_next(OpKind::Write, Fault::Stall);
            let storing = spawn(&cache, async |cache| store(&cache, 16).await);
            a_while().await;
            assert_eq!(disk.stalled(), 1, "the block is being written");
            let flushes = started(&disk, OpKind::Sync);
            if dropped {
                storing.abort();
            }
            let syncing = spawn(&cache, async |cache| cache.sync().await);
            a_while().await;
            assert_eq!(started(&disk, OpKind::Sync), flushes, "there is nothing to flush before the write has ended");
            disk.release();
            syncing.await.expect("no panic").expect("synced");
            assert_eq!(found_after_power_cuts(&config(), &disk, 16).await, POWER_CUTS, "it was stored before the sync");
            finish(cache, reactor).await;
        }
    });
}

#[test]
fn a_dropped_store_that_waited_for_the_write_of_a_removed_block_is_written() {
    sim::block_on(async {
        for syncs in [false, true] {
            let (cache, reactor, disk) = open(config()).await;
            disk.script_next(OpKind::Write, Fault::Stall);
            let first = spawn(&cache, async |cache| store(&cache, 16).await);
            a_while().await;
            let removal = spawn_remove(&cache, 16);
            a_while().await;
            let second = spawn(&cache, async |cache| store(&cache, 16).await);
            a_while().await;
            second.abort();
            let syncing = syncs.then(|| spawn(&cache, async |cache| cache.sync().await));
            // They would all evict the new block, if nothing held it.
            for n in 1..9 {
                store(&cache, n).await.expect("stored");
            }
            disk.release();
            drop((first.await.expect("no panic"), removal.await.expect("no panic")));
            if let Some(syncing) = syncing {
                syncing.await.expect("no panic").expect("synced");
                assert_eq!(found_after_power_cuts(&config(), &disk, 16).await, POWER_CUTS, "it was synced");
            }
            reactor.settle(DEADLINE).await.expect("balanced");
            let (killed, its_reactor, _) = open_killed(config(), &disk).await;
            assert!(fetch(&killed, 16).await.expect("served"), "its write goes on");
            finish(killed, its_reactor).await;
            finish(cache, reactor).await;
        }
    });
}

#[test]
fn a_store_does_not_answer_for_the_write_of_a_removed_block() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        disk.script_next(OpKind::Write, Fault::StalledError(5));
        let first = spawn(&cache, async |cache| store(&cache, 16).await);
        a_while().await;
        let removal = spawn_remove(&cache, 16);
        a_while().await;
        let second = spawn(&cache, async |cache| store(&cache, 16).await);
        a_while().await;
        disk.release();
        second.await.expect("no panic").expect("its own write is sound");
        assert!(removal.await.expect("no panic").expect("no record names it"), "it was there");
        first.await.expect("no panic").expect_err("its write failed");
        cache.sync().await.expect("nobody misses the block that was removed");
        finish(cache, reactor).await;
    });
}

/// A block that only the device has, and its host slot is being filled from there when it is stored.
async fn stored_while_it_comes_from_the_device(config: Config, dropped: bool) {
    let (cache, reactor, disk) = open(config.clone().device_blocks(1)).await;
    store(&cache, 100).await.expect("stored");
    let on_device = cache.fetch_to_device(&key(100)).await.expect("copied").expect("it was stored");
    fill(&cache).await;
    cache.sync().await.expect("a sound disk");
    fill(&cache).await;
    assert_eq!(cache.match_prefix(&[key(100)]).tiers(), [Tier::Device], "evicted from host and disk");
    let fetched = spawn(&cache, async |cache| fetch(&cache, 100).await);
    tokio::time::sleep(Duration::from_micros(500)).await;
    let mut stored = spawn(&cache, async |cache| store(&cache, 100).await);
    if dropped {
        tokio::task::yield_now().await;
        stored.abort();
        assert!((&mut stored).await.is_err(), "it was still under way");
    } else {
        stored.await.expect("no panic").expect("stored");
    }
    cache.sync().await.expect("synced");
    assert!(fetched.await.expect("no panic").expect("copied back"));
    drop(on_device);
    assert_eq!(found_after_power_cuts(&config, &disk, 100).await, POWER_CUTS, "it was stored before the sync");
    finish(cache, reactor).await;
}

#[test]
fn a_block_that_comes_from_the_device_as_it_is_stored_is_written_under_every_policy() {
    sim::block_on(async {
        stored_while_it_comes_from_the_device(config(), false).await;
        stored_while_it_comes_from_the_device(config(), true).await;
        stored_while_it_comes_from_the_device(write_back(), false).await;
    });
}

#[test]
fn every_close_waits_for_the_end_and_has_the_same_result() {
    sim::block_on(async {
        for fault in [Fault::Stall, Fault::StalledError(5)] {
            let (cache, reactor, disk) = open(write_back()).await;
            store(&cache, 0).await.expect("visible");
            disk.script_next(OpKind::Write, fault);
            let closing: Vec<_> = (0..3).map(|_| spawn(&cache, async |cache| cache.close().await)).collect();
            a_while().await;
            assert_eq!(disk.stalled(), 1, "the block is being written");
            assert!(closing.iter().all(|close| !close.is_finished()), "a close has ended, and the cache has not");
            disk.release();
            for close in closing {
                let result = close.await.expect("no panic");
                assert!(reactor.is_ended() && result.is_ok() == (fault == Fault::Stall), "{fault:?}: {result:?}");
            }
            assert_eq!(cache.close().await.is_ok(), fault == Fault::Stall, "a later close has the result too");
        }
    });
}

#[test]
fn a_dropped_close_goes_on_although_the_queue_of_the_reactor_was_full() {
    sim::block_on(async {
        let one_at_a_time = config().movements_max(1);
        let (cache, reactor, disk) = open(one_at_a_time).await;
        fill(&cache).await;
        disk.script_next(OpKind::Read, Fault::Stall);
        let fetching: Vec<_> = (0..3).map(|n| spawn(&cache, async move |cache| fetch(&cache, n).await)).collect();
        a_while().await;
        assert_eq!(disk.stalled(), 1, "one is read, one is queued, and one waits to be");
        let closing = spawn(&cache, async |cache| cache.close().await);
        a_while().await;
        closing.abort();
        disk.release();
        for fetch in fetching {
            drop(fetch.await.expect("no panic"));
        }
        a_while().await;
        assert!(reactor.is_ended(), "the close was given up with its caller");
        assert!(matches!(fetch(&cache, 0).await, Err(Error::Closed)));
        cache.close().await.expect("a sound disk");
    });
}

#[test]
fn a_block_removed_as_its_slot_is_given_to_another_is_in_no_record() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        fill(&cache).await;
        // Neither the new block nor the page of records that says so is on the medium yet.
        let next = started(&disk, OpKind::Write);
        (next..next + 2).for_each(|nth| disk.script(OpKind::Write, nth, Fault::Stall));
        let storing = spawn(&cache, async |cache| store(&cache, 20).await);
        a_while().await;
        assert_eq!(disk.stalled(), 2, "the block and its record are being written");
        let evicted = (0..16).find(|n| cache.match_len(&[key(*n)]) == 0).expect("the disk was full");
        let removal = spawn_remove(&cache, evicted);
        a_while().await;
        let (killed, its_reactor, _) = open_killed(config(), &disk).await;
        let is_back = fetch(&killed, evicted).await.expect("served");
        assert!(is_back && !removal.is_finished(), "found: {is_back}, removed: {}", removal.is_finished());
        finish(killed, its_reactor).await;
        disk.release();
        assert!(!removal.await.expect("no panic").expect("removed"), "it was resident no longer");
        let (killed, its_reactor, _) = open_killed(config(), &disk).await;
        assert!(!fetch(&killed, evicted).await.expect("served"), "a removed block is back");
        finish(killed, its_reactor).await;
        storing.await.expect("no panic").expect("stored");
        finish(cache, reactor).await;
    });
}

#[test]
fn a_durable_removal_survives_power_cuts() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        fill(&cache).await;
        cache.sync().await.expect("a sound disk");
        assert!(cache.remove(&key(1)).await.expect("removed"), "it was there");
        assert!(found_after_power_cuts(&config(), &disk, 1).await > 0, "a flush is what makes the difference");
        assert!(!cache.remove_durably(&key(1)).await.expect("removed"), "it is gone");
        assert!(cache.remove_durably(&key(2)).await.expect("removed"), "it was there");
        for n in [1, 2] {
            assert_eq!(found_after_power_cuts(&config(), &disk, n).await, 0, "block {n}");
        }
        finish(cache, reactor).await;
    });
}

#[test]
fn a_block_removed_while_it_goes_straight_to_disk_does_not_come_back() {
    sim::block_on(async {
        let mut memory = vec![1u8; 3 * BLOCK_BYTES];
        let config = config().bypass_host(true);
        let (cache, reactor, disk) = open(config.clone()).await;
        let start = memory.as_mut_ptr().wrapping_add(memory.as_ptr().align_offset(4096));
        // SAFETY: the memory outlives the cache, and nobody writes to it.
        let lent = unsafe { kvhoist::Memory::host(start, BLOCK_BYTES) };
        let region = kvhoist::block_on(cache.register(lent, Default::default())).expect("registered");
        disk.script_next(OpKind::Write, Fault::Stall);
        let places = vec![vec![Segment { ptr: start, len: BLOCK_BYTES }]];
        let storing = spawn(&cache, async move |cache| cache.store_from(&[key(1)], None, &places).await);
        a_while().await;
        assert_eq!(disk.stalled(), 1, "the block is being written");
        let removal = spawn_remove(&cache, 1);
        a_while().await;
        disk.release();
        removal.await.expect("no panic").expect("removed");
        assert!(!fetch(&cache, 1).await.expect("served"), "it was removed");
        let (killed, its_reactor, _) = open_killed(config, &disk).await;
        assert!(!fetch(&killed, 1).await.expect("served"), "a removed block is back");
        finish(killed, its_reactor).await;
        drop(storing.await.expect("no panic"));
        assert_eq!(cache.stats().route(Route::RegionToDisk).blocks, 0, "it went straight, and not in");
        cache.unregister(&region).await.expect("its own region");
        finish(cache, reactor).await;
    });
}

#[test]
fn a_removal_fails_with_the_records_of_its_own_block_only() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        store(&cache, 1).await.expect("a sound disk");
        disk.set_rates(FaultRates { no_space: 1.0, ..FaultRates::default() });
        let own = cache.remove(&key(1)).await;
        assert!(matches!(own, Err(Error::Io { op: "write", .. })), "{own:?}");
        assert!(!cache.remove(&key(2)).await.expect("no record names it"), "nobody ever stored it");
        let own = cache.remove(&key(1)).await;
        assert!(matches!(own, Err(Error::Io { op: "write", .. })), "still there: {own:?}");
        disk.set_rates(FaultRates::default());
        assert!(!cache.remove(&key(1)).await.expect("cleared by now"), "it is gone");
        finish(cache, reactor).await;
    });
}

#[test]
fn failing_writes_of_records_alone_make_the_disk_read_only() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        for n in 0..3 {
            // The block is written, its record is not.
            disk.script(OpKind::Write, started(&disk, OpKind::Write) + 1, Fault::Error(5));
            store(&cache, n).await.expect_err("its record is not on disk");
        }
        assert!(cache.stats().disk_read_only.is_some(), "three writes of records failed in a row");
        finish(cache, reactor).await;
    });
}

#[test]
fn a_closed_cache_hands_nothing_out() {
    sim::block_on(async {
        let (cache, reactor, _disk) = open(config()).await;
        store(&cache, 1).await.expect("a sound disk");
        let lease = cache.fetch(&key(1)).await.expect("served").expect("resident");
        let waiting: Vec<_> = (0..4).map(|_| spawn(&cache, async |cache| cache.reserve().await.err())).collect();
        cache.close().await.expect("close");
        for waiter in waiting {
            drop(waiter.await.expect("no panic"));
        }
        assert!(matches!(cache.reserve().await, Err(Error::Closed)), "a reservation that nobody could commit");
        assert!(matches!(cache.prefetch(&[key(1)]), Err(Error::Closed)), "nothing can be brought any more");
        assert!(matches!(cache.prefetch(&[]), Err(Error::Closed)), "nor can nothing");
        assert_eq!((cache.match_len(&[key(1)]), cache.match_prefix(&[key(1)]).len()), (0, 0), "nothing can be fetched");
        assert!(matches!(cache.remove(&key(1)).await, Err(Error::Closed)));
        assert!(matches!(cache.remove_durably(&key(1)).await, Err(Error::Closed)));
        assert!(matches!(cache.sync().await, Err(Error::Closed)));
        assert_eq!(*lease, payload(1), "a lease outlives the cache");
        drop(lease);
        reactor.ended().await;
    });
}
