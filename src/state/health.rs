//! Whether the disk and the device tier may be used, and when they may not be any longer.
//!
//! A disk that fails is not asked for ever: after a run of failures without a success between them its tier is taken
//! out of service, with a reason, until the cache is opened again. Failing writes end the writing only: what is
//! on such a disk can be read as long as it can be read.

use std::{cell::Cell, io};

use crate::{block::OpKind, error::Error, io::is_shortage};

/// What the disk tier is good for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum DiskService {
    /// Reads and writes.
    #[default]
    Full,
    /// Reads, for the reason given.
    ReadOnly(String),
    /// Nothing, for the reason given.
    Retired(String),
}

impl DiskService {
    pub(crate) fn reads(&self) -> bool {
        !matches!(self, DiskService::Retired(_))
    }

    pub(crate) fn writes(&self) -> bool {
        *self == DiskService::Full
    }

    /// Why it does not do all that it should.
    pub(crate) fn reason(&self) -> Option<&str> {
        match self {
            DiskService::Full => None,
            DiskService::ReadOnly(reason) | DiskService::Retired(reason) => Some(reason),
        }
    }

    /// An error for those who wanted to write.
    pub(crate) fn check_writes(&self) -> Result<(), Error> {
        match self.reason() {
            None => Ok(()),
            Some(reason) => Err(Error::Unavailable { tier: "disk", reason: reason.to_owned() }),
        }
    }
}

/// Whether libcufile moves blocks, and why it does or does not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CufileService {
    pub(crate) reads: bool,
    pub(crate) writes: bool,
    /// The evidence, or the reason.
    pub(crate) told: String,
}

impl Default for CufileService {
    fn default() -> Self {
        CufileService { reads: false, writes: false, told: "there is no CUDA device".into() }
    }
}

/// Failures in a row of one file, by kind of operation.
#[derive(Default)]
pub(crate) struct Failures([Cell<u32>; 3]);

impl Failures {
    /// Counts the end of an operation; the number of failures in a row when it was one.
    pub(super) fn count<T>(&self, kind: OpKind, result: &io::Result<T>) -> Option<u32> {
        let count = &self.0[kind as usize];
        match result {
            Ok(_) => {
                count.set(0);
                None
            }
            Err(error) if !blames_disk(error) => None,
            Err(_) => {
                count.set(count.get().saturating_add(1));
                Some(count.get())
            }
        }
    }
}

/// False where an operation failed for lack of space or of the machine's resources, or because of the memory that it
/// was given: that says nothing of the disk, nor of the block.
pub(crate) fn blames_disk(error: &io::Error) -> bool {
    let elsewhere = [libc::ENOSPC, libc::EDQUOT, libc::EFAULT];
    !is_shortage(error) && error.raw_os_error().is_none_or(|errno| !elsewhere.contains(&errno))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_failures_in_a_row_count() {
        let failures = Failures::default();
        let eio = || Err::<(), _>(io::Error::from_raw_os_error(libc::EIO));
        assert_eq!(failures.count(OpKind::Read, &eio()), Some(1));
        assert_eq!(failures.count(OpKind::Read, &eio()), Some(2));
        assert_eq!(failures.count(OpKind::Write, &eio()), Some(1), "each kind for itself");
        assert_eq!(failures.count(OpKind::Read, &Err::<(), _>(io::Error::from_raw_os_error(libc::ENOSPC))), None);
        assert_eq!(failures.count(OpKind::Read, &eio()), Some(3), "a shortage says nothing of the disk");
        assert_eq!(failures.count(OpKind::Read, &Ok(())), None);
        assert_eq!(failures.count(OpKind::Read, &eio()), Some(1));
    }
}
