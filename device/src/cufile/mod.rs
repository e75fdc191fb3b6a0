//! Transfers between the store's files and device memory through libcufile, on a thread of their own.
//!
//! Calls of libcufile can take milliseconds, and some never return, so the reactor makes none. It hands requests to a
//! worker thread and awaits their completion. The worker never gives libcufile more transfers than a batch holds,
//! because libcufile drops completions beyond that.
//!
//! A request owns its slots, pins and regions. If libcufile does not complete it within the limit, the caller falls
//! back to another route; the request keeps its slots and memory until libcufile returns it, which may be never.

mod open;
mod queue;
mod reader;
mod request;
mod sys;
mod worker;

pub use reader::CufileReader;
pub use sys::{Counters, CufileError, Driver, Library};

pub use super::transfer::{Buffer, Ended, Owner, Part, SelfTest, Setup};

use std::{
    cell::RefCell,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI64, Ordering},
    },
    time::Duration,
};

use kvhoist_base::block::{FileId, OpKind};
use tokio::{sync::oneshot, time::timeout};

use self::{
    queue::{Queue, Wait},
    request::{Answer, Request},
};

/// The reactor's handle to the worker. Dropping it ends the worker once libcufile has returned every transfer; the drop
/// does not wait.
pub struct Cufile {
    queue: Arc<Queue<Request>>,
    /// Number of requests that libcufile has not completed in time and still holds.
    stuck: Arc<AtomicI64>,
    limit: Duration,
    /// Fails when the worker thread has ended.
    worker: RefCell<Option<oneshot::Receiver<()>>>,
}

impl Cufile {
    /// Transfers bytes between a file and device memory.
    ///
    /// # Safety
    /// Until `owner` is dropped every part must be device memory that libcufile may write to (for a read) or read (for
    /// a write), and nothing else may write to it. For a write, nothing else may use that range of the file.
    ///
    /// # Cancel safety
    /// Dropping the future drops `owner` when libcufile is done with it.
    pub async unsafe fn transfer<O: Send + 'static>(
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
            let owner = request.owner.take().expect("not answered yet");
            return Ended::Failed(owner_of(owner), "the route is closed".into());
        }
        let answer = match timeout(self.limit, &mut answered).await {
            Ok(Ok(answer)) => answer,
            // The worker ended and dropped the request.
            Ok(Err(_)) => Answer::Lost("its worker thread has ended".into()),
            Err(_) => {
                given_up.store(true, Ordering::SeqCst);
                answered.close();
                match answered.try_recv() {
                    Ok(answer) => answer,
                    Err(_) => {
                        self.stuck.fetch_add(1, Ordering::SeqCst);
                        return Ended::Stuck(format!("a {} has not completed within {:?}", kind.name(), self.limit));
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

    /// Closes the queue and fails the requests that the worker has not taken.
    pub fn retire(&self) {
        self.queue.close();
        for mut request in self.queue.take(usize::MAX, Wait::No).0 {
            request.fail("the cuFile route was retired".into());
        }
    }

    /// Ends the worker. Returns false if it does not end within the limit; its files and transfers then stay in place
    /// until it does.
    pub async fn close(&self) -> bool {
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
