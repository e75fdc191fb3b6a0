//! Runs a future on a plain thread.

/// Runs a future of this crate to completion on the current thread, which sleeps while it waits.
///
/// For callers without an async runtime. The cache's futures need none: its own reactor moves the blocks.
///
/// ```
/// assert_eq!(kvhoist::block_on(async { 2 + 2 }), 4);
/// ```
pub fn block_on<F: Future>(future: F) -> F::Output {
    pollster::block_on(future)
}
