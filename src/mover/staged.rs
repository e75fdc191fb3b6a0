//! Blocks between disk and a caller's device memory by libcufile, through a device slot.
//!
//! libcufile is given the cache's own slots and never the caller's memory: a call that does not return keeps a slot,
//! and cannot write to memory that its owner uses again. The device copies between slot and caller, and the checksum is
//! taken of the slot, so no caller sees bytes that were not verified.

use std::rc::Rc;

use tokio::time::Instant;

use super::{
    Mover,
    flight_guard::FlightGuard,
    in_flight::Kind,
    read::Destination,
    region::{Job, RegionMemory},
};
use crate::{
    block::{OpKind, Route, Tier},
    config::WritePolicy,
    device::{CopyEngine, OwnedBatch, cufile::Ended, pair_segments},
    error::{Error, Result},
    io::Storage,
    state::{DiskPlace, DiskWrite, Filling, Purpose},
};

/// Result of a load by libcufile.
pub(super) enum Staged {
    /// The block is in its segments.
    Loaded,
    /// The block is to go through host memory.
    Elsewhere(Job),
    /// The bytes that came were wrong: if the block is right in host memory, libcufile is to blame.
    Suspect(Job),
}

/// Which way a job's bytes go.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    ToCaller,
    FromCaller,
}

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Reads a block from disk to its caller's device memory, where libcufile is in service.
    pub(super) async fn load_staged(&self, job: Job) -> Result<Staged> {
        let Some(direct) = self.cufile.get().filter(|_| job.memory() == RegionMemory::Device) else {
            return Ok(Staged::Elsewhere(job));
        };
        if !self.shared.lock().is_for_cufile(&job.key) {
            return Ok(Staged::Elsewhere(job));
        }
        let started = Instant::now();
        // The slot first: while it is waited for nothing is pinned that others could wait for.
        let slot = self.shared.acquire(Tier::Device, Purpose::Call).await?;
        let permit = self.permit(Kind::Read, Purpose::Call).await;
        let begun = self.begin_read(&mut self.shared.lock(), &job.key, Destination::Region);
        let Some(block) = begun else { return Ok(Staged::Elsewhere(job)) };
        let wanted = block.checksum;
        let read = self.read_by_cufile(direct, block, slot).await;
        drop(permit);
        let Ok((pin, slot)) = read else { return Ok(Staged::Elsewhere(job)) };
        let (found, slot) = self.checksum_on_device(slot).await;
        if found? != wanted {
            return Ok(Staged::Suspect(job));
        }
        let (copied, _, _) = self.copy_staged(slot, job, Way::ToCaller).await;
        copied?;
        {
            let mut state = self.shared.lock();
            state.index.touch(pin.id());
            state.index.hit(pin.id());
            state.note_right(&pin);
            pin.release(&mut state);
        }
        self.shared.metrics.looked_up(Some(Tier::Disk));
        self.shared.metrics.moved(Route::DiskToDevice, self.shared.config.block_bytes, started.elapsed());
        Ok(Staged::Loaded)
    }

    /// Writes a block that is resident nowhere from its caller's device memory, where libcufile is in service. The job
    /// comes back where the block is to go through host memory.
    pub(super) async fn store_staged(self: &Rc<Self>, job: Job) -> Result<Option<Job>> {
        let config = &self.shared.config;
        let Some(direct) = self.cufile.get().filter(|_| job.memory() == RegionMemory::Device) else {
            return Ok(Some(job));
        };
        if config.disk.write_policy != WritePolicy::WriteThrough || config.disk.paths.is_empty() {
            return Ok(Some(job));
        }
        {
            let mut state = self.shared.lock();
            if !state.cufile.writes() || !state.disk_service.writes() {
                return Ok(Some(job));
            }
            if self.shared.refuses(&mut state, &job.key, job.parent.as_ref(), Tier::Disk) {
                return Ok(None);
            }
        }
        let slot = self.shared.acquire(Tier::Device, Purpose::Call).await?;
        let (copied, slot, job) = self.copy_staged(slot, job, Way::FromCaller).await;
        copied?;
        let (checksum, slot) = self.checksum_on_device(slot).await;
        let checksum = checksum?;
        let Some(((permit, write, place), started)) = self.begin_region_write(&job, Some(checksum)).await? else {
            return Ok(Some(job));
        };
        let (key, began) = (job.key, Instant::now());
        let _guard = FlightGuard::new(self, &key, Tier::Disk, Some(started));
        let DiskWrite { id, filling } = write;
        let DiskPlace { file, offset, page } = place;
        let (disk_slot, parts) = (filling.slot(), self.parts(slot.slot(), offset));
        // SAFETY: the device slot is full and nobody else's, the disk slot unpublished; both travel as owner.
        let transfer = unsafe { direct.cufile.transfer(OpKind::Write, file, parts, (slot, filling)) };
        let (ended, recorded) = tokio::join!(transfer, self.write_page(page));
        drop(permit);
        let fault = match ended {
            Ended::Done((_slot, filling)) => {
                direct.failures.set(0);
                let written = self.written(DiskWrite { id, filling }, recorded);
                if self.end_write(&key, id, None, written).await? {
                    self.shared.metrics.stores.add(1);
                    self.shared.metrics.moved(Route::DeviceToDisk, config.block_bytes, began.elapsed());
                }
                return Ok(None);
            }
            Ended::Failed((_slot, filling), reason) => {
                self.cufile_failed(direct, &reason);
                self.shared.abort_cufile_write(id, disk_slot, Some(filling));
                reason
            }
            Ended::Stuck(reason) => {
                self.retire_cufile(direct, format!("libcufile is stuck: {reason}"));
                self.shared.abort_cufile_write(id, disk_slot, None);
                reason
            }
        };
        // Should the block be removed before it is written elsewhere, no record may name it.
        drop(self.write_record(disk_slot).await);
        // Others that store the same block meanwhile are told; this one goes on through host memory.
        drop(self.end_write(&key, id, None, Err(Error::unavailable("device", fault))).await);
        Ok(Some(job))
    }

    /// Copies between a device slot and the caller's device memory; both come back.
    async fn copy_staged(&self, slot: Filling, job: Job, way: Way) -> (Result<()>, Filling, Job) {
        let mine = self.device_segments(slot.slot());
        let (from, to, direction) = match way {
            Way::ToCaller => (&mine, &job.segments, self.promote_direction()),
            Way::FromCaller => (&job.segments, &mine, self.demote_direction()),
        };
        let ops = match pair_segments(from, to) {
            Ok(ops) => ops,
            Err(error) => return (Err(error), slot, job),
        };
        let regions = job.copy_regions();
        // SAFETY: the slot is nobody else's; the segments lie in regions that the job holds, whose owner promised at
        // registration not to touch what is loaded, and not to write to what is stored. Both travel with the batch.
        let batch = unsafe { OwnedBatch::new(ops, direction, (slot, job)) };
        // SAFETY: their owner keeps them mapped until `Cache::unregister` has resolved, which tells the engine.
        let batch = unsafe { batch.within(regions) };
        let (result, (slot, job)) = self.copied(batch).await;
        (result, slot, job)
    }
}
