//! The futures that move blocks between tiers: store, promote, demote, evict.
//!
//! All of it runs on the reactor's thread, as tasks of a current-thread runtime; nothing here is `Send` or locked but
//! [`Shared`], which callers use too. It is generic over the storage and the copy engine, and so runs in simulation
//! too: therefore it has no wall clock, no random hasher and no thread of its own.

mod block_memory;
mod busy_poll;
mod by_value;
mod call_pages;
mod caller_memory;
mod command;
mod copy;
mod cufile;
mod cufile_transfer;
mod deadlines;
mod deferred_fetch;
mod flush;
mod in_place;
#[cfg(feature = "sim")]
mod invariants;
mod layer_reports;
mod layers;
mod load;
mod load_call;
mod load_copies;
mod offload;
mod plan;
mod progress;
mod promote;
mod read;
mod records;
mod region;
mod remote;
mod remote_listing;
mod remote_upload;
mod results;
mod route;
mod shutdown;
mod speculative_copy;
mod store;
mod submit;
#[cfg(test)]
mod tests;
mod write;
mod write_budget;

pub(crate) use command::{Command, DeviceRead, QueuedCommand, Reply, Urgent};
pub use layer_reports::LayerReports;
pub(crate) use progress::{LayerBoard, LayerJobs, LayerProgress};
#[cfg(test)]
pub(crate) use region::COMPARED;
pub(crate) use region::{CallerMemory, Job, RegionMemory, RegionUse};
pub(crate) use submit::{Begun, Ends, Submitter};

use std::{
    cell::{Cell, OnceCell, RefCell},
    future::{Future, poll_fn},
    pin::pin,
    rc::Rc,
    sync::Arc,
    task::{Context, Poll},
};

use futures_util::{
    FutureExt,
    future::{Either, select},
};
use tokio::{
    sync::{Notify, Semaphore, mpsc, oneshot},
    task::JoinHandle,
};

use self::{records::RecordPages, write_budget::WriteBudget};
use crate::{
    block::{BlockKey, Tier},
    device::{CopyEngine, cufile::Cufile},
    disk::PageId,
    error::{Error, Result},
    io::{Storage, Workers},
    shield::{caught_future, log},
    state::{Failures, FlightEnd, Outcome, Shared},
    task,
};

/// The reactor's side of a cache.
pub(crate) struct Mover<S, C> {
    shared: Arc<Shared>,
    storage: S,
    copy: C,
    /// libcufile, where it is in use.
    cufile: OnceCell<CufileRoute>,
    /// What ends reads that I/O threads make for a movement; they make none without it.
    ends: Option<Arc<Ends>>,
    /// What may be written to the disk tier, where that is limited.
    write_budget: Option<RefCell<WriteBudget>>,
    records: RefCell<RecordPages>,
    /// Pages whose write has ended, to be noted in the slots under the next lock that is taken anyway.
    written: RefCell<Vec<PageId>>,
    workers: Rc<Workers>,
    /// One permit: whose block is checksummed on this thread.
    checksums: Semaphore,
    /// Bytes checksummed on this thread since the last turn of other tasks.
    checksummed: Cell<usize>,
    /// Outcomes to be sent to their waiters.
    answers: RefCell<Vec<(oneshot::Sender<Outcome>, Outcome)>>,
    /// Write-backs in flight without a waiter.
    demoting: Cell<u32>,
    active: Cell<u32>,
    /// Blocks of calls that are not in flight yet.
    waiting: Cell<usize>,
    /// Commands started or refused so far.
    taken: Cell<u64>,
    /// A movement is overdue, or commands are: what cannot be started is refused.
    overdue: Cell<bool>,
    /// One for each file: writes of records. Apart, because blocks and records are written together.
    record_failures: Vec<Failures>,
    /// One for each file.
    flushes: Vec<Flush>,
    /// Notified whenever `active` or `waiting` goes down.
    settled: Notify,
    /// Notified when the first movement begins.
    begun: Notify,
    /// Notified when a task has panicked.
    defect: Notify,
}

/// The route of libcufile, from the reactor.
struct CufileRoute {
    cufile: Cufile,
    /// Requests that failed in a row.
    failures: Cell<u32>,
}

/// The flushes of one file.
struct Flush {
    /// One permit: one flush at a time, so that none passes over the failure of another.
    turn: Semaphore,
    /// How many have begun.
    begun: Cell<u64>,
    /// Why a flush failed, once one has.
    ///
    /// For good: a kernel takes what it could not write for clean, and the next flush succeeds without it.
    failed: RefCell<Option<Error>>,
}

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// `ends`: has I/O threads end reads to host slots by themselves. `is_new`: no earlier run wrote to the store.
    pub(crate) fn new(
        shared: Arc<Shared>,
        ends: Option<Arc<Ends>>,
        storage: S,
        copy: C,
        workers: Rc<Workers>,
        is_new: bool,
    ) -> Rc<Self> {
        let config = &shared.config;
        let flush = || Flush { turn: Semaphore::new(1), begun: Cell::new(0), failed: RefCell::default() };
        Rc::new(Mover {
            write_budget: config
                .write_budget_bytes()
                .map(|bytes| RefCell::new(WriteBudget::new(bytes, config.written_bytes(), is_new))),
            records: RefCell::default(),
            written: RefCell::default(),
            workers,
            checksums: Semaphore::new(1),
            checksummed: Cell::new(0),
            answers: RefCell::default(),
            demoting: Cell::new(0),
            active: Cell::new(0),
            waiting: Cell::new(0),
            taken: Cell::new(0),
            overdue: Cell::new(false),
            record_failures: config.disk.paths.iter().map(|_| Failures::default()).collect(),
            flushes: config.disk.paths.iter().map(|_| flush()).collect(),
            settled: Notify::new(),
            begun: Notify::new(),
            defect: Notify::new(),
            cufile: OnceCell::new(),
            ends,
            shared,
            storage,
            copy,
        })
    }

    /// Serves commands until the cache is closed or its last handle is gone, then drains. Every caller that closes the
    /// cache gets the result once the files are closed.
    ///
    /// # Errors
    /// [`Error::Closed`] after a panic of a task, which is a defect: what it has left undone nobody knows. All waiters
    /// get that error too. The memory of what is in flight stays with the operations, also past the deadline.
    pub(crate) async fn run(
        self: Rc<Self>,
        commands: mpsc::UnboundedReceiver<QueuedCommand>,
        urgent: mpsc::UnboundedReceiver<Urgent>,
    ) -> Result<()> {
        let mut inbox = Inbox { commands, urgent };
        let _ended = Ended(Arc::clone(&self.shared));
        let mut tasks = vec![
            self.spawn_part(Rc::clone(&self).write_back_loop()),
            self.spawn_part(Rc::clone(&self).deadline_loop()),
            self.spawn_part(Rc::clone(&self).spin_loop()),
            self.spawn_part(Rc::clone(&self).raise_loop()),
        ];
        let remote = self.start_remote();
        let served = async {
            self.serve(&mut inbox).await;
            self.end_remote(&remote);
            self.drain(&mut inbox).await
        };
        // The defect first: what has lost a part must not pass for whole.
        let result = match select(pin!(self.defect.notified()), pin!(served)).await {
            Either::Left(_) => {
                self.end_by_defect().await;
                Err(Error::Closed)
            }
            Either::Right((result, _)) => result,
        };
        shutdown::drop_all(&mut inbox.commands).await;
        shutdown::drop_all(&mut inbox.urgent).await;
        tasks.extend(remote);
        tasks.iter().for_each(Task::abort);
        result
    }

    /// Serves commands until the cache is closed or its last handle is gone.
    async fn serve(self: &Rc<Self>, inbox: &mut Inbox) {
        let mut is_closing = false;
        // The drain serves those that have room by then, and are sent later.
        while !(is_closing && inbox.commands.is_empty()) {
            let movements = self.active.get() as usize + self.waiting.get();
            let may_start = movements < self.shared.config.limits.movements_max as usize;
            let may_take = may_start || self.overdue.get();
            let mut settled = pin!(self.settled.notified());
            let next = poll_fn(|cx| match inbox.poll_next(may_take, cx) {
                Poll::Pending if !may_start => settled.as_mut().poll(cx).map(|()| Next::Settled),
                next => next,
            });
            match next.await {
                Next::Urgent(Urgent::Close) => {
                    self.shared.close_rooms();
                    is_closing = true;
                }
                Next::Urgent(request) => self.start_urgent(request),
                Next::Command(None) => break,
                Next::Command(Some(command)) => {
                    self.taken.set(self.taken.get() + 1);
                    if may_start { self.start(command) } else { self.refuse(command) }
                }
                Next::Settled => {}
            }
        }
    }

    /// Raises movements that are awaited by now, in the budget and in the queue of the workers. Its lock is also the
    /// one that does what callers deferred and nobody else has time for.
    async fn raise_loop(self: Rc<Self>) {
        loop {
            self.shared.raised.notified().await;
            let raised = std::mem::take(&mut self.shared.lock().raised);
            self.shared.in_flight.raise(&raised);
            self.workers.pool().into_iter().for_each(|pool| pool.raise(&raised.flights, raised.holders));
        }
    }

    /// Ends a flight: each waiter gets a pin of its own, or the miss, or the error. Starts the write that follows it.
    pub(super) fn end_flight(self: &Rc<Self>, key: &BlockKey, tier: Tier, outcome: Outcome) {
        let end = self.shared.lock().end_flight(key, tier, outcome);
        self.answer_all(end);
    }

    /// Answers the waiters of a flight that has ended, and starts the write that follows it.
    ///
    /// They are answered when the tasks that are ready now have run. Movements that completed together then wake their
    /// callers together: waking a thread costs more than most of what it then does.
    pub(super) fn answer_all(self: &Rc<Self>, (answers, next): FlightEnd) {
        let first = {
            let mut waiting = self.answers.borrow_mut();
            let first = waiting.is_empty();
            waiting.extend(answers);
            first && !waiting.is_empty()
        };
        if first {
            let this = Rc::clone(self);
            // Runs after the tasks that are ready now.
            self.spawn(async move {
                let answers = this.answers.take();
                // Not under the lock: a waiter that is gone drops its pin here, which takes the lock.
                for (waiter, answer) in answers {
                    drop(waiter.send(answer));
                }
            });
        }
        if let Some(write) = next {
            self.spawn(Rc::clone(self).write(*write));
        }
    }

    /// Runs a movement to its end, with or without waiters.
    fn spawn(self: &Rc<Self>, movement: impl Future<Output = ()> + 'static) {
        let active = Active::new(self);
        self.spawn_part(movement.map(move |()| drop(active)));
    }

    /// Runs a part of a movement, or a loop, as a task of its own; `None` if it panics. No user's code can panic in it
    /// ([`shield`](crate::shield)): a panic is a defect, and [ends](Self::run) the cache.
    fn spawn_part<T: 'static>(self: &Rc<Self>, part: impl Future<Output = T> + 'static) -> JoinHandle<Option<T>> {
        let this = Rc::clone(self);
        task::spawn(async move {
            let ended = caught_future(part).await;
            if ended.is_none() {
                log(|| {
                    tracing::error!("a task panicked, which is a defect: the cache ends; the panic message says where");
                });
                this.defect.notify_one();
            }
            ended
        })
    }
}

/// A task that runs as long as the reactor.
type Task = JoinHandle<Option<()>>;

/// What callers and holders of slots have sent to the reactor.
struct Inbox {
    commands: mpsc::UnboundedReceiver<QueuedCommand>,
    urgent: mpsc::UnboundedReceiver<Urgent>,
}

impl Inbox {
    /// The next request, an urgent one first; a command only if the reactor `may_take` one, whose room is free then.
    fn poll_next(&mut self, may_take: bool, cx: &mut Context<'_>) -> Poll<Next> {
        if let Poll::Ready(Some(request)) = self.urgent.poll_recv(cx) {
            return Poll::Ready(Next::Urgent(request));
        }
        let command = if may_take { self.commands.poll_recv(cx) } else { Poll::Pending };
        command.map(|queued| Next::Command(queued.map(|(command, _room)| command)))
    }
}

/// What ends a wait of the reactor's loop.
enum Next {
    Urgent(Urgent),
    /// `None` if no further command can come.
    Command(Option<Command>),
    /// A movement has ended.
    Settled,
}

/// Counts a movement while it runs.
struct Active<S: Storage, C: CopyEngine>(Rc<Mover<S, C>>);

impl<S: Storage, C: CopyEngine> Active<S, C> {
    fn new(mover: &Rc<Mover<S, C>>) -> Self {
        if mover.active.replace(mover.active.get() + 1) == 0 {
            mover.shared.watch.notify_one();
            mover.begun.notify_one();
        }
        mover.shared.metrics.movements.add(1.0);
        Active(Rc::clone(mover))
    }
}

impl<S: Storage, C: CopyEngine> Drop for Active<S, C> {
    fn drop(&mut self) {
        self.0.active.set(self.0.active.get() - 1);
        self.0.shared.metrics.movements.add(-1.0);
        self.0.settled.notify_one();
    }
}

/// Answers all waiters when the reactor ends, in whatever way.
struct Ended(Arc<Shared>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.remote.iter().for_each(|remote| remote.close());
        self.0.close_rooms();
        // Every waiter has been answered where a panic under the lock broke an invariant.
        if self.0.lock_unless_broken().is_none() {
            return;
        }
        self.0.end_reactor();
        self.0.close();
        // Dropping the senders answers the waiters with `Error::Closed`.
        let flights = self.0.lock().flights.finish_all();
        drop(flights);
    }
}
