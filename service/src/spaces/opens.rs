//! Threads that open files for clients, and close those that nobody reads.
//!
//! An open takes as long as its file system hangs, and so does a close, and nothing ends them: not their client's
//! time-out, nor its death. So these threads are few, and none of those that unmap clients' memory
//! ([`helpers`](crate::helpers)).

use std::{mem::ManuallyDrop, sync::Arc, thread, time::Duration};

use kvhoist_files::{Error, SourceFile};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, oneshot},
    time::timeout,
};

use super::files::refused;
use crate::{error::ServiceFault, protocol::Failure};

/// Threads at a time.
pub(crate) const OPENS_MAX: usize = 16;
/// How long an open waits for one of them.
const TURN: Duration = Duration::from_secs(2);
/// Holds that are not answered, or whose clients have gone.
pub(crate) const HOLDS_MAX: usize = 1024;

/// Opens a file.
pub(crate) type Open = fn(&str) -> Result<SourceFile, Error>;

pub(super) struct Opens {
    turns: Arc<Semaphore>,
    holds: Arc<Semaphore>,
    open: Open,
}

/// An open file, which has its thread's turn until it is given away or closed. Dropping it closes it on a thread.
pub(super) struct Opened {
    file: Option<SourceFile>,
    turn: Option<OwnedSemaphorePermit>,
}

impl Opens {
    /// `open` may hang.
    pub(super) fn new(open: Open) -> Self {
        let [turns, holds] = [OPENS_MAX, HOLDS_MAX].map(|permits| Arc::new(Semaphore::new(permits)));
        Opens { turns, holds, open }
    }

    /// Lets one more hold begin, which lasts as long as what is returned.
    pub(super) fn begin_hold(&self) -> Result<OwnedSemaphorePermit, Failure> {
        Arc::clone(&self.holds).try_acquire_owned().map_err(|_| {
            let text = format!("busy: found {HOLDS_MAX} holds in flight, expected fewer; read the file itself");
            refused(ServiceFault::Busy, text)
        })
    }

    /// Opens the file at a path; `check` looks at it on the same thread.
    ///
    /// # Cancel safety
    /// The open goes on, and its thread is taken until it ends.
    pub(super) async fn run(
        &self,
        path: String,
        check: impl FnOnce(&SourceFile) -> Result<(), Failure> + Send + 'static,
    ) -> Result<Opened, Failure> {
        let Ok(turn) = timeout(TURN, Arc::clone(&self.turns).acquire_owned()).await else {
            let text = format!("busy: found {OPENS_MAX} opens in flight, of which none has ended in {TURN:?}; ");
            let text = text + "read the file itself, and look whether a file system hangs";
            return Err(refused(ServiceFault::Busy, text));
        };
        let turn = turn.expect("nobody closes it");
        let (open, (tell, told)) = (self.open, oneshot::channel());
        let work = move || {
            let opened = open(&path).map_err(|error| refused(ServiceFault::Io, error.to_string()));
            // One that is not wanted is closed here.
            let opened = opened.and_then(|file| check(&file).map(|()| file));
            // Whoever hears of a refusal finds the thread free.
            let opened = opened.map(|file| Opened { file: Some(file), turn: Some(turn) });
            drop(tell.send(opened));
        };
        let started = thread::Builder::new().name("kvhoist-open".into()).spawn(work);
        started.map_err(|error| refused(ServiceFault::Unavailable, format!("found no thread to open it ({error})")))?;
        told.await.map_err(|_| refused(ServiceFault::Io, "the thread that opened it panicked".into()))?
    }
}

impl Opened {
    /// Gives the file away. `take` returns it where it cannot take it.
    pub(super) fn give<E>(mut self, take: impl FnOnce(SourceFile) -> Result<(), (SourceFile, E)>) -> Result<(), E> {
        let file = self.file.take().expect("it is given away once");
        take(file).map_err(|(file, error)| {
            self.file = Some(file);
            error
        })
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let Some(file) = self.file.take() else { return };
        // Where no thread starts it stays open: this one would wait for the close.
        let (file, turn) = (ManuallyDrop::new(file), self.turn.take());
        let close = move || {
            drop(ManuallyDrop::into_inner(file));
            drop(turn);
        };
        if let Err(error) = thread::Builder::new().name("kvhoist-close".into()).spawn(close) {
            tracing::warn!(%error, "found no thread to close a file: it stays open");
        }
    }
}
