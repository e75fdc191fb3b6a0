//! Submissions without futures: submit, an eventfd, drain. For engines with an event loop of their own.

use std::{
    collections::VecDeque,
    fs::File,
    io::{Read, Write},
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use rustix::event::{EventfdFlags, eventfd};

use super::{Cache, Region};
use crate::{
    block::{BlockKey, Segment},
    error::{Error, Result},
    mover::{Command, Job, Reply},
    state::NoRoom,
};

/// A queue of loads and stores whose completions are drained; no call waits.
///
/// The [eventfd](CompletionQueue::event_fd) becomes readable when a submission has completed.
pub struct CompletionQueue {
    cache: Cache,
    completions: Arc<Completions>,
    tickets: AtomicU64,
    depth: usize,
}

/// A completion that is not drained yet.
struct Done {
    ticket: u64,
    results: Vec<Result<bool>>,
    /// The keys of a store.
    stored: Vec<BlockKey>,
}

struct Completions {
    done: Mutex<VecDeque<Done>>,
    outstanding: AtomicUsize,
    event: File,
}

impl Completions {
    fn new() -> Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let event = File::from(event.map_err(|error| Error::io("eventfd", "", error.into()))?);
        Ok(Completions { done: Mutex::default(), outstanding: AtomicUsize::new(0), event })
    }

    fn complete(&self, ticket: u64, results: Vec<Result<bool>>, stored: Vec<BlockKey>) {
        let done = Done { ticket, results, stored };
        // One lock for the list and the descriptor, as in `drain`: it is readable exactly while there is a completion.
        let mut all = self.done.lock().expect("nothing panics under it");
        all.push_back(done);
        // Fails only if the counter is full, because other code with the descriptor may write to it; then the
        // descriptor is readable already.
        let _ = (&self.event).write(&1u64.to_ne_bytes());
    }
}

/// Answers its submission exactly once, even if the reactor ends without running it.
struct Ticket {
    completions: Arc<Completions>,
    ticket: u64,
    blocks: usize,
    /// The keys of a store.
    stored: Vec<BlockKey>,
    answered: bool,
}

impl Ticket {
    fn answer(mut self, results: Vec<Result<bool>>) {
        self.answered = true;
        let stored = std::mem::take(&mut self.stored);
        self.completions.complete(self.ticket, results, stored);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.answered {
            let results = (0..self.blocks).map(|_| Err(Error::Closed)).collect();
            self.completions.complete(self.ticket, results, Vec::new());
        }
    }
}

impl Cache {
    /// A queue of at most `depth` submissions that are not drained yet.
    ///
    /// # Errors
    /// [`Error::Io`] if the system has no eventfd to give.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_cache(async |cache| {
    /// use kvhoist::{Memory, Segment};
    ///
    /// # let key = kvhoist::BlockKey::new([1; 32]);
    /// let mut pool = vec![7; 16 * 4096];
    /// // SAFETY: the pool lives until `unregister` has resolved, and nobody touches it while a block is on its way.
    /// let memory = unsafe { Memory::host(pool.as_mut_ptr(), pool.len()) };
    /// let region = cache.register(memory).await?;
    /// let queue = cache.completion_queue(64)?;
    /// let place = Segment { ptr: pool.as_mut_ptr(), len: 4096 };
    /// let ticket = queue.submit_store(&[key], None, &[vec![place]])?;
    /// // An engine polls `queue.event_fd()` in its own loop.
    /// let (done, results) = loop {
    ///     match queue.drain().pop() {
    ///         Some(done) => break done,
    ///         None => std::thread::yield_now(),
    ///     }
    /// };
    /// assert!(done == ticket && matches!(results[..], [Ok(true)]));
    /// cache.unregister(&region).await?;
    /// # Ok(()) });
    /// ```
    pub fn completion_queue(&self, depth: usize) -> Result<CompletionQueue> {
        let completions = Arc::new(Completions::new()?);
        Ok(CompletionQueue { cache: self.clone(), completions, tickets: AtomicU64::new(1), depth: depth.max(1) })
    }
}

impl CompletionQueue {
    /// Readable while [`drain`](CompletionQueue::drain) has a completion to return.
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.completions.event.as_fd()
    }

    /// Submits a [load](Cache::load_into); returns its ticket.
    ///
    /// # Errors
    /// [`Error::Busy`] if `depth` submissions are outstanding, or if the reactor's queue is full, with 1,024 calls or
    /// [`Config::movements_max`](crate::Config::movements_max) if that is fewer; nothing was submitted then. Otherwise
    /// as [`Cache::load_into`].
    pub fn submit_load(&self, keys: &[BlockKey], segments: &[Vec<Segment>]) -> Result<u64> {
        self.submit_load_of(keys, segments, None)
    }

    /// Submits a [store](Cache::store_from); returns its ticket.
    ///
    /// # Errors
    /// As [`submit_load`](CompletionQueue::submit_load).
    pub fn submit_store(&self, keys: &[BlockKey], parent: Option<&BlockKey>, segments: &[Vec<Segment>]) -> Result<u64> {
        self.submit_store_of(keys, parent, segments, None)
    }

    /// Submits a load, with segments in registered memory, or in a region's.
    pub(super) fn submit_load_of(
        &self,
        keys: &[BlockKey],
        segments: &[Vec<Segment>],
        region: Option<&Region>,
    ) -> Result<u64> {
        let jobs = self.jobs(keys, None, segments, region)?;
        self.submit(jobs, Vec::new(), |jobs, reply| {
            // Not before there is room: nothing is read for a submission that is refused.
            self.cache.want_remote(&jobs);
            self.cache.inner.submitter.begin_load(jobs, reply)
        })
    }

    /// Submits a store, as [`submit_load_of`](Self::submit_load_of) a load.
    pub(super) fn submit_store_of(
        &self,
        keys: &[BlockKey],
        parent: Option<&BlockKey>,
        segments: &[Vec<Segment>],
        region: Option<&Region>,
    ) -> Result<u64> {
        let jobs = self.jobs(keys, Some(parent), segments, region)?;
        self.submit(jobs, keys.to_vec(), |jobs, reply| self.cache.begin_store(jobs, reply))
    }

    fn jobs(
        &self,
        keys: &[BlockKey],
        chain: Option<Option<&BlockKey>>,
        segments: &[Vec<Segment>],
        region: Option<&Region>,
    ) -> Result<Vec<Job>> {
        if let Some(region) = region {
            self.cache.check_region(region)?;
        }
        self.cache.jobs(keys, chain, segments, region)
    }

    /// Takes all completions, oldest first, and makes the eventfd unreadable. A completion is the ticket that
    /// `submit_*` returned, and one result per block, as of [`Cache::load_into`] and [`Cache::store_from`].
    pub fn drain(&self) -> Vec<(u64, Vec<Result<bool>>)> {
        let mut all = self.completions.done.lock().expect("nothing panics under it");
        // The read fails if there was no completion.
        let _ = (&self.completions.event).read(&mut [0; 8]);
        let done: Vec<_> = all.drain(..).collect();
        drop(all);
        self.completions.outstanding.fetch_sub(done.len(), Ordering::AcqRel);
        let take = |Done { ticket, results, stored }: Done| {
            self.cache.shared().forget_reported(&stored, &results);
            (ticket, results)
        };
        done.into_iter().map(take).collect()
    }

    /// Submissions not drained yet.
    pub fn outstanding(&self) -> usize {
        self.completions.outstanding.load(Ordering::Acquire)
    }

    fn submit(
        &self,
        jobs: Vec<Job>,
        stored: Vec<BlockKey>,
        command: impl FnOnce(Vec<Job>, Reply) -> Option<Command>,
    ) -> Result<u64> {
        let shared = self.cache.shared();
        let taken = self.completions.outstanding.fetch_update(Ordering::AcqRel, Ordering::Acquire, |outstanding| {
            (outstanding < self.depth).then_some(outstanding + 1)
        });
        if taken.is_err() {
            return Err(shared.busy("outstanding submissions", self.depth as u64, "depth"));
        }
        let room = match shared.commands.try_take() {
            Ok(room) => room,
            Err(refused) => {
                self.completions.outstanding.fetch_sub(1, Ordering::AcqRel);
                return Err(match refused {
                    NoRoom::Closed => Error::Closed,
                    NoRoom::Full => shared.busy_with_commands(),
                });
            }
        };
        let ticket = self.tickets.fetch_add(1, Ordering::Relaxed);
        let answer =
            Ticket { completions: Arc::clone(&self.completions), ticket, blocks: jobs.len(), stored, answered: false };
        if let Some(command) = command(jobs, Box::new(move |results| answer.answer(results))) {
            self.cache.send((command, room));
        }
        Ok(ticket)
    }
}

debug_fields!(CompletionQueue, queue => depth: queue.depth, outstanding: queue.outstanding());

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_submission_that_nobody_runs_is_completed() {
        let completions = Arc::new(Completions::new().expect("an eventfd"));
        let ticket =
            Ticket { completions: Arc::clone(&completions), ticket: 7, blocks: 2, stored: Vec::new(), answered: false };
        // As the reactor's queue is, with the reactor.
        drop(ticket);
        let done = completions.done.lock().expect("no panic").pop_front().expect("a completion");
        assert!(done.ticket == 7 && matches!(done.results[..], [Err(Error::Closed), Err(Error::Closed)]));
        assert_eq!((&completions.event).read(&mut [0; 8]).expect("readable"), 8);
    }

    #[test]
    fn a_completion_is_delivered_even_if_the_event_counter_is_full() {
        let completions = Completions::new().expect("an eventfd");
        // Other code with the descriptor may write to it.
        let full = (u64::MAX - 1).to_ne_bytes();
        assert_eq!((&completions.event).write(&full).expect("the largest count there is"), full.len());
        completions.complete(7, vec![Ok(true)], Vec::new());
        let done = completions.done.into_inner().expect("no panic");
        assert!(done.iter().map(|done| done.ticket).eq([7]));
        assert_eq!((&completions.event).read(&mut [0; 8]).expect("readable"), 8);
    }
}
