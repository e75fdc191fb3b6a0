//! What a restart found: entered in any order, put into the order of eviction at the end.

use super::{
    EntryId, Index,
    entry::{FULL, LISTED, NONE},
    radix,
};
use crate::block::{BlockKey, Tier};

impl Index {
    /// Brings into the processor's caches what [`restore`](Self::restore) will need of these keys. One key after the
    /// other, half of its time would be waiting for memory; here the waits overlap.
    pub fn prepare_restore<'a>(&self, keys: impl Iterator<Item = &'a BlockKey>) {
        for key in keys {
            // No id is ever `NONE`: this looks at the places of the key and finds nothing.
            std::hint::black_box(self.map.find(self.hasher.hash(key), |&id| id == NONE).is_some());
        }
    }

    /// Recovery: makes the block resident in `slot` of `tier`, last used at `last_use`; in any order.
    ///
    /// To be followed by [`restored`](Self::restored): until then nothing that was entered may be evicted. Where the
    /// block has a copy in `tier` already the index keeps that, and the error is its entry.
    pub fn restore(
        &mut self,
        key: BlockKey,
        parent: Option<BlockKey>,
        tier: Tier,
        slot: u32,
        last_use: u64,
    ) -> Result<EntryId, EntryId> {
        let id = self.insert(key, parent);
        if self.entry(id).occupies(tier) {
            return Err(id);
        }
        let entry = self.entry_mut(id);
        let from = entry.last_use;
        let to = from.max(last_use);
        entry.last_use = to;
        entry.set(tier, FULL);
        entry.place_mut(tier).slot = slot;
        if from != to && entry.is_listed_anywhere() {
            self.retime(id, from, to);
        }
        self.clock = self.clock.max(to);
        self.resident[tier as usize] += 1;
        if let Some(parent) = self.parent(id) {
            self.child_arrived(parent, tier);
        }
        Ok(id)
    }

    /// The end of recovery: what was restored in `tier` may be evicted from now on, the coldest first. Linear in the
    /// entries.
    pub fn restored(&mut self, tier: Tier) {
        let (mut ids, mut last_uses) = (Vec::new(), Vec::new());
        for (id, entry) in &mut self.entries {
            if entry.belongs_in_list(tier) && !entry.has(tier, LISTED) {
                entry.set(tier, LISTED);
                ids.push(id as u32);
                last_uses.push(entry.last_use);
            }
        }
        let order = radix::order(&last_uses);
        let mut coldest_first = order.iter().map(|&at| (EntryId(ids[at as usize]), last_uses[at as usize]));
        self.policies[tier as usize].fill(&mut coldest_first);
    }
}
