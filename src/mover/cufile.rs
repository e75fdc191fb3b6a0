//! The route between disk and device that bypasses host memory: libcufile, if a self-test has shown that it is direct.
//!
//! A request that fails is repeated through host memory, in the same movement; its callers only wait longer. Repeated
//! failures, wrong bytes, or a call that does not return retire the route until the cache is opened again, with a
//! reason that [`Stats`](crate::Stats) shows.

use std::{cell::Cell, fs::File, rc::Rc, sync::Arc};

use super::{CufileRoute, Mover, block_memory};
use crate::{
    block::{FileId, IO_ALIGN, OpKind, Tier},
    config::EngineMode,
    device::{
        CopyEngine,
        cuda::Gpu,
        cufile::{Buffer, Cufile, Part, SelfTest, Setup},
        left_out,
    },
    error::{Error, Result},
    io::{Storage, transfer_owned},
    memory::AlignedBuf,
    shield::log,
    state::{Health, Purpose},
};

/// Consecutive failed requests after which the route is retired.
const FAILURES_MAX: u32 = 3;

/// Bytes of each file that the self-test reads: the superblocks.
const PROBE_BYTES: usize = 2 * IO_ALIGN;

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
                log(|| tracing::info!(evidence, "blocks go between disk and device by libcufile"));
                self.shared.lock().cufile = Health::Up(evidence);
                self.shared.metrics.cufile_in_use.set(if direct { 1.0 } else { 0.5 });
                let route = CufileRoute { cufile, failures: Cell::new(0) };
                assert!(self.cufile.set(route).is_ok(), "the route is opened once");
                Ok(())
            }
            Err(reason) => {
                if self.shared.device.is_some() {
                    log(|| tracing::info!(reason, "blocks go between disk and device through host memory"));
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
        let (read, wanted) = transfer_owned(&self.storage, OpKind::Read, last, 0, wanted.into_io()).await;
        read.map_err(|error| format!("the store cannot be read: {error}"))?;
        match self.copy_to_host(filling).await.map(block_memory::Buffer::into_bytes) {
            Ok(found) if found[..len] == wanted[..len] => Ok((cufile, proof)),
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

    /// Retires the route because a read by libcufile gave wrong bytes and one through host memory the right ones.
    pub(super) fn blame_cufile(&self) {
        if let Some(route) = self.cufile.get() {
            self.shared.metrics.cufile_errors.add(1);
            let reason = "libcufile gave wrong bytes where a read through host memory was right";
            self.retire_cufile(route, reason.into());
        }
    }

    /// Counts a failed request; retires the route after too many in a row.
    pub(super) fn cufile_failed(&self, route: &CufileRoute, reason: &str) {
        self.shared.metrics.cufile_errors.add(1);
        route.failures.set(route.failures.get() + 1);
        log(|| tracing::warn!(reason, "libcufile did not move a block; it goes through host memory"));
        if route.failures.get() >= FAILURES_MAX {
            self.retire_cufile(route, format!("{FAILURES_MAX} requests in a row failed, the last with: {reason}"));
        }
    }

    /// Retires the route; requests that libcufile has not taken yet go through host memory.
    pub(super) fn retire_cufile(&self, route: &CufileRoute, reason: String) {
        if !self.shared.lock().cufile.lower(Health::Retired(reason.clone())) {
            return;
        }
        self.shared.metrics.cufile_in_use.set(0.0);
        route.cufile.retire();
        log(|| tracing::error!(reason, "libcufile moves no more blocks; they go through host memory"));
    }

    /// Ends the worker. Transfers that libcufile does not return keep their files, slots and memory.
    pub(super) async fn close_cufile(&self) {
        let Some(route) = self.cufile.get() else { return };
        if !route.cufile.close().await {
            let open = "the store's files stay open, and locked, for as long as this process runs";
            log(|| tracing::error!("libcufile has not come back: {open}"));
        }
    }
}
