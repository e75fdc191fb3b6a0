//! Single questions to a service, on the caller's thread.

use std::{
    fs,
    io::{self, Read, Write},
    os::unix::{fs::MetadataExt, net::UnixStream},
    path::Path,
    time::Duration,
};

use super::{
    peers::own_uid,
    protocol::{HEADER_BYTES, Header, Hello, Malformed, Reply, Request, ServiceStatus, Welcome},
};
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

/// Removes a space with all its blocks, for good: this user's own, or, if `shared`, the one that users share, for the
/// user who made it and the service's. Blocks the thread until its files are deleted.
///
/// # Errors
/// As [`status`]; [`ServiceFault::Busy`] while clients are attached to it, [`ServiceFault::Argument`] if there is
/// none, [`ServiceFault::Permission`] for a shared space of another user, [`ServiceFault::Io`] if its files cannot be
/// deleted.
pub fn remove_space(socket: &Path, namespace: &str, block_bytes: u64, shared: bool) -> Result<()> {
    let request = Request::RemoveSpace { namespace: namespace.into(), block_bytes, shared };
    match ask(socket, &request, None)? {
        Reply::Done => Ok(()),
        other => Err(unexpected(&other)),
    }
}

fn unexpected(reply: &Reply) -> Error {
    Error::service(ServiceFault::Protocol, format!("{reply:?} is not what was asked for"))
}

/// Asks on a connection of its own; the reply may take `patience`.
fn ask(socket: &Path, request: &Request, patience: Option<Duration>) -> Result<Reply> {
    let lost = |error: io::Error| {
        Error::service(
            ServiceFault::Away,
            format!(
                "{}: the connection was lost ({error}); try again, or look into the service's log",
                socket.display()
            ),
        )
    };
    let mut stream = UnixStream::connect(socket).map_err(|error| cannot_connect(socket, &error))?;
    stream.set_read_timeout(Some(PATIENCE)).and_then(|()| stream.set_write_timeout(Some(PATIENCE))).map_err(lost)?;
    // A service that refuses the connection may have hung up already; its answer can be read all the same.
    let sent = stream.write_all(&Hello::ours().encode());
    let mut welcome = [0; Welcome::BYTES];
    stream.read_exact(&mut welcome).map_err(|error| lost(sent.err().unwrap_or(error)))?;
    let welcome = Welcome::decode(&welcome).map_err(nonsense)?;
    if welcome.answer.is_err() {
        return Err(refused(&welcome, reply(&mut stream).ok()));
    }
    stream.set_read_timeout(patience).and_then(|()| stream.write_all(&request.encode(1))).map_err(lost)?;
    match reply(&mut stream).map_err(lost)?.map_err(nonsense)? {
        Reply::Failed(failure) | Reply::Goodbye(failure) => Err(failure.into()),
        reply => Ok(reply),
    }
}

/// The next reply, as far as its bytes come.
fn reply(stream: &mut UnixStream) -> io::Result<std::result::Result<Reply, Malformed>> {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header)?;
    let header = match Header::decode(&header) {
        Ok(header) => header,
        Err(malformed) => return Ok(Err(malformed)),
    };
    let mut body = vec![0; header.body_bytes as usize];
    stream.read_exact(&mut body)?;
    Ok(Reply::decode(header.kind, &body))
}

fn nonsense(error: Malformed) -> Error {
    Error::service(ServiceFault::Protocol, error.to_string())
}

/// Why nobody answers at `socket`.
pub(super) fn cannot_connect(socket: &Path, error: &io::Error) -> Error {
    let name = socket.display();
    if error.kind() != io::ErrorKind::PermissionDenied {
        let text = format!("{name}: {error}; start `kvhoist serve` there, or name the socket of one that runs");
        return Error::service(ServiceFault::Away, text);
    }
    let user = own_uid();
    let found = match fs::metadata(socket) {
        Ok(found) => format!("mode {:04o} of user {}, group {}", found.mode() & 0o7777, found.uid(), found.gid()),
        Err(error) => format!("a folder that this user may not enter ({error})"),
    };
    let text = format!(
        "{name}: found {found}, expected a socket that user {user} may open; start the service with --allow-uid {user} \
         or --socket-group, or run as its user"
    );
    Error::service(ServiceFault::Permission, text)
}

/// Why a service does not admit this process: in the service's words, if they have come.
pub(super) fn refused(welcome: &Welcome, reply: Option<std::result::Result<Reply, Malformed>>) -> Error {
    let Welcome { version_min, version_max, answer, .. } = *welcome;
    let fault = answer.err().unwrap_or(ServiceFault::Unavailable);
    let text = match (fault, reply) {
        (ServiceFault::Version, _) => {
            let Hello { version_min: ours_min, version_max: ours_max } = Hello::ours();
            format!(
                "the service speaks versions {version_min} to {version_max} of the protocol, this client {ours_min} \
                 to {ours_max}; update the older one"
            )
        }
        (_, Some(Ok(Reply::Goodbye(failure)))) => failure.text,
        _ => format!("the service refused the connection ({fault:?}) and gave no reason; look into its log"),
    };
    Error::service(fault, text)
}
