//! Operations that stall: callers get a timeout, and memory stays with the disk.

use std::{future::Future, time::Duration};

use kvhoist::{DiskPath, Error, Tier, WritePolicy, internals::io::OpKind};
use kvhoist_simulation::sim::{self, Fault, FaultRates, Simulated, World};

use crate::scene::*;

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
fn a_prefetch_passes_over_a_block_whose_read_is_overdue() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        fill(&cache).await;
        disk.script_next(OpKind::Read, Fault::Stall);
        let stalled = fetch(&cache, 0).await;
        assert!(matches!(stalled, Err(Error::Timeout { .. })), "{stalled:?}");
        assert_eq!(cache.prefetch(&[key(0), key(1), key(2)]).expect("open"), 2, "the others are brought");
        a_while().await;
        let stats = cache.stats();
        assert_eq!(disk.in_flight(), 1, "they were read");
        for n in [1, 2] {
            assert!(fetch(&cache, n).await.expect("served"), "block {n}");
        }
        assert_eq!(cache.stats().tier(Tier::Host).hits, stats.tier(Tier::Host).hits + 2);
        disk.release();
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
fn a_call_that_waits_for_a_disk_that_stands_still_is_a_timeout() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config().bypass_host(true).write_bytes_in_flight_max(1)).await;
        let pool = pool(&cache, 1).await;
        disk.script_next(OpKind::Write, Fault::Stall);
        let stalled = store(&cache, 0).await;
        assert!(matches!(stalled, Err(Error::Timeout { .. })), "{stalled:?}");
        let keys = [key(1)];
        let call = cache.store_from(&keys, None, &pool.places);
        let ended = tokio::time::timeout(DEADLINE * 3 / 2, call).await.expect("it waits for nothing in the kernel");
        assert!(matches!(ended.expect("valid")[..], [Err(Error::Timeout { .. })]));
        disk.release();
        a_while().await;
        let stored = cache.store_from(&keys, None, &pool.places).await.expect("valid");
        assert!(matches!(stored[..], [Ok(true)]), "{stored:?}");
        cache.unregister(&pool.region).await.expect("its own region");
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
fn a_sync_whose_write_stalls_is_a_timeout() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(write_back()).await;
        store(&cache, 0).await.expect("stored");
        disk.script_next(OpKind::Write, Fault::Stall);
        let (result, took) = elapsed(cache.sync()).await;
        assert!(matches!(result, Err(Error::Timeout { .. })) && took >= DEADLINE, "{result:?} after {took:?}");
        assert_eq!((disk.stalled(), disk.in_flight()), (1, 1), "the block is being written, and nothing else is");
        disk.release();
        a_while().await;
        cache.sync().await.expect("it is written by now");
        finish(cache, reactor).await;
    });
}

#[test]
fn when_every_movement_is_stalled_callers_get_an_error_in_time() {
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
fn a_command_that_cannot_be_started_is_a_timeout() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config().movements_max(1)).await;
        disk.script_next(OpKind::Sync, Fault::Stall);
        let stalled = cache.sync().await;
        assert!(matches!(stalled, Err(Error::Timeout { .. })), "{stalled:?}");
        // The flush goes on, and is the only movement. One command is queued, the others wait for room.
        let calls = [(); 3].map(|()| spawn(&cache, async |cache| elapsed(cache.sync()).await));
        for call in calls {
            let (result, took) = call.await.expect("no panic");
            assert!(
                matches!(result, Err(Error::Timeout { .. })) && took <= DEADLINE * 3 / 2,
                "{result:?} after {took:?}"
            );
        }
        disk.release();
        a_while().await;
        cache.sync().await.expect("the disk is back");
        finish(cache, reactor).await;
    });
}

/// Each is woken when there is room, and not polled: others have it.
#[test]
fn calls_that_nobody_polls_keep_no_other_from_its_turn() {
    sim::block_on(async {
        let (cache, reactor, _disk) = open(config().movements_max(1)).await;
        let mut calls: Vec<_> = (0..32).map(|_| Box::pin(cache.sync())).collect();
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        calls.iter_mut().for_each(|call| assert!(call.as_mut().poll(&mut context).is_pending()));
        cache.sync().await.expect("a sound disk");
        cache.close().await.expect("a sound disk");
        drop(calls);
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
        let region = kvhoist::block_on(cache.register(lent)).expect("registered");
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
fn a_remove_that_waits_for_an_overdue_write_is_a_timeout() {
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
fn a_write_of_a_removed_block_that_hangs_holds_up_no_other_block_though_its_key_is_stored_anew() {
    for policy in [WritePolicy::WriteBack, WritePolicy::ByValue] {
        sim::block_on(async {
            let config = config().write_policy(policy).disks(vec![DiskPath::with_blocks("simulated", 64)]);
            let (cache, reactor, disk) = open(config).await;
            store(&cache, 0).await.expect("stored");
            disk.script_next(OpKind::Write, Fault::Stall);
            let sync = spawn(&cache, |cache| async move { cache.sync().await });
            a_while().await;
            let removal = spawn_remove(&cache, 0);
            a_while().await;
            store(&cache, 0).await.expect("stored anew");
            for n in 1..13 {
                store(&cache, n).await.unwrap_or_else(|error| panic!("{policy:?}, block {n}: {error}"));
            }
            assert_eq!(disk.release(), 1);
            drop((sync.await.expect("no panic"), removal.await.expect("no panic")));
            assert!(fetch(&cache, 0).await.expect("served"), "{policy:?}");
            finish(cache, reactor).await;
        });
    }
}

#[test]
fn others_are_written_back_where_a_write_back_is_overdue() {
    for host in [4, 5, 8] {
        sim::block_on(async {
            let config = write_back().host_blocks(host).disks(vec![DiskPath::with_blocks("simulated", 64)]);
            let (cache, reactor, disk) = open(config).await;
            disk.script_next(OpKind::Write, Fault::Stall);
            let mut late = 0;
            for n in 0..24 {
                match store(&cache, n).await {
                    Ok(()) => {}
                    Err(Error::Timeout { .. }) => late += 1,
                    Err(error) => panic!("{error}"),
                }
            }
            assert_eq!(disk.release(), 1);
            assert!(late <= 1, "with {host} host slots {late} stores were late");
            finish(cache, reactor).await;
        });
    }
}

/// The writes that hang have the records of others in their pages, but not of all.
#[test]
fn others_are_written_back_where_as_many_as_may_be_in_flight_are_overdue() {
    sim::block_on(async {
        let config = write_back().host_blocks(192).low_watermark(1.0).high_watermark(1.0);
        let config = config.disks(vec![DiskPath::with_blocks("simulated", 512)]);
        let (cache, reactor, disk) = open(config).await;
        disk.set_rates(FaultRates { stall: 1.0, ..FaultRates::default() });
        for n in 0..192 {
            store(&cache, n).await.expect("there is room in host memory");
        }
        a_while().await;
        assert!(disk.stalled() >= 64, "{} operations hang", disk.stalled());
        disk.set_rates(FaultRates::default());
        tokio::time::sleep(DEADLINE * 4).await;
        for n in 192..=255 {
            store(&cache, n).await.unwrap_or_else(|error| panic!("block {n}: {error}"));
        }
        disk.release();
        finish(cache, reactor).await;
    });
}
