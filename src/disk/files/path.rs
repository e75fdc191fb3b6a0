//! Opens a configured path, and undoes what opening it created if the store is refused.

use std::{
    fs::{self, File, FileType, Metadata, OpenOptions, Permissions},
    io,
    os::unix::{
        ffi::OsStrExt,
        fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Instant,
};

use super::{
    lock::{Lock, POLL},
    read_up_to, sys,
};
use crate::{
    disk::format::{HEAD_BYTES, is_zero},
    error::{Error, Result},
    memory::AlignedBuf,
    shield::log,
};

/// File name of the store in a configured directory.
pub const FILE_NAME: &str = "kvhoist.store";

/// The mode of a store's file.
const MODE: u32 = 0o600;

/// What a failed open has to undo.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Undo {
    Nothing,
    /// The file was empty and has been given a size.
    Truncate,
    /// The file was created.
    Remove,
}

/// An open file. Dropped without [`keep`](Self::keep), it undoes what opening it did.
///
/// Nothing is undone before the lock is held: until then another process may turn the file into its store.
pub(super) struct Opened {
    pub path: PathBuf,
    pub file: Arc<File>,
    pub device: bool,
    /// Created by this call.
    created: bool,
    undo: Undo,
    // Declared last, and so dropped last: the lock is released after everything has been undone.
    lock: Option<Arc<Lock>>,
}

impl Opened {
    fn new(path: PathBuf, file: File, device: bool, created: bool) -> Self {
        Opened { path, file: file.into(), device, created, undo: Undo::Nothing, lock: None }
    }

    /// Whether the path still names this file.
    pub fn is_in_place(&self) -> Result<bool> {
        let ours = self.file.metadata().map_err(|error| Error::io("stat", &self.path, error))?;
        Ok(fs::symlink_metadata(&self.path).is_ok_and(|now| (now.dev(), now.ino()) == (ours.dev(), ours.ino())))
    }

    /// Attaches the lock, which is kept until its last owner is dropped.
    pub fn locked(&mut self, lock: Lock) {
        self.lock = Some(Arc::new(lock));
    }

    pub fn lock(&self) -> Option<Arc<Lock>> {
        self.lock.clone()
    }

    /// Secures the file under the exclusive lock: only its owner may use it, and by one name only. A file that this
    /// call created, and that is still empty, is removed after a failure.
    pub fn claim(&mut self) -> Result<()> {
        assert!(self.lock.is_some(), "another process may be writing");
        if self.device {
            return Ok(());
        }
        let stat = |error| Error::io("stat", &self.path, error);
        let metadata = self.file.metadata().map_err(stat)?;
        if self.created && metadata.len() == 0 {
            self.undo = Undo::Remove;
            // A umask that takes permissions from the owner would make the next open fail.
            self.file.set_permissions(Permissions::from_mode(MODE)).map_err(|e| Error::io("chmod", &self.path, e))?;
        }
        let metadata = self.file.metadata().map_err(stat)?;
        check_private(&self.path, &metadata)
    }

    /// Notes that the file, which was empty under the lock, is about to grow.
    pub fn grows(&mut self) {
        if self.undo == Undo::Nothing {
            self.undo = Undo::Truncate;
        }
    }

    /// Has the name of a file that this call created survive a power cut.
    pub fn flush_name(&self) -> Result<()> {
        if self.undo == Undo::Remove { sync_directory(&self.path) } else { Ok(()) }
    }

    /// Keeps the file: the store was accepted.
    pub fn keep(&mut self) {
        self.undo = Undo::Nothing;
    }

    /// Whether a failure leaves nothing of the store here.
    pub fn is_undone(&self) -> bool {
        self.undo != Undo::Nothing
    }

    /// Its superblocks, padded with zeros.
    pub fn head(&self) -> io::Result<AlignedBuf> {
        let mut head = AlignedBuf::zeroed(HEAD_BYTES);
        read_up_to(&self.file, &mut head, 0)?;
        Ok(head)
    }

    /// Whether a superblock was written, or nobody can tell.
    pub fn has_superblock(&self) -> bool {
        !self.head().is_ok_and(|head| is_zero(&head))
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let undone = match self.undo {
            Undo::Nothing => return,
            Undo::Truncate => self.file.set_len(0),
            // The path may name another process's file by now.
            Undo::Remove if !self.is_in_place().unwrap_or(false) => return,
            Undo::Remove => fs::remove_file(&self.path),
        };
        if let Err(error) = undone {
            let path = self.path.display();
            log(|| tracing::warn!(%path, %error, "a file was left behind after the store was refused"));
        }
    }
}

/// Opens `configured`: a file, a device, or the store's file in a directory. Creates a missing file. `None` if the file
/// was removed meanwhile. A device that is in use is tried until `give_up`: a killed process's I/O may hold it.
pub(super) fn open(configured: &Path, give_up: Instant) -> Result<Option<Opened>> {
    let path = store_path(configured)?;
    check_no_missing_device(&path)?;
    let (mut options, flags) = (OpenOptions::new(), libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK);
    options.read(true).write(true).mode(MODE);
    match options.clone().create_new(true).custom_flags(flags).open(&path) {
        Ok(file) => return Ok(Some(Opened::new(path, file, false, true))),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(cannot_open(&path, error)),
    }
    let before = match fs::symlink_metadata(&path) {
        Ok(metadata) => metadata.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(cannot_open(&path, error)),
    };
    check_type(&path, before)?;
    // On a block device, O_EXCL without O_CREAT fails if the device is mounted or part of a volume.
    let exclusive = if before.is_block_device() { libc::O_EXCL } else { 0 };
    options.custom_flags(flags | exclusive);
    let file = loop {
        match options.open(&path) {
            Ok(file) => break file,
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < give_up => {
                thread::sleep(POLL);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(cannot_open(&path, error)),
        }
    };
    let metadata = file.metadata().map_err(|error| Error::io("stat", &path, error))?;
    let now = metadata.file_type();
    check_type(&path, now)?;
    if now != before {
        return Err(Error::store(&path, "a path that changed while it was opened", "a stable path", "open again"));
    }
    check_writable(&path, &metadata)?;
    Ok(Some(Opened::new(path, file, now.is_block_device(), false)))
}

/// Opens `configured` for reading; creates and changes nothing.
pub(super) fn open_read_only(configured: &Path) -> Result<Opened> {
    let path = store_path(configured)?;
    // Checks the type first, so that opening a pipe or character device has no side effects.
    let before = fs::symlink_metadata(&path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Error::store(configured, "no store", "a store", "choose another path in `disks`"),
        _ => cannot_open(&path, error),
    });
    let before = before?.file_type();
    check_type(&path, before)?;
    let flags = libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(&path);
    let file = file.map_err(|error| cannot_open(&path, error))?;
    let now = file.metadata().map_err(|error| Error::io("stat", &path, error))?.file_type();
    check_type(&path, now)?;
    Ok(Opened::new(path, file, now.is_block_device(), false))
}

/// Whether there is no file of `configured` in a directory that exists.
///
/// # Errors
/// As those of an open.
pub fn is_missing(configured: &Path) -> Result<bool> {
    let found = fs::symlink_metadata(store_path(configured)?);
    Ok(found.is_err_and(|error| error.kind() == io::ErrorKind::NotFound))
}

/// Refuses files that another user could have planted or can change: wrong owner, permissions for group or others, or
/// several names.
fn check_private(path: &Path, metadata: &Metadata) -> Result<()> {
    let (owner, user, mode) = (metadata.uid(), sys::effective_user(), metadata.mode() & 0o7777);
    if owner != user {
        return Err(Error::store(
            path,
            format!("a file of user {owner}"),
            format!("a file of user {user}, the user of this process"),
            "run as that user, or chown the file if you know who wrote it, or choose another path in `disks`",
        ));
    }
    if mode & 0o077 != 0 {
        return Err(Error::store(
            path,
            format!("a file of mode {mode:04o}, which group or others may use"),
            format!("mode {MODE:04o}"),
            "chmod 600 the file if you know who wrote it (mount a file system without modes with umask=077), or choose \
             another path in `disks`",
        ));
    }
    check_one_name(path, metadata)
}

/// Refuses a file with several names: it would stay under the others, whatever happens to this one.
pub(crate) fn check_one_name(path: &Path, metadata: &Metadata) -> Result<()> {
    if metadata.file_type().is_block_device() || metadata.nlink() == 1 {
        return Ok(());
    }
    Err(Error::store(
        path,
        format!("a file with {} hard links", metadata.nlink()),
        "a file with one name",
        format!("remove its other names (find -inum {}), or choose another path in `disks`", metadata.ino()),
    ))
}

/// Refuses a device that is missing: a file in its place below /dev would be in memory, and be found where the device
/// is expected.
fn check_no_missing_device(path: &Path) -> Result<()> {
    let is_of_devices = fs::canonicalize(parent(path))
        .is_ok_and(|directory| directory.starts_with("/dev") && !directory.starts_with("/dev/shm"));
    match fs::symlink_metadata(path) {
        Err(error) if is_of_devices && error.kind() == io::ErrorKind::NotFound => Err(Error::store(
            path,
            "no such device",
            "a device that exists, as no file is created below /dev",
            "look for it (lsblk) and attach it, or correct `disks.path`",
        )),
        // Other errors are reported when the path is opened.
        _ => Ok(()),
    }
}

/// Resolves a configured path to a file or device.
fn store_path(configured: &Path) -> Result<PathBuf> {
    let path = follow_device_name(configured);
    match fs::metadata(&path) {
        Ok(metadata) if metadata.is_dir() => return Ok(path.join(FILE_NAME)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            // A trailing slash means a directory, whether it exists or not.
            let directory = if path.as_os_str().as_bytes().ends_with(b"/") { &path } else { parent(&path) };
            if !directory.is_dir() {
                return Err(Error::store(
                    &path,
                    format!("no directory {}", directory.display()),
                    "a directory that exists, or a file in one",
                    "create it (mkdir -p), mount the missing file system, or correct `disks.path`",
                ));
            }
        }
        // Other errors are reported when the path is opened.
        _ => {}
    }
    Ok(path)
}

/// Symbolic links are not followed: a user who may write to the directory could aim one at any file. The stable names
/// of devices are links too, but only root can create them.
fn follow_device_name(configured: &Path) -> PathBuf {
    let named_by_root = configured.starts_with("/dev/disk") || configured.starts_with("/dev/mapper");
    match fs::canonicalize(configured) {
        Ok(device) if named_by_root => device,
        _ => configured.to_owned(),
    }
}

/// The directory that holds `path`.
fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Makes the directory entry of a file durable.
fn sync_directory(path: &Path) -> Result<()> {
    let parent = parent(path);
    File::open(parent).and_then(|dir| dir.sync_all()).map_err(|error| Error::io("fsync the directory", parent, error))
}

fn check_type(path: &Path, kind: FileType) -> Result<()> {
    let name = if kind.is_file() || kind.is_block_device() {
        return Ok(());
    } else if kind.is_symlink() {
        "a symbolic link"
    } else if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a named pipe"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a character device"
    };
    let action = if kind.is_symlink() {
        "put the path that the link points to in `disks`; links are not followed"
    } else {
        "choose another path in `disks`"
    };
    Err(Error::store(path, name, "a regular file or a block device", action))
}

/// Refuses a device that the kernel does not write.
pub(crate) fn check_writable(path: &Path, metadata: &Metadata) -> Result<()> {
    if !metadata.file_type().is_block_device() || !sys::is_read_only(metadata.rdev()) {
        return Ok(());
    }
    let action = "make it writable (blockdev --setrw) if it is the right one, or choose another path in `disks`";
    Err(Error::store(path, "a read-only device", "a device that can be written", action))
}

/// Why a file or a device of a store could not be written or removed, and what to do where that was denied.
pub(crate) fn cannot_change(op: &'static str, path: &Path, error: io::Error) -> Error {
    match error.raw_os_error() {
        Some(libc::EROFS | libc::EACCES | libc::EPERM) => cannot_open(path, error),
        _ => Error::io(op, path, error),
    }
}

/// Why a file or a device of a store could not be opened, and what to do.
pub fn cannot_open(path: &Path, error: io::Error) -> Error {
    let is_denied = matches!(error.raw_os_error(), Some(libc::EROFS | libc::EACCES | libc::EPERM));
    if is_denied
        && let Ok(metadata) = fs::symlink_metadata(path)
        && let Err(refused) = check_writable(path, &metadata)
    {
        return refused;
    }
    match error.raw_os_error() {
        // A link that appeared between the check and the open.
        Some(libc::ELOOP) => Error::store(path, "a symbolic link", "a regular file or a block device", "open again"),
        Some(libc::EROFS) => Error::store(
            path,
            format!("a read-only file system ({error})"),
            "a path that this process may create, read and write",
            "remount it for writing (after an error in it: check it first), or choose another path in `disks`",
        ),
        Some(libc::EACCES | libc::EPERM) => Error::store(
            path,
            format!("no permission ({error})"),
            "a path that this process may create, read and write",
            "run as the user who owns it, or change its owner, its mode, or the attribute `i` of it or its folder, \
             which makes it immutable (lsattr, chattr -i)",
        ),
        Some(libc::EBUSY) => Error::store(
            path,
            "a device in use (open in another cache, mounted, swap, or part of a volume)",
            "an unused device",
            "close the other cache, or unmount it or take it out of its volume, if it is the right one",
        ),
        Some(libc::ENOSPC | libc::EDQUOT) => Error::store(
            path,
            format!("no room for another file ({error})"),
            "room for the store",
            "free space or inodes, or choose another path in `disks`",
        ),
        _ => Error::io("open", path, error),
    }
}
