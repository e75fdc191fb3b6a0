//! Block devices as paths of a store.

use std::{
    fs::{File, OpenOptions},
    io::Read,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use kvhoist::{
    Cache, DiskPath, Error, StorageKind, block_on,
    store::{Shape, Store},
};

use super::{
    apart::{LoopDevice, run},
    common::{self, directory},
    config_at, serves, skip,
};

/// A device over a file of 64 MiB in `dir`.
fn device(dir: &std::path::Path) -> Option<LoopDevice> {
    let image = dir.join("image");
    File::create(&image).and_then(|file| file.set_len(64 << 20)).expect("an image");
    LoopDevice::new(&image)
}

#[test]
fn a_wiped_device_is_empty_as_far_as_the_store_went_and_a_wipe_that_was_cut_off_can_be_repeated() {
    let dir = directory();
    let Some(device) = device(dir.path()) else { skip!("no loop devices here") };
    let mut bytes = Vec::new();
    let end = DiskPath::file_bytes(512, common::BLOCK_BYTES as u64);
    let open = || OpenOptions::new().write(true).open(device.path()).expect("a device");
    // What somebody else keeps right behind the store, and at the end of the device.
    let behind = |byte: u8| {
        let written = [end, (64 << 20) - 4096].map(|at| open().write_all_at(&[byte; 4096], at));
        written.into_iter().chain([open().sync_all()]).for_each(|written| written.expect("written"));
    };
    for cut_off in [false, true] {
        let cache = block_on(Cache::open(config_at(device.path(), StorageKind::Auto, 512))).expect("open");
        serves(&cache);
        behind(0xEE);
        if cut_off {
            let file = open();
            file.write_all_at(&vec![0; 4 << 20], 8192).and_then(|()| file.sync_all()).expect("a part is zeroed");
        }
        // Mounted, say, through another node of it: nothing is written.
        let held = OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(device.path()).expect("nobody has it");
        match Store::at([device.path()]).wipe(|_, _, _| true, |_, _| panic!("it was begun")) {
            Err(Error::Store { found, .. }) => assert!(found.contains("a device in use"), "{found}"),
            other => panic!("{other:?}"),
        }
        drop(held);
        let mut told = Vec::new();
        let wiped = Store::at([device.path()]).wipe(|_, _, _| true, |done, total| told.push((done, total)));
        assert!(wiped.expect("a store of its own"));
        assert!(told.last().is_some_and(|(done, total)| *total == end && done + 8192 == *total), "{told:?}");
        bytes.clear();
        File::open(device.path()).and_then(|mut file| file.read_to_end(&mut bytes)).expect("readable");
        let (ours, others) = bytes.split_at(end as usize);
        assert!(bytes.len() == 64 << 20 && ours.iter().all(|byte| *byte == 0));
        let kept = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0xEE);
        assert!(kept(&others[..4096]) && kept(&others[others.len() - 4096..]), "bytes of somebody else are gone");
        behind(0);
    }
    // Its record table is where blocks of the other lay.
    let cache =
        block_on(Cache::open(config_at(device.path(), StorageKind::Auto, 3000))).expect("nothing is in its way");
    assert!(!block_on(common::fetch_verified(&cache, 1)));
    serves(&cache);
}

#[test]
fn a_device_whose_superblocks_do_not_say_where_the_store_ends_is_not_wiped() {
    let dir = directory();
    let Some(device) = device(dir.path()) else { skip!("no loop devices here") };
    serves(&block_on(Cache::open(config_at(device.path(), StorageKind::Auto, 512))).expect("open"));
    let file = OpenOptions::new().read(true).write(true).open(device.path()).expect("a device");
    let mut head = vec![0; 8192];
    file.read_exact_at(&mut head, 0).expect("its superblocks");
    [100, 4196].into_iter().for_each(|at| head[at] ^= 1);
    file.write_all_at(&head, 0).and_then(|()| file.sync_all()).expect("both are damaged");
    let bytes = || {
        let mut bytes = Vec::new();
        File::open(device.path()).and_then(|mut file| file.read_to_end(&mut bytes)).expect("readable");
        bytes
    };
    let before = bytes();
    match Store::at([device.path()]).wipe(|_, _, _| panic!("nobody is asked"), |_, _| panic!("it was begun")) {
        Err(Error::Store { found, action, .. }) => {
            assert!(found.contains("where the store ends") && action.contains("blkdiscard"), "{found}; {action}");
        }
        other => panic!("{other:?}"),
    }
    assert!(bytes() == before, "something changed");
}

#[test]
fn of_a_device_whose_creation_was_cut_off_only_superblocks_are_zeroed() {
    let dir = directory();
    let Some(device) = device(dir.path()) else { skip!("no loop devices here") };
    let cache = block_on(Cache::open(config_at(device.path(), StorageKind::Auto, 512))).expect("open");
    block_on(cache.close()).expect("close");
    let file = OpenOptions::new().read(true).write(true).open(device.path()).expect("a device");
    let mut head = vec![0; 8192];
    file.read_exact_at(&mut head, 0).expect("its superblocks");
    head[12] = 1;
    let crc = kvhoist::internals::checksum::checksum(&head[..504]);
    head[504..512].copy_from_slice(&crc.to_le_bytes());
    head[4096..].fill(0);
    file.write_all_at(&head, 0).expect("forming");
    // An open looks at the first and the last MiB only.
    file.write_all_at(&[0xEE; 4096], 2 << 20).and_then(|()| file.sync_all()).expect("somebody's data");
    assert!(matches!(Store::at([device.path()]).inspect(), Err(Error::Store { .. })));
    assert!(Store::at([device.path()]).wipe(|_, _, _| true, |_, _| {}).expect("it is unfinished"));
    let mut bytes = Vec::new();
    File::open(device.path()).and_then(|mut file| file.read_to_end(&mut bytes)).expect("readable");
    let data = (2 << 20)..(2 << 20) + 4096;
    assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == if data.contains(&at) { 0xEE } else { 0 }));
}

/// Makes a store on two devices.
fn serves_on([a, b]: [&LoopDevice; 2]) {
    let mut settings = config_at(a.path(), StorageKind::Auto, 512);
    settings.disk.paths.extend(config_at(b.path(), StorageKind::Auto, 512).disk.paths);
    serves(&block_on(Cache::open(settings)).expect("open"));
}

fn opened(device: &LoopDevice) -> File {
    OpenOptions::new().read(true).write(true).open(device.path()).expect("a device")
}

#[test]
fn a_wipe_that_was_cut_off_between_two_devices_is_finished_by_another() {
    let dirs = [directory(), directory()];
    let [Some(a), Some(b)] = dirs.each_ref().map(|dir| device(dir.path())) else { skip!("no loop devices here") };
    serves_on([&a, &b]);
    let (mut head, mut bytes) = (vec![0; 8192], Vec::new());
    opened(&b).read_exact_at(&mut head, 0).expect("its superblocks");
    let wipe = || {
        let mut gone_already = Vec::new();
        let confirm = |_: Option<&Shape>, _: &[PathBuf], gone: &[&Path]| {
            gone_already.extend(gone.iter().map(|path| path.to_path_buf()));
            true
        };
        Store::at([a.path(), b.path()]).wipe(confirm, |_, _| {}).map(|wiped| (wiped, gone_already))
    };
    assert_eq!(wipe().expect("a store"), (true, vec![]));
    opened(&b).write_all_at(&head, 0).expect("as it was before the last write");
    // A file system that begins behind zeros is nobody's rest.
    opened(&a).write_all_at(b"_BHRfS_M", 65536 + 64).expect("written");
    assert!(matches!(wipe(), Err(Error::Store { .. })));
    opened(&a).write_all_at(&[0; 8], 65536 + 64).expect("written");
    assert_eq!(wipe().expect("the rest of it"), (true, vec![a.path().to_owned()]));
    opened(&b).read_to_end(&mut bytes).expect("readable");
    assert!(bytes.iter().all(|byte| *byte == 0));
    assert!(matches!(wipe(), Err(Error::Store { .. })), "nothing is left");
}

#[test]
fn a_device_that_another_program_has_by_now_is_not_wiped_also_if_the_rest_of_the_store_is_gone() {
    let dirs = [directory(), directory()];
    let [Some(a), Some(b)] = dirs.each_ref().map(|dir| device(dir.path())) else { skip!("no loop devices here") };
    serves_on([&a, &b]);
    let write = |device: &LoopDevice, bytes: &[u8]| {
        opened(device).write_all_at(bytes, 0).and_then(|()| opened(device).sync_all()).expect("written");
    };
    let read = || {
        let mut bytes = Vec::new();
        opened(&b).read_to_end(&mut bytes).expect("readable");
        bytes
    };
    // A partition table over superblock A, and the header of a swap space.
    let sound = read()[..4096].to_vec();
    let reused = [(510, &[0x55, 0xAA][..]), (4086, b"SWAPSPACE2")].map(|(at, mark)| {
        let mut page = vec![0; 4096];
        page[at..][..mark.len()].copy_from_slice(mark);
        page
    });
    for is_gone in [false, true] {
        if is_gone {
            write(&a, &vec![0; 1 << 20]);
        }
        for page in &reused {
            write(&b, page);
            let before = read();
            let wiped = Store::at([a.path(), b.path()]).wipe(|_, _, _| panic!("nobody is asked"), |_, _| {});
            match wiped {
                Err(Error::Store { path, found, action, .. }) => {
                    assert!(path == b.path() && found.contains("did not write over a superblock"), "{found}");
                    assert!(action.contains("blkdiscard") && !action.contains("`disks`"), "{action}");
                }
                other => panic!("{other:?}"),
            }
            assert!(read() == before, "something changed");
        }
    }
    write(&b, &sound);
    assert!(Store::at([a.path(), b.path()]).wipe(|_, _, _| true, |_, _| {}).expect("the rest of the store"));
}

#[test]
fn a_read_only_device_is_refused_before_anything_is_written() {
    let dir = directory();
    let Some(device) = device(dir.path()) else { skip!("no loop devices here") };
    let settings = || config_at(device.path(), StorageKind::Auto, 512);
    let path = device.path().display().to_string();
    let set = |mode: &str| assert!(run("blockdev", &[mode, &path]), "blockdev {mode}");
    let refused = |error: Option<Error>| match error {
        Some(Error::Store { found, action, .. }) => {
            assert!(found == "a read-only device" && action.contains("blockdev --setrw"), "{found}; {action}");
            action
        }
        other => panic!("{other:?}"),
    };
    for whole in [false, true] {
        set("--setro");
        let action = refused(block_on(Cache::open(settings())).err());
        assert!(action.contains("`disks`"), "{action}");
        if whole {
            assert_eq!(Store::at([device.path()]).inspect().expect("it can be read").full, 40);
            let wipe = Store::at([device.path()]).wipe(|_, _, _| panic!("nobody is asked"), |_, _| {});
            let action = refused(wipe.err());
            assert!(!action.contains("`disks`"), "{action}");
        }
        set("--setrw");
        serves(&block_on(Cache::open(settings())).expect("it can be written"));
    }
}

#[test]
fn a_device_that_another_process_holds_is_waited_for() {
    let dir = directory();
    let Some(device) = device(dir.path()) else { skip!("no loop devices here") };
    let hold = || OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(device.path()).expect("nobody has it");
    let mut settings = config_at(device.path(), StorageKind::Auto, 512);
    thread::scope(|scope| {
        let held = hold();
        scope.spawn(move || {
            thread::sleep(Duration::from_millis(200));
            drop(held);
        });
        settings.disk.lock_wait = Duration::from_secs(60);
        let cache = block_on(Cache::open(settings.clone())).expect("it is let go of");
        block_on(cache.close()).expect("close");
    });
    let _held = hold();
    settings.disk.lock_wait = Duration::ZERO;
    match block_on(Cache::open(settings)) {
        Err(Error::Store { found, .. }) => assert!(found.contains("open in another cache"), "{found}"),
        other => panic!("{other:?}"),
    }
}
