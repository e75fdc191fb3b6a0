//! What the index promises, in maps and scans.

use std::collections::BTreeMap;

use kvhoist::Tier;

/// What the model knows of a key.
#[derive(Clone, Default)]
pub struct Known {
    pub parent: Option<u64>,
    /// Slot, pins, dirty.
    pub copies: [Option<(u32, u32, bool)>; Tier::COUNT],
    pub last_use: u64,
    /// Uses, 3 at most.
    pub uses: u8,
    /// Tiers that have evicted it since its last use.
    evicted: [bool; Tier::COUNT],
    pub released: bool,
    /// Until when it is kept.
    pub kept: Option<u64>,
    /// More than one child has been here at a time.
    pub forked: bool,
}

impl Known {
    /// It has a copy in `tier` again: that tier's eviction of it is not missed any more.
    pub fn fill(&mut self, tier: Tier, slot: u32) {
        self.copies[tier as usize] = Some((slot, 0, false));
        self.evicted[tier as usize] = false;
    }

    /// It is removed from every tier, which no tier remembers.
    pub fn clear(&mut self) {
        (self.copies, self.evicted) = Default::default();
    }
}

#[derive(Default)]
pub struct Model {
    pub known: BTreeMap<u64, Known>,
    pub next_slot: u32,
    pub clock: u64,
    pub now: u64,
    /// Of policies that count requests: how many evictions a tier remembers.
    requests: Option<usize>,
    /// The clock at the begin of the request, and at its end at the latest.
    request: std::ops::Range<u64>,
    /// The last evictions from each tier: blocks and their uses.
    ghosts: [Vec<Option<(u64, u8)>>; Tier::COUNT],
}

/// Copies that a tier may keep.
pub const KEPT_MAX: usize = 2;

/// Trees of four: 0 <- 1, 0 <- 2 <- 3, 4 <- 5 ...
pub fn parent_of(n: u64) -> Option<u64> {
    [None, Some(n.wrapping_sub(1)), Some(n.wrapping_sub(2)), Some(n.wrapping_sub(1))][(n % 4) as usize]
}

/// The chain that ends with `n`, its beginning first.
pub fn chain_to(n: u64) -> Vec<u64> {
    let mut chain: Vec<u64> = std::iter::successors(Some(n), |n| parent_of(*n)).collect();
    chain.reverse();
    chain
}

impl Model {
    /// With `slots`, of tiers of so many slots whose policy counts requests.
    pub fn new(slots: Option<u32>) -> Self {
        Model { requests: slots.map(|slots| 2 * slots as usize), ..Model::default() }
    }

    pub fn known_mut(&mut self, n: u64) -> &mut Known {
        self.known.get_mut(&n).expect("known")
    }

    fn children(&self, n: u64, tier: Tier) -> Vec<u64> {
        let all = self.known.iter();
        let children = all.filter(|(_, other)| other.parent == Some(n) && other.copies[tier as usize].is_some());
        children.map(|(&child, _)| child).collect()
    }

    fn is_held(&self, n: u64, tier: Tier) -> bool {
        let known = &self.known[&n];
        !matches!(known.copies[tier as usize], Some((_, 0, dirty)) if !dirty || known.released)
    }

    fn is_held_to_its_end(&self, n: u64, tier: Tier) -> bool {
        self.is_held(n, tier) && self.children(n, tier).iter().all(|child| self.is_held_to_its_end(*child, tier))
    }

    /// The block that is evicted next: the coldest of the first group that has one. Those are leaves, but for blocks
    /// above copies that are all held. `head`: by how much the policy favors blocks with several uses.
    pub fn victim(&self, tier: Tier, head: f64) -> Option<u64> {
        let free: Vec<u64> = self.known.keys().copied().filter(|n| !self.is_held(*n, tier)).collect();
        let coldest = |wanted: &dyn Fn(&Known) -> bool| {
            let leaves = free.iter().filter(|n| wanted(&self.known[n]) && self.children(**n, tier).is_empty());
            leaves.min_by_key(|n| self.known[n].last_use).copied()
        };
        let is_usual = |known: &Known| !known.released && known.kept.is_none();
        let once = coldest(&|known| is_usual(known) && known.uses < 2);
        let again = coldest(&|known| is_usual(known) && known.uses > 1);
        let [released, kept] = [coldest(&|known| known.released), coldest(&|known| known.kept.is_some())];
        let of_kept = self.known.values().filter(|known| known.kept.is_some() && known.copies[tier as usize].is_some());
        // With too many they compete with the others, by the same rule.
        let competing = kept.filter(|_| of_kept.count() > KEPT_MAX);
        let value = |n: &u64| {
            let Known { last_use, uses, .. } = self.known[n];
            (last_use as f64 + if uses > 1 { head } else { 0.0 }, uses > 1)
        };
        let usual =
            [once, again].into_iter().flatten().min_by(|a, b| value(a).partial_cmp(&value(b)).expect("numbers"));
        let usual = usual.map(|usual| match competing {
            Some(kept) if value(&kept) < value(&usual) => kept,
            _ => usual,
        });
        let is_above_held = |n: &&u64| {
            let children = self.children(**n, tier);
            !children.is_empty() && children.iter().all(|child| self.is_held_to_its_end(*child, tier))
        };
        let by_keeping = |n: &&u64| (self.known[n].kept.is_some(), self.known[n].last_use);
        let resort = free.iter().filter(is_above_held).min_by_key(by_keeping).copied();
        released.or(usual).or(competing).or(resort.filter(|n| self.known[n].kept.is_none())).or(kept).or(resort)
    }

    pub fn begin_request(&mut self, blocks: usize) {
        self.request = self.clock..self.clock + 2 * blocks as u64;
    }

    /// A use by a call.
    pub fn touch(&mut self, n: u64) {
        let known = self.known_mut(n);
        let (last_use, uses) = (known.last_use, known.uses);
        if self.requests.is_some() && self.request.contains(&self.clock) && last_use > self.request.start {
            self.known_mut(n).evicted = Default::default();
            return;
        }
        self.clock += 1;
        let clock = self.clock;
        let uses = match uses {
            0 => 1 + Tier::ALL.map(|tier| self.take_ghost(n, tier)).into_iter().max().expect("three tiers"),
            uses => uses + 1,
        };
        let known = self.known_mut(n);
        (known.last_use, known.uses, known.evicted) = (clock, uses.min(3), Default::default());
    }

    /// The uses of a block when the tier evicted it; 0 if the tier does not remember that.
    fn take_ghost(&mut self, n: u64, tier: Tier) -> u8 {
        let ghosts = &mut self.ghosts[tier as usize];
        let found = ghosts.iter_mut().find(|ghost| ghost.is_some_and(|(of, _)| of == n));
        found.and_then(Option::take).map_or(0, |(_, uses)| uses)
    }

    pub fn evict(&mut self, n: u64, tier: Tier) -> Option<u32> {
        let known = self.known_mut(n);
        // An eviction because of a hint is no decision of the policy.
        known.evicted[tier as usize] = !known.released && known.kept.is_none();
        let slot = known.copies[tier as usize].take().map(|(slot, ..)| slot);
        self.forget(n);
        slot
    }

    pub fn is_resident(&self, n: u64) -> bool {
        self.best(n).is_some()
    }

    pub fn children_anywhere(&self, n: u64) -> Vec<u64> {
        self.known.keys().copied().filter(|child| parent_of(*child) == Some(n) && self.is_resident(*child)).collect()
    }

    /// A use takes the release back, for all that is before the block as well.
    pub fn end_release(&mut self, n: u64) {
        for n in chain_to(n).into_iter().rev() {
            match self.known.get_mut(&n) {
                Some(known) if known.released => known.released = false,
                _ => break,
            }
        }
    }

    pub fn release(&mut self, keys: &[u64]) -> usize {
        let mut released = 0;
        for (at, &n) in keys.iter().enumerate().rev() {
            let next = keys.get(at + 1).filter(|next| self.known.get(next).is_some_and(|next| next.released));
            let others = self.children_anywhere(n).into_iter().any(|child| Some(&child) != next);
            let Some(known) = self.known.get_mut(&n) else { continue };
            known.kept.take_if(|until| *until <= self.now);
            if known.forked || known.kept.is_some() || others {
                break;
            }
            if self.is_resident(n) {
                self.known_mut(n).released = true;
                released += 1;
            }
        }
        released
    }

    pub fn keep(&mut self, n: u64, until: u64) {
        for (at, n) in chain_to(n).into_iter().rev().enumerate() {
            let known = self.known.entry(n).or_default();
            if known.kept.is_some_and(|known| known >= until) {
                // What is before an ancestor that is kept was kept with it.
                if at > 0 {
                    break;
                }
                continue;
            }
            known.kept = Some(until);
            self.end_release(n);
            if !self.is_resident(n) {
                break;
            }
        }
    }

    /// A block that is resident nowhere is not released any more, and is forgotten if no other block names it. The
    /// tiers remember that they evicted it.
    pub fn forget(&mut self, n: u64) {
        if self.is_resident(n) {
            return;
        }
        let room = self.requests.unwrap_or(0);
        let known = self.known_mut(n);
        known.released = false;
        let (uses, evicted) = (std::mem::take(&mut known.uses), std::mem::take(&mut known.evicted));
        for tier in Tier::ALL.into_iter().filter(|tier| uses > 0 && evicted[*tier as usize]) {
            let ghosts = &mut self.ghosts[tier as usize];
            ghosts.push(Some((n, uses)));
            ghosts.drain(..ghosts.len().saturating_sub(room));
        }
        self.known_mut(n).last_use = 0;
        if self.children_anywhere(n).is_empty() {
            self.known.insert(n, Known::default());
        }
        if let Some(parent) = parent_of(n).filter(|parent| self.known.contains_key(parent)) {
            self.forget(parent);
        }
    }

    pub fn best(&self, n: u64) -> Option<Tier> {
        let known = self.known.get(&n)?;
        Tier::ALL.into_iter().find(|tier| known.copies[*tier as usize].is_some())
    }
}
