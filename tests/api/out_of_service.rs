//! What callers get from a cache whose disk or whose slots are not there for them: an answer, with a reason.

use crate::common;

use std::{fs::OpenOptions, time::Instant};

use common::{config, directory, fetch_verified, key, payload, store, store_file};
use kvhoist::{Cache, Error, StorageKind, Tier, block_on};

/// A store cut to nothing while it is open is a disk that fails for good: every read ends at its end.
async fn a_disk_that_fails_for_good_is_taken_out_of_service(storage: StorageKind) {
    let dir = directory();
    let settings = config(&dir, storage, 4, 64).disk_failures_max(4);
    let cache = Cache::open(settings).await.expect("open");
    for n in 0..32 {
        store(&cache, n).await;
    }
    let resident: Vec<u64> = (0..32).filter(|n| cache.match_prefix(&[key(*n)]) == [Tier::Host]).collect();
    assert!(!resident.is_empty() && resident.len() <= 4);
    OpenOptions::new().write(true).open(store_file(&dir)).expect("there").set_len(0).expect("cut");
    let on_disk: Vec<u64> = (0..32).filter(|n| !resident.contains(n)).collect();
    // A lease on the hot blocks, so that reads that fail do not push them out.
    let leases: Vec<_> = resident[1..].iter().map(|n| block_on(cache.fetch(&key(*n)))).collect();
    for n in &on_disk[..4] {
        match cache.fetch(&key(*n)).await {
            Err(Error::Io { op: "read", .. }) => {}
            other => panic!("{other:?}"),
        }
    }
    let reason = cache.stats().disk_retired.expect("out of service");
    assert!(reason.contains("4 reads of") && reason.contains("failed in a row"), "{reason}");
    let reads = cache.stats().read_errors;
    for n in &on_disk {
        assert!(!fetch_verified(&cache, *n).await, "a miss");
        assert!(cache.match_prefix(&[key(*n)]).is_empty() && cache.match_len(&[key(*n)]) == 0);
    }
    assert_eq!(cache.stats().read_errors, reads, "the disk is left alone");
    drop(leases);
    for n in &resident[1..] {
        assert!(fetch_verified(&cache, *n).await, "host memory serves on");
    }
    match cache.store(&key(100), None, &payload(100, cache.config().block_bytes)).await {
        Err(Error::Unavailable { tier: "disk", reason: found }) => assert_eq!(found, reason),
        other => panic!("{other:?}"),
    }
    assert!(fetch_verified(&cache, 100).await, "what the disk did not take host memory serves");
    kvhoist::internals::validate(&cache).expect("valid");
    // The records cannot be read back from a file that is gone, but writing them causes no error.
    drop(cache.close().await);
}

#[test]
fn a_disk_that_fails_for_good_is_taken_out_of_service_over_the_ring() {
    block_on(a_disk_that_fails_for_good_is_taken_out_of_service(StorageKind::Uring));
}

#[test]
fn a_disk_that_fails_for_good_is_taken_out_of_service_over_threads() {
    block_on(a_disk_that_fails_for_good_is_taken_out_of_service(StorageKind::Blocking));
}

#[test]
fn who_waits_too_long_for_a_slot_is_told_so() {
    let dir = directory();
    // Without a disk: nothing else here could take longer than so short a deadline.
    let settings = config(&dir, StorageKind::Auto, 1, 8).deadline_ms(60).disks(Vec::new());
    let cache = block_on(Cache::open(settings)).expect("open");
    let held = block_on(cache.reserve()).expect("the only slot");
    let started = Instant::now();
    match block_on(cache.reserve()) {
        Err(error @ Error::Timeout { what: "a host slot", leases: 0, reservations: 1, .. }) => {
            assert!(error.is_transient());
        }
        other => panic!("{other:?}"),
    }
    assert!(started.elapsed().as_millis() >= 60, "not before the deadline");
    assert_eq!(cache.stats().timeouts, 1);
    drop(held);
    drop(block_on(cache.reserve()).expect("the slot is free again"));
    block_on(cache.close()).expect("close");
}

/// `rm` of a store under a running cache, on each way to notice it: figures, and a sync.
#[test]
fn a_store_that_is_deleted_under_a_running_cache_is_not_ok() {
    for by_sync in [false, true] {
        let dir = directory();
        block_on(async {
            let cache = Cache::open(config(&dir, StorageKind::Auto, 4, 64)).await.expect("open");
            store(&cache, 1).await;
            cache.sync().await.expect("there is a file");
            assert_eq!(cache.stats().disk_read_only, None);
            std::fs::remove_file(store_file(&dir)).expect("deleted");
            if by_sync {
                match cache.sync().await {
                    Err(Error::Unavailable { tier: "disk", reason }) => assert!(reason.contains("deleted"), "{reason}"),
                    other => panic!("{other:?}"),
                }
            }
            let reason = cache.stats().disk_read_only.expect("no longer ok");
            assert!(reason.contains(&dir.path().display().to_string()) && reason.contains("deleted"), "{reason}");
            assert_eq!(cache.stats().disk_retired, None, "what it has it serves");
            assert!(fetch_verified(&cache, 1).await);
            let stored = cache.store(&key(2), None, &payload(2, cache.config().block_bytes)).await;
            assert!(matches!(stored, Err(Error::Unavailable { tier: "disk", .. })), "{stored:?}");
            for _ in 0..2 {
                let closed = cache.close().await;
                let is_told = matches!(&closed, Err(Error::Unavailable { reason, .. }) if reason.contains("deleted"));
                assert!(is_told, "{closed:?}");
            }
        });
        let cache = block_on(Cache::open(config(&dir, StorageKind::Auto, 4, 64))).expect("a new store");
        assert_eq!(cache.stats().disk_read_only, None);
        block_on(cache.close()).expect("closed");
    }
}
