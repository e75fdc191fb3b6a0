//! What store, sync, remove and close promise while writes fail or are in flight.

mod scene;

use std::time::Duration;

use kvhoist::{Config, Error, Route, Segment, Tier, internals::io::OpKind};
use kvhoist_simulation::sim::{self, Fault, FaultRates, Sim};
use scene::*;

fn started(disk: &Sim, kind: OpKind) -> u64 {
    disk.counts().started[kind as usize]
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
fn a_flush_that_did_not_begin_is_repeated() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        store(&cache, 1).await.expect("a sound disk");
        let flushes = started(&disk, OpKind::Sync);
        (flushes..flushes + 2).for_each(|nth| disk.script(OpKind::Sync, nth, Fault::Error(libc::EAGAIN)));
        cache.sync().await.expect("it says nothing of the disk");
        assert_eq!(started(&disk, OpKind::Sync), flushes + 3);
        assert_eq!(found_after_power_cuts(&config(), &disk, 1).await, POWER_CUTS);
        cache.close().await.expect("flushed");
        reactor.ended().await;
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
    assert_eq!(cache.match_prefix(&[key(100)]), [Tier::Device], "evicted from host and disk");
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
        let region = kvhoist::block_on(cache.register(lent)).expect("registered");
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
        assert_eq!(cache.stats().route_blocks(Route::RegionToDisk), 0, "it went straight, and not in");
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
