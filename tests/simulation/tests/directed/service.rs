//! Failing disks and bad blocks: what takes a tier out of service, and what does not.

use std::time::Duration;

use kvhoist::{
    DiskPath, Error, Tier, WritePolicy,
    internals::{
        disk::{PageId, format::stripe::Stripe},
        io::OpKind,
    },
};
use kvhoist_simulation::sim::{self, Fault, FaultRates, Simulated, World};

use crate::scene::*;

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
        assert_eq!(stats.quarantined, 2, "no slot of a drive that takes no write at all is quarantined any more");
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
fn failures_in_a_row_decide_on_a_drive_with_few_slots_that_takes_no_write() {
    sim::block_on(async {
        for config in [config().disks(vec![DiskPath::with_blocks("simulated", 2)]), config().quarantine_max(2)] {
            let (cache, reactor, disk) = open(config).await;
            disk.set_rates(FaultRates { write_error: 1.0, ..FaultRates::default() });
            for n in 0..3 {
                store(&cache, n).await.expect_err("no write goes well");
            }
            let stats = cache.stats();
            let reason = stats.disk_read_only.expect("three writes failed in a row");
            assert!(reason.contains("3 writes of simulated failed in a row"), "{reason}");
            assert_eq!((stats.quarantined, stats.disk_retired), (1, None));
            finish(cache, reactor).await;
        }
    });
}

#[test]
fn a_slot_that_cannot_be_written_is_tried_once() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        fill(&cache).await;
        let (file, offset) = Stripe::new(&config()).locate(3);
        disk.break_place(OpKind::Write, file, offset..offset + 512);
        let mut failed = 0;
        for n in 20..70 {
            failed += u32::from(store(&cache, n).await.is_err());
        }
        let stats = cache.stats();
        assert_eq!((failed, stats.quarantined, stats.disk_read_only), (1, 1, None));
        finish(cache, reactor).await;
        // The next start has one failed store again.
        let world = World::new(2, vec![disk.contents(file)]);
        world.storage.break_place(OpKind::Write, file, offset..offset + 512);
        let Simulated { cache, reactor } = sim::open(config(), &world).await.expect("the store opens");
        let mut failed = 0;
        for n in 70..120 {
            failed += u32::from(store(&cache, n).await.is_err());
        }
        assert_eq!((failed, cache.stats().quarantined, cache.stats().disk_read_only), (1, 1, None));
        finish(cache, reactor).await;
    });
}

#[test]
fn the_slots_of_a_record_page_that_cannot_be_written_are_tried_once() {
    sim::block_on(async {
        // Two pages of records; the blocks alternate between them.
        let config = config().disks(vec![DiskPath::with_blocks("simulated", 64)]);
        let (cache, reactor, disk) = open(config.clone()).await;
        for n in 0..64 {
            store(&cache, n).await.expect("a sound disk");
        }
        let (file, offset) = Stripe::new(&config).page_location(PageId(0));
        disk.break_place(OpKind::Write, file, offset..offset + 512);
        let mut failed = 0;
        for n in 64..192 {
            failed += u32::from(store(&cache, n).await.is_err());
        }
        let stats = cache.stats();
        assert_eq!((failed, stats.quarantined, stats.disk_read_only), (32, 32, None));
        finish(cache, reactor).await;
    });
}

#[test]
fn a_write_for_which_there_is_no_space_quarantines_nothing() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        disk.set_rates(FaultRates { no_space: 1.0, ..FaultRates::default() });
        for n in 0..4 {
            store(&cache, n).await.expect_err("no room");
        }
        disk.set_rates(FaultRates::default());
        fill(&cache).await;
        let stats = cache.stats();
        assert_eq!((stats.quarantined, stats.tier(Tier::Disk).free, stats.disk_read_only), (0, 0, None));
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
        let listed: Vec<_> = cache.keys().collect();
        assert!(cache.len() > listed.len(), "blocks that only the disk has are resident, and not listed");
        for n in 0..16 {
            let served = cache.match_prefix(&[key(n)]) == [Tier::Host];
            assert_eq!(listed.contains(&key(n)), served, "block {n}");
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
