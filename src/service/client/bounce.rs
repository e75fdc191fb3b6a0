//! Memory of a client's own for blocks whose memory cannot be passed to a service.

use std::sync::{Arc, Mutex};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{
    block::Segment,
    error::{Error, Result},
    service::shared_memory::SharedMemory,
};

const SLOT_ALIGN: usize = 4096;
const SLOTS_MAX: usize = 4096;

/// Block-sized slots in memory that the service has.
pub(super) struct Bounce {
    memory: Arc<SharedMemory>,
    slot_bytes: usize,
    slots: Arc<Slots>,
}

struct Slots {
    free: Mutex<Vec<usize>>,
    permits: Arc<Semaphore>,
}

/// Slots that a call has, until it and the service are done with them.
pub(super) struct Taken {
    numbers: Vec<usize>,
    slots: Arc<Slots>,
    _permits: OwnedSemaphorePermit,
}

impl Drop for Taken {
    fn drop(&mut self) {
        // Before the permits go.
        self.slots.free.lock().expect("nothing panics under it").append(&mut self.numbers);
    }
}

impl Bounce {
    /// Slots in `bytes`; one at least.
    ///
    /// # Errors
    /// Where the system has not so much memory.
    pub(super) fn new(bytes: usize, block_bytes: usize) -> Result<Self> {
        let slot_bytes = block_bytes.next_multiple_of(SLOT_ALIGN);
        let count = (bytes / slot_bytes).clamp(1, SLOTS_MAX);
        let memory = Arc::new(SharedMemory::new(count * slot_bytes)?);
        let slots = Slots { free: Mutex::new((0..count).collect()), permits: Arc::new(Semaphore::new(count)) };
        Ok(Bounce { memory, slot_bytes, slots: Arc::new(slots) })
    }

    pub(super) fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    /// The most blocks that one call takes: others move meanwhile.
    pub(super) fn blocks_per_call(&self) -> usize {
        (self.memory.len() / self.slot_bytes).div_ceil(4)
    }

    /// Takes slots for `count` blocks, once there are as many.
    ///
    /// # Cancel safety
    /// Nothing is taken.
    pub(super) async fn take(&self, count: usize) -> Result<Taken> {
        let permits = Arc::clone(&self.slots.permits).acquire_many_owned(count as u32).await;
        let permits = permits.map_err(|_| Error::Closed)?;
        let mut free = self.slots.free.lock().expect("nothing panics under it");
        let first = free.len() - count;
        let numbers = free.split_off(first);
        drop(free);
        Ok(Taken { numbers, slots: Arc::clone(&self.slots), _permits: permits })
    }

    /// The slot of a call's block `at`.
    pub(super) fn slot(&self, taken: &Taken, at: usize, block_bytes: usize) -> Segment {
        Segment { ptr: self.memory.as_ptr().wrapping_add(taken.numbers[at] * self.slot_bytes), len: block_bytes }
    }
}

/// Copies a block between its segments and its slot.
///
/// # Safety
/// The segments are mapped, readable, and writable if `into`, and one slot long in all.
pub(super) unsafe fn copy(slot: &Segment, segments: &[Segment], into: bool) {
    let mut at = slot.ptr;
    for segment in segments {
        let (from, to) = if into { (at, segment.ptr) } else { (segment.ptr, at) };
        // SAFETY: the caller promises the segment; the slot is as long as all segments. Regions may overlap in what
        // the caller names only, never with the slot, which is this client's own.
        unsafe { std::ptr::copy(from, to, segment.len) };
        at = at.wrapping_add(segment.len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block_on;

    #[test]
    fn slots_come_back_when_their_last_holder_goes() {
        let bounce = Bounce::new(4 * 8192, 5000).expect("memory");
        assert_eq!((bounce.slot_bytes, bounce.blocks_per_call()), (8192, 1));
        let taken = block_on(bounce.take(3)).expect("slots");
        let (kept, other) = (Arc::new(taken), block_on(bounce.take(1)).expect("slots"));
        let service = Arc::clone(&kept);
        let places: Vec<_> = (0..3).map(|at| bounce.slot(&kept, at, 5000).ptr).collect();
        assert!(!places.contains(&bounce.slot(&other, 0, 5000).ptr));
        drop(kept);
        assert_eq!(bounce.slots.permits.available_permits(), 0, "the service may still write there");
        drop(service);
        assert_eq!(bounce.slots.permits.available_permits(), 3);
    }
}
