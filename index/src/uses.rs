//! Uses: how they are counted, and what the policies learn of them.

use kvhoist_base::block::{BlockKey, Tier};

use super::{
    EntryId, Index, Policy, Rb, Used,
    entry::{FULL, USES_MAX},
    link::NONE,
};

/// Uses that are noted at most: second ones, and later ones as long as they leave half of the room to those.
const REUSED_MAX: usize = 1 << 14;
const REUSED_LATER_MAX: usize = REUSED_MAX / 2;

/// The low half of the clock, but never [`NONE`].
fn as_date(clock: u64) -> u32 {
    (clock as u32).min(NONE - 1)
}

/// What a tier did with the block before a new one. A block without its parent is useless.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Parent {
    /// It was new as well, and admitted.
    Taken,
    /// It is in another tier only.
    Elsewhere,
    /// It is resident nowhere: it was refused, or evicted.
    Refused,
}

impl Index {
    /// Begins a request for up to `blocks` blocks. With a policy that counts requests, each block counts as used once.
    pub fn begin_request(&mut self, blocks: usize) {
        self.request = self.clock..self.clock.saturating_add(2 * blocks as u64);
    }

    /// A use: the entry becomes the most recent of its lists, and is no longer released.
    #[inline]
    pub fn touch(&mut self, id: EntryId) {
        self.end_release(id);
        self.touch_as_released(id);
    }

    /// A use that does not end a release.
    #[inline]
    pub(super) fn touch_as_released(&mut self, id: EntryId) {
        if self.counts_requests {
            return self.touch_once_a_request(id);
        }
        self.use_again(id, 0);
    }

    #[inline]
    fn touch_once_a_request(&mut self, id: EntryId) {
        let entry = self.entry_mut(id);
        let announced = entry.is_announced();
        if announced {
            entry.set_announced(false);
        }
        self.touch_unless(id, announced);
    }

    /// Counts a use in advance, as of a prefetch: the use that follows, the fetch, is not counted again. It only makes
    /// the block as recent as the latest use.
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

    /// A use where requests are counted, unless it was announced or is not the first of this request.
    fn touch_unless(&mut self, id: EntryId, announced: bool) {
        let entry = self.entry(id);
        // The policies themselves remember blocks that are resident nowhere.
        if !entry.occupies_any() {
            return;
        }
        let from = entry.used();
        if announced || self.request.contains(&self.clock) && from.last > self.request.start {
            // A copy that was evicted meanwhile is a regret all the same.
            self.note_return(id);
            if announced {
                // Perhaps long ago, by who never came: as recent as the latest use, and no further use.
                self.entry_mut(id).last_use = self.clock;
                self.reorder(id, from);
            }
            return;
        }
        let uses = self.recall(id, from);
        self.use_again(id, uses);
    }

    /// Counts one use more than it has, or than the `recalled` ones if they are more.
    #[inline]
    fn use_again(&mut self, id: EntryId, recalled: u8) {
        let clock = self.clock.saturating_add(1);
        self.clock = clock;
        let entry = self.entry_mut(id);
        let from = entry.used();
        let to = Used { last: clock, uses: from.uses.max(recalled).saturating_add(1).min(USES_MAX) };
        entry.set_used(to);
        if to.uses >= 2
            && let Some(reused) = &mut self.reused
            && reused.len() < if to.uses == 2 { REUSED_MAX } else { REUSED_LATER_MAX }
        {
            let key = self.entries[id.0 as usize].key;
            reused.push(key);
        }
        self.reorder(id, from);
    }

    /// Notes from now on which blocks are used again.
    pub fn note_reused(&mut self) {
        self.reused = Some(Vec::new());
    }

    /// Takes the blocks that were used for the second time or once more since the last call, the first thousands of
    /// them; some of them several times.
    pub fn take_reused(&mut self) -> Vec<BlockKey> {
        self.reused.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// The date of an eviction now. Never [`NONE`].
    pub(super) fn now(&self) -> u32 {
        as_date(self.clock)
    }

    /// Reports a use that is about to be counted to the policies. Returns the remembered uses before it.
    #[inline]
    fn recall(&mut self, id: EntryId, from: Used) -> u8 {
        let clock = self.clock.saturating_add(1);
        let now = as_date(clock);
        let Index { entries, hasher, policies, values, .. } = self;
        let entry = &entries[id.0 as usize];
        let known = values.as_mut().map_or(0, |values| values.asked(hasher.hash(&entry.key)));
        match from.uses {
            0 => {
                let hash = hasher.hash(&entry.key);
                let policies = policies.iter_mut().filter_map(Policy::rb_mut);
                return policies.fold(known, |uses, policy| policy.returned(hash, now).max(uses));
            }
            1 => {
                for tier in Tier::ALL.into_iter().filter(|tier| entry.has(*tier, FULL)) {
                    if let Some(policy) = policies[tier as usize].rb_mut() {
                        policy.reused(clock - from.last);
                    }
                }
            }
            _ => {}
        }
        self.note_return_at(id, now);
        from.uses
    }

    /// Reports a use to the policies of tiers that evicted the block, once for each eviction.
    fn note_return(&mut self, id: EntryId) {
        self.note_return_at(id, self.now());
    }

    #[inline]
    fn note_return_at(&mut self, id: EntryId, now: u32) {
        let Index { entries, policies, .. } = self;
        let entry = &mut entries[id.0 as usize];
        let uses = entry.used().uses;
        for tier in Tier::ALL {
            if let Some(at) = entry.take_evicted_at(tier)
                && let Some(policy) = policies[tier as usize].rb_mut()
            {
                policy.returned_to(at, now, uses);
            }
        }
    }

    /// Moves the memory of evictions from the entry, which is resident nowhere now, to the policies.
    pub(super) fn remember_evictions(&mut self, id: EntryId) {
        let Index { entries, hasher, policies, .. } = self;
        let entry = &mut entries[id.0 as usize];
        let uses = entry.used().uses;
        if uses == 0 {
            return;
        }
        let hash = hasher.hash(&entry.key);
        for tier in Tier::ALL {
            if let Some(at) = entry.take_evicted_at(tier)
                && let Some(policy) = policies[tier as usize].rb_mut()
            {
                policy.remember(hash, at, uses);
            }
        }
        entry.forget_uses();
    }

    /// True if `tier`, which is full, should not take a block that is about to be stored: its policy refuses blocks in
    /// their first use, and all that follow them in their chain. A refused block counts as used.
    ///
    /// `parent_comes` is true if the block before it is being written to the tier.
    pub fn refuses(&mut self, key: &BlockKey, parent: Option<&BlockKey>, parent_comes: bool, tier: Tier) -> bool {
        // No draw is higher.
        let Some(policy) = self.policies[tier as usize].rb().filter(|policy| policy.refuses(u64::MAX)) else {
            return false;
        };
        let hash = self.hasher.hash(key);
        let entry = self.find(key).map(|id| self.entry(id)).filter(|entry| entry.occupies_any());
        let is_first = match entry.map(|entry| entry.used().uses) {
            None | Some(0) => !policy.remembers(hash),
            Some(uses) => uses == 1,
        };
        let is_new = entry.is_none();
        let refuses = match self.parent_taken(policy, parent, parent_comes, tier) {
            Some(Parent::Refused) => true,
            _ if !is_first => return false,
            Some(Parent::Elsewhere) => true,
            Some(Parent::Taken) => false,
            // Half of the hash chooses the place in the table; this mixes both.
            None => policy.refuses(hash.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ hash.rotate_left(32)),
        };
        // The use of a block that is in another tier, or on its way there, is counted by that.
        if refuses && is_new {
            self.clock = self.clock.saturating_add(1);
        }
        let at = self.now();
        match self.policies[tier as usize].rb_mut() {
            Some(policy) if refuses => policy.refused(hash, at),
            Some(policy) => policy.accepted(hash),
            None => {}
        }
        refuses
    }

    /// What became of the block before a new one. `None` if it does not decide: it is used in other chains, or not
    /// known.
    fn parent_taken(&self, policy: &Rb, parent: Option<&BlockKey>, comes: bool, tier: Tier) -> Option<Parent> {
        let hash = self.hasher.hash(parent?);
        let entry = self.find(parent?).map(|id| self.entry(id)).filter(|entry| entry.occupies_any());
        match entry {
            Some(entry) if entry.occupies(tier) || comes => (!entry.used().again()).then_some(Parent::Taken),
            _ if comes || policy.was_accepted(hash) => Some(Parent::Taken),
            Some(_) => Some(Parent::Elsewhere),
            None => policy.remembers(hash).then_some(Parent::Refused),
        }
    }

    /// A use of a chain, given in prefix order. Touches children before parents, so that a chain is evicted from its
    /// end.
    pub fn touch_chain(&mut self, ids: &[EntryId]) {
        for &id in ids.iter().rev() {
            self.touch(id);
        }
    }

    /// The known uses of an entry.
    pub fn used(&self, id: EntryId) -> Used {
        self.entry(id).used()
    }

    /// So many slots of `tier` are in use from now on: its policy judges evictions by them.
    pub fn resize(&mut self, tier: Tier, slots: u32) {
        if let Some(rb) = self.policies[tier as usize].rb_mut() {
            rb.resize(slots);
        }
    }

    /// The head start of blocks with several uses, in uses, if [`Rb`] is the policy of `tier`.
    pub fn head(&self, tier: Tier) -> Option<f64> {
        self.policies[tier as usize].rb().map(Rb::head)
    }

    /// The share of new blocks that `tier` admits while it is full.
    pub fn share(&self, tier: Tier) -> f64 {
        self.policies[tier as usize].rb().map_or(1.0, Rb::share)
    }

    /// Counts a hit. Returns the count, at most 255.
    #[inline]
    pub fn hit(&mut self, id: EntryId) -> u8 {
        let hits = &mut self.entry_mut(id).hits;
        *hits = hits.saturating_add(1);
        *hits
    }

    /// Hits counted so far, at most 255.
    pub fn hits(&self, id: EntryId) -> u8 {
        self.entry(id).hits
    }

    /// The clock at the entry's last use; 0 if it was never used.
    pub fn last_use(&self, id: EntryId) -> u64 {
        self.entry(id).last_use
    }

    /// Uses so far, or the latest that was restored if that is more.
    pub fn clock(&self) -> u64 {
        self.clock
    }
}
