//! A file that is read: how long it is, what direct I/O wants of it, and what the page cache has of it.

use std::{
    fs::{File, Metadata, OpenOptions},
    io::{self, Seek, SeekFrom},
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf, absolute},
    sync::{Arc, atomic::AtomicBool},
    thread,
    time::Duration,
};

use rustix::{
    fs::{AtFlags, StatxFlags, statx},
    time::{ClockId, clock_gettime},
};

use crate::{Arrival, Error, FileIdentity, Result, held::Held};

/// Where the system does not say what direct I/O wants: what every drive takes.
const ALIGN: u64 = 4096;

/// A tick of the clock that changes are stamped with, in milliseconds, at most.
const TICK_MS_MAX: u32 = 10;

/// A file to be read. Cheap to clone.
#[derive(Debug, Clone)]
pub struct SourceFile {
    inner: Arc<Inner>,
    /// A copy in memory, which is read instead as far as it is filled.
    held: Option<Arc<Held>>,
}

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    size: u64,
    /// The device that it is on, as the system numbers them; or that it is: the nodes of all are on one file system.
    drive: u64,
    inode: u64,
    /// As it was when it was opened.
    version: Version,
    cached: File,
    direct: Option<Direct>,
}

/// What changes with each write to a file.
#[derive(Debug)]
struct Version {
    size: u64,
    modified: (i64, i64),
    /// Of the last change of anything but its bytes too: no writer can set it back.
    changed: (i64, i64),
    links: u64,
}

/// The same file, past the page cache.
#[derive(Debug)]
pub(crate) struct Direct {
    pub(crate) file: File,
    /// Offsets, lengths and addresses are multiples of this.
    pub(crate) align: u64,
}

/// How bytes of a file are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// The page cache has them.
    PageCache,
    Direct,
    /// Through the page cache, for want of direct I/O.
    Buffered,
    /// From a copy that another process holds in memory.
    Held,
    /// From the drive into device memory, by libcufile.
    Cufile,
}

impl Way {
    pub(crate) const COUNT: usize = 5;
}

impl SourceFile {
    /// Opens a file or a block device.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::NoFile`] for what is neither.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        // Where it was found, wherever the process works later.
        let found = absolute(path).unwrap_or_else(|_| path.to_owned());
        SourceFile::open_as(path, found)
    }

    /// The same file, opened anew: as it is now, after a write in place. A copy in memory is left out: it is of
    /// what the file was.
    ///
    /// # Errors
    /// As of [`open`](SourceFile::open).
    pub fn renewed(&self) -> Result<Self> {
        // By the descriptor: another may have its path by now.
        SourceFile::open_as(descriptor_path(self.cached()).as_ref(), self.inner.path.clone())
    }

    /// Opens a file that is known by `path`.
    fn open_as(file: &Path, path: PathBuf) -> Result<Self> {
        let fail = |error| Error::io("open", &path, error);
        // A pipe in the place of a file would wait for its other end.
        let cached = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(file).map_err(fail)?;
        let found = cached.metadata().map_err(fail)?;
        refuse_other_kinds(&path, &found)?;
        Version::of(&found).wait_for_the_next_tick();
        let mut end = &cached;
        let size = if found.is_file() { found.len() } else { end.seek(SeekFrom::End(0)).map_err(fail)? };
        let direct = reopen(&cached, OpenOptions::new().read(true));
        let drive = if found.file_type().is_block_device() { found.rdev() } else { found.dev() };
        let (inode, version) = (found.ino(), Version::of(&found));
        Ok(SourceFile::of(Inner { path, size, drive, inode, version, cached, direct }))
    }

    fn of(inner: Inner) -> Self {
        SourceFile { inner: Arc::new(inner), held: None }
    }

    /// The same file, whose bytes are read from a copy as far as it is filled: `memory` has them at the same offsets.
    #[must_use]
    pub fn with_copy(&self, memory: File, arrival: impl Arrival + 'static) -> Self {
        SourceFile { inner: Arc::clone(&self.inner), held: Some(Arc::new(Held { memory, arrival: Box::new(arrival) })) }
    }

    /// What it was known by when it was opened.
    pub fn identity(&self) -> FileIdentity {
        let Inner { drive, inode, size, version, .. } = &*self.inner;
        let (changed_s, changed_ns) = version.changed;
        FileIdentity { device: *drive, inode: *inode, size: *size, changed_s, changed_ns }
    }

    /// The path that it was opened by, from the root on.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// Its length in bytes when it was opened.
    pub fn size(&self) -> u64 {
        self.inner.size
    }

    /// The alignment that direct I/O wants of addresses, offsets and lengths, in bytes; a page at least. Host memory
    /// whose address and file offset agree up to it is read without a copy, in whole pages. `None` without direct I/O.
    pub fn direct_align(&self) -> Option<u64> {
        // After a fork the first to write to a page gets a copy of it. Before Linux 6.5 the drive writes to the other
        // one: so a page that a drive writes to is nobody else's meanwhile.
        self.drive_align().map(|align| align.max(rustix::param::page_size() as u64))
    }

    /// The alignment that the drive itself wants.
    pub(crate) fn drive_align(&self) -> Option<u64> {
        self.inner.direct.as_ref().map(|direct| direct.align)
    }

    /// The same file, for writing too. By its descriptor: another may have its path by now.
    pub(crate) fn reopen_to_write(&self) -> Result<File> {
        let path = descriptor_path(&self.inner.cached);
        let opened = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path);
        opened.map_err(|error| Error::io("open to write", self.path(), error))
    }

    /// The file, through the page cache.
    pub(crate) fn cached(&self) -> &File {
        &self.inner.cached
    }

    /// The device that it is on.
    pub(crate) fn drive(&self) -> u64 {
        self.inner.drive
    }

    /// The file past the page cache, and the device that it is on.
    pub(crate) fn direct(&self) -> Option<(&File, u64)> {
        self.inner.direct.as_ref().map(|direct| (&direct.file, self.inner.drive))
    }

    /// Whether a service holds a copy of it in memory.
    pub(crate) fn is_held(&self) -> bool {
        self.held.is_some()
    }

    /// How to read a range; `uses_cache` is false where the page cache is not to be asked.
    ///
    /// Waits until the file's copy has it, if there is one.
    pub(crate) fn way(&self, start: u64, end: u64, uses_cache: bool, given_up: &AtomicBool) -> Way {
        if self.held.as_ref().is_some_and(|held| held.arrival.wait(end, given_up)) {
            return Way::Held;
        }
        match &self.inner.direct {
            None => Way::Buffered,
            Some(_) if uses_cache && is_cached(&self.inner.cached, start, end) => Way::PageCache,
            Some(_) => Way::Direct,
        }
    }

    /// Reads a range. `to` is longer than the range if direct I/O wants that; it ends where the file does. Returns the
    /// way that the bytes took.
    pub(crate) fn read(&self, way: Way, start: u64, to: &mut [u8]) -> Result<Way> {
        let file = match (&self.inner.direct, &self.held, way) {
            (Some(direct), _, Way::Direct) => &direct.file,
            (_, Some(held), Way::Held) => &held.memory,
            _ => &self.inner.cached,
        };
        let wanted = (self.inner.size - start).min(to.len() as u64) as usize;
        let mut done = 0;
        while done < wanted {
            match file.read_at(&mut to[done..], start + done as u64) {
                // It ends sooner than it did.
                Ok(0) => return Err(self.changed()),
                Ok(read) => done += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // A file system may take the flag and refuse the read. And the end of a file is read once: what follows
                // a part that is not aligned would be refused.
                Err(error) if way == Way::Direct && error.raw_os_error() == Some(libc::EINVAL) => {
                    let rest = self.read(Way::Buffered, start + done as u64, &mut to[done..wanted])?;
                    return Ok(if done > 0 { way } else { rest });
                }
                Err(error) => return Err(Error::io("read", self.path(), error)),
            }
        }
        Ok(way)
    }

    /// Refuses a file that was written to since it was opened.
    pub(crate) fn check_unchanged(&self) -> Result<()> {
        let now = self.inner.cached.metadata().map_err(|error| Error::io("read", self.path(), error))?;
        if self.inner.version.lasts_until(&Version::of(&now)) { Ok(()) } else { Err(self.changed()) }
    }

    fn changed(&self) -> Error {
        Error::Changed { path: self.inner.path.clone() }
    }
}

impl Version {
    fn of(found: &Metadata) -> Self {
        Version {
            size: found.len(),
            modified: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
            links: found.nlink(),
        }
    }

    /// Whether a file was of this version until `now`. One that lost its name to another is as it was.
    fn lasts_until(&self, now: &Version) -> bool {
        let is_as_long = (self.size, self.modified) == (now.size, now.modified);
        is_as_long && (self.changed == now.changed || now.links < self.links)
    }

    /// Returns once a change has another time than the last one had. Before Linux 6.13 all changes of a tick have the
    /// same (4 ms, as a rule); other file systems' servers have clocks of their own, and are not waited for.
    fn wait_for_the_next_tick(&self) {
        for _ in 0..TICK_MS_MAX {
            if self.is_before_this_tick() {
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn is_before_this_tick(&self) -> bool {
        // The clock that changes are stamped with.
        let now = clock_gettime(ClockId::RealtimeCoarse);
        self.changed < (now.tv_sec, now.tv_nsec)
    }
}

/// Refuses what is neither a file nor a block device.
pub(crate) fn refuse_other_kinds(path: &Path, found: &Metadata) -> Result<()> {
    let kind = found.file_type();
    if kind.is_file() || kind.is_block_device() {
        return Ok(());
    }
    let found = if kind.is_dir() { "a folder" } else { "a pipe, a socket or a character device" };
    Err(Error::NoFile { path: path.to_owned(), found })
}

/// A path that names an open file, whatever has its own.
fn descriptor_path(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// The same file with direct I/O, if it takes that. By its descriptor: another file may have its path by now.
pub(crate) fn reopen(file: &File, options: &mut OpenOptions) -> Option<Direct> {
    let direct = options.custom_flags(libc::O_DIRECT).open(descriptor_path(file)).ok()?;
    let found = statx(&direct, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok();
    let said = found.filter(|found| found.stx_mask & StatxFlags::DIOALIGN.bits() != 0);
    let align = match said {
        // The system knows that it does not take it, whatever the open said.
        Some(found) if found.stx_dio_offset_align == 0 => return None,
        Some(found) => u64::from(found.stx_dio_mem_align.max(found.stx_dio_offset_align)),
        None => ALIGN,
    };
    Some(Direct { file: direct, align: align.max(512) })
}

/// True if the page cache has all of a range (Linux 6.5 and later).
fn is_cached(file: &File, start: u64, end: u64) -> bool {
    const CACHESTAT: libc::c_long = 451;
    let page = rustix::param::page_size() as u64;
    let (first, last) = (start / page, end.div_ceil(page));
    let range = [first * page, (last - first) * page];
    // Pages cached, dirty, in writeback, evicted, recently evicted.
    let mut found = [0_u64; 5];
    // SAFETY: both are laid out as the call wants them (`struct cachestat_range`, `struct cachestat`), and outlive it.
    let code = unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), range.as_ptr(), found.as_mut_ptr(), 0) };
    code == 0 && found[0] >= last - first
}

#[cfg(test)]
impl SourceFile {
    /// This process's memory as a file: where nothing is mapped a read fails as one of a broken drive does.
    pub(crate) fn of_memory(size: u64) -> Self {
        let path = PathBuf::from("/proc/self/mem");
        let cached = File::open(&path).expect("a process may read its own memory");
        let version = Version::of(&cached.metadata().expect("it is open"));
        SourceFile::of(Inner { path, size, drive: 0, inode: 0, version, cached, direct: None })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_direct_read_that_is_refused_goes_through_the_page_cache() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
        let content: Vec<u8> = (0..20_000_u32).map(|n| (n % 251) as u8).collect();
        let path = folder.path().join("file");
        std::fs::write(&path, &content).expect("a small file");
        let file = SourceFile::open(&path).expect("it is there");
        if file.direct_align().is_none() {
            return eprintln!("skipped: no direct I/O here");
        }
        let mut found = vec![0; 10_000];
        // No drive takes this offset.
        assert_eq!(file.read(Way::Direct, 7, &mut found).expect("it is read"), Way::Buffered);
        assert!(found == content[7..10_007]);
    }

    /// A writer that sets the time of its write back, as `cp -p` and `touch -r` do, and one that is quick.
    #[test]
    fn a_change_in_place_is_seen_whatever_time_its_writer_sets_and_however_soon_it_comes() {
        for parent in [env!("CARGO_MANIFEST_DIR"), "/dev/shm"] {
            let folder = tempfile::tempdir_in(parent).expect("a folder");
            let path = folder.path().join("file");
            for turn in 0..20_u8 {
                std::fs::write(&path, [turn; 100]).expect("a small file");
                let written = std::fs::metadata(&path).expect("it is there").modified().expect("a time");
                let file = SourceFile::open(&path).expect("it is there");
                assert!(file.inner.version.is_before_this_tick(), "the next change may have the same time");
                file.check_unchanged().expect("nothing changed");
                let writer = OpenOptions::new().write(true).open(&path).expect("it is there");
                writer.write_all_at(b"x", 50).expect("in place");
                writer.set_modified(written).expect("its owner may");
                assert!(matches!(file.check_unchanged(), Err(Error::Changed { .. })));
            }
        }
    }

    #[test]
    fn what_is_no_file_is_refused_at_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let pipe = folder.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).expect("a pipe");
        for path in [folder.path(), &pipe] {
            assert!(matches!(SourceFile::open(path), Err(Error::NoFile { .. })), "{}", path.display());
        }
        let _listener = UnixListener::bind(folder.path().join("socket")).expect("a socket");
        for name in ["socket", "nothing"] {
            let found = SourceFile::open(folder.path().join(name));
            assert!(matches!(found, Err(Error::Io { op: "open", .. })), "{found:?}");
        }
    }

    #[test]
    fn the_page_cache_has_what_was_just_written_and_nothing_beyond_the_end() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file");
        std::fs::write(&path, [1; 3 * 4096]).expect("a small file");
        let file = SourceFile::open(&path).expect("it is there");
        let kernel_has_it = is_cached(&file.inner.cached, 0, 4096);
        assert_eq!(is_cached(&file.inner.cached, 100, 3 * 4096), kernel_has_it);
        assert!(!is_cached(&file.inner.cached, 0, 4 * 4096));
    }
}
