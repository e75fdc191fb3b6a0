//! What a movement that panics leaves behind, and what becomes of it.
//!
//! A movement has no reason to panic, but it calls code that is not its own: subscribers of the log and recorders of
//! metrics, which may write to a pipe that nobody reads. Its waiters are answered all the same, its block can be asked
//! for again, and the cache can be closed.

use std::{rc::Rc, thread};

use super::Mover;
use crate::{
    block::{BlockKey, Tier},
    device::CopyEngine,
    disk::PageId,
    error::Error,
    index::EntryId,
    io::{Storage, yield_now},
};

/// Lands the flight of a movement that panics. The first value of the movement, so that it is dropped last.
pub(super) struct Landing<S: Storage, C: CopyEngine> {
    mover: Rc<Mover<S, C>>,
    key: BlockKey,
    tier: Tier,
    /// Of the flight, and the entry that it moves; `None` where there is no flight.
    flight: Option<(u64, EntryId)>,
}

impl<S: Storage, C: CopyEngine> Landing<S, C> {
    /// Of the movement that is under way.
    pub(super) fn new(mover: &Rc<Mover<S, C>>, key: &BlockKey, tier: Tier) -> Self {
        let mut state = mover.shared.lock();
        let flight = state.flights.get_mut(key, tier).map(|flight| flight.number);
        let flight = flight.zip(state.flights.entry(key, tier));
        drop(state);
        Landing { mover: Rc::clone(mover), key: *key, tier, flight }
    }
}

impl<S: Storage, C: CopyEngine> Drop for Landing<S, C> {
    fn drop(&mut self) {
        let Some((number, id)) = self.flight.filter(|_| thread::panicking()) else { return };
        let (mover, key, tier) = (Rc::clone(&self.mover), self.key, self.tier);
        // Not while it unwinds: a second panic would end the process.
        self.mover.spawn(async move {
            yield_now().await;
            mover.land_panicked(&key, tier, number, id);
        });
    }
}

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    fn land_panicked(self: &Rc<Self>, key: &BlockKey, tier: Tier, number: u64, id: EntryId) {
        let mut state = self.shared.lock();
        let flight = state.flights.get_mut(key, tier);
        // It has landed, or waits for who verifies it.
        if flight.is_none_or(|flight| flight.number != number || flight.unverified.is_some()) {
            return;
        }
        // Or its entry is gone: the block was removed, or given up.
        if state.index.find(key) == Some(id) && state.index.is_filling(id, tier) {
            if tier == Tier::Disk {
                // The slot itself is given back by the operation that may still write to it.
                let slots = state.disk_slots();
                let named = |slot: &u32| slots.meta(*slot).is_some_and(|meta| meta.entry == id.as_u32());
                if let Some(slot) = (0..slots.stripe().slots()).find(named) {
                    slots.clear(slot, key);
                }
            }
            state.index.abort_fill(id, tier);
        }
        drop(state);
        let source = std::io::Error::other("its movement panicked, which is a defect; the panic message says where");
        let error = Error::io("move", "a block", source);
        if tier == Tier::Disk {
            self.shared.metrics.writes_refused.add(1);
            self.shared.end_write(key, id, Some(&error));
        }
        self.land(key, tier, Err(error));
    }
}

/// Answers those who wait for a page of records if the task that writes it panics.
pub(super) struct Serving<S: Storage, C: CopyEngine>(pub(super) Rc<Mover<S, C>>, pub(super) PageId);

impl<S: Storage, C: CopyEngine> Drop for Serving<S, C> {
    fn drop(&mut self) {
        let Serving(mover, page) = self;
        if thread::panicking() {
            mover.give_up_page(*page);
        }
    }
}
