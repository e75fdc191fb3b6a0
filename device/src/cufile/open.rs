//! Starts a worker with its files, and runs the self-test that shows which path its reads take.

use std::{
    cell::RefCell,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    thread,
};

use tokio::{sync::oneshot, time::timeout};

use kvhoist_base::block::OpKind;

use super::{
    Cufile, Part, SelfTest, Setup,
    queue::Queue,
    request::Request,
    worker::{Ranges, Submission, Transfers, Worker},
};
use crate::{
    EngineMode,
    cufile::sys::{Batch, Counters, CufileError, Driver, Handle},
};

/// Largest number of transfers in a batch: more are not faster, and libcufile's own limit is 256.
const CAPACITY_MAX: u32 = 128;

impl Cufile {
    /// Starts a worker and waits until its self-test is done, or the time limit is over.
    ///
    /// # Safety
    /// The probe and all buffers must be device memory that lives as long as `keep`. Nothing else may use the probe's
    /// memory while `probe_owner` lives.
    ///
    /// # Errors
    /// Why the route cannot be used.
    pub async unsafe fn open(setup: Setup) -> Result<(Cufile, SelfTest), String> {
        let (ready, is_ready) = oneshot::channel();
        let (ended, has_ended) = oneshot::channel();
        let queue = Arc::new(Queue::default());
        let (limit, stuck) = (setup.limit, Arc::clone(&setup.stuck));
        // One limit to open the library, one to wait for other counts, one for everything after that.
        let limit_of_all = limit * 3;
        let cufile = Cufile { queue: Arc::clone(&queue), stuck, limit, worker: RefCell::new(Some(has_ended)) };
        let thread = thread::Builder::new().name("kvhoist-cufile".into());
        let first = FirstCalls::begin(&setup.stuck);
        let main = move || {
            run(setup, queue, first, ready);
            drop(ended);
        };
        thread.spawn(main).map_err(|error| format!("no thread for libcufile: {error}"))?;
        match timeout(limit_of_all, is_ready).await {
            Ok(Ok(Ok(found))) => Ok((cufile, found)),
            Ok(Ok(Err(reason))) => {
                cufile.close().await;
                Err(reason)
            }
            Ok(Err(_)) => Err("its thread has ended".into()),
            Err(_) => Err(format!(
                "libcufile has not returned from its first calls within {limit_of_all:?}; look at cufile.log"
            )),
        }
    }
}

/// The first calls count as stuck until they have come back: nobody looks before, unless they are late.
struct FirstCalls(Arc<AtomicI64>);

impl FirstCalls {
    fn begin(stuck: &Arc<AtomicI64>) -> Self {
        stuck.fetch_add(1, Ordering::SeqCst);
        FirstCalls(Arc::clone(stuck))
    }
}

impl Drop for FirstCalls {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The worker's thread.
fn run(setup: Setup, queue: Arc<Queue<Request>>, first: FirstCalls, ready: oneshot::Sender<Result<SelfTest, String>>) {
    let keep = Arc::clone(&setup.keep);
    let prepared = prepare(setup, queue);
    drop(first);
    match prepared {
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

fn prepare(setup: Setup, queue: Arc<Queue<Request>>) -> Result<(Worker, SelfTest), String> {
    let Setup { gpu, files, mode, probe, probe_owner, buffers, limit, .. } = setup;
    let driver = Driver::open(limit)?;
    let text = |fault: CufileError| fault.to_string();
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
    let found = driver.start_counting(limit).and_then(|_counting| self_test(driver, &worker.handles, probe));
    // Dropped only here, so that a call that never returns keeps the memory reserved.
    drop(probe_owner);
    let (evidence, direct) = found.map(|found| (found.evidence, found.direct == Some(true)))?;
    if mode != EngineMode::On && !direct {
        return Err(evidence);
    }
    if direct {
        let capacity = driver.batch_max().clamp(1, CAPACITY_MAX);
        worker.submission = Some(Submission::Batch(Batch::new(driver, capacity).map_err(text)?));
        worker.capacity = capacity as usize;
        worker.ranges = Ranges::of(&buffers, driver.direct_bytes_max());
    } else {
        worker.submission = Some(Submission::OneByOne);
    }
    Ok((worker, SelfTest { evidence, direct }))
}

/// What libcufile's counters say of reads.
pub(super) struct Counted {
    evidence: String,
    /// Whether all went from the drive to the device; `None` if they were not the only ones counted.
    pub(super) direct: Option<bool>,
}

/// Reads from each file, and compares libcufile's own counters before and after. While the caller has the counters.
///
/// # Errors
/// Why a read failed.
pub(super) fn self_test(driver: &'static Driver, handles: &[Handle], probe: Part) -> Result<Counted, String> {
    let text = |fault: CufileError| fault.to_string();
    let before = driver.counters().map_err(text)?;
    for handle in handles {
        // SAFETY: by the contracts of `Cufile::open` and of `CufileReader::prove` only the self-test uses the memory.
        let moved = unsafe { handle.transfer(OpKind::Read, probe.ptr, probe.len, probe.offset) }.map_err(text)?;
        if moved != probe.len {
            return Err(format!("a read of {} bytes at {} moved {moved}", probe.len, probe.offset));
        }
    }
    let after = driver.counters().map_err(text)?;
    let name = driver.name();
    let (Some(before), Some(after)) = (before, after) else {
        let evidence = format!("{name} has no cuFileGetStatsL3, which alone shows a direct path; use 1.15 or later");
        return Ok(Counted { evidence, direct: Some(false) });
    };
    let Counters { read_bytes, reads_p2p, reads_nvfs, reads_posix, .. } = after.since(before);
    let counted = format!(
        "{name}: of {} reads n_nvfs_reads counted {reads_nvfs}, n_p2p_reads {reads_p2p}, \
                           n_posix_reads {reads_posix}",
        handles.len()
    );
    if read_bytes != (probe.len * handles.len()) as u64 {
        let evidence = format!(
            "{counted}, with {read_bytes} bytes, expected the self-test's own: others read meanwhile, or the layout of \
             its statistics is unknown"
        );
        return Ok(Counted { evidence, direct: None });
    }
    let direct = after.since(before).proves_reads();
    let path = match (direct, reads_nvfs > 0) {
        (true, true) => "direct by nvidia-fs",
        (true, false) => "direct by PCI peer-to-peer",
        (false, _) => "compat mode (reads into host memory, then copies; load nvidia-fs for the direct path)",
    };
    Ok(Counted { evidence: format!("{path}; {counted}"), direct: Some(direct) })
}
