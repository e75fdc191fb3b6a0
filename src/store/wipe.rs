//! Removing a store for good.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use super::{
    Options,
    open::{Opened, Shape, open},
};
use crate::{
    disk::{ReadOnlyFile, format::HEAD_BYTES},
    error::{Error, Result},
};

/// What [`wipe`] is about to remove.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Doomed {
    /// What the store is; `None` where it is so damaged that no cache can open it.
    pub shape: Option<Shape>,
    /// Its files and devices.
    pub paths: Vec<PathBuf>,
}

/// Removes a store for good, if `confirm` says so: its files, or the superblocks of its devices. True where it did.
///
/// `paths` are all paths of one store, in any order. What is around the files stays. Nobody can open the store
/// meanwhile. The blocks of a device stay readable to those who may read the device: discard it (`blkdiscard`) where
/// that matters.
///
/// # Errors
/// [`Error::Store`] where the paths are not all of one store of this program, or a process has it open;
/// [`Error::Io`], after which a part of the store may be gone.
pub fn wipe<P: AsRef<Path>>(paths: &[P], confirm: impl FnOnce(&Doomed) -> bool) -> Result<bool> {
    let paths: Vec<&Path> = paths.iter().map(AsRef::as_ref).collect();
    let (shape, files) = match open(&paths, &Options::default()).map_err(close_it)? {
        Opened::Store(store) => (Some(store.shape), store.files),
        Opened::Lost { files, .. } => (None, files),
    };
    files.iter().try_for_each(lock)?;
    let doomed = Doomed { shape, paths: files.iter().map(|file| file.path.clone()).collect() };
    if !confirm(&doomed) {
        return Ok(false);
    }
    files.iter().try_for_each(remove)?;
    Ok(true)
}

/// Nobody else may even look.
fn lock(file: &ReadOnlyFile) -> Result<()> {
    match file.file.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => Err(close_it(Error::Store {
            path: file.path.clone(),
            found: "a lock on it: another process looks at the store".into(),
            expected: "a store that nobody has open".into(),
            action: String::new(),
        })),
        Err(TryLockError::Error(error)) => Err(Error::io("lock", &file.path, error)),
    }
}

fn remove(file: &ReadOnlyFile) -> Result<()> {
    let path = &file.path;
    let failed = |op| move |error| Error::io(op, path, error);
    if file.device {
        let device = OpenOptions::new().write(true).custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC).open(path);
        let device = device.map_err(failed("open"))?;
        device.write_all_at(&[0; HEAD_BYTES], 0).and_then(|()| device.sync_all()).map_err(failed("write"))?;
        return Ok(());
    }
    let ours = file.file.metadata().map_err(failed("stat"))?;
    let now = fs::symlink_metadata(path).map_err(failed("stat"))?;
    if (now.dev(), now.ino()) != (ours.dev(), ours.ino()) {
        let (found, expected) = ("another file than a moment ago".into(), "one that stays in its place".into());
        return Err(Error::Store { path: path.clone(), found, expected, action: "look at it, and wipe again".into() });
    }
    fs::remove_file(path).map_err(failed("remove"))?;
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(parent).and_then(|parent| parent.sync_all()).map_err(failed("fsync the directory of"))
}

/// The refusal of a store in use, in words for who cannot have both.
fn close_it(error: Error) -> Error {
    match error {
        Error::Store { path, found, expected, .. } if found.contains("lock") => {
            Error::Store { path, found, expected, action: "close what has it open first (lsof names it)".into() }
        }
        other => other,
    }
}
