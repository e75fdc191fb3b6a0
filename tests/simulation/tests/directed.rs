//! What seeds reach by chance only, made to happen.

mod scene;

use std::{future::Future, rc::Rc, time::Duration};

use kvhoist::{DiskPath, Error, Route, Segment, Tier, WritePolicy, internals::io::OpKind};
use kvhoist_simulation::sim::{self, Fault, FaultRates, Sim, SimOptions, Simulated, World};
use scene::*;

#[test]
fn a_stalled_read_is_a_timeout_and_its_buffer_stays_with_the_disk() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        fill(&cache).await;
        disk.script_next(OpKind::Read, Fault::Stall);
        let (first, took) = elapsed(fetch(&cache, 0)).await;
        assert!(matches!(first, Err(Error::Timeout { .. })) && on_time(took), "{first:?} after {took:?}");
        let (again, took) = elapsed(fetch(&cache, 0)).await;
        assert!(matches!(again, Err(Error::Timeout { .. })), "{again:?}");
        assert_eq!(took, Duration::ZERO, "the movement is known to be overdue");
        // The slot that is being read into is nobody else's: the simulated disk fills it with garbage until the read is
        // done, and these reads would show that.
        for n in [1, 2, 3, 4, 5, 1, 2, 3] {
            assert!(fetch(&cache, n).await.expect("other blocks are served"), "block {n}");
        }
        let stats = cache.stats();
        let host = stats.tier(Tier::Host);
        assert_eq!((disk.in_flight(), host.resident + host.free), (1, 3), "one slot is the disk's");
        assert_eq!(disk.release(), 1);
        tokio::time::sleep(Duration::from_millis(5)).await;
        assert!(fetch(&cache, 0).await.expect("served again"), "what was read late is there");
        finish(cache, reactor).await;
    });
}

#[test]
fn a_stalled_write_is_a_timeout_and_the_block_stays_whole() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        disk.script_next(OpKind::Write, Fault::Stall);
        let (first, took) = elapsed(store(&cache, 0)).await;
        assert!(matches!(first, Err(Error::Timeout { .. })) && on_time(took), "{first:?} after {took:?}");
        // Its slot is pinned: these go through the other three, and the simulated disk panics if its memory changes.
        for n in 1..8 {
            store(&cache, n).await.expect("other writes go on");
        }
        let again = store(&cache, 0).await;
        assert!(matches!(again, Err(Error::Timeout { .. })), "{again:?}");
        assert!(fetch(&cache, 0).await.expect("host memory serves it"), "stored and visible");
        disk.release();
        tokio::time::sleep(Duration::from_millis(5)).await;
        store(&cache, 0).await.expect("it is on disk by now");
        assert_eq!(cache.stats().tier(Tier::Disk).resident, 8);
        finish(cache, reactor).await;
    });
}

#[test]
fn a_stalled_flush_is_a_timeout_for_sync_and_close_waits_for_it() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        store(&cache, 0).await.expect("stored");
        disk.script_next(OpKind::Sync, Fault::Stall);
        let (result, took) = elapsed(cache.sync()).await;
        assert!(matches!(result, Err(Error::Timeout { .. })) && took >= DEADLINE, "{result:?} after {took:?}");
        assert_eq!(disk.in_flight(), 1, "the flush goes on");
        disk.release();
        finish(cache, reactor).await;
    });
}

#[test]
fn when_every_movement_is_stalled_callers_are_told_in_time() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config().movements_max(2)).await;
        fill(&cache).await;
        disk.set_rates(FaultRates { stall: 1.0, ..FaultRates::default() });
        let calls: Vec<_> = (0..8)
            .map(|n| {
                let cache = cache.clone();
                tokio::task::spawn_local(async move { elapsed(fetch(&cache, n)).await })
            })
            .collect();
        for call in calls {
            let (result, took) = call.await.expect("no panic");
            let told = matches!(result, Err(Error::Timeout { .. } | Error::Busy { .. }));
            assert!(told && took < DEADLINE * 3, "{result:?} after {took:?}");
        }
        let (result, took) = elapsed(cache.remove(&key(12))).await;
        assert!(matches!(result, Err(Error::Timeout { .. })) && took < DEADLINE * 2, "{result:?} after {took:?}");
        disk.set_rates(FaultRates::default());
        while disk.in_flight() > 0 {
            disk.release();
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        for n in 0..8 {
            assert!(fetch(&cache, n).await.expect("the disk is back"), "block {n}");
        }
        finish(cache, reactor).await;
    });
}

#[test]
fn failing_writes_make_the_disk_read_only() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        fill(&cache).await;
        disk.set_rates(FaultRates { write_error: 1.0, ..FaultRates::default() });
        for n in 20..23 {
            let result = store(&cache, n).await;
            assert!(matches!(result, Err(Error::Io { op: "write", .. })), "{result:?}");
        }
        let stats = cache.stats();
        let reason = stats.disk_read_only.expect("three writes failed in a row");
        assert!(reason.contains("3 writes of simulated failed in a row"), "{reason}");
        assert_eq!(stats.disk_retired, None, "it can still be read");
        let writes = disk.counts().started[OpKind::Write as usize];
        let result = store(&cache, 23).await;
        assert!(matches!(result, Err(Error::Unavailable { tier: "disk", .. })), "{result:?}");
        assert_eq!(disk.counts().started[OpKind::Write as usize], writes, "it is asked no more");
        assert!(fetch(&cache, 23).await.expect("host memory serves it"), "stored and visible");
        let survivors = (0..16).filter(|n| cache.match_len(&[key(*n)]) == 1).collect::<Vec<_>>();
        assert!(survivors.len() >= 13, "each failed write took one slot at most: {survivors:?}");
        for n in survivors {
            assert!(fetch(&cache, n).await.expect("the disk serves on"), "block {n}");
        }
        finish(cache, reactor).await;
    });
}

#[test]
fn failures_that_are_not_in_a_row_change_nothing() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        for n in 0..12 {
            let fails = n % 3 != 2;
            if fails {
                disk.script_next(OpKind::Write, Fault::Error(5));
            }
            assert_eq!(store(&cache, n).await.is_err(), fails, "block {n}");
        }
        assert_eq!(cache.stats().disk_read_only, None);
        finish(cache, reactor).await;
    });
}

#[test]
fn failing_reads_take_the_disk_out_of_service() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        fill(&cache).await;
        disk.set_rates(FaultRates { read_error: 1.0, ..FaultRates::default() });
        for n in 0..3 {
            let result = fetch(&cache, n).await;
            assert!(matches!(result, Err(Error::Io { op: "read", .. })), "{result:?}");
        }
        let reason = cache.stats().disk_retired.expect("three reads failed in a row");
        assert!(reason.contains("3 reads of simulated failed in a row"), "{reason}");
        let reads = disk.counts().started[OpKind::Read as usize];
        for n in 0..16 {
            let served = cache.match_prefix(&[key(n)]).tiers() == [Tier::Host];
            assert_eq!(fetch(&cache, n).await.expect("no error: a miss"), served, "block {n}");
        }
        assert_eq!(disk.counts().started[OpKind::Read as usize], reads, "it is asked no more");
        finish(cache, reactor).await;
    });
}

#[test]
fn more_bad_blocks_than_may_be_quarantined_take_the_disk_out_of_service() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config().quarantine_max(2)).await;
        fill(&cache).await;
        disk.set_rates(FaultRates { bit_flip: 1.0, ..FaultRates::default() });
        for n in 0..3 {
            assert!(!fetch(&cache, n).await.expect("a miss"), "block {n} does not match its checksum");
        }
        let stats = cache.stats();
        assert_eq!((stats.quarantined, stats.checksum_failures), (3, 3));
        assert!(stats.disk_retired.expect("out of service").contains("quarantine_max = 2"));
        finish(cache, reactor).await;
    });
}

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
fn a_block_published_without_a_pin_wakes_who_waits_for_its_slot() {
    sim::block_on(async {
        for write_policy in [WritePolicy::WriteThroughSelective, WritePolicy::WriteBack] {
            let (cache, reactor, _disk) = open(config().host_blocks(1).write_policy(write_policy)).await;
            let reservation = cache.reserve().await.expect("the only slot");
            let waiter = tokio::task::spawn_local({
                let cache = cache.clone();
                async move { elapsed(store(&cache, 1)).await }
            });
            tokio::task::yield_now().await;
            let mut reservation = reservation;
            reservation.copy_from_slice(&payload(0));
            reservation.commit(&key(0), None).await.expect("visible");
            let (result, took) = waiter.await.expect("no panic");
            result.expect("the slot is free to take");
            assert!(took < DEADLINE / 4, "{write_policy:?}: woken after {took:?}, by the watch for deadlines");
            finish(cache, reactor).await;
        }
    });
}

#[test]
fn an_evicted_leaf_uncovers_its_parent_for_the_next_who_waits() {
    sim::block_on(async {
        let write_policy = WritePolicy::WriteThroughSelective;
        let (cache, reactor, _disk) = open(config().host_blocks(2).write_policy(write_policy)).await;
        cache.store(&key(0), None, &payload(0)).await.expect("the parent");
        cache.store(&key(1), Some(&key(0)), &payload(1)).await.expect("its child");
        let leaf = cache.fetch(&key(1)).await.expect("found").expect("found");
        let waiters: Vec<_> = (0..2)
            .map(|_| {
                let cache = cache.clone();
                tokio::task::spawn_local(async move { elapsed(cache.reserve()).await })
            })
            .collect();
        tokio::task::yield_now().await;
        drop(leaf);
        let mut held = Vec::new();
        for waiter in waiters {
            let (reserved, took) = waiter.await.expect("no panic");
            held.push(reserved.expect("both slots can be had"));
            assert!(took < DEADLINE / 4, "woken after {took:?}, by the watch for deadlines");
        }
        drop(held);
        finish(cache, reactor).await;
    });
}

#[test]
fn a_load_does_not_wait_for_a_promotion_that_waits_for_it() {
    sim::block_on(async {
        let (cache, reactor, _disk) = open(config().movements_max(1)).await;
        fill(&cache).await;
        let mut memory = vec![0u8; BLOCK_BYTES];
        // SAFETY: the memory outlives the cache, and nobody touches it before the load has ended.
        let lent = unsafe { kvhoist::Memory::host(memory.as_mut_ptr(), BLOCK_BYTES) };
        let region = kvhoist::block_on(cache.register(lent, Default::default())).expect("registered");
        let segments = vec![vec![kvhoist::Segment { ptr: memory.as_mut_ptr(), len: BLOCK_BYTES }]];
        // Both are polled before the reactor is: the load is first in the channel, the promotion has begun.
        let (keys, wanted) = ([key(0)], key(0));
        let load = cache.load_into(&keys, &segments);
        let (loaded, fetched) = both(load, cache.fetch(&wanted)).await;
        assert!(matches!(loaded.expect("asked")[..], [Ok(true)]), "loaded");
        assert!(fetched.expect("no timeout").is_some());
        cache.unregister(&region).await.expect("its own region");
        assert_eq!(memory, payload(0));
        finish(cache, reactor).await;
    });
}

/// Both results, polling the first one first.
async fn both<A: Future, B: Future>(a: A, b: B) -> (A::Output, B::Output) {
    let (mut a, mut b) = (Box::pin(a), Box::pin(b));
    let (mut first, mut second) = (None, None);
    std::future::poll_fn(|context| {
        use std::task::Poll;
        if first.is_none()
            && let Poll::Ready(output) = a.as_mut().poll(context)
        {
            first = Some(output);
        }
        if second.is_none()
            && let Poll::Ready(output) = b.as_mut().poll(context)
        {
            second = Some(output);
        }
        if first.is_some() && second.is_some() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    (first.expect("ready"), second.expect("ready"))
}

#[test]
fn what_a_write_that_was_cut_off_held_is_given_back() {
    let world = Rc::new(World::new(1, sim::blank_files(&config())));
    // The reactor's tasks are dropped while a payload, a record and a checksum are under way: no panic under the lock,
    // which would end the process here.
    for polls in 0..40 {
        let cache = sim::block_on(async {
            let Simulated { cache, reactor } = sim::open(config(), &world).await.expect("open");
            let store = tokio::task::spawn_local({
                let cache = cache.clone();
                async move { drop(store(&cache, 50 + polls).await) }
            });
            for _ in 0..polls {
                tokio::task::yield_now().await;
            }
            drop((store, reactor));
            cache
        });
        kvhoist::internals::validate(&cache).expect("the books are in order");
    }
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
fn without_a_disk_no_block_is_selected_for_it() {
    sim::block_on(async {
        let settings = config().host_blocks(1).disks(Vec::new()).selective_hits(1);
        let (cache, reactor, _) = open(settings.write_policy(WritePolicy::WriteThroughSelective)).await;
        store(&cache, 0).await.expect("stored");
        assert!(fetch(&cache, 0).await.expect("a hit"), "in host memory");
        // Its slot is needed, and nobody holds it: no write to a disk that there is none of.
        let (stored, took) = elapsed(store(&cache, 1)).await;
        stored.expect("the only slot is free to be taken");
        assert_eq!(took, Duration::ZERO);
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
fn a_remove_is_told_when_the_write_that_it_waits_for_is_overdue() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        disk.script_next(OpKind::Write, Fault::Stall);
        let (stored, _) = elapsed(store(&cache, 0)).await;
        assert!(matches!(stored, Err(Error::Timeout { .. })), "{stored:?}");
        let (removed, took) = elapsed(cache.remove(&key(0))).await;
        assert!(matches!(removed, Err(Error::Timeout { .. })) && took == Duration::ZERO, "{removed:?} after {took:?}");
        assert!(!fetch(&cache, 0).await.expect("served"), "forgotten all the same");
        disk.release();
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
        assert_eq!(cache.match_prefix(&[key(100)]).tiers(), [Tier::Device], "evicted from host and disk");
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
            assert_eq!(cache.match_prefix(&[key(100)]).tiers(), [Tier::Device], "evicted from host and disk");
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
fn the_end_of_a_cache_flushes_what_was_overdue() {
    sim::block_on(async {
        let settings = config().write_policy(WritePolicy::WriteBack);
        let (cache, reactor, disk) = open(settings.clone()).await;
        for n in 0..3 {
            store(&cache, n).await.expect("stored");
        }
        disk.script_next(OpKind::Write, Fault::Stall);
        drop(cache);
        tokio::time::sleep(DEADLINE * 3).await;
        assert_eq!(disk.stalled(), 1, "a block is being written, and nobody waits for it any longer");
        disk.release();
        reactor.ended().await;
        let world = World::new(3, disk.crash());
        let Simulated { cache, reactor } = sim::open(settings, &world).await.expect("a store that was closed opens");
        for n in 0..3 {
            assert!(fetch(&cache, n).await.expect("served"), "block {n} was stored before the end");
        }
        finish(cache, reactor).await;
    });
}

#[test]
fn a_disk_tier_without_a_good_slot_is_out_of_service() {
    sim::block_on(async {
        let disks = vec![DiskPath::with_blocks("simulated", 2)];
        let (cache, reactor, disk) = open(config().disks(disks).host_blocks(1)).await;
        for n in 0..2 {
            store(&cache, n).await.expect("stored");
        }
        disk.set_rates(FaultRates { read_error: 1.0, ..FaultRates::default() });
        for n in 0..2 {
            let result = fetch(&cache, n).await;
            assert!(matches!(result, Err(Error::Io { op: "read", .. })), "{result:?}");
        }
        let reason = cache.stats().disk_retired;
        assert!(reason.as_deref().is_some_and(|reason| reason.contains("all of its 2 slots")), "{reason:?}");
        let (stored, took) = elapsed(store(&cache, 4)).await;
        assert!(matches!(stored, Err(Error::Unavailable { .. })) && took < DEADLINE, "{stored:?} after {took:?}");
        finish(cache, reactor).await;
    });
}

#[test]
fn a_wrong_block_is_never_on_the_device() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config().device_blocks(2)).await;
        fill(&cache).await;
        disk.set_rates(FaultRates { bit_flip: 1.0, ..FaultRates::default() });
        for n in 0..3 {
            let found = cache.fetch_to_device(&key(n)).await.expect("a miss");
            assert!(found.is_none(), "block {n} does not match its checksum");
        }
        disk.set_rates(FaultRates::default());
        let stats = cache.stats();
        let device = stats.tier(Tier::Device);
        assert_eq!((device.resident, device.free), (0, 2), "what was copied there is nobody's");
        for n in 3..7 {
            let lease = cache.fetch_to_device(&key(n)).await.expect("served").expect("on disk");
            assert_eq!(cache.read_device(&lease, Vec::new()).await.expect("read back"), payload(n));
        }
        finish(cache, reactor).await;
    });
}

#[test]
fn memory_of_a_load_to_the_device_is_the_callers_again_after_a_timeout() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config().device_blocks(2)).await;
        fill(&cache).await;
        let mut memory = vec![0xee; BLOCK_BYTES];
        // SAFETY: the memory outlives the cache, and nobody touches it before the load has ended.
        let lent = unsafe { kvhoist::Memory::device(memory.as_mut_ptr(), BLOCK_BYTES) };
        let region = kvhoist::block_on(cache.register(lent, Default::default())).expect("registered");
        let segments = vec![vec![kvhoist::Segment { ptr: memory.as_mut_ptr(), len: BLOCK_BYTES }]];
        disk.script_next(OpKind::Read, Fault::Stall);
        let loaded = cache.load_into(&[key(0)], &segments).await.expect("asked");
        assert!(matches!(loaded[..], [Err(Error::Timeout { .. })]), "{loaded:?}");
        disk.release();
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(fetch(&cache, 0).await.expect("served"), "the read has landed");
        assert!(memory == vec![0xee; BLOCK_BYTES], "somebody wrote there after the answer");
        let loaded = cache.load_into(&[key(1)], &segments).await.expect("asked");
        assert!(matches!(loaded[..], [Ok(true)]), "{loaded:?}");
        cache.unregister(&region).await.expect("its own region");
        assert_eq!(memory, payload(1));
        finish(cache, reactor).await;
    });
}

#[test]
fn memory_goes_straight_where_the_disk_allows_and_through_a_slot_where_not() {
    for (rule, shift, straight) in
        [(4, 4, true), (64, 64, true), (512, 64, false), (512, 1536, true), (4096, 512, false)]
    {
        sim::block_on(async {
            let mut memory = vec![0; 8 * BLOCK_BYTES];
            let config = config().bypass_host(true);
            let mut world = World::new(1, Vec::new());
            let options = SimOptions { memory_align_bytes: rule, ..SimOptions::default() };
            world.storage = Sim::new(1, sim::blank_files(&config), options);
            let Simulated { cache, reactor } = sim::open(config, &world).await.expect("blank files open");
            assert_eq!(cache.stats().memory_align_bytes, rule);
            let start = memory.as_mut_ptr().wrapping_add(memory.as_ptr().align_offset(4096) + shift);
            // SAFETY: the memory outlives the cache, and is looked at where no call is under way.
            let lent = unsafe { kvhoist::Memory::host(start, 6 * BLOCK_BYTES) };
            let region = kvhoist::block_on(cache.register(lent, Default::default())).expect("registered");
            let places: Vec<_> =
                (0..6).map(|n| vec![Segment { ptr: start.wrapping_add(n * BLOCK_BYTES), len: BLOCK_BYTES }]).collect();
            let keys: Vec<_> = (0..6).map(key).collect();
            // SAFETY: in the memory, and no call is under way.
            let bytes = || unsafe { std::slice::from_raw_parts_mut(start, 6 * BLOCK_BYTES) };
            let want: Vec<u8> = (0..6).flat_map(payload).collect();
            bytes().copy_from_slice(&want);
            let stored = cache.store_from(&keys, None, &places).await.expect("asked");
            assert!(stored.iter().all(|result| matches!(result, Ok(true))), "{stored:?}");
            bytes().fill(0);
            let loaded = cache.load_into(&keys, &places).await.expect("asked");
            assert!(loaded.iter().all(|result| matches!(result, Ok(true))), "{loaded:?}");
            assert!(*bytes() == *want, "the right bytes");
            let stats = cache.stats();
            let blocks = |route| stats.route(route).blocks;
            assert_eq!(
                [blocks(Route::RegionToDisk), blocks(Route::DiskToRegion)],
                [if straight { 6 } else { 0 }; 2],
                "memory at {shift} of a page, a disk that wants {rule}"
            );
            assert_eq!(world.storage.counts().failed, [0; 3], "nothing was tried that could not be");
            cache.unregister(&region).await.expect("its own region");
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
