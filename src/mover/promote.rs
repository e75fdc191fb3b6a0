//! Promotion: to the device, and into host memory as a step of another movement.

use std::{rc::Rc, sync::Arc};

use tokio::time::Instant;

use super::{
    Mover,
    flight_guard::FlightGuard,
    read::{Filled, Tried},
    speculative_copy::{Ahead, Offer, Target},
};
use crate::{
    block::{BlockKey, Direction, Route, Segment, Tier},
    device::{CopyEngine, DevicePool, OwnedBatch, pair_segments},
    error::Result,
    io::Storage,
    state::{Class, Filling, Outcome, Pin, Promotion, Purpose, Use},
};

/// The destination of a block after host memory.
#[derive(Clone)]
pub(super) enum Next {
    /// To the device, where it may be copied before it is verified.
    Device(Rc<Ahead>),
    Elsewhere,
}

/// Why a block is requested in host memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Asked {
    /// By a caller: counted as a hit or a miss.
    ByCaller,
    /// As one step of a movement: not counted.
    InPassing,
}

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Makes a block resident on the device, and answers its waiters.
    pub(super) async fn promote_to_device(self: Rc<Self>, key: BlockKey) {
        let guard = FlightGuard::new(&self, &key, Tier::Device, None);
        // If it cannot start, a movement that could not wait for this command has started it.
        if guard.start(&mut self.shared.lock()) {
            let outcome = self.fill_device(&key).await;
            self.land(&key, Tier::Device, outcome);
        }
    }

    /// Fills a host slot, and verifies it here: for movements, and for flights without waiters.
    async fn fill_host(self: &Rc<Self>, key: &BlockKey, next: Next) -> Outcome {
        let begun = self.begin_fill_now(&mut self.shared.lock(), key);
        // A block on its way to a device that can compute checksums is verified there, once, after the copy.
        let sum_bytes = match next {
            Next::Device(_) if self.copy.checksums() => 0,
            _ => self.shared.config.block_bytes,
        };
        match self.fill_slot(key, begun, sum_bytes).await? {
            Filled::Ended(pin) => Ok(pin),
            Filled::Unverified(unverified) => match next {
                Next::Device(ahead) => self.copy_and_verify(unverified, &ahead).await,
                Next::Elsewhere => self.verify_here(unverified).await,
            },
        }
    }

    pub(super) async fn copy_from_device(&self, pin: Pin, filling: Filling) -> Outcome {
        let id = pin.id();
        let source = self.device_segments(pin.slot());
        let target = [self.host_segment(filling.slot())];
        let checksum = self.shared.lock().device_checksums[pin.slot() as usize];
        let (pin, filling, result) = self.copy_owned(&source, &target, self.demote_direction(), pin, filling).await;
        match result {
            Ok(()) => Ok(self.shared.publish(id, filling, checksum, Route::DeviceToHost, pin)),
            Err(error) => {
                self.shared.lock().index.abort_fill(id, Tier::Host);
                Err(error)
            }
        }
    }

    async fn fill_device(self: &Rc<Self>, key: &BlockKey) -> Outcome {
        let started = Instant::now();
        let suspect = match self.read_to_device(key).await {
            Tried::Ended(outcome) => return outcome,
            Tried::Elsewhere => false,
            Tried::Suspect => true,
        };
        let offer = Offer::new(Target::AnySlot);
        let next = Next::Device(offer.ahead());
        let Some(source) = self.obtain_host(key, Class::Awaited, next, Asked::InPassing).await? else {
            return Ok(None);
        };
        if suspect {
            self.blame_cufile();
        }
        let id = source.id();
        let route = match source.route() {
            Route::DiskToHost => Route::DiskToHostToDevice,
            _ => Route::HostToDevice,
        };
        let checksum = self.shared.lock().host_checksums[source.slot() as usize];
        let (filling, is_there) = match offer.withdraw().await? {
            (Target::Slot(filling), copied) => (filling, copied == Some(checksum)),
            _ => (self.shared.acquire(Tier::Device, Purpose::Movement(key, Tier::Device)).await?, false),
        };
        if !self.shared.lock().index.begin_fill(id, Tier::Device) {
            let pin = Pin::take(&self.shared, &mut self.shared.lock(), id, Tier::Device, Route::DeviceHit);
            return Ok(pin);
        }
        let (source, filling) = match is_there {
            true => (source, filling),
            false => self.copy_to_device(source, filling).await?,
        };
        let pin = self.shared.publish(id, filling, checksum, route, source);
        self.shared.metrics.moved(route, self.shared.config.block_bytes, started.elapsed());
        Ok(pin)
    }

    /// Copies a pinned host block into a device slot whose fill has begun; ends the fill if that fails.
    async fn copy_to_device(&self, source: Pin, filling: Filling) -> Result<(Pin, Filling)> {
        let (from, to) = ([self.host_segment(source.slot())], self.device_segments(filling.slot()));
        let (source, filling, result) = self.copy_owned(&from, &to, self.promote_direction(), source, filling).await;
        if let Err(error) = result {
            let mut state = self.shared.lock();
            state.index.abort_fill(source.id(), Tier::Device);
            filling.release(&mut state);
            source.release(&mut state);
            drop(state);
            return Err(error);
        }
        Ok((source, filling))
    }

    /// Pins `key` in host memory, after promoting it if necessary.
    pub(super) async fn obtain_host(
        self: &Rc<Self>,
        key: &BlockKey,
        class: Class,
        next: Next,
        mut asked: Asked,
    ) -> Outcome {
        loop {
            let by_caller = std::mem::replace(&mut asked, Asked::InPassing) == Asked::ByCaller;
            let usage = if by_caller { Use::Now } else { Use::Counted };
            let (promotion, source, started) = {
                let mut state = self.shared.lock();
                let (promotion, source) = self.shared.promote_locked(&mut state, key, Tier::Host, class, usage)?;
                let started = match promotion {
                    // Also a flight that a caller began: its command may be queued behind movements like this one.
                    Promotion::Joined(_) | Promotion::Started(_) => state.flights.start(key, Tier::Host),
                    // A movement in flight, to a block that was stored since, is carried out by its command.
                    Promotion::Hit(_) | Promotion::Miss => None,
                };
                (promotion, source, started)
            };
            if by_caller {
                self.shared.metrics.looked_up(source);
            }
            let (receiver, joined) = match promotion {
                Promotion::Hit(pin) => return Ok(Some(pin)),
                Promotion::Miss => return Ok(None),
                Promotion::Joined(receiver) => (receiver, true),
                Promotion::Started(receiver) => (receiver, false),
            };
            if started.is_some() {
                // A task of its own: if the movement becomes overdue, this one continues without it.
                let (this, key, next) = (Rc::clone(self), *key, next.clone());
                self.spawn(async move {
                    let _guard = FlightGuard::new(&this, &key, Tier::Host, started);
                    let outcome = this.fill_host(&key, next).await;
                    this.land(&key, Tier::Host, outcome);
                });
            }
            match self.shared.settle(receiver).await {
                // The joined flight may have begun before the block was removed and stored again: look it up again.
                Some(Ok(None)) if joined => {}
                Some(outcome) => return outcome,
                None => {}
            }
        }
    }

    /// Copies, and takes the device out of service if it has stopped. Returns the owner of the memory.
    pub(super) async fn copied<O: Send + Sync + 'static>(&self, batch: OwnedBatch<O>) -> (Result<()>, O) {
        let (result, owner) = batch.copy(&self.copy).await;
        if result.is_err() {
            self.shared.metrics.copy_errors.add(1);
            if let Some(reason) = self.copy.fault() {
                self.shared.retire_device(reason);
            }
        }
        (result, owner)
    }

    /// Copies between a full slot and one that is being filled; returns both with the result.
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
        let batch = unsafe { OwnedBatch::new(ops, direction, (source, filling)) };
        let (result, (source, filling)) = self.copied(batch).await;
        (source, filling, result)
    }

    /// Copies a device block to `buf`, for a caller on the host.
    pub(super) async fn read_device(&self, pin: Arc<Pin>, buf: Vec<u8>) -> Result<Vec<u8>> {
        let mut buf = buf;
        buf.resize(self.shared.config.block_bytes, 0);
        let to = [Segment { ptr: buf.as_mut_ptr(), len: buf.len() }];
        let ops = pair_segments(&self.device_segments(pin.slot()), &to)?;
        // SAFETY: the device slot is pinned and `buf` is owned: both travel with the batch, and a moved Vec keeps its
        // heap memory in place.
        let batch = unsafe { OwnedBatch::new(ops, self.demote_direction(), (pin, buf)) };
        let started = Instant::now();
        let (result, (_pin, buf)) = self.copied(batch).await;
        result?;
        self.shared.metrics.moved(Route::DeviceToCaller, self.shared.config.block_bytes, started.elapsed());
        Ok(buf)
    }

    pub(super) fn host_segment(&self, slot: u32) -> Segment {
        Segment { ptr: self.shared.host_ptr(slot).as_ptr(), len: self.shared.config.block_bytes }
    }

    pub(super) fn device_segments(&self, slot: u32) -> Vec<Segment> {
        self.device().segments(slot).collect()
    }

    fn device(&self) -> &DevicePool {
        self.shared.device.as_ref().expect("device slots and regions exist only with a device")
    }

    /// The direction of copies from the host to the device: a simulated device is host memory.
    pub(super) fn promote_direction(&self) -> Direction {
        self.device().memory().promote_direction()
    }

    /// The direction of copies from the device to the host.
    pub(super) fn demote_direction(&self) -> Direction {
        self.device().memory().demote_direction()
    }
}
