//! Yielding to the other tasks of a runtime with a ring.

use std::cell::Cell;

use io_uring::{cqueue, opcode};
use tokio_uring::{OneshotOutputTransform, UnsubmittedOneshot};

thread_local! {
    static HAS_RING: Cell<bool> = const { Cell::new(false) };
}

/// Says that this thread is in a runtime with a ring, until it is dropped.
pub struct OnRing(bool);

impl OnRing {
    /// From now on.
    pub fn enter() -> Self {
        OnRing(HAS_RING.replace(true))
    }
}

impl Drop for OnRing {
    fn drop(&mut self) {
        HAS_RING.set(self.0);
    }
}

/// Lets other tasks run and queued operations reach the kernel.
///
/// Long work on the reactor calls this instead of `tokio::task::yield_now` (to which it falls back without a ring).
/// Costs an empty operation on the ring.
pub async fn yield_now() {
    if HAS_RING.get() {
        UnsubmittedOneshot::new((), Nothing, opcode::Nop::new().build()).submit().await;
    } else {
        tokio::task::yield_now().await;
    }
}

/// The result of an empty operation.
struct Nothing;

impl OneshotOutputTransform for Nothing {
    type Output = ();
    type StoredData = ();

    fn transform_oneshot_output(self, (): (), _: cqueue::Entry) {}
}
