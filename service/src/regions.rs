//! The regions of one connection, from the memfd or the handle to the end of the last movement.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    ops::RangeInclusive,
    os::fd::OwnedFd,
    rc::Rc,
    sync::Arc,
};

use kvhoist::{
    Cache, Memory, Region, Segment,
    internals::service::{Gpu, IPC_HANDLE_BYTES, MemoryOwner},
};
use tokio::{
    sync::Semaphore,
    task::{JoinHandle, spawn_local},
};

use super::{
    budget::{Account, Charge},
    memory::Mapped,
    protocol::{Failure, Place, RegionKind},
    system::{System, on_thread},
};
use crate::error::{Error, ServiceFault};

/// A client's memory, and what it takes of what all clients may lend.
pub(super) struct Lent {
    mapped: Mapped,
    /// Given back when the memory is unmapped.
    _charge: Charge,
}

impl Lent {
    /// Whether its file had no page where it was used: it has shrunk, or the system has no memory.
    pub(super) fn is_spoiled(&self) -> bool {
        self.mapped.is_spoiled()
    }
}

/// A client's memory, mapped and registered with the cache of its space.
struct Held {
    lent: Rc<Lent>,
    region: Region,
    /// The client has taken it back: no movement begins to use it.
    leaving: Cell<bool>,
    unmapped: Cell<bool>,
}

/// A client's regions, by the client's numbers.
pub(super) struct Regions {
    cache: Cache,
    system: Rc<dyn System>,
    lenders: Rc<Cell<u32>>,
    /// The client, which answers for what its memory does.
    owner: MemoryOwner,
    /// The GPU whose memory it lends.
    gpu: Option<Arc<Gpu>>,
    account: Rc<Account>,
    held: RefCell<BTreeMap<u32, Rc<Held>>>,
    /// How many of them are guarded.
    guards: Cell<usize>,
    /// Regions that were taken out of use so far.
    departures: Cell<u64>,
    /// One region at a time is pinned: the threads that move memory into huge pages are few, and for all clients.
    pins: Semaphore,
}

impl Regions {
    /// `lenders`: the connections of the space that have regions. `client`: its name for the log.
    pub(super) fn new(
        cache: Cache,
        system: Rc<dyn System>,
        lenders: Rc<Cell<u32>>,
        client: String,
        account: Rc<Account>,
        gpu: Option<Arc<Gpu>>,
    ) -> Self {
        let owner = cache.memory_owner(client);
        let (held, guards, departures, pins) =
            (RefCell::default(), Cell::default(), Cell::default(), Semaphore::new(1));
        Regions { cache, system, lenders, owner, gpu, account, held, guards, departures, pins }
    }

    /// The number of connections of the space that have regions.
    pub(super) fn lenders(&self) -> u32 {
        self.lenders.get()
    }

    /// The number of regions, including those that are being released.
    pub(super) fn count(&self) -> usize {
        self.held.borrow().len()
    }

    /// Their bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.held.borrow().values().map(|held| held.lent.mapped.len() as u64).sum()
    }

    /// Whether a region has this number.
    pub(super) fn has(&self, number: u32) -> bool {
        self.held.borrow().contains_key(&number)
    }

    /// Maps and registers a client's memfd under a number that no region has.
    pub(super) fn add(
        &self,
        number: u32,
        kind: RegionKind,
        fd: &OwnedFd,
        offset: u64,
        len: u64,
    ) -> Result<(), Failure> {
        // Before it is mapped: what is too much for all is never mapped.
        let charge = self.account.take(len)?;
        let mapped = self.system.map(fd, offset, len)?;
        self.add_mapped(number, mapped, charge, kind == RegionKind::Simulated, Ok(()))
    }

    /// Maps and registers memory of the client's GPU under a number that no region has, if there is still `room`.
    ///
    /// # Cancel safety
    /// It is not registered.
    pub(super) async fn add_imported(
        &self,
        number: u32,
        handle: [u8; IPC_HANDLE_BYTES],
        (offset, len): (u64, u64),
        room: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let Some(gpu) = self.gpu.clone() else {
            let text =
                "region: found memory of a GPU, expected other memory: the client attached without a CUDA device";
            return Err(Failure::new(ServiceFault::Memory, text));
        };
        let charge = self.account.take(len)?;
        // The driver takes up to a millisecond.
        let import = on_thread(&*self.system, move || gpu.import_memory(&handle, offset, len));
        let imported = import.await.unwrap_or(Err(Error::Closed));
        let imported = imported.map_err(|error| Failure::new(ServiceFault::Memory, error.to_string()))?;
        self.add_mapped(number, Mapped::imported(imported), charge, true, room())
    }

    /// Registers what is mapped, if there is `room`, and else has it unmapped.
    fn add_mapped(
        &self,
        number: u32,
        mapped: Mapped,
        charge: Charge,
        on_device: bool,
        room: Result<(), Failure>,
    ) -> Result<(), Failure> {
        // SAFETY: the memory stays mapped until `release` has unregistered it, or for ever if that is never called.
        // Its owner, another process, may write to it at any time: loaded blocks are verified where they lie. A block
        // that changes while it is stored is later what the service read at that moment, if it is copied first, or
        // else a miss, because it does not match its checksum.
        let memory = unsafe {
            match on_device {
                true => Memory::device(mapped.start(), mapped.len()),
                false => Memory::host(mapped.start(), mapped.len()),
            }
        };
        let memory = memory.guarded(mapped.guard().cloned());
        let lent = Rc::new(Lent { mapped, _charge: charge });
        let added = room.and_then(|()| match self.has(number) {
            // Another request for the number was quicker.
            true => Err(taken(number)),
            false => self.cache.add_region_of(memory, self.owner.clone()).map_err(|error| Failure::from(&error)),
        });
        match added {
            Ok(region) => {
                let held = Held { lent, region, leaving: Cell::new(false), unmapped: Cell::new(false) };
                let mut all = self.held.borrow_mut();
                if all.is_empty() {
                    self.lenders.set(self.lenders.get() + 1);
                }
                self.guards.set(self.guards.get() + usize::from(held.lent.mapped.guard().is_some()));
                all.insert(number, Rc::new(held));
                Ok(())
            }
            Err(failure) => {
                // SAFETY: no cache knows it, and it is unmapped here only.
                drop(unsafe { unmap(&self.system, lent) });
                Err(failure)
            }
        }
    }

    fn get(&self, number: u32) -> Option<Rc<Held>> {
        self.held.borrow().get(&number).cloned()
    }

    /// Asks the kernel to keep a region pinned; false if it does not.
    pub(super) async fn pin(&self, number: u32) -> bool {
        let _others_wait = self.pins.acquire().await.expect("nobody closes it");
        // It may be gone by then.
        let Some(held) = self.get(number) else { return false };
        self.cache.pin_region(&held.region).await.unwrap_or(false)
    }

    /// Those of these places' regions that are guarded. Whoever uses them asks afterwards
    /// [whether they did](Lent::is_spoiled), also of one that was released in between.
    pub(super) fn guarded(&self, places: impl Iterator<Item = Place>) -> BTreeMap<u32, Rc<Lent>> {
        let (held, mut guarded) = (self.held.borrow(), BTreeMap::new());
        if self.guards.get() > 0 {
            let mut last = None;
            for place in places {
                // Blocks lie in few regions, one after the other.
                if last.replace(place.region) == Some(place.region) {
                    continue;
                }
                if let Some(held) = held.get(&place.region).filter(|held| held.lent.mapped.guard().is_some()) {
                    guarded.entry(place.region).or_insert_with(|| Rc::clone(&held.lent));
                }
            }
        }
        guarded
    }

    /// Where a block's places lie in the service's memory. Good until the next await only: a region may leave then.
    pub(super) fn segments(&self, places: impl Iterator<Item = Place>) -> Result<Vec<Segment>, Failure> {
        let held = self.held.borrow();
        places.map(|place| segment(&held, place)).collect()
    }

    /// Where a place lies to whose offset any of these shifts is added, less than 2^63 apart: before that. Good as of
    /// [`segments`](Self::segments).
    pub(super) fn unshifted(&self, place: Place, shifts: RangeInclusive<i64>) -> Result<Segment, Failure> {
        let held = self.held.borrow();
        let at = |shift: i64| segment(&held, Place { offset: place.offset.wrapping_add_signed(shift), ..place });
        // Between the two all others lie: both are below 2^63, so that no sum between them goes past 2^64.
        let (first, _last) = (at(*shifts.start())?, at(*shifts.end())?);
        Ok(Segment { ptr: first.ptr.wrapping_sub(*shifts.start() as usize), len: first.len })
    }

    /// Regions that were taken out of use so far: while the number stays, segments stay good.
    pub(super) fn departures(&self) -> u64 {
        self.departures.get()
    }

    /// Checks places; returns their bytes.
    pub(super) fn check(&self, places: impl Iterator<Item = Place>) -> Result<u64, Failure> {
        let held = self.held.borrow();
        places.map(|place| segment(&held, place).map(|segment| segment.len as u64)).sum()
    }

    /// Takes a region out of use, waits until no movement uses it, and unmaps it. Returns at once if no region has this
    /// number. Every one of several calls for one region waits.
    ///
    /// # Cancel safety
    /// The region is out of use from the first poll on, and stays mapped until a later call has ended.
    pub(super) async fn release(&self, number: u32) {
        let Some(held) = self.get(number) else { return };
        held.leaving.set(true);
        self.departures.set(self.departures.get() + 1);
        if let Err(error) = self.cache.unregister(&held.region).await {
            tracing::error!(%error, "a client's memory stays mapped");
            return;
        }
        if !held.unmapped.replace(true) {
            self.held.borrow_mut().remove(&number);
            self.guards.set(self.guards.get() - usize::from(held.lent.mapped.guard().is_some()));
            if self.count() == 0 {
                self.lenders.set(self.lenders.get() - 1);
            }
            // SAFETY: `unregister` has resolved, so that the cache uses it no longer; `leaving` keeps others from
            // naming it; and it was not unmapped before.
            let unmapped = unsafe { unmap(&self.system, Rc::clone(&held.lent)) };
            drop(unmapped.await);
        }
    }

    /// Releases a region with this memory. Its number may be another's since: that one stays.
    ///
    /// # Cancel safety
    /// As [`release`](Self::release).
    pub(super) async fn give_up(&self, number: u32, lent: &Rc<Lent>) {
        if self.get(number).is_some_and(|held| Rc::ptr_eq(&held.lent, lent)) {
            self.release(number).await;
        }
    }

    /// Releases all of them.
    ///
    /// # Cancel safety
    /// As [`release`](Self::release).
    pub(super) async fn release_all(&self) {
        let numbers: Vec<u32> = self.held.borrow().keys().copied().collect();
        for number in numbers {
            self.release(number).await;
        }
    }
}

/// Where a place lies in the service's memory.
fn segment(held: &BTreeMap<u32, Rc<Held>>, place: Place) -> Result<Segment, Failure> {
    let Place { region, len, offset } = place;
    let wrong = |found: String| Failure::new(ServiceFault::Argument, format!("place: found {found}"));
    let Some(held) = held.get(&region).filter(|held| !held.leaving.get()) else {
        let expected = "one that is registered, whose file has not shrunk, nor lacked a page";
        return Err(wrong(format!("region {region}, expected {expected}")));
    };
    let mapped = &held.lent.mapped;
    if mapped.is_spoiled() {
        return Err(shrunk(region));
    }
    let (len, region_bytes) = (len as usize, mapped.len());
    match usize::try_from(offset).ok().filter(|offset| *offset <= region_bytes && len <= region_bytes - offset) {
        // Within the mapping, or at its end.
        Some(offset) => Ok(Segment { ptr: mapped.start().wrapping_add(offset), len }),
        None => Err(wrong(format!("{len} bytes from {offset} on, expected a range within {region_bytes}"))),
    }
}

/// The failure of a region whose number another one has.
pub(super) fn taken(region: u32) -> Failure {
    let text = format!("region: found {region}, which is registered, expected another number");
    Failure::new(ServiceFault::Argument, text)
}

/// The failure of a region whose file had no page where it was used.
pub(super) fn shrunk(region: u32) -> Failure {
    let text =
        format!("region {region}: found a file that has shrunk or has no page, expected one that keeps its size");
    Failure::new(ServiceFault::Memory, text)
}

/// Unmaps a client's memory, whether the handle is awaited or not, and then gives back what it took of the limits.
///
/// # Safety
/// Nothing uses the memory any longer, nothing will, and this was not called before.
unsafe fn unmap(system: &Rc<dyn System>, lent: Rc<Lent>) -> JoinHandle<()> {
    if let Some(imported) = lent.mapped.take_imported() {
        let system = Rc::clone(system);
        return spawn_local(async move {
            // The driver may wait for the device.
            on_thread(&*system, move || imported.unmap()).await;
            drop(lent);
        });
    }
    lent.mapped.end_guard();
    // SAFETY: `System::map` made it with this length; the caller promises that it is in use nowhere.
    let unmapping = unsafe { system.unmap(lent.mapped.start(), lent.mapped.len()) };
    spawn_local(async move {
        unmapping.await;
        drop(lent);
    })
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;
    use crate::{budget::Budget, config::ServerConfig, system::Machine};

    #[tokio::test]
    async fn a_client_pins_one_region_at_a_time() {
        let cache = Cache::builder().block_bytes(4096).host_bytes(1 << 20).open().await.expect("in memory only");
        let account = Rc::new(Budget::new(&ServerConfig::new("unused"))).account(1);
        let regions = Regions::new(cache.clone(), Rc::new(Machine), Rc::default(), "a test".into(), account, None);
        let turn = regions.pins.acquire().await.expect("open");
        // Region 1 is gone already.
        let mut pin = Box::pin(regions.pin(1));
        assert_eq!((&mut pin).now_or_never(), None, "another one is being pinned");
        drop(turn);
        assert_eq!(pin.now_or_never(), Some(false));
        cache.close().await.expect("in memory only");
    }
}
