//! The memory of a block, and copies of it within memory.

use std::{borrow::Cow, sync::Arc};

use super::{
    Mover,
    region::{Job, RegionMemory},
};
use crate::{
    block::{Direction, Segment, Tier},
    device::{CopyEngine, CopyRegion, DevicePool, OwnedBatch, pair_segments},
    error::Result,
    io::Storage,
    state::{Filling, Pin, Shared, Unverified},
};

/// A value that keeps the memory of one block.
///
/// # Safety
/// While the value lives its memory stays mapped, and nobody writes to it but the transfer that it is given to. What a
/// [`Where::Caller`] names stays mapped until [`CopyEngine::forget`] was called with its regions.
pub(super) unsafe trait BlockMemory: Send + Sync + 'static {
    fn place(&self) -> Where<'_>;
}

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

// SAFETY: the value in the box promises it, and moving the box does not move it.
unsafe impl<M: BlockMemory> BlockMemory for Box<M> {
    fn place(&self) -> Where<'_> {
        (**self).place()
    }
}

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
        bytes.resize(shared.config.block_bytes, 0);
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

impl Where<'_> {
    fn is_device(&self) -> bool {
        match self {
            Where::Slot(tier, _) => *tier == Tier::Device,
            Where::Caller(job) => job.memory() == RegionMemory::Device,
            Where::Heap(_) => false,
        }
    }

    fn regions(&self) -> Vec<CopyRegion> {
        match self {
            Where::Caller(job) => job.copy_regions(),
            _ => Vec::new(),
        }
    }
}

impl Shared {
    pub(super) fn host_segment(&self, slot: u32) -> Segment {
        Segment { ptr: self.host_ptr(slot).as_ptr(), len: self.config.block_bytes }
    }

    fn device_pool(&self) -> &DevicePool {
        self.device.as_ref().expect("device slots and regions exist only with a device")
    }
}

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    pub(super) fn segments<'a>(&self, memory: &Where<'a>) -> Cow<'a, [Segment]> {
        match memory {
            Where::Slot(Tier::Device, slot) => self.shared.device_pool().segments(*slot).collect(),
            Where::Slot(_, slot) => vec![self.shared.host_segment(*slot)].into(),
            Where::Caller(job) => job.segments.as_slice().into(),
            Where::Heap(segment) => vec![*segment].into(),
        }
    }

    /// Copies a block. Both memories come back with the result; after an error `to` holds anything.
    pub(super) async fn copy<F: BlockMemory, T: BlockMemory>(&self, from: F, to: T) -> (Result<()>, F, T) {
        self.copy_as(from, to, false).await
    }

    /// As [`copy`](Self::copy), in a small group of copies: those that end together would reach the disk together.
    pub(super) async fn copy_promptly<F: BlockMemory, T: BlockMemory>(&self, from: F, to: T) -> (Result<()>, F, T) {
        self.copy_as(from, to, true).await
    }

    async fn copy_as<F: BlockMemory, T: BlockMemory>(&self, from: F, to: T, is_prompt: bool) -> (Result<()>, F, T) {
        let (source, target) = (from.place(), to.place());
        let ops = match pair_segments(&*self.segments(&source), &*self.segments(&target)) {
            Ok(ops) => ops,
            Err(error) => return (Err(error), from, to),
        };
        let direction = self.direction(source.is_device(), target.is_device());
        let regions = [source.regions(), target.regions()].concat();
        // SAFETY: both keep their memory, which nobody else writes to, and travel with the batch.
        let batch = unsafe { OwnedBatch::new(ops, direction, (from, to)) };
        // SAFETY: both promise it of their regions.
        let batch = unsafe { batch.within(regions) };
        let (result, (from, to)) = self.copied(if is_prompt { batch.prompt() } else { batch }).await;
        (result, from, to)
    }

    /// Copies, and takes the device out of service if it has stopped. Returns the owner of the memory.
    pub(super) async fn copied<O: Send + Sync + 'static>(&self, batch: OwnedBatch<O>) -> (Result<()>, O) {
        let (result, owner) = batch.copy(&self.copy).await;
        if result.is_err() {
            self.shared.metrics.copy_errors.add(1);
            if let Some(reason) = self.copy.fault() {
                self.shared.retire_device(reason);
            }
        }
        (result, owner)
    }

    /// The direction of copies between memory of these kinds. A simulated device is host memory.
    pub(super) fn direction(&self, from_device: bool, to_device: bool) -> Direction {
        match (from_device, to_device) {
            (false, false) => Direction::HostToHost,
            (_, true) => self.shared.device_pool().memory().promote_direction(),
            (true, false) => self.shared.device_pool().memory().demote_direction(),
        }
    }
}
