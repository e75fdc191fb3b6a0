//! Checksums of device memory, by the device. Blocks that are asked for while a launch is under way go together in the
//! next: one launch costs as much as summing up some MiB.

use std::{any::Any, cell::RefCell, collections::VecDeque, sync::Arc};

use tokio::sync::oneshot;

use crate::{
    block::Segment,
    device::cuda::{ChecksumKernel, Event, Fault, Gpu, PIECE_MULTIPLE, PieceBuffer, Plan, Stream},
    error::{Error, Result},
};

/// Launches under way: while one ends, the next is queued.
const LAUNCHES: usize = 2;

/// Bytes of one launch, unless one block alone is larger. All at once would take the device the least time, and let
/// blocks that came from disk together leave together: nobody would ask the disk for others meanwhile.
const LAUNCH_BYTES: u64 = 1 << 20;

type Owner = Arc<dyn Any + Send + Sync>;

/// One block, asked for.
struct Job {
    addresses: Vec<u64>,
    bytes: u64,
    plan: Arc<Plan>,
    /// Keeps its memory until the device is done with it.
    owner: Owner,
    answer: oneshot::Sender<Result<u64>>,
}

/// A launch under way.
struct Flight {
    result: std::result::Result<(), Fault>,
    /// `None` where nothing was queued that could be waited for.
    event: Option<Event>,
    buffer: PieceBuffer,
    jobs: Vec<Job>,
}

/// The blocks to be summed up, and those that are. One thread's.
pub(super) struct Checksums {
    gpu: Arc<Gpu>,
    kernel: ChecksumKernel,
    stream: Stream,
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    flights: VecDeque<Flight>,
    /// What launches have used and the stream has passed.
    spare: Vec<(PieceBuffer, Event)>,
    /// How the last block was cut: all of a cache are alike.
    plan: Option<Arc<Plan>>,
}

impl Checksums {
    pub(super) fn new(gpu: &Arc<Gpu>) -> std::result::Result<Self, Fault> {
        let (kernel, stream) = (ChecksumKernel::load(gpu)?, Stream::new(gpu)?);
        // Pinned now: later, pinning could have to wait for the device, and the device for us, at a layer that a stream
        // waits for. Where it is refused, it is tried again when there is something to sum up.
        let spare = || Some((kernel.buffer().ok()?, Event::new(gpu).ok()?));
        let spare = (0..LAUNCHES).map_while(|_| spare()).collect();
        let state = RefCell::new(State { spare, ..State::default() });
        Ok(Checksums { gpu: Arc::clone(gpu), kernel, stream, state })
    }

    /// Asks for the checksum of a block. `None` where the kernel cannot do it: the segments are not aligned, or there
    /// are too many.
    pub(super) fn ask(&self, segments: &[Segment], owner: Owner) -> Option<oneshot::Receiver<Result<u64>>> {
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
        // What comes while it is under way goes together.
        if state.flights.is_empty() && state.waiting.len() == 1 {
            self.launch(&mut state);
        }
        Some(answered)
    }

    /// Answers what is done, launches what waits; true if anything is left. What stops the device goes to `note`.
    pub(super) fn turn(&self, note: impl Fn(&Fault)) -> bool {
        let state = &mut *self.state.borrow_mut();
        if !state.flights.is_empty() && self.gpu.bind().is_ok() {
            self.land(state, note);
        }
        while !state.waiting.is_empty() && state.flights.len() < LAUNCHES {
            self.launch(state);
        }
        !state.waiting.is_empty() || !state.flights.is_empty()
    }

    fn land(&self, state: &mut State, note: impl Fn(&Fault)) {
        while let Some(flight) = state.flights.front() {
            let ended = match flight.event.as_ref().map_or(Ok(true), Event::is_reached) {
                Ok(false) => return,
                Ok(true) => Ok(()),
                // The device is done with all of it: it stopped.
                Err(fault) => Err(fault),
            };
            let Flight { result, event, buffer, jobs } = state.flights.pop_front().expect("it is in front");
            let result = result.and(ended);
            if let Err(fault) = &result {
                note(fault);
            }
            let mut at = 0;
            for Job { plan, owner, answer, .. } in jobs {
                let sums = at..at + plan.len();
                at = sums.end;
                // Before the answer: whoever gets it may take the owner apart.
                drop(owner);
                let answered = match &result {
                    Ok(()) => Ok(plan.checksum(sums.map(|at| buffer.sum(at)))),
                    Err(fault) => Err(Error::Copy { engine: "cuda", reason: fault.to_string() }),
                };
                // Nobody may be waiting any more.
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
                // Only the first is answered so: the next may find memory again.
                if let Some(Job { owner, answer, .. }) = state.waiting.pop_front() {
                    drop(owner);
                    drop(answer.send(Err(Error::Copy { engine: "cuda", reason: fault.to_string() })));
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
            // SAFETY: pieces of segments that the jobs' owners keep, aligned as `ask` and `Plan::new` made sure; the
            // flight keeps them and the buffer until the stream has passed the event.
            unsafe { self.kernel.launch(&self.stream, &buffer, count) }
        });
        let (result, event) = match event.record(&self.stream) {
            Ok(()) => (queued, Some(event)),
            Err(fault) => {
                // Nothing would tell when the stream has passed it: wait here.
                drop(self.stream.synchronize());
                (queued.and(Err(fault)), None)
            }
        };
        state.flights.push_back(Flight { result, event, buffer, jobs });
    }
}

impl Drop for Checksums {
    fn drop(&mut self) {
        if !self.state.get_mut().flights.is_empty() {
            // It fails only where the device stopped, and then it reads no more.
            drop(self.stream.synchronize());
        }
    }
}

const _: () = assert!(PIECE_MULTIPLE.is_multiple_of(16), "pieces of an aligned segment are aligned");
