//! A connection that sends whatever a kind of hostility wants.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd},
        unix::net::UnixStream,
    },
    path::Path,
    time::Duration,
};

use kvhoist_service::internals::protocol::{
    HEADER_BYTES, Header, Hello, RegionKind, Reply, Request, SpaceDevice, Welcome,
};

use crate::options::Outcome;

pub const BLOCK_BYTES: usize = 64 << 10;
/// The space of the client that is measured.
pub const SPACE: &str = "hostile";

pub struct Raw {
    pub stream: UnixStream,
    id: u64,
}

impl Raw {
    /// Connected, and nothing said.
    pub fn connect(socket: &Path) -> Outcome<Self> {
        let stream = UnixStream::connect(socket)?;
        // A service without a descriptor to spare lets a connection wait.
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        stream.set_write_timeout(Some(Duration::from_secs(10)))?;
        Ok(Raw { stream, id: 0 })
    }

    pub fn greeted(socket: &Path) -> Outcome<Self> {
        let mut raw = Raw::connect(socket)?;
        raw.stream.write_all(&Hello::ours().encode())?;
        raw.stream.read_exact(&mut [0; Welcome::BYTES])?;
        Ok(raw)
    }

    /// In a space of hostile clients only.
    pub fn attached(socket: &Path) -> Outcome<Self> {
        Raw::attached_to(socket, "hostile clients", 4 << 20)
    }

    /// In a space of this name, which has so many bytes on disk and of host memory if it is made now.
    pub fn attached_to(socket: &Path, space: &str, bytes: u64) -> Outcome<Self> {
        let mut raw = Raw::greeted(socket)?;
        match raw.ask(&attach(space, bytes, bytes))? {
            Reply::Attached { .. } => Ok(raw),
            other => Err(format!("an attach: {other:?}").into()),
        }
    }

    /// A number for the next request.
    pub fn next_id(&mut self) -> u64 {
        self.id += 1;
        self.id
    }

    pub fn ask(&mut self, request: &Request) -> Outcome<Reply> {
        let frame = request.encode(self.next_id());
        self.stream.write_all(&frame)?;
        self.reply()
    }

    /// Asks, with a descriptor.
    pub fn ask_with(&mut self, request: &Request, fd: BorrowedFd<'_>) -> Outcome<Reply> {
        let frame = request.encode(self.next_id());
        self.send_with(&frame, &[fd])?;
        self.reply()
    }

    pub fn reply(&mut self) -> Outcome<Reply> {
        let mut header = [0; HEADER_BYTES];
        self.stream.read_exact(&mut header)?;
        let header = Header::decode(&header)?;
        let mut body = vec![0; header.body_bytes as usize];
        self.stream.read_exact(&mut body)?;
        Ok(Reply::decode(header.kind, &body)?)
    }

    /// Reads until the service hangs up.
    pub fn hung_up(mut self) {
        drop(io::copy(&mut self.stream, &mut io::sink()));
    }

    /// Sends bytes and descriptors, at most 126, together.
    pub fn send_with(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Outcome<()> {
        let numbers: Vec<libc::c_int> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let data_bytes = size_of_val(&numbers[..]) as libc::c_uint;
        let mut control = [0u64; 66];
        let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        // SAFETY: plain arithmetic.
        let control_bytes = unsafe { libc::CMSG_SPACE(data_bytes) } as usize;
        if control_bytes > size_of_val(&control) {
            return Err(format!("{} descriptors: at most 126 are sent at a time", fds.len()).into());
        }
        // SAFETY: all zero is an empty message; it then names buffers that outlive the call, with their lengths, and
        // the control buffer has room for a header with these descriptors.
        let sent = unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            message.msg_iov = &raw mut part;
            message.msg_iovlen = 1;
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = control_bytes as _;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(data_bytes) as _;
            let data = libc::CMSG_DATA(header);
            std::ptr::copy_nonoverlapping(numbers.as_ptr().cast::<u8>(), data, data_bytes as usize);
            libc::sendmsg(self.stream.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
        };
        if usize::try_from(sent).ok() != Some(bytes.len()) {
            let error = io::Error::last_os_error();
            return Err(format!("a frame of {} bytes: {sent} sent ({error})", bytes.len()).into());
        }
        Ok(())
    }
}

pub fn attach(space: &str, capacity_bytes: u64, host_bytes: u64) -> Request {
    let (namespace, block_bytes) = (space.to_owned(), BLOCK_BYTES as u64);
    Request::Attach { namespace, block_bytes, capacity_bytes, host_bytes, shared: false, device: SpaceDevice::None }
}

pub fn register(region: u32, offset: u64, len: u64) -> Request {
    Request::Register { region, kind: RegionKind::Host, pin: false, offset, len }
}

/// Memory of so many bytes, which takes seals or none; it has no pages.
pub fn memfd(sealable: bool, len: u64) -> Outcome<File> {
    let flags = libc::MFD_CLOEXEC | if sealable { libc::MFD_ALLOW_SEALING } else { 0 };
    // SAFETY: a name that ends with 0; the result is checked before it is used.
    let fd = unsafe { libc::memfd_create(c"hostile".as_ptr(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error().into());
    }
    // SAFETY: a descriptor just made, owned by nobody else.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(len)?;
    Ok(file)
}
