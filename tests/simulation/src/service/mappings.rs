//! The memory of clients as the service has it mapped. Memory that was unmapped stays in its place, with a pattern, so
//! that a late write is found, whatever code makes it.

use std::{cell::RefCell, collections::BTreeMap};

/// What memory holds that was unmapped.
const UNMAPPED: u8 = 0x9d;

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
