//! Disks that are full, read-only, or without direct I/O.

use std::{
    fs::{self, File},
    io::Write,
    os::{fd::AsRawFd, unix::fs::FileExt},
    path::Path,
};

use kvhoist::{Cache, Config, DirectIo, Error, StorageKind, block_on, store::Store};

use super::{
    apart::{apart, is_root, limit, mount, mount_ext4, private_mounts, run},
    common::{BLOCK_BYTES, config, directory, fetch_verified, store, store_file},
    config_at, serves, skip,
    warnings::Warnings,
};

/// The parts of a refusal of a store.
fn refusal(config: Config) -> (String, String, String) {
    match block_on(Cache::open(config)) {
        Err(Error::Store { found, expected, action, .. }) => (found, expected, action),
        other => panic!("not a refusal of a store: {:?}", other.err()),
    }
}

/// Writes to a new file until the file system has no byte left.
fn fill(path: &Path) {
    let mut file = File::create(path).expect("created");
    let mut bytes = vec![1; 1 << 20];
    while !bytes.is_empty() {
        if file.write(&bytes).is_err() {
            bytes.truncate(bytes.len() / 2);
        }
    }
    let _ = file.sync_all();
}

#[test]
fn a_disk_that_is_too_small_is_refused_and_left_as_it_was() {
    apart("space::a_disk_that_is_too_small_is_refused_and_left_as_it_was", || {
        if !is_root() || !private_mounts() {
            skip!("mounting needs root");
        }
        let dir = directory();
        assert!(mount("tmpfs", dir.path(), "size=8m"));
        let (found, expected, action) = refusal(config(&dir, StorageKind::Auto, 8, 1024));
        assert!(found.contains("8388608 bytes available on tmpfs"), "{found}");
        assert!(expected.contains("room for 17825792 bytes") && action.contains("lower `disks.blocks`"), "{expected}");
        assert!(!store_file(&dir).exists());
    });
}

#[test]
fn a_store_whose_holes_cannot_be_filled_serves_and_says_so() {
    apart("space::a_store_whose_holes_cannot_be_filled_serves_and_says_so", || {
        let warnings = Warnings::listen();
        let (dir, from) = (directory(), directory());
        let settings = |dir: &_| config(dir, StorageKind::Auto, 8, 1024).direct_io(DirectIo::Prefer);
        serves(&block_on(Cache::open(settings(&from))).expect("open"));
        if !is_root() || !private_mounts() || !mount("tmpfs", dir.path(), "size=8m") {
            skip!("mounting needs root");
        }
        let [from, to] = [&from, &dir].map(|dir| store_file(dir).display().to_string());
        assert!(run("cp", &["--sparse=always", "--preserve=mode", &from, &to]));
        serves(&block_on(Cache::open(settings(&dir))).expect("there is room for what it has"));
        let text = warnings.text();
        assert!(text.contains("may have holes") && text.contains("room for 17825792 bytes"), "{text}");
    });
}

#[test]
fn a_file_system_without_inodes_is_refused() {
    apart("space::a_file_system_without_inodes_is_refused", || {
        let (dir, image) = (directory(), directory());
        let image = image.path().join("image");
        if !is_root() || !private_mounts() || !mount_ext4(&image, 16, dir.path(), &["-N", "16"], "rw") {
            skip!("mounting an ext4 needs root, mkfs.ext4 and loop devices");
        }
        let last = (0..).find(|n| File::create(dir.path().join(n.to_string())).is_err()).expect("it ends");
        assert!(last < 64);
        let (found, _, action) = refusal(config(&dir, StorageKind::Auto, 8, 64));
        assert!(found.contains("no room for another file") && action.contains("inodes"), "{found}");
    });
}

#[test]
fn a_store_goes_on_when_its_file_system_is_full() {
    apart("space::a_store_goes_on_when_its_file_system_is_full", || {
        let (dir, image) = (directory(), directory());
        let image = image.path().join("image");
        if !is_root() || !private_mounts() || !mount_ext4(&image, 64, dir.path(), &[], "rw") {
            skip!("mounting an ext4 needs root, mkfs.ext4 and loop devices");
        }
        for storage in [StorageKind::Auto, StorageKind::Blocking] {
            let cache = block_on(Cache::open(config(&dir, storage, 8, 1024))).expect("open");
            fill(&dir.path().join("all the rest"));
            for n in 0..1_300 {
                block_on(store(&cache, n));
            }
            block_on(cache.sync()).expect("sync");
            assert_eq!((cache.stats().write_errors, cache.stats().disk_read_only), (0, None));
            for n in 1_200..1_300 {
                assert!(block_on(fetch_verified(&cache, n)), "block {n}");
            }
            block_on(cache.close()).expect("close");
            fs::remove_file(dir.path().join("all the rest")).expect("removed");
            fs::remove_file(store_file(&dir)).expect("removed");
        }
    });
}

#[test]
fn a_device_that_runs_out_of_room_serves_what_it_took() {
    apart("space::a_device_that_runs_out_of_room_serves_what_it_took", || {
        let dir = directory();
        if !is_root() || !private_mounts() || !mount("tmpfs", dir.path(), "size=4m") {
            skip!("mounting needs root");
        }
        // More than there is below it, as a thin volume may be.
        let image = dir.path().join("image");
        File::create(&image).and_then(|file| file.set_len(32 << 20)).expect("an image");
        let Some(device) = super::apart::LoopDevice::new(&image) else { skip!("no loop devices here") };
        for storage in [StorageKind::Auto, StorageKind::Blocking] {
            let cache = block_on(Cache::open(config_at(device.path(), storage, 1024))).expect("open");
            let taken: Vec<u64> = (0..600).filter(|n| stored(&cache, *n)).collect();
            assert!(!taken.is_empty() && taken.len() < 300, "{} blocks in 4 MiB", taken.len());
            let stats = cache.stats();
            // Without room a disk may be given some; for a failing one there is no such hope.
            assert!(stats.write_errors > 0 && stats.disk_retired.is_none());
            // The loop driver calls a write good that its file took in part: the checksum finds it out.
            let lost = taken.iter().filter(|n| !block_on(fetch_verified(&cache, **n))).count() as u64;
            assert!(lost <= 1 && lost == cache.stats().checksum_failures, "{lost} of {taken:?} lost");
            let _ = block_on(cache.close());
            // What was taken is there the next time.
            let cache = block_on(Cache::open(config_at(device.path(), storage, 1024))).expect("open");
            let there = taken.iter().filter(|n| block_on(fetch_verified(&cache, **n))).count();
            assert!(there > 0);
            let _ = block_on(cache.close());
            assert!(run("blkdiscard", &["-f", &device.path().display().to_string()]));
        }
    });
}

fn stored(cache: &Cache, n: u64) -> bool {
    match block_on(cache.store(&super::common::key(n), None, &super::common::payload(n, BLOCK_BYTES))) {
        Ok(()) => true,
        Err(Error::Io { .. } | Error::Unavailable { tier: "disk", .. }) => false,
        Err(other) => panic!("{other}"),
    }
}

/// A write past the limit would end the process with SIGXFSZ.
#[test]
fn a_limit_on_the_size_of_files_is_refused_where_a_store_would_exceed_it() {
    apart("space::a_limit_on_the_size_of_files_is_refused_where_a_store_would_exceed_it", || {
        for storage in [StorageKind::Auto, StorageKind::Blocking] {
            let dir = directory();
            let settings = || config(&dir, storage, 8, 64);
            serves(&block_on(Cache::open(settings())).expect("open"));
            let bytes = fs::metadata(store_file(&dir)).expect("the store").len();
            for existing in [true, false] {
                limit(libc::RLIMIT_FSIZE, bytes - 1);
                let (found, expected, action) = refusal(settings());
                assert!(found.contains(&format!("{} bytes", bytes - 1)) && found.contains("RLIMIT_FSIZE"), "{found}");
                assert!(expected.contains(&format!("{bytes} bytes")) && action.contains("ulimit -f"), "{expected}");
                assert_eq!(store_file(&dir).exists(), existing, "it is left as it was");
                limit(libc::RLIMIT_FSIZE, bytes);
                serves(&block_on(Cache::open(settings())).expect("as large as a file may be"));
                fs::remove_file(store_file(&dir)).expect("removed");
            }
        }
    });
}

/// A write past the limit would end the process with SIGXFSZ.
#[test]
fn a_limit_on_the_size_of_files_that_comes_after_the_open_fails_writes_only() {
    apart("space::a_limit_on_the_size_of_files_that_comes_after_the_open_fails_writes_only", || {
        for storage in [StorageKind::Auto, StorageKind::Blocking] {
            let dir = directory();
            let cache = block_on(Cache::open(config(&dir, storage, 8, 64))).expect("open");
            assert!(stored(&cache, 0), "there is no limit yet");
            limit(libc::RLIMIT_FSIZE, 4096);
            assert!((1..8).all(|n| !stored(&cache, n)), "the limit is below the first block");
            assert!(cache.stats().write_errors > 0);
            assert!(block_on(fetch_verified(&cache, 0)), "reads have no limit");
            block_on(cache.close()).expect_err("the records cannot be written");
            limit(libc::RLIMIT_FSIZE, libc::RLIM_INFINITY);
        }
    });
}

#[test]
fn a_store_in_an_immutable_folder_is_not_wiped_and_the_refusal_says_why() {
    let (dir, settings) = (directory(), |dir: &_| config(dir, StorageKind::Auto, 8, 64));
    serves(&block_on(Cache::open(settings(&dir))).expect("open"));
    let path = dir.path().display().to_string();
    if !run("chattr", &["+i", &path]) {
        skip!("making a folder immutable needs root, chattr and a file system with it");
    }
    let wiped = Store::at([dir.path()]).wipe(|_, _, _| true, |_, _| {});
    fs::rename(store_file(&dir), dir.path().join("elsewhere")).expect_err("the folder is immutable");
    assert!(run("chattr", &["-i", &path]));
    match wiped {
        Err(Error::Store { path, found, action, .. }) => {
            assert!(path == store_file(&dir) && found.contains("no permission"), "{found}");
            assert!(action.contains("immutable (lsattr, chattr -i)"), "{action}");
        }
        other => panic!("{other:?}"),
    }
    serves(&block_on(Cache::open(settings(&dir))).expect("it is still a store"));
}

#[test]
fn a_read_only_file_system_is_refused() {
    apart("space::a_read_only_file_system_is_refused", || {
        let (dir, image) = (directory(), directory());
        let image = image.path().join("image");
        if !is_root() || !private_mounts() || !mount_ext4(&image, 16, dir.path(), &[], "rw") {
            skip!("mounting an ext4 needs root, mkfs.ext4 and loop devices");
        }
        let settings = || config(&dir, StorageKind::Auto, 8, 64);
        serves(&block_on(Cache::open(settings())).expect("open"));
        for existing in [true, false] {
            if !existing {
                assert!(run("mount", &["-o", "remount,rw", &dir.path().display().to_string()]));
                fs::remove_file(store_file(&dir)).expect("removed");
            }
            assert!(run("mount", &["-o", "remount,ro", &dir.path().display().to_string()]));
            let (found, _, action) = refusal(settings());
            assert!(found.contains("a read-only file system") && action.contains("remount"), "{found}; {action}");
        }
        assert!(run("mount", &["-o", "remount,rw", &dir.path().display().to_string()]));
        serves(&block_on(Cache::open(settings())).expect("open"));
    });
}

/// `EXT4_IOC_SHUTDOWN` with `EXT4_GOING_FLAGS_NOLOGFLUSH`: from here on nothing is read or written.
#[test]
fn a_file_system_that_shuts_down_is_out_of_service() {
    apart("space::a_file_system_that_shuts_down_is_out_of_service", || {
        const EXT4_IOC_SHUTDOWN: libc::Ioctl = 0x8004_587d;
        let (dir, image) = (directory(), directory());
        let image = image.path().join("image");
        if !is_root() || !private_mounts() || !mount_ext4(&image, 16, dir.path(), &[], "rw") {
            skip!("mounting an ext4 needs root, mkfs.ext4 and loop devices");
        }
        for storage in [StorageKind::Auto, StorageKind::Blocking] {
            let cache = block_on(Cache::open(config(&dir, storage, 8, 64))).expect("open");
            (0..64).for_each(|n| block_on(store(&cache, n)));
            let flags = 2u32;
            let root = File::open(dir.path()).expect("the mount");
            // SAFETY: an open file of an ext4, and a valid flag that lives across the call.
            let result = unsafe { libc::ioctl(root.as_raw_fd(), EXT4_IOC_SHUTDOWN, &raw const flags) };
            assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
            let (mut failed, mut served) = (0, 0);
            for n in 0..64 {
                match block_on(cache.fetch(&super::common::key(n))) {
                    Ok(None) => {}
                    Ok(Some(lease)) => {
                        assert_eq!(*lease, super::common::payload(n, BLOCK_BYTES)[..]);
                        served += 1;
                    }
                    Err(Error::Io { op: "read", .. }) => failed += 1,
                    Err(other) => panic!("{other}"),
                }
            }
            assert!(failed >= 16 && served <= 8, "{failed} failed, {served} served");
            assert!(cache.stats().disk_retired.is_some_and(|reason| reason.contains("Input/output error")));
            assert!(block_on(cache.close()).is_err(), "not all could be written");
            drop(cache);
            drop(root);
            let at = dir.path().display().to_string();
            assert!(run("umount", &[&at]) && run("mount", &["-o", "loop", &image.display().to_string(), &at]));
            let cache = block_on(Cache::open(config(&dir, storage, 8, 64))).expect("open after the journal's replay");
            for n in 0..64 {
                block_on(fetch_verified(&cache, n));
            }
            serves(&cache);
            fs::remove_file(store_file(&dir)).expect("removed");
        }
    });
}

#[test]
fn a_file_system_without_fallocate_is_refused() {
    apart("space::a_file_system_without_fallocate_is_refused", || {
        let dir = directory();
        if !is_root() || !private_mounts() || !mount("ramfs", dir.path(), "mode=0700") {
            skip!("mounting needs root");
        }
        let (found, _, action) = refusal(config(&dir, StorageKind::Auto, 8, 64));
        assert!(found.contains("ramfs") && found.contains("direct I/O"), "{found}");
        assert!(action.contains("direct_io"), "{action}");
        let settings = config(&dir, StorageKind::Auto, 8, 64).direct_io(DirectIo::Prefer);
        // It has no idea of how much room it has.
        let (found, ..) = refusal(settings);
        assert!(found.contains("ramfs"), "{found}");
        assert!(!store_file(&dir).exists());
    });
}

/// A device whose blocks are larger than a page takes the flag of direct I/O, and then refuses every request.
#[test]
fn without_direct_io_the_page_cache_serves_where_that_is_allowed() {
    apart("space::without_direct_io_the_page_cache_serves_where_that_is_allowed", || {
        let warnings = Warnings::listen();
        let dir = directory();
        let image = dir.path().join("image");
        File::create(&image).and_then(|file| file.set_len(16 << 20)).expect("an image");
        if !is_root() {
            skip!("loop devices need root");
        }
        let Some(device) = super::apart::LoopDevice::with_blocks(&image, 16 << 10) else {
            skip!("no loop devices with blocks of 16 KiB here");
        };
        let (found, _, action) = refusal(config_at(device.path(), StorageKind::Auto, 64));
        assert!(found.contains("direct I/O in units of 4096 bytes"), "{found}");
        assert!(action.contains("direct_io"), "{action}");
        for storage in [StorageKind::Auto, StorageKind::Blocking] {
            let settings = config_at(device.path(), storage, 64).direct_io(DirectIo::Prefer);
            let cache = block_on(Cache::open(settings)).expect("the page cache serves");
            assert!(!cache.stats().direct_io);
            serves(&cache);
        }
        let text = warnings.text();
        assert!(text.contains("no direct I/O: going through the page cache"), "{text}");
        let mut magic = [0; 7];
        File::open(&image).and_then(|file| file.read_exact_at(&mut magic, 0)).expect("a store");
        assert_eq!(&magic, b"KVHOIST", "close flushed it");
    });
}
