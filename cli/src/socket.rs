//! The socket of a service, named or not.

use std::path::PathBuf;

use kvhoist_service::{ServiceStatus, default_socket, status};

use crate::{failure::Failure, shown::shown};

/// The flag of each command that asks a service.
#[derive(clap::Args, Clone)]
pub struct Socket {
    /// The service's socket [default: $KVHOIST_SOCKET; else kvhoist.sock in /run/kvhoist where that folder exists, else
    /// in $XDG_RUNTIME_DIR, else in /run].
    #[arg(long = "socket", value_name = "FILE")]
    named: Option<PathBuf>,
}

impl Socket {
    /// The socket that is meant.
    pub fn path(&self) -> PathBuf {
        self.named.clone().unwrap_or_else(default_socket)
    }

    /// What the service there says of itself.
    pub fn status(&self) -> Result<ServiceStatus, Failure> {
        let path = self.path();
        status(&path).map_err(|error| match &self.named {
            Some(_) => error.into(),
            None => Failure::run(format!(
                "{error} ({} is the default: --socket FILE or KVHOIST_SOCKET name another)",
                shown(&path)
            )),
        })
    }
}
