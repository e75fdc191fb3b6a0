//! Blocks that are removed, and stored again, while they move.

use std::time::Duration;

use kvhoist::{Error, Tier, WritePolicy, internals::io::OpKind};
use kvhoist_simulation::sim::{self, Fault, FaultRates};

use crate::scene::*;

#[test]
fn a_block_removed_while_its_bad_copy_is_read_is_gone_quietly() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        fill(&cache).await;
        for fault in [Fault::BitFlip, Fault::Error(5)] {
            let n = if fault == Fault::BitFlip { 0 } else { 1 };
            disk.script_next(OpKind::Read, fault);
            cache.prefetch(&[key(n)]).expect("started");
            while disk.in_flight() == 0 {
                tokio::task::yield_now().await;
            }
            assert!(cache.remove(&key(n)).await.expect("removed"), "block {n} was there");
            assert!(!fetch(&cache, n).await.expect("a miss"), "block {n} was removed");
        }
        assert_eq!(cache.stats().quarantined, 0, "nobody knows of a block there any more");
        finish(cache, reactor).await;
    });
}

#[test]
fn a_block_removed_and_stored_anew_while_it_is_written_back_is_still_to_be_written() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config().write_policy(WritePolicy::WriteBack)).await;
        store(&cache, 0).await.expect("stored");
        disk.script_next(OpKind::Write, Fault::Stall);
        let syncing = cache.clone();
        let first = tokio::task::spawn_local(async move { syncing.sync().await });
        tokio::time::sleep(Duration::from_millis(5)).await;
        assert_eq!(disk.stalled(), 1, "the block is being written");
        let removal = spawn_remove(&cache, 0);
        tokio::time::sleep(Duration::from_millis(5)).await;
        store(&cache, 0).await.expect("stored anew");
        // This one joins the write of the block that was removed, and has still to write the new one.
        let syncing = cache.clone();
        let second = tokio::task::spawn_local(async move { syncing.sync().await });
        tokio::time::sleep(Duration::from_millis(5)).await;
        disk.script(OpKind::Write, disk.counts().started[OpKind::Write as usize] + 1, Fault::Stall);
        disk.release();
        removal.await.expect("no panic").expect("removed");
        first.await.expect("no panic").expect("what it was asked to write is gone");
        // The end of the first write is no news of the second block of this key.
        assert_eq!(cache.stats().dirty, 1);
        while !second.is_finished() {
            disk.release();
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        second.await.expect("no panic").expect("synced");
        assert_eq!(cache.stats().dirty, 0);
        tokio::time::sleep(Duration::from_millis(5)).await;
        reactor.settle(DEADLINE).await.expect("in balance");
        assert_eq!(cache.stats().tier(Tier::Disk).resident, 1);
        finish(cache, reactor).await;
    });
}

#[test]
fn a_block_removed_while_it_is_read_does_not_come_back() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        fill(&cache).await;
        disk.script_next(OpKind::Read, Fault::Stall);
        let reader = cache.clone();
        let read = tokio::task::spawn_local(async move { fetch(&reader, 0).await });
        tokio::time::sleep(Duration::from_millis(5)).await;
        assert_eq!(disk.stalled(), 1, "the block is being read");
        assert!(cache.remove(&key(0)).await.expect("removed"), "it was there");
        // Its slot is the reader's for a while yet; its record is gone.
        let (later, later_reactor, _) = open_killed(config(), &disk).await;
        assert!(!fetch(&later, 0).await.expect("served"), "it was removed before the kill");
        assert!(fetch(&later, 1).await.expect("served"), "and nothing else was");
        finish(later, later_reactor).await;
        disk.release();
        drop(read.await.expect("no panic"));
        finish(cache, reactor).await;
    });
}

#[test]
fn a_block_removed_while_it_is_written_does_not_come_back() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        // The payload is written; its record is still on the way.
        disk.script(OpKind::Write, disk.counts().started[OpKind::Write as usize] + 1, Fault::Stall);
        let storer = cache.clone();
        let stored = tokio::task::spawn_local(async move { store(&storer, 0).await });
        tokio::time::sleep(Duration::from_millis(5)).await;
        assert_eq!(disk.stalled(), 1, "the record is being written");
        let removal = spawn_remove(&cache, 0);
        tokio::time::sleep(Duration::from_millis(5)).await;
        assert!(!fetch(&cache, 0).await.expect("served"), "forgotten at once");
        assert!(!removal.is_finished(), "the record may land yet");
        disk.release();
        assert!(removal.await.expect("no panic").expect("removed"), "it was there");
        drop(stored.await.expect("no panic"));
        let (later, later_reactor, _) = open_killed(config(), &disk).await;
        assert!(!fetch(&later, 0).await.expect("served"), "it was removed before the kill");
        finish(later, later_reactor).await;
        finish(cache, reactor).await;
    });
}

#[test]
fn a_store_that_joins_the_write_of_a_removed_block_is_written() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        disk.script_next(OpKind::Write, Fault::Stall);
        let spawn_store = || {
            let cache = cache.clone();
            tokio::task::spawn_local(async move { store(&cache, 0).await })
        };
        let first = spawn_store();
        tokio::time::sleep(Duration::from_millis(5)).await;
        let removal = spawn_remove(&cache, 0);
        tokio::time::sleep(Duration::from_millis(5)).await;
        let second = spawn_store();
        tokio::time::sleep(Duration::from_millis(5)).await;
        // They would all evict the new block, if nobody held it.
        for n in 1..9 {
            store(&cache, n).await.expect("stored");
        }
        disk.release();
        second.await.expect("no panic").expect("acknowledged");
        let (later, later_reactor, _) = open_killed(config(), &disk).await;
        assert!(fetch(&later, 0).await.expect("served"), "the store was acknowledged before the kill");
        finish(later, later_reactor).await;
        drop((first.await.expect("no panic"), removal.await.expect("no panic")));
        finish(cache, reactor).await;
    });
}

#[test]
fn a_store_of_a_block_that_comes_from_the_device_is_written() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config().device_blocks(1)).await;
        store(&cache, 100).await.expect("stored");
        let on_device = cache.fetch_to_device(&key(100)).await.expect("copied").expect("it was stored");
        fill(&cache).await;
        assert_eq!(cache.match_prefix(&[key(100)]), [Tier::Device], "evicted from host and disk");
        // The store has its bytes, and finds the host slot taken by a copy under way.
        let reader = cache.clone();
        let fetched = tokio::task::spawn_local(async move { fetch(&reader, 100).await });
        tokio::time::sleep(Duration::from_micros(500)).await;
        store(&cache, 100).await.expect("acknowledged");
        assert!(fetched.await.expect("no panic").expect("copied back"));
        drop(on_device);
        let (later, later_reactor, _) = open_killed(config(), &disk).await;
        assert!(fetch(&later, 100).await.expect("served"), "the store was acknowledged before the kill");
        finish(later, later_reactor).await;
        finish(cache, reactor).await;
    });
}

#[test]
fn a_write_that_follows_a_movement_joins_the_write_of_the_block_stored_anew() {
    // The second time the write in flight is itself one of a removed block, and the new block's follows it.
    for removals in [1, 2] {
        sim::block_on(async {
            // All that follows the start of a copy from the device happens before it ends, and before a write ends.
            let (cache, reactor, disk) = open_with(config().device_blocks(1), 20, 10).await;
            store(&cache, 100).await.expect("stored");
            let on_device = cache.fetch_to_device(&key(100)).await.expect("copied").expect("it was stored");
            fill(&cache).await;
            assert_eq!(cache.match_prefix(&[key(100)]), [Tier::Device], "evicted from host and disk");
            let spawn_store = || {
                let cache = cache.clone();
                tokio::task::spawn_local(async move { store(&cache, 100).await })
            };
            let reader = cache.clone();
            let fetched = tokio::task::spawn_local(async move { fetch(&reader, 100).await });
            tokio::time::sleep(Duration::from_millis(1)).await;
            let mut stores = vec![spawn_store()];
            let mut removes = Vec::new();
            for _ in 0..removals {
                tokio::time::sleep(Duration::from_millis(1)).await;
                removes.push(spawn_remove(&cache, 100));
                tokio::time::sleep(Duration::from_millis(1)).await;
                stores.push(spawn_store());
            }
            for store in stores {
                store.await.expect("no panic").expect("acknowledged");
            }
            let (later, later_reactor, _) = open_killed(config(), &disk).await;
            assert!(fetch(&later, 100).await.expect("served"), "the stores were acknowledged before the kill");
            finish(later, later_reactor).await;
            for remove in removes {
                assert!(remove.await.expect("no panic").expect("removed"), "it was there");
            }
            fetched.await.expect("no panic").expect("a miss or a hit");
            drop(on_device);
            finish(cache, reactor).await;
        });
    }
}

#[test]
fn a_remove_waits_for_the_write_that_already_carries_it() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        store(&cache, 0).await.expect("a sound disk");
        let storing = cache.clone();
        let storing = tokio::task::spawn_local(async move { store(&storing, 1).await });
        // The payload is on its way; the page of records is about to be, and takes the removal along.
        while disk.in_flight() == 0 {
            tokio::task::yield_now().await;
        }
        assert!(cache.remove(&key(0)).await.expect("removed"), "it was there");
        let (killed, its_reactor, _) = open_killed(config(), &disk).await;
        assert!(!fetch(&killed, 0).await.expect("a miss"), "a removed block is back");
        finish(killed, its_reactor).await;
        storing.await.expect("no panic").expect("stored");
        finish(cache, reactor).await;
    });
}

#[test]
fn a_store_during_the_write_of_a_removed_block_from_a_callers_memory_is_written() {
    sim::block_on(async {
        let config = config().bypass_host(true);
        let (cache, reactor, disk) = open(config.clone()).await;
        let pool = pool(&cache, 1).await;
        let places = pool.places.clone();
        // The payload stalls, and so does the write that clears its record, which was written meanwhile.
        let next = disk.counts().started[OpKind::Write as usize];
        for nth in [next, next + 2] {
            disk.script(OpKind::Write, nth, Fault::Stall);
        }
        let storing = spawn(&cache, async move |cache| cache.store_from(&[key(1)], None, &places).await);
        a_while().await;
        assert_eq!(disk.stalled(), 1, "the payload is being written");
        let removal = spawn_remove(&cache, 1);
        a_while().await;
        disk.release();
        a_while().await;
        assert_eq!(disk.stalled(), 1, "the record is being cleared");
        // The index may give this block the entry id of the removed one.
        let stored = spawn(&cache, async |cache| store(&cache, 1).await);
        a_while().await;
        disk.release();
        stored.await.expect("no panic").expect("a sound disk");
        let (killed, its_reactor, _) = open_killed(config, &disk).await;
        assert!(fetch(&killed, 1).await.expect("served"), "the store was acknowledged before the kill");
        finish(killed, its_reactor).await;
        drop((storing.await.expect("no panic"), removal.await.expect("no panic")));
        cache.unregister(&pool.region).await.expect("its own region");
        finish(cache, reactor).await;
    });
}

#[test]
fn a_clear_leaves_no_block_to_the_next_start_or_says_so() {
    for is_written in [true, false] {
        sim::block_on(async {
            let (cache, reactor, disk) = open(config()).await;
            fill(&cache).await;
            disk.set_rates(FaultRates { read_error: 1.0, ..FaultRates::default() });
            for n in 0..3 {
                fetch(&cache, n).await.expect_err("it cannot be read");
            }
            assert!(cache.stats().disk_retired.is_some(), "three reads failed in a row");
            let (resident, write_error) = (cache.len() as u64, if is_written { 0.0 } else { 1.0 });
            assert!(resident > 4, "more than host memory has");
            disk.set_rates(FaultRates { write_error, ..FaultRates::default() });
            let cleared = cache.clear().await;
            assert!(cache.is_empty());
            if is_written {
                assert_eq!(cleared.expect("the records can be written"), resident);
                let (killed, its_reactor, _) = open_killed(config(), &disk).await;
                assert_eq!(killed.len(), 0, "blocks are back");
                finish(killed, its_reactor).await;
            } else {
                assert!(matches!(&cleared, Err(Error::Io { op: "write", .. })), "{cleared:?}");
                disk.set_rates(FaultRates::default());
                assert_eq!(cache.clear().await.expect("the records can be written"), 0);
                let (killed, its_reactor, _) = open_killed(config(), &disk).await;
                assert_eq!(killed.len(), 0, "blocks are back");
                finish(killed, its_reactor).await;
            }
            finish(cache, reactor).await;
        });
    }
}

#[test]
fn a_clear_forgets_what_was_evicted_before() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        fill(&cache).await;
        // It takes the slot of the coldest block, and leaves that one's record.
        disk.script_next(OpKind::Write, Fault::Error(28));
        store(&cache, 20).await.expect_err("there is no space");
        assert_eq!(cache.clear().await.expect("a sound disk"), 16, "15 on disk, and one in host memory");
        let (killed, its_reactor, _) = open_killed(config(), &disk).await;
        assert_eq!(killed.len(), 0, "blocks are back");
        finish(killed, its_reactor).await;
        finish(cache, reactor).await;
    });
}

/// A fetch begins the movement to host memory, and the promotion to the device that was asked for before it carries it
/// out: with a copy to the device ahead of the verification, during which the block is removed and stored anew.
#[test]
fn a_block_stored_anew_while_it_is_copied_to_the_device_is_copied_again() {
    let mut copied_again = 0;
    for seed in 0..16 {
        sim::block_on(async {
            let config = config().device_blocks(2).device(kvhoist::DeviceKind::Simulated);
            let (cache, reactor, world) = open_seeded(config, 1, 50, seed).await;
            fill(&cache).await;
            let promoted = spawn(&cache, async |cache| cache.fetch_to_device(&key(0)).await);
            let fetched = spawn(&cache, async |cache| cache.fetch(&key(0)).await.map(drop));
            while world.copy.in_flight() == 0 {
                tokio::time::sleep(Duration::from_micros(100)).await;
            }
            assert!(cache.remove(&key(0)).await.expect("removed"), "it was on disk");
            cache.store(&key(0), None, &payload(99)).await.expect("stored anew");
            if let Some(lease) = promoted.await.expect("no panic").expect("served") {
                let bytes = cache.read_device(&lease, Vec::new()).await.expect("leased");
                assert_eq!(bytes, payload(99), "seed {seed}: the bytes of the block that was removed");
                copied_again += 1;
            }
            fetched.await.expect("no panic").expect("served");
            finish(cache, reactor).await;
        });
    }
    assert!(copied_again > 0, "seeds without I/O threads");
}
