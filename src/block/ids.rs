//! Names that the storage engines share with the layers above: files, kinds of operation, alignment.

/// Every offset and length of direct I/O is a multiple of this, and every address of our own memory. A caller's memory
/// may lie as the drive allows ([`Stats::memory_align_bytes`](crate::Stats::memory_align_bytes)).
pub const IO_ALIGN: usize = 4096;

/// The most bytes that the kernel registers as one buffer of a ring.
pub const FIXED_BYTES_MAX: usize = 1 << 30;

/// Which of the store's files an operation is for: its place in the list the engine was built with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId(pub u16);

/// What an operation does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum OpKind {
    /// From storage to memory.
    Read,
    /// From memory to storage.
    Write,
    /// From the device's caches to the medium.
    Sync,
}

impl OpKind {
    /// The name used in errors, logs and metrics.
    pub fn name(self) -> &'static str {
        ["read", "write", "sync"][self as usize]
    }
}
