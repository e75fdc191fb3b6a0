//! Checksums of device memory, computed by the device. Blocks submitted while a launch is in flight share the next
//! launch: the fixed cost of a launch is that of summing a few MiB.

use std::{any::Any, cell::RefCell, collections::VecDeque, sync::Arc};

use tokio::sync::oneshot;

use kvhoist_base::{
    block::Segment,
    error::{Error, Result},
};

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
    /// `None` if no event could be recorded; the launch was then waited for.
    event: Option<Event>,
    buffer: PieceBuffer,
    jobs: Vec<Job>,
}

/// Blocks that wait for a launch, and launches in flight. Used by one thread.
pub(super) struct Checksums {
    gpu: Arc<Gpu>,
    kernel: ChecksumKernel,
    stream: Stream,
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    launches: VecDeque<Launch>,
    /// Buffers and events of finished launches.
    spare: Vec<(PieceBuffer, Event)>,
    /// The plan of the last block: all blocks of a cache have the same layout.
    plan: Option<Arc<Plan>>,
}

impl Checksums {
    pub(super) fn new(gpu: &Arc<Gpu>) -> std::result::Result<Self, CudaError> {
        let (kernel, stream) = (ChecksumKernel::load(gpu)?, Stream::new(gpu)?);
        // Pinned here, because pinning can wait for the device, and the device may later wait for a layer gate that
        // only this thread opens. If pinning fails here, the first launch tries again.
        let spare = || Some((kernel.buffer().ok()?, Event::new(gpu).ok()?));
        let spare = (0..LAUNCHES).map_while(|_| spare()).collect();
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

    /// Answers finished blocks and launches waiting ones. True if any are left. `note` receives errors of the device.
    pub(super) fn turn(&self, note: impl Fn(&CudaError)) -> bool {
        let state = &mut *self.state.borrow_mut();
        if !state.launches.is_empty() && self.gpu.bind().is_ok() {
            self.finish(state, note);
        }
        while !state.waiting.is_empty() && state.launches.len() < LAUNCHES {
            self.launch(state);
        }
        !state.waiting.is_empty() || !state.launches.is_empty()
    }

    fn finish(&self, state: &mut State, note: impl Fn(&CudaError)) {
        while let Some(flight) = state.launches.front() {
            let ended = match flight.event.as_ref().map_or(Ok(true), Event::is_reached) {
                Ok(false) => return,
                Ok(true) => Ok(()),
                // A device error: the device has stopped, and no longer reads the memory.
                Err(fault) => Err(fault),
            };
            let Launch { result, event, buffer, jobs } = state.launches.pop_front().expect("it is in front");
            let result = result.and(ended);
            if let Err(fault) = &result {
                note(fault);
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
            if let (Ok(()), Some(event)) = (result, event) {
                state.spare.push((buffer, event));
            }
        }
    }

    fn launch(&self, state: &mut State) {
        let spare = match state.spare.pop() {
            Some(spare) => Ok(spare),
            None => self.kernel.buffer().and_then(|buffer| Ok((buffer, Event::new(&self.gpu)?))),
        };
        let (mut buffer, event) = match spare {
            Ok(spare) => spare,
            Err(fault) => {
                // Fails only the first block: memory may be available again for the next one.
                if let Some(Job { owner, answer, .. }) = state.waiting.pop_front() {
                    drop(owner);
                    drop(answer.send(Err(Error::copy("cuda", fault))));
                }
                return;
            }
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
            // launch keeps the owners and the buffer until the stream has passed the event.
            unsafe { self.kernel.launch(&self.stream, &buffer, count) }
        });
        let (result, event) = match event.record(&self.stream) {
            Ok(()) => (queued, Some(event)),
            Err(fault) => {
                // Without an event the launch cannot be polled: wait here.
                drop(self.stream.synchronize());
                (queued.and(Err(fault)), None)
            }
        };
        state.launches.push_back(Launch { result, event, buffer, jobs });
    }
}

impl Drop for Checksums {
    fn drop(&mut self) {
        if !self.state.get_mut().launches.is_empty() {
            // An error means that the device has stopped, and no longer reads the memory.
            drop(self.stream.synchronize());
        }
    }
}

const _: () = assert!(PIECE_MULTIPLE.is_multiple_of(16), "pieces of an aligned segment are aligned");
