//! Runs a future on a plain thread.

use std::{
    future::Future,
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    thread::{self, Thread},
};

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a future of this crate to completion on the current thread, which sleeps while it waits.
///
/// For callers without an async runtime. The cache's futures need none: its own reactor moves the blocks.
///
/// ```
/// assert_eq!(kvhoist::block_on(async { 2 + 2 }), 4);
/// ```
pub fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            // A wake-up between the poll and here makes `park` return immediately.
            Poll::Pending => thread::park(),
        }
    }
}
