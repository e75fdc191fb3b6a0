//! Futures dropped in mid-work.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

use crate::sim::Rng;

/// When a future is given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cancel {
    Never,
    /// When it is woken for this time, in place of the poll: what woke it is lost.
    AtWake(u64),
    /// Right after this many polls.
    AfterPolls(u64),
}

impl Cancel {
    pub fn draw(rng: &mut Rng, rate: f64) -> Self {
        let (hit, at_wake, polls) = (rng.chance(rate), rng.chance(0.5), rng.between(1, 5));
        match (hit, at_wake) {
            (false, _) => Cancel::Never,
            (true, true) => Cancel::AtWake(polls),
            (true, false) => Cancel::AfterPolls(polls),
        }
    }
}

/// Runs `future` until it ends, or until it is given up: then `None`.
pub async fn until<F: Future>(future: F, cancel: Cancel) -> Option<F::Output> {
    Until { future: Box::pin(future), cancel, polls: 0 }.await
}

/// Runs `future` as on a thread that the system resumes late: after a wake-up other tasks run for some turns. So the
/// order in which waiters verify their blocks is drawn too.
pub async fn late<F: Future>(future: F, rng: Rng) -> F::Output {
    Late { future: Box::pin(future), turns: 0, rng }.await
}

struct Late<F> {
    future: Pin<Box<F>>,
    /// Turns that others have before the next poll.
    turns: u64,
    rng: Rng,
}

impl<F: Future> Future for Late<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        if self.turns > 0 {
            self.turns -= 1;
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let polled = self.future.as_mut().poll(context);
        self.turns = self.rng.below(4);
        polled
    }
}

struct Until<F> {
    future: Pin<Box<F>>,
    cancel: Cancel,
    polls: u64,
}

impl<F: Future> Future for Until<F> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.cancel {
            Cancel::AtWake(polls) | Cancel::AfterPolls(polls) if self.polls >= polls => return Poll::Ready(None),
            _ => {}
        }
        self.polls += 1;
        match self.future.as_mut().poll(context) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending => {
                if self.cancel == Cancel::AfterPolls(self.polls) {
                    // Others that are ready have their turn first.
                    context.waker().wake_by_ref();
                }
                Poll::Pending
            }
        }
    }
}
