//! A block that was read, until one of its waiters takes it to verify it.

use std::sync::Arc;

use crate::sync::Mutex;

/// A block that waits to be verified. A waiter claims it without the state's lock, and then owns it alone.
pub(crate) struct Unclaimed<U>(Mutex<Option<U>>);

impl<U> Unclaimed<U> {
    pub(crate) fn new(block: U) -> Arc<Self> {
        Arc::new(Unclaimed(Mutex::new(Some(block))))
    }

    /// The block, for the first claim.
    pub(crate) fn claim(&self) -> Option<U> {
        self.0.lock().take()
    }

    pub(super) fn is_claimed(&self) -> bool {
        self.0.lock().is_none()
    }
}
