//! The waiter for a transfer, and its answer.

use std::{io, sync::Arc};

use tokio::sync::oneshot;

use crate::{checksum::checksum, io::uring::Completed, memory::Lent, metrics::Count};

/// Sends a result, on the reactor.
pub(super) type Answer = Box<dyn FnOnce() + Send>;

/// The result of a transfer: the checksum of the requested number of bytes, if it was requested. The memory is the
/// movement's again.
pub(crate) type Transferred = io::Result<Option<u64>>;

/// What a worker does with a block that it has read, on its own thread; its argument is the block's checksum. True if
/// the block's waiters have it: nobody waits for the reactor to get the answer.
pub(crate) type Deliver = Box<dyn FnOnce(u64) -> bool + Send>;

/// Receiver of a block that is being transferred.
pub struct Waiter {
    /// Bytes to checksum: after a read, before a write. 0: none.
    pub(super) sum_bytes: usize,
    /// The checksum of a block that is being written.
    sum: Option<u64>,
    /// Called before the answer, if the transfer succeeded.
    deliver: Option<Deliver>,
    /// Counts the transfer.
    done: Arc<Count>,
    answer: oneshot::Sender<Transferred>,
}

impl Waiter {
    pub(super) fn new(
        sum_bytes: usize,
        deliver: Option<Deliver>,
        done: Arc<Count>,
    ) -> (Waiter, oneshot::Receiver<Transferred>) {
        let (answer, answered) = oneshot::channel();
        (Waiter { sum_bytes, sum: None, deliver, done, answer }, answered)
    }

    /// Bytes to checksum: after a read, before a write. 0: none.
    #[cfg(feature = "sim")]
    pub fn sum_bytes(&self) -> usize {
        self.sum_bytes
    }

    /// Notes the checksum of a block that is about to be written.
    pub(super) fn with_sum(self, sum: u64) -> Waiter {
        Waiter { sum: Some(sum), ..self }
    }
}

/// The checksum of a block before its write or after its read.
pub(super) fn checksum_of(buf: &Lent, bytes: usize) -> u64 {
    // SAFETY: before a write nothing else writes to the range, and after a read the kernel has filled it: by the
    // contract of `Lent` it stays so until the buffer is dropped.
    checksum(unsafe { std::slice::from_raw_parts(buf.as_ptr().cast_const(), bytes.min(buf.len())) })
}

/// Checksums a block that was read, and delivers it. Returns an answer that sends the result, and whether the block was
/// delivered.
pub(super) fn answer(ended: Completed<Waiter>) -> (Answer, bool) {
    let Completed { buf, result, tag: Waiter { sum_bytes, sum, deliver, done, answer } } = ended;
    let transferred = result.map(|()| sum.or_else(|| (sum_bytes > 0).then(|| checksum_of(&buf, sum_bytes))));
    // The memory may have another block once this one is delivered.
    drop(buf);
    done.add(1);
    let is_delivered = match (deliver, &transferred) {
        (Some(deliver), Ok(Some(sum))) => deliver(*sum),
        _ => false,
    };
    // The movement may be gone.
    (Box::new(move || drop(answer.send(transferred))), is_delivered)
}
