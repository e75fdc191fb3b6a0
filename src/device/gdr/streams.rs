//! Batches that wait to be posted, by stream.

use std::{collections::VecDeque, rc::Rc};

use tokio::sync::oneshot;

use super::regions::RegionRefs;
use crate::{
    device::{CopyBatch, cuda::StreamMark},
    error::{Error, Result},
};

pub(super) type Answer = oneshot::Sender<(Result<()>, CopyBatch)>;

/// A condition that a stream waits for before its next batch may start.
pub trait Fence {
    /// True once the condition holds.
    ///
    /// # Errors
    /// Why the condition can never hold; the batch fails with this error.
    fn is_passed(&self) -> Result<bool>;
}

impl Fence for StreamMark {
    fn is_passed(&self) -> Result<bool> {
        self.is_passed()
    }
}

/// An accepted batch: all its ranges are registered.
pub(super) struct Accepted {
    pub(super) batch: CopyBatch,
    pub(super) regions: RegionRefs,
    pub(super) answer: Answer,
    /// The fence that it waits for.
    pub(super) after: Option<Rc<dyn Fence>>,
}

/// The waiting batches of one stream, in order.
struct StreamQueue {
    id: u64,
    waiting: VecDeque<Accepted>,
}

/// Completed batches, with their results.
pub(super) type Finished = Vec<(Accepted, Result<()>)>;

/// The waiting batches of all streams. Streams take turns.
pub(super) struct Streams {
    queues: Vec<StreamQueue>,
    /// Index of the stream whose turn is next.
    turn: usize,
}

impl Streams {
    /// Stream 0, which has no order, has room for `batches`.
    pub(super) fn new(batches: usize) -> Self {
        Streams { queues: vec![StreamQueue { id: 0, waiting: VecDeque::with_capacity(batches) }], turn: 0 }
    }

    pub(super) fn push(&mut self, stream: u64, accepted: Accepted) {
        match self.queues.iter_mut().find(|queue| queue.id == stream) {
            Some(stream) => stream.waiting.push_back(accepted),
            None => self.queues.push(StreamQueue { id: stream, waiting: VecDeque::from([accepted]) }),
        }
    }

    /// True if no batch waits.
    pub(super) fn is_empty(&self) -> bool {
        self.queues.iter().all(|queue| queue.waiting.is_empty())
    }

    /// True if a stream waits for a fence.
    pub(super) fn is_fenced(&self) -> bool {
        self.queues.iter().any(|queue| queue.waiting.front().is_some_and(|front| front.after.is_some()))
    }

    /// The next batch whose stream is not fenced. A batch whose fence can never open is finished.
    pub(super) fn next(&mut self, finished: &mut Finished) -> Option<Accepted> {
        for _ in 0..self.queues.len() {
            let at = self.turn % self.queues.len();
            self.turn = at + 1;
            let stream = &mut self.queues[at];
            let Some(front) = stream.waiting.front() else { continue };
            let passed = front.after.as_ref().map_or(Ok(true), |fence| fence.is_passed());
            if matches!(passed, Ok(false)) {
                continue;
            }
            let accepted = stream.waiting.pop_front().expect("it has a front");
            if stream.waiting.is_empty() && stream.id != 0 {
                self.queues.remove(at);
            }
            match passed {
                Ok(_) => return Some(accepted),
                Err(error) => finished.push((accepted, Err(error))),
            }
        }
        None
    }

    /// Takes all batches, stream by stream.
    pub(super) fn take_all(&mut self) -> Vec<Accepted> {
        let batches = self.queues.iter_mut().flat_map(|queue| queue.waiting.drain(..)).collect();
        self.queues.truncate(1);
        batches
    }
}

pub(super) fn failure(reason: String) -> Error {
    Error::copy("gdr", reason)
}
