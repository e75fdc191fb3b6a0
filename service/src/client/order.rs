//! Calls of a client.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use tokio::sync::oneshot;

use super::{bounce::Taken, layers::LayersPart, places::Lent};
use crate::{error::Result, protocol::Reply};

/// A request to be sent.
pub(super) struct Call {
    pub(super) id: u64,
    pub(super) frame: Vec<u8>,
    /// [`Request::is_write`](crate::protocol::Request::is_write).
    pub(super) is_write: bool,
    pub(super) what: What,
    pub(super) reply: Answer,
    /// Held until the service has replied, or the connection is lost.
    pub(super) keeps: Keeps,
}

/// Who gets the end of a call.
pub(super) enum Answer {
    /// A caller that waits for it.
    Caller(oneshot::Sender<Result<Reply>>),
    /// A load of layers.
    Layers(LayersPart),
}

impl Answer {
    /// Tells the end of the call; false if nobody wants to know.
    pub(super) fn send(self, result: Result<Reply>) -> bool {
        match self {
            Answer::Caller(caller) => caller.send(result).is_ok(),
            Answer::Layers(part) => {
                part.end(result);
                true
            }
        }
    }
}

/// Resources of a call while the service may work on it: its count, and slots of the bounce buffer.
pub(super) type Keeps = (Counted, Option<Arc<Taken>>);

/// The kind of a call, which decides what its reply changes.
pub(super) enum What {
    Plain,
    /// Blocks between memory that the service has and its space. The caller uses that memory after the call, so it is
    /// answered when the service has replied or the connection is lost; some time after the deadline the memory is
    /// given up.
    Move,
    /// A wait for something else than the service. It is never sent, and ends at its deadline or when the connection is
    /// lost.
    Wait,
    /// Memory that is the service's once the reply says so, and again after each reconnection.
    Register(Lent),
    /// Memory that the service refused when it was back, offered again by the client's thread.
    Offer(Lent),
    /// Memory that is given back: it needs no service. It is asked for also after the deadline, when the caller knows
    /// that the memory is not free yet.
    Unregister(u32),
}

/// Counts calls for as long as it lives.
pub(super) struct Counted(Arc<AtomicUsize>);

impl Counted {
    /// One more call, if there are fewer than `max`.
    pub(super) fn new(count: &Arc<AtomicUsize>, max: usize) -> Option<Self> {
        let fewer = |calls| (calls < max).then_some(calls + 1);
        count.fetch_update(Ordering::AcqRel, Ordering::Acquire, fewer).ok()?;
        Some(Counted(Arc::clone(count)))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}
