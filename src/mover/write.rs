//! Copying down: host -> disk, because a store waits for it or because the block must go.

use std::{path::PathBuf, rc::Rc, sync::Arc};

use tokio::time::Instant;

use super::{
    Landing, Mover,
    budget::{Kind, Share},
    promote::{Asked, Next},
};
use crate::{
    block::{BlockKey, FileId, OpKind, Route, Tier},
    device::CopyEngine,
    error::{Error, Result},
    index::EntryId,
    io::{Storage, write_from},
    memory::IoBuf,
    state::{Class, Committed, DiskPlace, DiskWrite, Filling, PendingWrite, Pin, Purpose, State},
};

/// Write-backs that may be under way at once; the byte budget bounds what the disk sees of them.
pub(super) const DEMOTING_MAX: u32 = 64;

/// What a write of a block has taken: its share of the bytes in flight and its slot; and where that is, if the block is
/// still to be written.
type BegunWrite = (Share, Filling, Option<DiskPlace>);

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Writes a block to disk and answers those who wait for it.
    pub(super) async fn write(self: Rc<Self>, write: PendingWrite) {
        let PendingWrite { key, pin, started } = write;
        let _landing = Landing::new(&self, &key, Tier::Disk, Some(started));
        let began = Instant::now();
        let (id, pin) = (pin.id(), Arc::new(pin));
        let (written, route) = match pin.tier() {
            Tier::Device => self.write_from_device(&key, &pin).await,
            _ => (self.write_block(&key, &pin).await, Route::HostToDisk),
        };
        if let Ok(true) = self.end_write(&key, id, Some(pin), written).await {
            self.shared.metrics.moved(route, self.shared.config.block_bytes, began.elapsed());
        }
    }

    /// Ends a write and its flight; true if the block is visible on disk by it.
    pub(super) async fn end_write(
        self: &Rc<Self>,
        key: &BlockKey,
        id: EntryId,
        source: Option<Arc<Pin>>,
        written: Result<Option<DiskWrite>>,
    ) -> Result<bool> {
        let result = match written {
            Ok(Some(write)) => {
                let slot = write.filling.slot();
                let mut state = self.lock();
                if state.end_disk_write(write, None) {
                    self.answer_all(self.shared.end_write(state, key, id, source, &Ok(None)));
                    return Ok(true);
                }
                drop(state);
                // Who removed it waits for the end of this: then no record names it any more.
                self.write_record(slot).await
            }
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        if let Err(error) = &result {
            self.shared.metrics.writes_refused.add(1);
            tracing::warn!(%error, "the disk tier did not take a block");
        }
        let outcome = result.clone().map(|()| None);
        self.answer_all(self.shared.end_write(self.lock(), key, id, source, &outcome));
        result.map(|()| false)
    }

    /// What a write to a disk slot came to: the slot is given back where it failed.
    pub(super) fn written(&self, write: DiskWrite, result: Result<()>) -> Result<Option<DiskWrite>> {
        let Err(error) = result else { return Ok(Some(write)) };
        self.lock().end_disk_write(write, Some(&error));
        if let Error::Io { op: "write", .. } = &error {
            self.shared.metrics.write_errors.add(1);
        }
        Err(error)
    }

    /// Writes a block that only the device holds: by libcufile, or by way of host memory where that fails.
    async fn write_from_device(self: &Rc<Self>, key: &BlockKey, pin: &Arc<Pin>) -> (Result<Option<DiskWrite>>, Route) {
        if let Some(result) = self.write_directly(key, pin).await {
            return (result, Route::DeviceToDisk);
        }
        let class = self.shared.lock().flights.class(key, Tier::Disk);
        let result = match self.obtain_host(key, class, Next::Elsewhere, Asked::InPassing).await {
            Ok(Some(host)) => self.write_block(key, &Arc::new(host)).await,
            Ok(None) => Ok(None),
            Err(error) => Err(error),
        };
        (result, Route::HostToDisk)
    }

    /// Writes a block that is in host memory. `None` if it was on disk already or was removed meanwhile.
    async fn write_block(self: &Rc<Self>, key: &BlockKey, pin: &Arc<Pin>) -> Result<Option<DiskWrite>> {
        let begun = self.begin_write_now(&mut self.shared.lock(), key, pin);
        let (share, filling, place) = match begun {
            Some(begun) => begun,
            None => {
                let share = self.share(Kind::Write, Purpose::Movement(key, Tier::Disk)).await;
                let filling = self.shared.acquire(Tier::Disk, Purpose::Movement(key, Tier::Disk)).await?;
                let place = self.shared.lock().begin_host_write(pin, &filling);
                (share, filling, place)
            }
        };
        let id = pin.id();
        let Some(DiskPlace { file, offset, page }) = place else { return Ok(None) };
        // Both at once: whichever comes first on the medium, a record without its payload is found out
        // by the checksum that it carries. Nobody here sees the block before both have ended.
        let (written, recorded) = tokio::join!(self.write_slot(file, offset, pin, filling), self.write_page(page));
        drop(share);
        let (result, filling) = written;
        self.shared.account(&self.failures, file, OpKind::Write, &result);
        let result = result.map_err(|source| Error::io("write", self.path_of(file), source)).and(recorded);
        self.written(DiskWrite { id, filling }, result)
    }

    /// All that a write of a host block takes, where none of it has to be waited for: under one lock.
    fn begin_write_now(&self, state: &mut State, key: &BlockKey, pin: &Pin) -> Option<BegunWrite> {
        let urgency = state.holder_urgency(Purpose::Movement(key, Tier::Disk));
        let slot = || self.shared.acquire_locked(state, Tier::Disk);
        let (share, filling) =
            self.budget.take_now(Kind::Write, urgency, self.shared.config.slot_bytes() as u64, slot)?;
        let place = state.begin_host_write(pin, &filling);
        Some((share, filling, place))
    }

    /// Enters a block in the books of the disk slot that it is about to be written to; says where that is. `None` if it
    /// was removed or is there already.
    pub(super) fn begin_disk_write(&self, id: EntryId, filling: &Filling, checksum: u64) -> Option<DiskPlace> {
        self.shared.lock().begin_disk_write(id, filling, checksum)
    }

    async fn write_slot(
        &self,
        file: FileId,
        offset: u64,
        pin: &Arc<Pin>,
        filling: Filling,
    ) -> (std::io::Result<()>, Filling) {
        let (ptr, fixed) = (self.shared.host_ptr(pin.slot()), self.shared.fixed_buffer(pin.slot()));
        let owner = (Arc::clone(pin), filling);
        // SAFETY: the range is a full host slot, pinned by the owner: nobody writes to it while the
        // buffer lives, and the pin keeps the arena alive. The disk slot is the owner's as well.
        let buf = unsafe { IoBuf::new(ptr, self.shared.config.slot_bytes(), fixed, owner) };
        let (result, (_pin, filling)) = write_from(&self.storage, file, offset, buf).await;
        (result, filling)
    }

    pub(super) fn path_of(&self, file: FileId) -> PathBuf {
        self.shared.config.disks[usize::from(file.0)].path.clone()
    }

    /// Writes dirty blocks back, coldest first, from the low watermark to the high one.
    pub(super) async fn write_back_loop(self: Rc<Self>) {
        loop {
            self.shared.write_back.notified().await;
            while self.demoting.get() < DEMOTING_MAX {
                if self.shared.config.values_writes() {
                    self.decide_coldest().await;
                }
                let Some(write) = self.next_write_back() else { break };
                let demoting = Demoting::new(&self);
                let this = Rc::clone(&self);
                self.spawn(async move {
                    this.write(write).await;
                    drop(demoting);
                });
            }
        }
    }

    fn next_write_back(&self) -> Option<PendingWrite> {
        let shared = &self.shared;
        let mut state = shared.lock();
        if !shared.config.values_writes() {
            let (id, key) = self.coldest_dirty(&state)?;
            return self.begin_write_back(&mut state, id, &key);
        }
        loop {
            let (id, key) = state.next_leaving()?;
            if let Some(write) = self.begin_write_back(&mut state, id, &key) {
                return Some(write);
            }
        }
    }

    fn begin_write_back(&self, state: &mut State, id: EntryId, key: &BlockKey) -> Option<PendingWrite> {
        match self.shared.begin_write(state, id, key, Class::Background, self.shared.config.waiters_max) {
            Ok(Committed::Write(write, _nobody)) => Some(write),
            _ => None,
        }
    }

    /// What must be written or dropped next, if it is time for that.
    pub(super) fn coldest_dirty(&self, state: &State) -> Option<(EntryId, BlockKey)> {
        if !self.shared.write_back_is_due(state, self.demoting.get(), self.shared.config.high_watermark) {
            return None;
        }
        let id = state.index.demotable(Tier::Host)?;
        let key = state.index.key(id);
        // A block under this key that was removed is still being written: its end sets a slot free.
        (!state.flights.contains(&key, Tier::Disk)).then_some((id, key))
    }
}

/// Counts a write-back while it is under way.
struct Demoting<S: Storage, C: CopyEngine>(Rc<Mover<S, C>>);

impl<S: Storage, C: CopyEngine> Demoting<S, C> {
    fn new(mover: &Rc<Mover<S, C>>) -> Self {
        mover.demoting.set(mover.demoting.get() + 1);
        Demoting(Rc::clone(mover))
    }
}

impl<S: Storage, C: CopyEngine> Drop for Demoting<S, C> {
    fn drop(&mut self) {
        self.0.demoting.set(self.0.demoting.get() - 1);
        self.0.shared.write_back.notify_one();
    }
}
