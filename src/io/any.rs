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

/// Calls a method of the engine.
macro_rules! each {
    ($storage:expr, $engine:ident => $call:expr) => {
        match $storage {
            AnyStorage::Uring($engine) => $call,
            AnyStorage::Blocking($engine) => $call,
        }
    };
}

impl Storage for AnyStorage {
    fn name(&self) -> &'static str {
        each!(self, engine => engine.name())
    }

    async fn read(&self, file: FileId, offset: u64, buf: Lent) -> (io::Result<usize>, Lent) {
        each!(self, engine => engine.read(file, offset, buf).await)
    }

    async fn write(&self, file: FileId, offset: u64, buf: Lent) -> (io::Result<usize>, Lent) {
        each!(self, engine => engine.write(file, offset, buf).await)
    }

    fn file(&self, file: FileId) -> Option<Arc<File>> {
        each!(self, engine => engine.file(file))
    }

    fn is_in_memory(&self, file: FileId) -> bool {
        each!(self, engine => engine.is_in_memory(file))
    }

    async fn sync(&self, file: FileId) -> io::Result<()> {
        each!(self, engine => engine.sync(file).await)
    }

    unsafe fn register(&self, start: NonNull<u8>, len: usize) -> Option<u16> {
        // SAFETY: the caller upholds the same contract.
        each!(self, engine => unsafe { engine.register(start, len) })
    }

    fn unregister(&self, first: u16, len: usize) {
        each!(self, engine => engine.unregister(first, len));
    }

    fn registered(&self) -> bool {
        each!(self, engine => engine.registered())
    }
}
