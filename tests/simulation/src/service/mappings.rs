//! The memory of clients as the service has it mapped. Memory that was unmapped stays in its place, with a pattern, so
//! that a late write is found, whatever code makes it. The kernel keeps the pages of reads that a killed service has in
//! flight.

use std::{cell::RefCell, collections::BTreeMap};

/// What memory holds that was unmapped.
const UNMAPPED: u8 = 0x9d;

/// Memory of a client that the drives still write to after the service was killed.
pub struct Landing {
    /// The kernel's own mapping of the client's memory.
    start: *mut u8,
    len: usize,
    /// Where in the memory each read goes, and what it brings.
    reads: Vec<(usize, Vec<u8>)>,
}

impl Landing {
    /// Of these reads into a mapping that the service has.
    ///
    /// # Safety
    /// The range is a whole mapping of a client's memory, and each read lies within it.
    pub unsafe fn new(start: usize, len: usize, reads: Vec<(usize, Vec<u8>)>) -> Self {
        // SAFETY: a length of 0 makes a second mapping of shared memory, at an address of the kernel's choice, and
        // leaves the first.
        let start = unsafe { libc::mremap(std::ptr::with_exposed_provenance_mut(start), 0, len, libc::MREMAP_MAYMOVE) };
        assert!(start != libc::MAP_FAILED, "the system maps memory that is mapped already");
        Landing { start: start.cast(), len, reads }
    }

    /// Ends one of the reads; `None` if there is none.
    pub fn land(&mut self) -> Option<()> {
        let (at, bytes) = self.reads.pop()?;
        // SAFETY: it lies within the mapping, by the contract of `new`, and any bytes are valid there.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.add(at), bytes.len()) };
        Some(())
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length, and used here only.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}

#[derive(Default)]
pub struct Mappings(RefCell<BTreeMap<usize, usize>>);

impl Mappings {
    /// Puts the pattern in the place of a mapping.
    ///
    /// # Safety
    /// The range is a whole mapping that the service has made, and its owner has no use for it any longer.
    pub unsafe fn unmap(&self, start: *mut u8, len: usize) -> Result<(), String> {
        if self.0.borrow_mut().insert(start.expose_provenance(), len).is_some() {
            return Err(format!("{len} bytes at {start:p} are unmapped twice"));
        }
        let (access, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED);
        // SAFETY: the caller gives the range away; it stays mapped, so that no other mapping takes its place.
        let mapped = unsafe { libc::mmap(start.cast(), len, access, flags, -1, 0) };
        assert!(mapped == start.cast(), "the system maps memory where there was a mapping");
        // SAFETY: mapped above.
        unsafe { start.write_bytes(UNMAPPED, len) };
        Ok(())
    }

    /// Whether nothing was written to memory after it was unmapped. The addresses are the system's afterwards.
    pub fn check(&self) -> Result<(), String> {
        let mut result = Ok(());
        for (start, len) in self.0.take() {
            let start = std::ptr::with_exposed_provenance_mut::<u8>(start);
            // SAFETY: mapped by `unmap` with this length, and used by nobody any longer.
            let bytes = unsafe { std::slice::from_raw_parts(start, len) };
            if bytes.iter().any(|byte| *byte != UNMAPPED) {
                result = Err(format!("somebody wrote to {len} bytes of a client's memory after they were unmapped"));
            }
            // SAFETY: as above; no address of it is used from here on.
            unsafe { libc::munmap(start.cast(), len) };
        }
        result
    }
}
