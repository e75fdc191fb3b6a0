//! Reads a block from disk: to a host slot, to a device slot, or to a caller's memory.
//!
//! The steps are the same for each: pin the disk slot, transfer the bytes, compare their checksum. Only a host slot is
//! memory that nothing else writes to and that the kernel can always reach, so only a read to a host slot proves
//! anything about the disk. A block that is wrong after a read to a device slot or to a caller's memory is read again
//! to a host slot.

use std::rc::Rc;

use tokio::time::Instant;

use super::{
    Mover,
    flight_guard::FlightGuard,
    in_flight::{Kind, Permit},
    region::Job,
};
use crate::{
    block::{BlockKey, FileId, OpKind, Route, Tier},
    device::CopyEngine,
    error::{Error, Result},
    io::Storage,
    memory::Readable,
    state::{
        Filling, Message, Outcome, Pin, Purpose, State, Unverified, blames_disk,
        verify::{self, Fault},
    },
};

/// The memory to read a block to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Destination {
    HostSlot,
    /// By libcufile.
    DeviceSlot,
    /// A caller's memory, with no copy in the host tier.
    Region,
}

/// A block on disk, pinned to be read.
pub(super) struct OnDisk {
    pub(super) pin: Pin,
    pub(super) file: FileId,
    pub(super) offset: u64,
    /// The checksum that it must have.
    pub(super) checksum: u64,
}

/// The source to fill a host slot from.
pub(super) enum Source {
    /// The block has become resident in the host tier.
    Host(Pin),
    Disk(OnDisk),
    Device(Pin),
    /// The block is no longer resident.
    Gone,
}

/// What a read to a host slot has taken: its slot, its permit of the bytes in flight, and its source.
pub(super) type BegunRead = (Filling, Permit, Source);

/// The first step of a load to a caller's memory.
pub(super) enum RegionRead {
    /// The block is read there.
    Begun(Permit, OnDisk),
    /// As `Begun`, but its permit of the bytes in flight must be waited for.
    Later,
    /// It goes through a slot of another tier.
    Elsewhere,
}

/// Result of the fill of a host slot.
pub(super) enum Filled {
    /// A pin on the block, which needs no verification, or `None` for a miss.
    Ended(Option<Pin>),
    /// The block came from disk and must be verified.
    Unverified(Unverified),
}

/// Result of a read to a device slot.
pub(super) enum Tried {
    Ended(Outcome),
    /// The block must go through host memory.
    Elsewhere,
    /// The bytes were wrong. If a read through host memory gives the right ones, libcufile is at fault.
    Suspect,
}

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// A block's permit of the bytes in flight.
    pub(super) async fn permit(&self, kind: Kind, purpose: Purpose<'_>) -> Permit {
        // Read here: a movement that is raised later is in the budget's queue by then.
        let urgency = self.shared.lock().holder_urgency(purpose);
        self.in_flight.take(kind, urgency, self.shared.config.slot_bytes() as u64).await
    }

    /// Pins a block to be read from disk to a destination of this kind, and begins the fill of its slot.
    pub(super) fn begin_read(&self, state: &mut State, key: &BlockKey, to: Destination) -> Option<OnDisk> {
        let id = state.index.find(key).filter(|_| state.disk_service.reads())?;
        let (is_wanted, route, filled) = match to {
            Destination::HostSlot => (true, Route::DiskToHost, Some(Tier::Host)),
            Destination::DeviceSlot => (state.is_for_cufile(key), Route::DiskToDevice, Some(Tier::Device)),
            Destination::Region => {
                let is_near = state.index.slot(id, Tier::Host).is_some() || state.flights.contains(key, Tier::Host);
                (!is_near, Route::DiskToRegion, None)
            }
        };
        let pin = if is_wanted { Pin::take(&self.shared, state, id, Tier::Disk, route)? } else { return None };
        if filled.is_some_and(|tier| !state.index.begin_fill(id, tier)) {
            assert!(to != Destination::HostSlot, "flights are single, and stores publish in one step");
            pin.release(state);
            return None;
        }
        let slots = state.disk_slots();
        let (file, offset) = slots.locate(pin.slot());
        let checksum = slots.meta(pin.slot()).expect("a resident block's slot is committed").checksum;
        Some(OnDisk { pin, file, offset, checksum })
    }

    /// Takes everything that the fill of a host slot needs, if all of it is available now: under one lock.
    pub(super) fn begin_fill_now(&self, state: &mut State, key: &BlockKey) -> Option<BegunRead> {
        let urgency = state.holder_urgency(Purpose::Movement(key, Tier::Host));
        let slot = || self.shared.acquire_locked(state, Tier::Host);
        let (permit, filling) =
            self.in_flight.take_now(Kind::Read, urgency, self.shared.config.slot_bytes() as u64, slot)?;
        Some((filling, permit, self.choose_source(state, key)))
    }

    /// Pins the source of `key`, and begins the fill of its host slot.
    fn choose_source(&self, state: &mut State, key: &BlockKey) -> Source {
        let Some(id) = state.index.find(key) else { return Source::Gone };
        if let Some(pin) = Pin::take(&self.shared, state, id, Tier::Host, Route::HostHit) {
            return Source::Host(pin);
        }
        if let Some(block) = self.begin_read(state, key, Destination::HostSlot) {
            return Source::Disk(block);
        }
        if state.device_service.reads()
            && let Some(pin) = Pin::take(&self.shared, state, id, Tier::Device, Route::DeviceToHost)
        {
            let began = state.index.begin_fill(id, Tier::Host);
            assert!(began, "flights are single, and stores publish in one step");
            return Source::Device(pin);
        }
        Source::Gone
    }

    /// Brings a block into a host slot, with what `begun` has taken, or after waiting for it. A worker that reads the
    /// block from disk also computes the checksum of its first `sum_bytes` bytes; 0: none.
    pub(super) async fn fill_slot(
        self: &Rc<Self>,
        key: &BlockKey,
        begun: Option<BegunRead>,
        sum_bytes: usize,
    ) -> Result<Filled> {
        let started = Instant::now();
        let (filling, permit, source) = match begun {
            Some(begun) => begun,
            None => {
                // The slot first: a movement that waits for it must not hold a pin for which others may wait.
                let filling = self.shared.acquire(Tier::Host, Purpose::Movement(key, Tier::Host)).await?;
                let permit = self.permit(Kind::Read, Purpose::Movement(key, Tier::Host)).await;
                let source = self.choose_source(&mut self.shared.lock(), key);
                (filling, permit, source)
            }
        };
        match source {
            Source::Host(pin) => Ok(Filled::Ended(Some(pin))),
            Source::Gone => Ok(Filled::Ended(None)),
            Source::Disk(block) => {
                self.read_to_host(block, (filling, permit), sum_bytes, started).await.map(Filled::Unverified)
            }
            Source::Device(pin) => {
                drop(permit);
                // Boxed: every read would have room for it.
                let outcome = Box::pin(self.copy_from_device(pin, filling)).await?;
                if outcome.is_some() {
                    self.shared.metrics.moved(Route::DeviceToHost, self.shared.config.block_bytes, started.elapsed());
                }
                Ok(Filled::Ended(outcome))
            }
        }
    }

    /// Reads a block to a host slot. A block that cannot be read is unlinked if the error is the disk's.
    async fn read_to_host(
        self: &Rc<Self>,
        block: OnDisk,
        (filling, permit): (Filling, Permit),
        sum_bytes: usize,
        started: Instant,
    ) -> Result<Unverified> {
        let OnDisk { pin, file, offset, checksum } = block;
        let place = [self.place_of(filling.slot())];
        // SAFETY: an unpublished slot, which the filling keeps, and the arena with it.
        let (result, (pin, filling)) =
            unsafe { self.transfer(&permit, file, offset, &place, sum_bytes, (pin, filling)) }.await;
        drop(permit);
        self.shared.account(&self.failures, file, OpKind::Read, &result);
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

    /// Verifies a block in a host slot, and makes it visible or gives it up.
    pub(super) async fn verify_here(&self, unverified: Unverified) -> Outcome {
        let (sum, wanted) = (unverified.sum, unverified.checksum);
        let (is_right, unverified) = self.is_right(unverified, sum, wanted).await;
        self.shared.finish_read(unverified, is_right)
    }

    /// Fills a host slot for the waiters of a flight, and leaves the verification to them.
    pub(super) async fn fill_host_for_waiters(self: Rc<Self>, key: BlockKey) {
        let guard = FlightGuard::new(&self, &key, Tier::Host, None);
        let begun = {
            let mut state = self.shared.lock();
            // If it cannot start, a movement that could not wait for this command has started it.
            if !guard.start(&mut state) {
                return;
            }
            self.begin_fill_now(&mut state, &key)
        };
        let outcome = match self.fill_slot(&key, begun, self.shared.config.block_bytes).await {
            Ok(Filled::Unverified(unverified)) => {
                let mine = unverified.sum.is_some() || self.shared.config.block_bytes > verify::BLOCK_BYTES_MAX;
                let left = if mine { Err(unverified) } else { self.shared.leave_unverified(&key, unverified) };
                match left {
                    Ok(tickets) => {
                        let messages = tickets.into_iter().map(|(waiter, ticket)| (waiter, Message::Verify(ticket)));
                        return self.answer(messages.collect());
                    }
                    Err(unverified) => {
                        let (sum, wanted) = (unverified.sum, unverified.checksum);
                        let (is_right, unverified) = self.is_right(unverified, sum, wanted).await;
                        return self.answer_all(self.shared.end_read(&key, unverified, is_right));
                    }
                }
            }
            Ok(Filled::Ended(pin)) => Ok(pin),
            Err(error) => Err(error),
        };
        self.land(&key, Tier::Host, outcome);
    }

    /// Reads a block to its caller's memory. Returns the job if the block must go through a host slot.
    ///
    /// Ends when the kernel has released the memory, however long that takes, because the caller uses it after the
    /// answer.
    ///
    /// The memory may cause a failure: other code may write to it meanwhile, for example if many blocks are loaded into
    /// one place, or the kernel may not be able to reach it. So a failure proves nothing about the disk: the block is
    /// read again through a host slot, and unlinked if it is wrong there.
    pub(super) async fn read_to_region(self: &Rc<Self>, job: Box<Job>, begun: RegionRead) -> Result<Option<Box<Job>>> {
        let started = Instant::now();
        let (permit, block) = match begun {
            RegionRead::Begun(permit, block) => (permit, block),
            RegionRead::Later => {
                let permit = self.permit(Kind::Read, Purpose::Call).await;
                let begun = self.begin_read(&mut self.shared.lock(), &job.key, Destination::Region);
                let Some(block) = begun else { return Ok(Some(job)) };
                (permit, block)
            }
            RegionRead::Elsewhere => return Ok(Some(job)),
        };
        let OnDisk { pin, file, offset, checksum } = block;
        let places = job.places();
        // SAFETY: the segments lie in regions that the job holds, whose owner promised at registration to keep them
        // mapped and not to touch what is loaded.
        let read = unsafe { self.transfer(&permit, file, offset, &places, self.shared.config.block_bytes, (pin, job)) };
        let (result, (pin, job)) = read.await;
        drop(permit);
        let sum = match result {
            Ok(sum) => {
                self.shared.account(&self.failures, file, OpKind::Read, &Ok(()));
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
        // Only here: a block that goes through a host slot is looked up and counted there.
        {
            let mut state = self.shared.lock();
            state.index.touch(pin.id());
            state.index.hit(pin.id());
            state.note_right(&pin);
            pin.release(&mut state);
        }
        self.shared.metrics.looked_up(Some(Tier::Disk));
        self.shared.metrics.moved(Route::DiskToRegion, self.shared.config.block_bytes, started.elapsed());
        Ok(None)
    }

    /// Begins a read of a block to its caller's memory.
    pub(super) fn begin_region_read(&self, state: &mut State, job: &Job) -> RegionRead {
        if job.is_shared || !self.shared.config.host.bypass || !job.may_bypass_host(self.memory_align_bytes) {
            return RegionRead::Elsewhere;
        }
        let urgency = state.holder_urgency(Purpose::Call);
        let block = || Some(self.begin_read(state, &job.key, Destination::Region));
        match self.in_flight.take_now(Kind::Read, urgency, self.shared.config.slot_bytes() as u64, block) {
            Some((permit, Some(block))) => RegionRead::Begun(permit, block),
            Some((_, None)) => RegionRead::Elsewhere,
            None => RegionRead::Later,
        }
    }

    /// Reads a block to a device slot by libcufile, if that is in service, verifies it there, and makes it visible.
    pub(super) async fn read_to_device(self: &Rc<Self>, key: &BlockKey) -> Tried {
        let Some(direct) = self.cufile.get() else { return Tried::Elsewhere };
        if !self.shared.lock().is_for_cufile(key) {
            return Tried::Elsewhere;
        }
        let started = Instant::now();
        let filling = match self.shared.acquire(Tier::Device, Purpose::Movement(key, Tier::Device)).await {
            Ok(filling) => filling,
            Err(error) => return Tried::Ended(Err(error)),
        };
        let permit = self.permit(Kind::Read, Purpose::Movement(key, Tier::Device)).await;
        let begun = self.begin_read(&mut self.shared.lock(), key, Destination::DeviceSlot);
        let Some(block) = begun else { return Tried::Elsewhere };
        let (id, wanted) = (block.pin.id(), block.checksum);
        let read = self.read_by_cufile(direct, block, filling).await;
        drop(permit);
        let (pin, filling) = match read {
            Ok(reading) => reading,
            Err(reading) => {
                self.shared.abort_cufile_read(id, reading);
                return Tried::Elsewhere;
            }
        };
        let (found, filling) = self.checksum_on_device(filling).await;
        match found {
            Ok(found) if found == wanted => {
                let outcome = self.shared.publish(id, filling, wanted, Route::DiskToDevice, pin);
                self.shared.metrics.moved(Route::DiskToDevice, self.shared.config.block_bytes, started.elapsed());
                Tried::Ended(Ok(outcome))
            }
            Ok(_) => {
                self.shared.abort_cufile_read(id, Some((pin, filling)));
                Tried::Suspect
            }
            Err(error) => {
                self.shared.abort_cufile_read(id, Some((pin, filling)));
                Tried::Ended(Err(error))
            }
        }
    }

    /// Whether a block in memory that `guard` keeps has the `wanted` checksum. `sum` is its checksum, if a worker has
    /// computed it.
    pub(super) async fn is_right<G: Readable>(&self, guard: G, sum: Option<u64>, wanted: u64) -> (bool, G) {
        let (sum, guard) = match sum {
            Some(sum) => (sum, guard),
            None => self.checksum_of(guard).await,
        };
        (sum == wanted, guard)
    }
}
