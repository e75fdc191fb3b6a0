//! The waiter for a transfer, and its answer.

use std::io;

use tokio::sync::oneshot;

use super::transfer::{Completed, Transfer};
use crate::{checksum::checksum, memory::Lent, shield::caught};

/// Sends a result, on the reactor.
pub(super) type Answer = Box<dyn FnOnce() + Send>;

/// The end of a transfer, whose memory has been dropped: the checksum of the requested number of bytes, if it was
/// requested.
pub(crate) type Transferred = io::Result<Option<u64>>;

/// The end of a transfer with its checksum; `None` where it was lost with its thread. The kernel is done with its
/// memory.
pub(crate) type Summed = Option<io::Result<u64>>;

/// Receiver of a block that is being transferred.
pub struct Waiter {
    /// Bytes to checksum: after a read, before a write. 0: none.
    pub(super) sum_bytes: usize,
    /// The checksum of a block that is being written.
    sum: Option<u64>,
    end: End,
}

/// Where the end of a transfer is told.
enum End {
    /// On the reactor.
    Reactor(oneshot::Sender<Transferred>),
    /// On the thread that has made it.
    Here(Called),
}

/// What is told of a transfer on the thread that makes it.
pub(crate) trait TransferHandler: Send {
    /// The block, which is about to be written, has this checksum.
    fn summed(&mut self, _sum: u64) {}

    /// The transfer has ended.
    fn ended(self: Box<Self>, result: Summed);
}

impl<F: FnOnce(Summed) + Send> TransferHandler for F {
    fn ended(self: Box<Self>, result: Summed) {
        self(result);
    }
}

/// Told of the end once, when it is dropped at the latest.
struct Called(Option<Box<dyn TransferHandler>>);

impl Called {
    fn call(&mut self, result: Summed) {
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
    pub(super) fn new(sum_bytes: usize) -> (Waiter, oneshot::Receiver<Transferred>) {
        let (answer, answered) = oneshot::channel();
        (Waiter { sum_bytes, sum: None, end: End::Reactor(answer) }, answered)
    }

    /// Calls `handler` on the thread that makes the transfer, or that has lost it.
    pub(crate) fn calling(sum_bytes: usize, handler: impl TransferHandler + 'static) -> Waiter {
        Waiter { sum_bytes, sum: None, end: End::Here(Called(Some(Box::new(handler)))) }
    }

    /// Whether its end is told on the thread that has made the transfer.
    pub(super) fn is_called(&self) -> bool {
        matches!(self.end, End::Here(_))
    }

    /// Bytes to checksum: after a read, before a write. 0: none.
    #[cfg(feature = "sim")]
    pub fn sum_bytes(&self) -> usize {
        self.sum_bytes
    }

    /// Notes the checksum of a block that is about to be written. A panic of the handler loses its thread's transfers.
    fn with_sum(mut self, sum: u64) -> Waiter {
        self.sum = Some(sum);
        if let End::Here(Called(Some(handler))) = &mut self.end {
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

/// Checksums a block that was read, and tells its waiter: by an answer, where it waits on the reactor.
pub(super) fn answer(ended: Completed<Waiter>) -> Option<Answer> {
    let Completed { buf, result, tag: Waiter { sum_bytes, sum, end } } = ended;
    let result = result.map(|()| sum.or_else(|| (sum_bytes > 0).then(|| checksum_of(&buf, sum_bytes))));
    // On this thread, and caught: the memory of a movement that is gone may be the last owner of something that panics.
    _ = caught(move || drop(buf));
    match end {
        // The movement may be gone.
        End::Reactor(answer) => Some(Box::new(move || drop(answer.send(result)))),
        End::Here(mut end) => {
            end.call(result.transpose());
            None
        }
    }
}
