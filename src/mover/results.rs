//! The results of work and of tasks that may have panicked.

use std::{future::Future, panic::AssertUnwindSafe};

use futures_util::FutureExt;
use tokio::task::JoinError;

use crate::{
    error::{Error, Result},
    state::verify::panicked,
};

/// The result of `work`, or the error of a panic: it calls subscribers of the log, which are users' code. Without an
/// answer its caller would take the cache for closed.
pub(super) async fn or_panicked<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let ended = AssertUnwindSafe(work).catch_unwind().await;
    ended.unwrap_or_else(|payload| {
        // The drop of what a user's code has thrown may panic.
        std::mem::forget(payload);
        Err(panicked())
    })
}

/// The result of a task that may have panicked, or ended with the reactor.
pub(super) fn of_task<T>(ended: std::result::Result<Result<T>, JoinError>) -> Result<T> {
    ended.unwrap_or_else(|lost| match lost.try_into_panic() {
        Ok(payload) => {
            std::mem::forget(payload);
            Err(panicked())
        }
        Err(_) => Err(Error::Closed),
    })
}
