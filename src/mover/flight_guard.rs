//! The end of a flight whose movement panicked.

use std::{cell::Cell, rc::Rc};

use super::Mover;
use crate::{
    block::{BlockKey, Tier},
    device::CopyEngine,
    io::Storage,
    state::{Started, verify::panicked},
};

/// Fails the flight of a movement that panics. The first value of the movement, so that it is dropped last.
///
/// A movement has no reason to panic, but it calls code that is not its own: subscribers of the log, which may write to
/// a pipe that nobody reads. Its waiters are answered all the same, its block can be requested again, and the cache can
/// be closed.
pub(super) struct FlightGuard<S: Storage, C: CopyEngine> {
    mover: Rc<Mover<S, C>>,
    key: BlockKey,
    tier: Tier,
    started: Started,
    /// The disk slot that it writes to.
    slot: Cell<Option<u32>>,
}

impl<S: Storage, C: CopyEngine> FlightGuard<S, C> {
    pub(super) fn new(mover: &Rc<Mover<S, C>>, key: &BlockKey, tier: Tier, started: Started) -> Self {
        FlightGuard { mover: Rc::clone(mover), key: *key, tier, started, slot: Cell::new(None) }
    }

    /// As [`new`](Self::new), of a write to a disk slot.
    pub(super) fn of_write(mover: &Rc<Mover<S, C>>, key: &BlockKey, started: Started, slot: u32) -> Self {
        let guard = FlightGuard::new(mover, key, Tier::Disk, started);
        guard.writes_to(slot);
        guard
    }

    pub(super) fn key(&self) -> &BlockKey {
        &self.key
    }

    /// Notes the disk slot that the movement writes to from now on.
    pub(super) fn writes_to(&self, slot: u32) {
        self.slot.set(Some(slot));
    }
}

impl<S: Storage, C: CopyEngine> Drop for FlightGuard<S, C> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        let (mover, key, tier) = (Rc::clone(&self.mover), self.key, self.tier);
        let (started, slot) = (self.started, self.slot.get());
        // Not while it unwinds: a second panic would end the process.
        self.mover.spawn(async move {
            crate::io::yield_now().await;
            mover.fail_flight(&key, tier, started, slot);
        });
    }
}

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Undoes what the movement had begun, and answers its waiters with an error.
    fn fail_flight(
        self: &Rc<Self>,
        key: &BlockKey,
        tier: Tier,
        Started { number, entry: id }: Started,
        slot: Option<u32>,
    ) {
        // A panic under the lock has answered every waiter.
        let Some(mut state) = self.shared.lock_unless_broken() else { return };
        let flight = state.flights.get_mut(key, tier);
        // It has ended.
        if flight.is_none_or(|flight| flight.number != number) {
            return;
        }
        // Or its entry is gone: the block was removed, or given up.
        if state.index.find(key) == Some(id) && state.index.is_filling(id, tier) {
            // The slot itself is given back by the operation that may still write to it.
            if let Some(slot) = slot
                && state.disk_slots().meta(slot).is_some_and(|meta| meta.entry == id.as_u32())
            {
                state.disk_slots().clear(slot, key);
            }
            state.index.abort_fill(id, tier);
        }
        drop(state);
        let error = panicked();
        if tier == Tier::Disk {
            self.shared.metrics.writes_refused.add(1);
            self.shared.lock().note_written(key, id, Some(&error));
        }
        self.end_flight(key, tier, Err(error));
    }
}
