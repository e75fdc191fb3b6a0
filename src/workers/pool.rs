//! The queue between the reactor and its workers, and the loop of a worker.

use std::{collections::VecDeque, sync::Arc};

use tokio::sync::Notify;

use super::{
    seat::{Bell, Seat},
    waiter::{self, Answer, Waiter},
};
use crate::{
    block::OpKind,
    io::uring::Transfer,
    sync::{Mutex, MutexGuard},
};

/// Queued bytes per awake worker above which another worker is woken: about 30 us of work. Waking a thread costs the
/// reactor some microseconds, so small blocks wait for a worker that is already awake.
pub(super) const WAKE_BYTES: u64 = 256 << 10;

/// A unit of work. Returns what the reactor runs afterwards.
pub(super) type Work = Box<dyn FnOnce() -> Answer + Send>;

/// State shared by the reactor and the threads.
pub struct Pool {
    queue: Mutex<Queue>,
    /// Answers that the reactor has not taken yet.
    answers: Mutex<Vec<Answer>>,
    /// Wakes the reactor for the first answer; it then takes all of them.
    answered: Notify,
}

struct Queue {
    work: VecDeque<(u64, Work)>,
    /// Transfers that can start at once.
    transfers: VecDeque<(Transfer, Waiter)>,
    /// Writes whose block must be checksummed first. A worker takes one at a time, so that the others take the rest.
    unsummed: VecDeque<(Transfer, Waiter)>,
    /// Bytes of all that is queued.
    bytes: u64,
    threads: u32,
    /// The first so many workers transfer.
    rings: u32,
    /// As [`WAKE_BYTES`]; less in a simulation, whose blocks are small.
    wake_bytes: u64,
    /// Sleeping workers that have not been woken, the latest last.
    asleep: Vec<Sleeper>,
    /// Set when no more work will come.
    closed: bool,
}

/// A sleeping worker.
struct Sleeper {
    worker: u32,
    bell: Bell,
    /// Whether it could start another transfer.
    has_room: bool,
}

/// What a worker does after a step.
pub enum Step {
    /// It takes the next step.
    Next,
    /// It sleeps in its seat, and then calls [`Pool::awake`].
    Sleep,
    /// It ends: no more work will come.
    End,
}

/// What a worker takes from the queue.
#[derive(Default)]
struct Taken {
    transfers: Vec<(Transfer, Waiter)>,
    unsummed: Option<(Transfer, Waiter)>,
    work: Option<Work>,
}

impl Queue {
    /// Takes transfers, limited by the worker's room and its share of the queue, and one unit of work if wanted.
    fn take(&mut self, room: usize, wants_work: bool) -> Taken {
        let part = self.transfers.len().div_ceil(self.rings.max(1) as usize);
        let mut taken = Taken { transfers: self.transfers.drain(..part.min(room)).collect(), ..Taken::default() };
        self.bytes -= taken.transfers.iter().map(|(transfer, _)| transfer.buf.len() as u64).sum::<u64>();
        if !wants_work || !taken.transfers.is_empty() {
            return taken;
        }
        if let Some((bytes, work)) = self.work.pop_front() {
            self.bytes -= bytes;
            taken.work = Some(work);
        } else if room > 0
            && let Some((transfer, waiter)) = self.unsummed.pop_front()
        {
            self.bytes -= transfer.buf.len() as u64;
            taken.unsummed = Some((transfer, waiter));
        }
        taken
    }

    /// Whether there is something for a worker with or without room for a transfer.
    fn has_for(&self, has_room: bool) -> bool {
        !self.work.is_empty() || (has_room && !(self.transfers.is_empty() && self.unsummed.is_empty()))
    }

    /// Returns a worker to wake, unless the awake ones suffice for the queue.
    fn sleeper(&mut self, for_transfer: bool) -> Option<Sleeper> {
        let (workers, asleep) = match for_transfer {
            true => (self.rings, self.asleep.iter().filter(|sleeper| sleeper.worker < self.rings).count()),
            false => (self.threads, self.asleep.len()),
        };
        let awake = u64::from(workers) - asleep as u64;
        if awake > 0 && self.bytes <= self.wake_bytes * awake {
            return None;
        }
        self.any_sleeper(for_transfer)
    }

    /// Returns a worker to wake, if one is asleep that can do it.
    fn any_sleeper(&mut self, for_transfer: bool) -> Option<Sleeper> {
        let at = self.asleep.iter().rposition(|sleeper| sleeper.has_room || !for_transfer)?;
        Some(self.asleep.remove(at))
    }
}

impl Pool {
    /// A queue for `threads` workers, the first `rings` of which transfer. Another one is woken for every `wake_bytes`
    /// queued.
    pub fn new(threads: u32, rings: u32, wake_bytes: u64) -> Self {
        let queue = Queue {
            work: VecDeque::new(),
            transfers: VecDeque::new(),
            unsummed: VecDeque::new(),
            bytes: 0,
            threads,
            rings,
            wake_bytes,
            asleep: Vec::new(),
            closed: false,
        };
        Pool { queue: Mutex::new(queue), answers: Mutex::new(Vec::new()), answered: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock()
    }

    pub(super) fn push_work(&self, bytes: u64, work: Work) {
        let mut queue = self.lock();
        queue.work.push_back((bytes, work));
        queue.bytes += bytes;
        let sleeper = queue.sleeper(false);
        drop(queue);
        sleeper.iter().for_each(|sleeper| sleeper.bell.ring());
    }

    pub(super) fn push_transfer(&self, transfer: Transfer, waiter: Waiter) {
        let mut queue = self.lock();
        queue.bytes += transfer.buf.len() as u64;
        match transfer.kind == OpKind::Write && waiter.sum_bytes > 0 {
            true => queue.unsummed.push_back((transfer, waiter)),
            false => queue.transfers.push_back((transfer, waiter)),
        }
        let sleeper = queue.sleeper(true);
        drop(queue);
        sleeper.iter().for_each(|sleeper| sleeper.bell.ring());
    }

    /// Runs a worker until no more work will come.
    pub(super) fn run(&self, worker: u32, seat: &mut impl Seat) {
        // It may have died asleep, and taken its bell with it.
        self.awake(worker);
        let mut unsubmitted = false;
        loop {
            match self.step(worker, seat, &mut unsubmitted) {
                Step::Next => {}
                Step::Sleep => {
                    seat.sleep();
                    unsubmitted = false;
                    self.awake(worker);
                }
                Step::End => return,
            }
        }
    }

    /// Starts queued transfers, and does one piece of work. `unsubmitted`: whether the seat has started transfers that
    /// it has not submitted.
    pub fn step(&self, worker: u32, seat: &mut impl Seat, unsubmitted: &mut bool) -> Step {
        let Taken { transfers, unsummed, work } = self.lock().take(seat.room(), !seat.has_completed());
        *unsubmitted |= !transfers.is_empty();
        transfers.into_iter().for_each(|(transfer, waiter)| seat.start(transfer, waiter));
        // Submitted before other work, so that the drives stay busy meanwhile; otherwise by the call that sleeps.
        if *unsubmitted && (seat.has_completed() || work.is_some() || unsummed.is_some()) {
            seat.poll();
            *unsubmitted = false;
        }
        // What was taken is done first: a completion that the submission has found can wait.
        if let Some(work) = work {
            self.answer(work());
        } else if let Some((transfer, waiter)) = unsummed {
            let sum = waiter::checksum_of(&transfer.buf, waiter.sum_bytes);
            seat.start(transfer, waiter.with_sum(sum));
            *unsubmitted = true;
        } else if let Some(ended) = seat.take_completed() {
            self.answer(waiter::answer(ended));
        } else {
            return self.fall_asleep(worker, seat);
        }
        Step::Next
    }

    /// Enters the worker in the list of sleepers, unless there is work. A worker without room for the queued transfers
    /// wakes one that has room: no worker was woken for them while this one was awake.
    fn fall_asleep(&self, worker: u32, seat: &impl Seat) -> Step {
        let has_room = seat.room() > 0;
        let mut queue = self.lock();
        if queue.has_for(has_room) {
            return Step::Next;
        }
        let with_room = if worker < queue.rings && queue.has_for(true) { queue.any_sleeper(true) } else { None };
        let ends = queue.closed && seat.in_flight() == 0;
        if !ends {
            queue.asleep.push(Sleeper { worker, bell: seat.bell(), has_room });
        }
        drop(queue);
        with_room.iter().for_each(|sleeper| sleeper.bell.ring());
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

    fn answer(&self, answer: Answer) {
        let mut answers = self.answers.lock();
        answers.push(answer);
        let is_first = answers.len() == 1;
        drop(answers);
        if is_first {
            self.answered.notify_one();
        }
    }

    /// Runs the answers, on the reactor.
    pub(super) async fn take_answers(self: Arc<Self>) {
        loop {
            self.answered.notified().await;
            let answers = std::mem::take(&mut *self.answers.lock());
            answers.into_iter().for_each(|answer| answer());
        }
    }

    /// Closes the queue: workers end after the queued work.
    pub(super) fn close(&self) {
        let asleep = {
            let mut queue = self.lock();
            queue.closed = true;
            std::mem::take(&mut queue.asleep)
        };
        asleep.iter().for_each(|sleeper| sleeper.bell.ring());
    }

    /// Number of sleeping workers.
    #[cfg(test)]
    pub(super) fn asleep(&self) -> usize {
        self.lock().asleep.len()
    }
}
