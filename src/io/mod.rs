//! Storage engines behind one trait.
//!
//! The movement code is generic over [`Storage`] and runs unchanged over io_uring ([`uring`]), over a pool of
//! `pread`/`pwrite` threads ([`blocking`]), and over a simulated disk (`sim`, behind the feature of that name).
//! [`AnyStorage`] is one of the first two, chosen at run time.
//!
//! Every engine guarantees:
//! - memory and file descriptors belong to the operation until the kernel is done with them, whatever happens to the
//!   future, the engine or the runtime meanwhile;
//! - an operation reports the bytes it moved, never more than requested; [`read_full`] and [`write_full`] resume short
//!   operations;
//! - an engine with nothing to do uses no CPU.

mod any;
pub mod blocking;
mod full;
mod memlock;
pub mod queue;
pub mod uring;

pub use crate::{
    block::{FIXED_BYTES_MAX, FileId, IO_ALIGN, OpKind},
    memory::{AlignedBuf, IoBuf, Lent},
};
pub use any::AnyStorage;
pub use full::{read_full, write_full};
pub(crate) use full::{read_into, write_from};
pub use uring::yield_now;

use std::{fs::File, future::Future, io, ptr::NonNull, sync::Arc};

/// Largest operation in bytes; longer ones come back short. Linux's own limit (`MAX_RW_COUNT`), a multiple of
/// [`IO_ALIGN`].
const TRANSFER_BYTES_MAX: usize = 0x7fff_f000;

/// Reads and writes that own their memory until the storage is done with it.
///
/// An operation starts when its future is first polled, or later if the engine is at its limit of
/// operations in flight. Dropping the future before that drops the [`Lent`] and nothing happens.
/// Dropping it afterwards abandons the *result*: the operation still runs, and the memory stays
/// alive until it has. Futures are polled on the reactor's thread only, inside its runtime.
pub trait Storage: 'static {
    /// The name shown in metrics and by `kvhoist doctor`.
    fn name(&self) -> &'static str;

    /// Reads at `offset` into `buf`. Resolves to the bytes read, which may be fewer than requested, and are 0 at or
    /// past the end of the file.
    fn read(&self, file: FileId, offset: u64, buf: Lent) -> impl Future<Output = (io::Result<usize>, Lent)>;

    /// Writes `buf` at `offset`. Resolves to the bytes written, which may be fewer than requested.
    fn write(&self, file: FileId, offset: u64, buf: Lent) -> impl Future<Output = (io::Result<usize>, Lent)>;

    /// Flushes to the medium (`fdatasync`) every write that completed before this call started.
    fn sync(&self, file: FileId) -> impl Future<Output = io::Result<()>>;

    /// The file, if rings of other threads may read and write it too.
    fn file(&self, file: FileId) -> Option<Arc<File>> {
        let _ = file;
        None
    }

    /// True if the file lies in memory (tmpfs). The kernel makes each operation on it by blocking a thread: a ring
    /// hands the operation to one more thread, so a worker makes it by a system call instead.
    fn is_in_memory(&self, file: FileId) -> bool {
        let _ = file;
        false
    }

    /// Registers memory with the kernel, which makes operations on it cheaper. Returns the value of [`Lent::fixed`] for
    /// its first [`FIXED_BYTES_MAX`] bytes; each further part has the next number. `None` if this engine has no
    /// registration, or if it failed, which is logged. Blocks while the memory is pinned, some 30 ms per GiB.
    ///
    /// # Safety
    /// The range must stay mapped, and to the same memory, until [`unregister`](Self::unregister) or the end of the
    /// engine.
    unsafe fn register(&self, start: NonNull<u8>, len: usize) -> Option<u16> {
        let _ = (start, len);
        None
    }

    /// Ends the registration for which [`register`](Self::register) returned `first`. Operations in flight are
    /// unaffected.
    fn unregister(&self, first: u16, len: usize) {
        let _ = (first, len);
    }

    /// Whether the kernel has what is registered. A kernel that refuses a change leaves nothing registered, until a
    /// later change.
    fn registered(&self) -> bool {
        false
    }
}

/// True for a temporary shortage of a resource: the same operation may succeed later.
pub(crate) fn is_shortage(error: &io::Error) -> bool {
    const SHORTAGES: [i32; 4] = [libc::ENOMEM, libc::ENOBUFS, libc::EAGAIN, libc::EINTR];
    error.raw_os_error().is_some_and(|errno| SHORTAGES.contains(&errno))
}

/// The file with this id.
///
/// # Errors
/// Names the id and the number of files.
fn file_at(files: &[Arc<File>], file: FileId) -> io::Result<&Arc<File>> {
    files.get(usize::from(file.0)).ok_or_else(|| no_such_file(file, files.len()))
}

fn no_such_file(file: FileId, files: usize) -> io::Error {
    let text =
        format!("found an operation on file {}, expected one of the {files} files of the storage engine", file.0);
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

/// Refuses offsets with a special meaning: `u64::MAX` is the current file position to a ring.
fn check_offset(offset: u64, len: usize) -> io::Result<()> {
    match offset.checked_add(len as u64) {
        Some(end) if i64::try_from(end).is_ok() => Ok(()),
        _ => {
            let text = format!("{len} bytes at offset {offset} reach past the largest offset of a file, {}", i64::MAX);
            Err(io::Error::new(io::ErrorKind::InvalidInput, text))
        }
    }
}
