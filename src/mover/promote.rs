//! Copying up: disk -> host, host -> device, and device -> host where only the device has a block.

use std::{any::Any, rc::Rc, sync::Arc};

use tokio::{sync::oneshot, time::Instant};

use super::{
    Mover,
    budget::{Class, Kind, Share},
    flight::Outcome,
    shared::{Filling, Pin, Promotion},
};
use crate::{
    block::{BlockKey, Route, Segment, Tier},
    checksum::Digest,
    copy::{CopyBatch, CopyEngine, Direction, pair_segments},
    error::{Error, Result},
    index::EntryId,
    io::{FileId, Lent, Storage, read_full},
    tier::device::DevicePool,
};

/// Where a block will be read from.
enum Source {
    /// It is in the host tier after all.
    Host(Pin),
    Disk {
        pin: Pin,
        file: FileId,
        offset: u64,
        checksum: u64,
    },
    Device(Pin),
    /// It is nowhere any more.
    Gone,
}

/// Bytes that are checksummed before the other tasks get a turn: about 15 us.
const CHECKSUM_CHUNK_BYTES: usize = 256 << 10;

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Makes `key` resident in `to` and answers those who wait for it.
    pub(super) async fn promote(self: Rc<Self>, key: BlockKey, to: Tier, class: Class) {
        let outcome = match to {
            Tier::Host => self.fill_host(&key, class).await,
            Tier::Device => self.fill_device(&key, class).await,
            Tier::Disk => unreachable!("copies to disk are writes"),
        };
        self.land(&key, to, outcome);
    }

    /// Ends a flight: each waiter gets a pin of its own, or the miss, or the error.
    pub(super) fn land(self: &Rc<Self>, key: &BlockKey, tier: Tier, outcome: Outcome) {
        let mut answers = Vec::new();
        {
            let mut state = self.shared.lock();
            let mut waiters = state.flights.finish(key, tier);
            let last = waiters.pop();
            for waiter in waiters {
                let copy = match &outcome {
                    Ok(Some(pin)) => Ok(Pin::take(&self.shared, &mut state, pin.id(), tier, pin.route())),
                    Ok(None) => Ok(None),
                    Err(error) => Err(error.clone()),
                };
                answers.push((waiter, copy));
            }
            if let Some(last) = last {
                answers.push((last, outcome));
            }
        }
        self.answer(answers);
    }

    /// Answers waiters when the tasks that are ready now have run. Movements that completed together
    /// then wake their callers together: waking a thread costs more than most of what it then does.
    fn answer(self: &Rc<Self>, answers: Vec<(oneshot::Sender<Outcome>, Outcome)>) {
        let first = {
            let mut waiting = self.answers.borrow_mut();
            let first = waiting.is_empty();
            waiting.extend(answers);
            first && !waiting.is_empty()
        };
        if first {
            let this = Rc::clone(self);
            self.spawn(async move {
                tokio::task::yield_now().await;
                let answers = this.answers.take();
                // Not under the lock: a waiter that is gone drops its pin here, which takes the lock.
                for (waiter, answer) in answers {
                    drop(waiter.send(answer));
                }
            });
        }
    }

    async fn fill_host(&self, key: &BlockKey, class: Class) -> Outcome {
        let started = Instant::now();
        // The slot first: while it is waited for nothing is pinned that others could wait for.
        let filling = self.shared.acquire(Tier::Host).await?;
        let share = self.budget.take(Kind::Read, class, self.shared.config.slot_bytes() as u64).await;
        match self.choose_source(key) {
            Source::Host(pin) => Ok(Some(pin)),
            Source::Gone => Ok(None),
            Source::Disk { pin, file, offset, checksum } => {
                let from = (file, offset, checksum);
                let outcome = self.read_from_disk(pin, from, filling, share).await;
                if let Ok(Some(_)) = outcome {
                    self.shared.metrics.moved(Route::DiskToHost, self.shared.config.block_bytes, started.elapsed());
                }
                outcome
            }
            Source::Device(pin) => {
                drop(share);
                let outcome = self.copy_from_device(pin, filling).await;
                if let Ok(Some(_)) = outcome {
                    self.shared.metrics.moved(Route::DeviceToHost, self.shared.config.block_bytes, started.elapsed());
                }
                outcome
            }
        }
    }

    /// Pins where `key` is, and begins the fill of its host slot.
    fn choose_source(&self, key: &BlockKey) -> Source {
        let mut state = self.shared.lock();
        let Some(id) = state.index.find(key) else { return Source::Gone };
        if let Some(pin) = Pin::take(&self.shared, &mut state, id, Tier::Host, Route::HostHit) {
            return Source::Host(pin);
        }
        if state.disk_retired.is_none()
            && let Some(pin) = Pin::take(&self.shared, &mut state, id, Tier::Disk, Route::DiskToHost)
        {
            let slots = state.disk_slots();
            let (file, offset) = slots.locate(pin.slot());
            let checksum = slots.meta(pin.slot()).expect("a resident block's slot is committed").checksum;
            let began = state.index.begin_fill(id, Tier::Host);
            assert!(began, "flights are single, and stores publish in one step");
            return Source::Disk { pin, file, offset, checksum };
        }
        if let Some(pin) = Pin::take(&self.shared, &mut state, id, Tier::Device, Route::DeviceToHost) {
            let began = state.index.begin_fill(id, Tier::Host);
            assert!(began, "flights are single, and stores publish in one step");
            return Source::Device(pin);
        }
        Source::Gone
    }

    async fn read_from_disk(&self, pin: Pin, from: (FileId, u64, u64), filling: Filling, share: Share) -> Outcome {
        let (file, offset, checksum) = from;
        let (result, mut filling) = self.read_slot(file, offset, filling).await;
        drop(share);
        let verified = match result {
            Ok(()) => Ok(checksum_of(filling.bytes_mut()).await == checksum),
            Err(source) => Err(source),
        };
        match verified {
            Ok(true) => {
                let id = pin.id();
                Ok(self.publish_host(id, filling, checksum, Route::DiskToHost, pin))
            }
            Ok(false) => {
                self.shared.metrics.checksum_failures.add(1);
                self.unlink(pin, filling, "its checksum does not match");
                Ok(None)
            }
            Err(source) => {
                self.shared.metrics.read_errors.add(1);
                self.unlink(pin, filling, "it cannot be read");
                Err(Error::io("read", self.path_of(file), source))
            }
        }
    }

    async fn read_slot(&self, file: FileId, offset: u64, filling: Filling) -> (std::io::Result<()>, Filling) {
        let slot = filling.slot();
        let owner: Arc<dyn Any + Send + Sync> = Arc::new(filling);
        // SAFETY: the range is an unpublished slot, owned by `filling`, which lives in the `Lent`;
        // `filling` keeps the arena alive.
        let lent = unsafe {
            Lent::new(
                self.shared.host_ptr(slot),
                self.shared.config.slot_bytes(),
                self.shared.fixed_buffer(slot),
                owner,
            )
        };
        let (result, lent) = read_full(&self.storage, file, offset, lent).await;
        let filling = lent.into_owner().downcast::<Filling>().expect("lent with this owner");
        (result, Arc::into_inner(filling).expect("the engine keeps no owner"))
    }

    /// Makes a filled host slot visible, pinned for the first waiter. `None` if the block was
    /// removed meanwhile.
    fn publish_host(&self, id: EntryId, filling: Filling, checksum: u64, route: Route, source: Pin) -> Option<Pin> {
        let mut state = self.shared.lock();
        let published = state.index.complete_fill(id, Tier::Host, filling.slot());
        let pin = if published {
            state.host_checksums[filling.slot() as usize] = checksum;
            filling.published();
            Pin::take(&self.shared, &mut state, id, Tier::Host, route)
        } else {
            filling.release(&mut state);
            None
        };
        source.release(&mut state);
        pin
    }

    /// A block that cannot be had from its disk slot: forgotten there, and the slot set aside.
    fn unlink(&self, pin: Pin, filling: Filling, why: &str) {
        let (id, slot) = (pin.id(), pin.slot());
        let mut state = self.shared.lock();
        state.index.abort_fill(id, Tier::Host);
        pin.release(&mut state);
        let mut quarantined = None;
        if state.index.slot(id, Tier::Disk) == Some(slot) && state.index.drop_copy(id, Tier::Disk).is_some() {
            let slots = state.disk_slots();
            slots.clear(slot);
            slots.quarantine(slot);
            quarantined = Some(slots.quarantined_count());
        }
        filling.release(&mut state);
        drop(state);
        tracing::warn!(slot, why, "a block on disk was given up and its slot quarantined");
        if let Some(count) = quarantined {
            self.shared.metrics.quarantined.add(1);
            let limit = self.shared.config.quarantine_max;
            if count > limit {
                self.shared.retire_disk(format!("{count} slots are quarantined, more than quarantine_max = {limit}"));
            }
        }
    }

    async fn copy_from_device(&self, pin: Pin, filling: Filling) -> Outcome {
        let id = pin.id();
        let source = self.device_segments(pin.slot());
        let target = [self.host_segment(filling.slot())];
        let (pin, mut filling, result) = self.copy_owned(&source, &target, self.demote_direction(), pin, filling).await;
        match result {
            Ok(()) => {
                let checksum = checksum_of(filling.bytes_mut()).await;
                Ok(self.publish_host(id, filling, checksum, Route::DeviceToHost, pin))
            }
            Err(error) => {
                self.shared.metrics.copy_errors.add(1);
                self.shared.lock().index.abort_fill(id, Tier::Host);
                Err(error)
            }
        }
    }

    async fn fill_device(self: &Rc<Self>, key: &BlockKey, class: Class) -> Outcome {
        let started = Instant::now();
        let Some(source) = self.obtain_host(key, class).await? else { return Ok(None) };
        let id = source.id();
        let route = match source.route() {
            Route::DiskToHost => Route::DiskToHostToDevice,
            _ => Route::HostToDevice,
        };
        let filling = self.shared.acquire(Tier::Device).await?;
        if !self.shared.lock().index.begin_fill(id, Tier::Device) {
            let pin = Pin::take(&self.shared, &mut self.shared.lock(), id, Tier::Device, Route::DeviceHit);
            return Ok(pin);
        }
        let from = [self.host_segment(source.slot())];
        let to = self.device_segments(filling.slot());
        let (source, filling, result) = self.copy_owned(&from, &to, self.promote_direction(), source, filling).await;
        let mut state = self.shared.lock();
        if let Err(error) = result {
            state.index.abort_fill(id, Tier::Device);
            filling.release(&mut state);
            source.release(&mut state);
            drop(state);
            self.shared.metrics.copy_errors.add(1);
            return Err(error);
        }
        let published = state.index.complete_fill(id, Tier::Device, filling.slot());
        let pin = if published {
            filling.published();
            Pin::take(&self.shared, &mut state, id, Tier::Device, route)
        } else {
            filling.release(&mut state);
            None
        };
        source.release(&mut state);
        drop(state);
        self.shared.metrics.moved(route, self.shared.config.block_bytes, started.elapsed());
        Ok(pin)
    }

    /// Pins `key` in host memory, promoting it first where it must be.
    pub(super) async fn obtain_host(self: &Rc<Self>, key: &BlockKey, class: Class) -> Outcome {
        let receiver = match self.shared.promote(key, Tier::Host)?.0 {
            Promotion::Hit(pin) => return Ok(Some(pin)),
            Promotion::Miss => return Ok(None),
            Promotion::Joined(receiver) => receiver,
            Promotion::Started(receiver) => {
                let outcome = self.fill_host(key, class).await;
                self.land(key, Tier::Host, outcome);
                receiver
            }
        };
        receiver.await.unwrap_or(Err(Error::Closed))
    }

    /// Copies between a full slot and one that is being filled; both come back with the result.
    async fn copy_owned(
        &self,
        from: &[Segment],
        to: &[Segment],
        direction: Direction,
        source: Pin,
        filling: Filling,
    ) -> (Pin, Filling, Result<()>) {
        let ops = match pair_segments(from, to) {
            Ok(ops) => ops,
            Err(error) => return (source, filling, Err(error)),
        };
        // SAFETY: the source is pinned and the target unpublished, and both guards travel with the
        // batch; slots of different tiers do not overlap.
        let batch = unsafe { CopyBatch::new(ops, direction, vec![Arc::new(source), Arc::new(filling)]) };
        let (result, batch) = self.copy.copy(batch).await;
        let mut owners = batch.into_owners();
        let filling = owners.pop().and_then(|owner| Arc::into_inner(owner.downcast::<Filling>().ok()?));
        let source = owners.pop().and_then(|owner| Arc::into_inner(owner.downcast::<Pin>().ok()?));
        let (source, filling) = (source.expect("second of two owners"), filling.expect("first of two owners"));
        (source, filling, result)
    }

    /// A device block's bytes, for a caller on the host.
    pub(super) async fn read_device(&self, pin: Pin, buf: Vec<u8>) -> Result<Vec<u8>> {
        let mut buf = buf;
        buf.resize(self.shared.config.block_bytes, 0);
        let to = [Segment { ptr: buf.as_mut_ptr(), len: buf.len() }];
        let ops = pair_segments(&self.device_segments(pin.slot()), &to)?;
        // SAFETY: the device slot is pinned and `buf` is owned: both travel with the batch, and a
        // moved Vec keeps its heap memory where it is.
        let batch = unsafe { CopyBatch::new(ops, self.demote_direction(), vec![Arc::new(pin), Arc::new(buf)]) };
        let (result, batch) = self.copy.copy(batch).await;
        let buf = batch.into_owners().pop().and_then(|owner| Arc::into_inner(owner.downcast::<Vec<u8>>().ok()?));
        result.map(|()| buf.expect("the second of two owners"))
    }

    pub(super) fn host_segment(&self, slot: u32) -> Segment {
        Segment { ptr: self.shared.host_ptr(slot).as_ptr(), len: self.shared.config.block_bytes }
    }

    fn device_segments(&self, slot: u32) -> Vec<Segment> {
        self.device().segments(slot).collect()
    }

    fn device(&self) -> &DevicePool {
        self.shared.device.as_ref().expect("device slots and regions exist only with a device")
    }

    /// Which way a copy from the host to the device goes: simulated devices are host memory.
    pub(super) fn promote_direction(&self) -> Direction {
        self.device().memory().promote_direction()
    }

    /// Which way a copy from the device to the host goes.
    pub(super) fn demote_direction(&self) -> Direction {
        self.device().memory().demote_direction()
    }
}

/// The checksum of a block, with turns for the other tasks between chunks.
pub(super) async fn checksum_of(bytes: &[u8]) -> u64 {
    let mut digest = Digest::new();
    for (i, chunk) in bytes.chunks(CHECKSUM_CHUNK_BYTES).enumerate() {
        if i > 0 {
            crate::io::yield_now().await;
        }
        digest.update(chunk);
    }
    digest.finish()
}
