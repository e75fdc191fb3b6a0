//! RB-LRU: two lists by last use, and a head start that moves until both are regretted equally often.
//!
//! Blocks that were used in one request only and blocks that were used again are kept in lists of their own. The victim
//! is the colder of the two fronts, where what was used again counts as used `head` later than it was. Every eviction
//! is a bet; a block that is asked for again within as many uses as the tier has slots is a *regret*. `head` grows
//! while evictions of what was used again are regretted more often than the others, and shrinks in the opposite case:
//! where both are equal, so is what a slot brings in each list. There is no other parameter that follows the load.

use super::{EntryId, EvictionPolicy, Lru, Used, ghosts::Ghosts};

/// Slots of head start at first, and at most, as multiples of the tier's.
const HEAD_FIRST: f64 = 0.5;
const HEAD_MAX: f64 = 16.0;
/// How far one look moves it.
const STEP: f64 = 0.02;
/// A rate of few evictions is drawn to the rate of all, as by so many evictions.
const PRIOR: f64 = 8.0;

/// Gives up what brings the least: the colder of what was used once and what was used again.
pub struct Rb {
    /// By whether it was used again.
    lists: [Lru; 2],
    slots: f64,
    /// Uses by which what was used again is favored.
    head: f64,
    /// Decayed counts.
    regrets: [f64; 2],
    evictions: [f64; 2],
    ghosts: Ghosts,
    until_adapt: u32,
}

impl Rb {
    /// The order of a tier of `slots` slots.
    pub fn new(slots: u32) -> Self {
        let slots_f = f64::from(slots);
        Rb {
            lists: [Lru::new(), Lru::new()],
            slots: slots_f,
            head: HEAD_FIRST * slots_f,
            regrets: [0.0; 2],
            evictions: [0.0; 2],
            ghosts: Ghosts::new(slots.saturating_mul(2)),
            until_adapt: period(slots_f),
        }
    }

    /// Uses by which what was used again is favored.
    pub fn head(&self) -> f64 {
        self.head
    }

    pub(super) fn contains(&self, id: EntryId, used: Used) -> bool {
        self.lists[usize::from(used.again)].contains(id, used.last)
    }

    pub(super) fn validate(&self) -> Result<(), String> {
        if !(0.0..=HEAD_MAX * self.slots).contains(&self.head) {
            return Err(format!("a head start of {}", self.head));
        }
        self.ghosts.validate()
    }

    fn count_regret(&mut self, again: bool, age: u32) {
        if f64::from(age) <= self.slots {
            self.regrets[usize::from(again)] += 1.0;
        }
    }

    fn adapt(&mut self) {
        let Rb { regrets, evictions, slots, .. } = self;
        let all = (regrets[0] + regrets[1] + 0.5) / (evictions[0] + evictions[1] + 1.0);
        let rate = |class: usize| (regrets[class] + PRIOR * all) / (evictions[class] + PRIOR);
        let (once, again) = (rate(0), rate(1));
        let step = STEP * *slots * (again - once) / (again + once + 1e-9);
        self.head = (self.head + step).clamp(0.0, HEAD_MAX * *slots);
        let decay = 0.5f64.powf(f64::from(period(*slots)) / (2.0 * slots.max(1.0)));
        regrets.iter_mut().chain(evictions).for_each(|count| *count *= decay);
    }
}

/// Evictions from one look at the rates to the next.
fn period(slots: f64) -> u32 {
    ((slots / 32.0) as u32).max(16)
}

impl EvictionPolicy for Rb {
    fn insert(&mut self, id: EntryId, used: Used) {
        self.lists[usize::from(used.again)].insert(id, used);
    }

    fn remove(&mut self, id: EntryId, used: Used) {
        self.lists[usize::from(used.again)].remove(id, used);
    }

    fn touch(&mut self, id: EntryId, from: Used, to: Used) {
        if from.again == to.again {
            return self.lists[usize::from(to.again)].touch(id, from, to);
        }
        self.remove(id, from);
        self.insert(id, to);
    }

    fn victim(&self, last_use: &dyn Fn(EntryId) -> u64) -> Option<EntryId> {
        let [once, again] = self.lists.each_ref().map(|list| list.victim(last_use));
        let (Some(once), Some(again)) = (once, again) else { return once.or(again) };
        let is_once = last_use(once) as f64 <= last_use(again) as f64 + self.head;
        Some(if is_once { once } else { again })
    }

    fn fill(&mut self, entries: &mut dyn Iterator<Item = (EntryId, Used)>) {
        let (again, once): (Vec<_>, Vec<_>) = entries.partition(|(_, used)| used.again);
        let [list_once, list_again] = &mut self.lists;
        list_once.fill(&mut once.into_iter());
        list_again.fill(&mut again.into_iter());
    }

    fn len(&self) -> usize {
        self.lists.iter().map(Lru::len).sum()
    }

    fn counts_requests(&self) -> bool {
        true
    }

    fn try_reserve(&mut self) -> Result<(), usize> {
        self.ghosts.try_reserve()
    }

    fn evicted(&mut self, again: bool) {
        self.evictions[usize::from(again)] += 1.0;
        self.until_adapt -= 1;
        if self.until_adapt == 0 {
            self.adapt();
            self.until_adapt = period(self.slots);
        }
    }

    fn remember(&mut self, hash: u64, at: u32, again: bool) {
        self.ghosts.push(hash, at, again);
    }

    fn returned(&mut self, hash: u64, now: u32) -> bool {
        let Some((at, again)) = self.ghosts.take(hash) else { return false };
        self.count_regret(again, now.wrapping_sub(at));
        true
    }

    fn returned_to(&mut self, at: u32, now: u32, again: bool) {
        self.count_regret(again, now.wrapping_sub(at));
    }
}
