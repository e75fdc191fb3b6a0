//! Blocks between disk and a caller's host memory, with no copy in the host tier.

use std::{io, rc::Rc, sync::Arc};

use tokio::time::Instant;

use super::{
    Mover,
    plan::{OnDisk, Trip},
    region::Job,
    store::{FailedStore, PlannedStore, StoreCall, SummedStore, begin_caller_write},
    write::Written,
};
use crate::{
    block::{BlockKey, FileId, OpKind, Route, Tier},
    device::CopyEngine,
    disk::PageId,
    error::{Error, Result},
    index::EntryId,
    io::Storage,
    shield::log,
    state::{BegunWrite, Locked, Purpose, Shared, Taken},
};

impl Shared {
    /// The end of a read to a caller's memory; `None` where the block is to be read again, through a host slot.
    pub(super) fn end_read_in_place<T>(self: &Arc<Self>, file: FileId, result: io::Result<T>) -> Result<Option<T>> {
        match result {
            Ok(read) => {
                self.account(&self.failures, file, OpKind::Read, &Ok(()));
                Ok(Some(read))
            }
            // The memory is not mapped writable: the processor could not write to it either.
            Err(source) if source.raw_os_error() == Some(libc::EFAULT) => {
                self.metrics.looked_up(Some(Tier::Disk));
                let path = self.config.disk.paths[usize::from(file.0)].path.clone();
                Err(Error::io("read into the caller's memory from", path, source))
            }
            Err(error) => {
                log(|| tracing::debug!(%error, "a read into a caller's memory failed; it is made by a host slot"));
                Ok(None)
            }
        }
    }
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
        let Some(sum) = self.shared.end_read_in_place(file, result)? else { return Ok(Some(job)) };
        let (is_right, job) = self.is_right(job, sum, checksum).await;
        if !is_right {
            log(|| tracing::debug!("a block read into a caller's memory is not what it should be; it is read again"));
            return Ok(Some(job));
        }
        self.shared.end_loads(trip.route(), [(pin, Some(started))], 0);
        Ok(None)
    }

    /// Stores a block from its place. `false`: an I/O thread has it.
    pub(super) async fn store_in_place(self: &Rc<Self>, call: &Arc<StoreCall>, planned: PlannedStore) -> Result<bool> {
        // A block in several segments is written by the reactor.
        let (bytes, is_one) = (self.shared.config.slot_bytes() as u64, planned.job.segments.len() == 1);
        if let Some((pool, file)) = self.workers.pool().zip(self.storage.file(planned.place.file))
            && is_one
            && self.is_worth_a_transfer(bytes, self.bytes_in_flight())
        {
            call.queue(planned, pool, file).wake();
            return Ok(false);
        }
        Box::pin(self.store_here(planned)).await.map(|()| true)
    }

    /// Stores a block from its place: first its checksum, then the write and its record at once.
    ///
    /// Ends when the kernel has given the memory back, however long that takes: the caller uses it once it has the
    /// answer.
    async fn store_here(self: &Rc<Self>, planned: PlannedStore) -> Result<()> {
        let PlannedStore { job, permit, write, place, began, .. } = planned;
        let (key, origin, id, permit) = (job.key, job.origin(), write.id, permit.expect("its write has not ended"));
        let (sum, job) = self.checksum_of(job, self.shared.config.slot_bytes() as u64).await;
        let entered = match job.check_is_there() {
            Ok(()) => Ok(self.lock().enter_written(id, write.filling.slot(), sum, origin)),
            // It may be of zeros: as an I/O thread would have, it has found no memory.
            Err(_) => Err(Error::io("write", self.path_of(place.file), io::Error::from_raw_os_error(libc::EFAULT))),
        };
        let written = match entered {
            Ok(true) => self.write_out((permit, write, place), job).await,
            // It was removed meanwhile, or is not written.
            other => (Some(write), other.map(drop)),
        };
        self.end_caller_write(&key, id, Route::RegionToDisk, began, written).await
    }

    /// Records blocks of one page that I/O threads write, and makes those visible whose payload is written.
    pub(super) async fn end_stores(self: Rc<Self>, call: Arc<StoreCall>, group: usize) {
        let records = call.pages.lock().record(group);
        let recorded = self.record(records).await;
        let results = self.end_written(call.written(group).await, recorded).await;
        call.results.settle(results.into_iter().map(|(number, result)| (number, result.map(|()| true))));
    }

    async fn record(self: &Rc<Self>, (page, stores): (PageId, Vec<SummedStore>)) -> Result<()> {
        if stores.is_empty() {
            return Ok(());
        }
        {
            let mut state = self.lock();
            for SummedStore { id, slot, checksum, origin } in stores {
                // Nothing for one that was removed meanwhile.
                state.enter_written(id, slot, checksum, origin);
            }
        }
        self.write_page(page).await
    }

    /// Makes blocks visible whose payloads and records are written, under one lock.
    async fn end_written(
        self: &Rc<Self>,
        written: Vec<PlannedStore>,
        recorded: Result<()>,
    ) -> Vec<(usize, Result<()>)> {
        let mut results = Vec::with_capacity(written.len());
        let (mut ends, mut stored, mut others) = (Vec::new(), Vec::new(), Vec::new());
        let mut state = self.lock();
        for planned in written {
            if recorded.is_err() || state.index.find(&planned.job.key) != Some(planned.write.id) {
                others.push(planned);
            } else {
                let PlannedStore { number, job, write, began, .. } = planned;
                let id = write.id;
                let is_visible = state.end_disk_write(write, None);
                assert!(is_visible, "it was not removed");
                state.note_written(&job.key, id, None);
                ends.push(state.end_flight(&job.key, Tier::Disk, Ok(None)));
                stored.push((number, job, began));
            }
        }
        drop(state);
        ends.into_iter().for_each(|end| self.answer_all(end));
        for (number, job, began) in stored {
            self.count_stored(&job.key, Route::RegionToDisk, began);
            results.push((number, Ok(())));
        }
        for PlannedStore { number, job, write, began, .. } in others {
            let (id, written) = (write.id, (Some(write), recorded.clone()));
            results.push((number, self.end_caller_write(&job.key, id, Route::RegionToDisk, began, written).await));
        }
        results
    }

    /// Ends a store whose write by an I/O thread has failed. One that was lost is made again, here.
    pub(super) async fn end_store(self: Rc<Self>, call: Arc<StoreCall>, store: Box<FailedStore>) {
        let (planned, failed) = *store;
        let number = planned.number;
        let result = match failed {
            None => self.store_here(planned).await,
            Some(source) => {
                let PlannedStore { job, write, place, began, .. } = planned;
                let failed = Err(source);
                self.shared.account(&self.shared.failures, place.file, OpKind::Write, &failed);
                let failed = failed.map_err(|source| Error::io("write", self.path_of(place.file), source));
                let (id, written) = (write.id, (Some(write), failed));
                self.end_caller_write(&job.key, id, Route::RegionToDisk, began, written).await
            }
        };
        call.results.settle([(number, result.map(|()| true))]);
    }

    /// Ends the write of a block from its caller's memory, and its flight. Counts its store by this route.
    pub(super) async fn end_caller_write(
        self: &Rc<Self>,
        key: &BlockKey,
        id: EntryId,
        route: Route,
        began: Instant,
        written: Written,
    ) -> Result<()> {
        if self.end_write(key, id, None, written).await? {
            self.count_stored(key, route, began);
        }
        Ok(())
    }

    fn count_stored(&self, key: &BlockKey, route: Route, began: Instant) {
        self.shared.metrics.stores.add(1);
        self.shared.note_stored(key);
        self.shared.metrics.moved(route, began.elapsed());
    }

    /// Takes what the write of a block from a caller's memory needs beside what it has taken, and begins the write and
    /// its flight. `None` if the block is resident by now, or on its way.
    pub(super) async fn begin_region_write(
        &self,
        job: &Job,
        taken: Taken,
        checksum: Option<u64>,
    ) -> Result<Option<BegunWrite>> {
        let begin = |state: &mut Locked<'_>, taken| {
            let may_begin = state.check_open().and_then(|()| job.check_is_there());
            let is_known = state.index.find(&job.key).is_some_and(|id| state.index.best_tier(id).is_some());
            let is_moving = Tier::ALL.iter().any(|&tier| state.flights.contains(&job.key, tier));
            if may_begin.is_err() || is_known || is_moving {
                return (may_begin.map(|()| None), Some(taken));
            }
            (Ok(Some(begin_caller_write(state, job, taken, checksum))), None)
        };
        let (begun, _unused) = self.take_and_begin(taken, Purpose::Call, begin).await?;
        begun
    }
}
