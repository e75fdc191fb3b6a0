//! Names shared by the storage engines and the layers above: files, kinds of operation, alignment.

/// Alignment of every offset and length of direct I/O, and of this crate's own memory. A caller's memory needs only the
/// drive's alignment (`Stats::memory_align_bytes`).
pub const IO_ALIGN: usize = 4096;

/// Largest registered buffer of a ring, in bytes.
pub const FIXED_BYTES_MAX: usize = 1 << 30;

/// Index of a file in the list that the storage engine was opened with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId(pub u16);

/// The kind of an I/O operation.
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
