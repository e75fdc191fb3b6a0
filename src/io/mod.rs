//! Disk I/O: what the reactor awaits on its ring, and the I/O threads.
//!
//! The movement code is generic over [`Storage`], which is [`Files`] in production and a simulated disk in the
//! simulation. Threads move blocks beside the reactor ([`workers`]), each with a ring ([`ring`]) or by system calls.
//!
//! Everywhere:
//! - memory and file descriptors belong to the operation until the kernel is done with them, whatever happens to the
//!   future, the storage or the runtime meanwhile;
//! - a transfer is whole or an error: [`resume`] continues short operations;
//! - what has nothing to do uses no CPU.

pub(crate) mod driver;
mod files;
mod memlock;
#[cfg(test)]
pub(crate) mod model;
pub(crate) mod pool;
mod resume;
mod ring;
pub(crate) mod transfer;
pub mod uring;
pub(crate) mod waiter;
mod workers;

pub use self::{files::Files, resume::in_parts, transfer::OpenFile};
pub(crate) use self::{
    pool::{Pool, Pushed},
    transfer::Transfer,
    waiter::{TransferHandler, Transferred, Waiter},
    workers::{ThreadPlan, Workers},
};
pub use crate::{
    block::{FIXED_BYTES_MAX, FileId, IO_ALIGN, OpKind},
    memory::{AlignedBuf, IoBuf, Lent},
};
pub use kvhoist_base::runtime::yield_now;

use std::{future::Future, io, ptr::NonNull};

/// Reads and writes that own their memory until the storage is done with it.
///
/// An operation starts when its future is first polled, or later if the storage is at its limit of operations in
/// flight. Dropping the future before that drops the [`Lent`] and nothing happens. Dropping it afterwards abandons the
/// *result*: the operation still runs, and the memory stays alive until it has. When the future resolves, the `Lent`
/// has been dropped. Futures are polled on the reactor's thread only, inside its runtime.
pub trait Storage: 'static {
    /// The name shown in metrics and by `kvhoist doctor`.
    fn name(&self) -> &'static str;

    /// Reads at `offset` until `buf` is full; writes all of it there; or flushes to the medium (`fdatasync`), with an
    /// empty `buf`, every write that completed before this call started.
    ///
    /// # Errors
    /// As [`in_parts`].
    fn transfer(&self, kind: OpKind, file: FileId, offset: u64, buf: Lent) -> impl Future<Output = io::Result<()>>;

    /// The file, if I/O threads may read and write it too.
    fn file(&self, file: FileId) -> Option<OpenFile> {
        let _ = file;
        None
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

/// [Transfers](Storage::transfer) memory, and returns its owner.
pub async fn transfer_owned<S: Storage, O: Send + Sync + 'static>(
    storage: &S,
    kind: OpKind,
    file: FileId,
    offset: u64,
    buf: IoBuf<O>,
) -> (io::Result<()>, O) {
    // SAFETY: the only `Lent` of the memory; it is dropped when the result is known.
    let result = storage.transfer(kind, file, offset, unsafe { buf.lend() }).await;
    (result, buf.into_owner())
}

/// True for a temporary shortage of a resource: the same operation may succeed later.
pub(crate) fn is_shortage(error: &io::Error) -> bool {
    const SHORTAGES: [i32; 4] = [libc::ENOMEM, libc::ENOBUFS, libc::EAGAIN, libc::EINTR];
    error.raw_os_error().is_some_and(|errno| SHORTAGES.contains(&errno))
}
