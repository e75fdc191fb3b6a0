//! Anonymous memory in huge pages.

use std::{io, ptr::NonNull};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Mappings are whole huge pages, if the system has them.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Anonymous memory.
pub(crate) struct Pages {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a mapping, which is the same on every thread; it is read and written through the one `Bounce` that has it.
unsafe impl Send for Pages {}
// SAFETY: nothing is read or written through `&self`.
unsafe impl Sync for Pages {}

impl Pages {
    pub(crate) fn map(bytes: usize) -> io::Result<Self> {
        let bytes = bytes.next_multiple_of(HUGE_PAGE_BYTES);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe {
            mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        }?;
        let start: NonNull<u8> = NonNull::new(start.cast()).expect("the system maps nothing at 0");
        // SAFETY: the mapping; a system without huge pages refuses, and may.
        _ = unsafe { madvise(start.as_ptr().cast(), bytes, Advice::LinuxHugepage) };
        Ok(Pages { start, bytes })
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping, which nobody uses any more.
        _ = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}
