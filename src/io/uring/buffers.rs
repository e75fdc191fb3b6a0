//! Registers buffers through tokio-uring.

use std::io;

use tokio_uring::buf::{IoBuf, IoBufMut, fixed::FixedBufRegistry};

use super::table::{Entry, Pinner};

/// The registered buffers of this thread's ring.
#[derive(Default)]
pub(super) struct RingBuffers {
    /// tokio-uring's copy of the table, while it is registered.
    registry: Option<FixedBufRegistry<Entry>>,
}

impl Pinner for RingBuffers {
    fn pin(&mut self, entries: &[Entry]) -> io::Result<()> {
        let registry = FixedBufRegistry::new(entries.iter().cloned());
        registry.register()?;
        self.registry = Some(registry);
        Ok(())
    }

    fn unpin(&mut self) -> io::Result<()> {
        if let Some(registry) = &self.registry {
            registry.unregister()?;
            self.registry = None;
        }
        Ok(())
    }

    fn is_pinned(&self) -> bool {
        self.registry.is_some()
    }
}

// SAFETY: the address does not change, and by the contracts of `Uring::new` and `Storage::register` the range is mapped
// while it is in the table. A free entry has no bytes.
unsafe impl IoBuf for Entry {
    fn stable_ptr(&self) -> *const u8 {
        self.start()
    }

    fn bytes_init(&self) -> usize {
        self.bytes()
    }

    fn bytes_total(&self) -> usize {
        self.bytes()
    }
}

// SAFETY: as for `IoBuf`. The registry hands out no buffer (`check_out` is never called): the range is only accessed
// through a `Lent`, whose contract is exclusive access.
unsafe impl IoBufMut for Entry {
    fn stable_mut_ptr(&mut self) -> *mut u8 {
        self.start()
    }

    unsafe fn set_init(&mut self, _: usize) {}
}
