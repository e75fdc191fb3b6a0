//! What tests run a service and its clients over: streams, files, caches and mappings of their own.
//!
//! The simulation (`tests/simulation`) runs the sessions, the spaces and the clients of production over these, as tasks
//! of one thread. Behind the feature `sim`, hidden, and not part of the public interface: any version may change it.

use std::{io, path::PathBuf, rc::Rc, sync::Arc};

use tokio::sync::watch;

use super::{
    client::{Client, ClientOptions, not_started},
    config::ServerConfig,
    report::{Ask, ServiceReport},
    server::hold,
    spaces::Spaces,
};
pub use super::{
    memory::{Mapped, map},
    peers::Peer,
    server::Caller,
    system::{Later, Made, System},
    wire::{Came, Coming, Descriptor, Lent, Wire},
};
use crate::error::{Error, Result};

/// A service that runs in the current `LocalSet`.
pub struct Service {
    draining: watch::Sender<bool>,
    ask: Ask,
}

impl Service {
    /// As [`Server::drain`](crate::Server::drain).
    pub fn drain(&self) {
        self.draining.send_replace(true);
    }

    /// As [`Server::report`](crate::Server::report).
    ///
    /// # Errors
    /// [`Error::Closed`] after the end of the service.
    pub async fn report(&self) -> Result<ServiceReport> {
        self.ask.report()?.await.map_err(|_| Error::Closed)
    }
}

/// Starts a service over `system`, for the connections that `accept` returns. It makes progress while the returned
/// future is polled, and ends with that future, as if its process were killed.
///
/// # Errors
/// As [`Server::start`](crate::Server::start), but for the socket and the locks.
pub fn start(
    config: ServerConfig,
    system: Rc<dyn System>,
    accept: impl AsyncFnMut() -> io::Result<Caller>,
) -> Result<(Service, impl Future<Output = Result<()>>)> {
    config.validate()?;
    let (draining, drained) = watch::channel(false);
    let (ask, asked) = Ask::channel();
    let spaces = Spaces::load(config.clone(), system)?;
    Ok((Service { draining, ask }, hold(config, spaces, accept, drained, asked)))
}

/// Connects a client by `dial`, as [`Client::connect`] does by a socket; `spawn` runs what is the client's thread in
/// production, unless it cannot be started.
///
/// # Errors
/// As [`Client::connect`].
pub async fn connect<D: AsyncFn() -> io::Result<Arc<dyn Wire>> + 'static>(
    name: impl Into<PathBuf>,
    options: ClientOptions,
    dial: D,
    spawn: impl FnOnce(Later<()>) -> io::Result<()>,
) -> Result<Client> {
    let run = |worker: super::client::Worker<D>, first| spawn(Box::pin(worker.run(first))).map_err(not_started);
    Client::start(name.into(), options, dial, run).await
}
