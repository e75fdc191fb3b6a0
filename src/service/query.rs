//! Single questions to a service, on the caller's thread.

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

use super::protocol::{HEADER_BYTES, Header, Hello, Malformed, Reply, Request, ServiceStatus, Welcome};
use crate::error::{Error, Result, ServiceFault};

/// How long a service may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// A service's figures, and those of its spaces and clients. Blocks the thread, for at most 10 s if the service
/// hangs.
///
/// # Errors
/// [`Error::Service`]: [`ServiceFault::Away`] if none answers, [`ServiceFault::Permission`],
/// [`ServiceFault::Version`], [`ServiceFault::Busy`].
pub fn status(socket: &Path) -> Result<ServiceStatus> {
    match ask(socket, &Request::Status, Some(PATIENCE))? {
        Reply::Status(status) => Ok(*status),
        other => Err(unexpected(&other)),
    }
}

/// Removes a space of this user with all its blocks, for good. Blocks the thread until its files are deleted.
///
/// # Errors
/// As [`status`]; [`ServiceFault::Busy`] while clients are attached to it, [`ServiceFault::Argument`] if there is
/// none, [`ServiceFault::Io`] if its files cannot be deleted.
pub fn remove_space(socket: &Path, namespace: &str, block_bytes: u64) -> Result<()> {
    let request = Request::RemoveSpace { namespace: namespace.into(), block_bytes };
    match ask(socket, &request, None)? {
        Reply::Done => Ok(()),
        other => Err(unexpected(&other)),
    }
}

fn unexpected(reply: &Reply) -> Error {
    Error::Service { fault: ServiceFault::Protocol, text: format!("{reply:?} is not what was asked for") }
}

/// Asks on a connection of its own; the reply may take `patience`.
fn ask(socket: &Path, request: &Request, patience: Option<Duration>) -> Result<Reply> {
    let away = |error: io::Error| Error::Service {
        fault: ServiceFault::Away,
        text: format!("{}: {error}; is `kvhoist serve` running there?", socket.display()),
    };
    let nonsense = |error: Malformed| Error::Service { fault: ServiceFault::Protocol, text: error.to_string() };
    let mut stream = UnixStream::connect(socket).map_err(away)?;
    stream.set_read_timeout(Some(PATIENCE)).and_then(|()| stream.set_write_timeout(Some(PATIENCE))).map_err(away)?;
    stream.write_all(&Hello::ours().encode()).map_err(away)?;
    let mut welcome = [0; Welcome::BYTES];
    stream.read_exact(&mut welcome).map_err(away)?;
    let welcome = Welcome::decode(&welcome).map_err(nonsense)?;
    check(&welcome)?;
    stream.set_read_timeout(patience).map_err(away)?;
    stream.write_all(&request.encode(1)).map_err(away)?;
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header).map_err(away)?;
    let header = Header::decode(&header).map_err(nonsense)?;
    let mut body = vec![0; header.body_bytes as usize];
    stream.read_exact(&mut body).map_err(away)?;
    match Reply::decode(header.kind, &body).map_err(nonsense)? {
        Reply::Failed(failure) | Reply::Goodbye(failure) => Err(failure.into()),
        reply => Ok(reply),
    }
}

/// Checks whether the service has admitted the client.
pub(super) fn check(welcome: &Welcome) -> Result<()> {
    let Welcome { version_min, version_max, answer, .. } = *welcome;
    let Err(fault) = answer else { return Ok(()) };
    let text = match fault {
        ServiceFault::Version => {
            let Hello { version_min: ours_min, version_max: ours_max } = Hello::ours();
            format!(
                "the service speaks versions {version_min} to {version_max} of the protocol, this client {ours_min} \
                 to {ours_max}; update the older one"
            )
        }
        ServiceFault::Permission => {
            "this user may not connect; the service must be started for it (--allow-uid)".into()
        }
        ServiceFault::Busy => "the service has as many connections as it takes; try later".into(),
        ServiceFault::Draining => "the service is ending; try later".into(),
        other => format!("the service refused the connection ({other:?})"),
    };
    Err(Error::Service { fault, text })
}
