//! Loads that callers submit themselves.
//!
//! A block that the disk alone has, and that direct I/O reads to its caller's memory, needs nothing of the reactor.
//! Whoever loads such blocks plans them under the lock, a few at a time, and queues their reads for the I/O threads,
//! which checksum them, give the disk slots back and answer the call. Where they go by way of host memory, the threads
//! publish them, and the reactor copies what arrives. It loads the others of the call, and those whose read has failed.

use std::{ptr::NonNull, sync::Arc};

use tokio::{sync::oneshot, time::Instant};

use super::{
    Command, Urgent,
    command::Reply,
    load_call::Coming,
    plan::{OnDisk, Step, Trip},
    region::Job,
    results::CallResults,
    submit::{Ends, Submission, Submitter},
};
use crate::{
    block::{OpKind, Route, Tier},
    error::Result,
    io::{OpenFile, Transfer, Transferred, Waiter},
    memory::{IoBuf, Lent},
    state::{Class, Locked, Outcome, Permit, Purpose, Use},
    sync::Mutex,
    urgency::Urgency,
};

/// Blocks planned under one lock, for which other callers wait: some microseconds.
pub(super) const PLANNED_PER_LOCK: usize = 8;

/// Blocks that a caller plans in one poll: some milliseconds. The reactor plans the others of its call, in turns.
const PLANNED_PER_CALL: usize = 1024;

/// Blocks whose slots are given back under one lock.
pub(super) const ENDED_PER_LOCK: usize = 16;

/// Blocks on their way to host memory that the reactor is handed together.
const HANDED_OVER: usize = 32;

/// A call, some of whose blocks the I/O threads read in place.
struct Load {
    ends: Arc<Ends>,
    results: Arc<CallResults>,
    progress: Mutex<Progress>,
}

#[derive(Default)]
struct Progress {
    /// Blocks that are being read.
    reading: usize,
    /// Blocks that were read, still pinned, and whether they are right. A wrong one proves nothing about the disk,
    /// because the memory is the caller's: the block goes through a host slot.
    ended: Vec<(PlannedLoad, Result<bool>)>,
}

/// A block of a call that is read to its caller's memory, with all that it needs.
struct PlannedLoad {
    /// Which block of its call it is.
    number: usize,
    job: Job,
    block: OnDisk,
    began: Instant,
}

/// A block of a call, with its number there.
pub(crate) type Numbered = (usize, Job);

/// Begins the blocks of a call, a few at a time, for as long as `begin` says so, and no more than its caller has time
/// for. Returns those that it does not take.
pub(super) fn begin_in_parts(
    jobs: Vec<Job>,
    mut begin: impl FnMut(Vec<Numbered>, &mut Vec<Numbered>) -> bool,
) -> Vec<Numbered> {
    let (mut jobs, mut rest) = (jobs.into_iter().enumerate(), Vec::new());
    for _ in 0..PLANNED_PER_CALL / PLANNED_PER_LOCK {
        if jobs.len() == 0 || !begin(jobs.by_ref().take(PLANNED_PER_LOCK).collect(), &mut rest) {
            break;
        }
    }
    rest.extend(jobs);
    rest
}

impl Submitter {
    /// Begins a load. What is left of it to the reactor, which the caller sends there.
    pub(crate) fn begin_load(&self, jobs: Vec<Job>, reply: Reply) -> Option<Command> {
        let results = Arc::new(CallResults::new(jobs.len(), reply));
        if jobs.is_empty() {
            results.settle([]);
            return None;
        }
        if !self.is_worth_waking(&jobs, OpKind::Read) {
            return Some(Command::Load { jobs: jobs.into_iter().enumerate().collect(), results });
        }
        let rest = match self.reach_in_place(&jobs) {
            true => self.begin_in_place(jobs, &results),
            false => self.begin_to_slots(jobs, &results),
        };
        (!rest.is_empty()).then_some(Command::Load { jobs: rest, results })
    }

    /// Has I/O threads read blocks to their places. Returns the others.
    fn begin_in_place(&self, jobs: Vec<Job>, results: &Arc<CallResults>) -> Vec<Numbered> {
        let (ends, progress) = (Arc::clone(&self.ends), Mutex::new(Progress::default()));
        let load = Arc::new(Load { ends, results: Arc::clone(results), progress });
        begin_in_parts(jobs, |part, rest| {
            let planned = self.plan_loads(part, rest);
            load.progress.lock().reading += planned.len();
            // Of a call whose blocks are elsewhere, the first few say so.
            let is_going_on = !planned.is_empty();
            for (planned, permit, file) in planned {
                self.queue_load(&load, planned, permit, file);
            }
            is_going_on
        })
    }

    /// Pins blocks in host memory, has I/O threads read others to host slots, and the reactor copy them from there.
    /// Returns those that must wait for something, or take another way.
    fn begin_to_slots(&self, jobs: Vec<Job>, results: &Arc<CallResults>) -> Vec<Numbered> {
        let mut coming = Vec::new();
        // Where the reactor has ended, or ends before it has them, the call ends as closed.
        let hand_over = |coming| {
            let (jobs, results) = (Vec::new(), Arc::clone(results));
            drop(self.ends.urgent.send(Urgent::Load { jobs, coming, results }));
        };
        let rest = begin_in_parts(jobs, |part, rest| {
            let begun = self.plan_to_slots(part, rest);
            let is_going_on = !begun.is_empty();
            for (block, read) in begun {
                read.into_iter().for_each(|read| self.wake(self.submit(read)));
                coming.push(block);
            }
            if coming.len() >= HANDED_OVER {
                hand_over(std::mem::take(&mut coming));
            }
            is_going_on
        });
        if !coming.is_empty() {
            hand_over(coming);
        }
        rest
    }

    /// Whether there are I/O threads, and a call is worth waking them for, as it is where the reactor hands transfers
    /// over.
    pub(super) fn is_worth_waking(&self, jobs: &[Job], kind: OpKind) -> bool {
        let shared = &self.ends.shared;
        let bytes = jobs.len() as u64 * shared.config.slot_bytes() as u64 + shared.in_flight.bytes(kind);
        self.pool.as_ref().is_some_and(|pool| pool.is_worth_waking(jobs.len(), bytes))
    }

    /// Whether blocks of a call may be read or written in place: as its first, which most of them are like.
    pub(super) fn reach_in_place(&self, jobs: &[Job]) -> bool {
        jobs.first().is_some_and(|job| self.reaches_in_place(job))
    }

    /// Whether direct I/O reads or writes the block in its place by one operation.
    pub(super) fn reaches_in_place(&self, job: &Job) -> bool {
        job.segments.len() == 1 && job.shape(&self.ends.shared).is_in_place
    }

    /// Plans some blocks of a call. Those that must wait for something, or take another way, join the `rest`.
    fn plan_loads(&self, jobs: Vec<Numbered>, rest: &mut Vec<Numbered>) -> Vec<(PlannedLoad, Permit, OpenFile)> {
        let mut planned = Vec::with_capacity(jobs.len());
        let began = Instant::now();
        let mut state = self.ends.shared.lock();
        state.index.prefetch_keys(jobs.iter().map(|(_, job)| &job.key));
        for (number, job) in jobs {
            match self.plan_load(&mut state, &job) {
                Some((block, permit, file)) => planned.push((PlannedLoad { number, job, block, began }, permit, file)),
                None => rest.push((number, job)),
            }
        }
        planned
    }

    fn plan_load(&self, state: &mut Locked<'_>, job: &Job) -> Option<(OnDisk, Permit, OpenFile)> {
        let id = state.find_open(&job.key).filter(|_| self.reaches_in_place(job))?;
        let mut trip = Trip::load(&job.key, job.shape(&self.ends.shared), Use::Now);
        let route = trip.choose(state, Some(id), false).filter(|route| *route == Route::DiskToRegion)?;
        let Step::OnDisk(block) = trip.begin_for(state, route, Purpose::Call) else { return None };
        let file = state.files[usize::from(block.file.0)].clone();
        // From here on a close waits for it: no I/O thread ends before.
        state.flights.begin_load();
        Some((block, trip.taken.permit(), file))
    }

    /// Plans some blocks of a call that go by host slots, each with its read if it needs one. Those that it does not
    /// take join the `rest`.
    fn plan_to_slots(&self, jobs: Vec<Numbered>, rest: &mut Vec<Numbered>) -> Vec<(Coming, Option<Submission>)> {
        let mut begun = Vec::with_capacity(jobs.len());
        // Made here: an allocation under the lock would hold all callers up.
        let channels: Vec<_> = jobs.iter().map(|_| oneshot::channel()).collect();
        let mut state = self.ends.shared.lock();
        state.index.prefetch_keys(jobs.iter().map(|(_, job)| &job.key));
        for ((number, job), (waiter, outcome)) in jobs.into_iter().zip(channels) {
            match self.plan_to_slot(&mut state, &job, waiter) {
                Some(read) => begun.push((Coming::new((number, job), outcome), read)),
                None => rest.push((number, job)),
            }
        }
        begun
    }

    fn plan_to_slot(
        &self,
        state: &mut Locked<'_>,
        job: &Job,
        waiter: oneshot::Sender<Outcome>,
    ) -> Option<Option<Submission>> {
        let id = state.find_open(&job.key)?;
        let has_cufile = state.cufile.reads() && state.device_service.reads();
        let route = Trip::load(&job.key, job.shape(&self.ends.shared), Use::Now).choose(state, Some(id), has_cufile)?;
        if route != Route::HostToCaller || state.flights.contains(&job.key, Tier::Host) {
            return None;
        }
        // Before later blocks of the call are read: their slots might be its.
        if let Some(pin) = state.pin_resident(id) {
            drop(waiter.send(Ok(Some(pin))));
            return Some(None);
        }
        let source = state.served_tier(id);
        let read = self.plan(state, (&job.key, id), Class::Awaited)?;
        let read = self.begin_read(state, id, Class::Awaited, waiter, read);
        state.count_use(id);
        state.count(self.ends.shared.metrics.look_ups(source), 1);
        Some(Some(read))
    }

    fn queue_load(&self, load: &Arc<Load>, planned: PlannedLoad, permit: Permit, file: OpenFile) {
        // SAFETY: it is filled by this read alone.
        let buf = unsafe { planned.job.lend_place() };
        let transfer = Transfer { kind: OpKind::Read, file, offset: planned.block.offset, buf };
        let load = Arc::clone(load);
        let end = move |result| load.ended(planned, permit, result);
        let waiter = Waiter::calling(self.ends.shared.config.block_bytes, end);
        self.pool().push_transfer(Urgency::Awaited, transfer, waiter).wake();
    }
}

impl Load {
    /// The end of a read, on the thread that has made it. One that was lost is made again: the kernel is done with its
    /// memory.
    fn ended(self: &Arc<Self>, planned: PlannedLoad, permit: Permit, result: Option<Transferred>) {
        drop(permit);
        let (shared, block) = (&self.ends.shared, &planned.block);
        shared.metrics.work_done.add(u64::from(matches!(result, Some(Ok(_)))));
        let ended = match result {
            Some(result) => {
                shared.end_read_in_place(block.file, result).map(|sum| sum.flatten() == Some(block.checksum))
            }
            None => Ok(false),
        };
        self.end(planned, ended);
    }

    fn end(self: &Arc<Self>, planned: PlannedLoad, ended: Result<bool>) {
        let ended = {
            let mut progress = self.progress.lock();
            progress.reading -= 1;
            progress.ended.push((planned, ended));
            if progress.reading > 0 && progress.ended.len() < ENDED_PER_LOCK {
                return;
            }
            std::mem::take(&mut progress.ended)
        };
        let (mut results, mut again, mut pins) = (Vec::new(), Vec::new(), Vec::new());
        for (PlannedLoad { number, job, block, began }, ended) in ended {
            pins.push((block.pin, matches!(ended, Ok(true)).then_some(began)));
            match ended {
                Ok(false) => again.push((number, Job { through_host: true, ..job })),
                result => results.push((number, result)),
            }
        }
        if !again.is_empty() {
            // Where the reactor is gone, the call ends as closed.
            let (coming, results) = (Vec::new(), Arc::clone(&self.results));
            drop(self.ends.urgent.send(Urgent::Load { jobs: again, coming, results }));
        }
        let submitted = pins.len();
        self.ends.shared.end_loads(Route::DiskToRegion, pins, submitted);
        self.results.settle(results);
    }
}

impl Job {
    /// Lends the place of a block in one segment to an I/O thread.
    ///
    /// # Safety
    /// As of [`Job`](super::block_memory): only a block that is loaded is read to, and the place is lent once at a
    /// time.
    pub(super) unsafe fn lend_place(&self) -> Lent {
        let (segment, _, guard) = self.places().into_iter().next().expect("it has one segment");
        let start = NonNull::new(segment.ptr).expect("no memory begins at 0");
        // The kernel's registration of the memory is of the reactor's ring.
        // SAFETY: the operation owns the regions, which so stay mapped.
        let buf = unsafe { IoBuf::new(start, segment.len, None, Arc::clone(&self.regions)) }.guarded(guard);
        // SAFETY: the only one of the buffer.
        unsafe { buf.lend() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::BlockKey;

    #[test]
    fn a_caller_plans_no_more_of_its_call_than_it_has_time_for() {
        let job = || Job {
            key: BlockKey::new([1; 32]),
            parent: None,
            segments: Vec::new(),
            regions: Arc::new([]),
            through_host: false,
            is_counted: false,
        };
        for (blocks, parts, planned) in [(5000, 1000, 1024), (20, 1000, 20), (5000, 2, 16), (0, 1000, 0)] {
            let mut begun = 0;
            let rest = begin_in_parts(std::iter::repeat_with(job).take(blocks).collect(), |part, _| {
                assert!(part.len() <= PLANNED_PER_LOCK);
                begun += part.len();
                begun < parts * PLANNED_PER_LOCK
            });
            assert_eq!(begun, planned, "of {blocks}");
            assert!(rest.iter().map(|(number, _)| *number).eq(planned..blocks), "the others, with their numbers");
        }
    }
}
