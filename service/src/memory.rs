//! Clients' memory: memfds, and device memory, mapped by the service.
//!
//! An access to a mapping whose file has shrunk, or has got no page, raises SIGBUS, which ends the process. So the
//! service [guards](Guard) what it maps. It does not seal it: that waits for whoever changes the file, for as long as
//! its maker likes. It maps plain memory only: in a file system of huge pages a hole may be punched, and touched again
//! when no huge page is left.

use std::{cell::Cell, io, mem::ManuallyDrop, os::fd::OwnedFd};

use kvhoist::internals::service::{Guard, ImportedMemory};
use rustix::{
    fs::{fstat, fstatfs},
    io::Errno,
    mm::{MapFlags, ProtFlags, mmap, munmap},
};

use super::protocol::Failure;
use crate::error::ServiceFault;

/// Memory of another process, which may write to it at any time. Its content is not trusted.
///
/// Dropping it does not unmap it: a movement may still write to it.
pub struct Mapped {
    start: *mut u8,
    len: usize,
    /// The guard of a client's file.
    guard: Option<Guard>,
    /// Device memory, to be [taken out](Self::take_imported) before it is unmapped.
    imported: Cell<Option<ManuallyDrop<ImportedMemory>>>,
}

impl Mapped {
    /// Memory of a client's GPU.
    pub(super) fn imported(memory: ImportedMemory) -> Self {
        Mapped {
            start: memory.start(),
            len: memory.len(),
            guard: None,
            imported: Cell::new(Some(ManuallyDrop::new(memory))),
        }
    }

    /// The device memory, to be unmapped.
    pub(super) fn take_imported(&self) -> Option<ImportedMemory> {
        self.imported.take().map(ManuallyDrop::into_inner)
    }

    /// Its first byte.
    pub fn start(&self) -> *mut u8 {
        self.start
    }

    /// Its bytes.
    #[allow(clippy::len_without_is_empty, reason = "it is never empty; public with the feature `sim` only")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The guard of a client's file.
    pub(super) fn guard(&self) -> Option<&Guard> {
        self.guard.as_ref()
    }

    /// Whether its file had no page where it was used. Still known when it is unmapped.
    pub(super) fn is_spoiled(&self) -> bool {
        self.guard().is_some_and(Guard::is_spoiled)
    }

    /// Ends the guard. Before the memory is unmapped: the addresses may soon be another's.
    pub(super) fn end_guard(&self) {
        self.guard().iter().for_each(|guard| guard.end());
    }
}

/// Maps a range of a client's memfd, guarded.
///
/// # Errors
/// [`ServiceFault::Memory`] for a file that is no plain memory, for a range beyond its end, and if the system
/// refuses to map it.
pub fn map(fd: &OwnedFd, offset: u64, len: u64) -> Result<Mapped, Failure> {
    let refused = |found: String, expected: &str| {
        Failure::new(ServiceFault::Memory, format!("memory: found {found}, expected {expected}"))
    };
    let system =
        |op| move |error: Errno| refused(format!("{op}: {}", io::Error::from(error)), "a memfd that can be mapped");
    let page = rustix::param::page_size() as u64;
    let end = offset.checked_add(len).filter(|end| i64::try_from(*end).is_ok());
    let (Some(end), Ok(bytes)) = (end, usize::try_from(len)) else {
        return Err(refused(format!("{len} bytes from {offset} on"), "a range that ends before 2^63"));
    };
    if bytes == 0 || !offset.is_multiple_of(page) {
        let expected = format!("1 byte or more, from a multiple of {page} on");
        return Err(refused(format!("{len} bytes from {offset} on"), &expected));
    }
    check_kind(fd).map_err(|found| refused(found, "a memfd in plain memory"))?;
    let stat = fstat(fd).map_err(system("fstat"))?;
    if u64::try_from(stat.st_size).is_ok_and(|size| size < end) {
        return Err(refused(format!("a file of {} bytes", stat.st_size), &format!("one of {end} bytes or more")));
    }
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, at an address of the kernel's choice, of a file that is guarded below.
    let start = unsafe { mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, fd, offset) };
    let start = start.map_err(system("mmap"))?;
    let start = start.cast();
    match Guard::new(start, bytes) {
        Ok(guard) => Ok(Mapped { start, len: bytes, guard: Some(guard), imported: Cell::default() }),
        Err(error) => {
            // SAFETY: mapped above, and used nowhere.
            let _gone_with_the_process = unsafe { munmap(start.cast(), bytes) };
            Err(refused(format!("sigaction: {error}"), "a service that may handle SIGBUS"))
        }
    }
}

/// Refuses files that are not plain shared memory.
fn check_kind(fd: &OwnedFd) -> Result<(), String> {
    let stat =
        fstatfs(fd).map_err(|error| format!("a descriptor that has no file system ({})", io::Error::from(error)))?;
    match stat.f_type as u64 {
        kind if kind == libc::TMPFS_MAGIC as u64 => Ok(()),
        kind if kind == libc::HUGETLBFS_MAGIC as u64 => Err("a memfd in huge pages (MFD_HUGETLB)".into()),
        kind => Err(format!("a file in a file system of kind {kind:#x}")),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::fs::{MemfdFlags, SealFlags, fcntl_get_seals, ftruncate, memfd_create};

    use super::*;

    fn memfd(flags: MemfdFlags, len: u64) -> OwnedFd {
        let fd = memfd_create(c"test", flags | MemfdFlags::CLOEXEC).expect("a memfd");
        ftruncate(&fd, len).expect("a size");
        fd
    }

    fn refusal(fd: &OwnedFd, offset: u64, len: u64) -> String {
        let failure = map(fd, offset, len).err().expect("refused");
        assert_eq!(failure.fault, ServiceFault::Memory);
        failure.text
    }

    /// A seal waits for whoever changes the file: a write that its maker does not end.
    #[test]
    fn a_memfd_is_not_sealed() {
        let fd = memfd(MemfdFlags::ALLOW_SEALING, 8192);
        let mapped = map(&fd, 4096, 4096).expect("mapped");
        // SAFETY: mapped above, and written to by nobody else.
        unsafe { mapped.start().write(7) };
        assert_eq!(fcntl_get_seals(&fd).expect("its seals"), SealFlags::empty());
        // SAFETY: mapped above, and used nowhere.
        unsafe { libc::munmap(mapped.start().cast(), mapped.len()) };
    }

    #[test]
    fn memory_that_is_taken_away_reads_as_zeros() {
        let fd = memfd(MemfdFlags::ALLOW_SEALING, 8192);
        let mapped = map(&fd, 0, 8192).expect("mapped");
        // SAFETY: mapped above, and written to by nobody else.
        unsafe { mapped.start().add(5000).write(7) };
        assert!(!mapped.is_spoiled());
        File::from(fd).set_len(0).expect("it is not sealed");
        // SAFETY: mapped, if not by the file any more.
        assert_eq!(unsafe { mapped.start().add(5000).read_volatile() }, 0);
        assert!(mapped.is_spoiled(), "whoever lent it is to be told");
        mapped.end_guard();
        assert!(mapped.is_spoiled(), "also afterwards");
        // SAFETY: mapped above, and used nowhere.
        unsafe { libc::munmap(mapped.start().cast(), mapped.len()) };
    }

    #[test]
    fn what_is_no_plain_memory_is_refused() {
        let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).expect("a file");
        file.set_len(4096).expect("a size");
        assert!(refusal(&file.into(), 0, 4096).contains("file system of kind"));
        let (end, _other) = std::os::unix::net::UnixStream::pair().expect("a pair");
        assert!(refusal(&end.into(), 0, 4096).contains("kind"));
    }

    #[test]
    fn a_range_outside_the_file_is_refused() {
        let fd = memfd(MemfdFlags::ALLOW_SEALING, 8192);
        for (offset, len) in
            [(0, 0), (0, 8193), (4096, 8192), (8192, 1), (1, 4096), (u64::MAX - 4095, 4096), (0, u64::MAX)]
        {
            refusal(&fd, offset, len);
        }
    }
}
