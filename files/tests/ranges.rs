//! Reads and writes of ranges, beside the standard library.

use std::{
    fs,
    future::Future,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    thread::Thread,
    time::Duration,
};

use kvhoist_files::{Error, Memory, Options, Range, Report, SourceFile, read, write, write_at, write_into};
use proptest::prelude::*;

const FILE_BYTES: usize = 300_001;

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u8
    };
    (0..len).map(|_| next()).collect()
}

fn options(threads: usize, piece_bytes: usize, page_cache: bool) -> Options {
    let mut options = Options::default();
    (options.threads, options.piece_bytes, options.page_cache) = (Some(threads), Some(piece_bytes), page_cache);
    options
}

fn files(folder: &Path, count: u64) -> Vec<PathBuf> {
    let make = |n| {
        let path = folder.join(format!("file-{n}"));
        fs::write(&path, bytes(n, FILE_BYTES)).expect("a small file");
        path
    };
    (0..count).map(make).collect()
}

fn open(paths: &[PathBuf]) -> Vec<SourceFile> {
    paths.iter().map(|path| SourceFile::open(path).expect("it is there")).collect()
}

/// Reads (file, offset, length) into one buffer, each at a distance of its own, and compares.
fn read_and_compare(paths: &[PathBuf], wanted: &[(usize, u64, usize)], options: &Options) -> Report {
    let room: usize = wanted.iter().map(|&(_, _, len)| len + 77).sum();
    let mut target = vec![0xEE; room];
    let start = target.as_mut_ptr() as usize;
    let mut at = 0;
    let place = |&(file, offset, len): &(usize, u64, usize)| {
        at += len + 77;
        Range { file, offset, len, address: start + at - len }
    };
    let ranges: Vec<Range> = wanted.iter().map(place).collect();
    // SAFETY: the target is read after the end only.
    let transfer =
        unsafe { read(open(paths), ranges.clone(), Memory::Host, options) }.expect("they are in their files");
    let mut arrived = Vec::new();
    while let Some(ranges) = transfer.next_ranges(Duration::from_secs(60)) {
        assert!(!ranges.is_empty(), "a minute is enough");
        arrived.extend(ranges);
    }
    let report = transfer.wait().expect("nothing fails");
    arrived.sort_unstable();
    assert_eq!(arrived, (0..wanted.len()).collect::<Vec<_>>(), "each range arrives once");
    let mut end = 0;
    for (range, &(file, offset, len)) in ranges.iter().zip(wanted) {
        let at = range.address - start;
        assert!(target[end..at].iter().all(|&byte| byte == 0xEE), "bytes between ranges changed");
        let content = fs::read(&paths[file]).expect("it is there");
        assert!(target[at..at + len] == content[offset as usize..offset as usize + len], "{file} at {offset}: {len}");
        end = at + len;
    }
    report
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_ranges_of_any_files_are_what_the_files_hold(
        drawn in prop::collection::vec((0..3_usize, 0..FILE_BYTES, 0..120_000_usize), 0..12),
        (threads, shift, page_cache) in (1..5_usize, 12..18_u32, any::<bool>()),
    ) {
        let folder = tempfile::tempdir().expect("a folder");
        let paths = files(folder.path(), 3);
        let wanted: Vec<_> =
            drawn.into_iter().map(|(file, at, len)| (file, at as u64, len.min(FILE_BYTES - at))).collect();
        let report = read_and_compare(&paths, &wanted, &options(threads, 1 << shift, page_cache));
        prop_assert_eq!(report.bytes, wanted.iter().map(|&(_, _, len)| len as u64).sum::<u64>());
    }

    #[test]
    fn a_written_file_is_its_pieces_one_after_the_other(
        lens in prop::collection::vec(0..90_000_usize, 0..8), (threads, shift) in (1..5_usize, 12..18_u32),
    ) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("written");
        let parts: Vec<Vec<u8>> = lens.iter().enumerate().map(|(n, &len)| bytes(n as u64, len)).collect();
        let pieces: Vec<_> = parts.iter().map(|part| (part.as_ptr() as usize, part.len())).collect();
        // SAFETY: `parts` stay as they are until the end.
        let transfer = unsafe { write(&path, &pieces, Memory::Host, &options(threads, 1 << shift, true)) };
        transfer.expect("it begins").wait().expect("there is room");
        prop_assert!(fs::read(&path).expect("it is there") == parts.concat());
        prop_assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1, "a temporary file stays");
    }

    #[test]
    fn ranges_written_in_place_leave_the_rest(
        mut cuts in prop::collection::vec(0..FILE_BYTES, 2..20), shift in 12..18_u32,
    ) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = files(folder.path(), 1).remove(0);
        let (new, mut expected) = (bytes(99, FILE_BYTES), fs::read(&path).expect("it is there"));
        cuts.sort_unstable();
        // Every second stretch between the cuts.
        let ranges: Vec<Range> = cuts
            .chunks_exact(2)
            .map(|cut| Range {
                file: 0,
                offset: cut[0] as u64,
                len: cut[1] - cut[0],
                address: new.as_ptr() as usize + cut[0],
            })
            .collect();
        for cut in cuts.chunks_exact(2) {
            expected[cut[0]..cut[1]].copy_from_slice(&new[cut[0]..cut[1]]);
        }
        // SAFETY: `new` stays as it is until the end.
        let transfer = unsafe { write_at(&path, &ranges, Memory::Host, &options(2, 1 << shift, true)) };
        transfer.expect("it begins").wait().expect("there is room");
        prop_assert!(fs::read(&path).expect("it is there") == expected);
    }
}

#[test]
fn aligned_memory_is_read_without_a_copy_and_the_report_says_so() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let path = files(folder.path(), 1).remove(0);
    fs::File::open(&path).and_then(|file| file.sync_all()).expect("the drive takes it");
    let file = SourceFile::open(&path).expect("it is there");
    let Some(align) = file.direct_align() else { return eprintln!("skipped: no direct I/O here") };
    let layout = std::alloc::Layout::from_size_align(1 << 19, 1 << 12).expect("a layout");
    // SAFETY: it has a size; freed below.
    let memory = unsafe { std::alloc::alloc_zeroed(layout) };
    let (offset, len) = (align * 3, 1 << 17);
    let range = Range { file: 0, offset, len, address: memory as usize };
    // SAFETY: the memory is read after the end only.
    let transfer = unsafe { read(vec![file], vec![range], Memory::Host, &options(2, 1 << 16, false)) };
    let report = transfer.expect("it is in the file").wait().expect("nothing fails");
    // SAFETY: allocated above, and filled.
    let found = unsafe { std::slice::from_raw_parts(memory, len) };
    assert!(found == &fs::read(&path).expect("it is there")[offset as usize..offset as usize + len]);
    assert_eq!((report.direct_bytes, report.bounced_bytes), (len as u64, 0), "{report:?}");
    // SAFETY: allocated above.
    unsafe { std::alloc::dealloc(memory, layout) };
}

/// Others' bytes in them, and drives that write to one page for two threads, would lose to a fork's copy-on-write.
#[test]
fn pages_that_a_range_shares_with_others_are_copied_to() {
    const PAGE: usize = 4096;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let path = files(folder.path(), 1).remove(0);
    fs::File::open(&path).and_then(|file| file.sync_all()).expect("the drive takes it");
    let content = fs::read(&path).expect("it is there");
    let file = SourceFile::open(&path).expect("it is there");
    if file.direct_align() != Some(PAGE as u64) {
        return eprintln!("skipped: no direct I/O here, or by longer pages");
    }
    let mut memory = vec![0; 32 * PAGE];
    let first = memory.as_ptr().align_offset(PAGE);
    // Memory that agrees with the file up to a page, and up to what most drives want.
    for (shift, bounced) in [(512, PAGE), (1024, 20 * PAGE)] {
        let range =
            Range { file: 0, offset: 512, len: 20 * PAGE, address: memory[first + shift..].as_mut_ptr() as usize };
        // SAFETY: the memory is read after the end only.
        let transfer = unsafe { read(vec![file.clone()], vec![range], Memory::Host, &options(2, 2 * PAGE, false)) };
        let report = transfer.expect("it is in the file").wait().expect("nothing fails");
        assert!(memory[first + shift..][..range.len] == content[512..][..range.len]);
        assert_eq!((report.direct_bytes, report.bounced_bytes), (range.len as u64, bounced as u64), "{report:?}");
    }
}

#[test]
fn ranges_beyond_the_end_are_refused_before_anything_is_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let paths = files(folder.path(), 1);
    for (offset, len) in [(0, FILE_BYTES + 1), (FILE_BYTES as u64, 1), (u64::MAX, usize::MAX)] {
        let range = Range { file: 0, offset, len, address: 0 };
        // SAFETY: nothing is read.
        let found = unsafe { read(open(&paths), vec![range], Memory::Host, &Options::default()) };
        assert!(matches!(found, Err(Error::OutOfFile { .. })), "{found:?}");
    }
    let range = Range { file: 1, offset: 0, len: 0, address: 0 };
    // SAFETY: nothing is read.
    let found = unsafe { read(open(&paths), vec![range], Memory::Host, &Options::default()) };
    assert!(matches!(found, Err(Error::Argument(_))), "{found:?}");
}

#[test]
fn a_file_that_changes_meanwhile_is_an_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let changes: [fn(&Path); 3] = [
        |path| fs::write(path, bytes(5, 100)).expect("shorter"),
        |path| fs::write(path, bytes(5, FILE_BYTES + 1)).expect("longer"),
        |path| fs::OpenOptions::new().write(true).open(path).and_then(|file| file.set_len(0)).expect("empty"),
    ];
    for change in changes {
        let paths = files(folder.path(), 1);
        let opened = open(&paths);
        change(&paths[0]);
        let mut target = vec![0; FILE_BYTES];
        let range = Range { file: 0, offset: 0, len: FILE_BYTES, address: target.as_mut_ptr() as usize };
        // SAFETY: the target is not touched until the end.
        let transfer = unsafe { read(opened, vec![range], Memory::Host, &Options::default()) };
        let found = transfer.expect("it was in the file").wait();
        assert!(matches!(found, Err(Error::Changed { .. })), "{found:?}");
    }
}

#[test]
fn a_file_that_is_replaced_meanwhile_is_read_as_it_was() {
    let folder = tempfile::tempdir().expect("a folder");
    let paths = files(folder.path(), 2);
    let (opened, old) = (open(&paths[..1]), fs::read(&paths[0]).expect("it is there"));
    fs::rename(&paths[1], &paths[0]).expect("it takes the name");
    let mut target = vec![0; FILE_BYTES];
    let range = Range { file: 0, offset: 0, len: FILE_BYTES, address: target.as_mut_ptr() as usize };
    // SAFETY: the target is not touched until the end.
    let transfer = unsafe { read(opened, vec![range], Memory::Host, &Options::default()) };
    transfer.expect("it is in the file").wait().expect("nothing fails");
    assert!(target == old);
}

/// By a name that another file has by now, and that of a folder where the process no longer works.
#[test]
fn the_file_that_is_open_is_written_to_and_no_other() {
    let folder = tempfile::tempdir().expect("a folder");
    let paths = files(folder.path(), 2);
    let (opened, other) = (open(&paths[..1]), fs::read(&paths[1]).expect("it is there"));
    let mut expected = fs::read(&paths[0]).expect("it is there");
    let link = folder.path().join("link");
    fs::hard_link(&paths[0], &link).expect("one folder");
    fs::rename(&paths[1], &paths[0]).expect("it takes the name");
    let range = Range { file: 0, offset: 7, len: 5, address: b"other".as_ptr() as usize };
    // SAFETY: the bytes stay as they are.
    let transfer = unsafe { write_into(&opened[0], &[range], Memory::Host, &Options::default()) };
    transfer.expect("it may be written to").wait().expect("in place");
    expected[7..12].copy_from_slice(b"other");
    assert!(fs::read(&link).expect("it is there") == expected && fs::read(&paths[0]).expect("it is there") == other);
}

#[test]
fn a_file_is_told_by_its_path_from_the_root_on() {
    let here = std::env::current_dir().expect("a folder");
    let file = SourceFile::open("Cargo.toml").expect("the package's own");
    assert_eq!(file.path(), here.join("Cargo.toml"));
}

/// Their nodes are on one file system, which no drive is.
#[test]
fn a_block_device_is_a_drive_of_its_own() {
    let entries = fs::read_dir("/dev").expect("a folder").filter_map(Result::ok);
    let devices = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_block_device()));
    let mut opened = devices.filter_map(|entry| SourceFile::open(entry.path()).ok());
    let Some(file) = opened.next() else { return eprintln!("skipped: no block device that may be read") };
    let found = fs::metadata(file.path()).expect("it is there");
    assert_ne!(found.rdev(), found.dev());
    assert_eq!(file.identity().device, found.rdev());
}

/// Wakes a thread that sleeps.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

#[test]
fn a_transfer_can_be_awaited_and_a_cancelled_one_says_so() {
    let folder = tempfile::tempdir().expect("a folder");
    let paths = files(folder.path(), 1);
    for cancel in [false, true] {
        let mut target = vec![0; FILE_BYTES];
        let range = Range { file: 0, offset: 0, len: FILE_BYTES, address: target.as_mut_ptr() as usize };
        // SAFETY: the target is not touched until the end.
        let transfer = unsafe { read(open(&paths), vec![range], Memory::Host, &options(1, 4096, false)) };
        let transfer = transfer.expect("it is in the file");
        if cancel {
            transfer.cancel();
        }
        let (mut transfer, waker) = (pin!(transfer), Waker::from(Arc::new(Unpark(std::thread::current()))));
        let ended = loop {
            match transfer.as_mut().poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(ended) => break ended,
                Poll::Pending => std::thread::park(),
            }
        };
        match ended {
            Ok(report) => {
                assert_eq!((report.bytes, target), (FILE_BYTES as u64, fs::read(&paths[0]).expect("it is there")));
            }
            Err(Error::Cancelled) => assert!(cancel),
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn a_write_that_fails_or_is_cancelled_leaves_the_file_as_it_was() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = files(folder.path(), 1).remove(0);
    let (old, new) = (fs::read(&path).expect("it is there"), bytes(7, 10 << 20));
    let pieces = [(new.as_ptr() as usize, new.len())];
    // SAFETY: `new` stays as it is until the drop.
    let transfer = unsafe { write(&path, &pieces, Memory::Host, &options(1, 4096, true)) }.expect("there is room");
    transfer.cancel();
    let is_cancelled = matches!(transfer.wait(), Err(Error::Cancelled));
    assert_eq!(fs::read(&path).expect("it is there") == old, is_cancelled);
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1, "a temporary file stays");
    // More than any file system here has.
    let pieces = [(new.as_ptr() as usize, 1 << 60)];
    // SAFETY: nothing is read.
    let found = unsafe { write(&path, &pieces, Memory::Host, &Options::default()) };
    assert!(matches!(found, Err(Error::Io { .. })), "{found:?}");
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1, "a temporary file stays");
}

#[test]
fn options_out_of_range_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    for wrong in [options(0, 4096, true), options(257, 4096, true), options(1, 0, true), options(1, 5000, true)] {
        // SAFETY: nothing is read.
        let found = unsafe { read(open(&files(folder.path(), 1)), Vec::new(), Memory::Host, &wrong) };
        assert!(matches!(found, Err(Error::Argument(_))), "{found:?}");
    }
}

#[test]
fn a_name_may_be_as_long_as_the_system_takes() {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
    let content = bytes(9, 5000);
    for name in ["n".repeat(230), "n".repeat(255), format!("n{}", "é".repeat(127))] {
        let path = folder.path().join(name);
        let pieces = [(content.as_ptr() as usize, content.len())];
        // SAFETY: nothing writes to the content.
        let transfer = unsafe { write(&path, &pieces, Memory::Host, &Options::default()) };
        transfer.expect("it begins").wait().expect("written");
        assert_eq!(fs::read(&path).expect("there"), content);
    }
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 3, "a temporary file stays");
}

/// In a container each process has the number of the one before, and counts its files from 0 again.
#[test]
fn temporary_files_of_killed_processes_hold_up_no_write() {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
    let path = folder.path().join("file");
    for number in 0..1000 {
        fs::write(folder.path().join(format!(".file.{}-{number}.tmp", std::process::id())), b"").expect("room");
    }
    let content = bytes(9, 5000);
    let pieces = [(content.as_ptr() as usize, content.len())];
    // SAFETY: nothing writes to the content.
    let transfer = unsafe { write(&path, &pieces, Memory::Host, &Options::default()) };
    transfer.expect("another name is free").wait().expect("written");
    assert_eq!(fs::read(&path).expect("there"), content);
}
