//! From a configured path to an open file, and back to nothing if the store is not to be.

use std::{
    fs::{self, File, FileType, Metadata, OpenOptions, Permissions},
    io,
    os::unix::{
        ffi::OsStrExt,
        fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{lock::Lock, sync_directory, sys};
use crate::error::{Error, Result};

/// The store in a configured directory.
const FILE_NAME: &str = "kvhoist.store";

/// The mode of a store's file.
const MODE: u32 = 0o600;

/// What a failure has to take back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Undo {
    Nothing,
    /// The file was empty, and has been given a size.
    Truncate,
    /// The file was created.
    Remove,
}

/// An open file. Dropped without [`keep`](Self::keep) it takes back what opening it did.
///
/// Until the lock is held another process may make a store of the file, so nothing is decided before.
pub(super) struct Opened {
    pub path: PathBuf,
    pub file: Arc<File>,
    pub device: bool,
    /// By this call.
    created: bool,
    undo: Undo,
    // Last: the lock is released after everything has been taken back.
    lock: Option<Arc<Lock>>,
}

impl Opened {
    fn new(path: PathBuf, file: File, device: bool, created: bool) -> Self {
        Opened { path, file: file.into(), device, created, undo: Undo::Nothing, lock: None }
    }

    /// The path names this file.
    pub fn is_in_place(&self) -> Result<bool> {
        let ours = self.file.metadata().map_err(|error| Error::io("stat", &self.path, error))?;
        Ok(fs::symlink_metadata(&self.path).is_ok_and(|now| (now.dev(), now.ino()) == (ours.dev(), ours.ino())))
    }

    /// Keeps the lock until the last owner of it is gone.
    pub fn locked(&mut self, lock: Lock) {
        self.lock = Some(Arc::new(lock));
    }

    pub fn lock(&self) -> Option<Arc<Lock>> {
        self.lock.clone()
    }

    /// Makes the file ours under the exclusive lock: only its owner may read or write it, by one name; a file that
    /// this call created and that nobody has written to goes away with a failure.
    pub fn claim(&mut self) -> Result<()> {
        assert!(self.lock.is_some(), "another process may be writing");
        if self.device {
            return Ok(());
        }
        let stat = |error| Error::io("stat", &self.path, error);
        let metadata = self.file.metadata().map_err(stat)?;
        if self.created && metadata.len() == 0 {
            self.undo = Undo::Remove;
            // A umask that takes rights from the owner would keep the next open out.
            self.file.set_permissions(Permissions::from_mode(MODE)).map_err(|e| Error::io("chmod", &self.path, e))?;
        }
        let metadata = self.file.metadata().map_err(stat)?;
        check_private(&self.path, &metadata)
    }

    /// The file is about to be given a size; it was empty under the lock.
    pub fn grows(&mut self) {
        if self.undo == Undo::Nothing {
            self.undo = Undo::Truncate;
        }
    }

    /// The store is accepted.
    pub fn keep(mut self) -> Result<()> {
        if self.undo == Undo::Remove {
            sync_directory(&self.path)?;
        }
        self.undo = Undo::Nothing;
        Ok(())
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let undone = match self.undo {
            Undo::Nothing => return,
            Undo::Truncate => self.file.set_len(0),
            // By now the path may name another process's file.
            Undo::Remove if !self.is_in_place().unwrap_or(false) => return,
            Undo::Remove => fs::remove_file(&self.path),
        };
        if let Err(error) = undone {
            tracing::warn!(path = %self.path.display(), %error, "left behind after the store was refused");
        }
    }
}

fn refuse(path: &Path, found: impl Into<String>, expected: impl Into<String>, action: impl Into<String>) -> Error {
    Error::Store { path: path.into(), found: found.into(), expected: expected.into(), action: action.into() }
}

/// Opens the file, device, or file in the directory `configured`; creates a file that is missing. `None` where the
/// file went away meanwhile.
pub(super) fn open(configured: &Path) -> Result<Option<Opened>> {
    let path = store_path(configured)?;
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
    // On a block device, and there only, O_EXCL without O_CREAT has a meaning: not mounted, not part of anything.
    let exclusive = if before.is_block_device() { libc::O_EXCL } else { 0 };
    let file = match options.custom_flags(flags | exclusive).open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(cannot_open(&path, error)),
    };
    let now = file.metadata().map_err(|error| Error::io("stat", &path, error))?.file_type();
    check_type(&path, now)?;
    if now != before {
        return Err(refuse(&path, "a path that changes while it is opened", "one that stays", "open again"));
    }
    Ok(Some(Opened::new(path, file, now.is_block_device(), false)))
}

/// Opens what is at `configured` for reading; creates and changes nothing.
pub(super) fn open_read_only(configured: &Path) -> Result<Opened> {
    let path = store_path(configured)?;
    // The type first, so that no pipe or character device notices the opening.
    let before = fs::symlink_metadata(&path).map_err(|error| cannot_open(&path, error))?.file_type();
    check_type(&path, before)?;
    let flags = libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(&path);
    let file = file.map_err(|error| cannot_open(&path, error))?;
    let now = file.metadata().map_err(|error| Error::io("stat", &path, error))?.file_type();
    check_type(&path, now)?;
    Ok(Opened::new(path, file, now.is_block_device(), false))
}

/// Whoever may write to the directory could have put a file of their own there, or another name of a file elsewhere.
fn check_private(path: &Path, metadata: &Metadata) -> Result<()> {
    let (owner, user, mode) = (metadata.uid(), sys::effective_user(), metadata.mode() & 0o7777);
    if owner != user {
        return Err(refuse(
            path,
            format!("a file of user {owner}"),
            format!("a file of user {user}, as whom this process runs"),
            "run as that user, or chown the file if you know who wrote it, or choose another path in `disks`",
        ));
    }
    if mode & 0o077 != 0 {
        return Err(refuse(
            path,
            format!("a file of mode {mode:04o}, which group or others may use"),
            format!("mode {MODE:04o}"),
            "chmod 600 the file if you know who wrote it (mount a file system without modes with umask=077), or choose \
             another path in `disks`",
        ));
    }
    if metadata.nlink() != 1 {
        return Err(refuse(
            path,
            format!("a file with {} hard links", metadata.nlink()),
            "a file with one name",
            format!("remove its other names (find -inum {}), or choose another path in `disks`", metadata.ino()),
        ));
    }
    Ok(())
}

/// The file or device that a configured path means.
fn store_path(configured: &Path) -> Result<PathBuf> {
    let path = follow_device_name(configured);
    match fs::metadata(&path) {
        Ok(metadata) if metadata.is_dir() => return Ok(path.join(FILE_NAME)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            // With a slash at its end it means a directory, whether there is one or not.
            let directory = if path.as_os_str().as_bytes().ends_with(b"/") { &path } else { parent(&path) };
            if !directory.is_dir() {
                return Err(refuse(
                    &path,
                    format!("no directory {}", directory.display()),
                    "a directory that exists, or a file in one",
                    "create it (mkdir -p), mount what belongs there, or mend `disks.path`",
                ));
            }
        }
        // Whatever it is, opening it says.
        _ => {}
    }
    Ok(path)
}

/// Symbolic links are not followed, for whoever may write to the directory could aim one at any file. The names
/// by which devices are best configured are such links, but made by root alone.
fn follow_device_name(configured: &Path) -> PathBuf {
    let named_by_root = configured.starts_with("/dev/disk") || configured.starts_with("/dev/mapper");
    match fs::canonicalize(configured) {
        Ok(device) if named_by_root => device,
        _ => configured.to_owned(),
    }
}

/// The directory that holds `path`.
pub(super) fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
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
    Err(refuse(path, name, "a regular file or a block device", action))
}

fn cannot_open(path: &Path, error: io::Error) -> Error {
    match error.raw_os_error() {
        // A link that came between the look and the opening.
        Some(libc::ELOOP) => refuse(path, "a symbolic link", "a regular file or a block device", "open again"),
        Some(libc::EROFS) => refuse(
            path,
            format!("a read-only file system ({error})"),
            "a path that this process may create, read and write",
            "remount it for writing (after an error in it: check it first), or choose another path in `disks`",
        ),
        Some(libc::EACCES | libc::EPERM) => refuse(
            path,
            format!("no permission ({error})"),
            "a path that this process may create, read and write",
            "run as the user who owns it, or change its owner or mode",
        ),
        Some(libc::EBUSY) => refuse(
            path,
            "a device in use (mounted, swap, or part of a volume)",
            "a device that nobody uses",
            "unmount it or take it out of its volume, if it is the right one",
        ),
        Some(libc::ENOSPC | libc::EDQUOT) => refuse(
            path,
            format!("no room for another file ({error})"),
            "room for the store",
            "free space or inodes, or choose another path in `disks`",
        ),
        _ => Error::io("open", path, error),
    }
}
