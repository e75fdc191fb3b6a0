//! Deciding which blocks of host memory are worth a write to disk.
//!
//! A block is decided on when host memory lets it go: the coldest one that is not on disk, or all of them at a `sync`
//! or the close. With a block worth a write the unwritten blocks above it in its chain are written, because a suffix
//! without its prefix is useless: before it, except at a `sync`, which writes all in the order of their keys. Any other
//! block may be evicted; a use before that makes it undecided again.

use std::{collections::BTreeSet, rc::Rc};

use super::Mover;
use crate::{
    block::{BlockKey, Tier},
    device::CopyEngine,
    index::EntryId,
    io::Storage,
    state::{Locked, PendingWrite, State},
};

/// Blocks that are decided on between two turns of the I/O.
const AT_ONCE: usize = 16;

/// Blocks of a chain that are decided on at once; those above them are when their turn comes.
const CHAIN_MAX: usize = 1024;

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Begins the write of the next block that is worth one, after deciding on as many as that takes. `None` if it is
    /// not time for a write, or if the last write could not begin.
    pub(super) async fn next_by_value(&self) -> Option<PendingWrite> {
        loop {
            {
                let mut state = self.shared.lock();
                let mut is_refused = false;
                while let Some((id, key)) = state.next_write() {
                    match self.begin_write_back(&mut state, id, &key) {
                        Some(write) => return Some(write),
                        None => is_refused = true,
                    }
                }
                // It is still dirty, and would be decided on again and again.
                if is_refused {
                    return None;
                }
            }
            // All that were in the queue may be in flight: the coldest one is not among them.
            if !self.decide_coldest().await {
                return None;
            }
        }
    }

    /// Decides on the coldest blocks of host memory while it is time for that, until one must be written; true if one
    /// must be.
    async fn decide_coldest(&self) -> bool {
        loop {
            for _ in 0..AT_ONCE {
                let mut state = self.shared.lock();
                if state.dirty.queued() > 0 {
                    return true;
                }
                let Some((id, key)) = self.coldest_dirty(&state) else { return false };
                self.decide(&mut state, id, key, &BTreeSet::new());
            }
            crate::io::yield_now().await;
        }
    }

    /// Decides on every block of host memory that is not on disk and was not decided on, the coldest first. Returns all
    /// that must be written.
    pub(super) async fn decide_all(self: &Rc<Self>) -> BTreeSet<BlockKey> {
        let last_use = |state: &State, key| state.index.find(&key).map_or(0, |id| state.index.last_use(id));
        let mut dirty = self.each_dirty(|state, key| (last_use(state, key), key)).await;
        let mut wanted = BTreeSet::new();
        while !dirty.is_empty() {
            for (_, key) in std::iter::from_fn(|| dirty.pop_first()).take(AT_ONCE) {
                let mut state = self.shared.lock();
                if wanted.contains(&key) || !state.dirty.contains(&key) {
                    continue;
                }
                let Some(id) = state.index.find(&key) else { continue };
                if state.dirty.is_queued(&key) || state.flights.entry(&key, Tier::Disk) == Some(id) {
                    wanted.insert(key);
                } else {
                    let decided = self.decide(&mut state, id, key, &wanted);
                    wanted.extend(decided);
                }
            }
            crate::io::yield_now().await;
        }
        wanted
    }

    /// Decides on a block that is not on disk. Returns the blocks of its chain that must be written, up to the first
    /// that is among `known`: they are dirty and [queued](State).
    fn decide(&self, state: &mut Locked<'_>, id: EntryId, key: BlockKey, known: &BTreeSet<BlockKey>) -> Vec<BlockKey> {
        let shared = &self.shared;
        let full = state.free_slots(Tier::Disk) == 0;
        let worth = state.index.worth(id, full);
        // A released block's chain is over, and it says nothing about other blocks of its class.
        let is_over = state.index.is_released(id);
        // With a budget also one whose class is not worth it: whatever becomes of that, this block was used again.
        let is_worth = worth.is_enough || worth.again && self.write_budget.is_some();
        let [by_value, by_budget] = &shared.metrics.writes_declined;
        if !is_over {
            state.index.decided(id);
        }
        // Before its chain is looked at, which may be long, and whose next block may be declined next.
        if is_over || !is_worth {
            state.count(by_value, 1);
            state.decline_write(id, &key);
            return Vec::new();
        }
        if let Some(write_budget) = &self.write_budget {
            let mut write_budget = write_budget.borrow_mut();
            let declines = write_budget.declines(shared.opened.elapsed(), worth.again, worth.coin);
            state.export(shared.metrics.write_share.set_later(write_budget.share()));
            if declines {
                state.count(by_budget, 1);
                state.decline_write(id, &key);
                return Vec::new();
            }
        }
        let mut chain = state.index.unwritten_chain(id, CHAIN_MAX, |above| known.contains(above));
        let mut wanted = Vec::new();
        chain.retain(|&above_id| {
            let above = state.index.key(above_id);
            let is_decided = state.dirty.is_queued(&above);
            if is_decided {
                wanted.push(above);
            }
            // The budget is charged once for each block. Only a sync decides on one whose key a removed block had that
            // is being written, and has it written after that.
            !is_decided && (above_id == id || !state.flights.contains(&above, Tier::Disk))
        });
        let taken = match &self.write_budget {
            Some(write_budget) => {
                let taken = write_budget.borrow_mut().take(worth.again, chain.len());
                state.count(by_budget, u64::from(taken < chain.len()));
                taken
            }
            None => chain.len(),
        };
        for &above in &chain[..taken] {
            let above_key = state.index.key(above);
            if above != id {
                state.index.decided(above);
            }
            state.set_dirty(above, &above_key);
            state.dirty.enqueue(above_key);
            wanted.push(above_key);
        }
        if taken < chain.len() {
            state.decline_write(id, &key);
        }
        wanted
    }
}

impl State {
    /// The next block that was found to be worth a write, and waits for it.
    pub(super) fn next_write(&mut self) -> Option<(EntryId, BlockKey)> {
        while let Some(key) = self.dirty.dequeue() {
            // Or it is being written.
            if !self.flights.contains(&key, Tier::Disk)
                && let Some(id) = self.index.find(&key)
            {
                return Some((id, key));
            }
        }
        None
    }
}
