//! The route between disk and device that bypasses host memory: libcufile, if a self-test has shown that it is direct.
//!
//! A request that fails is repeated through host memory, in the same movement; its callers only wait longer. Repeated
//! failures, wrong bytes, or a call that does not return retire the route until the cache is opened again, with a
//! reason that [`Stats`](crate::Stats) shows.

use std::{cell::Cell, fs::File, rc::Rc, sync::Arc};

use super::{CufileRoute, Mover, read::OnDisk};
use crate::{
    block::{BlockKey, FileId, IO_ALIGN, OpKind, Segment, Tier},
    checksum::checksum,
    config::EngineMode,
    device::{
        CopyEngine, OwnedBatch,
        cuda::Gpu,
        cufile::{Buffer, Cufile, Ended, Part, SelfTest, Setup},
        left_out, pair_segments,
    },
    error::{Error, Result},
    index::EntryId,
    io::{Storage, read_into},
    memory::AlignedBuf,
    state::{DiskPlace, DiskWrite, Filling, Health, Pin, Purpose, Shared, State},
};

/// Consecutive failed requests after which the route is retired.
const FAILURES_MAX: u32 = 3;

/// Bytes of each file that the self-test reads: the superblocks.
const PROBE_BYTES: usize = 2 * IO_ALIGN;

/// A block that libcufile reads or has read: the pin on its disk slot, and the device slot that it is read to.
pub(super) type Reading = (Pin, Filling);

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Takes the route into service if the settings ask for it and it passes its self-test; its [`Health`] has the
    /// result. `files` are those of the storage; `direct_io`: all of them are open for direct I/O.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the mode is [`EngineMode::On`] and the route cannot be used.
    pub(crate) async fn open_cufile(
        self: &Rc<Self>,
        gpu: Option<Arc<Gpu>>,
        files: Vec<Arc<File>>,
        direct_io: bool,
    ) -> Result<()> {
        let opened = match self.may_open_cufile(gpu, direct_io) {
            Ok(gpu) => self.self_test(gpu, files).await,
            Err(reason) => Err(reason),
        };
        match opened {
            Ok((cufile, SelfTest { evidence, direct })) => {
                tracing::info!(evidence, "blocks go between disk and device by libcufile");
                self.shared.lock().cufile = Health::Up(evidence);
                self.shared.metrics.cufile_in_use.set(if direct { 1.0 } else { 0.5 });
                let direct = CufileRoute { cufile, failures: Cell::new(0) };
                assert!(self.cufile.set(direct).is_ok(), "the route is opened once");
                Ok(())
            }
            Err(reason) => {
                if self.shared.device.is_some() {
                    tracing::info!(reason, "blocks go between disk and device through host memory");
                }
                self.shared.lock().cufile = Health::Retired(reason.clone());
                match self.shared.config.device.cufile {
                    EngineMode::On => Err(Error::unavailable("device", format!("cufile = on: {reason}"))),
                    EngineMode::Auto | EngineMode::Off => Ok(()),
                }
            }
        }
    }

    /// Checks all that can be checked without a call of libcufile. Returns the device, or why the route cannot be used.
    fn may_open_cufile(&self, gpu: Option<Arc<Gpu>>, direct_io: bool) -> Result<Arc<Gpu>, String> {
        let config = &self.shared.config;
        if config.device.cufile == EngineMode::Off {
            return Err("cufile = off".into());
        }
        if let Some(reason) = left_out("cufile") {
            return Err(reason);
        }
        if config.disk.paths.is_empty() {
            return Err("there is no disk tier".into());
        }
        let (Some(gpu), Some(pool)) = (gpu, &self.shared.device) else {
            return Err("there is no CUDA device".into());
        };
        if !direct_io {
            return Err("a path of the disk tier has no direct I/O".into());
        }
        let odd = pool.layout().layout().segments().iter().find(|len| !len.is_multiple_of(IO_ALIGN));
        if let Some(odd) = odd {
            return Err(format!(
                "found a segment of {odd} bytes in device_layout, expected multiples of {IO_ALIGN} for direct I/O"
            ));
        }
        if !pool.memory().base().as_ptr().addr().is_multiple_of(IO_ALIGN) {
            return Err(format!("the device gave memory at {:p}, no multiple of {IO_ALIGN}", pool.memory().base()));
        }
        Ok(gpu)
    }

    async fn self_test(self: &Rc<Self>, gpu: Arc<Gpu>, files: Vec<Arc<File>>) -> Result<(Cufile, SelfTest), String> {
        let shared = &self.shared;
        let pool = shared.device.as_ref().expect("there is a device");
        let limit = std::time::Duration::from_millis(shared.config.device.cufile_stuck_ms);
        let filling = shared.acquire(Tier::Device, Purpose::Call).await.map_err(|error| error.to_string())?;
        let segment = pool.segments(filling.slot()).next().expect("a block has a segment");
        let len = segment.len.min(PROBE_BYTES);
        let last = FileId(u16::try_from(files.len() - 1).expect("at most 64 disks"));
        let filling = Arc::new(filling);
        let setup = Setup {
            gpu,
            files,
            mode: shared.config.device.cufile,
            probe: Part { ptr: segment.ptr, len, offset: 0 },
            probe_owner: Box::new(Arc::clone(&filling)),
            buffers: pool.buffers().map(|(segment, count)| Buffer { segment, count: count as usize }).collect(),
            keep: Arc::clone(shared) as _,
            limit,
            stuck: Arc::clone(&shared.cufile_stuck),
        };
        // SAFETY: the probe is an unpublished slot, which `probe_owner` keeps; it and all buffers lie in the pool,
        // which `shared` keeps.
        let (cufile, proof) = unsafe { Cufile::open(setup).await }?;
        // Every file was read into the same memory, which now has the start of the last one.
        let wanted = AlignedBuf::zeroed(PROBE_BYTES);
        let (read, wanted) = read_into(&self.storage, last, 0, wanted.into_io()).await;
        read.map_err(|error| format!("the store cannot be read: {error}"))?;
        let found = self.copy_to_host(&[Segment { ptr: segment.ptr, len }], filling).await;
        match found {
            Ok(found) if found[..] == wanted[..len] => Ok((cufile, proof)),
            Ok(_) => {
                cufile.close().await;
                Err("libcufile reported a read, and the device does not hold what is in the file".into())
            }
            Err(error) => {
                cufile.close().await;
                Err(error.to_string())
            }
        }
    }

    /// Reads a block into a device slot by libcufile. After an error the block goes through host memory; the error has
    /// what the read owned, unless libcufile still holds it.
    pub(super) async fn read_by_cufile(
        &self,
        direct: &CufileRoute,
        block: OnDisk,
        filling: Filling,
    ) -> Result<Reading, Option<Reading>> {
        let OnDisk { pin, file, offset, .. } = block;
        let parts = self.parts(filling.slot(), offset);
        let reading: Reading = (pin, filling);
        // SAFETY: the device slot is unpublished and travels as owner, as does the pin on the disk slot; both keep the
        // pool.
        match unsafe { direct.cufile.transfer(OpKind::Read, file, parts, reading).await } {
            Ended::Done(reading) => {
                direct.failures.set(0);
                Ok(reading)
            }
            Ended::Failed(reading, reason) => {
                self.cufile_failed(direct, &reason);
                Err(Some(reading))
            }
            Ended::Stuck(reason) => {
                self.retire_cufile(direct, format!("libcufile is stuck: {reason}"));
                Err(None)
            }
        }
    }

    /// Retires the route because a read by libcufile gave wrong bytes and one through host memory the right ones.
    pub(super) fn blame_cufile(&self) {
        if let Some(direct) = self.cufile.get() {
            self.shared.metrics.cufile_errors.add(1);
            let reason = "libcufile gave wrong bytes where a read through host memory was right";
            self.retire_cufile(direct, reason.into());
        }
    }

    /// Writes a block that only the device holds. `None` if it must go through host memory.
    pub(super) async fn write_by_cufile(
        self: &Rc<Self>,
        key: &BlockKey,
        pin: &Arc<Pin>,
    ) -> Option<Result<Option<DiskWrite>>> {
        let direct = self.cufile.get()?;
        if !self.shared.lock().cufile.writes() {
            return None;
        }
        let (share, DiskWrite { id, filling }, place) = match self.begin_write(key, pin).await {
            Ok(Some(begun)) => begun,
            Ok(None) => return Some(Ok(None)),
            Err(error) => return Some(Err(error)),
        };
        let (slot, DiskPlace { file, offset, page }) = (filling.slot(), place);
        let owner = (Arc::clone(pin), filling);
        let parts = self.parts(pin.slot(), offset);
        // SAFETY: the device slot is pinned and full, the disk slot unpublished; both travel as owner.
        let transfer = unsafe { direct.cufile.transfer(OpKind::Write, file, parts, owner) };
        let (ended, recorded) = tokio::join!(transfer, self.write_page(page));
        drop(share);
        let fault = match ended {
            Ended::Done((_pin, filling)) => {
                direct.failures.set(0);
                return Some(self.written(DiskWrite { id, filling }, recorded));
            }
            Ended::Failed((_pin, filling), reason) => {
                self.cufile_failed(direct, &reason);
                Some(filling)
            }
            Ended::Stuck(reason) => {
                self.retire_cufile(direct, format!("libcufile is stuck: {reason}"));
                None
            }
        };
        self.shared.abort_cufile_write(id, slot, fault);
        // If the block is removed before it is written elsewhere, no record may name it. After an error the page stays
        // stale, and a removal of the block writes it again.
        drop(self.write_record(slot).await);
        None
    }

    /// The parts of a block: one for each segment of its device slot.
    pub(super) fn parts(&self, slot: u32, offset: u64) -> Vec<Part> {
        let mut at = offset;
        let segments = self.device_segments(slot).into_iter();
        segments
            .map(|Segment { ptr, len }| {
                let part = Part { ptr, len, offset: at };
                at += len as u64;
                part
            })
            .collect()
    }

    /// The checksum of a block in a device slot: computed by the device if it can, otherwise from a copy in host
    /// memory.
    pub(super) async fn checksum_on_device(&self, filling: Filling) -> (Result<u64>, Filling) {
        let segments = self.device_segments(filling.slot());
        let filling = Arc::new(filling);
        // SAFETY: an unpublished slot of the pool, which its `Filling` keeps; the read into it has ended.
        let sum = unsafe { self.copy.checksum(&segments, Arc::clone(&filling) as _) };
        let result = match sum.await {
            Some(result) => result,
            None => self.copy_to_host(&segments, Arc::clone(&filling)).await.map(|bytes| checksum(&bytes)),
        };
        (result, Arc::into_inner(filling).expect("the engine keeps no owner"))
    }

    /// Copies device memory, which `owner` keeps, to the host.
    async fn copy_to_host(&self, segments: &[Segment], owner: Arc<Filling>) -> Result<Vec<u8>> {
        let mut buf = vec![0; segments.iter().map(|segment| segment.len).sum()];
        let ops = pair_segments(segments, &[Segment { ptr: buf.as_mut_ptr(), len: buf.len() }])?;
        // SAFETY: the slot is unpublished and `buf` is owned: both travel with the batch, and a moved Vec keeps its
        // heap memory in place.
        let batch = unsafe { OwnedBatch::new(ops, self.demote_direction(), (owner, buf)) };
        let (result, (_owner, buf)) = self.copied(batch).await;
        result.map(|()| buf)
    }

    /// Counts a failed request; retires the route after too many in a row.
    pub(super) fn cufile_failed(&self, direct: &CufileRoute, reason: &str) {
        self.shared.metrics.cufile_errors.add(1);
        direct.failures.set(direct.failures.get() + 1);
        tracing::warn!(reason, "libcufile did not move a block; it goes through host memory");
        if direct.failures.get() >= FAILURES_MAX {
            self.retire_cufile(direct, format!("{FAILURES_MAX} requests in a row failed, the last with: {reason}"));
        }
    }

    /// Retires the route; requests that libcufile has not taken yet go through host memory.
    pub(super) fn retire_cufile(&self, direct: &CufileRoute, reason: String) {
        if !self.shared.lock().cufile.lower(Health::Retired(reason.clone())) {
            return;
        }
        tracing::error!(reason, "libcufile moves no more blocks; they go through host memory");
        self.shared.metrics.cufile_in_use.set(0.0);
        direct.cufile.retire();
    }

    /// Ends the worker. Transfers that libcufile does not return keep their files, slots and memory.
    pub(super) async fn close_cufile(&self) {
        let Some(direct) = self.cufile.get() else { return };
        if !direct.cufile.close().await {
            tracing::error!(
                "libcufile has not come back: the store's files stay open, and locked, for as long as this process runs"
            );
        }
    }
}

impl State {
    /// True if libcufile may read the block: it is on disk, in no faster tier, and not being read to host memory.
    pub(super) fn is_for_cufile(&self, key: &BlockKey) -> bool {
        let Some(id) = self.index.find(key) else { return false };
        self.cufile.reads()
            && self.disk_service.reads()
            && self.index.best_tier(id) == Some(Tier::Disk)
            && !self.flights.contains(key, Tier::Host)
    }
}

impl Shared {
    /// Ends a failed read. `reading` is `None` if libcufile still uses its pin and slot.
    pub(super) fn abort_cufile_read(&self, id: EntryId, reading: Option<Reading>) {
        let mut state = self.lock();
        state.index.abort_fill(id, Tier::Device);
        if let Some((pin, filling)) = reading {
            filling.release(&mut state);
            pin.release(&mut state);
        }
    }

    /// Ends a failed write. `filling` is `None` if libcufile still uses its slot.
    pub(super) fn abort_cufile_write(&self, id: EntryId, slot: u32, filling: Option<Filling>) {
        let mut state = self.lock();
        let key = state.index.key(id);
        state.index.abort_fill(id, Tier::Disk);
        state.disk_slots().clear(slot, &key);
        state.note_given_up(&key, id);
        if let Some(filling) = filling {
            filling.release(&mut state);
        }
    }
}
