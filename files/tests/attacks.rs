//! Files that are odd, damaged, or in the hands of somebody else while they are read.

use std::{
    fs::{self, File},
    io::{Seek, SeekFrom, Write},
    os::unix::fs::{FileExt, PermissionsExt, chown, symlink},
    path::Path,
    time::Duration,
};

use kvhoist_files::{Error, Memory, Options, Range, Report, Result, SourceFile, read, safetensors, write, write_at};
use proptest::prelude::*;

fn bytes(len: usize) -> Vec<u8> {
    (0..len as u64).map(|n| (n.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect()
}

fn options(threads: usize, piece_bytes: usize, page_cache: bool) -> Options {
    let mut options = Options::default();
    (options.threads, options.piece_bytes, options.page_cache) = (Some(threads), Some(piece_bytes), page_cache);
    options
}

/// On a file system of a drive; `/tmp` may be one in memory.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder")
}

/// Memory that begins at `shift` past a page.
struct Target {
    memory: Vec<u8>,
    start: usize,
}

impl Target {
    fn new(len: usize, shift: usize) -> Self {
        let memory = vec![0xEE; len + 2 * 4096];
        let start = memory.as_ptr().align_offset(4096) + shift % 4096;
        Target { memory, start }
    }

    fn read(&mut self, file: &SourceFile, offset: u64, len: usize, options: &Options) -> Result<Report> {
        let address = self.memory.as_mut_ptr() as usize + self.start;
        let range = Range { file: 0, offset, len, address };
        // SAFETY: the memory is looked at after the end only.
        unsafe { read(vec![file.clone()], vec![range], Memory::Host, options) }?.wait()
    }

    /// The bytes of a range of this length, and whether all others are as they were.
    fn found(&self, len: usize) -> (&[u8], bool) {
        let (before, rest) = self.memory.split_at(self.start);
        let (found, after) = rest.split_at(len);
        (found, before.iter().chain(after).all(|&byte| byte == 0xEE))
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Heads and tails of every class: at, one before and one after the multiples of what direct I/O wants, and any.
    #[test]
    fn every_head_and_tail_is_read_and_nothing_beside_it(
        (base, head, tail) in (0..4_u64, -1..2_i64, -1..2_i64), pages in 0..5_u64,
        (any_head, any_tail) in (0..512_u64, 0..512_u64), shift in prop_oneof![Just(0_usize), 0..4096_usize],
        (agree, page_cache, in_memory) in (any::<bool>(), any::<bool>(), any::<bool>()),
    ) {
        let folder = if in_memory { tempfile::tempdir_in("/dev/shm").expect("it is there") } else { folder() };
        let path = folder.path().join("file");
        let content = bytes(70_001);
        fs::write(&path, &content).expect("a small file");
        let file = SourceFile::open(&path).expect("it is there");
        let start = (4096 * (base + 1)).saturating_add_signed(head) + any_head;
        let end = (start + 4096 * pages).saturating_add_signed(tail).max(start) + any_tail;
        let (end, len) = (end.min(70_001), (end.min(70_001) - start) as usize);
        let shift = if agree { start as usize } else { shift };
        for piece_bytes in [4096, 8192, 1 << 20] {
            let mut target = Target::new(len, shift);
            let report = target.read(&file, start, len, &options(2, piece_bytes, page_cache)).expect("nothing fails");
            let (found, is_alone) = target.found(len);
            prop_assert!(found == &content[start as usize..end as usize] && is_alone, "{start}..{end}");
            prop_assert_eq!(report.bytes, len as u64);
            let took = report.direct_bytes + report.page_cache_bytes + report.buffered_bytes;
            prop_assert_eq!(took, len as u64, "{:?}", report);
            // All requests are such as direct I/O takes.
            prop_assert!(report.buffered_bytes == 0 || file.direct_align().is_none(), "{:?}", report);
        }
    }

    /// A transfer that is dropped or cancelled at any point touches its memory no more, and names whole ranges only.
    #[test]
    fn a_transfer_is_cancelled_at_any_point(taken in 0..40_usize, threads in 1..5_usize, drops in any::<bool>()) {
        let folder = folder();
        let path = folder.path().join("file");
        let content = bytes(40 * 5000);
        fs::write(&path, &content).expect("a small file");
        let mut target = vec![0xEE_u8; content.len()];
        let start = target.as_mut_ptr() as usize;
        let range = |n: usize| Range { file: 0, offset: 5000 * n as u64, len: 5000, address: start + 5000 * n };
        let file = SourceFile::open(&path).expect("it is there");
        let (ranges, options) = ((0..40).map(range).collect(), options(threads, 4096, false));
        // SAFETY: the target is looked at where ranges have arrived, and after the end.
        let transfer = unsafe { read(vec![file], ranges, Memory::Host, &options) }.expect("they are in the file");
        let mut arrived = Vec::new();
        while let Some(ranges) = (arrived.len() < taken).then(|| transfer.next_ranges(Duration::MAX)).flatten() {
            prop_assert!(!ranges.is_empty(), "there is no limit of time");
            arrived.extend(ranges);
        }
        transfer.cancel();
        if drops {
            drop(transfer);
        } else {
            let ended = transfer.wait();
            prop_assert!(matches!(ended, Ok(_) | Err(Error::Cancelled)), "{:?}", ended);
            prop_assert!(ended.is_err() || target == content);
        }
        for n in arrived {
            prop_assert!(target[5000 * n..5000 * (n + 1)] == content[5000 * n..5000 * (n + 1)]);
        }
        let left = target.clone();
        fs::write(&path, vec![0x11; content.len()]).expect("a small file");
        prop_assert!(target == left);
    }
}

#[test]
fn files_of_no_byte_and_of_one_are_read() {
    for folder in [folder(), tempfile::tempdir_in("/dev/shm").expect("it is there")] {
        for size in [0, 1] {
            let path = folder.path().join("file");
            fs::write(&path, bytes(size)).expect("a small file");
            let file = SourceFile::open(&path).expect("it is there");
            let mut target = Target::new(size, 3);
            assert_eq!(target.read(&file, 0, size, &Options::default()).expect("nothing fails").bytes, size as u64);
            assert_eq!(target.found(size), (&bytes(size)[..], true));
            let found = target.read(&file, size as u64, 1, &Options::default());
            assert!(matches!(found, Err(Error::OutOfFile { .. })), "{found:?}");
        }
    }
}

#[test]
fn holes_are_zeros_and_links_are_their_files() {
    let folder = folder();
    let path = folder.path().join("file");
    let mut sparse = File::create(&path).expect("a file");
    let mut content = vec![0; 3_000_000];
    for at in [100_000, 1_500_001] {
        sparse.seek(SeekFrom::Start(at as u64)).expect("a place");
        sparse.write_all(&bytes(5000)).expect("there is room");
        content[at..at + 5000].copy_from_slice(&bytes(5000));
    }
    sparse.set_len(3_000_000).expect("a hole at the end");
    symlink(&path, folder.path().join("symlink")).expect("a link");
    fs::hard_link(&path, folder.path().join("link")).expect("a link");
    for name in ["file", "symlink", "link"] {
        let file = SourceFile::open(folder.path().join(name)).expect("it is there");
        for page_cache in [false, true] {
            let mut target = Target::new(content.len(), 0);
            target.read(&file, 0, content.len(), &options(3, 1 << 16, page_cache)).expect("nothing fails");
            assert!(target.found(content.len()) == (&content[..], true), "{name}");
        }
    }
}

/// Whoever reads while another writes gets an error, or bytes that were there when it opened the file.
#[test]
fn a_file_that_changes_during_a_transfer_is_an_error() {
    const RANGES: usize = 500;
    let changes: [fn(&File); 3] = [
        |file| file.write_all_at(b"other", 4096 * RANGES as u64 - 5).expect("in place"),
        |file| file.set_len(4096 * (RANGES as u64 - 1)).expect("shorter"),
        |file| file.set_len(4096 * (RANGES as u64 + 1)).expect("longer"),
    ];
    for change in changes {
        for page_cache in [false, true] {
            let folder = folder();
            let path = folder.path().join("file");
            fs::write(&path, bytes(4096 * RANGES)).expect("a small file");
            // A write in the same tick of the system's clock would leave the time of the last one.
            let long_ago = fs::FileTimes::new().set_modified(std::time::SystemTime::UNIX_EPOCH);
            let writer = File::options().write(true).open(&path).expect("it is there");
            writer.set_times(long_ago).expect("its owner may");
            let file = SourceFile::open(&path).expect("it is there");
            let mut target = vec![0_u8; 4096 * RANGES];
            let start = target.as_mut_ptr() as usize;
            let range = |n| Range { file: 0, offset: 4096 * n as u64, len: 4096, address: start + 4096 * n };
            let (ranges, options) = ((0..RANGES).map(range).collect(), options(1, 4096, page_cache));
            // SAFETY: the target is not touched until the end.
            let transfer = unsafe { read(vec![file], ranges, Memory::Host, &options) }.expect("they are in the file");
            transfer.next_ranges(Duration::MAX).expect("the first arrives");
            change(&writer);
            match transfer.wait() {
                Err(Error::Changed { .. }) => {}
                // It was over before the change.
                Ok(_) => assert!(target == bytes(4096 * RANGES), "bytes of two versions"),
                Err(error) => panic!("{error}"),
            }
        }
    }
}

#[test]
fn what_is_no_file_is_not_written_to() {
    let folder = folder();
    let pipe = folder.path().join("pipe");
    make_pipe(&pipe);
    let [new, file] = ["new/", "file/"].map(|name| folder.path().join(name));
    fs::write(folder.path().join("file"), b"old").expect("a small file");
    let paths = [(folder.path(), "a folder"), (&pipe, "a pipe"), (Path::new("/dev/null"), "a pipe")];
    for (path, words) in paths.into_iter().chain([(&*new, "a file's name"), (&*file, "a file's name")]) {
        let source = bytes(100);
        let pieces = [(source.as_ptr() as usize, source.len())];
        // SAFETY: `source` stays as it is until the end.
        let found = unsafe { write(path, &pieces, Memory::Host, &Options::default()) };
        assert!(matches!(&found, Err(error) if error.to_string().contains(words)), "{}: {found:?}", path.display());
        let range = Range { file: 0, offset: 0, len: 100, address: source.as_ptr() as usize };
        // SAFETY: as above.
        let found = unsafe { write_at(path, &[range], Memory::Host, &Options::default()) };
        assert!(matches!(found, Err(Error::NoFile { .. } | Error::Io { .. })), "{}: {found:?}", path.display());
    }
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 2, "a temporary file stays");
}

/// By a filter for system calls, in a child: a file system in memory gives up what it has so far at each signal.
#[test]
fn a_signal_while_room_is_made_is_no_error() {
    let folder = folder();
    let path = folder.path().join("file");
    let source = bytes(5000);
    // SAFETY: the child does nothing but what is to be tried, and ends without the parent's handlers.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let statement = |code, jf, k| libc::sock_filter { code: code as u16, jt: 0, jf, k };
        // The number is the first field of `seccomp_data`.
        let mut program = [
            statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
            statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, libc::SYS_fallocate as u32),
            statement(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ERRNO | libc::EINTR as u32),
            statement(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW),
        ];
        let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
        let mode = libc::SECCOMP_MODE_FILTER as libc::c_ulong;
        // SAFETY: an alarm, a filter that the kernel checks and copies, and an exit; `source` stays as it is.
        unsafe {
            libc::alarm(20);
            let is_filtered = libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1_u64, 0_u64, 0_u64, 0_u64) == 0
                && libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const filter) == 0;
            let pieces = [(source.as_ptr() as usize, source.len())];
            let found =
                write(&path, &pieces, Memory::Host, &Options::default()).and_then(kvhoist_files::Transfer::wait);
            libc::_exit(i32::from(!is_filtered || found.is_err()));
        }
    }
    let mut status = 0;
    // SAFETY: this process's child.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child");
    assert!(fs::read(&path).expect("it is there") == source);
}

/// As by `cp`. A link that names nothing may name a place that nobody meant to write to.
#[test]
fn a_link_that_is_written_to_stays_and_its_file_is_replaced() {
    let (folder, elsewhere) = (folder(), folder());
    let (link, file) = (folder.path().join("link"), elsewhere.path().join("file"));
    symlink(&file, &link).expect("a link");
    let source = bytes(5000);
    let pieces = [(source.as_ptr() as usize, source.len())];
    // SAFETY: `source` stays as it is until the end.
    let found = unsafe { write(&link, &pieces, Memory::Host, &Options::default()) };
    assert!(matches!(found, Err(Error::Io { op: "follow the link", .. })), "{found:?}");
    fs::write(&file, b"old").expect("a small file");
    // SAFETY: as above.
    let transfer = unsafe { write(&link, &pieces, Memory::Host, &Options::default()) };
    transfer.expect("it begins").wait().expect("there is room");
    assert!(fs::read_link(&link).expect("it is a link") == file && fs::read(&file).expect("it is there") == source);
    for one in [&folder, &elsewhere] {
        assert_eq!(fs::read_dir(one.path()).expect("a folder").count(), 1, "a temporary file stays");
    }
}

/// The folder is flushed after the file has its name: one that does not open is no error of a write that is done.
#[test]
fn a_folder_that_may_not_be_listed_is_an_error_before_the_file_changes() {
    const NOBODY: u32 = 65_534;
    let folder = tempfile::tempdir_in("/dev/shm").expect("it is there");
    let path = folder.path().join("file");
    fs::write(&path, b"old").expect("a small file");
    // SAFETY: a question.
    let is_root = unsafe { libc::getuid() } == 0;
    if is_root {
        chown(folder.path(), Some(NOBODY), None).expect("by root");
    }
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o300)).expect("its owner may");
    let source = bytes(5000);
    // SAFETY: the child does nothing but what is to be tried, and ends without the parent's handlers.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: an alarm, another user and an exit; `source` stays as it is.
        unsafe {
            libc::alarm(20);
            let is_other = !is_root || libc::setuid(NOBODY) == 0;
            let pieces = [(source.as_ptr() as usize, source.len())];
            let found =
                write(&path, &pieces, Memory::Host, &Options::default()).and_then(kvhoist_files::Transfer::wait);
            let is_refused = matches!(found, Err(Error::Io { op: "open the folder", .. }));
            libc::_exit(if is_other && is_refused { 0 } else { 1 });
        }
    }
    let mut status = 0;
    // SAFETY: this process's child.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700)).expect("its owner may");
    assert_eq!((status, fs::read(&path).expect("it is there")), (0, b"old".to_vec()));
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1, "a temporary file stays");
}

fn make_pipe(path: &Path) {
    let path = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).expect("no zero");
    // SAFETY: a path that ends in a zero.
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
}

#[test]
fn a_forked_child_neither_waits_for_its_parents_transfer_nor_hangs_when_it_drops_it() {
    let folder = folder();
    let path = folder.path().join("file");
    fs::write(&path, bytes(1 << 20)).expect("a small file");
    let file = SourceFile::open(&path).expect("it is there");
    let mut target = Target::new(1 << 20, 0);
    let range = Range { file: 0, offset: 0, len: 1 << 20, address: target.memory.as_mut_ptr() as usize };
    // SAFETY: the target is not touched until the end.
    let transfer = unsafe { read(vec![file], vec![range], Memory::Host, &options(2, 4096, false)) };
    let transfer = transfer.expect("it is in the file");
    // SAFETY: the child does nothing but what is to be tried, and ends without the parent's handlers.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: an alarm and an exit. A child that hangs is ended by the alarm.
        unsafe {
            libc::alarm(20);
            // What has arrived before the fork is not told: only the parent may know that it is whole.
            let is_over = transfer.next_ranges(Duration::MAX).is_none() && transfer.progress().is_over;
            let is_refused = is_over && matches!(transfer.wait(), Err(Error::Argument(_)));
            libc::_exit(if is_refused { 0 } else { 1 });
        }
    }
    let mut status = 0;
    // SAFETY: this process's child.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child");
    transfer.wait().expect("the parent's own goes on");
}

/// The format fills headers with blanks.
#[test]
fn a_header_as_long_as_the_format_allows_is_read_and_one_byte_more_is_refused() {
    let folder = folder();
    let path = folder.path().join("model.safetensors");
    let text = br#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}"#;
    for (len, is_read) in [(100_000_000_u64, true), (100_000_001, false)] {
        let mut content = len.to_le_bytes().to_vec();
        content.extend(text);
        content.resize(8 + len as usize, b' ');
        content.extend(b"123");
        fs::write(&path, &content).expect("there is room");
        let found = safetensors::header(&SourceFile::open(&path).expect("it is there"));
        match found {
            Ok(header) => assert!(is_read && header.tensors[0].offset == 8 + len && header.tensors[0].len == 3),
            Err(error) => {
                assert!(!is_read && error.to_string().contains("found a header of 100000001 bytes"), "{error}");
            }
        }
    }
}

#[test]
fn headers_past_the_formats_limit_or_the_files_end_are_refused_with_what_was_found() {
    let folder = folder();
    let path = folder.path().join("model.safetensors");
    for (len, words) in [
        (100_000_001_u64, "found a header of 100000001 bytes"),
        (u64::MAX, "found a header of 18446744073709551615 bytes"),
        (99_999_999, "a header that ends at 100000007"),
        (0, "not one of safetensors"),
    ] {
        fs::write(&path, len.to_le_bytes()).expect("a small file");
        let found = safetensors::header(&SourceFile::open(&path).expect("it is there"));
        assert!(matches!(&found, Err(error) if error.to_string().contains(words)), "{found:?}");
    }
}
