//! Files that the service reads once for all processes of a node.

use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::Instant,
};

use kvhoist::{Error, ServiceFault, block_on};
use kvhoist_files::{Memory, Options, Range, Report, SourceFile};
use kvhoist_service::{
    Client, FileClient, ServerConfig, ServiceStatus,
    internals::protocol::{Reply, Request},
};

use crate::{
    common,
    node::{BLOCK_BYTES, HANG, Process, options_of, say, serve, status_of},
    raw::Raw,
};

const HOST_BYTES: u64 = 64 << 20;
const SIZE: usize = (20 << 20) + 4321;

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let mut bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(next).collect();
    bytes.truncate(len);
    bytes
}

/// A service of its own process, the folder of the files, and a file in it.
struct Place {
    service: Process,
    folder: tempfile::TempDir,
    sockets: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let (folder, sockets) = (common::directory(), tempfile::tempdir().expect("a directory"));
        let mut service = Process::start(&format!("holds {}", sockets.path().join("s").display()));
        assert_eq!(service.word().as_deref(), Some("ready"));
        Place { service, folder, sockets }
    }

    fn socket(&self) -> PathBuf {
        self.sockets.path().join("s")
    }

    fn file(&self, name: &str, seed: u64, len: usize) -> PathBuf {
        let path = self.folder.path().join(name);
        let mut file = File::create(&path).expect("a file");
        file.write_all(&bytes(seed, len)).and_then(|()| file.sync_all()).expect("room");
        path
    }

    fn client(&self) -> FileClient {
        FileClient::connect(self.socket()).expect("a service")
    }

    fn status(&self) -> ServiceStatus {
        status_of(&self.socket())
    }

    /// Waits for so many files that the service holds.
    fn wait_for(&self, files: u32) {
        let hang = Instant::now() + HANG;
        while self.status().files != files {
            assert!(Instant::now() < hang, "{:?}", self.status());
        }
    }
}

/// The service's process: with host memory, and no drives of its own.
pub fn run(socket: &str) {
    let mut config = ServerConfig::new(socket);
    config.host_bytes = HOST_BYTES;
    serve(config);
}

/// A rank: it reads all of a file, and says whether it is right and whether all came from the service.
pub fn rank(socket: &str, path: &str, seed: u64) {
    let client = FileClient::connect(socket).expect("a service");
    let file = client.hold(&SourceFile::open(path).expect("a file"), false).expect("room");
    let (found, report) = read(&file);
    assert!(found == bytes(seed, SIZE), "other bytes");
    assert_eq!((report.held_bytes, report.bytes), (SIZE as u64, SIZE as u64), "{report:?}");
    say("right");
    // All hold it until all have it.
    std::io::read_to_string(std::io::stdin()).expect("the end of the input");
}

fn read(file: &SourceFile) -> (Vec<u8>, Report) {
    let mut found = vec![0; file.size() as usize];
    let range = Range { file: 0, offset: 0, len: found.len(), address: found.as_mut_ptr() as usize };
    // SAFETY: the memory is not touched until the transfer has ended.
    let transfer = unsafe { kvhoist_files::read(vec![file.clone()], vec![range], Memory::Host, &Options::default()) };
    let report = transfer.expect("it is in the file").wait().expect("it is read");
    (found, report)
}

/// Bytes that a process has read by system calls.
fn bytes_read(pid: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/io")).expect("alive");
    text.lines().find_map(|line| line.strip_prefix("rchar: ")?.parse().ok()).expect("a count")
}

#[test]
fn eight_ranks_read_a_file_once() {
    let place = Place::new();
    let path = place.file("weights", 7, SIZE);
    let before = bytes_read(place.service.pid());
    let role = format!("rank {} {} 7", place.socket().display(), path.display());
    let mut ranks: Vec<Process> = (0..8).map(|_| Process::start(&role)).collect();
    for rank in &mut ranks {
        assert_eq!(rank.word().as_deref(), Some("right"));
    }
    let read = bytes_read(place.service.pid()) - before;
    assert!(read >= SIZE as u64, "{read} bytes of {SIZE}: they were read by somebody else");
    assert!(read as f64 <= 1.02 * SIZE as f64, "{read} bytes of {SIZE}");
    for rank in &mut ranks {
        assert!(rank.end().success());
    }
    place.wait_for(0);
    // Its memory is free a moment later.
    let hang = Instant::now() + HANG;
    while place.status().host_left != HOST_BYTES {
        assert!(Instant::now() < hang, "{:?}", place.status());
    }
}

#[test]
fn a_file_that_is_kept_is_not_read_again_and_one_that_changed_is() {
    let place = Place::new();
    let path = place.file("weights", 1, SIZE);
    let source = SourceFile::open(&path).expect("a file");
    let held = place.client().hold(&source, true).expect("room");
    assert!(read(&held).0 == bytes(1, SIZE));
    drop(held);
    let before = bytes_read(place.service.pid());
    let again = place.client().hold(&source, false).expect("room");
    let (found, report) = read(&again);
    assert!(found == bytes(1, SIZE) && report.held_bytes == SIZE as u64, "{report:?}");
    assert!(bytes_read(place.service.pid()) - before < SIZE as u64 / 2, "it was read again");
    assert_eq!(place.status().files, 1);
    // Another version of the file has nothing of this one.
    File::options().write(true).open(&path).expect("there").write_all_at(b"other bytes", 1000).expect("room");
    let changed = SourceFile::open(&path).expect("a file");
    let (found, _) = read(&place.client().hold(&changed, false).expect("room"));
    assert_eq!(&found[1000..1011], b"other bytes");
    // Who has an old one open is told that it changed, by the client's own look.
    let mut byte = [0_u8];
    let range = Range { file: 0, offset: 0, len: 1, address: byte.as_mut_ptr() as usize };
    // SAFETY: as in `read`.
    let transfer = unsafe { kvhoist_files::read(vec![again], vec![range], Memory::Host, &Options::default()) };
    let ended = transfer.expect("it is in the file").wait();
    assert!(matches!(ended, Err(kvhoist_files::Error::Changed { .. })), "{ended:?}");
}

#[test]
fn a_path_that_is_another_file_for_the_service_is_refused() {
    let place = Place::new();
    let path = place.file("weights", 1, 5000);
    let source = SourceFile::open(&path).expect("a file");
    fs::rename(place.file("other", 2, 5000), &path).expect("one folder");
    let error = place.client().hold(&source, false).expect_err("another file");
    assert!(
        matches!(&error, Error::Service { fault: ServiceFault::Argument, text } if text.contains("another file")),
        "{error}"
    );
    fs::remove_file(&path).expect("it is there");
    let error = place.client().hold(&source, false).expect_err("no file");
    assert!(matches!(error, Error::Service { fault: ServiceFault::Io, .. }), "{error}");
    let empty = SourceFile::open(place.file("empty", 1, 0)).expect("a file");
    assert!(matches!(place.client().hold(&empty, false), Err(Error::Argument { .. })));
    assert_eq!(place.status().files, 0);
}

/// A client that waits no longer lets go of what it may yet be given.
#[test]
fn a_file_that_its_client_let_go_of_before_it_was_held_is_not_held() {
    let place = Place::new();
    let path = place.file("weights", 1, SIZE);
    let identity = SourceFile::open(&path).expect("a file").identity();
    let hold = Request::Hold {
        keep: false,
        device: identity.device,
        inode: identity.inode,
        size: identity.size,
        changed_s: identity.changed_s.cast_unsigned(),
        changed_ns: identity.changed_ns.cast_unsigned(),
        path: path.to_str().expect("UTF-8").into(),
    };
    let mut raw = Raw::greeted(&place.socket());
    raw.send(&[hold.encode(7), Request::LetGo { hold: 7 }.encode(0)].concat());
    let (id, reply) = raw.reply().expect("a reply");
    let is_canceled = matches!(&reply, Reply::Failed(failure) if failure.fault == ServiceFault::Canceled);
    assert!(id == 7 && is_canceled, "{reply:?}");
    // And the memory is free for others, while this connection stays.
    place.wait_for(0);
    assert!(
        read(&place.client().hold(&SourceFile::open(&path).expect("a file"), false).expect("room")).0 == bytes(1, SIZE)
    );
    place.wait_for(0);
    drop(raw);
}

/// A reader loses nothing by the death of the service: what has come stays, and it reads the rest itself.
#[test]
fn the_death_of_the_service_costs_no_reader_anything() {
    let mut place = Place::new();
    let path = place.file("weights", 3, SIZE);
    let source = SourceFile::open(&path).expect("a file");
    let client = place.client();
    let held = client.hold(&source, true).expect("room");
    place.service.kill();
    let (found, report) = read(&held);
    assert!(found == bytes(3, SIZE));
    let itself = report.page_cache_bytes + report.direct_bytes + report.buffered_bytes;
    assert!(report.held_bytes + itself >= SIZE as u64, "{report:?}");
    assert!(matches!(client.hold(&source, false), Err(Error::Service { fault: ServiceFault::Away, .. })));
}

/// Files and spaces share the host memory, within what each may have.
#[test]
fn files_and_spaces_share_the_host_memory() {
    let place = Place::new();
    let large = 40 << 20;
    let (one, two) = (place.file("one", 1, large), place.file("two", 2, large));
    let open = |path: &Path| SourceFile::open(path).expect("a file");
    let client = place.client();
    let held = client.hold(&open(&one), true).expect("room");
    // Held by a client: nothing takes its memory.
    let error = client.hold(&open(&two), true).expect_err("no room");
    assert!(matches!(error, Error::Service { fault: ServiceFault::Capacity, .. }), "{error}");
    drop(held);
    // Kept, and nobody's: it makes room for another file, and that for a space.
    let held = client.hold(&open(&two), true).expect("room");
    assert!(read(&held).0 == bytes(2, large));
    assert_eq!(place.status().files, 1);
    drop(held);
    let attach = |host_bytes: u64| {
        let mut options = options_of("space");
        (options.capacity_bytes, options.host_bytes) = (0, host_bytes);
        block_on(Client::connect(place.socket(), options))
    };
    let space = attach(50 << 20).expect("the file gives up its memory");
    assert_eq!((place.status().files, space.block_bytes()), (0, BLOCK_BYTES));
    let error = client.hold(&open(&one), false).expect_err("the space has reserved its memory");
    assert!(matches!(error, Error::Service { fault: ServiceFault::Capacity, .. }), "{error}");
}

#[test]
fn a_space_gives_up_memory_that_it_has_not_reserved_for_a_file() {
    let place = Place::new();
    let mut options = options_of("space");
    (options.capacity_bytes, options.host_bytes) = (0, 0);
    let _space = block_on(Client::connect(place.socket(), options)).expect("all that is left");
    assert_eq!(place.status().host_left, 0);
    let source = SourceFile::open(place.file("weights", 1, SIZE)).expect("a file");
    let held = place.client().hold(&source, false).expect("room");
    let (found, report) = read(&held);
    assert!(found == bytes(1, SIZE) && report.held_bytes == SIZE as u64);
    let status = place.status();
    assert!(status.spaces[0].host_bytes + status.file_bytes <= HOST_BYTES, "{status:?}");
}
