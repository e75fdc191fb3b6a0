//! Opens the files and devices of a store for inspection: nothing is created or written, and other readers are not
//! locked out.

use std::{
    fs::{File, TryLockError},
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    FILE_NAME, Opening, blank,
    lock::{self, Lock},
    path,
};
use crate::{
    config::DirectIo,
    disk::{
        format::{HEAD_BYTES, survey::Found},
        recovery::Member,
    },
    error::{Error, Result},
    memory::AlignedBuf,
};

/// One file or device of a store, open for reading only.
pub struct ReadOnlyFile {
    /// The store's file, if a directory was named.
    pub path: PathBuf,
    /// Open for reading. Holds the readers' lock while this lives, unless it may be in use.
    pub file: Arc<File>,
    /// Whether `O_DIRECT` is set, and a read with it has succeeded.
    pub direct: bool,
    /// Whether it is a block device.
    pub device: bool,
    /// Size in bytes.
    pub bytes: u64,
    /// Whether a cache had it open when it was opened, and may write to it.
    pub in_use: bool,
    head: AlignedBuf,
    // Dropped last: releases the lock if this is the last clone.
    _lock: Option<Arc<Lock>>,
}

/// Opens a file, a device, or the store's file in a directory, for reading. Waits up to a second for the lock of a
/// cache that is closing; with `allow_in_use` it takes none, and a cache may open the store meanwhile.
///
/// # Errors
/// [`Error::Store`] if the path is neither a file nor a block device (symbolic links are not followed), or if a cache
/// has the store open and `allow_in_use` is false; [`Error::Io`] if a system call fails.
pub fn open_read_only(configured: &Path, direct_io: DirectIo, allow_in_use: bool) -> Result<ReadOnlyFile> {
    let mut opened = path::open_read_only(configured)?;
    let in_use = allow_in_use && is_locked(&opened.file).map_err(|error| Error::io("lock", &opened.path, error))?;
    if !allow_in_use {
        lock::shared(&mut opened).map_err(in_use_error)?;
    }
    let Opening { opened, direct, bytes, head } = Opening::inspect(opened, direct_io)?;
    let (path, file, lock) = (opened.path.clone(), Arc::clone(&opened.file), opened.lock());
    Ok(ReadOnlyFile { path, file, direct, device: opened.device, bytes, in_use, head, _lock: lock })
}

/// Whether a cache has the lock. Keeps none: a reader that allows for a cache must not keep one from starting.
fn is_locked(file: &File) -> io::Result<bool> {
    match file.try_lock_shared() {
        Ok(()) => file.unlock().map(|()| false),
        Err(TryLockError::WouldBlock) => Ok(true),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Rewords the lock error for a reader.
fn in_use_error(error: Error) -> Error {
    let is_held = lock::is_held(&error);
    match error {
        Error::Store { path, found, expected, .. } if is_held => {
            let action = "close the cache that has it open, or allow a store in use (--allow-in-use)";
            Error::store(path, found, expected, action)
        }
        other => other,
    }
}

impl ReadOnlyFile {
    /// The first bytes of the file, padded with zeros.
    pub(crate) fn head(&self) -> &[u8; HEAD_BYTES] {
        self.head.first_chunk().expect("the buffer has the length of a head")
    }

    /// Whether it is what an open that was killed before it wrote a superblock leaves: a file of the store's name, as
    /// empty as an open wants one.
    pub(crate) fn is_blank(&self) -> Result<bool> {
        let is_named = self.path.file_name().is_some_and(|name| name == FILE_NAME);
        let data = || blank::data_at_ends(&self.file, self.bytes).map_err(|error| Error::io("read", &self.path, error));
        Ok(!self.device && is_named && data()?.is_none())
    }

    /// Whether a record table of so many bytes has a record.
    pub(crate) fn has_records(&self, table_bytes: u64) -> Result<bool> {
        let record = blank::record(&self.file, table_bytes, self.bytes);
        Ok(record.map_err(|error| Error::io("read", &self.path, error))?.is_some())
    }

    /// The file, as the survey needs it.
    pub fn found(&self) -> Found<'_> {
        Found { path: &self.path, bytes: self.bytes, device: self.device, head: self.head() }
    }

    /// The file, as the pass over the record tables needs it.
    pub(crate) fn member(&self) -> Member {
        Member { path: self.path.clone(), bytes: self.bytes, device: self.device, zeroed: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_refusal_of_a_lock_is_about_a_store_in_use() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join(FILE_NAME);
        std::fs::write(&path, [0; HEAD_BYTES]).expect("written");
        let held = File::open(&path).expect("open");
        held.lock().expect("nobody has it");
        let Err(refused) = open_read_only(&path, DirectIo::Prefer, false) else { panic!("it is locked") };
        assert!(lock::is_held(&refused) && refused.to_string().contains("--allow-in-use"), "{refused}");
        let replaced = in_use_error(Error::store(&path, "a file that was replaced", "a file", "open again"));
        assert!(replaced.to_string().ends_with("; open again"), "{replaced}");
    }
}
