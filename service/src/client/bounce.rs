//! Memory of a client's own for blocks whose memory cannot be passed to a service.

use std::sync::{Arc, Mutex};

use kvhoist::{Segment, SharedMemory};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{
    error::{Error, Result},
    protocol::Way,
};

const SLOT_ALIGN: usize = 4096;
const SLOTS_MAX: usize = 4096;

/// Block-sized slots in memory that the service has.
pub(super) struct Bounce(Arc<Slots>);

struct Slots {
    memory: Arc<SharedMemory>,
    slot_bytes: usize,
    free: Mutex<Vec<usize>>,
    permits: Arc<Semaphore>,
    /// Of half of them, for stores: no load waits for those.
    stores: Arc<Semaphore>,
}

/// Slots that a call has, until it and the service are done with them.
pub(super) struct Taken {
    numbers: Vec<usize>,
    slots: Arc<Slots>,
    _permits: [Option<OwnedSemaphorePermit>; 2],
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
        let free = Mutex::new((0..count).collect());
        let [permits, stores] = [count, (count / 2).max(1)].map(|permits| Arc::new(Semaphore::new(permits)));
        Ok(Bounce(Arc::new(Slots { memory, slot_bytes, free, permits, stores })))
    }

    pub(super) fn memory(&self) -> &Arc<SharedMemory> {
        &self.0.memory
    }

    /// The most blocks that one call takes: others move meanwhile.
    pub(super) fn blocks_per_call(&self) -> usize {
        (self.0.memory.len() / self.0.slot_bytes).div_ceil(4)
    }

    /// Takes slots for `count` blocks of a call, once there are as many.
    ///
    /// # Cancel safety
    /// Nothing is taken.
    pub(super) async fn take(&self, way: &Way, count: usize) -> Result<Taken> {
        let acquire = async |permits: &Arc<Semaphore>| {
            let permits = Arc::clone(permits).acquire_many_owned(count as u32).await;
            permits.map(Some).map_err(|_| Error::Closed)
        };
        let of_stores = if matches!(way, Way::Store(_)) { acquire(&self.0.stores).await? } else { None };
        let permits = [of_stores, acquire(&self.0.permits).await?];
        let mut free = self.0.free.lock().expect("nothing panics under it");
        let first = free.len() - count;
        let numbers = free.split_off(first);
        drop(free);
        Ok(Taken { numbers, slots: Arc::clone(&self.0), _permits: permits })
    }
}

impl Taken {
    /// The slot of the call's block `at`.
    pub(super) fn slot(&self, at: usize, block_bytes: usize) -> Segment {
        let start = self.numbers[at] * self.slots.slot_bytes;
        Segment { ptr: self.slots.memory.as_ptr().wrapping_add(start), len: block_bytes }
    }

    /// Copies the call's block `at` from its slot to its segments, or into the slot. The slots are the call's until
    /// after that.
    ///
    /// # Safety
    /// The segments are mapped, readable, writable where they are copied to, and one block long in all. The service
    /// is not at work on the slot.
    pub(super) unsafe fn copy(&self, at: usize, segments: &[Segment], direction: Direction) {
        let mut slot = self.slot(at, 0).ptr;
        for segment in segments {
            let (from, to) = match direction {
                Direction::In => (segment.ptr, slot),
                Direction::Out => (slot, segment.ptr),
            };
            // SAFETY: the caller promises the segment; a slot is as long as a block. Segments may overlap one another,
            // never the slot, which is this client's own memory.
            unsafe { std::ptr::copy(from, to, segment.len) };
            slot = slot.wrapping_add(segment.len);
        }
    }
}

/// Which way a block is copied.
#[derive(Clone, Copy)]
pub(super) enum Direction {
    In,
    Out,
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use kvhoist::block_on;

    use super::*;

    #[test]
    fn slots_come_back_when_their_last_holder_goes() {
        let bounce = Bounce::new(4 * 8192, 5000).expect("memory");
        assert_eq!((bounce.0.slot_bytes, bounce.blocks_per_call()), (8192, 1));
        let taken = block_on(bounce.take(&Way::Load, 3)).expect("slots");
        let (kept, other) = (Arc::new(taken), block_on(bounce.take(&Way::Load, 1)).expect("slots"));
        let service = Arc::clone(&kept);
        let places: Vec<_> = (0..3).map(|at| kept.slot(at, 5000).ptr).collect();
        assert!(!places.contains(&other.slot(0, 5000).ptr));
        drop(kept);
        assert_eq!(bounce.0.permits.available_permits(), 0, "the service may still write there");
        drop(service);
        assert_eq!(bounce.0.permits.available_permits(), 3);
    }

    #[test]
    fn stores_leave_half_of_the_slots_to_loads() {
        let bounce = Bounce::new(4 * 8192, 5000).expect("memory");
        let store = || bounce.take(&Way::Store(None), 1);
        let stored = [store(), store()].map(|taken| block_on(taken).expect("half of them"));
        assert!(store().now_or_never().is_none(), "it waits for stores");
        assert!(bounce.take(&Way::Load, 2).now_or_never().is_some(), "these do not");
        drop(stored);
        assert!(store().now_or_never().is_some());
    }
}
