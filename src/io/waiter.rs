//! The waiter for a transfer, which is told of the end on the thread that has made it.

use std::io;

use tokio::sync::oneshot;

use super::transfer::{Completed, Transfer};
use crate::{checksum::checksum, memory::Lent, shield::caught};

/// The end of a transfer, whose memory has been dropped: the checksum of the requested number of bytes, if it was
/// requested.
pub(crate) type Transferred = io::Result<Option<u64>>;

/// Who waits for a transfer.
pub struct Waiter {
    /// Bytes to checksum: after a read, before a write. 0: none.
    pub(super) sum_bytes: usize,
    /// The checksum of a block that is being written.
    sum: Option<u64>,
    handler: Called,
}

/// What is told of a transfer on the thread that makes it.
pub(crate) trait TransferHandler: Send {
    /// The block, which is about to be written, has this checksum.
    fn summed(&mut self, _sum: u64) {}

    /// The transfer has ended; `None`: it was lost with its thread. The kernel is done with its memory.
    fn ended(self: Box<Self>, result: Option<Transferred>);
}

impl<F: FnOnce(Option<Transferred>) + Send> TransferHandler for F {
    fn ended(self: Box<Self>, result: Option<Transferred>) {
        self(result);
    }
}

/// Told of the end once, when it is dropped at the latest.
struct Called(Option<Box<dyn TransferHandler>>);

impl Called {
    fn call(&mut self, result: Option<Transferred>) {
        if let Some(handler) = self.0.take() {
            // A panic is of this block alone.
            _ = caught(|| handler.ended(result));
        }
    }
}

impl Drop for Called {
    fn drop(&mut self) {
        self.call(None);
    }
}

impl Waiter {
    /// Sends the end; nothing, if the transfer is lost.
    pub(super) fn new(sum_bytes: usize) -> (Waiter, oneshot::Receiver<Transferred>) {
        let (sender, receiver) = oneshot::channel();
        // The movement may be gone.
        let send = |result: Option<Transferred>| drop(result.map(|transferred| sender.send(transferred)));
        (Waiter::calling(sum_bytes, send), receiver)
    }

    /// Calls `handler` on the thread that makes the transfer, or that has lost it.
    pub(crate) fn calling(sum_bytes: usize, handler: impl TransferHandler + 'static) -> Waiter {
        Waiter { sum_bytes, sum: None, handler: Called(Some(Box::new(handler))) }
    }

    /// Bytes to checksum: after a read, before a write. 0: none.
    #[cfg(feature = "sim")]
    pub fn sum_bytes(&self) -> usize {
        self.sum_bytes
    }

    /// Notes the checksum of a block that is about to be written. A panic of the handler loses its thread's transfers.
    fn with_sum(mut self, sum: u64) -> Waiter {
        self.sum = Some(sum);
        if let Some(handler) = &mut self.handler.0 {
            handler.summed(sum);
        }
        self
    }
}

/// Checksums a block before its write. Memory that was taken away is not written: its write is refused, as the kernel
/// refuses that of memory which is not mapped.
pub(super) fn sum(transfer: Transfer, waiter: Waiter) -> Result<(Transfer, Waiter), Completed<Waiter>> {
    let buf = &transfer.buf;
    let sum = (!buf.is_spoiled()).then(|| checksum_of(buf, waiter.sum_bytes));
    match sum.filter(|_| !buf.is_spoiled()) {
        Some(sum) => Ok((transfer, waiter.with_sum(sum))),
        None => {
            let refused = Err(io::Error::from_raw_os_error(libc::EFAULT));
            Err(Completed { buf: transfer.buf, result: refused, tag: waiter })
        }
    }
}

/// The checksum of a block before its write or after its read.
pub(super) fn checksum_of(buf: &Lent, bytes: usize) -> u64 {
    // SAFETY: before a write nothing else writes to the range, and after a read the kernel has filled it: by the
    // contract of `Lent` it stays so until the buffer is dropped.
    checksum(unsafe { std::slice::from_raw_parts(buf.as_ptr().cast_const(), bytes.min(buf.len())) })
}

/// Checksums a block that was read, and tells its waiter.
pub(super) fn end(ended: Completed<Waiter>) {
    let Completed { buf, result, tag: Waiter { sum_bytes, sum, mut handler } } = ended;
    let result = result.map(|()| sum.or_else(|| (sum_bytes > 0).then(|| checksum_of(&buf, sum_bytes))));
    // Caught: the memory of a movement that is gone may be the last owner of something that panics.
    _ = caught(move || drop(buf));
    handler.call(Some(result));
}
