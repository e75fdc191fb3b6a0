//! What is not a store of these settings is refused in words of its own, and left as it was.

use crate::common;
mod places;
mod readers;

use std::{
    ffi::CString,
    fs::{self, File},
    ops::ControlFlow,
    os::unix::{
        ffi::OsStrExt,
        fs::{FileExt, PermissionsExt, symlink},
    },
    path::{Path, PathBuf},
    process::Command,
};

use common::write_private;
use kvhoist::{
    Capacity, Config, DirectIo, DiskPath, Error,
    internals::{
        disk::{
            StoreFile,
            format::{
                stripe::Stripe,
                superblock::{StoreState, Superblock},
            },
            open_files, recover,
        },
        io::Files,
    },
    store::Store,
};
use tempfile::TempDir;

/// A directory on the disk that the build is on: `/tmp` may be a tmpfs, which older kernels refuse direct I/O.
fn scratch() -> TempDir {
    TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).expect("a scratch directory")
}

fn config(paths: &[&Path]) -> Config {
    let disk = |path: &&Path| DiskPath::with_blocks(path.to_path_buf(), 40);
    Config::default().block_bytes(5000).disks(paths.iter().map(disk).collect())
}

/// A store that was opened and closed again.
#[derive(Debug)]
struct Seen {
    created: bool,
    uuid: [u8; 16],
    free: u64,
}

/// Opens the files and then the store in them; both are closed when this returns.
fn open_store(config: &Config) -> Result<Seen, Error> {
    let files = open_files(config)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let recovered = tokio::task::LocalSet::new().block_on(&runtime, async {
        let storage = Files::by_calls(files.iter().map(|file| file.file.clone()).collect(), 2).expect("threads");
        recover(&storage, &files, config, &(), &mut |_, _| ()).await
    })?;
    let mut head = [0; 4096];
    File::open(&files[0].path).expect("there").read_exact_at(&mut head, 0).expect("a superblock");
    let superblock = Superblock::decode(&head).expect("a sound superblock");
    assert_eq!(superblock.state, StoreState::Whole);
    Ok(Seen { created: files[0].fresh, uuid: superblock.uuid, free: recovered.counts.free })
}

/// The found, expected and action parts of a refusal of `path`, none of them empty.
fn refusal<T>(path: &Path, result: Result<T, Error>) -> (String, String, String) {
    match result.err().expect("a refusal") {
        Error::Store { path: of, found, expected, action } => {
            assert_eq!(of, path);
            assert!(!found.is_empty() && !expected.is_empty() && !action.is_empty());
            (found, expected, action)
        }
        other => panic!("not a refusal of a store: {other}"),
    }
}

/// Everything below a directory: names, modes and bytes.
fn snapshot(dir: &Path) -> Vec<(PathBuf, u32, Option<Vec<u8>>)> {
    let mut entries: Vec<_> =
        fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry").path()).collect();
    entries.sort();
    let describe = |path: PathBuf| {
        let metadata = fs::symlink_metadata(&path).expect("metadata");
        let bytes = metadata.is_file().then(|| fs::read(&path).expect("readable"));
        (path, metadata.permissions().mode(), bytes)
    };
    entries.into_iter().map(describe).collect()
}

/// Refused both as the only path and after a path whose file would have to be created; nothing changes.
fn assert_refused(dir: &Path, path: &Path, words: &str) {
    let before = snapshot(dir);
    let new = dir.join("new.store");
    // Cut short, a store may still be one that misses its other members: alone only.
    let alone = words.contains("truncated to");
    for paths in [&[path][..], &[&new, path], &[path, &new]].into_iter().take(if alone { 1 } else { 3 }) {
        let (found, expected, action) = refusal(path, open_files(&config(paths)));
        let text = format!("found {found}, expected {expected}; {action}");
        assert!(text.contains(words), "{words:?} is not in: {text}");
        assert!(snapshot(dir) == before, "something changed in {} ({words})", dir.display());
    }
}

#[test]
fn a_new_store_is_private_whole_and_opens_again() {
    let dir = scratch();
    let config = config(&[dir.path()]);
    let files = open_files(&config).expect("opened");
    let StoreFile { path, direct, fresh, zeroed, device, bytes, .. } = &files[0];
    let wanted = Stripe::new(&config).members()[0].bytes;
    assert_eq!(*path, dir.path().join("kvhoist.store"));
    assert!(*direct && *fresh && *zeroed && !device);
    let metadata = fs::metadata(path).expect("metadata");
    assert_eq!((metadata.permissions().mode() & 0o777, metadata.len(), *bytes), (0o600, wanted, wanted));
    let allocated = std::os::unix::fs::MetadataExt::blocks(&metadata) * 512;
    assert!(allocated >= wanted, "{allocated} bytes are preallocated");
    drop(files);
    let first = open_store(&config).expect("created");
    let second = open_store(&config).expect("opened again");
    assert_eq!((first.created, second.created, first.uuid), (true, false, second.uuid));
    assert_eq!(second.free, 40);
}

#[test]
fn a_file_path_may_be_relative_to_a_directory_that_exists() {
    let dir = scratch();
    let path = dir.path().join("a.store");
    open_store(&config(&[&path])).expect("created");
    assert!(path.is_file());
}

#[test]
fn a_missing_directory_is_not_created() {
    let dir = scratch();
    assert_refused(dir.path(), &dir.path().join("no/file"), &format!("no directory {}/no", dir.path().display()));
    let slash = PathBuf::from(format!("{}/no/", dir.path().display()));
    let (found, ..) = refusal(&slash, open_files(&config(&[&slash])));
    assert!(found.contains("no directory"), "{found}");
    assert!(snapshot(dir.path()).is_empty());
}

#[test]
fn what_is_neither_a_file_nor_a_block_device_is_refused() {
    let dir = scratch();
    let path = |name: &str| dir.path().join(name);
    fs::write(path("target"), b"").expect("written");
    symlink(path("target"), path("link")).expect("linked");
    symlink(path("nowhere"), path("dangling")).expect("linked");
    let fifo = CString::new(path("fifo").as_os_str().as_bytes()).expect("no zeros");
    // SAFETY: a valid string that outlives the call.
    assert_eq!(unsafe { libc::mkfifo(fifo.as_ptr(), 0o600) }, 0);
    let _socket = std::os::unix::net::UnixListener::bind(path("socket")).expect("bound");
    assert_refused(dir.path(), &path("link"), "links are not followed");
    assert_refused(dir.path(), &path("dangling"), "found a symbolic link");
    assert_refused(dir.path(), &path("fifo"), "found a named pipe");
    assert_refused(dir.path(), &path("socket"), "found a socket");
    assert_refused(dir.path(), Path::new("/dev/null"), "found a character device");
    let below = path("below");
    fs::create_dir_all(below.join("kvhoist.store")).expect("created");
    let (found, ..) = refusal(&below.join("kvhoist.store"), open_files(&config(&[&below])));
    assert_eq!(found, "a directory");
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table of files")]
fn foreign_files_are_refused_and_stay_as_they_are() {
    let dir = scratch();
    let path = |name: &str| dir.path().join(name);
    let whole = {
        open_store(&config(&[&path("other")])).expect("created");
        fs::read(path("other")).expect("readable")
    };
    fs::remove_file(path("other")).expect("removed");
    let with = |name: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = whole.clone();
        change(&mut bytes);
        write_private(&path(name), bytes);
        path(name)
    };
    let blank = |bytes: &mut Vec<u8>| bytes.fill(0);
    let cases = [
        (with("text", &|b| b.splice(.., *b"to be kept").for_each(drop)), "kvhoist did not write"),
        (with("short blank", &|b| b.splice(.., [0; 5000]).for_each(drop)), "5000 bytes that holds no store"),
        (
            with("long blank", &|b| {
                blank(b);
                b.push(0);
            }),
            "holds no store",
        ),
        (
            with("late data", &|b| {
                blank(b);
                b[100_000] = 1;
            }),
            "data at byte 100000",
        ),
        (
            with("last data", &|b| {
                blank(b);
                *b.last_mut().expect("bytes") = 1;
            }),
            "data at byte ",
        ),
        (with("cut", &|b| b.truncate(b.len() - 1)), "a file truncated to"),
        (with("cut to a head", &|b| b.truncate(8192)), "a file truncated to 8192 bytes"),
        (with("cut into the head", &|b| b.truncate(4097)), "a file truncated to 4097 bytes"),
        (
            with("damaged", &|b| {
                b[50] ^= 1;
                b[4146] ^= 1;
            }),
            "both damaged",
        ),
        (
            with("newer", &|b| {
                b[8] = 3;
                reseal(b);
            }),
            "format version 3",
        ),
        (
            with("impossible", &|b| {
                b[4096..8192].fill(0);
                b[80] = 9;
                reseal(b);
            }),
            "impossible member index",
        ),
    ];
    for (path, words) in cases {
        assert_refused(dir.path(), &path, words);
    }
}

/// Gives superblock A a good crc.
fn reseal(bytes: &mut [u8]) {
    let crc = kvhoist::internals::checksum::checksum(&bytes[..504]);
    bytes[504..512].copy_from_slice(&crc.to_le_bytes());
}

#[test]
fn stores_of_other_settings_are_refused_and_stay_as_they_are() {
    let dir = scratch();
    let [a, b, c] = ["a", "b", "c"].map(|name| dir.path().join(name));
    let ours = config(&[&a, &b]);
    open_store(&ours).expect("created");
    open_store(&config(&[&c])).expect("created");
    let before = snapshot(dir.path());
    let changed = |change: &dyn Fn(&mut Config)| {
        let mut config = ours.clone();
        change(&mut config);
        config
    };
    let missing = dir.path().join("missing");
    let cases: Vec<(&Path, Config, &str)> = vec![
        (&a, changed(&|c| c.namespace = "other".into()), "`namespace` = \"default\""),
        (&a, changed(&|c| c.block_bytes = 5001), "`block_bytes` = 5000"),
        (&a, changed(&|c| c.disk.paths[0].capacity = Capacity::Blocks(41)), "a store of 40 slots on this path"),
        (&a, changed(&|c| c.disk.paths[1].capacity = Capacity::Blocks(39)), "80 in all"),
        (&a, changed(&|c| c.disk.paths.swap(0, 1)), ""),
        (&a, config(&[&a]), "a store of 2 members"),
        (&c, config(&[&a, &c]), "a member of store"),
        (&missing, config(&[&a, &missing]), "no file"),
        (&c, config(&[&missing, &c]), "a store of 1 members"),
    ];
    for (path, config, words) in cases {
        let swapped = config.disk.paths.first().is_some_and(|disk| disk.path == b);
        let (found, ..) = refusal(if swapped { &b } else { path }, open_files(&config));
        assert!(found.contains(if swapped { "member 1 of the store" } else { words }), "{words:?} is not in: {found}");
        assert!(snapshot(dir.path()) == before, "something changed ({words})");
    }
    open_store(&ours).expect("still a store");
}

#[test]
fn a_store_is_opened_once() {
    let dir = scratch();
    let path = dir.path().join("a");
    let held = open_files(&config(&[&path])).expect("opened");
    assert_refused(dir.path(), &path, "the store is open in another process, or a second time in this one");
    drop(held);
    let again = dir.path().join("..").join(dir.path().file_name().expect("a name")).join("a");
    let (found, ..) = refusal(&again, open_files(&config(&[&path, &again])));
    assert!(found.contains("a lock on it"), "{found}");
    drop(open_files(&config(&[&path])).expect("the lock is gone"));
    let other = File::open(&path).expect("opened");
    other.lock().expect("locked, as another process would");
    assert_refused(dir.path(), &path, "close the other cache first");
}

#[test]
fn a_creation_that_was_cut_off_is_done_again() {
    let dir = scratch();
    let path = dir.path().join("a");
    let config = config(&[&path]);
    // As a crash before preallocation leaves it.
    write_private(&path, b"");
    let bytes = open_files(&config).expect("opened")[0].bytes;
    assert_eq!(fs::metadata(&path).expect("metadata").len(), bytes);
    let file = File::options().write(true).open(&path).expect("opened");
    assert!(open_store(&config).expect("created").created);
    let head: Vec<u8> = fs::read(&path).expect("readable")[..8192].to_vec();
    // Superblock A forming (as before the second step), B blank.
    let mut forming = head[..4096].to_vec();
    forming[12] = 1;
    reseal(&mut forming);
    file.write_all_at(&forming, 0).expect("written");
    file.write_all_at(&[0; 4096], 4096).expect("written");
    // It had cleared the record table: what is there now is of a store.
    file.write_all_at(&[0xEE], 8192 + 2 * 4096 - 1).expect("written");
    assert_refused(dir.path(), &path, "records of blocks");
    file.write_all_at(&[0], 8192 + 2 * 4096 - 1).expect("written");
    let again = open_store(&config).expect("created again");
    assert_eq!((again.created, again.free), (true, 40));
    assert_eq!(open_store(&config).expect("opened").free, 40);
}

#[test]
fn a_store_whose_superblocks_are_zeroed_is_refused_wherever_its_records_are() {
    let dir = scratch();
    let path = dir.path().join("a");
    let mut config = config(&[&path]);
    (config.block_bytes, config.disk.paths[0].capacity) = (512, Capacity::Blocks(20_000));
    assert!(open_store(&config).expect("created").created);
    let file = File::options().write(true).open(&path).expect("opened");
    file.write_all_at(&[0; 8192], 0).expect("written");
    let end = fs::metadata(&path).expect("metadata").len() - (1 << 20);
    // The first record, one beyond the first MiB, and the last one: none is in the last MiB of the file.
    for record in [0, 9_000, 19_999] {
        let at = 8192 + record * 128;
        assert!(at < end, "the end of the file is zeros");
        file.write_all_at(&[1], at).expect("written");
        let (found, ..) = refusal(&path, open_files(&config));
        assert!(found.contains(&format!("data at byte {at}")), "{found}");
        file.write_all_at(&[0], at).expect("written");
    }
    assert!(open_store(&config).expect("created again").created, "nothing but zeros");
}

#[test]
fn more_than_there_is_room_for_is_refused_and_taken_back() {
    let dir = scratch();
    let (small, large, empty) = (dir.path().join("small"), dir.path().join("large"), dir.path().join("empty"));
    let mut config = config(&[&small, &large]);
    config.block_bytes = 1 << 30;
    config.disk.paths[0].capacity = Capacity::Blocks(1);
    config.disk.paths[1].capacity = Capacity::Blocks(1 << 22);
    config.limits.read_bytes_in_flight_max = 1 << 30;
    config.limits.write_bytes_in_flight_max = 1 << 30;
    let (found, expected, action) = refusal(&large, open_files(&config));
    assert!(found.contains("bytes available on "), "{found}");
    assert_eq!(expected, format!("room for {} bytes", (1u64 << 52) + (513 << 20)));
    assert!(action.contains("lower `disks.blocks`"), "{action}");
    assert!(snapshot(dir.path()).is_empty(), "both files are gone");
    write_private(&empty, b"");
    config.disk.paths[1].path.clone_from(&empty);
    refusal(&empty, open_files(&config));
    assert_eq!(snapshot(dir.path()).len(), 1);
    assert_eq!(fs::metadata(&empty).expect("not ours to remove").len(), 0);
}

#[test]
fn a_path_without_permission_is_refused() {
    // Not even root may create files there.
    let path = Path::new("/sys/kvhoist.store");
    if !Path::new("/sys/kernel").exists() {
        return common::skip::skipped("nothing is mounted at /sys, where not even root may create files");
    }
    let (found, ..) = refusal(path, open_files(&config(&[path])));
    assert!(found.contains("no permission"), "{found}");
}

#[test]
fn wrong_settings_are_refused_before_anything_is_touched() {
    let dir = scratch();
    let mut config = config(&[dir.path()]);
    config.namespace.clear();
    assert!(matches!(open_files(&config), Err(Error::Config { field: "namespace", .. })));
    assert!(snapshot(dir.path()).is_empty());
}
