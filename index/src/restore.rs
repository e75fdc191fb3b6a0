//! Recovery: blocks enter in any order, and are put in the order of eviction at the end.

use kvhoist_base::block::{BlockKey, Tier};

use super::{
    EntryId, Index, Used,
    entry::{Entry, FULL, LISTED, List, USES_MAX},
    link::NONE,
    prefetch::AHEAD,
};

impl Index {
    /// Bytes of memory that a block takes among the [entries](Self::reserved), the first of which come first.
    pub const ENTRY_BYTES: usize = size_of::<Entry>();

    /// Where the memory is that [`try_reserve`](Self::try_reserve) reserved, as address and bytes, for advice to the
    /// system: the entries and the map.
    pub fn reserved(&mut self) -> [(usize, usize); 2] {
        // Any entry tells where the others are.
        let id = self.find_or_create(BlockKey::new([0; 32]));
        self.collect(id);
        [(self.entries_at, self.entries.capacity() * size_of::<Entry>()), self.map.memory()]
    }

    /// Recovery: makes the block resident in `slot` of `tier`, with these uses; in any order. If no use is known, it
    /// counts as used once.
    ///
    /// [`restored`](Self::restored) must follow: until then no restored copy may be evicted. If the block has a copy in
    /// `tier` already, the index keeps that, and the error is its entry.
    pub fn restore(
        &mut self,
        key: BlockKey,
        parent: Option<BlockKey>,
        tier: Tier,
        slot: u32,
        used: Used,
    ) -> Result<EntryId, EntryId> {
        let (id, is_new) = self.find_or_create_with(&key, |entry| entry.make_resident(tier, slot, used));
        if is_new {
            self.resident[tier as usize] += 1;
            self.blocks += 1;
            self.clock = self.clock.max(used.last);
        }
        if let Some(parent) = parent.filter(|parent| *parent != key) {
            self.link(id, parent, Self::is_above);
        }
        match is_new {
            true => Ok(id),
            false => self.restore_known(id, tier, slot, used),
        }
    }

    /// Makes the block of an entry that was there already resident in `slot` of `tier`.
    fn restore_known(&mut self, id: EntryId, tier: Tier, slot: u32, used: Used) -> Result<EntryId, EntryId> {
        if self.entry(id).occupies(tier) {
            return Err(id);
        }
        let entry = self.entry_mut(id);
        let (is_first, is_new, kept) = (!entry.occupies_any(), entry.best_tier().is_none(), entry.is_kept());
        entry.set(tier, FULL);
        entry.place_mut(tier).slot = slot;
        self.resident[tier as usize] += 1;
        self.blocks += usize::from(is_new);
        self.kept.count(kept, tier, true);
        self.used_as(id, used);
        self.weigh(id, tier);
        self.tell_held(id, tier);
        if let Some(parent) = self.parent(id) {
            if is_first {
                self.note_fork(parent);
            }
            self.child_arrived(parent, tier);
        }
        Ok(id)
    }

    /// Recovery: the block is in `slot` of `tier`, and not where [`restore`](Self::restore) entered it. Returns the
    /// former slot; `None` if it is not full there, or is pinned.
    pub fn restore_instead(&mut self, id: EntryId, tier: Tier, slot: u32, used: Used) -> Option<u32> {
        let entry = self.entry_mut(id);
        if !entry.has(tier, FULL) || entry.place(tier).pins > 0 {
            return None;
        }
        let other = std::mem::replace(&mut entry.place_mut(tier).slot, slot);
        self.used_as(id, used);
        Some(other)
    }

    /// Raises the last use and the number of uses to these.
    fn used_as(&mut self, id: EntryId, used: Used) {
        let entry = self.entry_mut(id);
        let from = entry.used();
        let to = Used { last: from.last.max(used.last), uses: from.uses.max(used.uses).clamp(1, USES_MAX) };
        entry.set_used(to);
        if from != to {
            self.reorder(id, from);
        }
        self.clock = self.clock.max(to.last);
    }

    /// The end of recovery: the restored copies in `tier` may be evicted from now on, the coldest first. Linear in the
    /// entries.
    pub fn restored(&mut self, tier: Tier) {
        self.tops = Tops::default();
        self.restored_at = self.clock;
        // The last use and the id in one number, half as long to sort as a pair. So many uses ago, all are alike.
        let id_bits = usize::BITS - self.entries.capacity().leading_zeros();
        let oldest = self.clock.saturating_sub(u64::MAX >> id_bits);
        let mut leaves: Vec<u64> = Vec::new();
        for (id, entry) in &mut self.entries {
            if entry.belongs_in_list(tier) && !entry.has(tier, LISTED) {
                let last_use = entry.last_use;
                match entry.list(tier) {
                    List::Policy => leaves.push(last_use.saturating_sub(oldest) << id_bits | id as u64),
                    list => {
                        entry.set(tier, LISTED);
                        self.lists[list as usize][tier as usize].insert(id as u32, last_use);
                    }
                }
            }
        }
        self.evictable[tier as usize] += leaves.len();
        // In ascending order none arrives late.
        leaves.sort_unstable();
        let id = |leaf: u64| EntryId((leaf & ((1 << id_bits) - 1)) as u32);
        for (at, &leaf) in leaves.iter().enumerate() {
            if let Some(&soon) = leaves.get(at + AHEAD) {
                self.prefetch(id(soon));
            }
            self.entry_mut(id(leaf)).set(tier, LISTED);
            self.enter_order(id(leaf), tier);
        }
    }

    /// True if the entry was used since the [end of recovery](Self::restored).
    pub fn is_used_since_restored(&self, id: EntryId) -> bool {
        self.entry(id).last_use > self.restored_at
    }

    /// True where `id` is `of` or above it. Records come in any order: from each one whose child came before it a walk
    /// all the way up would take time in the square of a chain's length.
    fn is_above(&mut self, id: EntryId, of: EntryId) -> bool {
        if self.parent(id).is_some() {
            // One that was removed. None is, before the cache is open.
            return self.is_ancestor(id, of);
        }
        // The top of a chain is above all of it, and above nothing else.
        let Index { entries, tops, .. } = self;
        let top = tops.top_of(of, entries.capacity(), |id| entries[id.0 as usize].parent);
        if top != id {
            // It is linked below that chain now.
            tops.0[id.0 as usize] = top.0;
        }
        top == id
    }
}

/// An entry above each, as far up as has been seen. Chains only grow while they are restored; whatever takes a link
/// away has all of it forgotten.
#[derive(Default)]
pub(super) struct Tops(Vec<u32>);

impl Tops {
    pub(super) fn forget(&mut self) {
        self.0.clear();
    }

    /// The top of the chain that `from` is in; `ids` are more than any entry's.
    fn top_of(&mut self, from: EntryId, ids: usize, parent_of: impl Fn(EntryId) -> u32) -> EntryId {
        if self.0.len() < ids {
            self.0.resize(ids, NONE);
        }
        let mut top = from;
        loop {
            let known = self.0[top.0 as usize];
            match if known == NONE { parent_of(top) } else { known } {
                NONE => break,
                above => top = EntryId(above),
            }
        }
        // The next walk from anywhere on this way is a step.
        let mut at = from;
        while at != top {
            let known = std::mem::replace(&mut self.0[at.0 as usize], top.0);
            at = EntryId(if known == NONE { parent_of(at) } else { known });
        }
        top
    }
}
