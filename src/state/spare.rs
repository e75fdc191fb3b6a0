//! A channel for the next waiter of this thread, made while no lock is held: a look-up that finds a block elsewhere
//! takes it under the lock that all callers share, where an allocation would hold all of them up.

use std::cell::Cell;

use tokio::sync::oneshot;

use super::Outcome;

type Channel = (oneshot::Sender<Outcome>, oneshot::Receiver<Outcome>);

std::thread_local! {
    static SPARE: Cell<Option<Channel>> = const { Cell::new(None) };
}

/// The channel that was made before, or a new one.
pub(super) fn take() -> Channel {
    // None while the thread ends.
    SPARE.try_with(Cell::take).ok().flatten().unwrap_or_else(oneshot::channel)
}

/// Makes the next one. Not under a lock.
pub(super) fn make() {
    _ = SPARE.try_with(|spare| {
        let next = spare.take().unwrap_or_else(oneshot::channel);
        spare.set(Some(next));
    });
}
