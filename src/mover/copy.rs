//! Copies of blocks within memory.

use std::sync::Arc;

use super::{
    Mover,
    block_memory::{BlockMemory, FilledMemory},
};
use crate::{
    block::{Direction, Route, Segment},
    device::{CopyEngine, DevicePool, OwnedBatch, pair_segments},
    error::{Error, Result},
    io::Storage,
    shield::caught_future,
    state::{Pin, Shared},
    task,
};

impl Shared {
    pub(super) fn host_segment(&self, slot: u32) -> Segment {
        Segment { ptr: self.host_ptr(slot).as_ptr(), len: self.config.block_bytes }
    }

    pub(super) fn device_pool(&self) -> &DevicePool {
        self.device.as_ref().expect("device slots and regions exist only with a device")
    }
}

/// The result of a copy, with both memories.
pub(super) type Copied<F, T> = (Result<()>, F, T);

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Copies a block. Both memories come back with the result; after an error `to` holds anything.
    ///
    /// # Errors
    /// As of [`copied`](Self::copied).
    pub(super) async fn copy<F: BlockMemory, T: FilledMemory>(&self, from: F, to: T) -> Result<Copied<F, T>> {
        self.copy_as(from, to, false).await
    }

    /// As [`copy`](Self::copy), in a small group of copies: those that end together would reach the disk together.
    pub(super) async fn copy_promptly<F: BlockMemory, T: FilledMemory>(&self, from: F, to: T) -> Result<Copied<F, T>> {
        self.copy_as(from, to, true).await
    }

    /// Copies a block from a host slot on its way elsewhere. Blocks that come from disk leave as they come.
    pub(super) async fn copy_onward<T: FilledMemory>(&self, from: Pin, to: T) -> Result<Copied<Pin, T>> {
        let is_resident = from.route() == Route::HostHit;
        self.copy_as(from, to, !is_resident).await
    }

    async fn copy_as<F: BlockMemory, T: FilledMemory>(&self, from: F, to: T, is_prompt: bool) -> Result<Copied<F, T>> {
        let (source, target) = (from.place(), to.place());
        let ops = match pair_segments(&*self.segments(&source), &*self.segments(&target)) {
            Ok(ops) => ops,
            Err(error) => return Ok((Err(error), from, to)),
        };
        let direction = self.direction(source.is_device(), target.is_device());
        let regions = [source.regions(), target.regions()].concat();
        // SAFETY: as of both traits; both values travel with the batch.
        let batch = unsafe { OwnedBatch::new(ops, direction, (from, to)) };
        // SAFETY: both promise it of their regions.
        let batch = unsafe { batch.within(regions) };
        let (result, (from, to)) = self.copied(if is_prompt { batch.prompt() } else { batch }).await?;
        Ok((result, from, to))
    }

    /// Copies, and takes the device out of service if it has stopped. Returns the owner of the memory.
    ///
    /// # Errors
    /// As of [`ended`](Self::ended).
    pub(super) async fn copied<O: Send + Sync + 'static>(&self, batch: OwnedBatch<O>) -> Result<(Result<()>, O)> {
        let is_of_tier = batch.is_of_tier(&self.copy);
        let (result, owner) = self.ended_on(is_of_tier, batch.copy(&self.copy)).await?;
        if result.is_err() {
            self.shared.metrics.copy_errors.add(1);
            if let Some(reason) = self.copy.fault() {
                self.retire_device(reason);
            }
        }
        Ok((result, owner))
    }

    /// What the device has done.
    ///
    /// # Errors
    /// [`Error::Copy`] where nobody knows whether it has ended, which the engine says by a panic: its memory stays with
    /// it for good, and the device is out of service.
    pub(super) async fn ended<T>(&self, on_device: impl Future<Output = T>) -> Result<T> {
        self.ended_on(true, on_device).await
    }

    /// As [`ended`](Self::ended), of the device tier's device or another one, which is no reason to retire the tier.
    async fn ended_on<T>(&self, is_of_tier: bool, on_device: impl Future<Output = T>) -> Result<T> {
        if let Some(ended) = caught_future(on_device).await {
            return Ok(ended);
        }
        self.shared.metrics.copy_errors.add(1);
        let fault = if is_of_tier { self.copy.fault() } else { None };
        let reason = fault.unwrap_or_else(|| "the device did not say whether an operation had ended".into());
        if is_of_tier {
            self.retire_device(reason.clone());
        }
        Err(Error::copy(self.copy.name(), reason))
    }

    /// Takes the device tier out of service. Its copies are dropped by and by: no movement waits for that.
    fn retire_device(&self, reason: String) {
        if self.shared.retire_device(reason) {
            let shared = Arc::clone(&self.shared);
            drop(task::spawn(async move {
                for () in shared.drop_device_copies() {
                    crate::io::yield_now().await;
                }
            }));
        }
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
