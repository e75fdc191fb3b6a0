//! A copy of a file that another process holds in memory, and fills from front to back.

use std::{fmt, fs::File, io, sync::atomic::AtomicBool};

use rustix::fs::{StatVfsMountFlags, fstatfs, fstatvfs};

use crate::{Error, Result, SourceFile};

/// Their file systems are memory: a store through a mapping does not pass the system, which so does not stamp it.
const IN_MEMORY: [u32; 3] = [libc::TMPFS_MAGIC as u32, libc::HUGETLBFS_MAGIC as u32, 0x8584_58f6];

/// How far a copy is filled.
pub trait Arrival: Send + Sync {
    /// Waits until the copy has the file's first `end` bytes. False if it never will, or the reader has `given_up`
    /// meanwhile: the file itself is read then.
    fn wait(&self, end: u64, given_up: &AtomicBool) -> bool;
}

/// The memory of a copy, and who says how far it is filled.
pub(crate) struct Held {
    pub(crate) memory: File,
    pub(crate) arrival: Box<dyn Arrival>,
}

impl fmt::Debug for Held {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Held").field("memory", &self.memory).finish_non_exhaustive()
    }
}

/// What a file is known by, until its next change: two that are equal are one file with the same bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileIdentity {
    /// The device that it is on, or that it is.
    pub device: u64,
    /// Its number there.
    pub inode: u64,
    /// Its length in bytes.
    pub size: u64,
    /// Its last change, in seconds since 1970.
    pub changed_s: i64,
    /// And nanoseconds.
    pub changed_ns: i64,
}

impl SourceFile {
    /// Refuses a file whose changes are not all stamped: nobody would see that a copy is an old one.
    ///
    /// # Errors
    /// [`Error::Io`] for a file on tmpfs, hugetlbfs or ramfs, and a block device.
    pub fn check_stamped(&self) -> Result<()> {
        let (file, fail) = (self.cached(), |error| Error::io("hold", self.path(), error));
        let is_file = file.metadata().map_err(fail)?.is_file();
        let kind = fstatfs(file).map_err(|error| fail(error.into()))?.f_type as u32;
        if is_file && !IN_MEMORY.contains(&kind) {
            return Ok(());
        }
        let text =
            "found a block device or a file in memory, expected one whose every change has a time; read it itself";
        Err(fail(io::Error::new(io::ErrorKind::Unsupported, text)))
    }

    /// Writes what the page cache alone has to the drive, so that any later change, also a store through a mapping,
    /// gives the file another [`identity`](Self::identity): a store into a page that was dirty before does not.
    ///
    /// # Errors
    /// [`Error::Io`], also as [`check_stamped`](Self::check_stamped).
    pub fn sync(&self) -> Result<()> {
        self.check_stamped()?;
        let file = self.cached();
        let is_read_only = || fstatvfs(file).is_ok_and(|found| found.f_flag.contains(StatVfsMountFlags::RDONLY));
        match file.sync_data() {
            // A file system that nobody writes to lacks the call.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) && is_read_only() => Ok(()),
            synced => synced.map_err(|error| Error::io("sync", self.path(), error)),
        }
    }
}
