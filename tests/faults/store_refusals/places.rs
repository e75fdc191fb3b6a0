//! Where a store lies: file systems without direct I/O, raw devices.

use super::*;

#[test]
fn a_file_system_without_direct_io_is_refused_or_warned_about() {
    // Since Linux 6.6 a tmpfs takes direct I/O; either answer is right, a third is not.
    let Ok(dir) = TempDir::new_in("/dev/shm") else {
        eprintln!("skipped: no tmpfs at /dev/shm");
        return;
    };
    let path = dir.path().join("kvhoist.store");
    let mut config = config(&[dir.path()]);
    match open_files(&config) {
        Ok(files) => assert!(files[0].direct),
        Err(Error::Store { path: of, found, action, .. }) => {
            assert_eq!(of, path);
            assert!(found.contains("tmpfs") && action.contains("direct_io"), "{found}; {action}");
            assert!(!path.exists(), "taken back");
        }
        Err(other) => panic!("{other}"),
    }
    config.disk.direct_io = DirectIo::Prefer;
    assert!(open_store(&config).expect("created").created);
    assert!(!open_store(&config).expect("opened").created);
}

/// A block device over a file.
struct Loop(PathBuf);

impl Loop {
    fn new(file: &Path) -> Option<Self> {
        let output = Command::new("losetup").args(["--find", "--show"]).arg(file).output().ok()?;
        let name = String::from_utf8(output.stdout).ok()?.trim().to_owned();
        (output.status.success() && name.starts_with("/dev/loop")).then(|| Loop(name.into()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

#[test]
fn a_raw_device_is_used_only_if_it_is_blank_or_ours() {
    let dir = scratch();
    let image = dir.path().join("image");
    let file = File::create(&image).expect("created");
    file.set_len(16 << 20).expect("sized");
    let Some(device) = Loop::new(&image) else {
        eprintln!("skipped: no loop devices here (needs root and losetup)");
        return;
    };
    let path = device.0.as_path();
    let disk = File::options().read(true).write(true).open(path).expect("opened");
    for (at, words) in
        [(0, "did not write"), (65536, "data at byte 65536"), ((16 << 20) - 512, "data at byte 16776704")]
    {
        disk.write_all_at(b"what another system keeps there", at).expect("written");
        disk.sync_all().expect("flushed");
        let (found, ..) = refusal(path, open_files(&config(&[path])));
        assert!(found.contains(words), "{found}");
        disk.write_all_at(&[0; 512], at).expect("written");
    }
    disk.write_all_at(&[0xEE; 4096], 2 << 20).expect("old data where blocks go");
    disk.sync_all().expect("flushed");
    let mut large = config(&[path]);
    large.disk.paths[0].capacity = Capacity::Blocks(4000);
    let (found, expected, action) = refusal(path, open_files(&large));
    assert_eq!((&*found, &*expected), ("a device of 16777216 bytes", "at least 33816576 bytes"));
    assert!(action.contains("lower `disks.blocks`"), "{action}");
    let store = open_store(&config(&[path])).expect("created");
    assert!(store.created);
    assert_eq!(open_store(&config(&[path])).expect("opened").uuid, store.uuid);
    let report = Store::at([path]).verify(|_| ControlFlow::Continue(()));
    assert!(report.expect("a store").is_clean());
    let found = Store::at([path]).inspect().expect("a store");
    assert!(found.members[0].device && found.members[0].bytes == 16 << 20);
    let files = open_files(&config(&[path])).expect("opened");
    assert!(files[0].device && files[0].bytes == 16 << 20 && !files[0].zeroed);
    let (found, ..) = refusal(path, open_files(&config(&[path])));
    assert!(found.contains("in use") || found.contains("a lock on it"), "{found}");
}

#[test]
fn a_missing_device_does_not_become_a_file() {
    let path = PathBuf::from(format!("/dev/kvhoist-missing-{}", std::process::id()));
    let opened = open_files(&config(&[&path])).map(drop);
    let is_created = path.exists();
    drop(fs::remove_file(&path));
    let (found, ..) = refusal(&path, opened);
    assert_eq!((&*found, is_created), ("no such device", false));
}

#[test]
fn a_file_with_holes_gets_its_blocks() {
    let dir = scratch();
    let config = config(&[dir.path()]);
    let (path, wanted) = (dir.path().join("kvhoist.store"), Stripe::new(&config).members()[0].bytes);
    let allocated = || std::os::unix::fs::MetadataExt::blocks(&fs::metadata(&path).expect("metadata")) * 512;
    // What another program has made of the right size, and a copy of a store that leaves out zeros.
    let mut head = Vec::new();
    for is_store in [false, true] {
        write_private(&path, &head);
        File::options().write(true).open(&path).expect("opened").set_len(wanted).expect("sized");
        assert!(allocated() < wanted / 2, "it has holes");
        let seen = open_store(&config).expect("opened");
        assert_eq!((seen.created, seen.free), (!is_store, 40));
        assert!(allocated() >= wanted, "{} of {wanted} bytes", allocated());
        head = fs::read(&path).expect("readable")[..8192].to_vec();
        fs::remove_file(&path).expect("removed");
    }
    // More than any disk has here.
    let mut large = config.clone();
    (large.block_bytes, large.disk.paths[0].capacity) = (1 << 30, Capacity::Blocks(15 << 10));
    large.limits.read_bytes_in_flight_max = 1 << 30;
    large.limits.write_bytes_in_flight_max = 1 << 30;
    write_private(&path, b"");
    let bytes = Stripe::new(&large).members()[0].bytes;
    File::options().write(true).open(&path).expect("opened").set_len(bytes).expect("sized");
    let (found, ..) = refusal(&path, open_files(&large));
    assert!(found.contains("bytes available on "), "{found}");
    assert_eq!(fs::metadata(&path).expect("left as it was").len(), bytes);
}
