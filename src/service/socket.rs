//! Unix sockets that carry descriptors.

use std::{
    collections::VecDeque,
    fs,
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::{
            fs::{PermissionsExt, lchown},
            net::UnixListener,
        },
    },
    path::Path,
};

use rustix::{
    fs::{Mode, fchmod},
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, recvmsg, sendmsg, socket_with,
    },
};

use crate::error::{Error, Result};

/// Descriptors in one message. A register frame has one.
const FDS_MAX: usize = 8;
const CONTROL_BYTES: usize = 16 + FDS_MAX * size_of::<BorrowedFd<'_>>();
/// Connections that wait to be accepted.
const BACKLOG: i32 = 256;
/// Bytes of a socket's name: the kernel wants a zero behind it.
const NAME_BYTES_MAX: usize = 107;

/// Room for descriptors, aligned as the kernel wants it.
#[repr(C, align(8))]
struct Control([MaybeUninit<u8>; CONTROL_BYTES]);

impl Control {
    fn new() -> Self {
        Control([MaybeUninit::uninit(); CONTROL_BYTES])
    }
}

/// Receives available bytes into `buf` without waiting. 0 bytes: the peer has hung up. Descriptors that come with the
/// bytes are appended to `fds`.
pub(super) fn receive(socket: BorrowedFd<'_>, buf: &mut [u8], fds: &mut VecDeque<OwnedFd>) -> io::Result<usize> {
    let mut control = Control::new();
    let mut control = RecvAncillaryBuffer::new(&mut control.0);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = recvmsg(socket, &mut [IoSliceMut::new(buf)], &mut control, flags)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(came) = message {
            fds.extend(came);
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        let text = format!(
            "descriptors of a message were lost: it had more than {FDS_MAX}, or this process may open no more (raise \
             LimitNOFILE, `ulimit -n`)"
        );
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    Ok(received.bytes)
}

/// Sends as much as the socket takes without waiting; `fd` goes with the first byte.
pub(super) fn send(socket: BorrowedFd<'_>, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<usize> {
    let mut control = Control::new();
    let mut control = SendAncillaryBuffer::new(&mut control.0);
    if fd.is_some() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fd.as_slice())), "there is room for {FDS_MAX}");
    }
    Ok(sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?)
}

/// Listens at `path`, which must not exist. The socket has `mode`, and `group` where one is given, before anybody can
/// connect.
pub(super) fn listen(path: &Path, mode: u32, group: Option<u32>) -> Result<UnixListener> {
    let failed = |op| move |error| Error::io(op, path, error);
    let refused = |op| move |error: Errno| Error::io(op, path, error.into());
    let bytes = path.as_os_str().len();
    let address = SocketAddrUnix::new(path).ok().filter(|_| bytes > 0).ok_or_else(|| {
        Error::argument("socket", format!("a path of {bytes} bytes"), format!("a path of 1 to {NAME_BYTES_MAX} bytes"))
    })?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let socket = socket.map_err(refused("make a socket for"))?;
    // Before it has a name, whose mode is the socket's, less the umask.
    fchmod(&socket, Mode::from_raw_mode(0o600)).map_err(refused("set the mode of"))?;
    rustix::net::bind(&socket, &address).map_err(refused("bind"))?;
    if let Some(group) = group {
        lchown(path, None, Some(group)).map_err(failed("give the group to"))?;
    }
    if mode != 0o600 {
        // Under any umask.
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(failed("set the mode of"))?;
    }
    rustix::net::listen(&socket, BACKLOG).map_err(refused("listen at"))?;
    Ok(UnixListener::from(socket))
}

#[cfg(test)]
mod tests {
    use std::{
        os::{fd::AsFd, unix::net::UnixStream},
        time::Duration,
    };

    use super::*;

    #[test]
    fn bytes_and_descriptors_arrive_together() {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let file = tempfile::tempfile().expect("a file");
        assert_eq!(send(ours.as_fd(), b"first", None).expect("room"), 5);
        assert_eq!(send(ours.as_fd(), b"second", Some(file.as_fd())).expect("room"), 6);
        assert_eq!(send(ours.as_fd(), b"third", None).expect("room"), 5);
        let (mut bytes, mut fds, mut buf) = (Vec::new(), VecDeque::new(), [0; 100]);
        while bytes.len() < 16 {
            let len = receive(theirs.as_fd(), &mut buf, &mut fds).expect("bytes");
            // No later than its first byte.
            bytes.extend(&buf[..len]);
            assert!(bytes.len() <= 5 || fds.len() == 1, "{} bytes and {} descriptors", bytes.len(), fds.len());
        }
        assert_eq!((&bytes[..], fds.len()), (&b"firstsecondthird"[..], 1));
        assert_eq!(receive(theirs.as_fd(), &mut buf, &mut fds).expect_err("empty").kind(), io::ErrorKind::WouldBlock);
        drop(ours);
        assert_eq!(receive(theirs.as_fd(), &mut buf, &mut fds).expect("hung up"), 0);
    }

    #[test]
    fn a_socket_is_its_owners_alone_from_the_beginning() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("socket");
        let listener = listen(&path, 0o600, None).expect("listening");
        assert_eq!(std::fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
        let client = UnixStream::connect(&path).expect("accepted");
        client.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
        listener.accept().expect("a client");
        listen(&path, 0o600, None).expect_err("the name is taken");
        listen(&directory.path().join("x".repeat(200)), 0o600, None).expect_err("too long");
    }
}
