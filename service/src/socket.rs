//! Unix sockets that carry descriptors.

use std::{
    fs,
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::{
            fs::{FileTypeExt, PermissionsExt},
            net::UnixListener,
        },
    },
    path::Path,
};

use rustix::{
    fs::{AtFlags, FileType, Gid, Mode, OFlags, chownat, fchmod, fstat, open},
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, recv, recvmsg, sendmsg, socket_with,
    },
};

use super::{peers::own_uid, place::Place};
use crate::error::{Error, Result};

/// Descriptors that a message of ours has at most, and that one of anybody's has: the kernel's `SCM_MAX_FD`.
const DESCRIPTORS_MAX: usize = 2;
const ANY_DESCRIPTORS_MAX: usize = 253;
const CONTROL_BYTES: usize = control_bytes(ANY_DESCRIPTORS_MAX).next_multiple_of(align_of::<libc::cmsghdr>());
/// Connections that wait to be accepted.
const BACKLOG: i32 = 256;
/// Bytes of a socket's name: the kernel wants a zero behind it.
const NAME_BYTES_MAX: usize = 107;

/// A header and so many descriptors. The kernel puts another one into the padding behind an odd number of them, if it
/// is told of that.
const fn control_bytes(descriptors: usize) -> usize {
    size_of::<libc::cmsghdr>() + descriptors * size_of::<BorrowedFd<'_>>()
}

/// Room for descriptors, aligned as the kernel wants it.
#[repr(C, align(8))]
struct Control([MaybeUninit<u8>; CONTROL_BYTES]);

impl Control {
    fn new() -> Self {
        Control([MaybeUninit::uninit(); CONTROL_BYTES])
    }
}

/// What a file is that is no socket.
pub(super) fn no_socket(found: &fs::Metadata) -> Option<&'static str> {
    match found.file_type() {
        kind if kind.is_socket() => None,
        kind if kind.is_dir() => Some("a folder"),
        _ => Some("a file that is no socket"),
    }
}

/// Receives available bytes into `buf` without waiting. 0 bytes: the peer has hung up. Descriptors that come with them
/// are closed by the kernel, in this thread.
pub(super) fn receive(socket: BorrowedFd<'_>, buf: &mut [u8]) -> io::Result<usize> {
    Ok(recv(socket, buf, RecvFlags::DONTWAIT)?.0)
}

/// Looks at available bytes without receiving them; whether descriptors come with them.
pub(super) fn peek(socket: BorrowedFd<'_>, buf: &mut [u8]) -> io::Result<(usize, bool)> {
    // The kernel's copies of the descriptors are not the last ones: nothing is closed.
    let mut none = RecvAncillaryBuffer::new(&mut []);
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let seen = recvmsg(socket, &mut [IoSliceMut::new(buf)], &mut none, flags)?;
    Ok((seen.bytes, seen.flags.contains(ReturnFlags::CTRUNC)))
}

/// Receives as [`receive`], and gives each descriptor to `each`: none is closed in this thread. Whether some were lost,
/// for which this process has no room.
pub(super) fn receive_all(
    socket: BorrowedFd<'_>,
    buf: &mut [u8],
    mut each: impl FnMut(OwnedFd),
) -> io::Result<(usize, bool)> {
    let mut control = Control::new();
    let mut control = RecvAncillaryBuffer::new(&mut control.0[..control_bytes(ANY_DESCRIPTORS_MAX)]);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = recvmsg(socket, &mut [IoSliceMut::new(buf)], &mut control, flags)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(came) = message {
            came.for_each(&mut each);
        }
    }
    Ok((received.bytes, received.flags.contains(ReturnFlags::CTRUNC)))
}

/// Receives all that has come, of a socket to which nothing comes any more, and drops it, with its descriptors: in this
/// thread.
pub(super) fn drain(socket: BorrowedFd<'_>) {
    let mut bytes = [0; 16 << 10];
    loop {
        match receive(socket, &mut bytes) {
            Ok(0) => return,
            Err(error) if error.kind() != io::ErrorKind::Interrupted => return,
            _ => {}
        }
    }
}

/// Sends as much as the socket takes without waiting; the descriptors, two at most, go with the first byte.
pub(super) fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut control = Control::new();
    let mut control = SendAncillaryBuffer::new(&mut control.0);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "there is room for {DESCRIPTORS_MAX}");
    }
    Ok(sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?)
}

/// Has a socket, and those that it accepts, take descriptors or none: a peer's message with one is not sent then.
/// Before Linux 6.16 all take them.
pub(super) fn take_descriptors(socket: BorrowedFd<'_>, takes: bool) {
    // linux/include/uapi/asm-generic/socket.h
    const SO_PASSRIGHTS: libc::c_int = 83;
    let (value, len) = (libc::c_int::from(takes), size_of::<libc::c_int>() as libc::socklen_t);
    let fd = socket.as_raw_fd();
    // SAFETY: reads `value`, which has `len` bytes.
    let _unknown_to_the_kernel =
        unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, SO_PASSRIGHTS, (&raw const value).cast(), len) };
}

/// Listens at `path`, which must not exist. The socket has `mode`, and `group` where one is given, before anybody can
/// connect. What is at `path` then is told, too: whoever can connect can delete it and put another there.
pub(super) fn listen(path: &Path, mode: u32, group: Option<u32>) -> Result<(UnixListener, Place)> {
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
    if group.is_some() || mode != 0o600 {
        // What the name leads to now, which is asked and changed by this descriptor only: whoever may write to the
        // folder may have put a link or another file there.
        let place = open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty());
        let place = place.map_err(refused("open"))?;
        let found = fstat(&place).map_err(refused("stat"))?;
        if FileType::from_raw_mode(found.st_mode) != FileType::Socket
            || found.st_uid != own_uid()
            || found.st_nlink != 1
        {
            let todo = "use a folder that only the service's user may write to";
            return Err(Error::store(path, "a file that took its place", "the socket that was just made", todo));
        }
        if group.is_some() {
            let given = chownat(&place, c"", None, group.map(Gid::from_raw), AtFlags::EMPTY_PATH);
            given.map_err(refused("give the group to"))?;
        }
        // Under any umask. The mode of a descriptor of this kind is set by its name in /proc, which is a link to it.
        let name = format!("/proc/self/fd/{}", place.as_raw_fd());
        fs::set_permissions(name, fs::Permissions::from_mode(mode)).map_err(failed("set the mode of"))?;
    }
    let place = Place::of(path);
    // Who is not attached has none to send, and the close of one that nobody has received may never end.
    take_descriptors(socket.as_fd(), false);
    rustix::net::listen(&socket, BACKLOG).map_err(refused("listen at"))?;
    Ok((UnixListener::from(socket), place))
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
        assert_eq!(send(ours.as_fd(), b"first", &[]).expect("room"), 5);
        assert_eq!(send(ours.as_fd(), b"second", &[file.as_fd()]).expect("room"), 6);
        assert_eq!(send(ours.as_fd(), b"third", &[]).expect("room"), 5);
        let (mut bytes, mut fd, mut buf) = (Vec::<u8>::new(), None, [0; 100]);
        while bytes.len() < 16 {
            let (len, has_descriptor) = peek(theirs.as_fd(), &mut buf).expect("bytes");
            let mut came = None;
            let (received, lost) = receive_all(theirs.as_fd(), &mut buf[..len], |fd| came = Some(fd)).expect("bytes");
            assert_eq!((received, came.is_some(), lost), (len, has_descriptor, false));
            // No later than its first byte.
            bytes.extend(&buf[..len]);
            fd = fd.or(came);
            assert!(bytes.len() <= 5 || fd.is_some(), "{} bytes and no descriptor", bytes.len());
        }
        assert_eq!(bytes, b"firstsecondthird");
        assert_eq!(peek(theirs.as_fd(), &mut buf).expect_err("empty").kind(), io::ErrorKind::WouldBlock);
        drop(ours);
        assert_eq!(peek(theirs.as_fd(), &mut buf).expect("hung up"), (0, false));
        assert_eq!(receive(theirs.as_fd(), &mut buf).expect("hung up"), 0);
    }

    /// The name is another's by the time that the mode is set.
    #[test]
    fn a_mode_is_given_to_no_file_that_took_the_sockets_place() {
        use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
        let directory = tempfile::tempdir().expect("a directory");
        let (path, secret) = (directory.path().join("socket"), directory.path().join("secret"));
        std::fs::write(&secret, "of the service's user").expect("written");
        std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).expect("set");
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let link = directory.path().join("link");
                while !ended.load(Relaxed) {
                    drop(std::os::unix::fs::symlink(&secret, &link));
                    // Only where the socket is there: in its place.
                    if path.exists() {
                        drop(std::fs::rename(&link, &path));
                    }
                }
            });
            for _ in 0..2000 {
                drop(listen(&path, 0o666, None));
                drop(std::fs::remove_file(&path));
            }
            ended.store(true, Relaxed);
        });
        assert_eq!(std::fs::metadata(&secret).expect("there").permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_socket_is_its_owners_alone_from_the_beginning() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("socket");
        let (listener, place) = listen(&path, 0o600, None).expect("listening");
        assert!(place.is_at(&path));
        assert_eq!(std::fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
        let client = UnixStream::connect(&path).expect("accepted");
        client.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
        listener.accept().expect("a client");
        listen(&path, 0o600, None).expect_err("the name is taken");
        listen(&directory.path().join("x".repeat(200)), 0o600, None).expect_err("too long");
    }
}
