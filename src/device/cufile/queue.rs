//! The queue of requests from the reactor to the worker.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicI64, Ordering},
    },
    time::Duration,
};

use tokio::sync::oneshot;

use super::{Owner, Part};
use crate::block::OpKind;

/// Result of a request, as the worker reports it.
pub(super) enum Answer {
    Done(Owner),
    Failed(Owner, String),
    /// libcufile will never complete the request; its memory and slots stay reserved.
    Lost(String),
}

/// A transfer request.
pub(super) struct Request {
    pub(super) kind: OpKind,
    /// Index of the file in the worker's list.
    pub(super) file: usize,
    pub(super) parts: Vec<Part>,
    /// `None` once answered.
    pub(super) owner: Option<Owner>,
    pub(super) answer: Option<oneshot::Sender<Answer>>,
    /// Set when the caller has timed out and counted the request as stuck.
    pub(super) given_up: Arc<AtomicBool>,
    pub(super) stuck: Arc<AtomicI64>,
}

impl Request {
    /// Completes the request: libcufile no longer touches its memory.
    pub(super) fn end(&mut self, fault: Option<String>) {
        let (Some(owner), Some(answer)) = (self.owner.take(), self.answer.take()) else { return };
        let result = match fault {
            None => Answer::Done(owner),
            Some(fault) => Answer::Failed(owner, fault),
        };
        if let Err(abandoned) = answer.send(result) {
            if self.given_up.load(Ordering::SeqCst) {
                self.stuck.fetch_sub(1, Ordering::SeqCst);
            }
            // The caller is gone: slots and pins are released on this thread.
            drop(abandoned);
        }
    }

    pub(super) fn fail(&mut self, reason: String) {
        self.end(Some(reason));
    }

    /// Marks the request as never to complete, and leaks what it owns.
    pub(super) fn lose(&mut self, reason: &str) {
        let Some(owner) = self.owner.take() else { return };
        std::mem::forget(owner);
        if !self.given_up.load(Ordering::SeqCst) {
            self.stuck.fetch_add(1, Ordering::SeqCst);
        }
        if let Some(answer) = self.answer.take() {
            // The receiver may be gone.
            drop(answer.send(Answer::Lost(reason.to_owned())));
        }
    }
}

/// Requests that the worker has not taken. Its length is bounded by the slots and regions that requests own.
#[derive(Default)]
pub(super) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Request>,
    closed: bool,
}

/// How long to wait for requests.
#[derive(Clone, Copy)]
pub(super) enum Wait {
    No,
    For(Duration),
    /// Until a request arrives or the queue closes.
    ForEver,
}

impl Queue {
    /// No code that can panic runs under the lock, so a poisoned lock guards consistent state.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enqueues a request; hands it back if the queue is closed.
    pub(super) fn push(&self, request: Request) -> Result<(), Box<Request>> {
        let mut state = self.lock();
        if state.closed {
            return Err(Box::new(request));
        }
        state.waiting.push_back(request);
        drop(state);
        self.changed.notify_one();
        Ok(())
    }

    /// Closes the queue, and returns the requests that the worker has not taken.
    pub(super) fn close(&self) -> VecDeque<Request> {
        let mut state = self.lock();
        state.closed = true;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        self.changed.notify_one();
        waiting
    }

    /// Takes up to `count` requests. The flag is true once the queue is closed and empty.
    pub(super) fn take(&self, count: usize, wait: Wait) -> (Vec<Request>, bool) {
        let nothing = |state: &mut State| state.waiting.is_empty() && !state.closed;
        let state = self.lock();
        let mut state = match wait {
            Wait::No => state,
            Wait::For(time) => {
                self.changed.wait_timeout_while(state, time, nothing).unwrap_or_else(PoisonError::into_inner).0
            }
            Wait::ForEver => self.changed.wait_while(state, nothing).unwrap_or_else(PoisonError::into_inner),
        };
        let count = count.min(state.waiting.len());
        (state.waiting.drain(..count).collect(), state.closed && state.waiting.is_empty())
    }
}
