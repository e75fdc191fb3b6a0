//! Reads that callers submit themselves.
//!
//! Where a block is on disk, and its host slot and its bytes in flight are to be had at once, whoever asks for it plans
//! the read under the lock of the look-up and queues it for an I/O thread, which checksums the block, publishes it and
//! answers its waiters: the reactor never hears of it. All else is a movement on the reactor: what must wait, what
//! takes another way, and what is left of a read that failed.

use std::sync::Arc;

use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};

use super::{
    Command, QueuedCommand, Urgent,
    plan::{OnDisk, Step, Trip, plan_read},
};
use crate::{
    block::{BlockKey, OpKind, Tier},
    index::EntryId,
    io::{OpenFile, Pool, Pushed, Transfer, Transferred, Waiter},
    memory::Lent,
    state::{Class, DeferredWork, Few, FlightEnd, Locked, Outcome, Permit, Purpose, Room, Shared, Taken, Unverified},
    urgency::Urgency,
};

/// Where callers send what the reactor carries out, and submit reads and writes.
pub(crate) struct Submitter {
    pub(crate) ends: Arc<Ends>,
    pub(crate) commands: mpsc::UnboundedSender<QueuedCommand>,
    /// `None`: no I/O thread reads or writes for callers.
    pub(super) pool: Option<Arc<Pool>>,
}

/// What the ends of reads and writes need. The pool's queue owns these, so that they do not own the pool.
pub(crate) struct Ends {
    pub(super) shared: Arc<Shared>,
    pub(crate) urgent: mpsc::UnboundedSender<Urgent>,
}

/// A flight that has begun, and who carries its movement out.
pub(crate) enum Begun {
    /// An I/O thread, once the read is [submitted](Submitter::submit).
    Read(Submission),
    /// The reactor, once it has the command, for which there is room.
    Command(Room),
}

/// A read to a host slot, with all that it needs, and its flight.
pub(crate) struct PlannedRead {
    pub(super) trip: Trip,
    pub(super) block: OnDisk,
    pub(super) began: Instant,
}

/// A read whose block matched its checksum, to be published.
struct MatchedRead {
    ends: Arc<Ends>,
    key: BlockKey,
    /// `None` once it is published.
    unverified: Option<Unverified>,
    /// Given back by the holder of the lock, who begins reads too: others would pass the count to and fro.
    permit: Option<Permit>,
    end: Option<FlightEnd>,
}

impl DeferredWork for MatchedRead {
    fn entry(&self) -> Option<EntryId> {
        self.unverified.as_ref().map(|unverified| unverified.source.id())
    }

    fn run(&mut self, state: &mut Locked<'_>) {
        self.permit = None;
        self.end = self.unverified.take().map(|unverified| state.publish_read(&self.key, unverified));
    }

    fn answer(&mut self) {
        let Some((answers, next)) = self.end.take() else { return };
        // First: nothing of a waiter's may come between a write and the reactor.
        if let Some(write) = next {
            // Where the reactor is gone, the write's flight ended with it.
            drop(self.ends.urgent.send(Urgent::Write(*write)));
        }
        for (waiter, answer) in answers {
            drop(waiter.send(answer));
        }
    }
}

/// A read that is about to be submitted, with what its end needs; `None` once it is. Handed to the reactor when it is
/// dropped before.
pub(crate) struct Submission(Option<(Arc<Ends>, PlannedRead, OpenFile)>);

impl Submitter {
    /// `threads`: the queue of the I/O threads that read for callers, and the files.
    pub(crate) fn new(
        ends: Arc<Ends>,
        commands: mpsc::UnboundedSender<QueuedCommand>,
        threads: Option<(Arc<Pool>, Vec<OpenFile>)>,
    ) -> Arc<Self> {
        let pool = threads.map(|(pool, files)| {
            ends.shared.lock().files = files;
            pool
        });
        Arc::new(Submitter { ends, commands, pool })
    }

    pub(super) fn pool(&self) -> &Pool {
        self.pool.as_ref().expect("it reads for callers")
    }

    /// Begins the flight of a block to `tier`, with its first waiter, where none is in flight: as a read to be
    /// submitted, where all that it needs is to be had now, else as a command, if there is `room` for it.
    pub(crate) fn begin(
        &self,
        state: &mut Locked<'_>,
        (key, id): (&BlockKey, EntryId),
        (tier, class): (Tier, Class),
        waiter: oneshot::Sender<Outcome>,
        room: impl FnOnce() -> Option<Room>,
    ) -> Option<Begun> {
        let may_read = self.pool.is_some() && tier == Tier::Host;
        let Some(read) = may_read.then(|| self.plan(state, (key, id), class)).flatten() else {
            let Some(room) = room() else {
                state.drop_after_unlock(waiter);
                return None;
            };
            state.flights.begin((key, tier), id, class, Few::from([waiter]), false);
            return Some(Begun::Command(room));
        };
        Some(Begun::Read(self.begin_read(state, id, class, waiter, read)))
    }

    /// Hands a movement that has begun on to whoever carries it out.
    pub(crate) fn hand_on(&self, begun: Begun, key: &BlockKey, to: Tier) {
        match begun {
            Begun::Read(read) => self.wake(self.submit(read)),
            Begun::Command(room) => drop(self.commands.send((Command::Promote { key: *key, to }, room))),
        }
    }

    /// Plans the read of a block to a host slot. `None` where something must be waited for, or the block takes another
    /// way.
    pub(super) fn plan(
        &self,
        state: &mut Locked<'_>,
        of: (&BlockKey, EntryId),
        class: Class,
    ) -> Option<(Trip, OnDisk)> {
        if state.flights.len() >= self.ends.shared.config.limits.movements_max as usize {
            return None;
        }
        match plan_read(state, of, &mut Taken::default(), Purpose::NewMovement(class))? {
            (trip, Step::OnDisk(block)) => Some((trip, block)),
            (_, Step::Wait(_)) => None,
            _ => unreachable!("the disk has the block, and nothing else fills a host slot with it"),
        }
    }

    /// Begins the flight of a planned read, with its first waiter.
    pub(super) fn begin_read(
        &self,
        state: &mut Locked<'_>,
        id: EntryId,
        class: Class,
        waiter: oneshot::Sender<Outcome>,
        (mut trip, block): (Trip, OnDisk),
    ) -> Submission {
        let is_awaited = class == Class::Awaited;
        let waiters = if is_awaited { Few::from([waiter]) } else { Few::default() };
        let number = state.flights.begin((&trip.key, Tier::Host), id, class, waiters, true);
        let urgency = if is_awaited { Urgency::Awaited } else { Urgency::Background(number) };
        state.watch();
        trip.taken.set_urgency(urgency);
        let file = state.files[usize::from(block.file.0)].clone();
        Submission::new(&self.ends, (trip, block), file)
    }

    /// Queues a read for the I/O threads. The caller [wakes](Self::wake) the one that it must. A read that nobody
    /// awaits is queued under the lock of its plan: a waiter that joins it raises it in the queue.
    pub(crate) fn submit(&self, submission: Submission) -> Pushed {
        submission.submit(self.pool())
    }

    /// Counts a read that is queued, and wakes the thread that it needs: outside of its caller's locks.
    pub(crate) fn wake(&self, pushed: Pushed) {
        self.ends.shared.metrics.movements.add(1.0);
        pushed.wake();
    }
}

impl Submission {
    /// A read whose flight has begun, from this file.
    pub(super) fn new(ends: &Arc<Ends>, (trip, block): (Trip, OnDisk), file: OpenFile) -> Self {
        Submission(Some((Arc::clone(ends), PlannedRead { trip, block, began: Instant::now() }, file)))
    }

    /// Queues it for the I/O threads.
    pub(super) fn submit(mut self, pool: &Pool) -> Pushed {
        let (ends, read, file) = self.0.take().expect("it is submitted once");
        let shared = &ends.shared;
        let (slot, urgency) = read.trip.taken.of_read();
        // SAFETY: the arena keeps the range mapped. It is an unpublished slot, which the read owns: it is in the
        // waiter, which whoever transfers drops or calls after the memory.
        let buf = unsafe {
            Lent::new(shared.host_ptr(slot), shared.config.slot_bytes(), None, Arc::clone(&shared.arena) as _)
        };
        let transfer = Transfer { kind: OpKind::Read, file, offset: read.block.offset, buf };
        let waiter = Waiter::calling(shared.config.block_bytes, move |result| ends.end(read, result));
        pool.push_transfer(urgency, transfer, waiter)
    }
}

impl Ends {
    pub(crate) fn new(shared: Arc<Shared>, urgent: mpsc::UnboundedSender<Urgent>) -> Arc<Self> {
        Arc::new(Ends { shared, urgent })
    }

    /// The end of a read, on the thread that has made it. One that was lost is made again: the kernel is done with its
    /// memory.
    fn end(self: Arc<Self>, read: PlannedRead, result: Option<Transferred>) {
        self.shared.metrics.movements.add(-1.0);
        match result {
            Some(Ok(sum)) if sum == Some(read.block.checksum) => self.publish(read),
            result => self.hand_over(read, result),
        }
    }

    fn hand_over(&self, read: PlannedRead, result: Option<Transferred>) {
        drop(self.urgent.send(Urgent::EndRead(Box::new(read), result)));
    }

    /// Makes a block that was read and matched visible, and answers its waiters; or whoever has the lock does.
    fn publish(self: Arc<Self>, read: PlannedRead) {
        let PlannedRead { mut trip, block: OnDisk { pin, checksum, file, .. }, began, .. } = read;
        let permit = Some(trip.taken.permit());
        self.shared.account(&self.shared.failures, file, OpKind::Read, &Ok(()));
        self.shared.metrics.work_done.add(1);
        let filling = trip.taken.slot();
        let unverified = Unverified { source: pin, filling, checksum, sum: Some(checksum), started: began };
        let shared = Arc::clone(&self.shared);
        shared.count_read(began);
        let matched = MatchedRead { ends: self, key: trip.key, unverified: Some(unverified), permit, end: None };
        shared.run_or_defer(matched);
    }
}

impl Drop for Submission {
    fn drop(&mut self) {
        if let Some((ends, read, _)) = self.0.take() {
            ends.hand_over(read, None);
        }
    }
}
