//! Transfers between the store's files and device memory by libcufile, by a thread of their own.
//!
//! Every call of the library may take milliseconds, and some never come back, so none is made on the reactor. The
//! reactor hands requests over and awaits their ends; the worker keeps its own count of what the library has, which
//! forgets completions when it is given more than it can hold.
//!
//! A request owns what its bytes come from and go to: slots, pins, regions. When the library does not give a request
//! back within the limit, the one who waits is told so and goes another way; what the request owns stays with it,
//! reserved and mapped, until the library comes back, be that never.

mod open;
mod queue;
mod sys;
mod worker;

pub use sys::{Counters, CufileFault, Driver, Library};

pub(crate) use open::{Buffer, Opened, Setup};

use std::{
    any::Any,
    cell::RefCell,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI64, Ordering},
    },
    time::Duration,
};

use tokio::{sync::oneshot, time::timeout};

use self::queue::{Answer, Queue, Request};
use crate::block::{FileId, OpKind};

/// What keeps memory and slots in place while the library may touch them.
pub(crate) type Owner = Box<dyn Any + Send>;

/// One contiguous piece of a request: device memory, and where in the file its bytes are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    pub(crate) ptr: *mut u8,
    pub(crate) len: usize,
    pub(crate) offset: u64,
}

// SAFETY: an address and two numbers; what may be done with them is the contract of `Cufile::transfer`.
unsafe impl Send for Part {}

/// How a request ended.
pub(crate) enum Ended<O> {
    /// All bytes were moved.
    Done(O),
    /// They were not, for the reason given; the destination is undefined.
    Failed(O, String),
    /// The library has not come back, for the reason given: what the request owns is still in its hands.
    Stuck(String),
}

/// The reactor's side. Dropping it ends the worker when the library has given back what it has; it does not wait.
pub(crate) struct Cufile {
    queue: Arc<Queue>,
    /// Requests that the library has not given back in time, and not since.
    stuck: Arc<AtomicI64>,
    limit: Duration,
    /// Fails when the worker has ended.
    worker: RefCell<Option<oneshot::Receiver<()>>>,
}

impl Cufile {
    /// Moves bytes between a file and device memory.
    ///
    /// # Safety
    /// Until `owner` is dropped every part must be device memory that the library may write to (for a read) or read
    /// (for a write), and nobody else writes to; for a write, that range of the file must be nobody else's either.
    ///
    /// # Cancel safety
    /// Dropping the future drops `owner` when the library is done with it.
    pub(crate) async unsafe fn transfer<O: Send + 'static>(
        &self,
        kind: OpKind,
        file: FileId,
        parts: Vec<Part>,
        owner: O,
    ) -> Ended<O> {
        let owner_of = |owner: Owner| *owner.downcast::<O>().expect("a request comes back with its owner");
        let (answer, mut answered) = oneshot::channel();
        let given_up = Arc::new(AtomicBool::new(false));
        let request = Request {
            kind,
            file: usize::from(file.0),
            parts,
            owner: Some(Box::new(owner)),
            answer: Some(answer),
            given_up: Arc::clone(&given_up),
            stuck: Arc::clone(&self.stuck),
        };
        if let Err(mut request) = self.queue.push(request) {
            let owner = request.owner.take().expect("nobody has answered it");
            return Ended::Failed(owner_of(owner), "the route is closed".into());
        }
        let answer = match timeout(self.limit, &mut answered).await {
            Ok(Ok(answer)) => answer,
            // The worker is gone, with all that it had.
            Ok(Err(_)) => Answer::Lost("its thread has ended".into()),
            Err(_) => {
                given_up.store(true, Ordering::SeqCst);
                answered.close();
                match answered.try_recv() {
                    Ok(answer) => answer,
                    Err(_) => {
                        self.stuck.fetch_add(1, Ordering::SeqCst);
                        return Ended::Stuck(format!("a {} has not come back in {:?}", kind.name(), self.limit));
                    }
                }
            }
        };
        match answer {
            Answer::Done(owner) => Ended::Done(owner_of(owner)),
            Answer::Failed(owner, reason) => Ended::Failed(owner_of(owner), reason),
            Answer::Lost(reason) => Ended::Stuck(reason),
        }
    }

    /// Takes back, as failed, what the library does not have yet; nothing more is taken on.
    pub(crate) fn retire(&self) {
        for mut request in self.queue.close() {
            request.fail("the route was given up".into());
        }
    }

    /// Ends the worker: false if it does not come back within the limit. Its files and all that it has then stay as
    /// they are until it does.
    pub(crate) async fn close(&self) -> bool {
        self.retire();
        let Some(ended) = self.worker.take() else { return true };
        timeout(self.limit, ended).await.is_ok()
    }
}

impl Drop for Cufile {
    fn drop(&mut self) {
        self.retire();
    }
}
