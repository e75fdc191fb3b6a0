//! The queue between callers, the reactor and the workers, and the loop of a worker.

mod queue;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, Ordering};

use self::queue::{Batch, Queue, Queued, Room, Sleeper, weight};
use super::{
    driver::Driver,
    transfer::Transfer,
    waiter::{self, Waiter},
};
use crate::{
    block::OpKind,
    shield::caught,
    sync::{Mutex, MutexGuard},
    urgency::Urgency,
};

/// Queued bytes, with [what each transfer counts beside its own](queue::weight), for each awake worker above which
/// another one is woken: about 30 us of work. Waking a thread costs some microseconds.
pub(super) const WAKE_BYTES: u64 = 256 << 10;

/// A unit of work.
pub(super) type Work = Box<dyn FnOnce() + Send>;

/// State shared by callers, the reactor and the threads.
pub struct Pool {
    queue: Mutex<Queue>,
    /// Whether the queue has something. A thread that reads an older value finds out under the lock, before it sleeps.
    any_queued: AtomicBool,
    /// As [`WAKE_BYTES`]; less in a simulation, whose blocks are small.
    wake_bytes: u64,
}

/// What follows the queueing of something, outside of its caller's locks.
#[must_use]
pub(crate) struct Pushed {
    /// A sleeping worker that is to be woken, if one is.
    asleep: Option<Sleeper>,
    /// What is not queued, as no worker would take it any more.
    refused: Option<Queued>,
}

impl Pushed {
    /// Wakes the worker. The waiter of a transfer that was not queued is told that it was lost.
    pub(crate) fn wake(self) {
        let Pushed { asleep, refused } = self;
        asleep.iter().for_each(|sleeper| sleeper.wake.wake());
        if let Some((transfer, waiter)) = refused {
            // The memory first, whose owner may panic.
            _ = caught(move || drop(transfer));
            drop(waiter);
        }
    }
}

/// What a worker does after a step.
pub enum Step {
    /// It takes the next step.
    Next,
    /// It sleeps by its driver, and then calls [`Pool::awake`].
    Sleep,
    /// It ends: no more work will come.
    End,
}

impl Pool {
    /// A queue for `threads` workers, the first `rings` of which transfer; one is woken for every `wake_bytes` queued.
    pub fn new(threads: u32, rings: u32, wake_bytes: u64) -> Self {
        let queue = Queue { threads, rings, ..Queue::default() };
        Pool { queue: Mutex::new(queue), any_queued: AtomicBool::new(false), wake_bytes }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock()
    }

    pub(super) fn push_work(&self, bytes: u64, work: Work) {
        let mut queue = self.lock();
        queue.work.push_back((bytes, work));
        queue.bytes += bytes;
        self.any_queued.store(true, Ordering::Relaxed);
        let asleep = queue.sleeper(false, self.wake_bytes);
        drop(queue);
        Pushed { asleep, refused: None }.wake();
    }

    /// Queues a transfer, unless the pool is closed, as after a defect, which waits for no caller. The caller wakes who
    /// is asleep, outside of its locks.
    pub(crate) fn push_transfer(&self, urgency: Urgency, transfer: Transfer, waiter: Waiter) -> Pushed {
        let mut queue = self.lock();
        if queue.closed {
            return Pushed { asleep: None, refused: Some((transfer, waiter)) };
        }
        self.any_queued.store(true, Ordering::Relaxed);
        let line = match transfer.kind {
            OpKind::Read => &mut queue.reads,
            OpKind::Write if waiter.sum_bytes > 0 => &mut queue.unsummed,
            OpKind::Write | OpKind::Sync => &mut queue.writes,
        };
        let queued = (transfer, waiter);
        let weight = weight(&queued);
        line.push(urgency, queued);
        queue.bytes += weight;
        Pushed { asleep: queue.sleeper(true, self.wake_bytes), refused: None }
    }

    /// Whether a call of so many blocks, with which so many bytes are in flight, is worth waking threads for.
    pub(crate) fn is_worth_waking(&self, blocks: usize, bytes: u64) -> bool {
        self.wake_bytes == 0 || blocks > 1 && bytes >= self.wake_bytes
    }

    /// The queued transfers of these flights are awaited from now on; with `all`, every queued one is.
    pub(crate) fn raise(&self, flights: &[u64], all: bool) {
        let Queue { reads, writes, unsummed, .. } = &mut *self.lock();
        [reads, writes, unsummed].into_iter().for_each(|line| line.raise(flights, all));
    }

    /// Runs a worker until no more work will come.
    pub(super) fn run(&self, worker: u32, driver: &mut impl Driver) {
        // It may have died asleep, and its wake-up is of no use then.
        self.awake(worker);
        let mut unsubmitted = false;
        loop {
            match self.step(worker, driver, &mut unsubmitted) {
                Step::Next => {}
                Step::Sleep => {
                    driver.sleep();
                    unsubmitted = false;
                    self.awake(worker);
                }
                Step::End => return,
            }
        }
    }

    /// Starts queued transfers, and does one piece of work. `unsubmitted`: whether the driver has to submit transfers.
    pub fn step(&self, worker: u32, driver: &mut impl Driver, unsubmitted: &mut bool) -> Step {
        let Batch { transfers, unsummed, work } = self.take(driver);
        *unsubmitted |= !transfers.is_empty();
        transfers.into_iter().for_each(|(transfer, waiter)| driver.start(transfer, waiter));
        // Submitted before other work, so that the drives stay busy meanwhile; otherwise by the call that sleeps.
        if *unsubmitted && (driver.has_completed() || work.is_some() || unsummed.is_some()) {
            driver.poll();
            *unsubmitted = false;
        }
        // What was taken is done first: a completion that the submission has found can wait.
        if let Some(work) = work {
            work();
        } else if let Some((transfer, waiter)) = unsummed {
            match waiter::sum(transfer, waiter) {
                Ok((transfer, waiter)) => {
                    driver.start(transfer, waiter);
                    *unsubmitted = true;
                }
                Err(refused) => waiter::end(refused),
            }
        } else if let Some(ended) = driver.take_completed() {
            waiter::end(ended);
        } else {
            return self.fall_asleep(worker, driver);
        }
        Step::Next
    }

    /// Lists the worker as asleep, unless there is work. One without room for the queued transfers wakes one that has
    /// room: no worker was woken for them while this one was awake.
    fn fall_asleep(&self, worker: u32, driver: &impl Driver) -> Step {
        let room = Room::of(driver);
        let mut queue = self.lock();
        if !queue.work.is_empty() || queue.has_transfer_for(room) {
            return Step::Next;
        }
        let with_room = (worker < queue.rings).then(|| queue.any_sleeper(true)).flatten();
        let ends = queue.closed && [OpKind::Read, OpKind::Write].iter().all(|&kind| driver.in_flight(kind) == 0);
        if !ends {
            queue.asleep.push(Sleeper { worker, wake: driver.wake(), room });
        }
        drop(queue);
        Pushed { asleep: with_room, refused: None }.wake();
        if ends { Step::End } else { Step::Sleep }
    }

    /// Ends the sleep of a worker: a caller that wakes it removes it from the list, but a completed transfer does not.
    pub fn awake(&self, worker: u32) {
        self.lock().asleep.retain(|sleeper| sleeper.worker != worker);
    }

    /// Drops a piece of queued work, as a worker does that dies of it.
    #[cfg(feature = "sim")]
    pub fn lose_work(&self) {
        let mut queue = self.lock();
        let lost = queue.work.pop_front();
        queue.bytes -= lost.as_ref().map_or(0, |(bytes, _)| *bytes);
    }

    /// What the worker takes from the queue, whose lock it takes only where something may be queued.
    fn take(&self, driver: &impl Driver) -> Batch {
        if !self.any_queued.load(Ordering::Relaxed) {
            return Batch::default();
        }
        let mut queue = self.lock();
        let taken = queue.take(Room::of(driver), !driver.has_completed());
        self.any_queued.store(!queue.is_empty(), Ordering::Relaxed);
        taken
    }

    /// Closes the queue: workers end after the queued work.
    pub(crate) fn close(&self) {
        let mut queue = self.lock();
        queue.closed = true;
        let asleep = std::mem::take(&mut queue.asleep);
        drop(queue);
        asleep.iter().for_each(|sleeper| sleeper.wake.wake());
    }

    /// Number of sleeping workers.
    #[cfg(test)]
    pub(super) fn asleep(&self) -> usize {
        self.lock().asleep.len()
    }
}
