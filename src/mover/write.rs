//! Writing a block to disk, because a store waits for it or because it must leave its tier: from a host slot, a device
//! slot, or a caller's memory.

use std::{path::PathBuf, rc::Rc, sync::Arc};

use futures_util::future::join;
use tokio::time::Instant;

use super::{Mover, block_memory::BlockMemory};
use crate::{
    block::{BlockKey, FileId, OpKind, Route, Tier},
    device::CopyEngine,
    error::{Error, Result},
    index::EntryId,
    io::Storage,
    shield::log,
    state::{BegunWrite, Class, Committed, DiskWrite, Locked, PendingWrite, Pin, Purpose, Taken, is_of_memory},
};

/// Write-backs in flight at once; the byte budget bounds how many of them the disk has.
pub(super) const DEMOTING_MAX: u32 = 64;

/// What a write came to, and the disk slot that it has begun to write to, if one.
pub(super) type Written = (Option<DiskWrite>, Result<()>);

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Writes a block to disk and answers its waiters.
    pub(super) async fn write(self: Rc<Self>, write: PendingWrite) {
        let PendingWrite { key, pin, begun } = write;
        let began = Instant::now();
        let (id, pin) = (pin.id(), Arc::new(pin));
        let (written, route) = match begun {
            Ok(begun) => (self.write_out(begun, Arc::clone(&pin)).await, Route::HostToDisk),
            // Boxed: every write would have room for it.
            Err(taken) => Box::pin(self.write_pinned(&key, &pin, taken)).await,
        };
        if let Ok(true) = self.end_write(&key, id, Some(pin), written).await {
            self.shared.metrics.moved(route, began.elapsed());
        }
    }

    /// Ends a write and its flight; true if the block is visible on disk by it. The slot of a write that has failed is
    /// given back.
    pub(super) async fn end_write(
        self: &Rc<Self>,
        key: &BlockKey,
        id: EntryId,
        source: Option<Arc<Pin>>,
        (write, mut result): Written,
    ) -> Result<bool> {
        let is_of_disk = write.is_some() && matches!(&result, Err(Error::Io { op: "write", .. }));
        let (mut state, mut is_visible) = (self.lock(), false);
        if let Some(write) = write {
            let slot = write.filling.slot();
            is_visible = state.end_disk_write(write, result.as_ref().err());
            if !is_visible && result.is_ok() {
                drop(state);
                // The removal waits for the end of this: no record names the block then.
                result = Box::pin(self.write_record(slot)).await;
                state = self.lock();
            }
        }
        let end = self.shared.end_write(state, key, id, source, result.clone().map(|()| None));
        match &result {
            // A client may take its memory away as often as it likes.
            Err(error) if is_of_memory(error) => log(|| tracing::debug!(%error, "a block's memory could not be read")),
            Err(error) => {
                self.shared.metrics.write_errors.add(is_of_disk.into());
                self.shared.metrics.writes_refused.add(1);
                let count = self.shared.metrics.writes_refused.get();
                // A bad drive has many: a warning for each power of two, counters for the others.
                if count.is_power_of_two() {
                    log(|| tracing::warn!(%error, count, "the disk tier did not take a block"));
                } else {
                    log(|| tracing::debug!(%error, count, "the disk tier did not take a block"));
                }
            }
            Ok(()) => {}
        }
        self.answer_all(end);
        result.map(|()| is_visible)
    }

    /// Writes a pinned block: from the device by libcufile, where that works, else from host memory.
    async fn write_pinned(self: &Rc<Self>, key: &BlockKey, pin: &Arc<Pin>, taken: Taken) -> (Written, Route) {
        let from_device = pin.tier() == Tier::Device;
        if from_device
            && self.cufile.get().is_some()
            && self.shared.lock().cufile.writes()
            && let Some(written) = Box::pin(self.write_by_cufile(key, pin)).await
        {
            return (written, Route::DeviceToDisk);
        }
        let written = match from_device {
            true => Box::pin(self.write_through_host(key, pin.id())).await,
            false => self.write_block(key, pin, taken).await,
        };
        (written, Route::HostToDisk)
    }

    /// Writes a block that only the device holds, by way of a host slot.
    pub(super) async fn write_through_host(self: &Rc<Self>, key: &BlockKey, id: EntryId) -> Written {
        let class = self.shared.lock().flights.class(key, Tier::Disk);
        match self.obtain_host(key, class).await {
            Ok(Some(host)) if host.id() == id => self.write_block(key, &Arc::new(host), Taken::default()).await,
            Ok(_) => {
                let state = self.shared.lock();
                // It was removed, and the write of a block that was stored under its key since follows this one. Or the
                // device went out of service, and the block with it.
                let is_lost = state.index.find(key) == Some(id);
                (None, if is_lost { state.check_service(Tier::Device) } else { Ok(()) })
            }
            Err(error) => (None, Err(error)),
        }
    }

    /// Writes a block that is pinned in host memory, unless it was on disk already or was removed meanwhile.
    async fn write_block(self: &Rc<Self>, key: &BlockKey, pin: &Arc<Pin>, taken: Taken) -> Written {
        match self.begin_write(key, pin, taken).await {
            Ok(Some(begun)) => self.write_out(begun, Arc::clone(pin)).await,
            Ok(None) => (None, Ok(())),
            Err(error) => (None, Err(error)),
        }
    }

    /// Takes what the write of a pinned block needs beside what it has taken. `None` if the block was on disk already,
    /// or was removed meanwhile.
    pub(super) async fn begin_write(&self, key: &BlockKey, pin: &Pin, taken: Taken) -> Result<Option<BegunWrite>> {
        let begin = |state: &mut Locked<'_>, taken| state.begin_pinned_write(pin, taken);
        Ok(self.take_and_begin(taken, Purpose::Movement(key, Tier::Disk), begin).await?.ok())
    }

    /// Writes a block from host memory to its disk slot, and its record.
    pub(super) async fn write_out<M: BlockMemory>(
        self: &Rc<Self>,
        (permit, DiskWrite { id, filling }, place): BegunWrite,
        from: M,
    ) -> Written {
        // Both at once: whichever is on the medium first, a record without its payload is found by the checksum that it
        // carries. Nobody here sees the block before both are there.
        let payload = self.write_payload(&permit, &place, from, filling);
        let ((result, _from, filling), recorded) = join(payload, self.write_page(place.page)).await;
        drop(permit);
        self.shared.account(&self.shared.failures, place.file, OpKind::Write, &result);
        let result = result.map_err(|source| Error::io("write", self.path_of(place.file), source)).and(recorded);
        (Some(DiskWrite { id, filling }), result)
    }

    pub(super) fn path_of(&self, file: FileId) -> PathBuf {
        self.shared.config.disk.paths[usize::from(file.0)].path.clone()
    }

    /// Writes dirty blocks back, coldest first, from the low watermark to the high one.
    pub(super) async fn write_back_loop(self: Rc<Self>) {
        loop {
            self.shared.write_back.notified().await;
            while self.may_write_back() {
                let next = match self.shared.config.values_writes() {
                    true => self.next_by_value().await,
                    false => self.next_write_back(),
                };
                let Some(write) = next else { break };
                self.demoting.update(|demoting| demoting + 1);
                let this = Rc::clone(&self);
                self.spawn(async move {
                    Rc::clone(&this).write(write).await;
                    this.demoting.update(|demoting| demoting - 1);
                    this.shared.write_back.notify_one();
                });
            }
        }
    }

    /// True if another write-back may begin. The end of one that is overdue may be far: a drive that hangs must not
    /// stop those to the others.
    fn may_write_back(&self) -> bool {
        let demoting = self.demoting.get() as usize;
        let max = DEMOTING_MAX as usize;
        demoting < max || demoting < max + self.shared.lock().flights.overdue(Tier::Disk)
    }

    fn next_write_back(&self) -> Option<PendingWrite> {
        let mut state = self.shared.lock();
        let (id, key) = self.coldest_dirty(&state)?;
        self.begin_write_back(&mut state, id, &key)
    }

    pub(super) fn begin_write_back(&self, state: &mut Locked<'_>, id: EntryId, key: &BlockKey) -> Option<PendingWrite> {
        match state.begin_write(id, key, Class::Background, self.shared.config.limits.waiters_max) {
            Ok(Committed::Write(write, _nobody)) => Some(write),
            _ => None,
        }
    }

    /// The block to be written or dropped next, if it is time for that.
    pub(super) fn coldest_dirty(&self, state: &Locked<'_>) -> Option<(EntryId, BlockKey)> {
        if !state.write_back_is_due(self.demoting.get(), self.shared.config.host.high_watermark) {
            return None;
        }
        let id = state.demotable()?;
        Some((id, state.index.key(id)))
    }
}
