//! The task that takes completions: it looks for a while, then asks the channel and sleeps.

use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd, RawFd},
    rc::Rc,
    time::{Duration, Instant},
};

use tokio::io::{Interest, unix::AsyncFd};

use super::{super::Polling, Inner};

/// How long it looks before it sleeps: about what waking the reactor takes.
const SPIN: Duration = Duration::from_micros(30);

/// How often it looks where nothing wakes it: an event that got lost must not stop it.
const TICK: Duration = Duration::from_millis(500);

/// The same while a stream is held: what it waits for tells nobody when it is over.
const HELD_TICK: Duration = Duration::from_millis(1);

/// How long it looks at what a stream waits for before it sleeps in between.
const HELD_SPIN: Duration = Duration::from_micros(200);

/// The channel, watched by the runtime.
pub(super) struct Channel(AsyncFd<OwnedFd>);

impl Channel {
    /// Inside a runtime with I/O. The descriptor must be open; a copy of it is kept.
    pub(super) fn new(fd: RawFd) -> io::Result<Self> {
        // SAFETY: the completion queue, which the caller holds, keeps it open during the call.
        let own = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()?;
        // SAFETY: the descriptor is owned, never exchanged, and closed when the watch is over.
        unsafe { AsyncFd::register_with_interest(own, Interest::READABLE) }.map(Channel).map_err(io::Error::from)
    }
}

impl Inner {
    /// Takes completions until nothing is left to do.
    pub(super) async fn poll(self: Rc<Self>) {
        let _polling = Polling(&self.polling);
        let (mut looked, mut completed) = (Instant::now(), Instant::now());
        loop {
            // Others of this turn may have copies to add.
            crate::io::yield_now().await;
            if self.turn() {
                (looked, completed) = (Instant::now(), Instant::now());
            }
            if self.queue.borrow().has_failed() {
                match self.ended() {
                    Some(reason) => {
                        tokio::task::spawn_local(Rc::clone(&self).recover(reason));
                        return;
                    }
                    // It has been asked to give everything back, and does so in no time, or not soon.
                    None if looked.elapsed() > SPIN => tokio::time::sleep(Duration::from_millis(1)).await,
                    None => {}
                }
                continue;
            }
            if self.queue.borrow().is_idle() {
                if looked.elapsed() > SPIN {
                    return;
                }
                continue;
            }
            let held = self.queue.borrow().is_held();
            if looked.elapsed() < if held { HELD_SPIN } else { SPIN } {
                continue;
            }
            // Time in which there was nothing to complete does not count, nor where this thread was kept elsewhere
            // then.
            let stuck = {
                let queue = self.queue.borrow();
                queue.is_flying() && completed.elapsed().min(queue.busy_for()) > self.stuck_after
            };
            if stuck {
                self.stuck();
                continue;
            }
            if self.sleep(if held { HELD_TICK } else { TICK }).await {
                looked = Instant::now();
            }
        }
    }

    /// Sleeps until a completion comes, or something else is to be done. True if it did not have to.
    async fn sleep(self: &Rc<Self>, tick: Duration) -> bool {
        if let Err(fault) = self.queue.borrow().qp().completions().arm() {
            tracing::debug!(%fault, "the completion queue was not armed");
        }
        // One that came before it was armed tells nobody.
        if self.turn() || self.queue.borrow().has_failed() {
            return true;
        }
        self.sleeping.set(true);
        tokio::select! {
            biased;
            ready = self.channel.0.readable() => {
                if let Ok(mut ready) = ready {
                    self.queue.borrow().qp().completions().take_events();
                    ready.clear_ready();
                }
            }
            () = self.wake.notified() => {}
            () = tokio::time::sleep(tick) => {}
        }
        self.sleeping.set(false);
        false
    }

    /// Nothing completes any more: that is a failure too.
    fn stuck(&self) {
        let reason = format!("nothing has completed for {:?}", self.stuck_after);
        let mut landed = self.landed.take();
        self.queue.borrow_mut().fail(&reason, &mut landed);
        self.failed(reason);
        self.answer(&mut landed);
        self.landed.set(landed);
    }
}
