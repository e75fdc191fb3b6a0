//! Memory and files that direct I/O accepts, gone without a trace when the bench ends.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
    path::Path,
    process,
    ptr::NonNull,
    slice,
    sync::atomic::{AtomicU64, Ordering},
};

use crate::{
    pattern,
    ring::{BareRing, Op, Setup},
};

/// Every address, offset and length of direct I/O is a multiple of this.
pub const ALIGN: usize = 4096;

/// `count` blocks in one mapping, in huge pages where the system has them: in small ones requests are as large as pages
/// happen to lie together, and that differs from run to run.
pub struct Slab {
    mapping: NonNull<u8>,
    mapped_bytes: usize,
    base: NonNull<u8>,
    block_bytes: usize,
    count: usize,
}

const HUGE_PAGE_BYTES: usize = 2 << 20;

// SAFETY: the only owner of its mapping, which is the same on every thread.
unsafe impl Send for Slab {}

impl Slab {
    /// Maps and touches the memory, so that no round pays for page faults.
    pub fn new(block_bytes: usize, count: usize) -> io::Result<Slab> {
        assert!(block_bytes > 0 && block_bytes.is_multiple_of(ALIGN), "{block_bytes} bytes is no multiple of {ALIGN}");
        // Whole huge pages, and room to begin on one.
        let bytes = (block_bytes * count).next_multiple_of(HUGE_PAGE_BYTES);
        let mapped_bytes = bytes + HUGE_PAGE_BYTES;
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: an anonymous mapping at an address of the kernel's choice touches no existing memory.
        let mapping = unsafe { libc::mmap(std::ptr::null_mut(), mapped_bytes, prot, flags, -1, 0) };
        if mapping == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let mapping: NonNull<u8> = NonNull::new(mapping.cast()).expect("mmap never returns null without MAP_FIXED");
        // SAFETY: less than a huge page on, and the mapping has one more than it needs.
        let base = unsafe { mapping.add(mapping.align_offset(HUGE_PAGE_BYTES)) };
        // SAFETY: within the mapping, which nothing else knows; a system without huge pages refuses, and may.
        unsafe { libc::madvise(base.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
        for page in (0..bytes).step_by(ALIGN) {
            // SAFETY: as above.
            unsafe { base.add(page).write_volatile(0) };
        }
        Ok(Slab { mapping, mapped_bytes, base, block_bytes, count })
    }

    /// Block `index`, for a caller that knows the kernel is not using it.
    pub fn block(&mut self, index: usize) -> &mut [u8] {
        assert!(index < self.count, "block {index} of {}", self.count);
        // SAFETY: within the mapping by the assertion, initialized to zero by the kernel, and borrowed
        // exclusively; operations in flight use other blocks (`BareRing::drive`'s free list).
        unsafe { slice::from_raw_parts_mut(self.base.as_ptr().add(index * self.block_bytes), self.block_bytes) }
    }

    /// How many blocks there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The blocks as the kernel wants them for registration.
    pub fn iovecs(&self) -> Vec<libc::iovec> {
        let address = |index| self.base.as_ptr().wrapping_add(index * self.block_bytes).cast();
        (0..self.count).map(|index| libc::iovec { iov_base: address(index), iov_len: self.block_bytes }).collect()
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with the same length; no reference outlives `self`, and the kernel holds
        // its own references to pages of operations in flight.
        unsafe { libc::munmap(self.mapping.as_ptr().cast(), self.mapped_bytes) };
    }
}

/// A file opened for direct I/O that has no name: it disappears with its last descriptor, even after a crash.
pub struct Scratch {
    file: File,
}

impl Scratch {
    /// An empty file in `dir`, which is created if needed.
    pub fn empty(dir: &Path) -> io::Result<Scratch> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        fs::create_dir_all(dir)?;
        let path = dir.join(format!("kvhoist-bench-{}-{}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .custom_flags(libc::O_DIRECT)
            .open(&path)
            .map_err(|error| {
                let what =
                    format!("{}: opening with O_DIRECT: {error}; choose a file system with direct I/O", path.display());
                io::Error::new(error.kind(), what)
            });
        // Unlinked in either case: some file systems create the file before they refuse the flag.
        let unlinked = fs::remove_file(&path);
        let file = file?;
        unlinked?;
        Ok(Scratch { file })
    }

    /// A file of `blocks` blocks, block `i` stamped with key `i`, flushed.
    pub fn filled(dir: &Path, block_bytes: usize, blocks: u64) -> io::Result<Scratch> {
        let scratch = Scratch::empty(dir)?;
        // Allocated in one piece, as a store is: a file grown write by write is fragmented, and its reads are split.
        let bytes = blocks * block_bytes as u64;
        // SAFETY: a plain system call on a descriptor that `scratch` keeps open.
        let refused = unsafe { libc::posix_fallocate(scratch.file.as_raw_fd(), 0, bytes as libc::off_t) };
        if refused != 0 {
            return Err(io::Error::from_raw_os_error(refused));
        }
        // Deep enough for speed, and below the 8 MiB of lockable memory that is a usual default.
        let depth = ((4 << 20) / block_bytes).clamp(1, 32);
        let mut ring = BareRing::open(block_bytes, depth, Setup::Coop)?;
        let offsets = (0..blocks).map(|index| index * block_bytes as u64);
        ring.run(scratch.file(), Op::Write, offsets, |offset, block| {
            pattern::stamp(block, offset / block_bytes as u64);
            Ok(())
        })?;
        scratch.file.sync_all()?;
        Ok(scratch)
    }

    /// The open file.
    pub fn file(&self) -> &File {
        &self.file
    }
}
