//! Buffers that direct I/O accepts, for bytes whose own memory it does not.
//!
//! A process keeps those that it needed at once: mapping and pinning one costs as much as reading it.

use std::sync::{Arc, Mutex, PoisonError};

use crate::{Error, Memory, Result, cuda, memory::Copies, pages::Pages};

/// Buffers that nobody uses.
static IDLE: Mutex<Vec<Buffer>> = Mutex::new(Vec::new());

/// Memory that a transfer at a time has.
struct Buffer {
    copies: Copies,
    /// Dropped before the memory.
    _pinned: Option<cuda::Pinned>,
    memory: Memory,
    pages: Arc<Pages>,
}

/// A buffer of one thread, and what copies between it and a transfer's memory. Given back when it is dropped and its
/// copies have ended.
pub(crate) struct Bounce(Option<Buffer>);

impl Bounce {
    /// A buffer of at least so many bytes, pinned for the device of `memory`, for the calling thread.
    pub(crate) fn take(bytes: usize, memory: Memory) -> Result<Self> {
        let fits = |buffer: &Buffer| buffer.memory == memory && buffer.pages.bytes() >= bytes;
        let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = idle.iter().position(fits) {
            let found = Bounce(Some(idle.swap_remove(at)));
            drop(idle);
            found.copies().enter()?;
            return Ok(found);
        }
        drop(idle);
        let pages = Arc::new(Pages::map(bytes).map_err(|error| Error::io("map", "a bounce buffer", error))?);
        let pinned = match memory {
            Memory::Host => None,
            Memory::Cuda(ordinal) => Some(cuda::pin(ordinal, &pages)?),
        };
        let copies = Copies::open(memory)?;
        Ok(Bounce(Some(Buffer { copies, _pinned: pinned, memory, pages })))
    }

    fn buffer(&self) -> &Buffer {
        self.0.as_ref().expect("taken only by the drop")
    }

    pub(crate) fn copies(&self) -> &Copies {
        &self.buffer().copies
    }

    /// The buffer, once its copies have ended; and what copies.
    pub(crate) fn idle(&mut self) -> Result<(&mut [u8], &Copies)> {
        self.copies().finish()?;
        let Buffer { pages, copies, .. } = self.buffer();
        // SAFETY: the mapping, which this value alone reads and writes; anonymous memory is initialized.
        Ok((unsafe { std::slice::from_raw_parts_mut(pages.start().as_ptr(), pages.bytes()) }, copies))
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        // A device that fails says nothing of copies under way: the buffer is nobody's then, and stays.
        let buffer = self.0.take().expect("taken here only");
        match buffer.copies.finish() {
            Ok(()) => IDLE.lock().unwrap_or_else(PoisonError::into_inner).push(buffer),
            Err(_) => std::mem::forget(buffer),
        }
    }
}
