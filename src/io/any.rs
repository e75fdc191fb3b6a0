//! The storage engine chosen at run time.

use std::{fs::File, io, ptr::NonNull, sync::Arc};

use super::{Storage, blocking::Blocking, uring::Uring};
use crate::{block::FileId, memory::Lent};

/// The engines used in production, chosen when a cache is opened.
pub enum AnyStorage {
    /// io_uring.
    Uring(Uring),
    /// The thread pool.
    Blocking(Blocking),
}

impl AnyStorage {
    /// True if the engine's memory is registered with a ring.
    pub fn registered(&self) -> bool {
        match self {
            AnyStorage::Uring(engine) => engine.registered(),
            AnyStorage::Blocking(_) => false,
        }
    }
}

impl Storage for AnyStorage {
    fn name(&self) -> &'static str {
        match self {
            AnyStorage::Uring(engine) => engine.name(),
            AnyStorage::Blocking(engine) => engine.name(),
        }
    }

    async fn read(&self, file: FileId, offset: u64, buf: Lent) -> (io::Result<usize>, Lent) {
        match self {
            AnyStorage::Uring(engine) => engine.read(file, offset, buf).await,
            AnyStorage::Blocking(engine) => engine.read(file, offset, buf).await,
        }
    }

    async fn write(&self, file: FileId, offset: u64, buf: Lent) -> (io::Result<usize>, Lent) {
        match self {
            AnyStorage::Uring(engine) => engine.write(file, offset, buf).await,
            AnyStorage::Blocking(engine) => engine.write(file, offset, buf).await,
        }
    }

    fn file(&self, file: FileId) -> Option<Arc<File>> {
        match self {
            AnyStorage::Uring(engine) => engine.file(file),
            AnyStorage::Blocking(engine) => engine.file(file),
        }
    }

    fn is_in_memory(&self, file: FileId) -> bool {
        match self {
            AnyStorage::Uring(engine) => engine.is_in_memory(file),
            AnyStorage::Blocking(engine) => engine.is_in_memory(file),
        }
    }

    async fn sync(&self, file: FileId) -> io::Result<()> {
        match self {
            AnyStorage::Uring(engine) => engine.sync(file).await,
            AnyStorage::Blocking(engine) => engine.sync(file).await,
        }
    }

    unsafe fn register(&self, start: NonNull<u8>, len: usize) -> Option<u16> {
        match self {
            // SAFETY: the caller upholds the same contract.
            AnyStorage::Uring(engine) => unsafe { engine.register(start, len) },
            AnyStorage::Blocking(_) => None,
        }
    }

    fn unregister(&self, first: u16, len: usize) {
        if let AnyStorage::Uring(engine) = self {
            engine.unregister(first, len);
        }
    }
}
