//! The threads of a store.

use std::{sync::Arc, time::Duration};

use kvhoist::remote::{RemoteError, RemoteFuture};
use tokio::{runtime::Handle, task::JoinHandle};

use crate::options::{OpenError, Options};

/// The runtime of a store, which ends with its last owner.
#[derive(Debug, Clone)]
pub struct Runtime {
    handle: Handle,
    _threads: Arc<Threads>,
}

/// Taken when it is dropped, which may be on a thread of another runtime.
#[derive(Debug)]
struct Threads(Option<tokio::runtime::Runtime>);

impl Drop for Threads {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// A task that is ended when nobody waits for it.
struct Aborted<T>(JoinHandle<T>);

impl<T> Drop for Aborted<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Runtime {
    pub fn start(options: &Options) -> Result<Self, OpenError> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(options.threads)
            .thread_name("kvhoist-remote")
            .enable_all()
            .build()
            .map_err(|error| {
                OpenError::missing("threads of the remote store", error.to_string(), "threads to start")
            })?;
        Ok(Runtime { handle: runtime.handle().clone(), _threads: Arc::new(Threads(Some(runtime))) })
    }

    /// A call: begun when it is polled first, ended with its future or after `limit`.
    pub fn call<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl Future<Output = Result<T, RemoteError>> + Send + 'static,
    ) -> RemoteFuture<T> {
        let handle = self.handle.clone();
        Box::pin(async move {
            let timed = async move {
                let late = |_| RemoteError::Unavailable(format!("no answer within {limit:?}"));
                tokio::time::timeout(limit, work).await.map_err(late)?
            };
            let mut task = Aborted(handle.spawn(timed));
            match (&mut task.0).await {
                Ok(done) => done,
                Err(error) if error.is_panic() => Err(RemoteError::Unavailable("a request panicked".into())),
                Err(_) => Err(RemoteError::Unavailable("the store was closed".into())),
            }
        })
    }
}
