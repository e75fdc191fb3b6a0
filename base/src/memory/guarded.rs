//! Guarded memory for tests, here and of what transfers it.

use std::{fs::File, os::fd::OwnedFd, ptr};

use rustix::{
    fs::{MemfdFlags, memfd_create},
    mm::{MapFlags, ProtFlags, mmap, munmap},
};

use crate::memory::Guard;

/// Its pages.
pub const PAGES: usize = 64;

/// Guarded memory of a file that takes no seal.
pub struct Memory {
    pub file: File,
    start: *mut u8,
    pub guard: Guard,
    len: usize,
}

impl Memory {
    pub fn new() -> Self {
        let fd: OwnedFd = memfd_create(c"test", MemfdFlags::CLOEXEC).expect("a memfd");
        let (file, len) = (File::from(fd), PAGES * rustix::param::page_size());
        file.set_len(len as u64).expect("a size");
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let start = unsafe { mmap(ptr::null_mut(), len, access, MapFlags::SHARED, &file, 0) }.expect("mapped");
        let guard = Guard::new(start.cast(), len).expect("a handler");
        Memory { file, start: start.cast(), guard, len }
    }

    pub fn page(&self, page: usize) -> *mut u8 {
        self.start.wrapping_add(page * rustix::param::page_size())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.guard.end();
        // SAFETY: mapped by `new`, and used nowhere.
        unsafe { munmap(self.start.cast(), self.len) }.expect("unmapped");
    }
}
