//! Blocks between disk and device memory by libcufile.
//!
//! libcufile is given the cache's own slots and never a caller's memory: a call that does not return keeps a slot, and
//! cannot write to memory that its owner uses again. The device copies between slot and caller, and the checksum is
//! taken of the slot, so no caller sees bytes that were not verified.

use std::{rc::Rc, sync::Arc};

use futures_util::future::join;
use tokio::time::Instant;

use super::{
    CufileRoute, Mover,
    block_memory::{BlockMemory, Buffer},
    plan::{OnDisk, Trip},
    region::Job,
    write::Written,
};
use crate::{
    block::{BlockKey, OpKind, Route, Segment, Tier},
    device::{
        CopyEngine,
        cufile::{Ended, Part},
    },
    error::{Error, Result},
    index::EntryId,
    io::Storage,
    shield::log,
    state::{BegunWrite, DiskPlace, DiskWrite, Filling, Locked, Pin, Purpose, Shared, Taken},
};

/// A write that libcufile did not make. The slot is in the table as the block's until that is
/// [given up](Locked::abort_cufile_write).
struct FailedWrite {
    id: EntryId,
    slot: u32,
    /// `None` while libcufile still uses it.
    filling: Option<Filling>,
    reason: String,
}

/// A block that libcufile reads or has read: the pin on its disk slot, and the device slot that it is read to.
type Reading = (Pin, Filling);

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Reads a block to the device slot that its movement has taken, and verifies it there. `None` if it must go
    /// another way.
    pub(super) async fn read_by_cufile(&self, trip: &mut Trip, block: OnDisk) -> Result<Option<Reading>> {
        let OnDisk { pin, file, offset, checksum } = block;
        let (id, slot, permit) = (pin.id(), trip.taken.slot(), trip.taken.permit());
        let parts = self.parts(&slot, offset);
        // SAFETY: the device slot is unpublished and travels as owner, as does the pin on the disk slot; both keep the
        // pool.
        let ended = unsafe { self.cufile_route().cufile.transfer(OpKind::Read, file, parts, (pin, slot)) }.await;
        drop(permit);
        let (pin, slot) = match self.cufile_ended(ended) {
            Ok(reading) => reading,
            Err((reading, _)) => {
                self.shared.abort_cufile_read(id, trip.fills_slot(), reading);
                return Ok(None);
            }
        };
        let (found, slot) = match self.checksum_on_device(slot).await {
            Ok(found) => found,
            Err(lost) => {
                self.shared.abort_cufile_read(id, trip.fills_slot(), None);
                return Err(lost);
            }
        };
        match found {
            Ok(found) if found == checksum => return Ok(Some((pin, slot))),
            Ok(_) => trip.is_suspect = true,
            Err(error) => log(|| tracing::debug!(%error, "a block on the device was not summed up")),
        }
        self.shared.abort_cufile_read(id, trip.fills_slot(), Some((pin, slot)));
        Ok(None)
    }

    /// Reads a block to its caller's device memory. Returns the job if the block must go another way.
    pub(super) async fn load_by_cufile(
        &self,
        trip: &mut Trip,
        block: OnDisk,
        job: Box<Job>,
        started: Instant,
    ) -> Result<Option<Box<Job>>> {
        let Some((pin, slot)) = self.read_by_cufile(trip, block).await? else { return Ok(Some(job)) };
        self.copy(slot, job).await?.0?;
        self.shared.end_loads(trip.route(), [(pin, Some(started))], 0);
        Ok(None)
    }

    /// Writes a block from its caller's device memory. The job comes back where the block must go another way.
    pub(super) async fn store_by_cufile(self: &Rc<Self>, job: Box<Job>) -> Result<Option<Box<Job>>> {
        // Other ways need no slot of the device.
        let Ok(slot) = self.shared.acquire(Tier::Device, Purpose::Call).await else { return Ok(Some(job)) };
        let (copied, job, slot) = self.copy(job, slot).await?;
        copied?;
        let (checksum, slot) = self.checksum_on_device(slot).await?;
        let Ok(checksum) = checksum else { return Ok(Some(job)) };
        let begun = self.begin_region_write(&job, Taken::default(), Some(checksum)).await?;
        let Some(begun) = begun else { return Ok(Some(job)) };
        let (id, began) = (begun.1.id, Instant::now());
        match self.write_slot(begun, slot).await {
            Ok(written) => {
                let ended = self.end_caller_write(&job.key, id, Route::DeviceToDisk, began, written).await;
                ended.map(|()| None)
            }
            Err(failed) => {
                // It goes on through host memory. Who has stored the same block meanwhile has a copy there.
                let FailedWrite { slot, filling, reason, .. } = failed;
                let mut state = self.shared.lock();
                state.write_other_copy(&job.key, id);
                state.abort_cufile_write(id, slot, filling);
                let end = state.end_flight(&job.key, Tier::Disk, Err(Error::unavailable("device", reason)));
                drop(state);
                self.answer_all(end);
                self.clear_record(slot).await;
                Ok(Some(job))
            }
        }
    }

    /// Writes a block that only the device holds. `None` if it must go another way.
    pub(super) async fn write_by_cufile(self: &Rc<Self>, key: &BlockKey, pin: &Arc<Pin>) -> Option<Written> {
        match self.begin_write(key, pin, Taken::default()).await {
            Ok(Some(begun)) => match self.write_slot(begun, Arc::clone(pin)).await {
                Ok(written) => Some(written),
                Err(FailedWrite { id, slot, filling, .. }) => {
                    self.shared.lock().abort_cufile_write(id, slot, filling);
                    self.clear_record(slot).await;
                    None
                }
            },
            Ok(None) => Some((None, Ok(()))),
            Err(error) => Some((None, Err(error))),
        }
    }

    /// Writes a device slot to its disk slot, and its record.
    ///
    /// # Errors
    /// What is left of a write that libcufile did not make.
    async fn write_slot<K: BlockMemory>(
        self: &Rc<Self>,
        (permit, DiskWrite { id, filling }, place): BegunWrite,
        source: K,
    ) -> Result<Written, FailedWrite> {
        let DiskPlace { file, offset, page } = place;
        let (slot, parts) = (filling.slot(), self.parts(&source, offset));
        // SAFETY: `source` keeps its memory, which nobody writes to, the disk slot is unpublished, and both travel.
        let transfer = unsafe { self.cufile_route().cufile.transfer(OpKind::Write, file, parts, (source, filling)) };
        let (ended, recorded) = join(transfer, self.write_page(page)).await;
        drop(permit);
        match self.cufile_ended(ended) {
            Ok((_, filling)) => Ok((Some(DiskWrite { id, filling }), recorded)),
            Err((owners, reason)) => {
                let filling = owners.map(|(_, filling)| filling);
                Err(FailedWrite { id, slot, filling, reason })
            }
        }
    }

    /// Clears the record of a slot whose write was given up: if the block is removed before it is written elsewhere, no
    /// record may name it. After an error the page stays stale, and a removal of the block writes it again.
    async fn clear_record(self: &Rc<Self>, slot: u32) {
        drop(self.write_record(slot).await);
    }

    fn cufile_route(&self) -> &CufileRoute {
        self.cufile.get().expect("only its routes lead here")
    }

    /// The owner of what was transferred; or why it was not, with the owner unless libcufile still holds it.
    fn cufile_ended<O>(&self, ended: Ended<O>) -> Result<O, (Option<O>, String)> {
        let route = self.cufile_route();
        match ended {
            Ended::Done(owner) => {
                route.failures.set(0);
                Ok(owner)
            }
            Ended::Failed(owner, reason) => {
                self.cufile_failed(route, &reason);
                Err((Some(owner), reason))
            }
            Ended::Stuck(reason) => {
                self.retire_cufile(route, format!("libcufile is stuck: {reason}"));
                Err((None, reason))
            }
        }
    }

    /// The parts of a block: one for each segment.
    fn parts(&self, memory: &impl BlockMemory, offset: u64) -> Vec<Part> {
        let mut at = offset;
        let part = |&Segment { ptr, len }: &Segment| {
            let part = Part { ptr, len, offset: at };
            at += len as u64;
            part
        };
        self.segments(&memory.place()).iter().map(part).collect()
    }

    /// The checksum of a block in a device slot: computed by the device if it can, otherwise from a copy in host
    /// memory.
    ///
    /// # Errors
    /// As of [`ended`](Self::ended).
    pub(super) async fn checksum_on_device(&self, filling: Filling) -> Result<(Result<u64>, Filling)> {
        let segments = self.segments(&filling.place()).into_owned();
        let filling = Arc::new(filling);
        // SAFETY: an unpublished slot of the pool, which its `Filling` keeps; the read into it has ended.
        let sum = unsafe { self.copy.checksum(&segments, Arc::clone(&filling) as _) };
        let result = match self.ended(sum).await? {
            Some(result) => result,
            None => match self.copy_to_host(Arc::clone(&filling)).await {
                Ok(buffer) => Ok(self.checksum_of(buffer, 0).await.0),
                Err(error) => Err(error),
            },
        };
        match Arc::into_inner(filling) {
            Some(filling) => Ok((result, filling)),
            None => Err(result.expect_err("the engine keeps an owner only of a copy that may not have ended")),
        }
    }

    /// Copies a device slot, which nothing writes to, to the host.
    pub(super) async fn copy_to_host(&self, filling: Arc<Filling>) -> Result<Buffer> {
        let (result, _, buffer) = self.copy(filling, Buffer::new(Vec::new(), &self.shared)).await?;
        result.map(|()| buffer)
    }
}

impl Shared {
    /// Ends a failed read. `reading` is `None` if libcufile still uses its pin and slot.
    fn abort_cufile_read(self: &Arc<Self>, id: EntryId, fills_slot: bool, reading: Option<Reading>) {
        let mut state = self.lock();
        if fills_slot {
            state.index.abort_fill(id, Tier::Device);
        }
        if let Some((pin, filling)) = reading {
            filling.release(&mut state);
            pin.release(&mut state);
        }
    }
}

impl Locked<'_> {
    /// Ends a failed write. `filling` is `None` if libcufile still uses its slot.
    fn abort_cufile_write(&mut self, id: EntryId, slot: u32, filling: Option<Filling>) {
        let key = self.index.key(id);
        // A call that has come back since has given the slot back, and another block may have it. The fill has kept the
        // id until now.
        let is_entered = self.disk_slots().meta(slot).is_some_and(|meta| meta.entry == id.as_u32());
        self.index.abort_fill(id, Tier::Disk);
        if is_entered {
            self.disk_slots().clear(slot, &key);
        }
        self.note_given_up(&key, id);
        if let Some(filling) = filling {
            filling.release(self);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::{Config, DiskPath},
        state::{Class, Few},
    };

    /// A call that was given up comes back before its write is, and its slot is another block's by then.
    #[test]
    fn a_slot_that_was_given_back_late_is_left_to_who_has_it() {
        let disks = vec![DiskPath::with_blocks("nowhere", 1)];
        let shared = Shared::of_test(Config::default().block_bytes(4096).host_blocks(4).disks(disks));
        let mut state = shared.lock();
        let begin = |key: BlockKey, state: &mut Locked<'_>| {
            let (id, filling) = (state.index.insert(key, None), state.acquire(Tier::Disk).expect("the only slot"));
            assert!(state.begin_disk_write(id, &filling, Some(1)).is_some());
            state.flights.begin((&key, Tier::Disk), id, Class::Awaited, Few::default(), true);
            (id, filling)
        };
        let (first, filling) = begin(BlockKey::new([1; 32]), &mut state);
        let slot = filling.slot();
        drop(state);
        drop(filling);
        let mut state = shared.lock();
        let (other, filling) = begin(BlockKey::new([2; 32]), &mut state);
        state.abort_cufile_write(first, slot, None);
        assert_eq!(state.disk_slots().meta(slot).map(|meta| meta.entry), Some(other.as_u32()));
        assert!(state.end_disk_write(DiskWrite { id: other, filling }, None), "it is on disk");
    }
}
