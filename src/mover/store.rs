//! Stores that callers submit themselves.
//!
//! A block that is resident nowhere, and that direct I/O writes from its caller's memory, needs the reactor only for
//! its record. Whoever stores such blocks plans them under the lock, a few at a time, and queues their writes for the
//! I/O threads, which checksum them first. The reactor writes the records, those of a call on one page together, makes
//! the blocks visible and answers the call. It stores the others of the call, those whose write has failed or was lost,
//! and those that must wait for something.

use std::{io, sync::Arc};

use tokio::time::Instant;

use super::{
    Command, Urgent,
    call_pages::{CallPages, Next},
    command::Reply,
    load::{Numbered, begin_in_parts},
    region::{Job, RegionMemory},
    results::CallResults,
    route::{self, Shape, View, Want},
    submit::{Ends, Submitter},
};
use crate::{
    block::{OpKind, Route, Tier},
    config::WritePolicy,
    disk::Origin,
    error::Result,
    index::EntryId,
    io::{OpenFile, Pool, Pushed, Transfer, TransferHandler, Transferred, Waiter},
    state::{BegunWrite, Class, Committed, DiskPlace, DiskWrite, Few, Known, Locked, Permit, Purpose, Taken, WRITE},
    sync::Mutex,
    urgency::Urgency,
};

/// A call that stores blocks from its caller's memory.
pub(crate) struct StoreCall {
    ends: Arc<Ends>,
    pub(super) results: CallResults,
    /// Those of its blocks that I/O threads write. Its lock may be taken under the state's, never around it.
    pub(super) pages: Mutex<CallPages<SummedStore, PlannedStore>>,
}

/// The first step of a store.
pub(super) enum StoreStep {
    /// The block is resident already, or the disk tier, which is the last, does not take it.
    Known(Committed),
    /// As [`Known::Unproven`].
    Unproven,
    /// It is written in place.
    Begun(BegunWrite),
    /// It is written in place, by what it has taken and something that must be waited for.
    Waits(Taken),
    /// It goes through a slot of another tier.
    Planned(Route),
}

/// A block of a call that is written from its caller's memory, with all that it needs.
pub(crate) struct PlannedStore {
    /// Which block of its call it is.
    pub(super) number: usize,
    pub(super) job: Box<Job>,
    pub(super) began: Instant,
    /// `None` once the write has ended.
    pub(super) permit: Option<Permit>,
    pub(super) write: DiskWrite,
    pub(super) place: DiskPlace,
}

/// A write by an I/O thread that has failed: why. `None`: it was lost.
pub(crate) type FailedStore = (PlannedStore, Option<io::Error>);

/// What is recorded of a block that an I/O thread is about to write.
pub(super) struct SummedStore {
    pub(super) id: EntryId,
    pub(super) slot: u32,
    pub(super) checksum: u64,
    pub(super) origin: Origin,
}

/// A store that an I/O thread makes.
struct QueuedStore {
    call: Arc<StoreCall>,
    /// Of the blocks that are recorded together.
    group: usize,
    is_summed: bool,
    planned: PlannedStore,
}

/// The way of a block that is stored. `is_in_place`: direct I/O may write it from its place. `has_cufile`: libcufile
/// may.
fn store_route(state: &Locked<'_>, job: &Job, is_in_place: bool, has_cufile: bool) -> Route {
    let memory = Shape { is_device: job.memory() == RegionMemory::Device, is_in_place };
    let mut view = View { memory, ..View::default() };
    if memory != Shape::default() {
        let (id, disk) = (state.index.find(&job.key), &state.shared().config.disk);
        view.held = Tier::ALL.map(|tier| id.is_some_and(|id| state.index.slot(id, tier).is_some()));
        view.is_moving = Tier::ALL.iter().any(|&tier| state.flights.contains(&job.key, tier));
        view.has_cufile = has_cufile && state.cufile.writes() && state.device_service.reads();
        view.writes_through =
            disk.write_policy == WritePolicy::WriteThrough && !disk.paths.is_empty() && state.disk_service.writes();
    }
    route::choose(Want::Store, &view, None).expect("the last way applies always")
}

/// Begins the store of a block. The parameters are those of [`store_route`].
pub(super) fn begin_store(state: &mut Locked<'_>, job: &Job, is_in_place: bool, has_cufile: bool) -> Result<StoreStep> {
    match state.store_known(&job.key, job.parent.as_ref())? {
        Known::Yes(committed) => return Ok(StoreStep::Known(committed)),
        Known::Unproven => return Ok(StoreStep::Unproven),
        Known::No => {}
    }
    let route = store_route(state, job, is_in_place, has_cufile);
    if route != Route::CallerToHost && state.refuses(&job.key, job.parent.as_ref(), Tier::Disk) {
        return Ok(StoreStep::Known(Committed::Done));
    }
    if route != Route::RegionToDisk {
        return Ok(StoreStep::Planned(route));
    }
    job.check_is_there()?;
    let mut taken = Taken::default();
    match taken.take(state, &WRITE, Purpose::Call) {
        Some(_) => Ok(StoreStep::Waits(taken)),
        None => Ok(StoreStep::Begun(begin_caller_write(state, job, taken, None))),
    }
}

/// Begins the write of a block from its caller's memory that is resident nowhere and on no way, and its flight.
pub(super) fn begin_caller_write(
    state: &mut Locked<'_>,
    job: &Job,
    mut taken: Taken,
    checksum: Option<u64>,
) -> BegunWrite {
    let (permit, filling) = (taken.permit(), taken.slot());
    let id = state.index.insert(job.key, job.parent);
    let place = state.begin_disk_write(id, &filling, checksum).expect("it is resident nowhere, and on no way");
    // For callers that want the same block on disk meanwhile; the one that stores it is answered by the end itself.
    state.flights.begin((&job.key, Tier::Disk), id, Class::Awaited, Few::default(), true);
    state.watch();
    (permit, DiskWrite { id, filling }, place)
}

impl PlannedStore {
    pub(super) fn new(number: usize, job: Box<Job>, began: Instant, begun: BegunWrite) -> Self {
        let (permit, write, place) = begun;
        PlannedStore { number, job, began, permit: Some(permit), write, place }
    }
}

impl StoreCall {
    /// Queues the write of a block in one segment for the I/O threads. The caller wakes one if it must.
    pub(super) fn queue(self: &Arc<Self>, planned: PlannedStore, pool: &Pool, file: OpenFile) -> Pushed {
        let group = self.pages.lock().enter(planned.place.page);
        // SAFETY: nothing is written to it. The plan, in the waiter, keeps the disk slot.
        let buf = unsafe { planned.job.lend_place() };
        let transfer = Transfer { kind: OpKind::Write, file, offset: planned.place.offset, buf };
        let queued = QueuedStore { call: Arc::clone(self), group, is_summed: false, planned };
        pool.push_transfer(Urgency::Awaited, transfer, Waiter::calling(self.ends.shared.config.block_bytes, queued))
    }

    fn follow(self: &Arc<Self>, Next { record, written }: Next<PlannedStore>) {
        record.into_iter().for_each(|group| self.hand_over(group));
        if let Some((waiter, written)) = written {
            drop(waiter.send(written));
        }
    }

    /// Has the reactor record a group and end its stores.
    fn hand_over(self: &Arc<Self>, group: usize) {
        // Where the reactor is gone, the call ends as closed.
        drop(self.ends.urgent.send(Urgent::EndStores { call: Arc::clone(self), group }));
    }

    /// Waits for the payloads of blocks whose records are written.
    pub(super) async fn written(&self, group: usize) -> Vec<PlannedStore> {
        let written = self.pages.lock().end(group);
        match written {
            Ok(written) => written,
            Err(written) => written.await.expect("the call has the sender"),
        }
    }
}

impl TransferHandler for QueuedStore {
    fn summed(&mut self, checksum: u64) {
        let PlannedStore { number, job, write: DiskWrite { id, filling }, .. } = &self.planned;
        let summed = SummedStore { id: *id, slot: filling.slot(), checksum, origin: job.origin() };
        let next = self.call.pages.lock().summed(self.group, *number, summed);
        self.is_summed = true;
        self.call.follow(next);
    }

    /// The reactor hears at once of a write that has failed, or was lost: the kernel is done with its memory.
    fn ended(self: Box<Self>, result: Option<Transferred>) {
        let QueuedStore { call, group, is_summed, mut planned } = *self;
        if result.is_some() {
            drop(planned.permit.take());
        }
        let shared = &call.ends.shared;
        let failed = match result {
            Some(Ok(_)) => {
                shared.account(&shared.failures, planned.place.file, OpKind::Write, &Ok(()));
                shared.metrics.work_done.add(1);
                let next = call.pages.lock().written(group, planned);
                return call.follow(next);
            }
            Some(Err(error)) => Some(error),
            None => None,
        };
        let next = call.pages.lock().give_up(group, planned.number, is_summed);
        call.follow(next);
        let store = Box::new((planned, failed));
        drop(call.ends.urgent.send(Urgent::EndStore { call: Arc::clone(&call), store }));
    }
}

impl Submitter {
    /// Begins a store. What is left of it to the reactor, which the caller sends there.
    pub(crate) fn begin_store(&self, jobs: Vec<Job>, reply: Reply) -> Option<Command> {
        let (results, pages) = (CallResults::new(jobs.len(), reply), Mutex::new(CallPages::new()));
        let call = Arc::new(StoreCall { ends: Arc::clone(&self.ends), results, pages });
        if !self.is_worth_waking(&jobs, OpKind::Write) || !self.reach_in_place(&jobs) {
            return Some(Command::StoreFrom { jobs: jobs.into_iter().enumerate().collect(), call });
        }
        let mut known = Vec::new();
        call.pages.lock().hold();
        let rest = begin_in_parts(jobs, |part, rest| self.begin_stores(&call, part, &mut known, rest));
        let complete = call.pages.lock().release();
        complete.into_iter().for_each(|group| call.hand_over(group));
        call.results.settle(known);
        (!rest.is_empty()).then_some(Command::StoreFrom { jobs: rest, call })
    }

    /// Begins some blocks of a call. Those that must wait for something, or take another way, join the `rest`. False
    /// where all others of the call do: they go before none that waits, and where none is begun, they are elsewhere.
    fn begin_stores(
        &self,
        call: &Arc<StoreCall>,
        jobs: Vec<Numbered>,
        known: &mut Vec<(usize, Result<bool>)>,
        rest: &mut Vec<Numbered>,
    ) -> bool {
        let began = Instant::now();
        let mut waits = false;
        let mut state = self.ends.shared.lock();
        state.index.prefetch_keys(jobs.iter().flat_map(|(_, job)| [Some(&job.key), job.parent.as_ref()]).flatten());
        let begin = |(_, job): &Numbered| {
            let step = if waits { None } else { self.begin_store_now(&mut state, job) };
            waits |= matches!(step, Some(Ok(StoreStep::Waits(_))));
            let file = match &step {
                Some(Ok(StoreStep::Begun((.., place)))) => Some(state.files[usize::from(place.file.0)].clone()),
                _ => None,
            };
            (step, file)
        };
        let steps: Vec<_> = jobs.iter().map(begin).collect();
        drop(state);
        let all = rest.len() + jobs.len();
        for ((number, job), step) in jobs.into_iter().zip(steps) {
            match step {
                (Some(Ok(StoreStep::Begun(begun))), Some(file)) => {
                    let planned = PlannedStore::new(number, Box::new(job), began, begun);
                    call.queue(planned, self.pool(), file).wake();
                }
                (Some(Ok(StoreStep::Known(_))), _) => known.push((number, Ok(true))),
                (Some(Err(error)), _) => known.push((number, Err(error))),
                _ => rest.push((number, job)),
            }
        }
        !waits && rest.len() < all
    }

    /// Begins the store of a block that is on disk, or goes there from its place. `None`: it is left to the reactor.
    fn begin_store_now(&self, state: &mut Locked<'_>, job: &Job) -> Option<Result<StoreStep>> {
        let id = state.index.find(&job.key);
        let is_on_disk = id.is_some_and(|id| state.held(id)[Tier::Disk as usize]);
        let is_resident = id.is_some_and(|id| state.index.best_tier(id).is_some());
        let is_for_reactor = is_resident && !is_on_disk
            || state.check_open().is_err()
            || !self.reaches_in_place(job)
            || state.flights.len() >= self.ends.shared.config.limits.movements_max as usize;
        (!is_for_reactor).then(|| begin_store(state, job, job.is_kept_unchanged(), false))
    }
}
