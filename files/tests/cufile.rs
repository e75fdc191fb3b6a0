//! Reads into device memory by libcufile, without a device: over doubles of its library and of the driver's. Each test
//! runs in processes of its own, because a process loads a library once.
#![cfg(feature = "cufile")]

use std::{
    ffi::{CStr, CString},
    fs::OpenOptions,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use kvhoist::internals::device::cufile::CufileReader;
use kvhoist::internals::gpu::{DeviceBuffer, Gpu};
use kvhoist::internals::memory::DeviceMemory;
use kvhoist_files::{Memory, Mode, Options, Range, Report, SourceFile, read};
use tempfile::TempDir;

/// How the double behaves, in a process that runs a test apart.
const DOUBLE: &str = "CUFILE_DOUBLE";

/// Bytes of each file, and of a request: some requests of each thread.
const FILE_BYTES: usize = (3 << 20) + 777;
const PIECE_BYTES: usize = 64 << 10;

/// On a file system with direct I/O, as a rule.
fn directory() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder")
}

/// A folder with the doubles; libcufile's if it is to be there.
fn built(cufile: bool) -> TempDir {
    let folder = directory();
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/doubles");
    let compile = |source: &str, library: &str| {
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-O1", "-pthread", "-o"]).arg(folder.path().join(library));
        assert!(compiler.arg(sources.join(source)).status().expect("Rust links with cc").success(), "{source}");
    };
    compile("cuda/libcuda.c", "libcuda.so");
    if cufile {
        compile("cufile/libcufile.c", "libcufile.so.0");
    }
    folder
}

/// Runs the body of the test `name` for each way to behave; `none`: there is no libcufile.
fn with_doubles(name: &str, behaviors: &[&str], body: impl FnOnce(&str)) {
    static DOUBLES: OnceLock<[TempDir; 2]> = OnceLock::new();
    if let Ok(behavior) = std::env::var(DOUBLE) {
        // SAFETY: takes a number; a process that hangs is ended by a signal.
        unsafe { libc::alarm(120) };
        return body(&behavior);
    }
    let [with, without] = DOUBLES.get_or_init(|| [built(true), built(false)]);
    for behavior in behaviors {
        let doubles: PathBuf = if *behavior == "none" { without.path().into() } else { with.path().into() };
        let mut command = Command::new(std::env::current_exe().expect("this test"));
        command.args(["--exact", name, "--nocapture", "--test-threads", "1"]);
        let output = command.env("LD_LIBRARY_PATH", doubles).env(DOUBLE, behavior).output().expect("it starts again");
        let said = [&output.stdout[..], &output.stderr[..]].map(String::from_utf8_lossy).concat();
        assert!(output.status.success() && said.contains("1 passed"), "{behavior}: {}: {said}", output.status);
    }
}

/// A number that the double of libcufile has counted; 0 where it was never loaded.
fn counted(what: &str) -> u64 {
    // SAFETY: looks a loaded library up, and closes none.
    let library = unsafe { libc::dlopen(c"libcufile.so.0".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    if library.is_null() {
        return 0;
    }
    let name = CString::new(format!("cufile_double_{what}")).expect("no zeros");
    // SAFETY: a valid handle and a name.
    let found = unsafe { libc::dlsym(library, CStr::as_ptr(&name)) };
    assert!(!found.is_null(), "the double has {what}");
    // SAFETY: the double's counters take nothing and return a number.
    unsafe { std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> u64>(found)() }
}

/// Two files, read to device memory whose addresses agree with their offsets but for `shift` bytes. Checks every byte.
fn load(mode: Mode, shift: usize) -> Option<Report> {
    load_by(PIECE_BYTES, mode, shift)
}

/// As [`load`], by requests of so many bytes.
fn load_by(piece_bytes: usize, mode: Mode, shift: usize) -> Option<Report> {
    let folder = directory();
    let handles = counted("handles");
    let gpu = Gpu::open(0).expect("the double has one");
    let room = FILE_BYTES + 3 * 4096;
    let memory = DeviceBuffer::new(gpu, 2 * room).expect("room");
    let first = (memory.base().as_ptr().addr()).next_multiple_of(4096);
    let mut files = Vec::new();
    let mut ranges = Vec::new();
    for n in 0..2 {
        let path = folder.path().join(n.to_string());
        let content: Vec<u8> = (0..FILE_BYTES).map(|at| (at * 7 + at / 4096 + n) as u8).collect();
        std::fs::write(&path, content).expect("a small file");
        let file = SourceFile::open(&path).expect("it is there");
        file.direct_align()?;
        files.push(file);
        let (offset, len) = (1000, FILE_BYTES - 1500);
        ranges.push(Range { file: n, offset, len, address: first + n * (room - room % 4096) + 1000 + shift });
    }
    let mut options = Options::default();
    (options.mode, options.page_cache) = (mode, false);
    (options.threads, options.piece_bytes) = (Some(4), Some(piece_bytes));
    // SAFETY: the memory lives until the transfer has ended, and nothing else uses it.
    let report = unsafe { read(files, ranges.clone(), Memory::Cuda(0), &options) }.expect("they are in the files");
    let report = report.wait().expect("all is read");
    for (n, range) in ranges.iter().enumerate() {
        // SAFETY: the double's device memory is host memory, and the transfer has ended.
        let found = unsafe { std::slice::from_raw_parts(range.address as *const u8, range.len) };
        let is_right = |(at, byte): (usize, &u8)| *byte == ((at + 1000) * 7 + (at + 1000) / 4096 + n) as u8;
        assert!(found.iter().enumerate().all(is_right), "file {n}");
    }
    assert_eq!(counted("handles"), handles, "every file is given back");
    Some(report)
}

macro_rules! or_skip {
    ($report:expr) => {
        match $report {
            Some(report) => report,
            None => return eprintln!("SKIPPED: no direct I/O here"),
        }
    };
}

#[test]
fn a_proven_way_is_taken_but_for_unaligned_ends() {
    with_doubles("a_proven_way_is_taken_but_for_unaligned_ends", &["direct", "p2p"], |_| {
        let report = or_skip!(load(Mode::Cufile, 0));
        // A page at most at each end of a range.
        let ends = report.bytes - report.cufile_bytes;
        assert!(ends > 0 && ends <= 4 * 4096, "{report:?}");
        assert_eq!((report.bounced_bytes, report.direct_bytes, report.buffered_bytes), (ends, ends, 0));
        assert_eq!(counted("writable"), 0, "a file is opened for reading only");
    });
}

#[test]
fn what_proves_no_direct_way_is_bounced() {
    // In compat mode; a library that says that it has read, and has not; a drive that it refuses; none.
    with_doubles("what_proves_no_direct_way_is_bounced", &["compat", "liar", "record", "none"], |_| {
        let report = or_skip!(load(Mode::Cufile, 0));
        assert_eq!((report.cufile_bytes, report.bounced_bytes), (0, report.bytes), "{report:?}");
        let asked = counted("posix");
        // Asked once for each drive, not again.
        or_skip!(load(Mode::Cufile, 0));
        assert_eq!(counted("posix"), asked);
    });
}

/// Its counters are those of the process: a cache's transfers are counted with the read of a proof.
#[test]
fn a_proof_beside_other_reads_is_made_again() {
    with_doubles("a_proof_beside_other_reads_is_made_again", &["others"], |_| {
        or_skip!(load(Mode::Cufile, 0));
        let report = or_skip!(load(Mode::Cufile, 0));
        assert!(report.bytes - report.cufile_bytes <= 4 * 4096, "{report:?}");
    });
}

#[test]
fn a_drive_is_asked_once_by_a_transfer_and_not_again_where_its_reads_fail() {
    let name = "a_drive_is_asked_once_by_a_transfer_and_not_again_where_its_reads_fail";
    with_doubles(name, &["refuses", "layout"], |behavior| {
        for transfer in 1..=2 {
            let report = or_skip!(load(Mode::Cufile, 0));
            assert_eq!((report.cufile_bytes, report.bounced_bytes), (0, report.bytes), "{report:?}");
            // Of two files.
            let expected = if behavior == "layout" { transfer } else { 1 };
            assert_eq!(counted("asked_reads"), expected);
        }
    });
}

/// Of a read, or of a proof, that never returns only its own transfer waits for the end.
#[test]
fn a_read_that_does_not_return_holds_up_no_other_transfer() {
    let name = "a_read_that_does_not_return_holds_up_no_other_transfer";
    with_doubles(name, &["stuck"], |_| {
        or_skip!(load(Mode::Bounce, 0));
        std::thread::scope(|scope| {
            let proof = scope.spawn(|| load(Mode::Cufile, 0));
            while counted("asked_reads") == 0 {
                std::thread::yield_now();
            }
            let report = load(Mode::Cufile, 0).expect("direct I/O");
            assert_eq!((report.cufile_bytes, report.bounced_bytes), (0, report.bytes), "{report:?}");
            counted("release");
            let report = proof.join().expect("it ends").expect("direct I/O");
            assert!(report.cufile_bytes > 0, "{report:?}");
        });
    });
}

#[test]
fn a_read_that_does_not_return_holds_up_no_proof() {
    with_doubles("a_read_that_does_not_return_holds_up_no_proof", &["stuck"], |_| {
        const LEN: usize = 4096;
        or_skip!(load(Mode::Bounce, 0));
        let folder = directory();
        let path = folder.path().join("file");
        std::fs::write(&path, [7; LEN]).expect("a small file");
        let memory = DeviceBuffer::new(Gpu::open(0).expect("the double has one"), 2 * LEN).expect("room");
        let address = (memory.base().as_ptr().addr()).next_multiple_of(4096);
        let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&path).expect("it is there");
        let reader = CufileReader::open(Arc::new(file), Duration::from_secs(10)).expect("the double is there");
        std::thread::scope(|scope| {
            // SAFETY: memory that no other thread has.
            let stuck = scope.spawn(|| unsafe { reader.read(address, LEN, 0) });
            while counted("asked_reads") == 0 {
                std::thread::yield_now();
            }
            let report = load(Mode::Cufile, 0).expect("direct I/O");
            assert_eq!((report.cufile_bytes, report.bounced_bytes), (0, report.bytes), "{report:?}");
            counted("release");
            assert_eq!(stuck.join().expect("it ends"), Ok(LEN));
        });
        assert!(load(Mode::Cufile, 0).expect("direct I/O").cufile_bytes > 0, "nothing is kept of it");
    });
}

#[test]
fn a_drive_is_proven_while_others_are_read() {
    with_doubles("a_drive_is_proven_while_others_are_read", &["direct"], |_| {
        const LEN: usize = 64 << 10;
        let folder = directory();
        let path = folder.path().join("file");
        std::fs::write(&path, [7; LEN]).expect("a small file");
        or_skip!(SourceFile::open(&path).expect("it is there").direct_align());
        let memory = DeviceBuffer::new(Gpu::open(0).expect("the double has one"), 4 * LEN).expect("room");
        let address = |n: usize| (memory.base().as_ptr().addr()).next_multiple_of(4096) + n * LEN;
        let open = || {
            let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&path).expect("it is there");
            CufileReader::open(Arc::new(file), Duration::from_secs(10)).expect("the double is there")
        };
        let (reads, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for n in 0..2 {
                let (reader, reads, is_over, address) = (open(), &reads, &is_over, address(n));
                scope.spawn(move || {
                    while !is_over.load(Ordering::Relaxed) {
                        // SAFETY: memory of this thread's own.
                        let read = unsafe { reader.read(address, LEN, 0) };
                        reads.fetch_add(usize::from(read.is_ok()), Ordering::Relaxed);
                    }
                });
            }
            let reader = open();
            let proofs = (0..200).map(|_| {
                let before = reads.load(Ordering::Relaxed);
                while reads.load(Ordering::Relaxed) == before {
                    std::thread::yield_now();
                }
                // SAFETY: memory that no other thread has.
                unsafe { reader.prove(address(2), LEN, 0) }
            });
            let failed = proofs.filter(|proof| proof != &Ok(Some(true))).count();
            is_over.store(true, Ordering::Relaxed);
            // On a loaded machine a read may take longer than a proof waits.
            assert!(failed < 50, "{failed} proofs of 200 showed nothing");
        });
    });
}

#[test]
fn a_request_that_it_refuses_is_bounced_and_a_short_one_goes_on() {
    with_doubles("a_request_that_it_refuses_is_bounced_and_a_short_one_goes_on", &["parts"], |_| {
        // Two calls each, of which every fifth fails: not each request has one that fails.
        let report = or_skip!(load_by(8 << 10, Mode::Cufile, 0));
        assert!(report.cufile_bytes > 0 && report.bounced_bytes > 2 * PIECE_BYTES as u64, "{report:?}");
        assert_eq!(report.cufile_bytes + report.bounced_bytes, report.bytes);
    });
}

#[test]
fn memory_that_does_not_lie_as_the_file_does_is_bounced() {
    with_doubles("memory_that_does_not_lie_as_the_file_does_is_bounced", &["direct"], |_| {
        let report = or_skip!(load(Mode::Cufile, 512));
        assert_eq!((report.cufile_bytes, report.bounced_bytes), (0, report.bytes), "{report:?}");
    });
}

/// The double copies a while after it was told to: what is looked at too early, or read over, is wrong.
#[test]
fn ranges_arrive_when_their_copies_have_ended_and_a_drop_waits_for_them() {
    const LEN: usize = 5000;
    with_doubles("ranges_arrive_when_their_copies_have_ended_and_a_drop_waits_for_them", &["none"], |_| {
        let folder = directory();
        let path = folder.path().join("file");
        let content: Vec<u8> = (0..FILE_BYTES).map(|at| (at * 7 + at / 4096) as u8).collect();
        std::fs::write(&path, &content).expect("a small file");
        let gpu = Gpu::open(0).expect("the double has one");
        let memory = DeviceBuffer::new(gpu, FILE_BYTES).expect("room");
        let first = memory.base().as_ptr().addr();
        let ranges = (0..FILE_BYTES / LEN).map(|n| Range {
            file: 0,
            offset: (LEN * n) as u64,
            len: LEN,
            address: first + LEN * n,
        });
        let mut options = Options::default();
        (options.threads, options.piece_bytes) = (Some(2), Some(16 << 10));
        let start = || {
            let files = vec![SourceFile::open(&path).expect("it is there")];
            // SAFETY: the memory lives until the transfer has ended, and is looked at where ranges have arrived.
            unsafe { read(files, ranges.clone().collect(), Memory::Cuda(0), &options) }.expect("they are in the file")
        };
        // SAFETY: the double's device memory is host memory, where nothing is written now.
        let found = |range: usize| unsafe { std::slice::from_raw_parts((first + LEN * range) as *const u8, LEN) };
        let transfer = start();
        let mut arrived = 0;
        while let Some(ranges) = transfer.next_ranges(Duration::MAX) {
            for range in ranges {
                assert!(*found(range) == content[LEN * range..LEN * (range + 1)], "range {range} was not there");
                arrived += 1;
            }
        }
        assert_eq!(arrived, FILE_BYTES / LEN);
        transfer.wait().expect("all is read");
        for taken in 0..20 {
            // SAFETY: as above: no transfer is under way.
            unsafe { std::ptr::write_bytes(first as *mut u8, 0xEE, FILE_BYTES) };
            let transfer = start();
            (0..taken).for_each(|_| drop(transfer.next_ranges(Duration::MAX)));
            drop(transfer);
            let then: Vec<Vec<u8>> = (0..FILE_BYTES / LEN).map(|range| found(range).to_vec()).collect();
            std::thread::sleep(Duration::from_millis(2));
            assert!(then.iter().enumerate().all(|(range, bytes)| found(range) == &bytes[..]), "written after the end");
        }
    });
}

#[test]
fn it_is_not_opened_unless_it_is_wanted() {
    with_doubles("it_is_not_opened_unless_it_is_wanted", &["direct"], |_| {
        let modes = if Path::new("/proc/driver/nvidia-fs").exists() {
            vec![Mode::Bounce]
        } else {
            vec![Mode::Bounce, Mode::Auto]
        };
        for mode in modes {
            let report = or_skip!(load(mode, 0));
            assert_eq!((report.cufile_bytes, report.bounced_bytes), (0, report.bytes), "{report:?}");
            assert_eq!(counted("direct"), 0);
        }
    });
}

/// A thread captures a stream in global mode: the threads of a transfer neither fail nor end the capture.
#[test]
fn a_capture_of_a_stream_goes_on() {
    with_doubles("a_capture_of_a_stream_goes_on", &["none"], |_| {
        drop(Gpu::open(0).expect("the double has one"));
        // SAFETY: looks a loaded library up, and closes none.
        let library = unsafe { libc::dlopen(c"libcuda.so".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        // SAFETY: a valid handle and a name.
        let found = unsafe { libc::dlsym(library, c"double_capture".as_ptr()) };
        assert!(!found.is_null(), "the double has it");
        // SAFETY: the function of this name takes a number and gives one.
        let capture = unsafe { std::mem::transmute::<*mut libc::c_void, extern "C" fn(i32) -> i32>(found) };
        capture(1);
        let _report = or_skip!(load(Mode::Bounce, 1));
        assert_eq!(capture(0), 1, "nothing ended the capture");
    });
}
