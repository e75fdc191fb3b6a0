//! A whole read, write or flush, and who owns its memory meanwhile.
//!
//! Whoever makes the transfer owns an [`InFlight`]: the memory as a [`Lent`], which keeps it mapped, and the file,
//! which keeps the descriptor open. It is dropped when the kernel is done with both, never before. Rings, system calls
//! and the simulation take the same value.

use std::{fs::File, io, os::fd::AsRawFd, sync::Arc};

use super::resume::Parts;
use crate::{
    block::{FileId, OpKind},
    memory::Lent,
};

/// Largest operation in bytes; longer ones come back short. Linux's own limit (`MAX_RW_COUNT`), a multiple of
/// [`IO_ALIGN`](crate::block::IO_ALIGN).
pub(super) const TRANSFER_BYTES_MAX: usize = 0x7fff_f000;

/// A file of the storage, for the I/O threads.
#[derive(Clone)]
pub struct OpenFile {
    /// The file.
    pub file: Arc<File>,
    /// Its id in errors.
    pub id: FileId,
    /// Transfers are system calls of the I/O threads: there is no ring, or the file lies in memory (tmpfs), where a
    /// ring would hand each operation to one more thread, of the kernel.
    pub by_calls: bool,
}

/// A whole read, write or flush.
pub struct Transfer {
    /// Which of them.
    pub kind: OpKind,
    /// The file.
    pub file: OpenFile,
    /// Offset in the file.
    pub offset: u64,
    /// The memory; none for a flush.
    pub buf: Lent,
}

/// A completed transfer.
pub struct Completed<T> {
    /// The memory.
    pub buf: Lent,
    /// Whether all of it was moved.
    pub result: io::Result<()>,
    /// The owner of the transfer.
    pub tag: T,
}

/// A transfer in flight. The memory is declared before `tag`, and so dropped first: dropping the tag reports that the
/// memory is free.
pub(super) struct InFlight<T> {
    pub(super) parts: Parts,
    pub(super) file: Arc<File>,
    tag: T,
}

impl<T> InFlight<T> {
    /// A transfer of which nothing is done yet.
    pub(super) fn new(transfer: Transfer, tag: T) -> Self {
        let Transfer { kind, file: OpenFile { file, id, .. }, offset, buf } = transfer;
        InFlight { parts: Parts::new(kind, id, offset, buf), file, tag }
    }

    pub(super) fn complete(self, result: io::Result<()>) -> Completed<T> {
        Completed { buf: self.parts.into_buf(), result, tag: self.tag }
    }

    /// Makes the transfer by system calls.
    pub(super) fn make(mut self) -> Completed<T> {
        if let Err(error) = self.parts.check_offset() {
            return self.complete(Err(error));
        }
        loop {
            let moved = call(&self.parts, &self.file);
            if let Some(result) = self.parts.account(moved) {
                return self.complete(result);
            }
        }
    }
}

/// Makes the next operation of a transfer by a system call.
fn call(parts: &Parts, file: &File) -> io::Result<usize> {
    let (fd, buf) = (file.as_raw_fd(), parts.rest());
    let (ptr, len) = (buf.as_ptr().cast::<libc::c_void>(), buf.len().min(TRANSFER_BYTES_MAX));
    let offset = libc::off_t::try_from(parts.offset()).expect("checked by `make`");
    let result = match parts.kind() {
        // SAFETY: the descriptor is open while `file` lives; by the contract of `Lent`, `len` bytes at `ptr` are mapped
        // and ours alone to write.
        OpKind::Read => unsafe { libc::pread(fd, ptr, len, offset) },
        // SAFETY: the descriptor is open while `file` lives; by the contract of `Lent`, `len` bytes at `ptr` are mapped
        // and nothing else writes to them.
        OpKind::Write => unsafe { libc::pwrite(fd, ptr, len, offset) },
        // SAFETY: the descriptor is open while `file` lives.
        OpKind::Sync => unsafe { libc::fdatasync(fd) as isize },
    };
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}
