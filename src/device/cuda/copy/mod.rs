//! Copies between pinned host memory and a CUDA device.
//!
//! Copies that are asked for in one turn of the reactor, and those that arrive while the streams are full, go together:
//! one launch has a fixed cost of microseconds, as much as copying 128 KiB. Which of three methods carries them, by
//! number and size, is measured when a cache is opened ([`CopyMethod`], [`Calibration`]).
//!
//! Completion is polled, by a task that lives only while something is in flight: an event costs about a microsecond
//! to ask, and waking by a host function of the driver takes twice the time of a small copy. An idle engine has no
//! task.

mod calibrate;
mod checksum;
mod launch;
mod method;

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

use self::{
    checksum::Checksums,
    launch::{Launched, Launcher, Ops},
};
use crate::{
    block::{CopyOp, Direction, Segment},
    config::CopyMethod,
    device::{
        CopyBatch, CopyEngine, Memcpy, Polling,
        cuda::{Fault, Gpu, HostPin, Stream},
    },
    error::{Error, Result},
    memory::Arena,
};

/// Streams in each direction: while one ends, the next is on its way.
const STREAMS: usize = 2;

/// Launches in a stream; what comes later waits and goes together.
const LAUNCHES_PER_STREAM: usize = 2;

/// Bytes of one launch, unless one batch alone is larger: what was asked first is not kept waiting for all that came
/// after.
const LAUNCH_BYTES: u64 = 32 << 20;

/// The same where one of the batches is prompt: 40 us on the bus.
const PROMPT_BYTES: u64 = 2 << 20;

/// How long the engine looks for more after the last copy has ended, before its task ends: about what waking the
/// reactor takes. Who copies one block after the other is spared that.
const LINGER: Duration = Duration::from_micros(30);

type Answer = oneshot::Sender<(Result<()>, CopyBatch)>;

/// How a [`CudaCopy`] is to work.
#[derive(Debug, Clone, Copy)]
pub struct CudaCopyOptions {
    /// Always this method; `None`: the quickest.
    pub method: Option<CopyMethod>,
    /// Thread blocks that the kernel may use at once: they are taken from the engine's own kernels.
    pub blocks_max: u32,
}

/// Copies between host memory and a device, both ways; between ranges of host memory by the processor.
pub struct CudaCopy {
    inner: Rc<Inner>,
    host: Memcpy,
}

struct Inner {
    // Dropped in this order: `Drop` has waited for the streams by then.
    /// `None` where the kernel could not be loaded.
    checksums: Option<Checksums>,
    lanes: [RefCell<Lane>; 2],
    launcher: Launcher,
    /// Host memory that the device knows.
    pinned: Range<usize>,
    pins: Vec<HostPin>,
    calibration: Arc<Calibration>,
    options: CudaCopyOptions,
    /// A task polls.
    polling: Cell<bool>,
    /// Why nothing can be copied any more.
    fault: RefCell<Option<String>>,
    gpu: Arc<Gpu>,
}

/// One direction.
struct Lane {
    direction: Direction,
    waiting: VecDeque<(CopyBatch, Answer)>,
    streams: Vec<(Stream, VecDeque<Flight>)>,
}

impl Lane {
    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.streams.iter().all(|(_, flights)| flights.is_empty())
    }
}

/// Batches that were launched together.
struct Flight {
    launched: Launched,
    result: std::result::Result<(), Fault>,
    batches: Vec<(CopyBatch, Answer)>,
}

impl CudaCopy {
    /// An engine for this device, which pins the arena for it. Takes some hundred milliseconds the first time in a
    /// process, to measure.
    ///
    /// Where the arena cannot be pinned it says so in the log, and copies go through the driver's own buffers: slower.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with what the driver said.
    pub fn new(gpu: &Arc<Gpu>, arena: &Arc<Arena>, options: CudaCopyOptions) -> Result<Self> {
        let unavailable = |fault: Fault| Error::Unavailable { tier: "device", reason: fault.to_string() };
        let launcher = Launcher::new(gpu, options.blocks_max).map_err(unavailable)?;
        if let Some(method) = options.method.filter(|&method| !launcher.has(method)) {
            let reason = format!("found copy = {method}, which this device or driver does not have; expected auto");
            return Err(Error::Unavailable { tier: "device", reason });
        }
        let key = format!("{} {}", gpu.device().pci_address, options.blocks_max);
        let calibration = method::kept(&key, || calibrate::calibrate(gpu, &launcher)).unwrap_or_else(|error| {
            // Without pinned memory there is nothing to choose from.
            tracing::warn!(%error, "the ways to copy could not be measured; each copy is a call of the driver's own");
            Arc::default()
        });
        launcher.reserve(2 * STREAMS * LAUNCHES_PER_STREAM);
        let (pins, pinned) = pin(gpu, arena);
        let lane = |direction| -> Result<_> {
            let streams = (0..STREAMS).map(|_| Ok((Stream::new(gpu)?, VecDeque::new())));
            let streams = streams.collect::<std::result::Result<_, Fault>>().map_err(unavailable)?;
            Ok(RefCell::new(Lane { direction, waiting: VecDeque::new(), streams }))
        };
        let checksums = match gpu.device().host_addresses {
            // The kernel reads descriptions by the host's own addresses.
            true => Checksums::new(gpu).map_err(|error| {
                tracing::warn!(%error, "the device verifies no blocks; what libcufile brings is copied to the host");
            }),
            false => Err(()),
        };
        let inner = Inner {
            checksums: checksums.ok(),
            lanes: [lane(Direction::HostToDevice)?, lane(Direction::DeviceToHost)?],
            launcher,
            pinned,
            pins,
            calibration,
            options,
            polling: Cell::new(false),
            fault: RefCell::default(),
            gpu: Arc::clone(gpu),
        };
        Ok(CudaCopy { inner: Rc::new(inner), host: Memcpy::new() })
    }

    /// The same, with this engine for copies between ranges of host memory.
    #[must_use]
    pub(crate) fn with_host(self, host: Memcpy) -> Self {
        CudaCopy { host, ..self }
    }

    fn start_polling(&self) {
        if !self.inner.polling.replace(true) {
            tokio::task::spawn_local(Rc::clone(&self.inner).poll());
        }
    }

    /// What was measured.
    pub fn calibration(&self) -> &Calibration {
        &self.inner.calibration
    }

    /// True if all of the arena is pinned for the device.
    pub fn is_pinned(&self) -> bool {
        !self.inner.pins.is_empty()
    }
}

/// Pins all chunks, or none. Chunks lie one after another, and no copy straddles two, so one range says it all.
fn pin(gpu: &Arc<Gpu>, arena: &Arc<Arena>) -> (Vec<HostPin>, Range<usize>) {
    let pin = |&(start, bytes): &(_, usize)| {
        // SAFETY: chunks of the arena, mapped for as long as it lives.
        unsafe { HostPin::new(Arc::clone(gpu), start, bytes, Arc::clone(arena) as _) }
    };
    match arena.chunks().iter().map(pin).collect::<Result<Vec<_>>>() {
        Ok(pins) => {
            let start = pins.first().map_or(0, |pin| pin.start().as_ptr().addr());
            let bytes: usize = pins.iter().map(HostPin::bytes).sum();
            (pins, start..start + bytes)
        }
        Err(error) => {
            tracing::warn!(%error, "host memory is not pinned; copies to and from the device take a detour");
            (Vec::new(), 0..0)
        }
    }
}

impl CopyEngine for CudaCopy {
    fn name(&self) -> &'static str {
        "cuda"
    }

    async fn copy(&self, batch: CopyBatch) -> (Result<()>, CopyBatch) {
        let lane = match batch.direction() {
            Direction::HostToHost => return self.host.copy(batch).await,
            Direction::HostToDevice => &self.inner.lanes[0],
            Direction::DeviceToHost => &self.inner.lanes[1],
        };
        if let Some(reason) = self.inner.fault.borrow().clone() {
            return (Err(Error::Copy { engine: "cuda", reason }), batch);
        }
        let (answer, answered) = oneshot::channel();
        let idle = lane.borrow().is_idle();
        lane.borrow_mut().waiting.push_back((batch, answer));
        if idle {
            // Nothing to wait for. What comes while this one is under way goes together.
            self.inner.turn(&mut lane.borrow_mut());
        }
        self.start_polling();
        answered.await.expect("the engine answers every batch it took before it goes")
    }

    async unsafe fn checksum(&self, segments: &[Segment], owner: Arc<dyn Any + Send + Sync>) -> Option<Result<u64>> {
        let answered = self.inner.checksums.as_ref()?.ask(segments, owner)?;
        self.start_polling();
        Some(answered.await.expect("the engine answers everything it took before it goes"))
    }

    fn fault(&self) -> Option<String> {
        self.inner.fault.borrow().clone()
    }

    fn cost(&self, batch: &CopyBatch) -> Duration {
        if batch.direction() == Direction::HostToHost {
            return self.host.cost(batch);
        }
        let ops = Ops::new(std::iter::once(batch.ops()));
        let to_device = batch.direction() == Direction::HostToDevice;
        let method = self.inner.method(&ops, to_device);
        let estimate = self.inner.calibration.estimate(to_device, method, ops.mean_bytes(), ops.count);
        estimate.unwrap_or_default()
    }
}

impl Inner {
    /// Launches and answers until there was nothing left to do for a while.
    async fn poll(self: Rc<Self>) {
        let _polling = Polling(&self.polling);
        let mut last = Instant::now();
        loop {
            // Others of this turn may have copies to add.
            crate::io::yield_now().await;
            let mut busy = false;
            for lane in &self.lanes {
                busy |= self.turn(&mut lane.borrow_mut());
            }
            if let Some(checksums) = &self.checksums {
                busy |= checksums.turn(|fault| self.note(fault));
            }
            if busy {
                last = Instant::now();
            } else if last.elapsed() > LINGER {
                return;
            }
        }
    }

    /// Answers what is done, launches what waits; true if anything is left.
    fn turn(&self, lane: &mut Lane) -> bool {
        for at in 0..lane.streams.len() {
            self.land(&mut lane.streams[at].1);
        }
        while let Some((first, _)) = lane.waiting.front() {
            // Prompt batches follow one another in one stream: side by side they would share the bus, and all end late.
            let streams = if first.is_prompt() { 1 } else { lane.streams.len() };
            let at = (0..streams).min_by_key(|&at| lane.streams[at].1.len());
            let Some(at) = at.filter(|&at| lane.streams[at].1.len() < LAUNCHES_PER_STREAM) else { break };
            self.launch(lane, at);
        }
        !lane.waiting.is_empty() || lane.streams.iter().any(|(_, flights)| !flights.is_empty())
    }

    /// Answers the flights of a stream that are done: the first ones, for they are in order.
    fn land(&self, flights: &mut VecDeque<Flight>) {
        if flights.is_empty() || self.gpu.bind().is_err() {
            return;
        }
        while let Some(flight) = flights.front() {
            let ended = match self.launcher.is_done(&flight.launched) {
                Ok(false) => return,
                Ok(true) => Ok(()),
                // The device is done with all of it: it stopped.
                Err(fault) => Err(fault),
            };
            let Flight { launched, result, batches } = flights.pop_front().expect("it is in front");
            let result = result.and(ended);
            match &result {
                Ok(()) => self.launcher.recycle(launched),
                Err(fault) => self.note(fault),
            }
            answer(batches, result.as_ref().err());
        }
    }

    fn launch(&self, lane: &mut Lane, at: usize) {
        let (mut batches, mut bytes, mut limit) = (Vec::new(), 0, LAUNCH_BYTES);
        while let Some((batch, _)) = lane.waiting.front() {
            // Few batches are asked for their bytes, and only those that could go with others.
            let more = if lane.waiting.len() > 1 || !batches.is_empty() { batch.bytes() } else { 0 };
            if batch.is_prompt() {
                limit = PROMPT_BYTES;
            }
            if !batches.is_empty() && bytes + more > limit {
                break;
            }
            bytes += more;
            batches.extend(lane.waiting.pop_front());
        }
        let ops = Ops::new(batches.iter().map(|(batch, _)| batch.ops()));
        let (stream, flights) = &mut lane.streams[at];
        let method = self.method(&ops, lane.direction == Direction::HostToDevice);
        // SAFETY: by the contract of `CopyBatch::new` all ranges stay valid and untouched while their batches live,
        // which the flight holds until the stream has passed the mark; methods that need pinned memory are chosen for
        // it only.
        let (result, launched) = unsafe { self.launcher.launch(stream, &ops, lane.direction, method) };
        if !launched.is_marked() {
            // Nothing would tell when the stream has passed what did get into it: wait here. It fails only where the
            // device stopped, and then it copies no more.
            drop(stream.synchronize());
        }
        flights.push_back(Flight { launched, result, batches });
    }

    /// The method for these copies.
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

    fn note(&self, fault: &Fault) {
        if fault.is_sticky() && self.fault.borrow().is_none() {
            *self.fault.borrow_mut() = Some(format!("the device stopped: {fault}"));
        }
    }
}

/// Gives the batches back with the result.
fn answer(batches: Vec<(CopyBatch, Answer)>, fault: Option<&Fault>) {
    for (batch, answer) in batches {
        let result = match fault {
            None => Ok(()),
            Some(fault) => Err(Error::Copy { engine: "cuda", reason: fault.to_string() }),
        };
        // Nobody may be waiting any more; the batch goes in either case.
        drop(answer.send((result, batch)));
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        for lane in &mut self.lanes {
            for (stream, flights) in &mut lane.get_mut().streams {
                if !flights.is_empty() {
                    // It fails only where the device stopped, and then it copies no more.
                    drop(stream.synchronize());
                }
                flights.clear();
            }
        }
    }
}
