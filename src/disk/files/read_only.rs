//! Opens the files and devices of a store to look at them: nothing is created, written, or kept from other readers.

use std::{
    fs::{File, TryLockError},
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    Opening,
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
    /// The file itself, where a directory was named.
    pub path: PathBuf,
    /// Open for reading. Locked for readers while this lives, unless it is [in use](Self::in_use).
    pub file: Arc<File>,
    /// Opened with `O_DIRECT`, and seen to work.
    pub direct: bool,
    /// A block device.
    pub device: bool,
    /// Its size.
    pub bytes: u64,
    /// A cache has it open, and may write to it.
    pub in_use: bool,
    head: AlignedBuf,
    // Last: it releases the lock if no other clone of the file is left.
    _lock: Option<Arc<Lock>>,
}

/// Opens a file, a device, or the store's file in a directory, for reading only. Blocks, for up to a second on
/// the lock of a cache that is about to close it.
///
/// # Errors
/// [`Error::Store`] for what is neither a file nor a block device (symbolic links are not followed), and for a store
/// that a cache has open, unless `allow_in_use`; [`Error::Io`] where the system fails.
pub fn open_read_only(configured: &Path, direct_io: DirectIo, allow_in_use: bool) -> Result<ReadOnlyFile> {
    let mut opened = path::open_read_only(configured)?;
    let in_use = allow_in_use && matches!(opened.file.try_lock_shared(), Err(TryLockError::WouldBlock));
    if !in_use {
        lock::shared(&mut opened).map_err(in_use_words)?;
    }
    let Opening { opened, direct, bytes, head } = Opening::look(opened, direct_io)?;
    let (path, file, lock) = (opened.path.clone(), Arc::clone(&opened.file), opened.lock());
    Ok(ReadOnlyFile { path, file, direct, device: opened.device, bytes, in_use, head, _lock: lock })
}

/// The lock's refusal, in words for who only wants to look.
fn in_use_words(error: Error) -> Error {
    match error {
        Error::Store { path, found, expected, .. } => {
            let action = "close the cache that has it open, or allow a store in use (--allow-in-use)".into();
            Error::Store { path, found, expected, action }
        }
        other => other,
    }
}

impl ReadOnlyFile {
    /// Its first bytes; zeros where it is shorter.
    pub(crate) fn head(&self) -> &[u8; HEAD_BYTES] {
        self.head.first_chunk().expect("the buffer has the length of a head")
    }

    /// The file as the survey wants to know it.
    pub(crate) fn found(&self) -> Found<'_> {
        Found { path: &self.path, bytes: self.bytes, device: self.device, head: self.head() }
    }

    /// The file as the pass over the record tables wants to know it.
    pub(crate) fn member(&self) -> Member {
        Member { path: self.path.clone(), bytes: self.bytes, device: self.device, zeroed: false }
    }
}
