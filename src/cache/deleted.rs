//! Store files that somebody deletes while a cache has them open.
//!
//! Reads and writes of such a file succeed, but its name is gone: what it holds is lost when the cache closes.

use std::{
    fs::File,
    os::unix::fs::MetadataExt,
    sync::{Arc, Weak},
};

use crate::{
    config::DiskPath,
    disk::StoreFile,
    error::{Error, Result},
    state::Shared,
};

/// The files of a cache, by the number of their path. Weak, because their lock lasts as long as they are open. Without
/// devices, whose nodes may be made anew.
#[derive(Default)]
pub(super) struct Names(Vec<(usize, Weak<File>)>);

impl Names {
    pub(super) fn of(files: &[StoreFile]) -> Self {
        let files = files.iter().enumerate().filter(|(_, file)| !file.device);
        Names(files.map(|(at, file)| (at, Arc::downgrade(&file.file))).collect())
    }

    /// Whether each file still has a name. If not, the disk tier takes no more blocks. Costs a system call for each
    /// file, and no I/O.
    ///
    /// # Errors
    /// [`Error::Unavailable`], with the path.
    pub(super) fn check(&self, shared: &Arc<Shared>) -> Result<()> {
        let checked = self.check_all(&shared.config.disk.paths);
        if let Err(Error::Unavailable { reason, .. }) = &checked {
            shared.refuse_writes(reason.clone());
        }
        checked
    }

    /// As [`check`](Self::check), at the end of the cache.
    pub(super) fn check_all(&self, paths: &[DiskPath]) -> Result<()> {
        let is_deleted = |(_, file): &&(usize, Weak<File>)| {
            let metadata = file.upgrade().and_then(|file| file.metadata().ok());
            metadata.is_some_and(|metadata| metadata.nlink() == 0)
        };
        let Some(&(at, _)) = self.0.iter().find(is_deleted) else { return Ok(()) };
        let reason = format!(
            "found the store file of {} deleted while it is open, expected it to stay until the cache is closed: its \
             blocks are lost then; restart to begin a new store",
            paths[at].path.display()
        );
        Err(Error::unavailable("disk", reason))
    }
}
