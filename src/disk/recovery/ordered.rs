//! Runs a few futures concurrently and returns their outputs in starting order.

use std::{
    collections::VecDeque,
    future::{Future, poll_fn},
    pin::Pin,
    task::Poll,
};

enum Entry<F: Future> {
    Running(Pin<Box<F>>),
    Done(F::Output),
}

/// Futures that make progress together within one task, without spawning: recovery runs under any runtime.
pub(super) struct OrderedFutures<F: Future>(VecDeque<Entry<F>>);

impl<F: Future> OrderedFutures<F> {
    pub fn new() -> Self {
        OrderedFutures(VecDeque::new())
    }

    /// Adds a future. It starts with the next call of [`next`](Self::next).
    pub fn push(&mut self, future: F) {
        self.0.push_back(Entry::Running(Box::pin(future)));
    }

    /// The output of the oldest future, or `None` if there is none. Drives all futures meanwhile.
    pub async fn next(&mut self) -> Option<F::Output> {
        poll_fn(|context| {
            for entry in &mut self.0 {
                if let Entry::Running(future) = entry
                    && let Poll::Ready(output) = future.as_mut().poll(context)
                {
                    *entry = Entry::Done(output);
                }
            }
            match self.0.pop_front() {
                None => Poll::Ready(None),
                Some(Entry::Done(output)) => Poll::Ready(Some(output)),
                Some(running) => {
                    self.0.push_front(running);
                    Poll::Pending
                }
            }
        })
        .await
    }
}
