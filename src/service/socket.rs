//! Unix sockets that carry descriptors.

use std::{
    collections::VecDeque,
    fs, io,
    mem::{size_of, zeroed},
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::{
            ffi::OsStrExt,
            fs::{PermissionsExt, lchown},
            net::UnixListener,
        },
    },
    path::Path,
};

use crate::error::{Error, Result};

/// Descriptors in one message. A register frame has one.
const FDS_MAX: usize = 8;
const CONTROL_BYTES: usize = 16 + FDS_MAX * size_of::<libc::c_int>();
/// Connections that wait to be accepted.
const BACKLOG: libc::c_int = 256;

/// Room for descriptors, aligned as the kernel wants it.
#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

/// Receives available bytes into `buf` without waiting. 0 bytes: the peer has hung up. Descriptors that come with the
/// bytes are appended to `fds`.
pub(super) fn receive(socket: BorrowedFd<'_>, buf: &mut [u8], fds: &mut VecDeque<OwnedFd>) -> io::Result<usize> {
    let mut control = Control([0; CONTROL_BYTES]);
    let mut part = libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() };
    // SAFETY: all zero is an empty message.
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut control).cast();
    message.msg_controllen = CONTROL_BYTES as _;
    // SAFETY: the message names `buf` and `control`, which outlive the call, with their lengths.
    let received =
        unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT) };
    let Ok(received) = usize::try_from(received) else { return Err(io::Error::last_os_error()) };
    take_fds(&message, fds);
    if message.msg_flags & libc::MSG_CTRUNC != 0 {
        let text = format!(
            "descriptors of a message were lost: it had more than {FDS_MAX}, or this process may open no more (raise \
             LimitNOFILE, `ulimit -n`)"
        );
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    Ok(received)
}

/// Takes ownership of the descriptors that came with a message.
fn take_fds(message: &libc::msghdr, fds: &mut VecDeque<OwnedFd>) {
    // SAFETY: the kernel has just filled in the message's control buffer, which is alive.
    let mut part = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !part.is_null() {
        // SAFETY: a header that CMSG_FIRSTHDR or CMSG_NXTHDR found lies wholly within the control buffer.
        let header = unsafe { part.read_unaligned() };
        if header.cmsg_level == libc::SOL_SOCKET && header.cmsg_type == libc::SCM_RIGHTS {
            // SAFETY: arithmetic on a length.
            let before = unsafe { libc::CMSG_LEN(0) } as usize;
            let count = (header.cmsg_len as usize).saturating_sub(before) / size_of::<libc::c_int>();
            // SAFETY: the data of a header lies behind it.
            let data = unsafe { libc::CMSG_DATA(part) }.cast::<libc::c_int>();
            for at in 0..count {
                // SAFETY: the length in the header covers `count` descriptors.
                let fd = unsafe { data.add(at).read_unaligned() };
                // SAFETY: the kernel has made this descriptor for this call; it has no other owner.
                fds.push_back(unsafe { OwnedFd::from_raw_fd(fd) });
            }
        }
        // SAFETY: as for CMSG_FIRSTHDR; `part` is one of its headers.
        part = unsafe { libc::CMSG_NXTHDR(message, part) };
    }
}

/// Sends as much as the socket takes without waiting; `fd` goes with the first byte.
pub(super) fn send(socket: BorrowedFd<'_>, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<usize> {
    let mut control = Control([0; CONTROL_BYTES]);
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: all zero is an empty message.
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    if let Some(fd) = fd {
        let fd_bytes = size_of::<libc::c_int>() as libc::c_uint;
        message.msg_control = (&raw mut control).cast();
        // SAFETY: arithmetic on a length.
        message.msg_controllen = unsafe { libc::CMSG_SPACE(fd_bytes) } as _;
        // SAFETY: the control buffer has room for a header with one descriptor, and is aligned for it.
        let header = unsafe { &mut *libc::CMSG_FIRSTHDR(&raw const message) };
        header.cmsg_level = libc::SOL_SOCKET;
        header.cmsg_type = libc::SCM_RIGHTS;
        // SAFETY: arithmetic on a length.
        header.cmsg_len = unsafe { libc::CMSG_LEN(fd_bytes) } as _;
        // SAFETY: the data of that header lies within the control buffer.
        unsafe { libc::CMSG_DATA(header).cast::<libc::c_int>().write_unaligned(fd.as_raw_fd()) };
    }
    // SAFETY: the message names `bytes` and `control`, which outlive the call; the kernel only reads them.
    let sent =
        unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Listens at `path`, which must not exist. The socket has `mode`, and `group` where one is given, before anybody can
/// connect.
pub(super) fn listen(path: &Path, mode: libc::mode_t, group: Option<u32>) -> Result<UnixListener> {
    let failed = |op| move |error| Error::io(op, path, error);
    // SAFETY: all zero is an unnamed address.
    let mut address: libc::sockaddr_un = unsafe { zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let name = path.as_os_str().as_bytes();
    // The kernel wants a zero behind the name.
    if name.is_empty() || name.len() >= address.sun_path.len() || name.contains(&0) {
        return Err(Error::argument(
            "socket",
            format!("a path of {} bytes", name.len()),
            format!("a path of 1 to {} bytes", address.sun_path.len() - 1),
        ));
    }
    for (to, from) in address.sun_path.iter_mut().zip(name) {
        *to = *from as libc::c_char;
    }
    // SAFETY: plain system call; the result is checked before it is used.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0) };
    if fd < 0 {
        return Err(failed("make a socket for")(io::Error::last_os_error()));
    }
    // SAFETY: a descriptor just made, with no other owner.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let checked = |op, result: libc::c_int| match result {
        0 => Ok(()),
        _ => Err(failed(op)(io::Error::last_os_error())),
    };
    // Before it has a name, whose mode is the socket's, less the umask.
    // SAFETY: plain system call on a descriptor that is ours.
    checked("set the mode of", unsafe { libc::fchmod(fd, 0o600) })?;
    let len = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    // SAFETY: the address outlives the call, and `len` is its length.
    checked("bind", unsafe { libc::bind(fd, (&raw const address).cast(), len) })?;
    if let Some(group) = group {
        lchown(path, None, Some(group)).map_err(failed("give the group to"))?;
    }
    if mode != 0o600 {
        // Under any umask.
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(failed("set the mode of"))?;
    }
    // SAFETY: plain system call on a descriptor that is ours.
    checked("listen at", unsafe { libc::listen(fd, BACKLOG) })?;
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
