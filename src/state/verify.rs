//! The end of a read: the block is verified and published, or given up.
//!
//! The checksum of a block costs as much as the rest of a fetch from disk. On the reactor it would limit the cache to
//! one core. So the reactor leaves a block unverified with its flight and sends each waiter a [`Ticket`]. The first
//! waiter to be polled verifies the block in that poll and answers the others. The block is not visible before. A
//! waiter that is never polled again delays no other: any ticket will do, and later waiters get one too. When the last
//! ticket is dropped the block is given up.
//!
//! The reactor or its workers verify blocks without a waiter, and blocks so large that one poll would take long.

use std::{ops::ControlFlow, sync::Arc};

use tokio::sync::oneshot;

use super::{
    Filling, Finished, Flight, Joined, Message, Outcome, Pin, Shared, State, Ticket, Unclaimed, Unverified, few::Few,
};
use crate::{
    block::{BlockKey, FileId, Route, Segment, Tier},
    checksum::checksum,
    disk::Origin,
    error::Error,
    index::EntryId,
    memory::Readable,
    shield::caught,
};

/// The error of the waiters for a movement that panicked.
pub(crate) fn panicked() -> Error {
    let source = std::io::Error::other("its movement panicked, which is a defect; the panic message says where");
    Error::io("move", "a block", source)
}

/// Larger blocks are verified on the reactor, in pieces: at most about 100 us in one poll.
pub(crate) const BLOCK_BYTES_MAX: usize = 1 << 20;

/// Why a block on disk is given up.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The drive does not return it.
    Unreadable,
    /// The drive returns other bytes than its checksum is of.
    Mismatch,
}

impl Fault {
    fn text(self) -> &'static str {
        match self {
            Fault::Unreadable => "it cannot be read",
            Fault::Mismatch => "its checksum does not match",
        }
    }
}

// SAFETY: an unpublished slot, which the filling keeps and no operation writes to any more.
unsafe impl Readable for Unverified {
    fn segments(&self) -> Vec<Segment> {
        Readable::segments(&self.filling)
    }
}

/// The result of redeeming a ticket: the end of the movement, `None` if the block may have been evicted since and must
/// be requested again; or a receiver, because another thread verifies the block.
type Redeemed = ControlFlow<Option<Outcome>, oneshot::Receiver<Message>>;

impl Ticket {
    /// A ticket for the block of `flight`, for a holder of the lock.
    pub(crate) fn new(shared: &Arc<Shared>, key: BlockKey, flight: &mut Flight) -> Self {
        let block = Arc::clone(flight.unverified.as_ref().expect("tickets are for blocks that wait to be verified"));
        flight.tickets += 1;
        Ticket { shared: Some(Arc::clone(shared)), key, block, flight: flight.number }
    }

    fn redeem(mut self) -> Redeemed {
        let shared = self.shared.take().expect("a ticket is redeemed once");
        let key = self.key;
        if let Some(unverified) = self.block.claim() {
            return ControlFlow::Break(Some(shared.verify(&key, unverified)));
        }
        let mut state = shared.lock();
        let waiters_max = shared.config.limits.waiters_max;
        let mine = state.flights.get_mut(&key, Tier::Host).filter(|flight| flight.number == self.flight);
        let Some(flight) = mine else {
            let found = state.index.find(&key);
            let pin = found.and_then(|id| Pin::take(&shared, &mut state, id, Tier::Host, Route::DiskToHost));
            return ControlFlow::Break(pin.map(|pin| Ok(Some(pin))));
        };
        flight.tickets -= 1;
        match state.flights.join(&key, Tier::Host, waiters_max) {
            Joined::Waiting(receiver) => ControlFlow::Continue(receiver),
            Joined::Overdue => {
                ControlFlow::Break(Some(Err(shared.timeout_locked(&mut state, "the verification of the block"))))
            }
            _ => ControlFlow::Break(None),
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let Some(shared) = self.shared.take().and_then(Shared::at_home) else { return };
        let Some(mut state) = shared.lock_unless_broken() else { return };
        let mine = state.flights.get_mut(&self.key, Tier::Host).filter(|flight| flight.number == self.flight);
        let Some(flight) = mine else { return };
        flight.tickets -= 1;
        if flight.tickets == 0 {
            shared.give_up_unverified(&mut state, &self.key);
        }
    }
}

impl Shared {
    /// Waits for a movement, and verifies the block if this waiter is the first. `None` if the movement ended without
    /// this waiter and the block may have been evicted since: it must be requested again.
    pub(crate) async fn settle(self: &Arc<Self>, mut receiver: oneshot::Receiver<Message>) -> Option<Outcome> {
        loop {
            match receiver.await {
                Err(_) => return Some(Err(Error::Closed)),
                Ok(Message::Ended(outcome)) => return Some(outcome),
                Ok(Message::Verify(ticket)) => match ticket.redeem() {
                    ControlFlow::Break(settled) => return settled,
                    ControlFlow::Continue(again) => receiver = again,
                },
            }
        }
    }

    /// Verifies a block and ends its flight.
    fn verify(self: &Arc<Self>, key: &BlockKey, mut unverified: Unverified) -> Outcome {
        let matches = checksum(unverified.filling.bytes_mut()) == unverified.checksum;
        let (outcome, answers) = if matches {
            self.metrics.moved(Route::DiskToHost, self.config.block_bytes, unverified.started.elapsed());
            let Unverified { source, filling, checksum, .. } = unverified;
            let mut state = self.lock();
            let pin = self.publish_locked(&mut state, source.id(), filling, checksum, Route::DiskToHost, source);
            let outcome = Ok(pin);
            let answers = self.take_answers(&mut state, key, &outcome);
            (outcome, answers)
        } else {
            // Subscribers of the log may panic, also on a caller's thread: the flight ends all the same.
            let outcome = caught(|| self.finish_read(unverified, false)).unwrap_or_else(|| Err(panicked()));
            let answers = self.take_answers(&mut self.lock(), key, &outcome);
            (outcome, answers)
        };
        for (waiter, answer) in answers {
            drop(waiter.send(Message::Ended(answer)));
        }
        self.verified.notify_one();
        outcome
    }

    /// Publishes a block that matched, or gives it up for good. Returns a pin for the waiter that verified it.
    pub(crate) fn finish_read(self: &Arc<Self>, unverified: Unverified, matches: bool) -> Outcome {
        let Unverified { source, filling, checksum, started, .. } = unverified;
        if !matches {
            self.metrics.checksum_failures.add(1);
            self.unlink(source, filling, Fault::Mismatch);
            return Ok(None);
        }
        self.metrics.moved(Route::DiskToHost, self.config.block_bytes, started.elapsed());
        Ok(self.publish(source.id(), filling, checksum, Route::DiskToHost, source))
    }

    /// Ends the flight of a block that its waiters verify; the caller sends the answers after releasing the lock.
    fn take_answers(
        self: &Arc<Self>,
        state: &mut State,
        key: &BlockKey,
        outcome: &Outcome,
    ) -> Few<(oneshot::Sender<Message>, Outcome)> {
        let Finished { mut waiters, next } = state.flights.finish(key, Tier::Host);
        // A block from disk needs no write.
        waiters.extend(next.into_iter().flatten());
        self.answers(state, waiters, Tier::Host, outcome)
    }

    /// The answer to each waiter for a movement to `tier`.
    pub(crate) fn answers(
        self: &Arc<Self>,
        state: &mut State,
        waiters: Few<oneshot::Sender<Message>>,
        tier: Tier,
        outcome: &Outcome,
    ) -> Few<(oneshot::Sender<Message>, Outcome)> {
        waiters.map(|waiter| {
            let answer = match outcome {
                Ok(Some(pin)) => Ok(Pin::take(self, state, pin.id(), tier, pin.route())),
                Ok(None) => Ok(None),
                Err(error) => Err(error.clone()),
            };
            (waiter, answer)
        })
    }

    /// Leaves a block with its flight, with a ticket for each waiter. Returns the block if there is no waiter.
    pub(crate) fn leave_unverified(
        self: &Arc<Self>,
        key: &BlockKey,
        unverified: Unverified,
    ) -> Result<Few<(oneshot::Sender<Message>, Ticket)>, Unverified> {
        let block = Unclaimed::new(unverified);
        let mut state = self.lock();
        let is_open = state.check_open().is_ok();
        let flight = state.flights.get_awaited(key, Tier::Host).filter(|_| is_open);
        let Some(flight) = flight.filter(|flight| !flight.waiters.is_empty() && !flight.is_followed()) else {
            return Err(block.claim().expect("nobody else has it"));
        };
        flight.unverified = Some(block);
        let waiters = std::mem::take(&mut flight.waiters);
        Ok(waiters.map(|waiter| (waiter, Ticket::new(self, *key, flight))))
    }

    /// Gives up a block without waiters: its slot becomes free, the disk keeps it.
    fn give_up_unverified(&self, state: &mut State, key: &BlockKey) {
        let block = state.flights.get_mut(key, Tier::Host).and_then(|flight| flight.unverified.as_ref());
        // Otherwise a caller verifies it, and ends its flight.
        let Some(Unverified { source, filling, .. }) = block.and_then(|block| block.claim()) else { return };
        // Waiters that joined meanwhile have tickets of their own: the list is empty.
        let Finished { waiters, next } = state.flights.finish(key, Tier::Host);
        assert!(waiters.is_empty() && next.is_none(), "a flight that waits to be verified is joined by tickets only");
        state.index.abort_fill(source.id(), Tier::Host);
        filling.release(state);
        source.release(state);
    }

    /// Answers the holders of tickets that the cache is closed.
    pub(crate) fn give_up_all_unverified(self: &Arc<Self>) {
        let mut state = self.lock();
        for key in state.flights.unverified() {
            self.give_up_unverified(&mut state, &key);
        }
    }
}

impl Shared {
    /// Makes a filled host or device slot visible, and releases the source. Returns a pin for the first waiter; `None`
    /// if the block was removed meanwhile.
    pub(crate) fn publish(
        self: &Arc<Self>,
        id: EntryId,
        filling: Filling,
        checksum: u64,
        route: Route,
        source: Pin,
    ) -> Option<Pin> {
        self.publish_locked(&mut self.lock(), id, filling, checksum, route, source)
    }

    /// As [`publish`](Self::publish), for a holder of the lock.
    pub(crate) fn publish_locked(
        self: &Arc<Self>,
        state: &mut State,
        id: EntryId,
        filling: Filling,
        checksum: u64,
        route: Route,
        source: Pin,
    ) -> Option<Pin> {
        let (tier, slot) = (filling.tier(), filling.slot());
        let pin = if state.index.complete_fill_pinned(id, tier, slot) {
            let checksums = match tier {
                Tier::Device => &mut state.device_checksums,
                _ => &mut state.host_checksums,
            };
            checksums[slot as usize] = checksum;
            filling.published();
            Some(Pin::taken(self, id, tier, slot, route))
        } else {
            filling.release(state);
            None
        };
        if source.tier() == Tier::Disk {
            state.note_right(&source);
        }
        source.release(state);
        pin
    }

    /// Ends a read that failed for lack of a resource, not because of the disk: the block stays on disk.
    pub(crate) fn abort_read(&self, pin: Pin, filling: Filling) {
        let mut state = self.lock();
        state.index.abort_fill(pin.id(), Tier::Host);
        filling.release(&mut state);
        pin.release(&mut state);
    }

    /// Gives up a block that cannot be read from its disk slot, unless it was removed meanwhile: quarantines the slot,
    /// if the drive is to blame. `filling` is the host slot that the block was read into.
    ///
    /// If other readers hold the disk slot, the whole block is removed: a store must find it missing and keep its data.
    pub(crate) fn unlink(&self, pin: Pin, filling: Filling, fault: Fault) {
        let (id, slot) = (pin.id(), pin.slot());
        let mut state = self.lock();
        let key = state.index.key(id);
        state.index.abort_fill(id, Tier::Host);
        filling.release(&mut state);
        // If the block was removed meanwhile, its last reader frees the slot.
        let removed = state.index.slot(id, Tier::Disk) != Some(slot);
        pin.release(&mut state);
        if removed {
            return;
        }
        let origin = state.disk_slots().origin(slot);
        let is_callers = fault == Fault::Mismatch && origin != Origin::OURS;
        if is_callers {
            state.disk_slots().clear(slot, &key);
        }
        match state.index.drop_copy(id, Tier::Disk) {
            Some(slot) if is_callers => state.push_free(Tier::Disk, slot),
            Some(_) => {}
            None => {
                for (tier, slot) in Tier::ALL.into_iter().zip(state.index.remove(id)) {
                    slot.into_iter().for_each(|slot| state.push_free(tier, slot));
                }
            }
        }
        if is_callers {
            drop(state);
            return self.blame_lender(origin, slot);
        }
        let (file, of_path) = state.disk_slots().quarantine(slot, &key);
        let count = state.disk_slots().quarantined_count();
        drop(state);
        self.note_quarantined(file, of_path, count, (slot, fault.text()));
    }

    /// Counts a block whose lender changed its memory while it was stored, or so it seems: the bytes were never read
    /// back before.
    fn blame_lender(&self, origin: Origin, slot: u32) {
        self.metrics.changed_memory.add(1);
        let blamed = self.lenders.blame(origin);
        let name = blamed.as_ref().map_or("memory of a caller that is gone", |(lender, _)| &lender.name);
        let count = self.metrics.changed_memory.get();
        // Any caller can have many: a warning for each power of two, counters for the others.
        if count.is_power_of_two() {
            tracing::warn!(
                name,
                slot,
                count,
                "a block on disk was given up: its memory was changed while it was stored from there, or the drive \
                 lost it before it was first read; wait for the end of a store before its memory is used again"
            );
        } else {
            tracing::debug!(name, slot, count, "a block on disk was given up: its memory was changed during its store");
        }
        if let Some((lender, true)) = blamed {
            tracing::info!(name = lender.name, "blocks stored from this memory are copied first from now on");
        }
    }

    /// Counts a quarantined slot of a path, and takes the disk tier out of service if there are too many.
    fn note_quarantined(&self, file: FileId, of_path: u32, count: u32, (slot, why): (u32, &str)) {
        self.metrics.quarantined.add(1);
        // A bad drive has many: one warning per path, counters for the others.
        if of_path == 1 {
            let path = &self.config.disk.paths[usize::from(file.0)].path;
            tracing::warn!(
                ?path,
                slot,
                why,
                "a block on disk was given up and its slot quarantined; the next ones of this path are counted, and \
                 logged at level DEBUG"
            );
        } else {
            tracing::debug!(slot, why, "a block on disk was given up and its slot quarantined");
        }
        let limit = self.config.disk.quarantine_max;
        if count > limit {
            self.retire_disk(format!("{count} slots are quarantined, more than quarantine_max = {limit}"));
        } else if u64::from(count) == self.config.disk_slots() {
            self.retire_disk(format!("all of its {count} slots are quarantined"));
        }
    }
}

impl State {
    /// Notes that a block which is pinned on disk was read and is right: what becomes of it later is the drive's.
    pub(crate) fn note_right(&mut self, on_disk: &Pin) {
        self.disk_slots().set_origin(on_disk.slot(), Origin::OURS);
    }
}
