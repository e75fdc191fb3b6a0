//! Copies between pinned host memory and a CUDA device.
//!
//! Batches submitted in one turn of the reactor, and batches that arrive while the streams are full, share a launch: a
//! launch has a fixed cost of microseconds, as much as copying 128 KiB. The method for each number and size of copies
//! is measured when a cache is opened ([`CopyMethod`], [`Calibration`]).
//!
//! A task polls for completions as long as a launch is in flight: querying an event takes about a microsecond, and a
//! wake-up by a host function of the driver takes twice the time of a small copy. An idle engine has no task.

mod calibrate;
mod checksum;
mod ended;
mod launch;
mod method;
mod pins;

pub use crate::CudaCopyOptions;
pub use method::Calibration;

use std::{
    any::Any,
    cell::{Cell, RefCell},
    collections::VecDeque,
    ops::Range,
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::oneshot;

use kvhoist_base::{
    block::{CopyOp, Direction, Segment},
    error::{Error, Result},
    memory::Arena,
    panics::log,
};

use self::{
    checksum::Checksums,
    ended::{Ended, Silence, silent, stopped},
    launch::{Launched, Launcher, Ops},
    pins::{Pins, pin},
};
use crate::{
    CopyBatch, CopyEngine, CopyMethod,
    cuda::{CudaError, Gates, Gpu, HostPin, Polling, Stream},
};

/// Streams per direction, so that one copies while the other ends.
const STREAMS: usize = 2;

/// Launches per stream; later batches wait and share the next launch.
const LAUNCHES_PER_STREAM: usize = 2;

/// Bytes per launch, unless one batch is larger, so that early batches do not wait for all later ones.
const LAUNCH_BYTES: u64 = 32 << 20;

/// Bytes per launch that contains a prompt batch: 75 us on the bus. With half as many, blocks of 128 KiB from eight
/// drives wait for launches.
const PROMPT_BYTES: u64 = 4 << 20;

/// A longer prompt batch has a launch of its own: no long layer waits for the next one.
const JOINING_BYTES_MAX: u64 = 1 << 20;

/// How long the task keeps polling after the last copy: about the time of waking the reactor, so that a sequence of
/// single copies needs no wake-ups.
const LINGER: Duration = Duration::from_micros(30);

type Answer = oneshot::Sender<(Result<()>, CopyBatch)>;

/// Copies between host memory and a device, both ways. Refuses copies within host memory with [`Error::Copy`].
#[derive(Clone)]
pub struct CudaCopy(Rc<Inner>);

struct Inner {
    // Fields drop in this order; `Drop` has synchronized the streams before, or leaked what they use.
    /// `None` if the kernel could not be loaded.
    checksums: Option<Checksums>,
    queues: [RefCell<CopyQueue>; 2],
    launcher: Launcher,
    /// Pinned host memory.
    pinned: Range<usize>,
    /// Those of all engines of the arena: it stays pinned for as long as one may use it.
    pins: Rc<Vec<HostPin>>,
    calibration: Arc<Calibration>,
    options: CudaCopyOptions,
    /// The polling task runs.
    polling: Cell<bool>,
    /// Why the device can no longer copy.
    fault: RefCell<Option<String>>,
    gpu: Arc<Gpu>,
}

/// The queue of one direction.
struct CopyQueue {
    direction: Direction,
    waiting: VecDeque<(CopyBatch, Answer)>,
    streams: Vec<(Stream, VecDeque<Launch>)>,
}

impl CopyQueue {
    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.streams.iter().all(|(_, launches)| launches.is_empty())
    }
}

/// Batches that were launched together.
struct Launch {
    launched: Launched,
    result: std::result::Result<(), CudaError>,
    batches: Vec<(CopyBatch, Answer)>,
    silence: Silence,
}

impl CudaCopy {
    /// Makes an engine for this device and pins the arena. The first call in a process takes some hundred milliseconds
    /// of measurements.
    ///
    /// If the arena cannot be pinned, the engine logs a warning, and copies go through the driver's own buffers, which
    /// is slower.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with the driver's error.
    pub fn new(gpu: &Arc<Gpu>, arena: &Arc<Arena>, options: CudaCopyOptions) -> Result<Self> {
        Self::with_pins(gpu, options, || pin(gpu, arena))
    }

    /// Makes an engine for another device, with the arena and the options of this one, and with its pins.
    ///
    /// # Errors
    /// As of [`new`](Self::new).
    pub fn beside(&self, gpu: &Arc<Gpu>) -> Result<Self> {
        Self::with_pins(gpu, self.0.options, || (Rc::clone(&self.0.pins), self.0.pinned.clone()))
    }

    fn with_pins(gpu: &Arc<Gpu>, options: CudaCopyOptions, pins: impl FnOnce() -> Pins) -> Result<Self> {
        let unavailable = |fault: CudaError| Error::unavailable("device", fault);
        let launcher = Launcher::new(gpu, options.blocks_max).map_err(unavailable)?;
        if let Some(method) = options.method.filter(|&method| !launcher.has(method)) {
            let reason = format!("found copy = {method}, which this device or driver does not have; expected auto");
            return Err(Error::unavailable("device", reason));
        }
        launcher.reserve(2 * STREAMS * LAUNCHES_PER_STREAM);
        let key = format!("{} {}", gpu.device().pci_address, options.blocks_max);
        let measured = || match calibrate::calibrate(gpu, &launcher) {
            Ok(measured) => method::KEPT.keep(key.clone(), measured),
            Err(error) => {
                // Without measurements `Loop` is used, the only method that works without pinned memory.
                log(|| tracing::warn!(%error, "the copy methods were not measured; each copy is a driver call"));
                Arc::default()
            }
        };
        let calibration = method::KEPT.get(&key).unwrap_or_else(measured);
        let (pins, pinned) = pins();
        Gates::pin(gpu);
        let queue = |direction| -> Result<_> {
            let streams = (0..STREAMS).map(|_| Ok((Stream::new(gpu)?, VecDeque::new())));
            let streams = streams.collect::<std::result::Result<_, CudaError>>().map_err(unavailable)?;
            Ok(RefCell::new(CopyQueue { direction, waiting: VecDeque::new(), streams }))
        };
        let checksums = match gpu.device().host_addresses {
            // The kernel reads descriptors by their host addresses.
            true => Checksums::new(gpu).map_err(|error| {
                log(|| tracing::warn!(%error, "the device cannot verify blocks; they are verified on the host"));
            }),
            false => Err(()),
        };
        let inner = Inner {
            checksums: checksums.ok(),
            queues: [queue(Direction::HostToDevice)?, queue(Direction::DeviceToHost)?],
            launcher,
            pinned,
            pins,
            calibration,
            options,
            polling: Cell::new(false),
            fault: RefCell::default(),
            gpu: Arc::clone(gpu),
        };
        Ok(CudaCopy(Rc::new(inner)))
    }

    fn start_polling(&self) {
        if !self.0.polling.replace(true) {
            tokio::task::spawn_local(Rc::clone(&self.0).poll());
        }
    }

    /// The ordinal of its device.
    pub fn ordinal(&self) -> u32 {
        self.0.gpu.device().ordinal
    }

    /// The measurements.
    pub fn calibration(&self) -> &Calibration {
        &self.0.calibration
    }

    /// True if the whole arena is pinned for the device.
    pub fn is_pinned(&self) -> bool {
        !self.0.pins.is_empty()
    }
}

impl CopyEngine for CudaCopy {
    fn name(&self) -> &'static str {
        "cuda"
    }

    async fn copy(&self, batch: CopyBatch) -> (Result<()>, CopyBatch) {
        let queue = match batch.direction() {
            Direction::HostToHost => return (Err(Error::copy("cuda", "found a copy within host memory")), batch),
            Direction::HostToDevice => &self.0.queues[0],
            Direction::DeviceToHost => &self.0.queues[1],
        };
        if let Some(reason) = self.0.fault.borrow().clone() {
            return (Err(Error::copy("cuda", reason)), batch);
        }
        let (answer, answered) = oneshot::channel();
        let idle = queue.borrow().is_idle();
        queue.borrow_mut().waiting.push_back((batch, answer));
        if idle {
            // Launches at once. Batches that arrive while this one is in flight share the next launch.
            self.0.turn(&mut queue.borrow_mut());
        }
        self.start_polling();
        // Not answered, it panics, and its owners are not returned: the device may use their memory for good.
        answered.await.expect("the driver says when a copy has ended")
    }

    fn checksums(&self) -> bool {
        self.0.checksums.is_some()
    }

    async unsafe fn checksum(&self, segments: &[Segment], owner: Arc<dyn Any + Send + Sync>) -> Option<Result<u64>> {
        let answered = self.0.checksums.as_ref()?.submit(segments, owner)?;
        self.start_polling();
        Some(answered.await.expect("the driver says when a checksum has ended"))
    }

    fn fault(&self) -> Option<String> {
        self.0.fault.borrow().clone()
    }

    fn cost(&self, batch: &CopyBatch) -> Duration {
        let ops = Ops::new(std::iter::once(batch.ops()));
        let to_device = batch.direction() == Direction::HostToDevice;
        let method = self.0.method(&ops, to_device);
        let estimate = self.0.calibration.estimate(to_device, method, ops.mean_bytes(), ops.count);
        estimate.unwrap_or_default()
    }
}

impl Inner {
    /// Launches and answers until the engine has been idle for a while.
    async fn poll(self: Rc<Self>) {
        let _polling = Polling(&self.polling);
        let mut last = Instant::now();
        loop {
            // Lets other tasks of this turn add copies first.
            kvhoist_base::runtime::yield_now().await;
            let mut busy = false;
            for queue in &self.queues {
                busy |= self.turn(&mut queue.borrow_mut());
            }
            if let Some(checksums) = &self.checksums {
                busy |= checksums.turn(|reason| self.retire(reason));
            }
            if busy {
                last = Instant::now();
            } else if last.elapsed() > LINGER {
                return;
            }
        }
    }

    /// Answers finished batches and launches waiting ones. True if any are left.
    fn turn(&self, queue: &mut CopyQueue) -> bool {
        for (stream, launches) in &mut queue.streams {
            self.finish(stream, launches);
        }
        if let Some(reason) = &*self.fault.borrow() {
            answer(queue.waiting.drain(..), &Err(Error::copy("cuda", reason)));
        }
        while let Some((first, _)) = queue.waiting.front() {
            // Prompt batches follow one another in one stream: in parallel they would share the bus, and all would end
            // late.
            let streams = if first.is_prompt() { 1 } else { queue.streams.len() };
            let at = (0..streams).min_by_key(|&at| queue.streams[at].1.len());
            let Some(at) = at.filter(|&at| queue.streams[at].1.len() < LAUNCHES_PER_STREAM) else { break };
            self.launch(queue, at);
        }
        !queue.waiting.is_empty() || queue.streams.iter().any(|(_, launches)| !launches.is_empty())
    }

    /// Answers the finished launches of a stream, in order.
    fn finish(&self, stream: &Stream, launches: &mut VecDeque<Launch>) {
        while let Some(flight) = launches.front_mut() {
            let queried = self.gpu.bind().and_then(|()| self.launcher.is_done(&flight.launched, stream));
            let Some(ended) = flight.silence.judge(queried) else { return };
            let flight = launches.pop_front().expect("it is in front");
            match ended {
                Ended::Yes(ended) => self.end(flight, ended),
                Ended::Unknown(fault) => {
                    self.retire(silent(&fault));
                    flight.leak(&self.launcher, &self.pins);
                }
            }
        }
    }

    /// Answers a launch that no longer uses its memory.
    fn end(&self, Launch { launched, result, batches, .. }: Launch, ended: std::result::Result<(), CudaError>) {
        if ended.is_ok() {
            self.launcher.recycle(launched);
        }
        let result = result.and(ended).map_err(|fault| {
            if fault.is_sticky() {
                self.retire(stopped(&fault));
            }
            Error::copy("cuda", fault)
        });
        answer(batches, &result);
    }

    fn launch(&self, queue: &mut CopyQueue, at: usize) {
        let (mut batches, mut bytes, mut limit) = (Vec::new(), 0, LAUNCH_BYTES);
        while let Some((batch, _)) = queue.waiting.front() {
            // Sums the bytes only if this batch may share a launch.
            let more = if queue.waiting.len() > 1 || !batches.is_empty() { batch.bytes() } else { 0 };
            if batch.is_prompt() {
                limit = limit.min(if more > JOINING_BYTES_MAX { 0 } else { PROMPT_BYTES });
            }
            if !batches.is_empty() && bytes + more > limit {
                break;
            }
            bytes += more;
            batches.extend(queue.waiting.pop_front());
        }
        let ops = Ops::new(batches.iter().map(|(batch, _)| batch.ops()));
        let (stream, launches) = &mut queue.streams[at];
        let method = self.method(&ops, queue.direction == Direction::HostToDevice);
        // SAFETY: by the contract of `CopyBatch::new` all ranges stay valid and untouched while their batches live, and
        // the launch holds the batches until the stream has passed them. Methods that need pinned memory are
        // chosen only for pinned memory.
        let (result, launched) = unsafe { self.launcher.launch(stream, &ops, queue.direction, method) };
        launches.push_back(Launch { launched, result, batches, silence: Silence::default() });
    }

    /// Chooses the method for these copies.
    fn method(&self, ops: &Ops<'_>, to_device: bool) -> CopyMethod {
        let Range { start, end } = self.pinned;
        let is_pinned = |op: &CopyOp| {
            let host = if to_device { op.src.addr() } else { op.dst.addr() };
            host >= start && host + op.len <= end
        };
        if !ops.lists.iter().copied().flatten().all(is_pinned) {
            return CopyMethod::Loop;
        }
        let quickest = || self.calibration.quickest(to_device, ops.mean_bytes(), ops.count);
        self.options.method.unwrap_or_else(quickest)
    }

    /// No copy is accepted any more.
    fn retire(&self, reason: String) {
        self.fault.borrow_mut().get_or_insert(reason);
    }
}

/// Answers the batches with the result.
fn answer(batches: impl IntoIterator<Item = (CopyBatch, Answer)>, result: &Result<()>) {
    for (batch, answer) in batches {
        // The receiver may be gone; the batch is dropped then.
        drop(answer.send((result.clone(), batch)));
    }
}

impl Launch {
    /// Never frees the memory of the launch, which may still run, nor unpins the arena; answers nobody.
    fn leak(self, launcher: &Launcher, pins: &Rc<Vec<HostPin>>) {
        launcher.leak(self.launched);
        std::mem::forget(Rc::clone(pins));
        self.batches.into_iter().for_each(|(batch, _)| std::mem::forget(batch));
        log(|| tracing::error!("the driver does not say whether a copy has ended; its memory is leaked"));
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        for queue in &mut self.queues {
            for (stream, launches) in &mut queue.get_mut().streams {
                if !launches.is_empty() && stream.synchronize().is_err_and(|fault| !fault.is_sticky()) {
                    launches.drain(..).for_each(|launch| launch.leak(&self.launcher, &self.pins));
                }
                launches.clear();
            }
        }
    }
}
