//! Opening: a worker with its files, and the proof of which way its reads go.

use std::{
    any::Any,
    cell::RefCell,
    fs::File,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    thread,
    time::Duration,
};

use tokio::{sync::oneshot, time::timeout};

use super::{
    Cufile, Owner, Part,
    queue::Queue,
    worker::{Moving, Ranges, Way, Worker},
};
use crate::{
    block::{OpKind, Segment},
    config::CufileMode,
    device::{
        cuda::Gpu,
        cufile::sys::{Batch, Counters, Driver, Handle},
    },
};

/// Transfers that the library is given at once, at most: more bring nothing, and its own limit is 256.
const CAPACITY_MAX: u32 = 128;

/// What a worker is made of.
pub(crate) struct Setup {
    pub(crate) gpu: Arc<Gpu>,
    /// The store's files, in the storage's order.
    pub(crate) files: Vec<Arc<File>>,
    /// `Auto` wants the proof of a direct path, `On` takes any.
    pub(crate) mode: CufileMode,
    /// Free device memory, and what of each file is read into it.
    pub(crate) probe: Part,
    /// Keeps that memory to the probe, and nobody else's.
    pub(crate) probe_owner: Owner,
    /// The memory that requests will be for.
    pub(crate) buffers: Vec<Buffer>,
    /// Keeps all of that mapped.
    pub(crate) keep: Arc<dyn Any + Send + Sync>,
    /// How long any call may take.
    pub(crate) limit: Duration,
    /// Counts what the library has not given back.
    pub(crate) stuck: Arc<AtomicI64>,
}

/// Segments of one length that lie one after another in device memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Buffer {
    /// The first.
    pub(crate) segment: Segment,
    /// How many there are.
    pub(crate) count: usize,
}

/// A worker that is ready.
pub(crate) struct Opened {
    pub(crate) cufile: Cufile,
    /// What it does, with the evidence.
    pub(crate) evidence: String,
    /// All reads go from the drive to the device.
    pub(crate) direct: bool,
}

/// What the worker found out.
struct Ready {
    evidence: String,
    direct: bool,
}

impl Cufile {
    /// Starts a worker, and waits until it has proven the path or has not come back within the limit.
    ///
    /// # Safety
    /// The probe and all buffers must be device memory that lives as long as `keep`; the probe's must be nobody else's
    /// as long as `probe_owner` lives.
    ///
    /// # Errors
    /// Why the route cannot be taken, in words.
    pub(crate) async unsafe fn open(setup: Setup) -> Result<Opened, String> {
        let (ready, is_ready) = oneshot::channel();
        let (ended, has_ended) = oneshot::channel();
        let queue = Arc::new(Queue::default());
        let (limit, stuck) = (setup.limit, Arc::clone(&setup.stuck));
        // One for the library, one for all that follows.
        let patience = limit * 2;
        let cufile = Cufile { queue: Arc::clone(&queue), stuck, limit, worker: RefCell::new(Some(has_ended)) };
        let thread = thread::Builder::new().name("kvhoist-cufile".into());
        let main = move || {
            run(setup, queue, ready);
            drop(ended);
        };
        thread.spawn(main).map_err(|error| format!("no thread for libcufile: {error}"))?;
        match timeout(patience, is_ready).await {
            Ok(Ok(Ok(Ready { evidence, direct }))) => Ok(Opened { cufile, evidence, direct }),
            Ok(Ok(Err(reason))) => {
                cufile.close().await;
                Err(reason)
            }
            Ok(Err(_)) => Err("its thread has ended".into()),
            Err(_) => {
                cufile.stuck.fetch_add(1, Ordering::SeqCst);
                Err(format!("libcufile has not come back in {patience:?} from its first calls; look at cufile.log"))
            }
        }
    }
}

/// The worker's thread.
fn run(setup: Setup, queue: Arc<Queue>, ready: oneshot::Sender<Result<Ready, String>>) {
    let keep = Arc::clone(&setup.keep);
    match prepare(setup, queue) {
        Ok((mut worker, found)) => {
            // Where nobody waits for it any more the queue is closed.
            drop(ready.send(Ok(found)));
            worker.serve();
            drop(worker);
        }
        Err(reason) => drop(ready.send(Err(reason))),
    }
    // The memory outlives its registrations.
    drop(keep);
}

fn prepare(setup: Setup, queue: Arc<Queue>) -> Result<(Worker, Ready), String> {
    let Setup { gpu, files, mode, probe, probe_owner, buffers, limit, .. } = setup;
    let driver = Driver::open(limit)?;
    let told = |fault: crate::device::cufile::sys::CufileFault| fault.to_string();
    let mut worker = Worker {
        way: None,
        ranges: Ranges::none(),
        handles: Vec::with_capacity(files.len()),
        driver,
        gpu,
        capacity: 1,
        queue,
        state: Moving::default(),
    };
    worker.bind()?;
    for file in files {
        worker.handles.push(Handle::new(driver, file).map_err(told)?);
    }
    let found = prove(driver, &worker.handles, probe);
    // Not before: what does not come back keeps it.
    drop(probe_owner);
    let found = found?;
    if mode != CufileMode::On && !found.direct {
        return Err(found.evidence);
    }
    if found.direct {
        let capacity = driver.batch_max().clamp(1, CAPACITY_MAX);
        worker.way = Some(Way::Batch(Batch::new(driver, capacity).map_err(told)?));
        worker.capacity = capacity as usize;
        worker.ranges = Ranges::of(&buffers, driver.direct_bytes_max());
    } else {
        worker.way = Some(Way::OneByOne);
    }
    Ok((worker, found))
}

/// Reads from each file, and asks the library which way that went.
fn prove(driver: &'static Driver, handles: &[Handle], probe: Part) -> Result<Ready, String> {
    let told = |fault: crate::device::cufile::sys::CufileFault| fault.to_string();
    let _counting = driver.start_counting().map_err(told)?;
    let before = driver.counters().map_err(told)?;
    for handle in handles {
        // SAFETY: by the contract of `open` the memory is ours alone.
        let moved = unsafe { handle.transfer(OpKind::Read, probe.ptr, probe.len, probe.offset) }.map_err(told)?;
        if moved != probe.len {
            return Err(format!("a read of {} bytes at {} moved {moved}", probe.len, probe.offset));
        }
    }
    let after = driver.counters().map_err(told)?;
    let name = driver.name();
    let (Some(before), Some(after)) = (before, after) else {
        let evidence = format!("{name} has no cuFileGetStatsL3, which alone proves a direct path; use 1.15 or later");
        return Ok(Ready { evidence, direct: false });
    };
    let Counters { read_bytes, reads_p2p, reads_nvfs, reads_posix, .. } = after.since(before);
    let counted = format!(
        "{name}: of {} reads n_nvfs_reads counted {reads_nvfs}, n_p2p_reads {reads_p2p}, \
                           n_posix_reads {reads_posix}",
        handles.len()
    );
    if read_bytes != (probe.len * handles.len()) as u64 {
        return Ok(Ready {
            evidence: format!("{counted}, and not our bytes: its statistics are unknown"),
            direct: false,
        });
    }
    let direct = after.since(before).proves_reads();
    let way = match (direct, reads_nvfs > 0) {
        (true, true) => "direct by nvidia-fs",
        (true, false) => "direct by PCI peer-to-peer",
        (false, _) => "compat mode (reads into host memory, then copies; load nvidia-fs for the direct path)",
    };
    Ok(Ready { evidence: format!("{way}; {counted}"), direct })
}
