//! Blocks to and from memory that is not ours: an engine's host pool, a device's KV pool.

use std::{
    ptr::NonNull,
    rc::Rc,
    sync::{Arc, atomic::Ordering},
};

use tokio::{sync::oneshot, time::Instant};

use super::{
    Active, Mover,
    load::{Numbered, PLANNED_PER_LOCK},
    plan::{Step, Trip},
    region::{Job, RegionMemory, RegionUse, UNREGISTERED},
    store::{PlannedStore, StoreCall, StoreStep, begin_store},
};
use crate::{
    block::{BlockKey, Route, Tier},
    device::CopyEngine,
    error::Result,
    io::Storage,
    state::{Class, Committed, Locked, Outcome, Purpose},
};

/// A load, and its first step.
pub(super) type BegunLoad = (Trip, Result<Step>);

/// Jobs begun in one turn of the reactor: about 20 us of work.
pub(super) const BEGUN_PER_TURN: usize = 32;

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Registers a region with the storage, if the kernel allows it.
    pub(super) fn register(&self, region: &RegionUse) {
        let start = NonNull::new(std::ptr::with_exposed_provenance_mut(region.start)).expect("no region begins at 0");
        if region.memory == RegionMemory::Host && !region.is_fixed() {
            // SAFETY: the owner of the region promised at its registration to keep it mapped until `Cache::unregister`
            // has resolved. That waits for the hold on it which came with this request, and then for `unregister`. If
            // the registration was dropped meanwhile, nothing is read into the region, and `GiveBack` follows.
            let first = unsafe { self.storage.register(start, region.len) };
            if let Some(first) = first {
                region.fixed.store(u32::from(first), Ordering::Release);
            }
            self.note_registered();
        }
    }

    /// Unregisters a region that no movement uses any more.
    pub(super) fn unregister(&self, region: &RegionUse) {
        if let Ok(first) = u16::try_from(region.fixed.swap(UNREGISTERED, Ordering::AcqRel)) {
            self.storage.unregister(first, region.len);
            self.note_registered();
        }
    }

    /// Notes whether the kernel has taken the new table, for the figures.
    fn note_registered(&self) {
        self.shared.registered.store(self.storage.registered(), Ordering::Release);
    }

    /// Stores blocks of a call from their segments, all at once: the byte budget, not the number of jobs, bounds what
    /// is in flight. Stores begin under one lock, a few at a time. They are one movement, until all have ended.
    pub(super) async fn store_from(self: Rc<Self>, jobs: Vec<Numbered>, call: Arc<StoreCall>, active: Active<S, C>) {
        let (mut jobs, active) = (jobs.into_iter(), Rc::new(active));
        while jobs.len() > 0 {
            let turn: Vec<Numbered> = jobs.by_ref().take(BEGUN_PER_TURN).collect();
            let mut begun = Vec::with_capacity(turn.len());
            for jobs in turn.chunks(PLANNED_PER_LOCK) {
                let mut state = self.shared.lock();
                begun.extend(jobs.iter().map(|(_, job)| self.begin_store(&mut state, job)));
            }
            for ((number, job), step) in turn.into_iter().zip(begun) {
                let (this, call, active) = (Rc::clone(&self), Arc::clone(&call), Rc::clone(&active));
                self.spawn_part(async move {
                    let stored = this.store_begun(&call, (number, Box::new(job)), step).await;
                    // I/O threads have the others.
                    if !matches!(stored, Ok(false)) {
                        call.results.settle([(number, stored)]);
                    }
                    drop(active);
                });
            }
            if jobs.len() > 0 {
                crate::io::yield_now().await;
            }
        }
        // Answers a call of no blocks.
        call.results.settle([]);
    }

    /// The job is boxed, and what seldom happens: the future of every such block is the smaller for it.
    pub(super) async fn load_begun(self: Rc<Self>, job: Box<Job>, (mut trip, step): BegunLoad) -> Result<bool> {
        let started = Instant::now();
        let (mut job, mut step) = (job, step);
        loop {
            let block = match self.ready(&mut trip, step).await? {
                Step::OnDisk(block) => block,
                step => return Box::pin(self.load_through_host(job, &trip, step, started)).await,
            };
            let left = match trip.route() {
                Route::DiskToRegion => self.read_in_place(&mut trip, block, job, started).await?,
                _ => Box::pin(self.load_by_cufile(&mut trip, block, job, started)).await?,
            };
            let Some(again) = left else { return Ok(true) };
            job = again;
            trip.rule_out();
            step = self.plan(&mut self.shared.lock(), &mut trip);
        }
    }

    async fn load_through_host(
        self: &Rc<Self>,
        job: Box<Job>,
        trip: &Trip,
        step: Step,
        started: Instant,
    ) -> Result<bool> {
        let Some(pin) = self.to_host(&trip.key, Class::Awaited, step, None).await? else { return Ok(false) };
        self.copy_onward(pin, job).await?.0?;
        self.loaded(&trip.key, started);
        if trip.is_suspect {
            self.blame_cufile();
        }
        Ok(true)
    }

    /// Counts a block that was copied from host memory to a caller, and writes it to disk if the policy wants that by
    /// now.
    pub(super) fn loaded(self: &Rc<Self>, key: &BlockKey, started: Instant) {
        self.shared.metrics.moved(Route::HostToCaller, started.elapsed());
        if self.shared.config.selects_for_disk()
            && let Some(write) = self.shared.selected_for_disk(key)
        {
            self.spawn(Rc::clone(self).write(write));
        }
    }

    fn begin_store(&self, state: &mut Locked<'_>, job: &Job) -> Result<StoreStep> {
        let is_in_place = job.shape(&self.shared).is_in_place && job.is_kept_unchanged();
        begin_store(state, job, is_in_place, self.cufile.get().is_some())
    }

    /// Boxes as [`load_begun`](Self::load_begun). `false`: an I/O thread has it, and settles its result.
    async fn store_begun(
        self: Rc<Self>,
        call: &Arc<StoreCall>,
        (number, job): (usize, Box<Job>),
        step: Result<StoreStep>,
    ) -> Result<bool> {
        let step = match step? {
            StoreStep::Unproven => Box::pin(self.prove(&job)).await?,
            step => step,
        };
        let begun = match step {
            StoreStep::Unproven => unreachable!("it was read"),
            StoreStep::Known(Committed::Done) => return Ok(true),
            StoreStep::Known(committed) => {
                drop(job);
                return Box::pin(self.finish_store(committed)).await.map(|()| true);
            }
            StoreStep::Begun(begun) => Some(begun),
            StoreStep::Waits(taken) => Box::pin(self.begin_region_write(&job, taken, None)).await?,
            StoreStep::Planned(Route::CallerToHost) => None,
            StoreStep::Planned(_) => match Box::pin(self.store_by_cufile(job)).await? {
                None => return Ok(true),
                Some(left) => return Box::pin(self.store_by_copy(left)).await.map(|()| true),
            },
        };
        match begun {
            Some(begun) => self.store_in_place(call, PlannedStore::new(number, job, Instant::now(), begun)).await,
            None => Box::pin(self.store_by_copy(job)).await.map(|()| true),
        }
    }

    /// Reads a block that the disk has from an earlier run, then begins its store. One that was cut off is given up.
    async fn prove(self: &Rc<Self>, job: &Job) -> Result<StoreStep> {
        loop {
            let read = self.obtain_host(&job.key, Class::Awaited).await;
            let step = self.begin_store(&mut self.shared.lock(), job)?;
            match (step, read) {
                (StoreStep::Unproven, Err(error)) => return Err(error),
                (StoreStep::Unproven, Ok(_)) => {}
                (step, _) => return Ok(step),
            }
        }
    }

    /// Stores a block by way of a host slot.
    async fn store_by_copy(self: &Rc<Self>, job: Box<Job>) -> Result<()> {
        let (key, parent) = (job.key, job.parent);
        let filling = self.shared.acquire(Tier::Host, Purpose::Call).await?;
        job.check_is_there()?;
        let (result, job, filling) = self.copy_promptly(job, filling).await?;
        result?;
        // What the copy found may be zeros.
        job.check_is_there()?;
        drop(job);
        // Of the copy, also where the device could checksum its memory: that may have changed since.
        let (checksum, filling) = self.checksum_of(filling, 0).await;
        let committed = self.shared.commit(&key, parent.as_ref(), filling, checksum)?;
        self.finish_store(committed).await
    }

    /// Does what the write policy wants for a committed block.
    async fn finish_store(self: &Rc<Self>, committed: Committed) -> Result<()> {
        match self.begin_committed(committed) {
            Some(receiver) => self.shared.written(receiver).await,
            None => Ok(()),
        }
    }

    /// Starts the write of a block, if that is the next step. What receives its outcome.
    pub(super) fn begin_committed(self: &Rc<Self>, committed: Committed) -> Option<oneshot::Receiver<Outcome>> {
        match committed {
            Committed::Done => None,
            Committed::Wait(receiver) => Some(receiver),
            Committed::Write(write, receiver) => {
                self.spawn(Rc::clone(self).write(write));
                Some(receiver)
            }
        }
    }
}
