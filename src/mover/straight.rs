//! Blocks that go straight between disk and registered host memory, with no copy in the host tier.
//!
//! For whoever has a host tier of its own, an inference engine's pool say: a copy here would take memory and a pass
//! over every byte, and be of no use. Wanted by [`Config::bypass_host`](crate::Config::bypass_host); what does not lie
//! as direct I/O needs it goes through host slots.

use std::{io, ptr::NonNull, rc::Rc, sync::Arc};

use tokio::time::Instant;

use super::{
    Landing, Mover,
    budget::Kind,
    region::{Job, RegionMemory},
};
use crate::{
    block::{BlockKey, FileId, IO_ALIGN, OpKind, Route, Segment, Tier},
    config::WritePolicy,
    device::CopyEngine,
    error::{Error, Result},
    index::EntryId,
    io::{Storage, read_into, write_from},
    memory::{IoBuf, Readable},
    state::{Class, DiskPlace, DiskWrite, Filling, Pin, Purpose, Started},
};

/// A block in shorter segments takes one operation through a host slot, and many without.
const SEGMENT_BYTES_MIN: usize = 64 << 10;

/// What came of trying to do without a host slot.
pub(super) enum Straight<T> {
    Ended(Result<T>),
    /// The block is to go through a host slot.
    Elsewhere(Job),
}

/// A block on disk, pinned, that goes to a caller's memory.
struct Source {
    pin: Pin,
    file: FileId,
    offset: u64,
    checksum: u64,
}

/// A disk slot in the books as that of a block, whose write has begun.
struct Target {
    id: EntryId,
    flight: Started,
    filling: Filling,
    place: DiskPlace,
}

impl Job {
    /// True where direct I/O can read and write all segments, and is not slower for it. Their lengths add up to offsets
    /// in the file, which are stricter than addresses.
    fn may_go_straight(&self, memory_align_bytes: usize) -> bool {
        let aligned = |segment: &Segment| {
            segment.ptr.addr().is_multiple_of(memory_align_bytes)
                && segment.len.is_multiple_of(IO_ALIGN)
                && segment.len > 0
        };
        let long = |segment: &Segment| segment.len >= SEGMENT_BYTES_MIN || self.segments.len() == 1;
        self.memory() == RegionMemory::Host && self.segments.iter().all(|segment| aligned(segment) && long(segment))
    }
}

impl Job {
    /// Its segments, and the storage's numbers for their memory.
    fn places(&self) -> Vec<(Segment, Option<u16>)> {
        self.segments.iter().map(|segment| (*segment, self.fixed(segment))).collect()
    }
}

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Reads a block from disk into its segments, and verifies it there.
    ///
    /// Ends when the kernel has given the segments back, however long that takes: whoever is told the end uses them.
    ///
    /// What goes wrong here may be the memory's fault: others may write to it meanwhile, as where many blocks are
    /// loaded into one place that nobody reads, and the kernel may not be able to reach it. So nothing is concluded
    /// about the disk: the block is read again through a host slot, and given up if it is wrong there.
    pub(super) async fn load_straight(self: &Rc<Self>, job: Job) -> Straight<bool> {
        if !self.shared.config.bypass_host || !job.may_go_straight(self.memory_align_bytes) {
            return Straight::Elsewhere(job);
        }
        let started = Instant::now();
        let share = self.share(Kind::Read, Purpose::Call).await;
        let Some(Source { pin, file, offset, checksum }) = self.begin_straight_read(&job.key) else {
            return Straight::Elsewhere(job);
        };
        let (result, (pin, job)) = self.transfer(OpKind::Read, file, offset, &job.places(), (pin, job)).await;
        drop(share);
        let summed = match result {
            Ok(summed) => {
                self.shared.account(&self.failures, file, OpKind::Read, &Ok(()));
                summed
            }
            // The processor could not write there either.
            Err(source) if source.raw_os_error() == Some(libc::EFAULT) => {
                self.shared.metrics.looked_up(Some(Tier::Disk));
                return Straight::Ended(Err(Error::io(
                    "read into the caller's memory from",
                    self.path_of(file),
                    source,
                )));
            }
            Err(error) => {
                tracing::debug!(%error, "a read into a caller's memory failed; it is tried through a host slot");
                return Straight::Elsewhere(job);
            }
        };
        let (sum, job) = match summed {
            Some(sum) => (sum, job),
            None => self.checksum_of(job).await,
        };
        if sum != checksum {
            tracing::debug!("a block read into a caller's memory is not what it should be; it is read again");
            return Straight::Elsewhere(job);
        }
        // Not before: whatever goes elsewhere is looked up, and counted, there.
        {
            let mut state = self.shared.lock();
            state.index.touch(pin.id());
            state.index.hit(pin.id());
            pin.release(&mut state);
        }
        self.shared.metrics.looked_up(Some(Tier::Disk));
        self.shared.metrics.moved(Route::DiskToRegion, self.shared.config.block_bytes, started.elapsed());
        Straight::Ended(Ok(true))
    }

    /// Pins a block that is on disk and neither in host memory nor on its way there.
    fn begin_straight_read(&self, key: &BlockKey) -> Option<Source> {
        let mut state = self.shared.lock();
        let id = state.index.find(key)?;
        if state.index.slot(id, Tier::Host).is_some()
            || state.flights.contains(key, Tier::Host)
            || !state.disk_service.reads()
        {
            return None;
        }
        let pin = Pin::take(&self.shared, &mut state, id, Tier::Disk, Route::DiskToRegion)?;
        let slots = state.disk_slots();
        let (file, offset) = slots.locate(pin.slot());
        let checksum = slots.meta(pin.slot()).expect("a resident block's slot is committed").checksum;
        Some(Source { pin, file, offset, checksum })
    }

    /// Writes a block that is resident nowhere from its segments to disk. Ends likewise.
    pub(super) async fn store_straight(self: &Rc<Self>, job: Job) -> Straight<()> {
        let config = &self.shared.config;
        let wanted = config.bypass_host
            && config.write_policy == WritePolicy::WriteThrough
            && !config.disks.is_empty()
            && job.may_go_straight(self.memory_align_bytes)
            && self.shared.lock().disk_service.writes();
        if !wanted {
            return Straight::Elsewhere(job);
        }
        if self.shared.refuses(&mut self.shared.lock(), &job.key, job.parent.as_ref(), Tier::Disk) {
            return Straight::Ended(Ok(()));
        }
        let (checksum, job) = self.checksum_of(job).await;
        let share = self.share(Kind::Write, Purpose::Call).await;
        let filling = match self.shared.acquire(Tier::Disk, Purpose::Call).await {
            Ok(filling) => filling,
            Err(error) => return Straight::Ended(Err(error)),
        };
        let Target { id, flight, filling, place } = match self.begin_straight_write(&job, filling, checksum) {
            Ok(Some(target)) => target,
            Ok(None) => return Straight::Elsewhere(job),
            Err(error) => return Straight::Ended(Err(error)),
        };
        let DiskPlace { file, offset, page } = place;
        let (key, started) = (job.key, Instant::now());
        let _landing = Landing::new(self, &key, Tier::Disk, Some(flight));
        let segments = job.places();
        let payload = self.transfer(OpKind::Write, file, offset, &segments, (job, filling));
        let ((result, (_job, filling)), recorded) = tokio::join!(payload, self.write_page(page));
        drop(share);
        self.shared.account(&self.failures, file, OpKind::Write, &result);
        let result = result.map_err(|source| Error::io("write", self.path_of(file), source)).and(recorded);
        let written = self.written(DiskWrite { id, filling }, result);
        let result = self.end_write(&key, id, None, written).await;
        if let Ok(true) = result {
            self.shared.metrics.stores.add(1);
            self.shared.metrics.moved(Route::RegionToDisk, self.shared.config.block_bytes, started.elapsed());
        }
        Straight::Ended(result.map(drop))
    }

    /// Enters a block in the books of its disk slot, and begins the flight of its write. `None` where it is resident
    /// by now, or on its way.
    fn begin_straight_write(&self, job: &Job, filling: Filling, checksum: u64) -> Result<Option<Target>> {
        let mut state = self.shared.lock();
        if let Err(error) = state.check_open() {
            filling.release(&mut state);
            return Err(error);
        }
        let is_known = state.index.find(&job.key).is_some_and(|id| state.index.best_tier(id).is_some());
        if is_known || Tier::ALL.iter().any(|&tier| state.flights.contains(&job.key, tier)) {
            filling.release(&mut state);
            return Ok(None);
        }
        let id = state.index.insert(job.key, job.parent);
        let place = state.begin_disk_write(id, &filling, checksum);
        let place = place.expect("it is resident nowhere, and on no way");
        // For those who want the same block on disk meanwhile; the one who stores it is answered by the end itself.
        let flight = state.flights.begin_started(&job.key, Tier::Disk, id, Class::Awaited, Vec::new());
        Ok(Some(Target { id, flight, filling, place }))
    }

    /// Reads a slot into segments, or writes it from them, all at once; `guards` keep both, and come back. With the
    /// checksum of what was read, if a worker has it.
    async fn transfer<G: Send + Sync + 'static>(
        self: &Rc<Self>,
        kind: OpKind,
        file: FileId,
        offset: u64,
        segments: &[(Segment, Option<u16>)],
        guards: G,
    ) -> (io::Result<Option<u64>>, G) {
        let guards = Arc::new(guards);
        let mut at = offset;
        let operation = |(segment, fixed): &(Segment, Option<u16>)| {
            let start = NonNull::new(segment.ptr).expect("no region begins at 0");
            let is_whole = segments.len() == 1;
            // SAFETY: the segment lies in a region that the job among the guards holds, whose owner promised at
            // registration to keep it mapped, not to write to what is stored from and not to touch what is loaded.
            let buf = unsafe { IoBuf::new(start, segment.len, *fixed, Arc::clone(&guards)) };
            let (this, from) = (Rc::clone(self), at);
            at += segment.len as u64;
            async move {
                match kind {
                    OpKind::Read if is_whole => this.read(file, from, buf).await.0,
                    OpKind::Read => read_into(&this.storage, file, from, buf).await.0.map(|()| None),
                    OpKind::Write => write_from(&this.storage, file, from, buf).await.0.map(|()| None),
                    OpKind::Sync => unreachable!("a flush has no segments"),
                }
            }
        };
        let operations = segments.iter().map(operation);
        let mut result = Ok(None);
        if segments.len() == 1 {
            // Most blocks are one segment, which needs no task of its own.
            for operation in operations {
                result = operation.await;
            }
        } else {
            let operations: Vec<_> = operations.map(tokio::task::spawn_local).collect();
            for operation in operations {
                let ended = operation.await.unwrap_or_else(|_| Err(io::Error::other("the operation was lost")));
                result = result.and(ended);
            }
        }
        (result, Arc::into_inner(guards).expect("every operation has given its share back"))
    }
}

// SAFETY: the segments lie in regions that the job holds, mapped and initialized, and nobody writes to them: their
// owner promised that at registration, and what was read into them has ended.
unsafe impl Readable for Job {
    fn segments(&self) -> Vec<Segment> {
        self.segments.clone()
    }
}
