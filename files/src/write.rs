//! Writing: a whole file or nothing, or ranges in place.

use std::{
    ffi::{OsStr, OsString},
    fs::{self, File, OpenOptions, Permissions},
    io,
    os::unix::{
        ffi::OsStrExt,
        fs::{FileExt, OpenOptionsExt, PermissionsExt},
    },
    path::{Path, PathBuf, absolute},
    process,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use rustix::fs::{FallocateFlags, fallocate};

use crate::{
    Error, Memory, Options, Range, Result, SourceFile, Transfer,
    file::{self, Direct, Way},
    plan::Piece,
    shared::Shared,
    worker::{Carry, Lane},
};

/// Numbers temporary files of this process.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// The longest name of a file that Linux takes.
const NAME_BYTES_MAX: usize = 255;

/// A file that is written.
struct Writes {
    /// The name that it has, and the one that it gets.
    path: PathBuf,
    becomes: Option<PathBuf>,
    /// The folder of the name that it gets.
    folder: Option<File>,
    cached: File,
    direct: Option<Direct>,
    is_finished: AtomicBool,
}

/// Writes a file of these pieces of memory (address and length in bytes), one after the other.
///
/// They are written to a temporary file in the same folder, which is flushed and takes the name once it is complete:
/// until then, and after an error, a crash or a cancellation, `path` is as it was. A file that is replaced passes its
/// permissions on. A symbolic link is followed, as by `cp`: its file is replaced, and it stays.
///
/// # Safety
/// The pieces must be readable, and nothing may write to them, until the transfer has ended. A transfer must not be
/// leaked before.
///
/// # Errors
/// [`Error::Io`], also for want of room and for a folder that may not be listed, and [`Error::NoFile`] where `path` is
/// something else, before anything is written. One that says so comes from the flush of the folder, when the file has
/// its name.
///
/// # Cancel safety
/// Dropping the transfer cancels it: the file is then as before, unless the transfer was over.
pub unsafe fn write(
    path: impl AsRef<Path>,
    pieces: &[(usize, usize)],
    memory: Memory,
    options: &Options,
) -> Result<Transfer> {
    options.check()?;
    let path = &follow(path.as_ref())?;
    let mut offset = 0;
    let place = |&(address, len): &(usize, usize)| {
        let range = Range { file: 0, offset, len, address };
        offset += len as u64;
        range
    };
    let ranges: Vec<Range> = pieces.iter().map(place).collect();
    // A rename would refuse it, after all is written.
    let is_folder = path.as_os_str().as_bytes().ends_with(b"/");
    let name = path.file_name().filter(|_| !is_folder).ok_or_else(|| {
        Error::Argument(format!("found the path {}, expected one that ends in a file's name", path.display()))
    })?;
    let replaced = fs::metadata(path).ok();
    if let Some(found) = &replaced {
        // A rename would put a file in the place of a device or a pipe.
        file::refuse_other_kinds(path, found)?;
        if !found.is_file() {
            return Err(Error::NoFile {
                path: path.to_owned(),
                found: "a block device, which only write_at writes to",
            });
        }
    }
    // While the path is as it was: a folder that may not be listed does not open.
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = File::open(folder).map_err(|error| Error::io("open the folder", folder, error))?;
    let (temporary, cached) = make_temporary(path, name)?;
    // From here on the temporary file is removed unless it takes the name.
    let mut writes = Writes::of(temporary, Some(path.to_owned()), cached);
    writes.folder = Some(folder);
    if let Some(found) = replaced {
        let mode = Permissions::from_mode(found.permissions().mode());
        writes.cached.set_permissions(mode).map_err(|error| writes.failed("change the permissions of", error))?;
    }
    if offset > 0 {
        match fallocate(&writes.cached, FallocateFlags::empty(), 0, offset) {
            // A file system without, or one that a signal interrupts, and that would begin anew: the file grows as it
            // is written.
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::INTR) => {}
            given => given.map_err(|error| writes.failed("make room for", error))?,
        }
    }
    start(&ranges, memory, options, writes)
}

/// A new file beside `path`, whose last part is `name`.
fn make_temporary(path: &Path, name: &OsStr) -> Result<(PathBuf, File)> {
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let end = format!(".{}-{number}.tmp", process::id());
        let shown = &name.as_bytes()[..name.len().min(NAME_BYTES_MAX - 1 - end.len())];
        let mut hidden = OsString::from(".");
        hidden.push(OsStr::from_bytes(shown));
        hidden.push(end);
        let temporary = path.with_file_name(hidden);
        match OpenOptions::new().read(true).write(true).create_new(true).mode(0o666).open(&temporary) {
            Ok(file) => return Ok((temporary, file)),
            // Of a process that was killed: in containers many have the same number.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(Error::io("create", &temporary, error)),
        }
    }
}

/// The file that a path names, wherever the process works later: a rename would replace a link, and not what it names.
fn follow(path: &Path) -> Result<PathBuf> {
    if fs::symlink_metadata(path).is_ok_and(|found| found.is_symlink()) {
        return fs::canonicalize(path).map_err(|error| Error::io("follow the link", path, error));
    }
    Ok(absolute(path).unwrap_or_else(|_| path.to_owned()))
}

/// Writes ranges of an existing file in place, and flushes it. After an error, a crash or a cancellation some of their
/// bytes are new and some are old.
///
/// # Safety
/// As of [`write`](fn@write); ranges do not overlap in the file.
///
/// # Errors
/// [`Error::Io`]; [`Error::NoFile`] for what is neither a file nor a block device.
pub unsafe fn write_at(
    path: impl AsRef<Path>,
    ranges: &[Range],
    memory: Memory,
    options: &Options,
) -> Result<Transfer> {
    let path = path.as_ref();
    check_ranges(ranges)?;
    let cached = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path);
    let cached = cached.map_err(|error| Error::io("open", path, error))?;
    let found = cached.metadata().map_err(|error| Error::io("open", path, error))?;
    file::refuse_other_kinds(path, &found)?;
    start(ranges, memory, options, Writes::of(path.to_owned(), None, cached))
}

/// As [`write_at`], to the file that is open, whatever its path names by now.
///
/// # Safety
/// As of [`write_at`].
///
/// # Errors
/// [`Error::Io`].
pub unsafe fn write_into(file: &SourceFile, ranges: &[Range], memory: Memory, options: &Options) -> Result<Transfer> {
    check_ranges(ranges)?;
    start(ranges, memory, options, Writes::of(file.path().to_owned(), None, file.reopen_to_write()?))
}

fn check_ranges(ranges: &[Range]) -> Result<()> {
    if ranges.iter().any(|range| range.file != 0 || range.offset.checked_add(range.len as u64).is_none()) {
        return Err(Error::Argument("found a range of another file, or past 16 EiB, expected ranges of file 0".into()));
    }
    Ok(())
}

fn start(ranges: &[Range], memory: Memory, options: &Options, writes: Writes) -> Result<Transfer> {
    let align = writes.direct.as_ref().map_or(4096, |direct| direct.align.max(4096));
    Ok(Transfer::start(ranges, memory, (align, &[0]), options.chosen(false)?, Arc::new(writes)))
}

impl Writes {
    fn of(path: PathBuf, becomes: Option<PathBuf>, cached: File) -> Self {
        let direct = file::reopen(&cached, OpenOptions::new().write(true));
        Writes { path, becomes, folder: None, cached, direct, is_finished: AtomicBool::new(false) }
    }

    fn failed(&self, op: &'static str, error: impl Into<io::Error>) -> Error {
        Error::io(op, self.becomes.as_ref().unwrap_or(&self.path), error)
    }
}

impl Carry for Writes {
    fn carry(&self, shared: &Shared, lane: &mut Lane<'_>, piece: &Piece) -> Result<()> {
        // A gap between ranges in place is not ours to write.
        let mut at = 0;
        while at < piece.parts.len() {
            let mut end = piece.parts[at].offset + piece.parts[at].len as u64;
            let next = piece.parts[at + 1..].iter().take_while(|part| {
                let joins = part.offset == end;
                end = if joins { end + part.len as u64 } else { end };
                joins
            });
            let until = at + 1 + next.count();
            let parts = piece.parts[at..until].to_vec();
            let run = Piece { file: 0, start: parts[0].offset, end, parts };
            let bytes = lane.gather(&run)?;
            shared.counts.bounced(bytes.len());
            self.write_run(shared, run.start, bytes)?;
            at = until;
        }
        Ok(())
    }

    fn finish(&self) -> Result<()> {
        self.cached.sync_all().map_err(|error| self.failed("flush", error))?;
        if let Some(becomes) = &self.becomes {
            fs::rename(&self.path, becomes).map_err(|error| self.failed("name", error))?;
            self.is_finished.store(true, Ordering::Relaxed);
            let flushed = self.folder.as_ref().map_or(Ok(()), File::sync_all);
            flushed
                .map_err(|error| self.failed("flush the folder of the new file, which has its name by now,", error))?;
        }
        Ok(())
    }
}

impl Writes {
    /// Writes the aligned middle directly, and the rest through the page cache. The bytes begin a bounce buffer.
    fn write_run(&self, shared: &Shared, start: u64, bytes: &mut [u8]) -> Result<()> {
        let end = start + bytes.len() as u64;
        let middle = match &self.direct {
            Some(direct) if start.is_multiple_of(direct.align) => Some((direct, end - end % direct.align)),
            _ => None,
        };
        let mut rest = start;
        if let Some((direct, until)) = middle.filter(|&(_, until)| until > start) {
            let bytes = &bytes[..(until - start) as usize];
            match direct.file.write_all_at(bytes, start) {
                Ok(()) => {
                    shared.counts.read(Way::Direct, bytes.len());
                    rest = until;
                }
                // A file system may take the flag and refuse the write.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
                Err(error) => return Err(self.failed("write", error)),
            }
        }
        let tail = &bytes[(rest - start) as usize..];
        if !tail.is_empty() {
            self.cached.write_all_at(tail, rest).map_err(|error| self.failed("write", error))?;
            shared.counts.read(Way::Buffered, tail.len());
        }
        Ok(())
    }
}

impl Drop for Writes {
    fn drop(&mut self) {
        if self.becomes.is_some() && !self.is_finished.load(Ordering::Relaxed) {
            // Nobody waits for the answer; the name says what it is.
            _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::queues::Queues;

    #[test]
    fn a_direct_write_that_is_refused_goes_through_the_page_cache() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
        let path = folder.path().join("file");
        let cached = OpenOptions::new().read(true).write(true).create_new(true).open(&path).expect("a file");
        let mut writes = Writes::of(path.clone(), None, cached);
        let Some(direct) = &mut writes.direct else { return eprintln!("skipped: no direct I/O here") };
        // No drive takes it.
        direct.align = 7;
        let shared = Shared::new(&[], Queues::new(Vec::new(), 1), Memory::Host, 4096);
        let mut bytes: Vec<u8> = (0..10_000_u32).map(|n| (n % 251) as u8).collect();
        writes.write_run(&shared, 7, &mut bytes).expect("it is written");
        assert!(fs::read(&path).expect("it is there")[7..] == bytes);
    }

    #[test]
    fn a_file_is_written_where_the_process_worked_at_the_start() {
        let path = follow(Path::new("data")).expect("it is no link");
        assert_eq!(path, std::env::current_dir().expect("a folder").join("data"));
    }
}
