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
const WAKE_BYTES: u64 = 256 << 10;

/// A unit of work. Returns what the reactor runs afterwards.
pub(super) type Work = Box<dyn FnOnce() -> Answer + Send>;

/// State shared by the reactor and the threads.
pub(super) struct Pool {
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

/// Whether a worker slept.
enum Slept {
    /// There is work.
    No,
    Yes,
    /// No more work will come.
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
        let part = self.transfers.len().div_ceil(self.threads as usize);
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
        let awake = u64::from(self.threads) - self.asleep.len() as u64;
        if awake > 0 && self.bytes <= WAKE_BYTES * awake {
            return None;
        }
        let at = self.asleep.iter().rposition(|sleeper| sleeper.has_room || !for_transfer)?;
        Some(self.asleep.remove(at))
    }
}

impl Pool {
    pub(super) fn new(threads: u32) -> Self {
        let queue = Queue {
            work: VecDeque::new(),
            transfers: VecDeque::new(),
            unsummed: VecDeque::new(),
            bytes: 0,
            threads,
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

    /// Main loop of a worker.
    pub(super) fn run(&self, worker: u32, seat: &mut impl Seat) {
        // Whether started transfers are not submitted yet.
        let mut unsubmitted = false;
        loop {
            let Taken { transfers, unsummed, work } = self.lock().take(seat.room(), !seat.has_completed());
            unsubmitted |= !transfers.is_empty();
            transfers.into_iter().for_each(|(transfer, waiter)| seat.start(transfer, waiter));
            // Submitted before other work, so that the drives stay busy meanwhile; otherwise by the call that sleeps.
            if unsubmitted && (seat.has_completed() || work.is_some() || unsummed.is_some()) {
                seat.poll();
                unsubmitted = false;
            }
            if let Some(ended) = seat.take_completed() {
                self.answer(waiter::answer(ended));
            } else if let Some(work) = work {
                self.answer(work());
            } else if let Some((transfer, waiter)) = unsummed {
                let sum = waiter::checksum_of(&transfer.buf, waiter.sum_bytes);
                seat.start(transfer, waiter.with_sum(sum));
                unsubmitted = true;
            } else {
                match self.sleep(worker, seat) {
                    Slept::No => {}
                    Slept::Yes => unsubmitted = false,
                    Slept::End => return,
                }
            }
        }
    }

    /// Submits what was started, and sleeps until there is work or a transfer completes.
    fn sleep(&self, worker: u32, seat: &mut impl Seat) -> Slept {
        let has_room = seat.room() > 0;
        {
            let mut queue = self.lock();
            if queue.has_for(has_room) {
                return Slept::No;
            }
            if queue.closed && seat.in_flight() == 0 {
                return Slept::End;
            }
            queue.asleep.push(Sleeper { worker, bell: seat.bell(), has_room });
        }
        seat.sleep();
        // A waking thread removes it from the list, but the completion of a transfer does not.
        self.lock().asleep.retain(|sleeper| sleeper.worker != worker);
        Slept::Yes
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
