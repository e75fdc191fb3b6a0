//! The queue of requests before the thread that makes them.

use std::{
    collections::VecDeque,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// First in, first out, until it is closed. Its owners bound its length.
pub(super) struct Queue<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

struct State<T> {
    waiting: VecDeque<T>,
    closed: bool,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        let state = State { waiting: VecDeque::new(), closed: false };
        Queue { state: Mutex::new(state), changed: Condvar::new() }
    }
}

/// How long to wait for work.
#[derive(Clone, Copy)]
pub(super) enum Wait {
    /// Not at all.
    No,
    /// For this time at most.
    For(Duration),
    /// Until work arrives or the queue closes.
    ForEver,
}

impl<T> Queue<T> {
    /// No code that can panic runs under the lock, so a poisoned lock guards consistent state.
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enqueues work; hands it back if the queue is closed.
    ///
    /// # Errors
    /// The work.
    pub(super) fn push(&self, work: T) -> Result<(), T> {
        let mut state = self.lock();
        if state.closed {
            return Err(work);
        }
        state.waiting.push_back(work);
        drop(state);
        self.changed.notify_one();
        Ok(())
    }

    /// Takes no more work. What is there already can be taken.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// Takes up to `count` pieces of work. The flag is true once the queue is closed and empty.
    pub(super) fn take(&self, count: usize, wait: Wait) -> (Vec<T>, bool) {
        let mut state = self.wait(wait);
        let count = count.min(state.waiting.len());
        (state.waiting.drain(..count).collect(), state.closed && state.waiting.is_empty())
    }

    fn wait(&self, wait: Wait) -> MutexGuard<'_, State<T>> {
        let nothing = |state: &mut State<T>| state.waiting.is_empty() && !state.closed;
        let state = self.lock();
        match wait {
            Wait::No => state,
            Wait::For(time) => {
                self.changed.wait_timeout_while(state, time, nothing).unwrap_or_else(PoisonError::into_inner).0
            }
            Wait::ForEver => self.changed.wait_while(state, nothing).unwrap_or_else(PoisonError::into_inner),
        }
    }
}
