//! What was used when, and what goes first.

use super::{
    EntryId, EvictionPolicy, Index, Policy, Used,
    entry::{DIRTY, FULL, HELD, LISTED, List, NONE, USES_MAX},
};
use crate::block::{BlockKey, Tier};

/// The low half of the clock, but never [`NONE`].
fn as_date(clock: u64) -> u32 {
    (clock as u32).min(NONE - 1)
}

impl Index {
    /// A request for up to `blocks` blocks begins: of its uses of a block one is counted, where requests are.
    pub fn begin_request(&mut self, blocks: usize) {
        self.request = self.clock..self.clock.saturating_add(2 * blocks as u64);
    }

    /// A use: the entry becomes the most recent of every list that it is in, and is released no longer.
    #[inline]
    pub fn touch(&mut self, id: EntryId) {
        self.end_release(id);
        self.touch_as_released(id);
    }

    /// A use that leaves it released, where it is.
    #[inline]
    fn touch_as_released(&mut self, id: EntryId) {
        if self.counts_requests {
            return self.touch_once_a_request(id);
        }
        let from = self.entry(id).used();
        self.use_again(id, from, from.uses);
    }

    fn touch_once_a_request(&mut self, id: EntryId) {
        let entry = self.entry_mut(id);
        let announced = entry.is_announced();
        if announced {
            entry.set_announced(false);
        }
        self.touch_unless(id, announced);
    }

    /// A use that is about to follow, as the fetch of a block follows its prefetch: it counts now, and not when it
    /// follows.
    pub fn announce(&mut self, id: EntryId) {
        if !self.counts_requests {
            return self.touch(id);
        }
        self.end_release(id);
        let announced = self.entry(id).is_announced();
        self.touch_unless(id, announced);
        if self.entry(id).occupies_any() {
            self.entry_mut(id).set_announced(true);
        }
    }

    /// Where requests are counted: a use, unless it was announced, or is not the first of this request.
    fn touch_unless(&mut self, id: EntryId, announced: bool) {
        let entry = self.entry(id);
        // Of a block that is resident nowhere the policies know what is to be known.
        if !entry.occupies_any() {
            return;
        }
        if announced || self.request.contains(&self.clock) && entry.last_use > self.request.start {
            // What was evicted since is missed all the same.
            return self.note_return(id);
        }
        let from = entry.used();
        let uses = self.recall(id, from);
        self.use_again(id, from, uses);
    }

    /// Counts a use more than `uses`.
    #[inline]
    fn use_again(&mut self, id: EntryId, from: Used, uses: u8) {
        self.clock = self.clock.saturating_add(1);
        let to = Used { last: self.clock, uses: uses.saturating_add(1).min(USES_MAX) };
        let entry = self.entry_mut(id);
        entry.set_used(to);
        if entry.is_listed_anywhere() {
            self.retime(id, from, to);
        }
    }

    /// A use that is none of a caller's: it does not count where requests do, unless it is the first. It ends what
    /// began before, so what was released meanwhile stays so.
    #[inline]
    pub(super) fn touch_in_passing(&mut self, id: EntryId) {
        if !self.counts_requests || self.entry(id).used().uses == 0 {
            self.touch_as_released(id);
        }
    }

    /// The clock, as far as evictions are dated by it. Never [`NONE`].
    pub(super) fn now(&self) -> u32 {
        as_date(self.clock)
    }

    /// Tells the policies of a use, which is about to be counted; gives the uses before it, as far as they are
    /// remembered.
    fn recall(&mut self, id: EntryId, from: Used) -> u8 {
        let clock = self.clock.saturating_add(1);
        let now = as_date(clock);
        let Index { entries, policies, hasher, values, .. } = self;
        let entry = &entries[id.0 as usize];
        let known = values.as_mut().map_or(0, |values| values.asked(hasher.hash(&entry.key)));
        match from.uses {
            0 => {
                let hash = hasher.hash(&entry.key);
                return policies.iter_mut().fold(known, |uses, policy| policy.returned(hash, now).max(uses));
            }
            1 => {
                for tier in Tier::ALL.into_iter().filter(|tier| entry.has(*tier, FULL)) {
                    policies[tier as usize].reused(clock - from.last);
                }
            }
            _ => {}
        }
        self.note_return_at(id, now);
        from.uses
    }

    /// Tells the policies of tiers that have evicted a block, and still may be told so, that it is asked for.
    fn note_return(&mut self, id: EntryId) {
        self.note_return_at(id, self.now());
    }

    fn note_return_at(&mut self, id: EntryId, now: u32) {
        let Index { entries, policies, .. } = self;
        let entry = &mut entries[id.0 as usize];
        let uses = entry.used().uses;
        for tier in Tier::ALL {
            if let Some(at) = entry.take_evicted_at(tier) {
                policies[tier as usize].returned_to(at, now, uses);
            }
        }
    }

    /// Has the policies that have evicted a block remember it: it is in no tier now, and its entry forgets it.
    pub(super) fn remember_evictions(&mut self, id: EntryId) {
        let Index { entries, policies, hasher, .. } = self;
        let entry = &mut entries[id.0 as usize];
        let uses = entry.used().uses;
        if uses == 0 {
            return;
        }
        let hash = hasher.hash(&entry.key);
        for tier in Tier::ALL {
            if let Some(at) = entry.take_evicted_at(tier) {
                policies[tier as usize].remember(hash, at, uses);
            }
        }
        entry.forget_uses();
    }

    /// True where `tier`, which is full, should not take a block that is about to be stored: its policy refuses blocks
    /// in their first use, and all that follow them in their chain. A block that is refused counts as used.
    ///
    /// `parent_comes` is true where the block before it is on its way to the tier.
    pub fn refuses(&mut self, key: &BlockKey, parent: Option<&BlockKey>, parent_comes: bool, tier: Tier) -> bool {
        let policy = &self.policies[tier as usize];
        // No coin is above this one.
        if !policy.refuses(u64::MAX) {
            return false;
        }
        let hash = self.hasher.hash(key);
        let is_first = match self.find(key).map(|id| self.entry(id).used().uses) {
            None | Some(0) => !policy.remembers(hash),
            Some(uses) => uses == 1,
        };
        if !is_first {
            return false;
        }
        let refuses = match self.parent_taken(parent, parent_comes, tier) {
            Some(taken) => !taken,
            // Half of the hash chooses the place in the table; this mixes both.
            None => policy.refuses(hash.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ hash.rotate_left(32)),
        };
        let at = self.now();
        let policy = &mut self.policies[tier as usize];
        if refuses {
            policy.refused(hash, at);
        } else {
            policy.accepted(hash);
        }
        refuses
    }

    /// Whether the block before a new one was new as well, and taken in: the new one is then. `None` where it says
    /// nothing of the new one: it is used in other chains, or not known at all.
    fn parent_taken(&self, parent: Option<&BlockKey>, comes: bool, tier: Tier) -> Option<bool> {
        let (policy, hash) = (&self.policies[tier as usize], self.hasher.hash(parent?));
        let entry = self.find(parent?).map(|id| self.entry(id)).filter(|entry| entry.occupies_any());
        match entry {
            Some(entry) if entry.occupies(tier) || comes => (!entry.used().again()).then_some(true),
            _ if comes || policy.was_accepted(hash) => Some(true),
            // Without the block before it nobody can use it.
            Some(_) => Some(false),
            None => policy.remembers(hash).then_some(false),
        }
    }

    /// A use of a chain, given in prefix order. Touches children before parents, so that a chain
    /// comes to its end from its end.
    pub fn touch_chain(&mut self, ids: &[EntryId]) {
        for &id in ids.iter().rev() {
            self.touch(id);
        }
    }

    /// What is known of the uses of an entry.
    pub fn used(&self, id: EntryId) -> Used {
        self.entry(id).used()
    }

    /// By how many uses [`Rb`](super::Rb) favors what was used again, where it is the policy of `tier`.
    pub fn head(&self, tier: Tier) -> Option<f64> {
        match &self.policies[tier as usize] {
            Policy::Rb(rb) => Some(rb.head()),
            _ => None,
        }
    }

    /// The share of new blocks that `tier` takes while it is full.
    pub fn share(&self, tier: Tier) -> f64 {
        match &self.policies[tier as usize] {
            Policy::Rb(rb) => rb.share(),
            _ => 1.0,
        }
    }

    /// Counts a hit; gives the count after it, which stops at 255.
    pub fn hit(&mut self, id: EntryId) -> u8 {
        let hits = &mut self.entry_mut(id).hits;
        *hits = hits.saturating_add(1);
        *hits
    }

    /// Hits counted so far; stops at 255.
    pub fn hits(&self, id: EntryId) -> u8 {
        self.entry(id).hits
    }

    /// Marks the copy in `tier` as dirty (it must be demoted before it may be evicted) or as clean.
    /// Does nothing where it is not full.
    pub fn set_dirty(&mut self, id: EntryId, tier: Tier, dirty: bool) {
        let entry = self.entry(id);
        if entry.is_removed() || !entry.has(tier, FULL) || entry.has(tier, DIRTY) == dirty {
            return;
        }
        // Which list it is in depends on the mark, so it leaves the one before it enters the other.
        self.delist(id, tier);
        let entry = self.entry_mut(id);
        if dirty {
            entry.set(tier, DIRTY);
        } else {
            entry.clear(tier, DIRTY);
        }
        self.relist(id, tier);
    }

    /// True where the copy in `tier` must be demoted before it may be evicted.
    pub fn is_dirty(&self, id: EntryId, tier: Tier) -> bool {
        self.entry(id).has(tier, DIRTY)
    }

    /// What `tier` should give up next: a released leaf, the leaf that the policy chooses, or else a kept one; where no
    /// leaf may go, a copy right above held ones ([why](super)). `None` where every copy is pinned, dirty or being
    /// filled.
    pub fn victim(&mut self, tier: Tier) -> Option<EntryId> {
        let last_use = |id: EntryId| self.entry(id).last_use;
        let coldest = |list: List| self.lists[list as usize][tier as usize].victim(&last_use);
        let by_policy = || self.policies[tier as usize].victim(&last_use);
        let leaf = coldest(List::Released).or_else(|| match (by_policy(), coldest(List::Kept)) {
            // No more is kept than was promised to be.
            (Some(choice), Some(kept)) if self.kept.is_over(tier) && last_use(kept) < last_use(choice) => Some(kept),
            (choice, kept) => choice.or(kept),
        });
        leaf.or_else(|| self.last_resort(tier))
    }

    /// A copy that may go although it has children there, all of them held. Ends after as many steps as inner copies
    /// have come to be held since the last call.
    #[cold]
    fn last_resort(&mut self, tier: Tier) -> Option<EntryId> {
        loop {
            let id = self.frontier[tier as usize].next(0).map(EntryId)?;
            if self.entry(id).may_go(tier) {
                return Some(id);
            }
            // Held like all below it: what may go is above it, if anything.
            self.count_held(id, tier, true);
        }
    }

    /// True where [`evict`](Self::evict) may be called.
    pub(super) fn may_evict(&self, id: EntryId, tier: Tier) -> bool {
        let entry = self.entry(id);
        entry.has(tier, LISTED) && entry.list(tier) != List::Dirty || entry.is_last_resort(tier)
    }

    /// What to demote next out of `tier`: the coldest dirty copy that nobody has pinned. Children do not matter.
    ///
    /// A demotion pins its source, which takes it off this list.
    pub fn demotable(&self, tier: Tier) -> Option<EntryId> {
        self.lists[List::Dirty as usize][tier as usize].victim(&|id| self.entry(id).last_use)
    }

    /// Number of leaves in `tier` that may be evicted now.
    pub fn evictable(&self, tier: Tier) -> usize {
        let of_hints = [List::Released, List::Kept].map(|list| self.lists[list as usize][tier as usize].len());
        self.policies[tier as usize].len() + of_hints.iter().sum::<usize>()
    }

    /// Number of copies in `tier` that may be demoted now.
    pub fn demotable_len(&self, tier: Tier) -> usize {
        self.lists[List::Dirty as usize][tier as usize].len()
    }

    /// The clock at the entry's last use; 0 if it was never used.
    pub fn last_use(&self, id: EntryId) -> u64 {
        self.entry(id).last_use
    }

    /// Uses so far, or the latest that was restored if that is more.
    pub fn clock(&self) -> u64 {
        self.clock
    }

    /// Puts the entry into the list of `tier` that it belongs in, or takes it out, and counts it as held or not.
    ///
    /// Called after every change of what [`belongs_in_list`](super::entry::Entry::belongs_in_list) and
    /// [`is_held`](super::entry::Entry::is_held) read.
    #[inline]
    pub(super) fn relist(&mut self, id: EntryId, tier: Tier) {
        if self.entry(id).is_plain_inner(tier) {
            return;
        }
        self.relist_any(id, tier);
    }

    #[inline(never)]
    fn relist_any(&mut self, id: EntryId, tier: Tier) {
        self.tell_held(id, tier);
        let entry = &self.entries[id.0 as usize];
        let belongs = entry.belongs_in_list(tier);
        if belongs != entry.has(tier, LISTED) {
            match belongs {
                true => self.enlist(id, tier),
                false => self.delist(id, tier),
            }
        }
    }

    /// Sees to it that a held leaf is counted among its parent's held children, and what is not held is not. An inner
    /// copy that is held is counted when a victim is looked for: most are let go before.
    #[inline]
    pub(super) fn tell_held(&mut self, id: EntryId, tier: Tier) {
        let entry = &self.entries[id.0 as usize];
        let (held, counted) = (entry.is_held(tier), entry.has(tier, HELD));
        let counts = held && (counted || entry.place(tier).children == 0);
        if counts != counted {
            self.count_held(id, tier, counts);
        }
    }

    /// Counts the entry among its parent's held children in `tier`, or no longer.
    #[inline(never)]
    fn count_held(&mut self, id: EntryId, tier: Tier, counts: bool) {
        let entry = self.entry_mut(id);
        match counts {
            true => entry.set(tier, HELD),
            false => entry.clear(tier, HELD),
        }
        self.weigh(id, tier);
        if let Some(parent) = self.parent(id) {
            let held = &mut self.entry_mut(parent).place_mut(tier).held;
            *held = if counts { *held + 1 } else { *held - 1 };
            self.weigh(parent, tier);
        }
    }

    /// Enters the copy among those right above held ones, or takes it out. Called after every change of what
    /// [`is_frontier`](super::entry::Entry::is_frontier) reads.
    pub(super) fn weigh(&mut self, id: EntryId, tier: Tier) {
        let set = &mut self.frontier[tier as usize];
        match self.entries[id.0 as usize].is_frontier(tier) {
            true => set.insert(id.0),
            false => set.remove(id.0),
        };
    }

    /// Enters the entry into the list of `tier` that it belongs in.
    #[inline(never)]
    fn enlist(&mut self, id: EntryId, tier: Tier) {
        let entry = self.entry_mut(id);
        entry.set(tier, LISTED);
        let used = entry.used();
        match entry.list(tier) {
            List::Policy => self.policies[tier as usize].insert(id, used),
            list => self.lists[list as usize][tier as usize].insert(id, used),
        }
    }

    /// Takes the entry out of the list of `tier` that it is in, if any.
    #[inline(never)]
    pub(super) fn delist(&mut self, id: EntryId, tier: Tier) {
        let entry = &mut self.entries[id.0 as usize];
        if !entry.has(tier, LISTED) {
            return;
        }
        entry.clear(tier, LISTED);
        let used = entry.used();
        match entry.list(tier) {
            List::Policy => self.policies[tier as usize].remove(id, used),
            list => self.lists[list as usize][tier as usize].remove(id, used),
        }
    }

    /// Tells the lists that the entry is in of a new last use.
    #[inline(never)]
    pub(super) fn retime(&mut self, id: EntryId, from: Used, to: Used) {
        for tier in Tier::ALL {
            let entry = self.entry(id);
            if entry.has(tier, LISTED) {
                match entry.list(tier) {
                    List::Policy => self.policies[tier as usize].touch(id, from, to),
                    list => self.lists[list as usize][tier as usize].touch(id, from, to),
                }
            }
        }
    }
}
