//! Anonymous mappings, for host slots and simulated device memory.

use std::{io, ptr::NonNull};

use rustix::{
    io::Errno,
    mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap},
    param::page_size,
};

use crate::fork::Home;

/// The huge page size. Mappings are aligned to it, so that their first and last slots are in huge pages too.
pub(super) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Zeroed, page-aligned memory, unmapped when dropped.
///
/// - Huge pages are advised (`MADV_HUGEPAGE`): fewer TLB misses, and fewer pages to pin for the ring and the device.
/// - Not inherited by `fork` (`MADV_DONTFORK`), and not unmapped by a forked child, which may have its own memory at
///   the same addresses. Inherited pages would be shared copy-on-write: the next write, by either process, moves that
///   process to a new copy, while a device that transfers under `O_DIRECT` or DMA keeps the old page, so that bytes
///   from disk would be lost. A forked child that touches this memory faults.
/// - Not in core dumps (`MADV_DONTDUMP`): they would be as large as the cache, and contain users' prompts.
pub struct Mapping {
    ptr: NonNull<u8>,
    len: usize,
    home: Home,
}

// SAFETY: the mapping is owned, and only hands out addresses. The owners of slots decide who may access them, under the
// contracts of `Lent::new` and `CopyBatch::new`.
unsafe impl Send for Mapping {}
// SAFETY: no method reads or writes the memory through `&self`.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps at least `len` bytes (`len` > 0). Memory is committed at its first write; only a lack of address space and
    /// the overcommit rule can fail here.
    pub fn anonymous(len: usize) -> io::Result<Self> {
        let page_bytes = page_size();
        let too_large = || io::Error::from(Errno::NOMEM);
        let len = len.checked_next_multiple_of(page_bytes).ok_or_else(too_large)?;
        if len < HUGE_PAGE_BYTES {
            return Self::map(len)?.advise();
        }
        // The system aligns to small pages: map more, and unmap what precedes and follows the aligned range.
        let slack = HUGE_PAGE_BYTES - page_bytes;
        let mut mapping = Self::map(len.checked_add(slack).ok_or_else(too_large)?)?;
        let head = mapping.ptr.as_ptr().align_offset(HUGE_PAGE_BYTES);
        assert!(head <= slack, "the next huge page begins {head} bytes on, past {slack}");
        mapping.trim(head, len)?;
        mapping.advise()
    }

    fn map(len: usize) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the system chooses affects no existing memory.
        let ptr = unsafe { mmap_anonymous(std::ptr::null_mut(), len, access, MapFlags::PRIVATE)? };
        let ptr = NonNull::new(ptr.cast()).ok_or_else(|| io::Error::other("mmap gave address 0"))?;
        Ok(Mapping { ptr, len, home: Home::here() })
    }

    /// Keeps only the `len` bytes from `head` on; both are multiples of a page, within the mapping.
    fn trim(&mut self, head: usize, len: usize) -> io::Result<()> {
        let tail = self.len - head - len;
        if tail > 0 {
            // SAFETY: the last `tail` bytes of our own mapping, which has no users yet.
            unsafe { munmap(self.ptr.add(head + len).as_ptr().cast(), tail)? };
            self.len -= tail;
        }
        if head > 0 {
            // SAFETY: the first `head` bytes of our own mapping, which has no users yet.
            unsafe { munmap(self.ptr.as_ptr().cast(), head)? };
            // SAFETY: the mapping has `len` more bytes from there on.
            self.ptr = unsafe { self.ptr.add(head) };
            self.len -= head;
        }
        Ok(())
    }

    fn advise(self) -> io::Result<Self> {
        // Optional: without huge pages the memory is only slower, and an old kernel may lack either advice.
        let _ = self.madvise(Advice::LinuxHugepage);
        let _ = self.madvise(Advice::LinuxDontDump);
        self.madvise(Advice::LinuxDontFork)?;
        Ok(self)
    }

    fn madvise(&self, advice: Advice) -> rustix::io::Result<()> {
        // SAFETY: the range is our own mapping, and the advice used here does not change its contents.
        unsafe { madvise(self.ptr.as_ptr().cast(), self.len, advice) }
    }

    /// Gives the memory of `len` bytes from `offset` on back to the system. They read as zeros from now on.
    ///
    /// # Safety
    /// Nothing else reads or writes the range, which begins and ends on pages.
    pub unsafe fn discard(&self, offset: usize, len: usize) -> io::Result<()> {
        assert!(offset <= self.len && len <= self.len - offset, "{len} bytes from {offset} of {}", self.len);
        // SAFETY: within our own mapping, and the caller promises that the contents are not needed.
        Ok(unsafe { madvise(self.ptr.as_ptr().add(offset).cast(), len, Advice::LinuxDontNeed) }?)
    }

    /// Commits all pages now, so that no later first write waits for the system to allocate and clear a page. Contents
    /// are unchanged.
    pub fn populate(&mut self) -> io::Result<()> {
        match self.madvise(Advice::LinuxPopulateWrite) {
            // Kernels before 5.14 have no such advice.
            Err(Errno::INVAL) => self.touch(),
            other => other?,
        }
        Ok(())
    }

    fn touch(&mut self) {
        for offset in (0..self.len).step_by(page_size()) {
            // SAFETY: `offset` is within the mapping, whose bytes are initialized (zero at first).
            let byte = unsafe { self.ptr.add(offset) };
            // SAFETY: within the mapping; `&mut self` is held before any slot is handed out, so nothing else writes
            // here. The byte keeps its value.
            unsafe { byte.write_volatile(byte.read_volatile()) };
        }
    }

    /// Its first byte.
    pub fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// Length in bytes, never 0.
    #[expect(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if !self.home.is_here() {
            return;
        }
        // SAFETY: our own mapping. A user of an address in it keeps its owner alive (contracts of `Lent::new` and
        // `CopyBatch::new`).
        let unmapped = unsafe { munmap(self.ptr.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap of {} bytes: {unmapped:?}", self.len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel's flags of the area that has all of a range. It may be larger: the kernel joins it with an equal one
    /// that another test has mapped beside it.
    fn flags_of(ptr: NonNull<u8>, len: usize) -> Option<String> {
        let smaps = std::fs::read_to_string("/proc/self/smaps").expect("procfs");
        let (start, mut is_found) = (ptr.as_ptr().addr(), false);
        let hex = |text: &str| usize::from_str_radix(text, 16).ok();
        for line in smaps.lines() {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            if let Some((from, to)) = range.and_then(|(from, to)| Some((hex(from)?, hex(to)?))) {
                is_found = from <= start && start + len <= to;
            } else if is_found && let Some(flags) = line.strip_prefix("VmFlags:") {
                return Some(flags.to_owned());
            }
        }
        None
    }

    #[test]
    fn a_mapping_is_advised_exact_and_gone_when_dropped() {
        // Not a multiple of the huge page, so that head and tail are both cut.
        let len = 3 * HUGE_PAGE_BYTES + 64 * 1024;
        let mapping = Mapping::anonymous(len).expect("6 MiB");
        let ptr = mapping.ptr();
        assert_eq!(mapping.len(), len, "no more is kept than was asked for");
        let flags = flags_of(ptr, len).expect("it is mapped");
        let flags: Vec<&str> = flags.split_whitespace().collect();
        assert!(flags.contains(&"dc"), "not copied by fork: {flags:?}");
        assert!(flags.contains(&"dd"), "not in core dumps: {flags:?}");
        drop(mapping);
        // Another thread may map the range next, and without this advice where it is no mapping like this one, whose
        // size no other test has.
        let flags = flags_of(ptr, len).unwrap_or_default();
        assert!(!flags.split_whitespace().any(|flag| flag == "dd"), "{flags}");
    }

    #[test]
    fn large_mappings_begin_on_a_huge_page_and_all_are_zero_and_writable() {
        for len in [1, 4096, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES + 1] {
            let mapping = Mapping::anonymous(len).expect("at most 4 MiB");
            assert!(mapping.len() >= len && mapping.len() < len + page_size());
            if mapping.len() >= HUGE_PAGE_BYTES {
                assert!(mapping.ptr().as_ptr().addr().is_multiple_of(HUGE_PAGE_BYTES));
            }
            // SAFETY: mapped, zeroed by the system, and used only by this test.
            let bytes = unsafe { std::slice::from_raw_parts_mut(mapping.ptr().as_ptr(), mapping.len()) };
            assert!(bytes.iter().all(|&byte| byte == 0));
            bytes.fill(1);
        }
    }

    #[test]
    fn populating_changes_no_byte() {
        let mut mapping = Mapping::anonymous(3 * 4096).expect("12 KiB");
        // SAFETY: mapped, and used only by this test.
        unsafe { mapping.ptr().write(7) };
        mapping.populate().expect("12 KiB");
        mapping.touch();
        // SAFETY: mapped, and used only by this test.
        assert_eq!(unsafe { mapping.ptr().read() }, 7);
    }

    #[test]
    fn what_the_system_cannot_map_is_an_error() {
        for len in [usize::MAX, isize::MAX.unsigned_abs(), 1 << 60] {
            let error = Mapping::anonymous(len).err().expect("more than the address space");
            assert_eq!(error.raw_os_error(), Some(libc::ENOMEM));
        }
    }
}
