//! Loads and stores of a client without a waiting caller.
//!
//! A thread of the queue's own, which is there from the start, polls them: a submission starts no thread, so it is
//! either queued or refused with nothing done.

use std::{
    collections::VecDeque,
    fs::File,
    io::{Read, Write},
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
};

use futures_util::{
    FutureExt, StreamExt,
    future::{join, select},
    stream,
};
use kvhoist::{BlockKey, Error, Segment, block_on};
use kvhoist_service::Client;
use rustix::event::{EventfdFlags, eventfd};
use tokio::sync::{mpsc, oneshot};

use crate::{cache::Movement, errors::io_error};

/// Submissions of one queue and way that are in flight at once; the others wait. No load waits for stores.
const IN_FLIGHT_MAX: usize = 16;

/// A submission's ticket, and a result for each of its blocks.
pub type Completion = (u64, Vec<Result<bool, Error>>);

/// Submissions of one client, and their results.
pub struct ClientQueue {
    client: Client,
    closed: Arc<AtomicBool>,
    completions: Arc<Completions>,
    tickets: AtomicU64,
    depth: usize,
    /// `None` once it has ended.
    running: Mutex<Option<Running>>,
}

struct Running {
    loads: mpsc::UnboundedSender<Submission>,
    stores: mpsc::UnboundedSender<Submission>,
    /// Dropped, it drops what is in flight.
    end: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

struct Completions {
    done: Mutex<VecDeque<Completion>>,
    outstanding: AtomicUsize,
    event: File,
}

/// Answers its submission exactly once, also if it is dropped in flight.
struct Ticket {
    completions: Arc<Completions>,
    number: u64,
    blocks: usize,
    answered: bool,
}

struct Submission {
    ticket: Ticket,
    client: Client,
    movement: Movement,
    keys: Vec<BlockKey>,
    segments: Vec<Vec<Segment>>,
    /// Memory of buffer objects, which stays mapped until the submission is drained, or its queue has ended.
    lent: Vec<Segment>,
}

impl Completions {
    fn add(&self, completion: Completion) {
        // One lock for the list and the descriptor, as in `take`: it is readable exactly while there is a completion.
        let mut done = self.done.lock().expect("nothing panics under it");
        done.push_back(completion);
        // Fails only if the counter is full, because other code with the descriptor may write to it; then the
        // descriptor is readable already.
        let _ = (&self.event).write(&1u64.to_ne_bytes());
    }

    fn take(&self) -> Vec<Completion> {
        let mut done = self.done.lock().expect("nothing panics under it");
        // The read fails if there was no completion.
        let _ = (&self.event).read(&mut [0; 8]);
        let all: Vec<_> = done.drain(..).collect();
        self.outstanding.fetch_sub(all.len(), Ordering::AcqRel);
        all
    }
}

impl Ticket {
    fn answer(mut self, results: Vec<Result<bool, Error>>) {
        self.answered = true;
        self.completions.add((self.number, results));
    }

    /// Of a submission that was refused: nobody has the ticket.
    fn take_back(mut self) {
        self.answered = true;
        self.completions.outstanding.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.answered {
            let results = (0..self.blocks).map(|_| Err(Error::Closed)).collect();
            self.completions.add((self.number, results));
        }
    }
}

impl Submission {
    async fn run(self) {
        let Submission { ticket, client, movement, keys, segments, lent } = self;
        // SAFETY: the exports keep the memory mapped for as long as `lent` promises. That nobody else writes to it
        // meanwhile is the caller's part, as documented; bytes are bytes, whatever they come to.
        let region = unsafe { client.lend(&lent) };
        let results = match (region, movement) {
            (Err(error), _) => Err(error),
            (Ok(region), Movement::Load) => region.load_into(&keys, &segments).await,
            (Ok(region), Movement::Store(parent)) => region.store_from(&keys, parent.as_ref(), &segments).await,
        };
        ticket.answer(results.unwrap_or_else(|error| vec![Err(error); keys.len()]));
    }
}

/// Runs submissions of one way to their ends.
async fn run(mut submissions: mpsc::UnboundedReceiver<Submission>) {
    let submissions = stream::poll_fn(|context| submissions.poll_recv(context));
    submissions.for_each_concurrent(IN_FLIGHT_MAX, Submission::run).await;
}

impl ClientQueue {
    /// A queue of at most `depth` submissions that are not drained yet. `closed` says that the client is.
    ///
    /// # Errors
    /// [`Error::Io`] if the system has no eventfd or no thread to give.
    pub fn new(client: Client, closed: Arc<AtomicBool>, depth: usize) -> Result<Self, Error> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let event = File::from(event.map_err(|error| io_error("eventfd", "", error.into()))?);
        let [(loads, queued_loads), (stores, queued_stores)] = [(); 2].map(|()| mpsc::unbounded_channel());
        let (end, ended) = oneshot::channel::<()>();
        let work = move || {
            let both = join(run(queued_loads), run(queued_stores));
            block_on(select(ended, both.boxed_local()).map(drop));
        };
        let thread = thread::Builder::new().name("kvhoist-queue".into()).spawn(work);
        let thread = thread.map_err(|error| io_error("start the thread of", "a client's queue", error))?;
        Ok(ClientQueue {
            client,
            closed,
            completions: Arc::new(Completions { done: Mutex::default(), outstanding: AtomicUsize::new(0), event }),
            tickets: AtomicU64::new(1),
            depth,
            running: Mutex::new(Some(Running { loads, stores, end, thread })),
        })
    }

    fn running(&self) -> MutexGuard<'_, Option<Running>> {
        self.running.lock().expect("nothing panics under it")
    }

    /// Readable while `drain` has a completion to return.
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.completions.event.as_fd()
    }

    /// Submissions not drained yet.
    pub fn outstanding(&self) -> usize {
        self.completions.outstanding.load(Ordering::Acquire)
    }

    /// Queues a movement between the space and `segments`, of which some lie in memory that is lent for it; returns its
    /// ticket. The lent memory stays mapped until the submission is drained or `end` has returned.
    ///
    /// # Errors
    /// [`Error::Busy`] if `depth` submissions are outstanding, [`Error::Closed`]. Nothing is done then.
    pub fn submit(
        &self,
        movement: Movement,
        keys: Vec<BlockKey>,
        segments: Vec<Vec<Segment>>,
        lent: Vec<Segment>,
    ) -> Result<u64, Error> {
        let running = self.running();
        let Some(Running { loads, stores, .. }) = running.as_ref().filter(|_| !self.closed.load(Ordering::Acquire))
        else {
            return Err(Error::Closed);
        };
        let submissions = if matches!(movement, Movement::Load) { loads } else { stores };
        let one_more = |outstanding| (outstanding < self.depth).then_some(outstanding + 1);
        let taken = self.completions.outstanding.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more);
        taken.map_err(|_| Error::Busy {
            what: "outstanding submissions",
            limit: self.depth as u64,
            setting: "depth",
        })?;
        let number = self.tickets.fetch_add(1, Ordering::Relaxed);
        let completions = Arc::clone(&self.completions);
        let ticket = Ticket { completions, number, blocks: keys.len(), answered: false };
        let submission = Submission { ticket, client: self.client.clone(), movement, keys, segments, lent };
        submissions.send(submission).map(|()| number).map_err(|refused| {
            refused.0.ticket.take_back();
            Error::Closed
        })
    }

    /// Takes all completions, oldest first.
    pub fn drain(&self) -> Vec<Completion> {
        self.completions.take()
    }

    /// Drops what is in flight, and returns when the queue touches no lent memory any longer.
    pub fn end(&self) {
        let Some(Running { loads, stores, end, thread }) = self.running().take() else { return };
        drop((loads, stores, end));
        // A panic of the thread is in its message; it has answered all submissions.
        let _ = thread.join();
    }
}

impl Drop for ClientQueue {
    fn drop(&mut self) {
        self.end();
    }
}
