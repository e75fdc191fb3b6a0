//! A connection that sends whatever a test wants.

use std::{
    io::{self, Read, Write},
    os::{
        fd::{AsRawFd, BorrowedFd},
        unix::net::UnixStream,
    },
    path::Path,
};

use kvhoist_service::internals::protocol::{HEADER_BYTES, Header, Hello, Reply, Request, SpaceDevice, Welcome};

use crate::node::{BLOCK_BYTES, DISK_BLOCKS, HANG, HOST_BLOCKS};

pub struct Raw {
    pub stream: UnixStream,
}

/// The request for a space of the tests' blocks, of so many on disk and in host memory; 0 for all that is left.
pub fn attach(namespace: &str, blocks: [u64; 2], device: SpaceDevice) -> Request {
    let [capacity_bytes, host_bytes] = blocks.map(|blocks| blocks * BLOCK_BYTES as u64);
    let (namespace, block_bytes, shared) = (namespace.to_owned(), BLOCK_BYTES as u64, false);
    Request::Attach { namespace, block_bytes, capacity_bytes, host_bytes, shared, device }
}

impl Raw {
    /// Connected, and nothing said.
    pub fn connect(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).expect("a service");
        stream.set_read_timeout(Some(HANG)).and_then(|()| stream.set_write_timeout(Some(HANG))).expect("set");
        Raw { stream }
    }

    /// After the handshake.
    pub fn greeted(socket: &Path) -> Self {
        let mut raw = Raw::connect(socket);
        raw.send(&Hello::ours().encode());
        assert_eq!(raw.welcome().answer, Ok(Hello::ours().version_max));
        raw
    }

    /// Attached to the tests' space.
    pub fn attached(socket: &Path) -> Self {
        Raw::attached_by(socket, &attach("tests", [DISK_BLOCKS, HOST_BLOCKS], SpaceDevice::None))
    }

    /// Attached by this request.
    pub fn attached_by(socket: &Path, attach: &Request) -> Self {
        let mut raw = Raw::greeted(socket);
        let reply = raw.ask(1, attach);
        assert!(matches!(reply, Reply::Attached { .. }), "{reply:?}");
        raw
    }

    /// Sends bytes, as far as the service still takes them.
    pub fn send(&mut self, bytes: &[u8]) {
        drop(self.stream.write_all(bytes));
    }

    pub fn welcome(&mut self) -> Welcome {
        let mut bytes = [0; Welcome::BYTES];
        self.stream.read_exact(&mut bytes).expect("a welcome");
        Welcome::decode(&bytes).expect("a good one")
    }

    /// The next reply; an error where the service has hung up.
    pub fn reply(&mut self) -> io::Result<(u64, Reply)> {
        let mut header = [0; HEADER_BYTES];
        self.stream.read_exact(&mut header)?;
        let header = Header::decode(&header).expect("a header");
        let mut body = vec![0; header.body_bytes as usize];
        self.stream.read_exact(&mut body)?;
        Ok((header.id, Reply::decode(header.kind, &body).expect("a reply")))
    }

    pub fn ask(&mut self, id: u64, request: &Request) -> Reply {
        self.send(&request.encode(id));
        let (found, reply) = self.reply().expect("a reply");
        assert!(found == id || matches!(reply, Reply::Goodbye(_)), "{reply:?}");
        reply
    }

    /// Asks, with a descriptor.
    pub fn ask_with(&mut self, id: u64, request: &Request, fd: BorrowedFd<'_>) -> Reply {
        self.send_with(&request.encode(id), &[fd]);
        let (found, reply) = self.reply().expect("a reply");
        assert_eq!(found, id, "{reply:?}");
        reply
    }

    /// Sends bytes and descriptors together.
    pub fn send_with(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        assert_eq!(self.try_send_with(bytes, fds), Some(bytes.len()));
    }

    /// As [`send_with`](Self::send_with); how many bytes the service still takes.
    pub fn try_send_with(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Option<usize> {
        self.try_send_flagged(bytes, fds, 0).ok()
    }

    /// As [`try_send_with`](Self::try_send_with), with flags of the system call.
    pub fn try_send_flagged(&self, bytes: &[u8], fds: &[BorrowedFd<'_>], flags: libc::c_int) -> io::Result<usize> {
        let numbers: Vec<libc::c_int> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let data_bytes = size_of_val(&numbers[..]) as libc::c_uint;
        let mut control = vec![0u64; 64];
        let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        // SAFETY: all zero is an empty message; it then names buffers that outlive the call, with their lengths, and
        // the control buffer has room for a header with these few descriptors.
        let sent = unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            message.msg_iov = &raw mut part;
            message.msg_iovlen = 1;
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(data_bytes) as _;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(data_bytes) as _;
            let data = libc::CMSG_DATA(header);
            std::ptr::copy_nonoverlapping(numbers.as_ptr().cast::<u8>(), data, data_bytes as usize);
            libc::sendmsg(self.stream.as_raw_fd(), &raw const message, flags | libc::MSG_NOSIGNAL)
        };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }

    /// As [`goodbye`](Self::goodbye), for a connection whose hello is refused.
    pub fn goodbye_of_hello(&mut self) -> String {
        self.welcome().answer.expect_err("refused");
        self.goodbye()
    }

    /// The service says why, and hangs up.
    pub fn goodbye(&mut self) -> String {
        let mut why = None;
        loop {
            match self.reply() {
                Ok((0, Reply::Goodbye(failure))) => why = Some(format!("{:?}: {}", failure.fault, failure.text)),
                Ok(_) => assert_eq!(why, None, "a goodbye is the last word"),
                Err(error) => {
                    let gone = [io::ErrorKind::UnexpectedEof, io::ErrorKind::ConnectionReset];
                    assert!(gone.contains(&error.kind()), "{error}");
                    return why.expect("a reason");
                }
            }
        }
    }
}
