//! The reactor's tasks.

use std::{future::Future, pin::Pin};

use tokio::task::{JoinHandle, spawn_local};

/// Starts a task on the reactor. Tasks are boxed: the compiler would make the runtime's code once more for each type.
pub(crate) fn spawn<T: 'static>(task: impl Future<Output = T> + 'static) -> JoinHandle<T> {
    let task: Pin<Box<dyn Future<Output = T>>> = Box::pin(task);
    spawn_local(task)
}
