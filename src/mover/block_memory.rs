//! The memory of a block, and who keeps it while the block is on its way.
//!
//! One argument holds for every transfer, copy and checksum. The memory of a block is named by a value that keeps it: a
//! pin, a filling, a caller's job. Whatever moves the block owns that value, as the owner of the buffer or the batch
//! that the kernel, a device or a thread has, and gives it back with the result when that is done with the memory. A
//! movement that is dropped leaves the value with the operation. So the memory stays mapped, and a slot or a region
//! is neither reused nor given back, for as long as anything may touch it. What nobody else may do meanwhile is the
//! promise of the two traits, which their implementations argue.

use std::{borrow::Cow, sync::Arc};

use super::{
    Mover,
    offload::Place,
    region::{Job, RegionMemory},
};
use crate::{
    block::{Segment, Tier},
    device::{CopyEngine, CopyRegion},
    io::Storage,
    state::{Few, Filling, Pin, Shared, Unverified},
};

/// A value that keeps the memory of one block.
///
/// # Safety
/// While the value lives its memory stays mapped and initialized, and nobody writes to it but the transfer that it is
/// given to. What a [`Where::Caller`] names stays mapped until [`CopyEngine::forget`] was called with its regions.
pub(super) unsafe trait BlockMemory: Send + Sync + 'static {
    fn place(&self) -> Where<'_>;
}

/// A value whose memory a transfer may fill.
///
/// # Safety
/// While the value lives nobody else reads the memory either.
pub(super) unsafe trait FilledMemory: BlockMemory {}

/// The place of a block in memory.
pub(super) enum Where<'a> {
    Slot(Tier, u32),
    Caller(&'a Job),
    Heap(Segment),
}

// SAFETY: a full slot, which the pin keeps from eviction and reuse: nobody writes to it.
unsafe impl BlockMemory for Pin {
    fn place(&self) -> Where<'_> {
        Where::Slot(self.tier(), self.slot())
    }
}

// SAFETY: an unpublished slot, which is this value's alone.
unsafe impl BlockMemory for Filling {
    fn place(&self) -> Where<'_> {
        Where::Slot(self.tier(), self.slot())
    }
}

// SAFETY: an unpublished slot has no reader.
unsafe impl FilledMemory for Filling {}

// SAFETY: an unpublished slot, which nothing writes to any more.
unsafe impl BlockMemory for Unverified {
    fn place(&self) -> Where<'_> {
        self.filling.place()
    }
}

// SAFETY: regions that the job holds, whose owner promised at registration to keep them mapped until
// `Cache::unregister` has resolved, which tells the engine; not to touch a segment while it is loaded; and not to write
// to it while it is stored.
unsafe impl BlockMemory for Job {
    fn place(&self) -> Where<'_> {
        Where::Caller(self)
    }
}

// SAFETY: the same promise: whoever loads into a segment does not touch it meanwhile. A job is loaded or stored, not
// both.
unsafe impl FilledMemory for Job {}

// SAFETY: the value in the box promises it, and moving the box does not move it.
unsafe impl<M: BlockMemory> BlockMemory for Box<M> {
    fn place(&self) -> Where<'_> {
        (**self).place()
    }
}

// SAFETY: as above.
unsafe impl<M: FilledMemory> FilledMemory for Box<M> {}

// SAFETY: as of the box.
unsafe impl<M: BlockMemory> BlockMemory for Arc<M> {
    fn place(&self) -> Where<'_> {
        (**self).place()
    }
}

/// Host memory for a block, on the heap.
pub(super) struct Buffer {
    bytes: Vec<u8>,
    start: usize,
}

impl Buffer {
    /// `bytes`, resized to a block.
    pub(super) fn new(mut bytes: Vec<u8>, shared: &Shared) -> Self {
        let block_bytes = shared.config.block_bytes;
        match bytes.capacity() {
            // What the system gives is zeros already.
            0 => bytes = vec![0; block_bytes],
            _ => bytes.resize(block_bytes, 0),
        }
        Buffer { start: bytes.as_mut_ptr().expose_provenance(), bytes }
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

// SAFETY: owned memory, which stays in place when the vector is moved.
unsafe impl BlockMemory for Buffer {
    fn place(&self) -> Where<'_> {
        Where::Heap(Segment { ptr: std::ptr::with_exposed_provenance_mut(self.start), len: self.bytes.len() })
    }
}

// SAFETY: the vector is this value's alone.
unsafe impl FilledMemory for Buffer {}

impl Where<'_> {
    pub(super) fn is_device(&self) -> bool {
        match self {
            Where::Slot(tier, _) => *tier == Tier::Device,
            Where::Caller(job) => job.memory() == RegionMemory::Device,
            Where::Heap(_) => false,
        }
    }

    pub(super) fn regions(&self) -> Vec<CopyRegion> {
        match self {
            Where::Caller(job) => job.copy_regions(),
            _ => Vec::new(),
        }
    }
}

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Where a block lies, in the order of its bytes.
    pub(super) fn segments<'a>(&self, memory: &Where<'a>) -> Cow<'a, [Segment]> {
        match memory {
            Where::Slot(Tier::Device, slot) => self.shared.device_pool().segments(*slot).collect(),
            Where::Slot(_, slot) => vec![self.shared.host_segment(*slot)].into(),
            Where::Caller(job) => job.segments.as_slice().into(),
            Where::Heap(segment) => vec![*segment].into(),
        }
    }

    /// The parts of a disk slot in host memory: a host slot has all of its length.
    pub(super) fn host_parts(&self, memory: &Where<'_>) -> Few<Place> {
        match memory {
            Where::Slot(tier, slot) => {
                assert_eq!(*tier, Tier::Host, "the kernel moves blocks to and from host memory");
                let segment = Segment { len: self.shared.config.slot_bytes(), ..self.shared.host_segment(*slot) };
                let registered = (!self.shared.config.host.parks).then(|| self.shared.arena.chunk_of(*slot));
                Few::from([(segment, registered, None)])
            }
            Where::Caller(job) => job.places(),
            Where::Heap(segment) => Few::from([(*segment, None, None)]),
        }
    }
}
