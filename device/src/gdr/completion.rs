//! The polling task: it polls for completions for a while, then arms the channel and sleeps.

use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd, RawFd},
    pin::pin,
    rc::Rc,
    time::{Duration, Instant},
};

use futures_util::future::{Either, select};
use tokio::io::{Interest, unix::AsyncFd};

use kvhoist_base::panics::log;

use super::Inner;
use crate::cuda::Polling;

/// How long the task polls before it sleeps: about the time that waking the reactor takes.
const SPIN: Duration = Duration::from_micros(30);

/// Longest sleep without an event, so that a lost event cannot stop the engine.
const TICK: Duration = Duration::from_millis(500);

/// The completion channel, registered with the runtime.
pub(super) struct Channel(AsyncFd<OwnedFd>);

impl Channel {
    /// Must be called inside a runtime with I/O. The descriptor must be open; a duplicate of it is kept.
    pub(super) fn new(fd: RawFd) -> io::Result<Self> {
        // SAFETY: the caller holds the completion queue, which keeps the descriptor open during the call.
        let own = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()?;
        // SAFETY: the descriptor is owned, never replaced, and closed only after it is deregistered.
        unsafe { AsyncFd::register_with_interest(own, Interest::READABLE) }.map(Channel).map_err(io::Error::from)
    }
}

impl Inner {
    /// Polls until the queue is idle.
    pub(super) async fn poll(self: Rc<Self>) {
        let _polling = Polling(&self.polling);
        let (mut active, mut completed) = (Instant::now(), Instant::now());
        loop {
            // Lets other tasks of this turn add copies first.
            kvhoist_base::runtime::yield_now().await;
            if self.turn() {
                (active, completed) = (Instant::now(), Instant::now());
            }
            if self.queue.borrow().has_failed() {
                match self.ended() {
                    Some(reason) => {
                        tokio::task::spawn_local(Rc::clone(&self).recover(reason));
                        return;
                    }
                    // The device usually flushes the work of a failed queue pair at once: sleep only if it does not.
                    None if active.elapsed() > SPIN => tokio::time::sleep(Duration::from_millis(1)).await,
                    None => {}
                }
                continue;
            }
            if self.queue.borrow().is_idle() {
                if active.elapsed() > SPIN {
                    return;
                }
                continue;
            }
            if active.elapsed() < SPIN {
                continue;
            }
            // Counts from the last completion, or from when the queue became busy, whichever was later.
            let stuck = {
                let queue = self.queue.borrow();
                queue.has_posted() && completed.elapsed().min(queue.busy_for()) > self.stuck_after
            };
            if stuck {
                self.stuck();
                continue;
            }
            if self.sleep().await {
                active = Instant::now();
            }
        }
    }

    /// Sleeps until a completion or another event arrives, for at most [`TICK`]. True if there was work before that.
    async fn sleep(self: &Rc<Self>) -> bool {
        if let Err(fault) = self.queue.borrow().qp().completions().arm() {
            log(|| tracing::debug!(%fault, "the completion queue was not armed"));
        }
        // A completion from before arming raises no event.
        if self.turn() || self.queue.borrow().has_failed() {
            return true;
        }
        self.sleeping.set(true);
        let ready = pin!(self.channel.0.readable());
        let (woken, tick) = (pin!(self.wake.notified()), pin!(tokio::time::sleep(TICK)));
        if let Either::Left((Ok(mut ready), _)) = select(ready, select(woken, tick)).await {
            self.queue.borrow().qp().completions().take_events();
            ready.clear_ready();
        }
        self.sleeping.set(false);
        false
    }

    /// Fails the queue because nothing completed within `stuck_after`.
    fn stuck(&self) {
        let reason = format!("nothing has completed for {:?}", self.stuck_after);
        let mut finished = self.finished.take();
        self.queue.borrow_mut().fail(&reason, &mut finished);
        self.answer(&mut finished);
        self.finished.set(finished);
        self.failed(reason);
    }
}
