//! Writing a block from its caller's memory to disk, with no copy in the host tier.

use std::{io, rc::Rc};

use tokio::time::Instant;

use super::{
    Mover,
    flight_guard::FlightGuard,
    in_flight::{Kind, Permit},
    pages::CallPages,
    records::Sharing,
    region::{Job, RegionMemory},
    write::BegunWrite,
};
use crate::{
    block::{BlockKey, OpKind, Route, Tier},
    config::WritePolicy,
    device::CopyEngine,
    error::{Error, Result},
    index::EntryId,
    io::Storage,
    state::{Class, Committed, DiskPlace, DiskWrite, Filling, Purpose, Started, State},
};

/// A write from a caller's memory, and its flight.
pub(super) type BegunRegionWrite = (BegunWrite, Started);

/// The first step of a store from a caller's memory.
pub(super) enum RegionStore<S: Storage, C: CopyEngine> {
    /// The block is resident already.
    Known(Committed),
    /// The disk tier, which is the last, does not take the block.
    Refused,
    /// A worker computes its checksum and writes it.
    Begun(BegunRegionWrite, Sharing<S, C>),
    /// As `Begun`, but its slot or its permit of the bytes in flight must be waited for.
    Later,
    /// Its checksum comes first.
    Unsummed,
    /// It goes through a slot of another tier.
    Elsewhere,
}

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Begins the store of a block, whose call stores `call_bytes` in all and writes records to `pages`.
    pub(super) fn begin_region_store(
        self: &Rc<Self>,
        state: &mut State,
        job: &Job,
        call_bytes: u64,
        pages: &Rc<CallPages>,
    ) -> Result<RegionStore<S, C>> {
        if let Some(committed) = self.shared.store_known(state, &job.key, job.parent.as_ref())? {
            return Ok(RegionStore::Known(committed));
        }
        let config = &self.shared.config;
        let may_write_from = config.host.bypass
            && config.disk.write_policy == WritePolicy::WriteThrough
            && !config.disk.paths.is_empty()
            && job.is_kept_unchanged()
            && job.may_bypass_host(self.memory_align_bytes);
        if !may_write_from || !state.disk_service.writes() {
            return Ok(RegionStore::Elsewhere);
        }
        if self.shared.refuses(state, &job.key, job.parent.as_ref(), Tier::Disk) {
            return Ok(RegionStore::Refused);
        }
        // A worker computes the checksum and writes at once; a block in several segments is written by the reactor.
        let (bytes, in_flight) = (config.slot_bytes() as u64, self.bytes_in_flight() + call_bytes);
        if job.segments.len() != 1 || !self.is_worth_a_transfer(bytes, in_flight) {
            return Ok(RegionStore::Unsummed);
        }
        Ok(match self.begin_region_write_now(state, job, None) {
            None => RegionStore::Later,
            Some(begun) => match begun? {
                None => RegionStore::Elsewhere,
                Some(begun) => {
                    let ((_, _, place), _) = &begun;
                    let sharing = Sharing::new(self, pages, place.page);
                    RegionStore::Begun(begun, sharing)
                }
            },
        })
    }

    /// Writes a block, with a worker that computes the checksum first, and then its record, for which the checksum must
    /// be known.
    ///
    /// Ends when the kernel has given the memory back, however long that takes: the caller uses it once it has the
    /// answer.
    pub(super) async fn write_unsummed(
        self: &Rc<Self>,
        job: Box<Job>,
        ((permit, DiskWrite { id, filling }, place), started): BegunRegionWrite,
        sharing: Sharing<S, C>,
    ) -> Result<()> {
        let (key, origin, began) = (job.key, job.origin(), Instant::now());
        let _guard = FlightGuard::new(self, &key, Tier::Disk, Some(started));
        let DiskPlace { file, offset, .. } = place;
        let (places, block_bytes) = (job.places(), self.shared.config.block_bytes);
        // SAFETY: the segments lie in regions that the job holds, whose owner promised at registration to keep them
        // mapped and not to write to what is stored.
        let payload = unsafe { self.transfer(&permit, file, offset, &places, block_bytes, (job, filling)) };
        let (result, (job, filling)) = payload.await;
        drop(permit);
        self.shared.account(&self.failures, file, OpKind::Write, &result);
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

    /// As [`write_unsummed`](Self::write_unsummed), after waiting for what the write needs. Returns the job if the
    /// block must go through a host slot.
    pub(super) async fn write_unsummed_late(
        self: &Rc<Self>,
        job: Box<Job>,
        pages: &Rc<CallPages>,
    ) -> Result<Option<Box<Job>>> {
        let Some(begun) = self.begin_region_write_late(&job, None).await? else { return Ok(Some(job)) };
        let ((_, _, place), _) = &begun;
        let sharing = Sharing::new(self, pages, place.page);
        self.write_unsummed(job, begun, sharing).await.map(|()| None)
    }

    /// As [`write_unsummed`](Self::write_unsummed), with the checksum before the write, and the record beside it.
    pub(super) async fn sum_and_write(self: &Rc<Self>, job: Box<Job>) -> Result<Option<Box<Job>>> {
        let (checksum, job) = self.checksum_of(job).await;
        let Some((begun, started)) = self.begin_region_write(&job, Some(checksum)).await? else {
            return Ok(Some(job));
        };
        let (key, id, began) = (job.key, begun.1.id, Instant::now());
        let _guard = FlightGuard::new(self, &key, Tier::Disk, Some(started));
        let places = job.places();
        // SAFETY: the segments lie in regions that the job holds, whose owner promised at registration to keep them
        // mapped and not to write to what is stored.
        let written = unsafe { self.write_out(begun, &places, job) }.await;
        self.end_region_write(&key, id, began, written).await.map(|()| None)
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
            self.shared.metrics.moved(Route::RegionToDisk, self.shared.config.block_bytes, began.elapsed());
        }
        Ok(())
    }

    /// Takes what the write of a block from a caller's memory needs, under one lock if all of it can be had at once,
    /// and begins the write and its flight. `None` if the block is resident by now, or on its way.
    pub(super) async fn begin_region_write(
        &self,
        job: &Job,
        checksum: Option<u64>,
    ) -> Result<Option<BegunRegionWrite>> {
        let begun = self.begin_region_write_now(&mut self.shared.lock(), job, checksum);
        match begun {
            Some(begun) => begun,
            None => Box::pin(self.begin_region_write_late(job, checksum)).await,
        }
    }

    /// As [`begin_region_write`](Self::begin_region_write); `None` if something must be waited for.
    fn begin_region_write_now(
        &self,
        state: &mut State,
        job: &Job,
        checksum: Option<u64>,
    ) -> Option<Result<Option<BegunRegionWrite>>> {
        let urgency = state.holder_urgency(Purpose::Call);
        let slot = || self.shared.acquire_locked(state, Tier::Disk);
        let bytes = self.shared.config.slot_bytes() as u64;
        let taken = self.in_flight.take_now(Kind::Write, urgency, bytes, slot)?;
        Some(self.begin_region_write_with(state, job, taken, checksum))
    }

    /// As [`begin_region_write`](Self::begin_region_write), after waiting.
    async fn begin_region_write_late(&self, job: &Job, checksum: Option<u64>) -> Result<Option<BegunRegionWrite>> {
        let permit = self.permit(Kind::Write, Purpose::Call).await;
        let filling = self.shared.acquire(Tier::Disk, Purpose::Call).await?;
        self.begin_region_write_with(&mut self.shared.lock(), job, (permit, filling), checksum)
    }

    fn begin_region_write_with(
        &self,
        state: &mut State,
        job: &Job,
        (permit, filling): (Permit, Filling),
        checksum: Option<u64>,
    ) -> Result<Option<BegunRegionWrite>> {
        if let Err(error) = state.check_open().and_then(|()| job.check_is_there()) {
            filling.release(state);
            return Err(error);
        }
        let is_known = state.index.find(&job.key).is_some_and(|id| state.index.best_tier(id).is_some());
        if is_known || Tier::ALL.iter().any(|&tier| state.flights.contains(&job.key, tier)) {
            filling.release(state);
            return Ok(None);
        }
        let id = state.index.insert(job.key, job.parent);
        let place = state.begin_disk_write(id, &filling, checksum);
        let place = place.expect("it is resident nowhere, and on no way");
        // Device memory is copied to a slot of the cache first.
        if checksum.is_some() && job.memory() == RegionMemory::Host {
            state.disk_slots().set_origin(filling.slot(), job.origin());
        }
        // For callers that want the same block on disk meanwhile; the one that stores it is answered by the end itself.
        let started = state.flights.begin_started(&job.key, Tier::Disk, id, Class::Awaited, Vec::new());
        Ok(Some(((permit, DiskWrite { id, filling }, place), started)))
    }
}
