//! Too little memory: to lock, to map, to reserve.

use std::{
    os::unix::process::ExitStatusExt,
    sync::{Mutex, PoisonError},
};

use kvhoist::{
    Cache, Config, Error, Region, Segment, StorageKind, Tier, WritePolicy, block_on, internals::io::AlignedBuf,
};

use super::{
    apart::{apart, case, drop_capabilities, limit, run_case},
    common::{BLOCK_BYTES, config, directory, fetch_verified, key, payload, store_file},
    serves, skip,
    warnings::Warnings,
};

/// What processes of one user have locked is added up: one of these tests at a time.
static TURNS: Mutex<()> = Mutex::new(());

/// Room for a ring and a small region, and not for the 1 MiB of an arena of 64 blocks.
const LIMIT_BYTES: u64 = 768 << 10;

#[test]
fn memory_that_may_not_be_locked_is_used_unregistered_with_a_warning() {
    let _turn = TURNS.lock().unwrap_or_else(PoisonError::into_inner);
    apart("memory::memory_that_may_not_be_locked_is_used_unregistered_with_a_warning", || {
        let warnings = Warnings::listen();
        limit(libc::RLIMIT_MEMLOCK, LIMIT_BYTES);
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
        assert!(text.contains("RLIMIT_MEMLOCK is 786432 bytes") && text.contains("continue unregistered"), "{text}");
    });
}

/// A block's worth of a caller's memory, as direct I/O wants it.
fn register(cache: &Cache, memory: &mut AlignedBuf) -> (Region, Vec<Vec<Segment>>) {
    let place = Segment { ptr: memory.as_mut_ptr(), len: memory.len() };
    // SAFETY: each test keeps the memory for longer than its cache, and looks at it where no call is in flight.
    let lent = unsafe { kvhoist::Memory::host(place.ptr, place.len) };
    let region = kvhoist::block_on(cache.register(lent)).expect("registered");
    (region, vec![vec![place]])
}

/// Settings of caches that read and write callers' memory in place.
fn in_place(dir: &tempfile::TempDir) -> Config {
    config(dir, StorageKind::Uring, 64, 256).bypass_host(true)
}

/// Stores blocks and reads them from disk, through host slots and into a caller's memory; none is given up.
fn reads_back(cache: &Cache, memory: &mut AlignedBuf, place: &[Vec<Segment>], from: u64) {
    for n in from..from + 8 {
        memory.copy_from_slice(&payload(n, BLOCK_BYTES));
        let stored = block_on(cache.store_from(&[key(n)], None, place)).expect("asked");
        assert!(matches!(stored[..], [Ok(true)]), "block {n}: {stored:?}");
        memory.fill(0);
        let loaded = block_on(cache.load_into(&[key(n)], place)).expect("asked");
        assert!(matches!(loaded[..], [Ok(true)]), "block {n}: {loaded:?}");
        assert!(memory[..] == payload(n, BLOCK_BYTES), "block {n}");
        assert!(block_on(fetch_verified(cache, n)), "block {n}, through a host slot");
    }
    let stats = cache.stats();
    assert_eq!((stats.read_errors, stats.write_errors, stats.quarantined), (0, 0, 0));
}

#[test]
fn a_region_that_may_be_locked_beside_an_arena_that_may_not_harms_no_block() {
    let _turn = TURNS.lock().unwrap_or_else(PoisonError::into_inner);
    apart("memory::a_region_that_may_be_locked_beside_an_arena_that_may_not_harms_no_block", || {
        limit(libc::RLIMIT_MEMLOCK, LIMIT_BYTES);
        drop_capabilities();
        let (dir, mut memory) = (directory(), AlignedBuf::zeroed(BLOCK_BYTES));
        let Ok(cache) = block_on(Cache::open(in_place(&dir))) else { skip!("no ring here") };
        assert!(!cache.stats().registered, "the arena is larger than the limit");
        let (region, place) = register(&cache, &mut memory);
        if !block_on(kvhoist::internals::pin_region(&cache, &region)).expect("answered") {
            skip!("other processes use up the locked memory of this user");
        }
        reads_back(&cache, &mut memory, &place, 100);
        block_on(cache.unregister(&region)).expect("its own");
        serves(&cache);
    });
}

#[test]
fn regions_go_and_come_where_nothing_may_be_locked_any_more() {
    let _turn = TURNS.lock().unwrap_or_else(PoisonError::into_inner);
    apart("memory::regions_go_and_come_where_nothing_may_be_locked_any_more", || {
        drop_capabilities();
        let (dir, mut memory) = (directory(), [0; 3].map(|_| AlignedBuf::zeroed(BLOCK_BYTES)));
        let Ok(cache) = block_on(Cache::open(in_place(&dir))) else { skip!("no ring here") };
        let [first, second, third] = &mut memory;
        let ((first_region, _), (second_region, place)) = (register(&cache, first), register(&cache, second));
        let pin = |region| block_on(kvhoist::internals::pin_region(&cache, region)).expect("answered");
        if !cache.stats().registered || !pin(&first_region) || !pin(&second_region) {
            skip!("this user may lock no memory");
        }
        limit(libc::RLIMIT_MEMLOCK, 0);
        // Neither a table without the first region nor the one before may be registered now.
        block_on(cache.unregister(&first_region)).expect("its own");
        reads_back(&cache, second, &place, 100);
        let (third_region, third_place) = register(&cache, third);
        assert!(!pin(&third_region), "it may not be locked");
        reads_back(&cache, third, &third_place, 200);
        limit(libc::RLIMIT_MEMLOCK, u64::MAX);
        assert!(pin(&third_region), "it may be locked again");
        reads_back(&cache, third, &third_place, 300);
        reads_back(&cache, second, &place, 400);
        for region in [second_region, third_region] {
            block_on(cache.unregister(&region)).expect("its own");
        }
        serves(&cache);
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

/// Slots of the disk tier, whose store takes 1 GiB of disk and whose books some 50 MiB of memory.
const SLOTS: u32 = 1 << 18;

/// Opens under limits that rise from nothing up: somewhere on the way every large allocation fails once.
#[test]
fn an_open_that_runs_out_of_memory_is_an_error_and_no_abort() {
    const NAME: &str = "memory::an_open_that_runs_out_of_memory_is_an_error_and_no_abort";
    if let Some(case) = case() {
        let [policy, mib, path] = case.splitn(3, ' ').collect::<Vec<_>>()[..] else { panic!("{case}") };
        let policy = serde_json::from_value(policy.into()).expect("a policy");
        return open_within(path, policy, mib.parse().expect("a number"));
    }
    let dir = directory();
    let path = dir.path().join("store");
    // By value the index has more tables, and reserves them last.
    for policy in ["write_through", "by_value"] {
        let (mut opened, mut refused) = (false, 0);
        for mib in (0..).step_by(6) {
            let (status, said) = run_case(NAME, &format!("{policy} {mib} {}", path.display()));
            assert_eq!(status.signal(), None, "{policy} with {mib} MiB: {said}");
            assert!(status.success(), "{policy} with {mib} MiB: {said}");
            if said.contains("opened") {
                opened = true;
                break;
            }
            refused += 1;
            assert!(!path.exists(), "{policy} with {mib} MiB: a file is left behind: {said}");
            assert!(mib < 1024, "an open does not need that much: {said}");
        }
        assert!(opened && refused > 3, "{policy}: {refused} refusals");
        std::fs::remove_file(&path).expect("a store");
    }
}

/// Opens a store with `mib` MiB more to map than this process has mapped now.
fn open_within(path: &str, policy: WritePolicy, mib: u64) {
    let mut settings = kvhoist::Config::default().block_bytes(1).host_blocks(64).write_policy(policy);
    settings.disk.storage = StorageKind::Blocking;
    settings.disk.blocking_threads = 1;
    settings.disk.paths = vec![kvhoist::DiskPath::with_blocks(path, SLOTS)];
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
