//! What waits for the workers of a pool, and what each takes of it. Under the pool's lock.

use std::collections::VecDeque;

use super::{
    super::{
        driver::{Driver, Wake},
        transfer::Transfer,
        waiter::Waiter,
    },
    Work,
};
use crate::{block::OpKind, urgency::Line};

/// What a transfer counts beside its bytes: its end costs its thread some 10 us.
const END_BYTES: u64 = 64 << 10;

/// How often busy threads pass over work and awaited checksums of writes before one of them does a piece.
pub(super) const PASSES_MAX: u32 = 8;

/// A transfer that waits.
pub(super) type Queued = (Transfer, Waiter);

/// What waits, and who sleeps.
#[derive(Default)]
pub(super) struct Queue {
    pub(super) work: VecDeque<(u64, Work)>,
    pub(super) reads: Line<Queued>,
    /// Writes that can start at once.
    pub(super) writes: Line<Queued>,
    /// Writes whose block must be checksummed first. A worker takes one at a time, so that the others take the rest.
    pub(super) unsummed: Line<Queued>,
    /// How often work was passed over since a piece of it was done.
    pub(super) passes: u32,
    /// The last piece was a unit of work: a write that is awaited has the next turn.
    pub(super) worked_last: bool,
    /// The weight of all that is queued, in bytes.
    pub(super) bytes: u64,
    pub(super) threads: u32,
    /// The first so many workers transfer.
    pub(super) rings: u32,
    /// Sleeping workers that have not been woken, the latest last.
    pub(super) asleep: Vec<Sleeper>,
    /// Set when no more work will come.
    pub(super) closed: bool,
}

/// A sleeping worker.
pub(super) struct Sleeper {
    pub(super) worker: u32,
    pub(super) wake: Wake,
    /// What it could start.
    pub(super) room: Room,
}

/// What a worker could start.
#[derive(Clone, Copy)]
pub(super) struct Room {
    pub(super) reads: usize,
    pub(super) writes: usize,
    /// Writes that it has in flight.
    pub(super) writing: usize,
}

impl Room {
    pub(super) fn of(driver: &impl Driver) -> Room {
        let [reads, writes] = [OpKind::Read, OpKind::Write].map(|kind| driver.room(kind));
        Room { reads, writes, writing: driver.in_flight(OpKind::Write) }
    }
}

/// What a worker takes from the queue at once.
#[derive(Default)]
pub(super) struct Batch {
    pub(super) transfers: Vec<Queued>,
    pub(super) unsummed: Option<Queued>,
    pub(super) work: Option<Work>,
}

/// What a queued transfer counts.
pub(super) fn weight((transfer, _): &Queued) -> u64 {
    transfer.buf.len() as u64 + END_BYTES
}

/// The order is that of `state/in_flight.rs`: reads and writes have room apart, so that no read waits for a write;
/// awaited ones go first; while awaited reads wait, a worker starts awaited writes alone, one at a time.
impl Queue {
    /// Takes transfers, limited by the worker's room and its share of the queue, and one unit of work if wanted or due.
    pub(super) fn take(&mut self, room: Room, wants_work: bool) -> Batch {
        let rings = self.rings.max(1) as usize;
        let mut taken = Batch::default();
        let reads = self.reads.len().div_ceil(rings).min(room.reads);
        taken.transfers.extend((0..reads).map_while(|_| self.reads.pop()).map(|(_, queued)| queued));
        // Before writes that need no checksum, which would take its room every time.
        let (mut room, is_due) = (room, self.passes >= PASSES_MAX);
        if is_due {
            self.take_piece(&mut room, &mut taken);
        }
        for _ in 0..self.writes.len().div_ceil(rings).min(self.writes_for(room)) {
            taken.transfers.extend(self.next_write(&mut room, |queue| &mut queue.writes));
        }
        self.bytes -= taken.transfers.iter().map(weight).sum::<u64>();
        if !is_due && wants_work && taken.transfers.is_empty() {
            self.take_piece(&mut room, &mut taken);
        } else if !is_due {
            self.passes += u32::from(!self.work.is_empty() || self.unsummed.has_awaited());
        }
        taken
    }

    /// Takes a unit of work, or a write whose block must be checksummed first. In turns where the write is awaited, so
    /// that no stream of work holds it up for ever.
    fn take_piece(&mut self, room: &mut Room, taken: &mut Batch) {
        let sums_first = self.worked_last && self.unsummed.has_awaited();
        if sums_first && self.take_unsummed(room, taken) || self.take_work(taken) || self.take_unsummed(room, taken) {
            self.worked_last = taken.work.is_some();
            self.passes = 0;
        }
    }

    fn take_work(&mut self, taken: &mut Batch) -> bool {
        let Some((bytes, work)) = self.work.pop_front() else { return false };
        self.bytes -= bytes;
        taken.work = Some(work);
        true
    }

    fn take_unsummed(&mut self, room: &mut Room, taken: &mut Batch) -> bool {
        if self.writes_for(*room) == 0 {
            return false;
        }
        let Some(queued) = self.next_write(room, |queue| &mut queue.unsummed) else { return false };
        self.bytes -= weight(&queued);
        taken.unsummed = Some(queued);
        true
    }

    pub(super) fn is_empty(&self) -> bool {
        self.work.is_empty() && self.reads.is_empty() && self.writes.is_empty() && self.unsummed.is_empty()
    }

    /// How many writes a worker with this room may start.
    fn writes_for(&self, room: Room) -> usize {
        match self.reads.has_awaited() {
            true => room.writes.min(1_usize.saturating_sub(room.writing)),
            false => room.writes,
        }
    }

    /// Takes the next write of a line that may start, and its room.
    fn next_write(&mut self, room: &mut Room, line: impl FnOnce(&mut Self) -> &mut Line<Queued>) -> Option<Queued> {
        let awaited_alone = self.reads.has_awaited();
        let line = line(self);
        let (_, queued) = if awaited_alone { line.pop_awaited() } else { line.pop() }?;
        (room.writes, room.writing) = (room.writes - 1, room.writing + 1);
        Some(queued)
    }

    /// Whether a worker with this room could start a transfer.
    pub(super) fn has_transfer_for(&self, room: Room) -> bool {
        let awaited_alone = self.reads.has_awaited();
        let may_start = |line: &Line<Queued>| if awaited_alone { line.has_awaited() } else { !line.is_empty() };
        let any_write = self.writes_for(room) > 0 && (may_start(&self.writes) || may_start(&self.unsummed));
        any_write || (room.reads > 0 && !self.reads.is_empty())
    }

    /// Returns a worker to wake, unless the awake ones suffice for the queue.
    pub(super) fn sleeper(&mut self, for_transfer: bool, wake_bytes: u64) -> Option<Sleeper> {
        let (workers, asleep) = match for_transfer {
            true => (self.rings, self.asleep.iter().filter(|sleeper| sleeper.worker < self.rings).count()),
            false => (self.threads, self.asleep.len()),
        };
        let awake = u64::from(workers) - asleep as u64;
        if awake > 0 && self.bytes <= wake_bytes.saturating_mul(awake) {
            return None;
        }
        self.any_sleeper(for_transfer)
    }

    /// Returns a worker to wake, if one is asleep that can do it.
    pub(super) fn any_sleeper(&mut self, for_transfer: bool) -> Option<Sleeper> {
        let at = self.asleep.iter().rposition(|sleeper| !for_transfer || self.has_transfer_for(sleeper.room))?;
        Some(self.asleep.remove(at))
    }
}
