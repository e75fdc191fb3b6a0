//! What the reactor asks of the worker.

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

/// What becomes of a request.
pub(super) enum Answer {
    Done(Owner),
    Failed(Owner, String),
    /// The library will never say; what the request owns stays with the worker for good.
    Lost(String),
}

/// Bytes to be moved.
pub(super) struct Request {
    pub(super) kind: OpKind,
    /// The place of the file in the list that the worker was given.
    pub(super) file: usize,
    pub(super) parts: Vec<Part>,
    /// `None` once answered.
    pub(super) owner: Option<Owner>,
    pub(super) answer: Option<oneshot::Sender<Answer>>,
    /// Whoever waited for it waits no more, and counted it as stuck.
    pub(super) given_up: Arc<AtomicBool>,
    pub(super) stuck: Arc<AtomicI64>,
}

impl Request {
    /// Ends it: nobody touches its memory any more.
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
            // Slots and pins go back here, on this thread.
            drop(abandoned);
        }
    }

    pub(super) fn fail(&mut self, reason: String) {
        self.end(Some(reason));
    }

    /// The library will not say what became of it: what it owns is never given back.
    pub(super) fn lose(&mut self, reason: &str) {
        let Some(owner) = self.owner.take() else { return };
        std::mem::forget(owner);
        if !self.given_up.load(Ordering::SeqCst) {
            self.stuck.fetch_add(1, Ordering::SeqCst);
        }
        if let Some(answer) = self.answer.take() {
            // Nobody may wait any more.
            drop(answer.send(Answer::Lost(reason.to_owned())));
        }
    }
}

/// Requests on their way. Its length is bounded by the slots and regions that requests own.
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
    /// Until there is one, or the end.
    ForEver,
}

impl Queue {
    /// No code that can panic runs under the lock, so a poisoned one holds a good state.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the request back where no more are taken.
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

    /// No more are taken from now on; what nobody has taken comes back.
    pub(super) fn close(&self) -> VecDeque<Request> {
        let mut state = self.lock();
        state.closed = true;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        self.changed.notify_one();
        waiting
    }

    /// Takes up to `count` requests; also says whether there will never be more.
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
