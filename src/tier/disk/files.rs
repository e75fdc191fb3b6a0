//! The store's files as the operating system sees them: opened, locked, checked for direct I/O,
//! preallocated. What their bytes mean is [recovery](super::recover)'s.

use std::{
    ffi::CString,
    fs::{File, OpenOptions},
    io,
    os::{
        fd::AsRawFd,
        unix::{
            ffi::OsStrExt,
            fs::{FileTypeExt, OpenOptionsExt},
        },
    },
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    config::{Config, DirectIo, DiskPath},
    error::{Error, Result},
};

/// How long the lock of a store is waited for, and how often it is tried.
const LOCK_WAIT: Duration = Duration::from_secs(1);
const LOCK_POLL: Duration = Duration::from_millis(5);

/// The file's name where a path is a directory.
const FILE_NAME: &str = "kvhoist.store";

/// One open member of the disk tier. Its lock is held until it is dropped.
#[derive(Debug)]
pub struct StoreFile {
    /// The file or device itself.
    pub path: PathBuf,
    /// Open for reading and writing.
    pub file: Arc<File>,
    /// Open for direct I/O.
    pub direct: bool,
    /// A block device, whose size is what it is.
    pub device: bool,
    /// Its size when it was opened.
    pub bytes: u64,
    /// Made by this open, and removed again should the open fail.
    created: bool,
}

/// Opens and locks the files of every path in `config`. No byte of an existing one is changed.
///
/// # Errors
/// [`Error::Store`] for what is no place for a store, [`Error::Io`] for what the system refused.
pub fn open_files(config: &Config) -> Result<Vec<StoreFile>> {
    let mut files: Vec<StoreFile> = Vec::with_capacity(config.disks.len());
    for disk in &config.disks {
        match open_one(disk, config.direct_io) {
            Ok(file) => files.push(file),
            Err(error) => {
                files.iter().for_each(StoreFile::undo);
                return Err(error);
            }
        }
    }
    Ok(files)
}

fn open_one(disk: &DiskPath, direct_io: DirectIo) -> Result<StoreFile> {
    let path = resolve(&disk.path)?;
    let (file, created, direct) = open_or_create(&path, direct_io)?;
    let opened = StoreFile { path, file: Arc::new(file), direct, device: false, bytes: 0, created };
    opened.check_and_lock().inspect_err(|_| opened.undo())
}

/// The file that a configured path stands for.
fn resolve(path: &Path) -> Result<PathBuf> {
    match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => Ok(path.join(FILE_NAME)),
        // Not even opened: opening a tape or a tty may do something.
        Ok(found) if !found.is_file() && !found.file_type().is_block_device() => {
            let expected = "a directory, a regular file or a block device";
            Err(refuse(path, "neither a file nor a block device", expected, "name another path"))
        }
        Ok(_) => Ok(path.to_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => match path.parent() {
            Some(parent) if parent.as_os_str().is_empty() || parent.is_dir() => Ok(path.to_owned()),
            _ => Err(refuse(path, "no such directory", "an existing directory", "create it, or name another path")),
        },
        Err(source) => Err(Error::io("open", path, source)),
    }
}

/// Opens `path`, creating it where it is not there: the file, whether it was created, and whether
/// it is open for direct I/O.
fn open_or_create(path: &Path, direct_io: DirectIo) -> Result<(File, bool, bool)> {
    let open = |flags: i32, create: bool| {
        OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(create)
            .mode(0o600)
            .custom_flags(flags | libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(path)
    };
    let open_any = |flags: i32| match open(flags, true) {
        Ok(file) => Ok((file, true)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => open(flags, false).map(|file| (file, false)),
        Err(error) => Err(error),
    };
    match open_any(libc::O_DIRECT) {
        Ok((file, created)) => Ok((file, created, true)),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            // Opening with O_CREAT makes the file before the flag is refused.
            let empty = path.metadata().is_ok_and(|found| found.is_file() && found.len() == 0);
            if direct_io == DirectIo::Require {
                if empty {
                    drop(std::fs::remove_file(path));
                }
                return Err(no_direct_io(path));
            }
            tracing::warn!(
                path = %path.display(),
                file_system = file_system(path),
                "no direct I/O here: the page cache is used, and takes memory and CPU twice"
            );
            open(0, false).map(|file| (file, empty, false)).map_err(|source| Error::io("open", path, source))
        }
        Err(error) => Err(open_error(path, error)),
    }
}

fn open_error(path: &Path, error: io::Error) -> Error {
    match error.raw_os_error() {
        Some(libc::ELOOP) => {
            refuse(path, "a symbolic link", "a regular file or a block device", "name the target itself")
        }
        Some(libc::EISDIR | libc::ENXIO) => {
            refuse(path, "neither a file nor a device", "a regular file or a block device", "name another path")
        }
        Some(libc::EACCES | libc::EPERM | libc::EROFS) => refuse(
            path,
            format!("no permission to write ({error})"),
            "a path that this user can write",
            "change its owner or mode, or name another path",
        ),
        _ => Error::io("open", path, error),
    }
}

fn no_direct_io(path: &Path) -> Error {
    refuse(
        path,
        format!("a file system without direct I/O ({})", file_system(path)),
        "one that takes O_DIRECT, such as ext4 or xfs on a local drive",
        "name another path, or set direct_io = prefer to use the page cache",
    )
}

fn refuse(path: &Path, found: impl Into<String>, expected: impl Into<String>, action: impl Into<String>) -> Error {
    Error::Store { path: path.to_owned(), found: found.into(), expected: expected.into(), action: action.into() }
}

/// The name of the file system that `path`, or its directory, is on.
fn file_system(path: &Path) -> String {
    let place = if path.exists() { path } else { path.parent().unwrap_or(path) };
    let Ok(name) = CString::new(place.as_os_str().as_bytes()) else { return "unknown".into() };
    let mut found = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: `name` is a C string and `found` has room for the answer.
    if unsafe { libc::statfs(name.as_ptr(), found.as_mut_ptr()) } != 0 {
        return "unknown".into();
    }
    // SAFETY: the call succeeded, so it filled the answer.
    let kind = unsafe { found.assume_init() }.f_type as u64 & 0xffff_ffff;
    match kind {
        0xef53 => "ext4".into(),
        0x5846_5342 => "xfs".into(),
        0x9123_683e => "btrfs".into(),
        0x0102_1994 => "tmpfs".into(),
        0x6969 => "nfs".into(),
        0x794c_7630 => "overlay".into(),
        0x2fc1_2fc1 => "zfs".into(),
        0x6573_5546 => "fuse".into(),
        other => format!("type {other:#x}"),
    }
}

impl StoreFile {
    /// Refuses what is neither file nor device, takes the lock, and sees that direct I/O stuck.
    fn check_and_lock(self: &StoreFile) -> Result<StoreFile> {
        let io = |op| move |source| Error::io(op, &self.path, source);
        let found = self.file.metadata().map_err(io("stat"))?;
        let device = found.file_type().is_block_device();
        if !device && !found.file_type().is_file() {
            let action = "name another path";
            return Err(refuse(&self.path, "neither a file nor a device", "a regular file or a block device", action));
        }
        self.lock()?;
        // SAFETY: plain system call on a descriptor that `self` keeps open.
        let flags = unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_GETFL) };
        if self.direct && flags & libc::O_DIRECT == 0 {
            return Err(no_direct_io(&self.path));
        }
        let bytes = if device { device_bytes(&self.file).map_err(io("size of"))? } else { found.len() };
        let (path, file) = (self.path.clone(), Arc::clone(&self.file));
        Ok(StoreFile { path, file, direct: self.direct, device, bytes, created: self.created })
    }

    /// Takes the lock that keeps other caches out, however they came by the file.
    ///
    /// The kernel ends the I/O of a killed process, and with it its lock, a little after the process
    /// is gone: a restart right after a crash waits for that instead of failing.
    fn lock(&self) -> Result<()> {
        let give_up = Instant::now() + LOCK_WAIT;
        loop {
            // SAFETY: plain system call on a descriptor that `self` keeps open.
            if unsafe { libc::flock(self.file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EWOULDBLOCK) if Instant::now() < give_up => std::thread::sleep(LOCK_POLL),
                Some(libc::EWOULDBLOCK) => {
                    let found = "a store that another cache holds open, in this process or another";
                    let action = "close that cache first, or name another path";
                    return Err(refuse(&self.path, found, "a store of our own", action));
                }
                _ => return Err(Error::io("lock", &self.path, error)),
            }
        }
    }

    /// Gives a new file all the bytes that its store will ever have, so that no later write finds
    /// the file system full.
    pub(super) fn allocate(&self, bytes: u64) -> Result<()> {
        if self.device || self.bytes >= bytes {
            return Ok(());
        }
        let available = available_bytes(&self.file);
        let full = |available: String| {
            refuse(
                &self.path,
                format!("{available} available on the file system"),
                format!("{bytes} bytes for the store"),
                "make room, ask for fewer disk blocks, or name another path",
            )
        };
        if available.is_some_and(|available| available < bytes) {
            return Err(full(format!("{} bytes", available.unwrap_or(0))));
        }
        let Ok(length) = libc::off_t::try_from(bytes) else { return Err(full("not that many bytes".into())) };
        // SAFETY: plain system call on a descriptor that `self` keeps open.
        if unsafe { libc::fallocate(self.file.as_raw_fd(), 0, 0, length) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => Err(full(format!("not enough ({error})"))),
            Some(libc::EOPNOTSUPP) => Err(refuse(
                &self.path,
                format!("a file system that cannot preallocate ({})", file_system(&self.path)),
                "one with fallocate, such as ext4 or xfs",
                "name another path",
            )),
            _ => Err(Error::io("allocate", &self.path, error)),
        }
    }

    /// Removes a file that this open made, when the open has failed.
    pub(super) fn undo(&self) {
        if self.created {
            drop(std::fs::remove_file(&self.path));
        }
    }
}

fn available_bytes(file: &File) -> Option<u64> {
    let mut found = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: an open descriptor, and room for the answer.
    if unsafe { libc::fstatvfs(file.as_raw_fd(), found.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: the call succeeded, so it filled the answer.
    let found = unsafe { found.assume_init() };
    found.f_bavail.checked_mul(found.f_frsize)
}

fn device_bytes(file: &File) -> io::Result<u64> {
    /// `_IOR(0x12, 114, size_t)`, linux/fs.h.
    const BLKGETSIZE64: libc::c_ulong = 0x8008_1272;
    let mut bytes = 0u64;
    // SAFETY: an open descriptor; the call writes one u64.
    if unsafe { libc::ioctl(file.as_raw_fd(), BLKGETSIZE64, &raw mut bytes) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(bytes)
}
