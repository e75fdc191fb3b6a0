//! Too little memory: to lock, to map, to reserve.

use std::os::unix::process::ExitStatusExt;

use kvhoist::{Cache, Error, StorageKind, Tier, block_on};

use crate::{
    apart::{apart, case, drop_capabilities, limit, run_case},
    common::{config, directory, store_file},
    serves, skip,
    warnings::Warnings,
};

#[test]
fn memory_that_may_not_be_locked_is_used_unregistered_with_a_warning() {
    apart("memory::memory_that_may_not_be_locked_is_used_unregistered_with_a_warning", || {
        let warnings = Warnings::listen();
        limit(libc::RLIMIT_MEMLOCK, 64 << 10);
        drop_capabilities();
        let dir = directory();
        let cache = match block_on(Cache::open(config(&dir, StorageKind::Uring, 64, 256))) {
            Ok(cache) => cache,
            Err(Error::Config { field: "storage", found, .. }) => skip!("no ring here: {found}"),
            Err(error) => panic!("{error}"),
        };
        assert_eq!(cache.stats().storage, "uring");
        serves(&cache);
        let text = warnings.text();
        assert!(text.contains("RLIMIT_MEMLOCK is 65536 bytes") && text.contains("go on unregistered"), "{text}");
    });
}

#[test]
fn more_host_memory_than_can_be_mapped_is_refused() {
    apart("memory::more_host_memory_than_can_be_mapped_is_refused", || {
        limit(libc::RLIMIT_AS, 4 << 30);
        for storage in [StorageKind::Auto, StorageKind::Blocking] {
            let dir = directory();
            for host_blocks in [1 << 20, u32::MAX >> 1] {
                match block_on(Cache::open(config(&dir, storage, host_blocks, 64))) {
                    Err(Error::Config { field: "host_blocks", found, .. }) => {
                        assert!(found.contains("Cannot allocate memory"), "{found}");
                    }
                    other => panic!("{:?}", other.err()),
                }
            }
            drop(std::fs::remove_file(store_file(&dir)));
            serves(&block_on(Cache::open(config(&dir, storage, 64, 64))).expect("a cache that fits"));
        }
    });
}

/// Slots of the disk tier whose books take some 200 MiB.
const SLOTS: u32 = 1 << 20;

/// Opens under limits that rise from nothing up: somewhere on the way every large allocation fails once.
#[test]
fn an_open_that_runs_out_of_memory_is_an_error_and_no_abort() {
    const NAME: &str = "memory::an_open_that_runs_out_of_memory_is_an_error_and_no_abort";
    if let Some(case) = case() {
        let (path, mib) = case.split_once(' ').expect("a path and a number");
        return open_within(path, mib.parse().expect("a number"));
    }
    let dir = directory();
    let path = dir.path().join("store");
    let path = path.display();
    let (mut opened, mut refused) = (false, 0);
    for mib in (0..).step_by(24) {
        let (status, said) = run_case(NAME, &format!("{path} {mib}"));
        assert_eq!(status.signal(), None, "with {mib} MiB: {said}");
        assert!(status.success(), "with {mib} MiB: {said}");
        if said.contains("opened") {
            opened = true;
            break;
        }
        refused += 1;
        assert!(mib < 4096, "an open does not need that much");
    }
    assert!(opened && refused > 3, "{refused} refusals");
}

/// Opens a store with `mib` MiB more to map than this process has mapped now.
fn open_within(path: &str, mib: u64) {
    let mut settings = kvhoist::Config { block_bytes: 1, host_blocks: 64, ..kvhoist::Config::default() };
    settings.storage = StorageKind::Blocking;
    settings.blocking_threads = 1;
    settings.disks = vec![kvhoist::DiskPath { path: path.into(), blocks: SLOTS }];
    let mapped = std::fs::read_to_string("/proc/self/statm").expect("procfs");
    let pages: u64 = mapped.split(' ').next().expect("a size").parse().expect("a number");
    limit(libc::RLIMIT_AS, pages * 4096 + (mib << 20));
    match block_on(Cache::open(settings)) {
        Ok(cache) => {
            assert_eq!(cache.stats().tier(Tier::Disk).slots, u64::from(SLOTS));
            println!("opened");
            block_on(cache.close()).expect("close");
        }
        Err(error) => println!("refused: {error}"),
    }
}
