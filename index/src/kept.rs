//! Kept blocks and their times: entries by their numbers.

use std::collections::{BTreeMap, BTreeSet};

use kvhoist_base::block::Tier;

/// Kept blocks, until when, and how many copies they have.
#[derive(Default)]
pub(super) struct Kept {
    pub(super) until: BTreeMap<u32, u64>,
    pub(super) by_time: BTreeSet<(u64, u32)>,
    /// Full copies of kept blocks that are in the map.
    pub(super) copies: [usize; Tier::COUNT],
    pub(super) copies_max: [usize; Tier::COUNT],
}

impl Kept {
    /// Counts a copy that comes or goes, if its block is kept.
    pub(super) fn count(&mut self, is_kept: bool, tier: Tier, comes: bool) {
        let copies = &mut self.copies[tier as usize];
        match comes {
            true => *copies += usize::from(is_kept),
            false => *copies -= usize::from(is_kept),
        }
    }

    /// True if more copies are kept in `tier` than the limit.
    pub(super) fn is_over(&self, tier: Tier) -> bool {
        self.copies[tier as usize] > self.copies_max[tier as usize]
    }

    /// Removes an entry.
    pub(super) fn forget(&mut self, id: u32) {
        if let Some(until) = self.until.remove(&id) {
            self.by_time.remove(&(until, id));
        }
    }

    pub(super) fn set(&mut self, id: u32, until: u64) {
        self.forget(id);
        self.until.insert(id, until);
        self.by_time.insert((until, id));
    }

    pub(super) fn until(&self, id: u32) -> Option<u64> {
        self.until.get(&id).copied()
    }
}
