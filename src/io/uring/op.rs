//! State and output of an operation in flight.

use std::{fs::File, io, rc::Rc, sync::Arc};

use io_uring::cqueue;
use tokio_uring::OneshotOutputTransform;

use super::{
    Lent,
    runtime::{Ring, Turn},
};

/// Everything that must outlive an operation in the kernel.
pub(super) struct OpState {
    buf: Option<Lent>,
    /// The descriptor must stay open until the kernel has resolved it.
    file: Option<Arc<File>>,
    turn: Option<Turn>,
    ring: Rc<Ring>,
}

impl OpState {
    pub(super) fn new(buf: Option<Lent>, file: Arc<File>, turn: Turn, ring: Rc<Ring>) -> Self {
        OpState { buf, file: Some(file), turn: Some(turn), ring }
    }
}

impl Drop for OpState {
    /// Called when the operation completed (`buf` is taken then), when it completed after its future was dropped, or
    /// when the runtime shuts down while the kernel may still be at work.
    fn drop(&mut self) {
        self.ring.release(self.buf.take(), self.file.take());
        drop(self.turn.take());
    }
}

/// Converts a completion to the result that [`Storage`](crate::io::Storage) specifies.
pub(super) struct OpOutput;

impl OneshotOutputTransform for OpOutput {
    type Output = (io::Result<usize>, Option<Lent>);
    type StoredData = OpState;

    fn transform_oneshot_output(self, mut state: OpState, completion: cqueue::Entry) -> Self::Output {
        let code = completion.result();
        let result = usize::try_from(code).map_err(|_| io::Error::from_raw_os_error(code.saturating_neg()));
        (result, state.buf.take())
    }
}
