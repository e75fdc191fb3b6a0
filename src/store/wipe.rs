//! Removing a store for good.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use super::{
    Options, Store,
    open::{Opened, Shape, open},
};
use crate::{
    disk::{ReadOnlyFile, format::HEAD_BYTES},
    error::{Error, Result},
};

impl Store {
    /// Removes the store if `confirm` returns true: deletes its files, or clears the superblocks of its devices.
    /// Returns whether it did.
    ///
    /// `confirm` gets the store's identity and geometry (`None` if it is too damaged to be opened), and its files and
    /// devices. Other content of a directory stays. No process can open the store meanwhile. A device's blocks remain
    /// readable to users of the device: discard it (`blkdiscard`) if that matters. How the store would be read
    /// ([`allow_in_use`](Self::allow_in_use) and the rest) does not matter here.
    ///
    /// # Errors
    /// [`Error::Store`] if the paths are not exactly those of one store, or a process has it open; [`Error::Io`], after
    /// which a part of the store may already be gone.
    pub fn wipe(&self, confirm: impl FnOnce(Option<&Shape>, &[PathBuf]) -> bool) -> Result<bool> {
        let (shape, files) = match open(&self.paths(), &Options::default()).map_err(close_it)? {
            Opened::Store(store) => (Some(store.shape), store.files),
            Opened::Lost { files, .. } => (None, files),
        };
        files.iter().try_for_each(lock)?;
        let paths: Vec<PathBuf> = files.iter().map(|file| file.path.clone()).collect();
        if !confirm(shape.as_ref(), &paths) {
            return Ok(false);
        }
        files.iter().try_for_each(remove)?;
        Ok(true)
    }
}

/// Takes the exclusive lock, which also excludes readers.
fn lock(file: &ReadOnlyFile) -> Result<()> {
    match file.file.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => Err(close_it(Error::store(
            file.path.clone(),
            "a lock on it: another process is reading the store",
            "a store that is not open",
            String::new(),
        ))),
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
        let (found, expected) = ("another file than a moment ago", "one that stays in its place");
        return Err(Error::store(path.clone(), found, expected, "look at it, and wipe again"));
    }
    fs::remove_file(path).map_err(failed("remove"))?;
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(parent).and_then(|parent| parent.sync_all()).map_err(failed("fsync the directory of"))
}

/// Rewords the refusal of a store in use.
fn close_it(error: Error) -> Error {
    match error {
        Error::Store { path, found, expected, .. } if found.contains("lock") => {
            Error::store(path, found, expected, "close what has it open first (lsof names it)")
        }
        other => other,
    }
}
