//! A copy of a file that another process holds in memory, and fills from front to back.

use std::{fmt, fs::File, sync::atomic::AtomicBool};

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
    /// The device that it is on.
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
