//! Memory that a client can lend to a service.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

use crate::error::{Error, Result};

/// A memfd, sealed against shrinking, mapped as a whole, for a [`Client`](crate::service::Client) to register.
///
/// The memory is zero at first, begins at a page and is given back with the last holder: the service, while it has it
/// mapped, is one. Another process writes to it while blocks are loaded, so it is read and written by copies.
pub struct SharedMemory {
    fd: OwnedFd,
    start: *mut u8,
    len: usize,
}

// SAFETY: an address of memory that lives as long as the value; all access is by copies through pointers.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Takes `len` bytes from the system.
    ///
    /// # Errors
    /// [`Error::Argument`] for no bytes, [`Error::Io`] if the system refuses them.
    pub fn new(len: usize) -> Result<Self> {
        let failed = |op| move |error| Error::io(op, "a memfd", error);
        if len == 0 {
            return Err(Error::argument("len", "0", "1 byte or more"));
        }
        // SAFETY: a name that ends with 0; the result is checked before it is used.
        let fd = unsafe { libc::memfd_create(c"kvhoist".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
        if fd < 0 {
            return Err(failed("create")(io::Error::last_os_error()));
        }
        // SAFETY: a descriptor just made, with no other owner.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        file.set_len(len as u64).map_err(failed("size"))?;
        // SAFETY: plain system call without memory.
        if unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, libc::F_SEAL_SHRINK) } != 0 {
            return Err(failed("seal")(io::Error::last_os_error()));
        }
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, at an address of the kernel's choice, of a file that cannot shrink.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, access, libc::MAP_SHARED, fd, 0) };
        if start == libc::MAP_FAILED {
            return Err(failed("map")(io::Error::last_os_error()));
        }
        Ok(SharedMemory { fd: file.into(), start: start.cast(), len })
    }

    /// Its first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    /// Its bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: see [`new`](SharedMemory::new).
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The memfd.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Copies bytes out of it.
    ///
    /// # Panics
    /// Where the range is not wholly within the memory.
    pub fn read(&self, offset: usize, to: &mut [u8]) {
        assert!(offset <= self.len && to.len() <= self.len - offset, "a range within the memory");
        // SAFETY: the range is mapped. Another process may write to it meanwhile, which makes the bytes a mix of old
        // and new ones: any bytes are valid.
        unsafe { std::ptr::copy_nonoverlapping(self.start.add(offset).cast_const(), to.as_mut_ptr(), to.len()) };
    }

    /// Copies bytes into it.
    ///
    /// # Panics
    /// Where the range is not wholly within the memory.
    pub fn write(&self, offset: usize, from: &[u8]) {
        assert!(offset <= self.len && from.len() <= self.len - offset, "a range within the memory");
        // SAFETY: the range is mapped, and no reference to it exists.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.start.add(offset), from.len()) };
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length. A service that has the memfd mapped keeps its pages.
        let refused = unsafe { libc::munmap(self.start.cast(), self.len) };
        if refused != 0 {
            tracing::error!(error = %io::Error::last_os_error(), fd = self.fd.as_raw_fd(), "munmap");
        }
    }
}

impl std::fmt::Debug for SharedMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedMemory").field("len", &self.len).finish_non_exhaustive()
    }
}
