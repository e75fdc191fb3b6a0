//! Memory that a client can lend to a service.

use std::{
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    sync::{PoisonError, RwLock},
};

use rustix::{
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create},
    io::Errno,
    mm::{MapFlags, ProtFlags, mmap, munmap},
};

use crate::{
    error::{Error, Result},
    panics::log,
};

/// A memfd, sealed against shrinking, mapped as a whole, for a client of the node's service to register.
///
/// The memory is zero at first and begins at a page. The system frees it when this value has been dropped and the
/// service has unmapped it. The service writes to it while blocks are loaded, so there is no reference to its bytes:
/// [`read`](Self::read) and [`write`](Self::write) copy them.
pub struct SharedMemory {
    fd: OwnedFd,
    start: *mut u8,
    len: usize,
    /// Held by the copies of [`read`](Self::read) and [`write`](Self::write), which would race otherwise.
    copying: RwLock<()>,
}

// SAFETY: the mapping lives as long as the value, and its bytes are only copied through pointers.
unsafe impl Send for SharedMemory {}
// SAFETY: the mapping lives as long as the value, and its bytes are only copied through pointers.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Allocates `len` bytes.
    ///
    /// # Errors
    /// [`Error::Argument`] for no bytes, [`Error::Io`] if the system refuses them.
    pub fn new(len: usize) -> Result<Self> {
        let failed = |op| move |error: Errno| Error::io(op, "a memfd", error.into());
        if len == 0 {
            return Err(Error::argument("len", "0", "1 byte or more"));
        }
        let fd = memfd_create(c"kvhoist", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(failed("create"))?;
        ftruncate(&fd, len as u64).map_err(failed("size"))?;
        fcntl_add_seals(&fd, SealFlags::SHRINK).map_err(failed("seal"))?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address of the kernel's choice, of a file that cannot shrink.
        let start =
            unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, &fd, 0) }.map_err(failed("map"))?;
        Ok(SharedMemory { fd, start: start.cast(), len, copying: RwLock::new(()) })
    }

    /// Address of the first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always false: [`new`](SharedMemory::new) refuses 0 bytes.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The memfd.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Copies the bytes from `offset` on to `to`.
    ///
    /// # Panics
    /// If the range does not lie within the memory.
    pub fn read(&self, offset: usize, to: &mut [u8]) {
        assert!(offset <= self.len && to.len() <= self.len - offset, "a range within the memory");
        let _copying = self.copying.read().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the range is mapped. The service may write to it meanwhile; `to` then has a mix of old and new bytes,
        // all of which are valid.
        unsafe { std::ptr::copy_nonoverlapping(self.start.add(offset).cast_const(), to.as_mut_ptr(), to.len()) };
    }

    /// Copies `from` to the bytes from `offset` on. Where the memory is registered, the contract of
    /// [`Memory::shared`](crate::memory::Memory::shared) says when.
    ///
    /// # Panics
    /// If the range does not lie within the memory.
    pub fn write(&self, offset: usize, from: &[u8]) {
        assert!(offset <= self.len && from.len() <= self.len - offset, "a range within the memory");
        let _copying = self.copying.write().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the range is mapped, no reference to it exists, and no other copy is made meanwhile. Its registrar
        // promised that no block is stored from the range or loaded into it now.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.start.add(offset), from.len()) };
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length. A service that has the memfd mapped keeps its pages.
        if let Err(error) = unsafe { munmap(self.start.cast(), self.len) } {
            log(|| tracing::error!(%error, fd = self.fd.as_raw_fd(), "munmap"));
        }
    }
}

debug_fields!(SharedMemory, memory => len: memory.len);
