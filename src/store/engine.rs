//! A runtime and the files for the inspection of a store.

use std::{sync::Arc, thread};

use super::{Options, open::OpenStore};
use crate::{
    error::{Error, Result},
    io::{Files, ThreadPlan, Workers},
    metrics::Count,
    runtime::Reactor,
};

/// Largest number of threads that make system calls; more requests in flight are not faster.
const THREADS_MAX: u32 = 64;

/// Runs `work` on a new thread, inside a runtime and with the store's files: the caller may itself
/// be inside a runtime, and a ring belongs to its thread.
pub(super) fn on_a_runtime<T: Send>(
    store: &OpenStore,
    options: &Options,
    work: impl AsyncFnOnce(&Files) -> Result<T> + Send,
) -> Result<T> {
    let config = store.config.clone().storage(options.storage);
    let run = move || {
        let reactor = Reactor::new(&config)?;
        reactor.block_on(async {
            let files = store.files.iter().map(|file| Arc::clone(&file.file)).collect();
            let callers = if reactor.has_ring() { 0 } else { options.depth.min(THREADS_MAX) };
            let plan = ThreadPlan { callers, ..ThreadPlan::default() };
            let storage = Workers::start(plan, Arc::new(Count::unexported()))
                .and_then(|workers| reactor.storage(files, None, workers));
            work(&storage.map_err(|source| Error::io("start the storage engine", "", source))?).await
        })
    };
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("kvhoist-store".into()).spawn_scoped(scope, run);
        let thread = thread.map_err(|source| Error::io("start a thread", "", source))?;
        match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}
