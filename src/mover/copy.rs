//! Copies of blocks within memory.

use super::{
    Mover,
    block_memory::{BlockMemory, FilledMemory},
};
use crate::{
    block::{Direction, Segment},
    device::{CopyEngine, DevicePool, OwnedBatch, pair_segments},
    error::Result,
    io::Storage,
    state::Shared,
};

impl Shared {
    pub(super) fn host_segment(&self, slot: u32) -> Segment {
        Segment { ptr: self.host_ptr(slot).as_ptr(), len: self.config.block_bytes }
    }

    pub(super) fn device_pool(&self) -> &DevicePool {
        self.device.as_ref().expect("device slots and regions exist only with a device")
    }
}

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Copies a block. Both memories come back with the result; after an error `to` holds anything.
    pub(super) async fn copy<F: BlockMemory, T: FilledMemory>(&self, from: F, to: T) -> (Result<()>, F, T) {
        self.copy_as(from, to, false).await
    }

    /// As [`copy`](Self::copy), in a small group of copies: those that end together would reach the disk together.
    pub(super) async fn copy_promptly<F: BlockMemory, T: FilledMemory>(&self, from: F, to: T) -> (Result<()>, F, T) {
        self.copy_as(from, to, true).await
    }

    async fn copy_as<F: BlockMemory, T: FilledMemory>(&self, from: F, to: T, is_prompt: bool) -> (Result<()>, F, T) {
        let (source, target) = (from.place(), to.place());
        let ops = match pair_segments(&*self.segments(&source), &*self.segments(&target)) {
            Ok(ops) => ops,
            Err(error) => return (Err(error), from, to),
        };
        let direction = self.direction(source.is_device(), target.is_device());
        let regions = [source.regions(), target.regions()].concat();
        // SAFETY: as of both traits; both values travel with the batch.
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
