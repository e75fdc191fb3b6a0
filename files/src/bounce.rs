//! Buffers that direct I/O accepts, for bytes whose own memory it does not.
//!
//! A process keeps those that it needed at once: mapping and pinning one costs as much as reading it.

use std::sync::{Arc, Mutex, PoisonError};

use crate::{Error, Memory, Result, cuda, pages::Pages};

/// Buffers that nobody uses.
static IDLE: Mutex<Vec<Buffer>> = Mutex::new(Vec::new());

/// Memory that a transfer at a time has.
struct Buffer {
    /// Dropped before the memory.
    _pinned: Option<cuda::Pinned>,
    memory: Memory,
    pages: Arc<Pages>,
}

/// A buffer of one thread. Given back when it is dropped.
pub(crate) struct Bounce(Option<Buffer>);

impl Bounce {
    /// A buffer of at least so many bytes, pinned for the device of `memory`.
    pub(crate) fn take(bytes: usize, memory: Memory) -> Result<Self> {
        let fits = |buffer: &Buffer| buffer.memory == memory && buffer.pages.bytes() >= bytes;
        let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = idle.iter().position(fits) {
            return Ok(Bounce(Some(idle.swap_remove(at))));
        }
        drop(idle);
        let pages = Arc::new(Pages::map(bytes).map_err(|error| Error::io("map", "a bounce buffer", error))?);
        let pinned = match memory {
            Memory::Host => None,
            Memory::Cuda(ordinal) => Some(cuda::pin(ordinal, &pages)?),
        };
        Ok(Bounce(Some(Buffer { _pinned: pinned, memory, pages })))
    }

    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        let pages = &self.0.as_ref().expect("taken only by the drop").pages;
        // SAFETY: the mapping, which this value alone reads and writes; anonymous memory is initialized.
        unsafe { std::slice::from_raw_parts_mut(pages.start().as_ptr(), pages.bytes()) }
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        IDLE.lock().unwrap_or_else(PoisonError::into_inner).extend(self.0.take());
    }
}
