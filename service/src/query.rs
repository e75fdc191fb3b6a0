//! Single questions to a service, on the caller's thread.

use std::{
    ffi::OsString,
    fs,
    io::{self, Read, Write},
    os::{
        fd::OwnedFd,
        unix::{fs::MetadataExt, net::UnixStream},
    },
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::net::{
    self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with,
    sockopt::{Timeout, set_socket_timeout},
};

use super::{
    peers::own_uid,
    protocol::{HEADER_BYTES, Header, Hello, Malformed, Reply, Request, ServiceStatus, Welcome},
    socket::no_socket,
};
use crate::error::{Error, Result, ServiceFault};

/// How long a service may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long it may take to delete the files of a space: a file system frees some TiB a minute.
const REMOVAL_PATIENCE: Duration = Duration::from_secs(120);
/// Where packages and containers have the service's socket.
const PACKAGED: &str = "/run/kvhoist";

/// The socket of a service that nobody named: `$KVHOIST_SOCKET`; else `kvhoist.sock` in `/run/kvhoist`, where that
/// folder exists, else in `$XDG_RUNTIME_DIR`, else in `/run`. `kvhoist serve` listens there, and its clients connect to
/// it.
pub fn default_socket() -> PathBuf {
    socket_of(|name| std::env::var_os(name), Path::new(PACKAGED).is_dir())
}

fn socket_of(variable: impl Fn(&str) -> Option<OsString>, is_packaged: bool) -> PathBuf {
    let folder = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    folder("KVHOIST_SOCKET").unwrap_or_else(|| {
        let packaged = is_packaged.then(|| PACKAGED.into());
        packaged.or(folder("XDG_RUNTIME_DIR")).unwrap_or_else(|| "/run".into()).join("kvhoist.sock")
    })
}

/// A service's figures, and those of its spaces and clients. Blocks the thread, for at most 10 s if the service
/// hangs.
///
/// # Errors
/// [`Error::Service`]: [`ServiceFault::Away`] if none answers, [`ServiceFault::Permission`],
/// [`ServiceFault::Version`], [`ServiceFault::Busy`].
pub fn status(socket: &Path) -> Result<ServiceStatus> {
    match ask(socket, &Request::Status, PATIENCE)? {
        Reply::Status(status) => Ok(*status),
        other => Err(unexpected(&other)),
    }
}

/// Removes a space with all its blocks, for good: this user's own, or, if `shared`, the one that users share, for the
/// user who made it and the service's. Blocks the thread until its files are deleted, for at most two minutes.
///
/// # Errors
/// As [`status`]; [`ServiceFault::Busy`] while clients are attached to it, [`ServiceFault::Argument`] if there is
/// none, [`ServiceFault::Permission`] for a shared space of another user, [`ServiceFault::Io`] if its files cannot be
/// deleted, [`ServiceFault::Timeout`] if they are not by then; the removal goes on.
pub fn remove_space(socket: &Path, namespace: &str, block_bytes: u64, shared: bool) -> Result<()> {
    let request = Request::RemoveSpace { namespace: namespace.into(), block_bytes, shared };
    match ask(socket, &request, REMOVAL_PATIENCE)? {
        Reply::Done => Ok(()),
        other => Err(unexpected(&other)),
    }
}

pub(super) fn unexpected(reply: &Reply) -> Error {
    Error::service(ServiceFault::Protocol, format!("{reply:?} is not what was asked for"))
}

/// What to do about a service that does not answer, and about one that takes long to remove a space.
const HANGS: &str = "the service hangs: look into its log, and end it if it does not come back";
const GOES_ON: &str = "the removal goes on: look with `kvhoist status`, and into the service's log";

/// The error of a connection that breaks, or has been silent for `patience`.
fn lost(socket: &Path, patience: Duration, advice: &str) -> impl Fn(io::Error) -> Error {
    move |error| {
        if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) {
            let text = format!("{}: no answer within {} s; {advice}", socket.display(), patience.as_secs_f64());
            return Error::service(ServiceFault::Timeout, text);
        }
        Error::service(
            ServiceFault::Away,
            format!(
                "{}: the connection was lost ({error}); try again, or look into the service's log",
                socket.display()
            ),
        )
    }
}

/// Connects, where a service that accepts nobody may be so for `patience`: its backlog may be full. A write may take as
/// long.
fn connect(socket: &Path, patience: Duration) -> Result<UnixStream> {
    let connected = (|| -> io::Result<OwnedFd> {
        let address = SocketAddrUnix::new(socket)?;
        let ours = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        set_socket_timeout(&ours, Timeout::Send, Some(patience))?;
        net::connect(&ours, &address)?;
        Ok(ours)
    })();
    match connected {
        Ok(ours) => Ok(ours.into()),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(not_accepted(socket, patience)),
        Err(error) => Err(cannot_connect(socket, &error)),
    }
}

/// The error of a connection for which there was no room among those that wait to be accepted.
pub(super) fn not_accepted(socket: &Path, patience: Duration) -> Error {
    let text = format!(
        "{}: the service accepted no connection within {} s: too many clients connect at once, or {HANGS}",
        socket.display(),
        patience.as_secs_f64()
    );
    Error::service(ServiceFault::Timeout, text)
}

/// Connects, as far as the service admits this process. Its answers may take [`PATIENCE`].
pub(super) fn greet(socket: &Path) -> Result<UnixStream> {
    let lost = lost(socket, PATIENCE, HANGS);
    let mut stream = connect(socket, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE)).map_err(&lost)?;
    // A service that refuses the connection may have hung up already; its answer can be read all the same.
    let sent = stream.write_all(&Hello::ours().encode());
    let mut welcome = [0; Welcome::BYTES];
    stream.read_exact(&mut welcome).map_err(|error| lost(sent.err().unwrap_or(error)))?;
    let welcome = Welcome::decode(&welcome).map_err(nonsense)?;
    match welcome.answer {
        Ok(_) => Ok(stream),
        Err(_) => Err(refused(&welcome, reply(&mut stream).ok())),
    }
}

/// Asks on a connection of its own; the reply may take `patience`.
fn ask(socket: &Path, request: &Request, patience: Duration) -> Result<Reply> {
    let lost = lost(socket, patience, if matches!(request, Request::RemoveSpace { .. }) { GOES_ON } else { HANGS });
    let mut stream = greet(socket)?;
    stream.set_read_timeout(Some(patience)).and_then(|()| stream.write_all(&request.encode(1))).map_err(&lost)?;
    match reply(&mut stream).map_err(&lost)?.map_err(nonsense)? {
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

pub(super) fn nonsense(error: Malformed) -> Error {
    Error::service(ServiceFault::Protocol, error.to_string())
}

/// What was found where a socket was expected.
pub(super) fn found(socket: &Path, error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => "found no socket".to_owned(),
        io::ErrorKind::ConnectionRefused => match other_file(socket) {
            Some(other) => format!("found {other}, expected a service's socket"),
            None => "found nobody who listens there".to_owned(),
        },
        _ => error.to_string(),
    }
}

/// What is at a socket's place and is no socket: of that too, the kernel says that the connection was refused.
fn other_file(socket: &Path) -> Option<&'static str> {
    fs::metadata(socket).ok().and_then(|found| no_socket(&found))
}

/// Why nobody answers at `socket`.
pub(super) fn cannot_connect(socket: &Path, error: &io::Error) -> Error {
    let name = socket.display();
    if error.kind() != io::ErrorKind::PermissionDenied {
        let start = if other_file(socket).is_some() { "" } else { "start `kvhoist serve` there, or " };
        let text = format!("{name}: {}; {start}name the socket of a service that runs", found(socket, error));
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

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixListener, thread};

    use super::*;
    use crate::protocol::Limits;

    #[test]
    fn a_socket_that_nobody_names_is_where_the_service_is() {
        let of = |variables: &[(&str, &str)], is_packaged| {
            let value = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into());
            socket_of(value, is_packaged).display().to_string()
        };
        let (named, own) = (("KVHOIST_SOCKET", "/a/s"), ("XDG_RUNTIME_DIR", "/run/user/7"));
        assert_eq!(of(&[named, own], true), "/a/s");
        assert_eq!(of(&[("KVHOIST_SOCKET", ""), own], true), "/run/kvhoist/kvhoist.sock");
        assert_eq!(of(&[own], false), "/run/user/7/kvhoist.sock");
        assert_eq!(of(&[], false), "/run/kvhoist.sock");
    }

    #[test]
    fn a_service_that_accepts_nobody_does_not_hold_up_who_connects() {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("s");
        let listener = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).expect("one");
        net::bind(&listener, &SocketAddrUnix::new(&socket).expect("short")).expect("bound");
        net::listen(&listener, 1).expect("listens");
        // The kernel keeps those that come first for it, also where they have gone.
        let mut refused = None;
        for _ in 0..4 {
            refused = connect(&socket, Duration::from_millis(20)).err();
        }
        match refused {
            Some(Error::Service { fault: ServiceFault::Timeout, text }) => {
                assert!(text.contains("accepted no connection"), "{text}");
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_service_that_hangs_does_not_hold_up_who_asks_and_is_said_to_hang() {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("s");
        let listener = UnixListener::bind(&socket).expect("bound");
        let hangs = thread::spawn(move || {
            for _ in 0..2 {
                let (mut stream, _) = listener.accept().expect("a client");
                let welcome = Welcome::new(Ok(Hello::ours().version_max), Limits::new(7, 8, 1 << 40));
                stream.write_all(&welcome.encode()).expect("sent");
                // Until the client is gone.
                while stream.read(&mut [0; 64]).is_ok_and(|bytes| bytes > 0) {}
            }
        });
        let removal = Request::RemoveSpace { namespace: "a".into(), block_bytes: 4096, shared: false };
        for (request, wanted) in [(removal, "; the removal goes on: "), (Request::Status, "; the service hangs: ")] {
            match ask(&socket, &request, Duration::from_millis(20)) {
                Err(Error::Service { fault: ServiceFault::Timeout, text }) => assert!(text.contains(wanted), "{text}"),
                other => panic!("{other:?}"),
            }
        }
        hangs.join().expect("it was hung up");
    }
}
