//! The memory that holds a file, and that clients read: a memfd that only the service can write to.
//!
//! The file's bytes, then, in a page of its own, how many of them have come ([`arrived_at`]), and behind that number a
//! heartbeat while others are read before it.

use std::{
    io,
    os::fd::AsRawFd,
    ptr::{NonNull, null_mut},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use rustix::{
    fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create, open},
    mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap},
};
use tokio::sync::oneshot;

use crate::{helpers, wire::Descriptor};

/// The page behind a file's bytes.
pub(crate) const PAGE_BYTES: u64 = 4096;
/// In that page, in the place of a number of bytes: no more will come.
pub(crate) const NEVER: u64 = u64::MAX;

/// Where in the memory of a file of `size` bytes the number of those that have come is: a u64 in native order.
pub(crate) fn arrived_at(size: u64) -> u64 {
    size.next_multiple_of(PAGE_BYTES)
}

/// How far behind that number the heartbeat is: a u64 that changes.
pub(crate) const HEARTBEAT_BYTES: u64 = 8;

/// All of that memory, in bytes.
pub(crate) fn memory_bytes(size: u64) -> u64 {
    arrived_at(size) + PAGE_BYTES
}

/// Resolves when memory is free: nothing of the service maps it, or has its descriptor.
pub(crate) type Freed = oneshot::Receiver<()>;

/// The memory while it is being filled. Dropping it leaves it as it is, for those who have its descriptor.
pub(super) struct Filling {
    start: NonNull<u8>,
    size: u64,
    /// For those who read it. Dropped after the mapping.
    readable: Arc<Descriptor>,
}

// SAFETY: a mapping, which is the same on every thread.
unsafe impl Send for Filling {}

impl Filling {
    /// Memory for a file of `size` bytes.
    pub(super) fn new(size: u64) -> io::Result<(Self, Freed)> {
        let bytes = memory_bytes(size);
        let fd = memfd_create(c"kvhoist-file", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, bytes)?;
        let name = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let readable = open(name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let (free, freed) = oneshot::channel();
        // The last close takes 100s of ms a few GiB.
        let close = |fd| helpers::run(Box::new(move || drop((fd, free))));
        let readable = Arc::new(Descriptor::new(readable, close));
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start =
            unsafe { mmap(null_mut(), bytes as usize, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &fd, 0) }?;
        let start = NonNull::new(start.cast()).expect("the system maps nothing at 0");
        let filling = Filling { start, size, readable };
        // SAFETY: the mapping; a system without huge pages for it refuses, and may.
        _ = unsafe { madvise(start.as_ptr().cast(), bytes as usize, Advice::LinuxHugepage) };
        // This mapping stays the only one that can be written to.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        fcntl_add_seals(&fd, seals)?;
        Ok((filling, freed))
    }

    /// For those who read it.
    pub(super) fn readable(&self) -> Arc<Descriptor> {
        Arc::clone(&self.readable)
    }

    /// Where the file's bytes go.
    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Tells readers that the first `bytes` bytes have come, or that no more will ([`NEVER`]).
    pub(super) fn tell(&self, bytes: u64) {
        // Whoever reads the number sees the bytes.
        self.number(0).store(bytes, Ordering::Release);
    }

    /// Tells readers that what they wait for will come.
    pub(super) fn heartbeat(&self) {
        self.number(HEARTBEAT_BYTES).fetch_add(1, Ordering::Relaxed);
    }

    fn number(&self, at: u64) -> &AtomicU64 {
        let at = (arrived_at(self.size) + at) as usize;
        // SAFETY: within the mapping, aligned, and read and written as an atomic number only.
        unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(at).cast()) }
    }
}

impl Drop for Filling {
    fn drop(&mut self) {
        // SAFETY: the mapping, which nobody uses any more.
        _ = unsafe { munmap(self.start.as_ptr().cast(), memory_bytes(self.size) as usize) };
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, os::unix::fs::FileExt};

    use super::*;

    /// A client can do nothing to the memory by what it is given, nor by opening that anew.
    #[test]
    fn only_the_service_writes_to_the_memory() {
        let (filling, mut freed) = Filling::new(5000).expect("a memfd");
        let readable = filling.readable();
        // SAFETY: within the mapping, which nobody else writes to.
        unsafe { filling.start().as_ptr().add(4999).write(7) };
        filling.tell(5000);
        let name = format!("/proc/self/fd/{}", readable.as_raw_fd());
        let again = File::options().read(true).write(true).open(name).expect("it is this user's");
        for file in [&File::from(readable.try_clone().expect("a descriptor")), &again] {
            file.write_all_at(b"x", 0).expect_err("it is sealed");
            file.set_len(0).expect_err("it keeps its size");
            // SAFETY: as in `Filling::new`.
            let mapped =
                unsafe { mmap(null_mut(), 4096, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0) };
            mapped.expect_err("it is sealed");
        }
        drop(filling);
        freed.try_recv().expect_err("its descriptor is open");
        let (mut byte, mut arrived) = ([0], [0; 8]);
        again.read_exact_at(&mut byte, 4999).expect("the memory stays");
        again.read_exact_at(&mut arrived, arrived_at(5000)).expect("there is a page behind it");
        assert_eq!((byte, u64::from_ne_bytes(arrived)), ([7], 5000));
        drop(readable);
        freed.blocking_recv().expect_err("nobody tells more than that it is closed");
    }
}
