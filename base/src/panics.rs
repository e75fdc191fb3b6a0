//! Panics of users' code.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs a user's code, such as a waker or a subscriber of the log. `None` if it panics.
#[inline]
pub fn caught<T>(run: impl FnOnce() -> T) -> Option<T> {
    // The panic's payload is the user's too, and dropping it may panic.
    catch_unwind(AssertUnwindSafe(run)).map_err(std::mem::forget).ok()
}

/// Writes to the log. Its subscribers are users' code, and may write to a pipe that nobody reads: a panic there costs
/// the event, and no more.
pub fn log(event: impl FnOnce()) {
    _ = caught(event);
}
