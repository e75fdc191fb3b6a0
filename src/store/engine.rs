//! A runtime and a storage engine for the inspection of a store.

use std::{sync::Arc, thread};

use super::{Options, open::OpenStore};
use crate::{
    error::{Error, Result},
    io::AnyStorage,
    runtime::Reactor,
};

/// Largest number of threads of the blocking engine; more requests in flight are not faster.
const THREADS_MAX: usize = 64;

/// Runs `work` on a new thread, inside a runtime and with a storage engine for the store's files: the caller may itself
/// be inside a runtime, and a ring belongs to its thread.
pub(super) fn on_a_runtime<T: Send>(
    store: &OpenStore,
    options: &Options,
    work: impl AsyncFnOnce(&AnyStorage) -> Result<T> + Send,
) -> Result<T> {
    let threads = (options.depth as usize).min(THREADS_MAX);
    let config = store.config.clone().storage(options.storage).blocking_threads(threads);
    let run = move || {
        let reactor = Reactor::new(&config)?;
        reactor.block_on(async {
            let files = store.files.iter().map(|file| Arc::clone(&file.file)).collect();
            let storage = reactor.storage(files, None, config.disk.blocking_threads);
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
