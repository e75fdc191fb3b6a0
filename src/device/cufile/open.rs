//! Starts a worker with its files, and runs the self-test that shows which path its reads take.

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
    worker::{Ranges, Submission, Transfers, Worker},
};
use crate::{
    block::{OpKind, Segment},
    config::CufileMode,
    device::{
        cuda::Gpu,
        cufile::sys::{Batch, Counters, Driver, Handle},
    },
};

/// Largest number of transfers in a batch: more are not faster, and libcufile's own limit is 256.
const CAPACITY_MAX: u32 = 128;

/// What a worker needs.
pub(crate) struct Setup {
    pub(crate) gpu: Arc<Gpu>,
    /// The store's files, in the storage's order.
    pub(crate) files: Vec<Arc<File>>,
    /// `Auto` requires a direct path, `On` accepts any.
    pub(crate) mode: CufileMode,
    /// Free device memory, and the range of each file to read into it.
    pub(crate) probe: Part,
    /// Reserves that memory for the self-test.
    pub(crate) probe_owner: Owner,
    /// The device memory of later requests.
    pub(crate) buffers: Vec<Buffer>,
    /// Keeps all of that memory mapped.
    pub(crate) keep: Arc<dyn Any + Send + Sync>,
    /// Time limit of any call.
    pub(crate) limit: Duration,
    /// Number of requests that libcufile has not completed in time.
    pub(crate) stuck: Arc<AtomicI64>,
}

/// Consecutive segments of equal length in device memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Buffer {
    /// The first segment.
    pub(crate) segment: Segment,
    /// Number of segments.
    pub(crate) count: usize,
}

/// A worker that is ready.
pub(crate) struct Opened {
    pub(crate) cufile: Cufile,
    /// The path its reads take, with the counts that show it.
    pub(crate) evidence: String,
    /// True if all reads go from the drive to the device.
    pub(crate) direct: bool,
}

/// Result of the self-test.
struct Ready {
    evidence: String,
    direct: bool,
}

impl Cufile {
    /// Starts a worker and waits until its self-test is done, or the time limit is over.
    ///
    /// # Safety
    /// The probe and all buffers must be device memory that lives as long as `keep`. Nothing else may use the probe's
    /// memory while `probe_owner` lives.
    ///
    /// # Errors
    /// Why the route cannot be used.
    pub(crate) async unsafe fn open(setup: Setup) -> Result<Opened, String> {
        let (ready, is_ready) = oneshot::channel();
        let (ended, has_ended) = oneshot::channel();
        let queue = Arc::new(Queue::default());
        let (limit, stuck) = (setup.limit, Arc::clone(&setup.stuck));
        // One limit to open the library, one for everything after that.
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
                Err(format!("libcufile has not returned from its first calls within {patience:?}; look at cufile.log"))
            }
        }
    }
}

/// The worker's thread.
fn run(setup: Setup, queue: Arc<Queue>, ready: oneshot::Sender<Result<Ready, String>>) {
    let keep = Arc::clone(&setup.keep);
    match prepare(setup, queue) {
        Ok((mut worker, found)) => {
            // If the receiver is gone, the queue is closed.
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
    let text = |fault: crate::device::cufile::sys::CufileError| fault.to_string();
    let mut worker = Worker {
        submission: None,
        ranges: Ranges::none(),
        handles: Vec::with_capacity(files.len()),
        driver,
        gpu,
        capacity: 1,
        queue,
        state: Transfers::default(),
    };
    worker.bind()?;
    for file in files {
        worker.handles.push(Handle::new(driver, file).map_err(text)?);
    }
    let found = self_test(driver, &worker.handles, probe);
    // Only now: a call that never returns keeps the memory reserved.
    drop(probe_owner);
    let found = found?;
    if mode != CufileMode::On && !found.direct {
        return Err(found.evidence);
    }
    if found.direct {
        let capacity = driver.batch_max().clamp(1, CAPACITY_MAX);
        worker.submission = Some(Submission::Batch(Batch::new(driver, capacity).map_err(text)?));
        worker.capacity = capacity as usize;
        worker.ranges = Ranges::of(&buffers, driver.direct_bytes_max());
    } else {
        worker.submission = Some(Submission::OneByOne);
    }
    Ok((worker, found))
}

/// Reads from each file, and compares libcufile's own counters before and after.
fn self_test(driver: &'static Driver, handles: &[Handle], probe: Part) -> Result<Ready, String> {
    let text = |fault: crate::device::cufile::sys::CufileError| fault.to_string();
    let _counting = driver.start_counting().map_err(text)?;
    let before = driver.counters().map_err(text)?;
    for handle in handles {
        // SAFETY: by the contract of `open` only the self-test uses the memory.
        let moved = unsafe { handle.transfer(OpKind::Read, probe.ptr, probe.len, probe.offset) }.map_err(text)?;
        if moved != probe.len {
            return Err(format!("a read of {} bytes at {} moved {moved}", probe.len, probe.offset));
        }
    }
    let after = driver.counters().map_err(text)?;
    let name = driver.name();
    let (Some(before), Some(after)) = (before, after) else {
        let evidence = format!("{name} has no cuFileGetStatsL3, which alone shows a direct path; use 1.15 or later");
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
            evidence: format!("{counted}, but not the bytes of the self-test: the layout of its statistics is unknown"),
            direct: false,
        });
    }
    let direct = after.since(before).proves_reads();
    let path = match (direct, reads_nvfs > 0) {
        (true, true) => "direct by nvidia-fs",
        (true, false) => "direct by PCI peer-to-peer",
        (false, _) => "compat mode (reads into host memory, then copies; load nvidia-fs for the direct path)",
    };
    Ok(Ready { evidence: format!("{path}; {counted}"), direct })
}
