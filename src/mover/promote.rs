//! Promotion: to the device, and into host memory as a step of another movement.

use std::{rc::Rc, sync::Arc};

use tokio::time::Instant;

use super::{
    Mover,
    block_memory::Buffer,
    plan::{Fill, Flight, Read, Step},
    read::Verifier,
    speculative_copy::DeviceCopy,
};
use crate::{
    block::{BlockKey, Route, Tier},
    device::CopyEngine,
    error::{Error, Result},
    io::Storage,
    state::{Class, Filling, Outcome, Pin, Purpose, Use},
};

/// How often a block is brought to host memory while it waits for a slot of the device. The last time it stays there.
const DEVICE_SLOT_TRIES: u32 = 8;

/// A block on its way to the device.
enum Ready {
    /// It is there: it was copied and verified on its way to host memory.
    OnDevice(Pin),
    /// It is in host memory, and has a slot of the device; the route of all of its way.
    InHost(Pin, Filling, Route),
}

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Makes a block resident in host memory or on the device, and answers its waiters.
    pub(super) async fn promote(self: Rc<Self>, key: BlockKey, to: Tier) {
        assert!(matches!(to, Tier::Host | Tier::Device), "copies to disk are writes");
        let fill = self.take_on(&mut self.shared.lock(), &key, to);
        // Otherwise a movement that could not wait for this command has taken it on.
        let Some(fill) = fill else { return };
        if to == Tier::Host {
            return self.fill_host(fill, None).await;
        }
        let started = Instant::now();
        // Boxed: every read would have room for it.
        let outcome = Box::pin(self.fill_device(fill)).await;
        if let Ok(Some(pin)) = &outcome
            && pin.route() != Route::DeviceHit
        {
            self.shared.metrics.moved(pin.route(), started.elapsed());
        }
        self.end_flight(&key, Tier::Device, outcome);
    }

    async fn fill_device(self: &Rc<Self>, Fill { mut trip, step }: Fill) -> Outcome {
        let mut step = self.ready(&mut trip, step).await?;
        if let Step::OnDisk(block) = step {
            let (id, checksum, route) = (block.pin.id(), block.checksum, trip.route());
            if let Some((pin, filling)) = self.read_by_cufile(&mut trip, block).await? {
                return Ok(self.shared.lock().publish(id, filling, checksum, route, pin));
            }
            trip.rule_out();
            step = self.plan(&mut self.shared.lock(), &mut trip)?;
        }
        let Some(ready) = self.host_and_device_slot(&trip.key, step).await? else { return Ok(None) };
        if trip.is_suspect {
            self.blame_cufile();
        }
        let (source, filling, route) = match ready {
            Ready::OnDevice(pin) => return Ok(Some(pin)),
            Ready::InHost(source, filling, route) => (source, filling, route),
        };
        let id = source.id();
        {
            let mut state = self.shared.lock();
            if !state.index.begin_fill(id, Tier::Device) {
                let pin = state.pin(id, Tier::Device, Route::DeviceHit);
                filling.release(&mut state);
                source.release(&mut state);
                return Ok(pin);
            }
        }
        let (source, filling) = match self.copy_onward(source, filling).await {
            Ok((Ok(()), source, filling)) => (source, filling),
            Ok((Err(error), ..)) | Err(error) => {
                self.shared.lock().index.abort_fill(id, Tier::Device);
                return Err(error);
            }
        };
        let mut state = self.shared.lock();
        let checksum = state.checksum(&source);
        Ok(state.publish(id, filling, checksum, route, source))
    }

    /// Pins a block in host memory, and takes a slot of the device for it, unless it is there by then. `None` where it
    /// is resident nowhere.
    async fn host_and_device_slot(self: &Rc<Self>, key: &BlockKey, mut step: Step) -> Result<Option<Ready>> {
        let (mut route, copy) = (None, DeviceCopy::default());
        for tries in (0..DEVICE_SLOT_TRIES).rev() {
            let outcome = self.to_host(key, Class::Awaited, step, Some(Rc::clone(&copy))).await?;
            let Some(source) = outcome else { return Ok(None) };
            if let Some(pin) = copy.take() {
                return Ok(Some(Ready::OnDevice(pin)));
            }
            let route = *route.get_or_insert(match source.route() {
                Route::DiskToHost => Route::DiskToHostToDevice,
                _ => Route::HostToDevice,
            });
            let free = self.shared.lock().acquire(Tier::Device);
            if let Some(filling) = free {
                return Ok(Some(Ready::InHost(source, filling, route)));
            }
            let purpose = Purpose::Movement(key, Tier::Device);
            if tries == 0 {
                let filling = self.shared.acquire(Tier::Device, purpose).await?;
                return Ok(Some(Ready::InHost(source, filling, route)));
            }
            // Who holds a slot of one tier does not wait for one of the other: its holder may do the reverse.
            drop(source);
            let filling = self.shared.acquire(Tier::Device, purpose).await?;
            let again = (Class::Awaited, Use::Counted);
            step = self.begin_to_host(&mut self.shared.lock(), key, again, Read::Waits)?;
            if let Step::Pinned(source) = step {
                return Ok(Some(Ready::InHost(source, filling, route)));
            }
        }
        unreachable!("the last try waits")
    }

    /// Pins a block in host memory, once its movement there has ended; carries that out where `step` has begun it.
    pub(super) async fn to_host(
        self: &Rc<Self>,
        key: &BlockKey,
        class: Class,
        step: Step,
        verifier: Verifier,
    ) -> Outcome {
        let (mut step, mut was_asked) = (step, false);
        loop {
            let Flight { outcome, is_joined, begun } = match step {
                Step::Flight(flight) => flight,
                Step::Pinned(pin) => return Ok(Some(pin)),
                Step::Remote(usage) => {
                    // Once: what was evicted again at once is a miss.
                    if was_asked {
                        self.shared.metrics.misses.add(u64::from(usage == Use::Now));
                        return Ok(None);
                    }
                    was_asked = true;
                    let usage = Box::pin(self.shared.bring(key, usage)).await?;
                    step = self.begin_to_host(&mut self.shared.lock(), key, (class, usage), Read::Waits)?;
                    continue;
                }
                _ => return Ok(None),
            };
            if let Some(fill) = begun {
                self.begin_fill(fill, verifier.clone());
            }
            match outcome.await.unwrap_or(Err(Error::Closed)) {
                // The joined flight may have begun before the block was removed and stored again: look it up again.
                Ok(None) if is_joined => {}
                outcome => return outcome,
            }
            step = self.begin_to_host(&mut self.shared.lock(), key, (class, Use::Counted), Read::Waits)?;
        }
    }

    /// As [`to_host`](Self::to_host), from its beginning, for a step of another movement.
    pub(super) async fn obtain_host(self: &Rc<Self>, key: &BlockKey, class: Class) -> Outcome {
        let step = self.begin_to_host(&mut self.shared.lock(), key, (class, Use::Counted), Read::Waits)?;
        self.to_host(key, class, step, None).await
    }

    /// Copies a device block to `buf`, for a caller on the host.
    pub(super) async fn read_device(&self, pin: Arc<Pin>, buf: Vec<u8>) -> Result<Vec<u8>> {
        let started = Instant::now();
        let (result, _, buffer) = self.copy(pin, Buffer::new(buf, &self.shared)).await?;
        result?;
        self.shared.metrics.moved(Route::DeviceToCaller, started.elapsed());
        Ok(buffer.into_bytes())
    }
}
