//! Blocks to and from memory that is not ours: an engine's host pool, a device's KV pool.

use std::{
    future::Future,
    ptr::NonNull,
    rc::Rc,
    sync::{Arc, atomic::Ordering},
};

use tokio::time::Instant;

use super::{
    Mover,
    from_region::RegionStore,
    pages::CallPages,
    promote::{Asked, Next},
    read::RegionRead,
    region::{Job, RegionMemory, RegionUse, UNREGISTERED},
    results::of_task,
    speculative_copy::{Offer, Target},
    staged::Staged,
};
use crate::{
    block::{BlockKey, Direction, Route, Tier},
    device::{CopyEngine, OwnedBatch, pair_segments},
    error::Result,
    io::Storage,
    shield::caught,
    state::{Class, Committed, Found, Pin, Purpose, State},
};

/// Where the block of a load is after its promotion.
enum Brought {
    /// It is in its segments.
    Copied,
    /// It is in host memory, pinned; or nowhere.
    ToHost(Job, Option<Pin>),
}

/// Jobs begun in one turn of the reactor: about 20 us of work.
const BEGUN_PER_TURN: usize = 32;

/// Jobs begun under one lock, for which callers wait: some microseconds.
const BEGUN_PER_LOCK: usize = 8;

/// Jobs that begin before the first of them runs: those of a call are on a few pages of records, which they share only
/// if they are in flight together.
const BEGUN_TOGETHER: usize = 128;

/// Calls `begin` with each item, and lets the reactor do other work after every few: a call may have any number of
/// blocks.
pub(super) async fn in_turns<T, R>(items: impl IntoIterator<Item = T>, mut begin: impl FnMut(T) -> R) -> Vec<R> {
    let mut begun = Vec::new();
    for item in items {
        if begun.len() % BEGUN_PER_TURN == BEGUN_PER_TURN - 1 {
            crate::io::yield_now().await;
        }
        begun.push(begin(item));
    }
    begun
}

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Registers a region with the storage, if the kernel allows it.
    pub(super) fn register(&self, region: &RegionUse) {
        let region = &region.0;
        let start = NonNull::new(std::ptr::with_exposed_provenance_mut(region.start)).expect("no region begins at 0");
        if region.memory == RegionMemory::Host && !region.is_fixed() {
            // SAFETY: the owner of the region promised at its registration to keep it mapped until `Cache::unregister`
            // has resolved. That waits for the hold on it which came with this request, and then for `unregister`. If
            // the registration was dropped meanwhile, nothing is read into the region, and `GiveBack` follows.
            let register = || unsafe { self.storage.register(start, region.len) };
            // No movement contains a subscriber that panics when it is told of a refusal.
            if let Some(first) = caught(register).flatten() {
                region.fixed.store(u32::from(first), Ordering::Release);
            }
            self.note_registered();
        }
    }

    /// Unregisters a region that no movement uses any more.
    pub(super) fn unregister(&self, region: &RegionUse) {
        let region = &region.0;
        if let Ok(first) = u16::try_from(region.fixed.swap(UNREGISTERED, Ordering::AcqRel)) {
            // As in `register`: what is left to do for the region must not depend on a subscriber.
            _ = caught(|| self.storage.unregister(first, region.len));
            self.note_registered();
        }
    }

    /// Notes whether the kernel has taken the new table, for the figures.
    fn note_registered(&self) {
        self.shared.registered.store(self.storage.registered(), Ordering::Release);
    }

    /// Copies each block into its segments; `false` for a block that is resident nowhere.
    pub(super) async fn load(self: &Rc<Self>, jobs: Vec<Job>) -> Vec<Result<bool>> {
        let begin = |state: &mut State, job: &Job| self.begin_region_read(state, job);
        self.each(jobs, begin, Self::load_begun).await
    }

    /// Stores each block from its segments.
    pub(super) async fn store_from(self: &Rc<Self>, jobs: Vec<Job>) -> Vec<Result<bool>> {
        let pages = Rc::new(CallPages::default());
        let bytes = jobs.len() as u64 * self.shared.config.slot_bytes() as u64;
        let begin = |state: &mut State, job: &Job| self.begin_region_store(state, job, bytes, &pages);
        self.each(jobs, begin, |this, job, begun| this.store_begun(job, begun, Rc::clone(&pages))).await
    }

    /// Runs all jobs at once: the byte budget, not the number of jobs, bounds what is in flight. Jobs begin under one
    /// lock, a few at a time, and the blocks of a few pages of records before the first of them is written.
    async fn each<B, F>(
        self: &Rc<Self>,
        jobs: Vec<Job>,
        begin: impl Fn(&mut State, &Job) -> B,
        run: impl Fn(Rc<Self>, Box<Job>, B) -> F,
    ) -> Vec<Result<bool>>
    where
        F: Future<Output = Result<bool>> + 'static,
    {
        let mut tasks = Vec::with_capacity(jobs.len());
        let mut jobs = jobs.into_iter();
        while jobs.len() > 0 {
            let part: Vec<Job> = jobs.by_ref().take(BEGUN_TOGETHER).collect();
            let mut begun = Vec::with_capacity(part.len());
            for jobs in part.chunks(BEGUN_PER_TURN) {
                if !(tasks.is_empty() && begun.is_empty()) {
                    crate::io::yield_now().await;
                }
                for jobs in jobs.chunks(BEGUN_PER_LOCK) {
                    let mut state = self.shared.lock();
                    begun.extend(jobs.iter().map(|job| begin(&mut state, job)));
                }
            }
            let spawn = |(job, begun)| tokio::task::spawn_local(run(Rc::clone(self), Box::new(job), begun));
            tasks.extend(in_turns(part.into_iter().zip(begun), spawn).await);
        }
        let mut results = Vec::with_capacity(tasks.len());
        for task in tasks {
            results.push(of_task(task.await));
        }
        results
    }

    pub(super) async fn load_one(self: Rc<Self>, job: Job) -> Result<bool> {
        let begun = self.begin_region_read(&mut self.shared.lock(), &job);
        self.load_begun(Box::new(job), begun).await
    }

    /// The job is boxed, and what seldom happens: every block has a future, which is the smaller for it.
    async fn load_begun(self: Rc<Self>, job: Box<Job>, begun: RegionRead) -> Result<bool> {
        match self.read_to_region(job, begun).await? {
            None => Ok(true),
            Some(job) => Box::pin(self.load_otherwise(*job)).await,
        }
    }

    async fn load_otherwise(self: &Rc<Self>, job: Job) -> Result<bool> {
        match self.load_staged(job).await? {
            Staged::Loaded => Ok(true),
            Staged::Elsewhere(job) => self.load_through_host(job).await,
            Staged::Suspect(job) => {
                let loaded = self.load_through_host(job).await;
                if let Ok(true) = loaded {
                    self.blame_cufile();
                }
                loaded
            }
        }
    }

    async fn load_through_host(self: &Rc<Self>, job: Job) -> Result<bool> {
        let (key, started) = (job.key, Instant::now());
        let (job, pin) = match self.shared.look_up_to_copy(&key, Tier::Host)? {
            Found::Hit(pin) => (job, Some(pin)),
            Found::Miss => return Ok(false),
            Found::Elsewhere(_) => match self.bring(job).await? {
                Brought::Copied => {
                    self.loaded(&key, started);
                    return Ok(true);
                }
                Brought::ToHost(job, pin) => (job, pin),
            },
        };
        let Some(pin) = pin else { return Ok(false) };
        let direction = match job.memory() {
            RegionMemory::Host => Direction::HostToHost,
            RegionMemory::Device => self.promote_direction(),
        };
        let ops = pair_segments(&[self.host_segment(pin.slot())], &job.segments)?;
        let regions = job.copy_regions();
        // SAFETY: the source is pinned; the target lies in regions that the job holds, whose owner
        // promised at registration not to touch a segment while it is loaded. All guards travel.
        let batch = unsafe { OwnedBatch::new(ops, direction, (pin, job)) };
        // SAFETY: their owner keeps them mapped until `Cache::unregister` has resolved, which tells the engine.
        let batch = unsafe { batch.within(regions) };
        self.copied(batch).await.0?;
        self.loaded(&key, started);
        Ok(true)
    }

    /// Brings the block of a load into host memory, and on to the device where it is wanted there.
    async fn bring(self: &Rc<Self>, job: Job) -> Result<Brought> {
        let key = job.key;
        if job.memory() == RegionMemory::Host {
            let pin = self.obtain_host(&key, Class::Awaited, Next::Elsewhere, Asked::ByCaller).await?;
            return Ok(Brought::ToHost(job, pin));
        }
        let offer = Offer::new(Target::Memory(job));
        let outcome = self.obtain_host(&key, Class::Awaited, Next::Device(offer.ahead()), Asked::ByCaller).await;
        // Also after a failure: the owner may use the memory again once it has an answer.
        let (Target::Memory(job), copied) = offer.withdraw().await? else {
            unreachable!("a target comes back as the one that it was");
        };
        let pin = outcome?;
        let wanted = pin.as_ref().map(|pin| self.shared.lock().host_checksums[pin.slot() as usize]);
        Ok(if copied.is_some() && copied == wanted { Brought::Copied } else { Brought::ToHost(job, pin) })
    }

    /// Counts a block that was copied from host memory to a caller, and writes it to disk if the policy wants that by
    /// now.
    pub(super) fn loaded(self: &Rc<Self>, key: &BlockKey, started: Instant) {
        self.shared.metrics.moved(Route::HostToCaller, self.shared.config.block_bytes, started.elapsed());
        if self.shared.config.selects_for_disk()
            && let Some(write) = self.shared.selected_for_disk(key)
        {
            self.spawn(Rc::clone(self).write(write));
        }
    }

    /// Boxes as [`load_begun`](Self::load_begun).
    async fn store_begun(
        self: Rc<Self>,
        job: Box<Job>,
        begun: Result<RegionStore<S, C>>,
        pages: Rc<CallPages>,
    ) -> Result<bool> {
        let left = match begun? {
            RegionStore::Known(Committed::Done) | RegionStore::Refused => None,
            RegionStore::Known(committed) => {
                drop(job);
                Box::pin(self.finish_store(committed)).await?;
                None
            }
            RegionStore::Begun(begun, sharing) => {
                self.write_unsummed(job, begun, sharing).await?;
                None
            }
            RegionStore::Later => Box::pin(self.write_unsummed_late(job, &pages)).await?,
            RegionStore::Unsummed => Box::pin(self.sum_and_write(job)).await?,
            RegionStore::Elsewhere => Some(job),
        };
        if let Some(job) = left {
            Box::pin(self.store_otherwise(*job)).await?;
        }
        Ok(true)
    }

    async fn store_otherwise(self: &Rc<Self>, job: Job) -> Result<()> {
        let Some(job) = self.store_staged(job).await? else { return Ok(()) };
        let committed = self.gather(job).await?;
        self.finish_store(committed).await
    }

    async fn gather(&self, job: Job) -> Result<Committed> {
        let (key, parent, memory) = (job.key, job.parent, job.memory());
        let filling = self.shared.acquire(Tier::Host, Purpose::Call).await?;
        job.check_is_there()?;
        let direction = match memory {
            RegionMemory::Host => Direction::HostToHost,
            RegionMemory::Device => self.demote_direction(),
        };
        let ops = pair_segments(&job.segments, &[self.host_segment(filling.slot())])?;
        let (regions, job) = (job.copy_regions(), Arc::new(job));
        // SAFETY: the source lies in regions that the job holds, whose owner promised at
        // registration not to write to a segment while it is stored; the target is unpublished.
        let batch = unsafe { OwnedBatch::new(ops, direction, (Arc::clone(&job), filling)) };
        // SAFETY: their owner keeps them mapped until `Cache::unregister` has resolved, which tells the engine.
        let batch = unsafe { batch.within(regions) };
        // Prompt: copies that end together would reach the disk together. The device can checksum its own memory while
        // it is copied.
        let sum = async {
            match memory {
                RegionMemory::Host => None,
                // SAFETY: the segments lie in regions that the job holds, whose owner promised at registration not to
                // write to a segment while it is stored.
                RegionMemory::Device => unsafe { self.copy.checksum(&job.segments, Arc::clone(&job) as _) }.await,
            }
        };
        let ((result, (_, filling)), sum) = tokio::join!(self.copied(batch.prompt()), sum);
        result?;
        // What the copy found may be zeros.
        job.check_is_there()?;
        let (checksum, filling) = match sum {
            Some(Ok(sum)) => (sum, filling),
            _ => self.checksum_of(filling).await,
        };
        drop(job);
        self.shared.commit(&key, parent.as_ref(), filling, checksum)
    }

    /// Does what the write policy wants for a committed block.
    async fn finish_store(self: &Rc<Self>, committed: Committed) -> Result<()> {
        let receiver = match committed {
            Committed::Done => return Ok(()),
            Committed::Wait(receiver) => receiver,
            Committed::Write(write, receiver) => {
                self.spawn(Rc::clone(self).write(write));
                receiver
            }
        };
        self.shared.written(receiver).await
    }
}

#[cfg(test)]
mod tests {
    use std::{
        pin::pin,
        task::{Context, Poll, Waker},
    };

    use super::*;

    #[test]
    fn a_call_of_many_blocks_begins_them_in_turns() {
        let count = std::cell::Cell::new(0);
        let mut begun = pin!(in_turns(0..65_536, |n| {
            count.set(count.get() + 1);
            n
        }));
        let mut context = Context::from_waker(Waker::noop());
        let mut before = 0;
        let ended = loop {
            let polled = begun.as_mut().poll(&mut context);
            let turn = count.get() - before;
            assert!(turn <= BEGUN_PER_TURN, "{turn} blocks were begun in one turn of the reactor");
            before = count.get();
            if let Poll::Ready(ended) = polled {
                break ended;
            }
        };
        assert!(ended.into_iter().eq(0..65_536), "all of them, in order");
    }
}
