//! The end of a flight whose movement panicked.

use std::rc::Rc;

use super::Mover;
use crate::{
    block::{BlockKey, Tier},
    device::CopyEngine,
    io::Storage,
    state::{Started, verify::panicked},
};

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Undoes what the movement had begun, and answers its waiters with an error.
    pub(super) fn land_panicked(self: &Rc<Self>, key: &BlockKey, tier: Tier, Started { number, entry: id }: Started) {
        // A panic under the lock has answered every waiter.
        let Some(mut state) = self.shared.lock_unless_broken() else { return };
        let flight = state.flights.get_mut(key, tier);
        // It has landed, or waits for its verification.
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
        let error = panicked();
        if tier == Tier::Disk {
            self.shared.metrics.writes_refused.add(1);
            self.shared.note_refused(key, id, &error);
        }
        self.land(key, tier, Err(error));
    }
}
