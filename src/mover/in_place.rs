//! Blocks between disk and a caller's host memory, with no copy in the host tier.

use std::{io, rc::Rc};

use tokio::time::Instant;

use super::{
    Mover,
    flight_guard::FlightGuard,
    pages::CallPages,
    plan::{OnDisk, Taken, Trip, WRITE},
    records::Sharing,
    region::{Job, RegionMemory},
    route::Row,
    write::BegunWrite,
};
use crate::{
    block::{BlockKey, OpKind, Route, Tier},
    device::CopyEngine,
    error::{Error, Result},
    index::EntryId,
    io::Storage,
    state::{Class, Committed, DiskWrite, Filling, Locked, Permit, Purpose},
};

/// A write from a caller's memory, and its flight.
pub(super) type BegunRegionWrite<S, C> = (BegunWrite, FlightGuard<S, C>);

/// The first step of a store from a caller's memory.
pub(super) enum StoreStep<S: Storage, C: CopyEngine> {
    /// The block is resident already, or the disk tier, which is the last, does not take it.
    Known(Committed),
    /// A worker computes its checksum and writes it.
    Begun(BegunRegionWrite<S, C>, Sharing<S, C>),
    /// As `Begun`, but its checksum comes first, or more than it has taken must be waited for.
    InPlace { is_summed_first: bool, taken: Taken },
    /// It goes through a slot of another tier.
    Planned(&'static Row),
}

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Reads a block to its caller's memory. Returns the job if the block must go another way.
    ///
    /// Ends when the kernel has released the memory, however long that takes, because the caller uses it after the
    /// answer.
    ///
    /// The memory may cause a failure: other code may write to it meanwhile, for example if many blocks are loaded into
    /// one place, or the kernel may not be able to reach it. So a failure proves nothing about the disk: the block is
    /// read again through a host slot, and unlinked if it is wrong there.
    pub(super) async fn read_in_place(
        self: &Rc<Self>,
        trip: &mut Trip,
        block: OnDisk,
        job: Box<Job>,
        started: Instant,
    ) -> Result<Option<Box<Job>>> {
        let (file, checksum, permit) = (block.file, block.checksum, trip.taken.permit());
        let (result, pin, job) = self.read(block, permit, job, self.shared.config.block_bytes).await;
        let sum = match result {
            Ok(sum) => {
                self.shared.account(&self.shared.failures, file, OpKind::Read, &Ok(()));
                sum
            }
            // The memory is not mapped writable: the processor could not write to it either.
            Err(source) if source.raw_os_error() == Some(libc::EFAULT) => {
                self.shared.metrics.looked_up(Some(Tier::Disk));
                return Err(Error::io("read into the caller's memory from", self.path_of(file), source));
            }
            Err(error) => {
                tracing::debug!(%error, "a read into a caller's memory failed; it is tried through a host slot");
                return Ok(Some(job));
            }
        };
        let (is_right, job) = self.is_right(job, sum, checksum).await;
        if !is_right {
            tracing::debug!("a block read into a caller's memory is not what it should be; it is read again");
            return Ok(Some(job));
        }
        self.shared.end_loads(trip.row().route, [(pin, Some(started))], 0);
        Ok(None)
    }

    /// Begins the store of a block in place, whose call stores `call_bytes` in all and writes records to `pages`.
    pub(super) fn begin_in_place(
        self: &Rc<Self>,
        state: &mut Locked<'_>,
        job: &Job,
        call_bytes: u64,
        pages: &Rc<CallPages>,
    ) -> Result<StoreStep<S, C>> {
        job.check_is_there()?;
        // A worker computes the checksum and writes at once; a block in several segments is written by the reactor.
        let (bytes, in_flight) = (self.shared.config.slot_bytes() as u64, self.bytes_in_flight() + call_bytes);
        let is_summed_first = job.segments.len() != 1 || !self.is_worth_a_transfer(bytes, in_flight);
        let mut taken = Taken::default();
        if is_summed_first || self.take(state, &mut taken, WRITE, Purpose::Call).is_some() {
            return Ok(StoreStep::InPlace { is_summed_first, taken });
        }
        let begun = self.enter_in_place(state, job, (taken.permit(), taken.slot()), None);
        let sharing = Sharing::new(self, pages, begun.0.2.page);
        Ok(StoreStep::Begun(begun, sharing))
    }

    /// Stores a block in place, after waiting for what that needs. Returns the job if the block must go through a host
    /// slot.
    pub(super) async fn store_in_place(
        self: &Rc<Self>,
        job: Box<Job>,
        is_summed_first: bool,
        taken: Taken,
        pages: &Rc<CallPages>,
    ) -> Result<Option<Box<Job>>> {
        if !is_summed_first {
            let Some(begun) = self.begin_region_write(&job, taken, None).await? else { return Ok(Some(job)) };
            let sharing = Sharing::new(self, pages, begun.0.2.page);
            return self.write_unsummed(job, begun, sharing).await.map(|()| None);
        }
        // The checksum before the write, and the record beside it.
        let (checksum, job) = self.checksum_of(job).await;
        let Some((begun, _guard)) = self.begin_region_write(&job, taken, Some(checksum)).await? else {
            return Ok(Some(job));
        };
        let (key, id, began) = (job.key, begun.1.id, Instant::now());
        let written = self.write_out(begun, job).await;
        self.end_region_write(&key, id, began, written).await.map(|()| None)
    }

    /// Writes a block, with a worker that computes the checksum first, and then its record, for which the checksum must
    /// be known.
    ///
    /// Ends when the kernel has given the memory back, however long that takes: the caller uses it once it has the
    /// answer.
    pub(super) async fn write_unsummed(
        self: &Rc<Self>,
        job: Box<Job>,
        ((permit, DiskWrite { id, filling }, place), _guard): BegunRegionWrite<S, C>,
        sharing: Sharing<S, C>,
    ) -> Result<()> {
        let (key, origin, began) = (job.key, job.origin(), Instant::now());
        let (file, block_bytes) = (place.file, self.shared.config.block_bytes);
        let (result, job, filling) = self.write_payload(&permit, &place, job, filling, block_bytes).await;
        drop(permit);
        self.shared.account(&self.shared.failures, file, OpKind::Write, &result);
        let write = DiskWrite { id, filling };
        let sum = match result {
            Ok(Some(sum)) => Ok(sum),
            // The reactor wrote it: no other block was in flight any more, or the worker died.
            Ok(None) => {
                let (sum, job) = Box::pin(self.checksum_of(job)).await;
                // Zeros may have been written: as a worker would have, it has found no memory.
                let gone = || Error::io("write", self.path_of(file), io::Error::from_raw_os_error(libc::EFAULT));
                job.check_is_there().map_err(|_| gone()).map(|()| sum)
            }
            Err(source) => Err(Error::io("write", self.path_of(file), source)),
        };
        // False: it was removed meanwhile.
        let is_entered = sum.map(|sum| self.lock().enter_written(&write, sum, origin));
        let recorded = match is_entered {
            Ok(true) => sharing.written().await,
            other => {
                drop(sharing);
                other.map(drop)
            }
        };
        self.end_region_write(&key, id, began, self.written(write, recorded)).await
    }

    async fn end_region_write(
        self: &Rc<Self>,
        key: &BlockKey,
        id: EntryId,
        began: Instant,
        written: Result<Option<DiskWrite>>,
    ) -> Result<()> {
        if self.end_write(key, id, None, written).await? {
            self.shared.metrics.stores.add(1);
            self.shared.note_stored(key);
            self.shared.metrics.moved(Route::RegionToDisk, self.shared.config.block_bytes, began.elapsed());
        }
        Ok(())
    }

    /// Takes what the write of a block from a caller's memory needs beside what it has taken, and begins the write and
    /// its flight. `None` if the block is resident by now, or on its way.
    pub(super) async fn begin_region_write(
        self: &Rc<Self>,
        job: &Job,
        taken: Taken,
        checksum: Option<u64>,
    ) -> Result<Option<BegunRegionWrite<S, C>>> {
        let begin = |state: &mut Locked<'_>, permit, filling| {
            let may_begin = state.check_open().and_then(|()| job.check_is_there());
            let is_known = state.index.find(&job.key).is_some_and(|id| state.index.best_tier(id).is_some());
            let is_moving = Tier::ALL.iter().any(|&tier| state.flights.contains(&job.key, tier));
            if may_begin.is_err() || is_known || is_moving {
                return (may_begin.map(|()| None), Some((permit, filling)));
            }
            (Ok(Some(self.enter_in_place(state, job, (permit, filling), checksum))), None)
        };
        let (begun, _unused) = self.take_and_begin(taken, Purpose::Call, begin).await?;
        begun
    }

    /// Begins the write of a block that is resident nowhere and on no way, and its flight.
    fn enter_in_place(
        self: &Rc<Self>,
        state: &mut Locked<'_>,
        job: &Job,
        (permit, filling): (Permit, Filling),
        checksum: Option<u64>,
    ) -> BegunRegionWrite<S, C> {
        let id = state.index.insert(job.key, job.parent);
        let place = state.begin_disk_write(id, &filling, checksum);
        let place = place.expect("it is resident nowhere, and on no way");
        // Device memory is copied to a slot of the cache first.
        if checksum.is_some() && job.memory() == RegionMemory::Host {
            state.disk_slots().set_origin(filling.slot(), job.origin());
        }
        // For callers that want the same block on disk meanwhile; the one that stores it is answered by the end itself.
        let started = state.flights.begin_started(&job.key, Tier::Disk, id, Class::Awaited, Default::default());
        let guard = FlightGuard::of_write(self, &job.key, started, filling.slot());
        ((permit, DiskWrite { id, filling }, place), guard)
    }
}
