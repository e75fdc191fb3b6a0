//! A disk that drops writes, fails them, corrupts bytes, fails for good, or stalls, by dm-flakey and suspension.

use std::{cell::RefCell, path::Path, time::Duration};

use kvhoist::{Cache, Config, Error, StorageKind, Tier, block_on};

use crate::{
    common::{Rng, fetch_verified, key, payload, store},
    crash::{self, Death, History, Plan},
    dm::Mapped,
    inside::{NVME, check, make_ext4, mount_ext4, unmount},
};

const DEVICE_BYTES: u64 = 16 << 20;
const GOOD: &str = "linear";

/// A device that can be spoiled and mended.
struct Disk {
    mapped: Mapped,
}

impl Disk {
    /// A blank disk.
    fn new() -> Self {
        let mapped = Mapped::linear("disk", Path::new(NVME), 0, DEVICE_BYTES);
        let file = std::fs::File::options().write(true).open(&mapped.path).expect("a device");
        let zeros = vec![0; DEVICE_BYTES as usize];
        std::os::unix::fs::FileExt::write_all_at(&file, &zeros, 0).and_then(|()| file.sync_all()).expect("blank");
        Disk { mapped }
    }

    fn mend(&self) {
        self.mapped.become_target(&format!("{GOOD} {NVME} 0"));
    }

    /// Down for good, in the manner of these features of dm-flakey.
    fn spoil(&self, features: &str) {
        self.mapped.become_target(&format!("flakey {NVME} 0 0 3600 {features}"));
    }

    fn config(&self, storage: StorageKind) -> Config {
        let plan = plan(&self.mapped.path, storage, 0);
        plan.config().disk_failures_max(4).host_blocks(8)
    }
}

fn plan(path: &Path, storage: StorageKind, seed: u64) -> Plan {
    Plan {
        disks: vec![path.into()],
        blocks: 1_024,
        block_bytes: 4_096,
        storage,
        write_back: seed & 1 == 1,
        evicts: false,
        first: 0,
        end: 0,
        seed,
    }
}

pub fn all(seed: u64) {
    let mut rng = Rng(seed);
    for storage in [StorageKind::Uring, StorageKind::Blocking] {
        for (name, scenario) in [
            ("drops writes", drops_writes as fn(StorageKind, &mut Rng)),
            ("drops writes below ext4", drops_writes_below_ext4),
            ("fails writes", fails_writes),
            ("corrupts reads", corrupts_reads),
            ("corrupts writes", corrupts_writes),
            ("fails for good", fails_for_good),
            ("stalls", stalls),
        ] {
            scenario(storage, &mut rng);
            println!("a disk that {name}, {storage:?}: ok");
        }
    }
}

/// Lets a child store `count` more blocks. Only what `believed` lets through is taken at its word.
fn work(plan: &mut Plan, history: &RefCell<History>, count: u64, believed: &dyn Fn(&str) -> bool) {
    plan.first = history.borrow().next();
    plan.end = plan.first + count;
    crash::run(plan, &|line| {
        if believed(line) {
            history.borrow_mut().note(line);
        }
    });
    history.borrow_mut().end(plan, Death::Machine);
}

/// A cache that lies: it acknowledges writes and flushes, and forgets them with the next loss of power.
fn drops_writes(storage: StorageKind, rng: &mut Rng) {
    let disk = Disk::new();
    let history = RefCell::default();
    let mut plan = plan(&disk.mapped.path, storage, rng.next());
    for _ in 0..3 {
        work(&mut plan, &history, 40, &|_| true);
        disk.spoil("1 drop_writes");
        work(&mut plan, &history, 40, &|line| line.starts_with("store "));
        disk.mend();
        let checked = check(&plan, &history.borrow()).expect("what was flushed before is there");
        assert!(checked.kept > 0 && checked.found < checked.open, "{checked:?}");
    }
    disk.mapped.remove();
}

fn drops_writes_below_ext4(storage: StorageKind, rng: &mut Rng) {
    let disk = Disk::new();
    let mount = Path::new("/mnt");
    make_ext4(&disk.mapped.path);
    let history = RefCell::default();
    let mut plan = plan(mount, storage, rng.next());
    for _ in 0..2 {
        mount_ext4(&disk.mapped.path, mount);
        work(&mut plan, &history, 40, &|_| true);
        disk.spoil("1 drop_writes");
        work(&mut plan, &history, 40, &|line| line.starts_with("store "));
        unmount(mount);
        disk.mend();
        mount_ext4(&disk.mapped.path, mount);
        let checked = check(&plan, &history.borrow()).expect("what was flushed before is there");
        assert!(checked.kept > 0 && checked.found < checked.open, "{checked:?}");
        unmount(mount);
    }
    disk.mapped.remove();
}

/// A cache with the blocks 0 to 40 flushed to a good disk.
fn filled(disk: &Disk, storage: StorageKind) -> Cache {
    filled_with(disk.config(storage))
}

fn filled_with(config: Config) -> Cache {
    let cache = block_on(Cache::open(config)).expect("open");
    assert!(cache.stats().direct_io, "a real disk");
    (0..40).for_each(|n| block_on(store(&cache, n)));
    block_on(cache.sync()).expect("sync");
    cache
}

/// Opens again, and counts which of the first 40 blocks are there.
fn there(disk: &Disk, storage: StorageKind) -> usize {
    let cache = block_on(Cache::open(disk.config(storage))).expect("a disk that is good again");
    let there = (0..40).filter(|n| block_on(fetch_verified(&cache, *n))).count();
    block_on(store(&cache, 1_000));
    block_on(cache.close()).expect("close");
    there
}

fn fails_writes(storage: StorageKind, _: &mut Rng) {
    let disk = Disk::new();
    let cache = filled(&disk, storage);
    disk.spoil("1 error_writes");
    for n in 40..60 {
        match block_on(cache.store(&key(n), None, &payload(n, 4_096))) {
            Err(Error::Io { op: "write", .. } | Error::Unavailable { tier: "disk", .. }) => {}
            other => panic!("{other:?}"),
        }
    }
    let stats = cache.stats();
    let reason = stats.disk_read_only.expect("it takes no more blocks");
    assert!(reason.contains("writes of") && reason.contains("failed in a row"), "{reason}");
    assert_eq!(stats.disk_retired, None, "what it has it serves");
    for n in 0..40 {
        assert!(block_on(fetch_verified(&cache, n)), "block {n}");
    }
    assert!(block_on(cache.close()).is_err(), "the records of the last use could not be written");
    drop(cache);
    disk.mend();
    assert_eq!(there(&disk, storage), 40);
    disk.mapped.remove();
}

fn corrupts_reads(storage: StorageKind, _: &mut Rng) {
    let disk = Disk::new();
    let cache = filled(&disk, storage);
    disk.spoil("5 corrupt_bio_byte 100 r 0 0");
    let served = (0..40).filter(|n| block_on(fetch_verified(&cache, *n))).count();
    let stats = cache.stats();
    assert!(served <= 10 && stats.checksum_failures >= 30, "{served} served, {} failures", stats.checksum_failures);
    drop(block_on(cache.close()));
    drop(cache);
    // The superblocks and records are read through the same glass.
    match block_on(Cache::open(disk.config(storage))) {
        Err(Error::Store { .. }) => {}
        Ok(cache) => {
            for n in 0..40 {
                block_on(fetch_verified(&cache, n));
            }
            drop(block_on(cache.close()));
        }
        Err(other) => panic!("{other}"),
    }
    disk.mend();
    there(&disk, storage);
    disk.mapped.remove();
}

fn corrupts_writes(storage: StorageKind, _: &mut Rng) {
    let disk = Disk::new();
    let cache = filled(&disk, storage);
    disk.spoil("5 corrupt_bio_byte 100 w 0 0");
    (40..80).for_each(|n| block_on(store(&cache, n)));
    block_on(cache.sync()).expect("the fault is not known yet");
    disk.mend();
    let served = (0..80).filter(|n| block_on(fetch_verified(&cache, *n))).count();
    assert!(served >= 40 && cache.stats().checksum_failures >= 30, "{served} served");
    block_on(cache.close()).expect("close");
    drop(cache);
    assert!(there(&disk, storage) >= 36, "only records in the pages that were written then may be lost");
    disk.mapped.remove();
}

fn fails_for_good(storage: StorageKind, _: &mut Rng) {
    let disk = Disk::new();
    let cache = filled(&disk, storage);
    disk.spoil("");
    let (mut failed, mut served, mut missed) = (0, 0, 0);
    for n in 0..40 {
        match block_on(cache.fetch(&key(n))) {
            Ok(Some(lease)) => {
                assert_eq!(*lease, payload(n, 4_096)[..]);
                served += 1;
            }
            Ok(None) => missed += 1,
            Err(Error::Io { op: "read", .. }) => failed += 1,
            Err(other) => panic!("{other}"),
        }
    }
    assert_eq!(failed, 4, "then it is left alone ({served} served, {missed} missed)");
    assert!(cache.stats().disk_retired.is_some_and(|reason| reason.contains("4 reads of")));
    assert!(block_on(cache.close()).is_err());
    drop(cache);
    disk.mend();
    assert_eq!(there(&disk, storage), 40);
    disk.mapped.remove();
}

/// What is overdue is refused until the disk has ended it.
fn fetch_patiently(cache: &Cache, n: u64) -> bool {
    loop {
        match block_on(cache.fetch(&key(n))) {
            Err(error) if error.is_transient() => std::thread::sleep(Duration::from_millis(20)),
            Err(error) => panic!("{error}"),
            Ok(None) => return false,
            Ok(Some(lease)) => {
                assert_eq!(*lease, payload(n, 4_096)[..]);
                return true;
            }
        }
    }
}

fn stalls(storage: StorageKind, _: &mut Rng) {
    // Long enough for a good disk under an emulator that has to share its processor.
    const DEADLINE: Duration = Duration::from_secs(4);
    let disk = Disk::new();
    let cache = filled_with(disk.config(storage).deadline_ms(DEADLINE.as_millis() as u64));
    let on_disk = (0..40).find(|n| cache.match_prefix(&[key(*n)]) == [Tier::Disk]).expect("most of them");
    // The last used, which no store pushes out.
    let in_memory = (0..40).rev().find(|n| cache.match_prefix(&[key(*n)]) == [Tier::Host]).expect("some of them");
    disk.mapped.suspend();
    match block_on(cache.fetch(&key(on_disk))) {
        Err(Error::Timeout { limit, .. }) => assert_eq!(limit, DEADLINE),
        other => panic!("{:?}", other.map(|lease| lease.is_some())),
    }
    match block_on(cache.store(&key(500), None, &payload(500, 4_096))) {
        Err(Error::Timeout { .. }) => {}
        other => panic!("{other:?}"),
    }
    assert!(block_on(fetch_verified(&cache, in_memory)), "memory serves on");
    assert!(matches!(block_on(cache.sync()), Err(Error::Timeout { .. } | Error::Refused { .. })));
    disk.mapped.resume();
    for n in (0..40).chain([500]) {
        assert!(fetch_patiently(&cache, n), "block {n}");
    }
    block_on(cache.sync()).expect("sync");
    assert!(cache.stats().timeouts >= 2 && cache.stats().disk_retired.is_none());
    block_on(cache.close()).expect("close");
    drop(cache);
    assert_eq!(there(&disk, storage), 40);
    disk.mapped.remove();
}
