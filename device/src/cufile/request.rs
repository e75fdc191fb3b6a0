//! Requests from the reactor to the worker.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicI64, Ordering},
};

use kvhoist_base::block::OpKind;
use tokio::sync::oneshot;

use super::{Owner, Part};

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
