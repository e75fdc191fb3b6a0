//! Memory that is not the cache's own, and how an engine knows it again.

use std::sync::atomic::{AtomicU64, Ordering};

/// A range of memory that stays what it is from one batch to the next, until [`CopyEngine::forget`] is told that it
/// does not: engines that must register memory do it once for such a range.
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
    /// A range of host memory, or of a device's. Never equal to another, also where the addresses are.
    pub fn new(start: *mut u8, len: usize, on_device: bool) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        CopyRegion { id: NEXT.fetch_add(1, Ordering::Relaxed), start: start.expose_provenance(), len, on_device }
    }

    /// Its first address.
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

    /// Tells it from all others of this process.
    pub fn id(&self) -> u64 {
        self.id
    }
}
