//! Threads that open files for clients.
//!
//! An open takes as long as its file system hangs, and nothing ends it: not its client's time-out, nor its death. So
//! these threads are few, and none of those that unmap clients' memory ([`helpers`](crate::helpers)).

use std::{sync::Arc, thread, time::Duration};

use kvhoist_files::{Error, SourceFile};
use tokio::{
    sync::{Semaphore, oneshot},
    time::timeout,
};

use super::files::refused;
use crate::{error::ServiceFault, protocol::Failure};

/// Threads at a time.
pub(crate) const OPENS_MAX: usize = 16;
/// How long an open waits for one of them.
const TURN: Duration = Duration::from_secs(2);

/// Opens a file.
pub(crate) type Open = fn(&str) -> Result<SourceFile, Error>;

pub(super) struct Opens {
    turns: Arc<Semaphore>,
    open: Open,
}

impl Opens {
    /// `open` may hang.
    pub(super) fn new(open: Open) -> Self {
        Opens { turns: Arc::new(Semaphore::new(OPENS_MAX)), open }
    }

    /// Opens the file at a path; `check` looks at it on the same thread.
    ///
    /// # Cancel safety
    /// The open goes on, and its thread is taken until it ends.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        path: String,
        check: impl FnOnce(SourceFile) -> T + Send + 'static,
    ) -> Result<T, Failure> {
        let Ok(turn) = timeout(TURN, Arc::clone(&self.turns).acquire_owned()).await else {
            let text = format!("busy: found {OPENS_MAX} opens in flight, of which none has ended in {TURN:?}; ");
            let text = text + "read the file itself, and look whether a file system hangs";
            return Err(refused(ServiceFault::Busy, text));
        };
        let (open, (tell, told)) = (self.open, oneshot::channel());
        let work = move || {
            let opened = open(&path).map(check);
            // Whoever hears of the end finds the thread free.
            drop(turn);
            drop(tell.send(opened));
        };
        let started = thread::Builder::new().name("kvhoist-open".into()).spawn(work);
        started.map_err(|error| refused(ServiceFault::Unavailable, format!("found no thread to open it ({error})")))?;
        let opened = told.await.map_err(|_| refused(ServiceFault::Io, "the thread that opened it panicked".into()))?;
        opened.map_err(|error| refused(ServiceFault::Io, error.to_string()))
    }
}
