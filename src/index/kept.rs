//! What is kept, until when. Pure data: entries by their numbers.

use std::collections::{BTreeMap, BTreeSet};

use crate::block::Tier;

/// What is kept, until when, and how much of it there is.
#[derive(Default)]
pub(super) struct Kept {
    pub(super) until: BTreeMap<u32, u64>,
    pub(super) by_time: BTreeSet<(u64, u32)>,
    /// Full copies of what is kept and can be found.
    pub(super) copies: [usize; Tier::COUNT],
    pub(super) copies_max: [usize; Tier::COUNT],
    /// What was kept until then may be kept no longer.
    pub(super) expired: u64,
}

impl Kept {
    /// A copy of a block comes or goes, which is kept or not.
    pub(super) fn count(&mut self, is_kept: bool, tier: Tier, comes: bool) {
        let copies = &mut self.copies[tier as usize];
        match comes {
            true => *copies += usize::from(is_kept),
            false => *copies -= usize::from(is_kept),
        }
    }

    /// True where more copies are kept in `tier` than may be.
    pub(super) fn is_over(&self, tier: Tier) -> bool {
        self.copies[tier as usize] > self.copies_max[tier as usize]
    }

    /// An entry is kept no longer, or is none any more.
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
