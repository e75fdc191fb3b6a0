//! Caller-owned memory, identified so that a copy engine can keep it registered.

use std::sync::atomic::{AtomicU64, Ordering};

/// A range of memory that stays mapped to the same pages across batches, until [`CopyEngine::forget`]. Engines that
/// must register memory register such a range once.
///
/// [`CopyEngine::forget`]: super::CopyEngine::forget
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyRegion {
    id: u64,
    start: usize,
    len: usize,
    on_device: bool,
}

impl CopyRegion {
    /// A range of host or device memory. Never equal to another region, even at the same address.
    pub fn new(start: *mut u8, len: usize, on_device: bool) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        CopyRegion { id: NEXT.fetch_add(1, Ordering::Relaxed), start: start.expose_provenance(), len, on_device }
    }

    /// First address.
    pub fn start(&self) -> usize {
        self.start
    }

    /// Its length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "an empty range is nothing to copy in")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it is device memory.
    pub fn is_on_device(&self) -> bool {
        self.on_device
    }

    /// Identifier, unique within the process.
    pub fn id(&self) -> u64 {
        self.id
    }
}
