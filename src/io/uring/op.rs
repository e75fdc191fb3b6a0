//! What an operation in flight holds, and what becomes of it.

use std::{fs::File, io, rc::Rc, sync::Arc};

use io_uring::cqueue;
use tokio::sync::OwnedSemaphorePermit;
use tokio_uring::OneshotOutputTransform;

use super::{Lent, runtime::Ring};

/// Everything that must outlive an operation in the kernel.
pub(super) struct Held {
    buf: Option<Lent>,
    /// Until the kernel has looked the descriptor up its number must not be reused.
    file: Option<Arc<File>>,
    permit: Option<OwnedSemaphorePermit>,
    ring: Rc<Ring>,
}

impl Held {
    pub(super) fn new(buf: Option<Lent>, file: Arc<File>, permit: OwnedSemaphorePermit, ring: Rc<Ring>) -> Self {
        Held { buf, file: Some(file), permit: Some(permit), ring }
    }
}

impl Drop for Held {
    /// Three ways lead here: the operation completed (then `buf` was taken), its future was dropped
    /// and now it completed, or the runtime shuts down and the kernel may still be at work.
    fn drop(&mut self) {
        self.ring.release(self.buf.take(), self.file.take());
        drop(self.permit.take());
    }
}

/// Turns a completion into what the storage seam promises.
pub(super) struct Finish;

impl OneshotOutputTransform for Finish {
    type Output = (io::Result<usize>, Option<Lent>);
    type StoredData = Held;

    fn transform_oneshot_output(self, mut held: Held, completion: cqueue::Entry) -> Self::Output {
        let code = completion.result();
        let result = usize::try_from(code).map_err(|_| io::Error::from_raw_os_error(code.saturating_neg()));
        (result, held.buf.take())
    }
}

/// An operation that does nothing, and holds nothing.
pub(super) struct Nothing;

impl OneshotOutputTransform for Nothing {
    type Output = ();
    type StoredData = ();

    fn transform_oneshot_output(self, (): (), _: cqueue::Entry) {}
}
