//! Checksums of device memory, computed by the device. Blocks submitted while a launch is in flight share the next
//! launch: the fixed cost of a launch is that of summing a few MiB.

use std::{any::Any, cell::RefCell, collections::VecDeque, rc::Rc, sync::Arc};

use tokio::sync::oneshot;

use kvhoist_base::{
    block::Segment,
    error::{Error, Result},
    panics::log,
};

use super::ended::{Ended, Silence, silent, stopped};
use crate::cuda::{ChecksumKernel, CudaError, Event, Gpu, PIECE_MULTIPLE, PieceBuffer, Plan, Stream};

/// Launches in flight: one that runs, and one queued behind it.
const LAUNCHES: usize = 2;

/// Bytes per launch, unless one block is larger. One launch for everything would take the device the least time, but
/// blocks that arrived from disk together would then also finish together, and the disk would idle meanwhile.
const LAUNCH_BYTES: u64 = 1 << 20;

type Owner = Arc<dyn Any + Send + Sync>;

/// A block to sum.
struct Job {
    addresses: Vec<u64>,
    bytes: u64,
    plan: Arc<Plan>,
    /// Keeps the memory until the device is done with it.
    owner: Owner,
    answer: oneshot::Sender<Result<u64>>,
}

/// A launch in flight.
struct Launch {
    result: std::result::Result<(), CudaError>,
    event: Event,
    /// The event is behind the launch.
    is_recorded: bool,
    buffer: PieceBuffer,
    jobs: Vec<Job>,
    silence: Silence,
}

/// Blocks that wait for a launch, and launches in flight. Used by one thread.
pub(super) struct Checksums {
    gpu: Arc<Gpu>,
    kernel: Rc<ChecksumKernel>,
    stream: Stream,
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    launches: VecDeque<Launch>,
    /// Buffers and events for [`LAUNCHES`], less those in flight and those leaked.
    spare: Vec<(PieceBuffer, Event)>,
    /// The plan of the last block: all blocks of a cache have the same layout.
    plan: Option<Arc<Plan>>,
}

impl Checksums {
    pub(super) fn new(gpu: &Arc<Gpu>) -> std::result::Result<Self, CudaError> {
        let (kernel, stream) = (Rc::new(ChecksumKernel::load(gpu)?), Stream::new(gpu)?);
        // Pinned here only, because pinning can wait for the device, and the device may later wait for a layer gate
        // that only this thread opens.
        let spare = (0..LAUNCHES).map(|_| Ok((kernel.buffer()?, Event::new(gpu)?)));
        let spare = spare.collect::<std::result::Result<_, CudaError>>()?;
        let state = RefCell::new(State { spare, ..State::default() });
        Ok(Checksums { gpu: Arc::clone(gpu), kernel, stream, state })
    }

    /// Submits a block. `None` if the kernel cannot sum it: the segments are unaligned or too many.
    pub(super) fn submit(&self, segments: &[Segment], owner: Owner) -> Option<oneshot::Receiver<Result<u64>>> {
        let mut state = self.state.borrow_mut();
        let lengths = || segments.iter().map(|segment| segment.len);
        let plan = match state.plan.take().filter(|plan| plan.is_for(lengths())) {
            Some(plan) => plan,
            None => Arc::new(Plan::new(lengths(), PieceBuffer::PIECES)?),
        };
        state.plan = Some(Arc::clone(&plan));
        let addresses: Vec<u64> = segments.iter().map(|segment| segment.ptr.expose_provenance() as u64).collect();
        if addresses.iter().any(|address| address % 16 != 0) {
            return None;
        }
        let bytes = lengths().map(|len| len as u64).sum();
        let (answer, answered) = oneshot::channel();
        state.waiting.push_back(Job { addresses, bytes, plan, owner, answer });
        // Blocks that arrive while this one is in flight share a launch.
        if state.launches.is_empty() && state.waiting.len() == 1 {
            self.launch(&mut state);
        }
        Some(answered)
    }

    /// Answers finished blocks and launches waiting ones. True if any are left. `retire` receives why the
    /// device is out of service.
    pub(super) fn turn(&self, retire: impl Fn(String)) -> bool {
        let state = &mut *self.state.borrow_mut();
        self.finish(state, retire);
        while !state.waiting.is_empty() && state.launches.len() < LAUNCHES {
            self.launch(state);
        }
        !state.waiting.is_empty() || !state.launches.is_empty()
    }

    fn finish(&self, state: &mut State, retire: impl Fn(String)) {
        while let Some(flight) = state.launches.front_mut() {
            let queried = self.gpu.bind().and_then(|()| match flight.is_recorded {
                true => flight.event.is_reached(),
                false => self.stream.is_idle(),
            });
            let Some(ended) = flight.silence.judge(queried) else { return };
            let flight = state.launches.pop_front().expect("it is in front");
            match ended {
                Ended::Yes(ended) => state.spare.extend(flight.end(ended, &retire)),
                Ended::Unknown(fault) => {
                    retire(silent(&fault));
                    self.leak(flight);
                }
            }
        }
    }

    /// Never frees the memory of a launch, which may still run, and answers nobody.
    fn leak(&self, launch: Launch) {
        let Launch { event, buffer, jobs, .. } = launch;
        jobs.into_iter().for_each(|job| std::mem::forget(job.owner));
        std::mem::forget((event, buffer, Rc::clone(&self.kernel)));
        log(|| tracing::error!("the driver does not say whether a checksum has ended; its memory is leaked"));
    }

    fn launch(&self, state: &mut State) {
        let Some((mut buffer, event)) = state.spare.pop() else {
            let reason = "no memory for checksums is left: the device went out of service";
            for Job { owner, answer, .. } in state.waiting.drain(..) {
                drop(owner);
                drop(answer.send(Err(Error::copy("cuda", reason))));
            }
            return;
        };
        let (mut jobs, mut count, mut bytes) = (Vec::new(), 0, 0);
        while let Some(job) = state.waiting.pop_front_if(|job| {
            let fits = jobs.is_empty() || bytes + job.bytes <= LAUNCH_BYTES;
            fits && count + job.plan.len() <= PieceBuffer::PIECES
        }) {
            bytes += job.bytes;
            for piece in job.plan.pieces(&job.addresses) {
                buffer.write(count, piece);
                count += 1;
            }
            jobs.push(job);
        }
        let queued = self.gpu.bind().and_then(|()| {
            // SAFETY: pieces of segments that the jobs' owners keep, aligned as `submit` and `Plan::new` checked. The
            // launch keeps the owners and the buffer until the stream has passed it.
            unsafe { self.kernel.launch(&self.stream, &buffer, count) }
        });
        let recorded = event.record(&self.stream);
        let is_recorded = recorded.is_ok();
        let (result, silence) = (queued.and(recorded), Silence::default());
        state.launches.push_back(Launch { result, event, is_recorded, buffer, jobs, silence });
    }
}

impl Launch {
    /// Answers the blocks of a launch that no longer uses memory. Returns the buffer and the event for reuse, unless
    /// the device has stopped.
    fn end(self, ended: std::result::Result<(), CudaError>, retire: impl Fn(String)) -> Option<(PieceBuffer, Event)> {
        let Launch { result, event, buffer, jobs, .. } = self;
        let is_spare = ended.is_ok();
        let result = result.and(ended);
        if let Some(fault) = result.as_ref().err().filter(|fault| fault.is_sticky()) {
            retire(stopped(fault));
        }
        let mut at = 0;
        for Job { plan, owner, answer, .. } in jobs {
            let sums = at..at + plan.len();
            at = sums.end;
            // Dropped before the answer: its receiver expects to hold the only reference.
            drop(owner);
            let answered = match &result {
                Ok(()) => Ok(plan.checksum(sums.map(|at| buffer.sum(at)))),
                Err(fault) => Err(Error::copy("cuda", fault)),
            };
            // The receiver may be gone.
            drop(answer.send(answered));
        }
        is_spare.then_some((buffer, event))
    }
}

impl Drop for Checksums {
    fn drop(&mut self) {
        let launches = std::mem::take(&mut self.state.get_mut().launches);
        if !launches.is_empty() && self.stream.synchronize().is_err_and(|fault| !fault.is_sticky()) {
            launches.into_iter().for_each(|launch| self.leak(launch));
        }
    }
}

const _: () = assert!(PIECE_MULTIPLE.is_multiple_of(16), "pieces of an aligned segment are aligned");
