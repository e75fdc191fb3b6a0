//! Fills host slots: reads a block from disk, has it verified, and answers the waiters of its flight.
//!
//! Only a host slot is memory that nothing else writes to and that the kernel can always reach, so only a read to a
//! host slot proves anything about the disk. A block that is wrong after a read to a device slot or to a caller's
//! memory is read again to a host slot.

use std::{rc::Rc, sync::Arc};

use tokio::time::Instant;

use super::{
    Mover,
    block_memory::BlockMemory,
    plan::{Fill, OnDisk, Step, Trip},
    speculative_copy::DeviceCopy,
    submit::{Ends, PlannedRead, Submission},
};
use crate::{
    block::{BlockKey, FileId, OpKind, Route, Tier},
    device::CopyEngine,
    error::{Error, Result},
    io::{OpenFile, Storage, Transferred},
    state::{Filling, Outcome, Pin, Unverified, blames_disk, verify::Fault},
    urgency::Urgency,
};

/// The copy to the device that verifies a block there, where one is offered; otherwise the thread that reads it does,
/// or the reactor.
pub(super) type Verifier = Option<DeviceCopy>;

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Fills a host slot, and ends its flight: a read that has all that it needs is an I/O thread's, if waking one is
    /// worth it and that is to verify the block, and otherwise a task of its own, which goes on without its waiters.
    pub(super) fn begin_fill(self: &Rc<Self>, fill: Box<Fill>, verifier: Verifier) {
        let is_for_thread = verifier.is_none() || !self.copy.checksums();
        let thread = if is_for_thread { self.file_for_thread(&fill) } else { None };
        match (thread, *fill) {
            (Some((ends, file)), Fill { trip, step: Ok(Step::OnDisk(block)) }) => {
                self.shared.metrics.movements.add(1.0);
                let pool = self.workers.pool().expect("its threads end reads");
                Submission::new(ends, (trip, block), file).submit(pool).wake();
            }
            (_, fill) => self.spawn(Rc::clone(self).fill_host(fill, verifier)),
        }
    }

    /// The file that an I/O thread is to read for a movement, and what ends the read.
    fn file_for_thread(&self, fill: &Fill) -> Option<(&Arc<Ends>, OpenFile)> {
        let (Some(ends), Ok(Step::OnDisk(block))) = (&self.ends, &fill.step) else { return None };
        // One that nobody awaits would have to be queued under the lock of its plan, to be raised there.
        let is_awaited = fill.trip.taken.of_read().1 == Urgency::Awaited;
        let bytes = self.shared.config.slot_bytes() as u64;
        let is_worth_it = |by_calls| by_calls || self.is_worth_a_transfer(bytes, self.bytes_in_flight());
        let file = self.storage.file(block.file)?;
        (is_awaited && is_worth_it(file.by_calls)).then_some((ends, file))
    }

    /// Fills a host slot, and ends its flight.
    pub(super) async fn fill_host(self: Rc<Self>, fill: Fill, verifier: Verifier) {
        let Fill { mut trip, step } = fill;
        let (key, started) = (trip.key, Instant::now());
        let outcome = match self.ready(&mut trip, step).await {
            Ok(Step::OnDisk(block)) => {
                match (self.read_to_host(block, &mut trip, &verifier, started).await, verifier) {
                    (Ok(unverified), Some(copy)) => return self.verify_on_device(&key, unverified, &copy).await,
                    (Ok(unverified), None) => return self.verify_here(&key, unverified).await,
                    (Err(error), _) => Err(error),
                }
            }
            // Boxed: every read would have room for it.
            Ok(Step::Pinned(pin)) if pin.tier() == Tier::Device => {
                Box::pin(self.copy_from_device(pin, trip.taken.slot(), started)).await
            }
            Ok(Step::Pinned(pin)) => Ok(Some(pin)),
            Ok(_) => Ok(None),
            Err(error) => Err(error),
        };
        self.end_flight(&key, Tier::Host, outcome);
    }

    /// Ends a read that a caller had submitted: by what came of it, or reads the block again.
    pub(super) async fn end_submitted(self: Rc<Self>, read: Box<PlannedRead>, result: Option<Transferred>) {
        let PlannedRead { mut trip, block, began } = *read;
        let Some(result) = result else {
            return self.fill_host(Fill { trip, step: Ok(Step::OnDisk(block)) }, None).await;
        };
        drop(trip.taken.permit());
        match self.read_ended(block.file, block.checksum, (result, block.pin, trip.taken.slot()), began) {
            Ok(unverified) => self.verify_here(&trip.key, unverified).await,
            Err(error) => self.end_flight(&trip.key, Tier::Host, Err(error)),
        }
    }

    /// Reads a block to a host slot. A block that cannot be read is unlinked if the error is the disk's.
    async fn read_to_host(
        self: &Rc<Self>,
        block: OnDisk,
        trip: &mut Trip,
        verifier: &Verifier,
        started: Instant,
    ) -> Result<Unverified> {
        let (file, checksum) = (block.file, block.checksum);
        let (filling, permit) = (trip.taken.slot(), trip.taken.permit());
        // A block on its way to a device that can compute checksums is verified there, once, after the copy.
        let sum_bytes = match verifier {
            Some(_) if self.copy.checksums() => 0,
            _ => self.shared.config.block_bytes,
        };
        let read = self.read(block, permit, filling, sum_bytes).await;
        self.read_ended(file, checksum, read, started)
    }

    /// What a block is after a read to a host slot.
    fn read_ended(
        &self,
        file: FileId,
        checksum: u64,
        (result, pin, filling): (Transferred, Pin, Filling),
        started: Instant,
    ) -> Result<Unverified> {
        self.shared.account(&self.shared.failures, file, OpKind::Read, &result);
        match result {
            Ok(sum) => Ok(Unverified { source: pin, filling, checksum, sum, started }),
            Err(source) => {
                self.shared.metrics.read_errors.add(1);
                match blames_disk(&source) {
                    true => self.shared.unlink(pin, filling, Fault::Unreadable),
                    false => self.shared.abort_read(pin, filling),
                }
                Err(Error::io("read", self.path_of(file), source))
            }
        }
    }

    /// Verifies a block in a host slot by a worker or here, makes it visible or gives it up, and ends its flight.
    pub(super) async fn verify_here(self: &Rc<Self>, key: &BlockKey, unverified: Unverified) {
        let (sum, wanted) = (unverified.sum, unverified.checksum);
        let (is_right, unverified) = self.is_right(unverified, sum, wanted).await;
        self.answer_all(self.shared.end_read(key, unverified, is_right));
    }

    /// Whether a block in host memory has the `wanted` checksum. `sum` is its checksum, if a worker has computed it.
    pub(super) async fn is_right<M: BlockMemory>(&self, memory: M, sum: Option<u64>, wanted: u64) -> (bool, M) {
        let (sum, memory) = match sum {
            Some(sum) => (sum, memory),
            None => self.checksum_of(memory, 0).await,
        };
        (sum == wanted, memory)
    }

    /// Fills a host slot from the device.
    async fn copy_from_device(&self, pin: Pin, filling: Filling, started: Instant) -> Outcome {
        let id = pin.id();
        let checksum = self.shared.lock().checksum(&pin);
        let (pin, filling) = match self.copy(pin, filling).await {
            Ok((Ok(()), pin, filling)) => (pin, filling),
            Ok((Err(error), ..)) | Err(error) => {
                self.shared.lock().index.abort_fill(id, Tier::Host);
                return Err(error);
            }
        };
        let outcome = self.shared.lock().publish(id, filling, checksum, Route::DeviceToHost, pin);
        if outcome.is_some() {
            self.shared.metrics.moved(Route::DeviceToHost, started.elapsed());
        }
        Ok(outcome)
    }
}
