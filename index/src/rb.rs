//! RB-LRU: two lists by last use, and a head start that moves until both are regretted equally often.
//!
//! Blocks that were used in one request and blocks that were used in several are kept in two lists. The victim is the
//! colder of the two fronts, where a block of the second list counts as used `head` later than it was. An evicted block
//! that is requested again within as many uses as the tier has slots is a *regret*. `head` grows while evictions from
//! the second list are regretted more often than those from the first, and shrinks in the opposite case: if both rates
//! are equal, a slot brings as many hits in either list. No other parameter follows the load.
//!
//! A tier that *thrashes* evicts blocks before they are requested again. With [`Rb::refusing`] it then admits only a
//! share of the blocks in their first use. The share falls while evicted blocks would bring more hits, for the time
//! that they would occupy a slot, than new blocks do.

use kvhoist_base::block::Tier;
use slab::Slab;

use super::{EntryId, Lru, Used, entry::Entry, ghosts::Ghosts, lru::merged};

/// The head start at first, and at most, as multiples of the tier's slots.
const HEAD_FIRST: f64 = 0.5;
const HEAD_MAX: f64 = 16.0;
/// How far one adaptation moves it.
const STEP: f64 = 0.02;
/// Weight of the common rate in the rate of a class, in evictions.
const PRIOR: f64 = 8.0;
/// The least share of new blocks that is admitted, and how far one adaptation moves it.
const SHARE_MIN: f64 = 1.0 / 16.0;
const SHARE_STEP: f64 = 0.1;
/// With at least so many evictions from the second list, their regrets decide; else those of the first.
const TELLING: f64 = 16.0;

/// Evicts the colder of the blocks used once and those used again, with a head start for the latter.
pub struct Rb {
    /// By whether it was used again.
    lists: [Lru; 2],
    slots: f64,
    /// By how many uses blocks that were used again are favored.
    head: f64,
    /// Decayed counts.
    regrets: [f64; 2],
    evictions: [f64; 2],
    ghosts: Ghosts,
    until_adapt: u32,
    admission: Option<Admission>,
}

/// The share of new blocks that is admitted, and the decayed counts that decide it.
struct Admission {
    share: f64,
    /// Second uses of blocks that were resident since their first use.
    hits: f64,
    /// For how many uses these blocks, and those that were evicted without a second use, occupied their slots.
    time: f64,
    /// Admitted blocks that may not be resident yet: their successors are admitted too.
    accepted: Ghosts,
}

/// Admitted blocks that are remembered for their successors.
const ACCEPTED_MAX: u32 = 4096;

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
            admission: None,
        }
    }

    /// The order of a tier that refuses new blocks while it thrashes.
    pub fn refusing(slots: u32) -> Self {
        let admission = Some(Admission { share: 1.0, hits: 0.0, time: 0.0, accepted: Ghosts::new(ACCEPTED_MAX) });
        Rb { admission, ..Rb::new(slots) }
    }

    /// So many slots of the tier are in use from now on. What it has learned scales with them.
    pub(super) fn resize(&mut self, slots: u32) {
        let slots = f64::from(slots);
        let share = if self.slots > 0.0 { self.head / self.slots } else { HEAD_FIRST };
        self.head = (share * slots).min(HEAD_MAX * slots);
        self.slots = slots;
        self.until_adapt = self.until_adapt.min(period(slots));
    }

    /// By how many uses blocks that were used again are favored.
    pub fn head(&self) -> f64 {
        self.head
    }

    /// The share of new blocks that is admitted while the tier is full.
    pub fn share(&self) -> f64 {
        self.admission.as_ref().map_or(1.0, |admission| admission.share)
    }

    /// Checks the lists, the counts and the ghosts. Returns how many entries are in the lists.
    pub(super) fn validate(&self, entries: &Slab<Entry>, tier: Tier) -> Result<usize, String> {
        let [once, again] = [false, true].map(|again| {
            self.lists[usize::from(again)].validate(entries, tier, &|entry| entry.used().again() == again)
        });
        let is_count = |count: f64| count.is_finite() && count >= 0.0;
        let Rb { head, slots, regrets, evictions, until_adapt, .. } = self;
        if !(0.0..=HEAD_MAX * slots).contains(head) {
            return Err(format!("a head start of {head} for {slots} slots"));
        }
        if !regrets.iter().chain(evictions).copied().all(is_count) || !(1..=period(*slots)).contains(until_adapt) {
            return Err(format!("regrets {regrets:?}, evictions {evictions:?}, {until_adapt} until the next look"));
        }
        if let Some(Admission { share, hits, time, accepted }) = &self.admission {
            if !(SHARE_MIN..=1.0).contains(share) || !is_count(*hits) || !is_count(*time) {
                return Err(format!("a share of {share}, {hits} hits in {time} uses"));
            }
            accepted.validate()?;
        }
        self.ghosts.validate()?;
        Ok(once? + again?)
    }

    fn count_regret(&mut self, again: bool, age: u32) {
        if f64::from(age) <= self.slots {
            self.regrets[usize::from(again)] += 1.0;
        }
    }

    /// Counts an eviction or a refusal.
    fn count(&mut self) {
        self.until_adapt -= 1;
        if self.until_adapt == 0 {
            self.adapt();
            self.until_adapt = period(self.slots);
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
        if let Some(Admission { share, hits, time, .. }) = &mut self.admission {
            let class = usize::from(evictions[1] >= TELLING);
            let slots = slots.max(1.0);
            let new = (*hits + 0.5) / (*time + slots);
            let old = 0.5 * (regrets[class] + 0.5) / ((evictions[class] + 1.0) * slots);
            *share = (*share * (SHARE_STEP * (new - old) / (new + old)).exp()).clamp(SHARE_MIN, 1.0);
            *hits *= decay;
            *time *= decay;
        }
        regrets.iter_mut().chain(evictions).for_each(|count| *count *= decay);
    }

    #[inline]
    pub(super) fn list_of(&mut self, used: Used) -> &mut Lru {
        &mut self.lists[usize::from(used.again())]
    }

    pub(super) fn victim(&mut self, entries: &mut Slab<Entry>, tier: Tier) -> Option<EntryId> {
        let [once, again] = self.lists.each_mut().map(|list| list.victim(entries, tier));
        let (Some(once), Some(again)) = (once, again) else { return once.or(again) };
        let [once_at, again_at] = [once, again].map(|id| entries[id.0 as usize].last_use);
        Some(if self.is_once_first(once_at, again_at) { once } else { again })
    }

    /// Whether a block that was used once, at this time, is evicted before one that was used again.
    fn is_once_first(&self, once_at: u64, again_at: u64) -> bool {
        once_at as f64 <= again_at as f64 + self.head
    }

    /// Whether a block with these uses is evicted before the other one.
    pub(super) fn is_before(&self, one: Used, other: Used) -> bool {
        match (one.again(), other.again()) {
            (false, true) => self.is_once_first(one.last, other.last),
            (true, false) => !self.is_once_first(other.last, one.last),
            _ => one.last < other.last,
        }
    }

    /// As [`Lru::coldest_first`], in the order of eviction as it is now.
    pub(super) fn coldest_first<'a>(
        &'a self,
        entries: &'a Slab<Entry>,
        tier: Tier,
    ) -> impl Iterator<Item = (u64, EntryId)> + 'a {
        let [once, again] = self.lists.each_ref().map(|list| list.coldest_first(entries, tier));
        merged(once, again, |once, again| self.is_once_first(once.0, again.0))
    }

    /// Allocates the memory that it will need; the error is the number of bytes that were refused.
    pub(super) fn try_reserve(&mut self) -> Result<(), usize> {
        self.ghosts.try_reserve()
    }

    /// The copy that [`victim`](Self::victim) named is evicted. [`remove`](Self::remove) follows.
    pub(super) fn evicted(&mut self, used: Used, now: u64) {
        self.evictions[usize::from(used.again())] += 1.0;
        if let Some(admission) = &mut self.admission
            && !used.again()
        {
            admission.time += now.saturating_sub(used.last) as f64;
        }
        self.count();
    }

    /// The evicted block is in no tier now: it is remembered, by the hash of its key. `at` is the low half of the clock
    /// at the eviction.
    pub(super) fn remember(&mut self, hash: u64, at: u32, uses: u8) {
        self.ghosts.push(hash, at, uses, false);
    }

    /// A block that was in no tier is used. Returns its uses if it was remembered; else 0.
    pub(super) fn returned(&mut self, hash: u64, now: u32) -> u8 {
        let Some(ghost) = self.ghosts.take(hash) else { return 0 };
        if !ghost.refused() {
            self.count_regret(ghost.uses() > 1, now.wrapping_sub(ghost.at));
        }
        // A remembered block was used.
        ghost.uses().max(1)
    }

    /// A block that was evicted at `at`, and is in another tier, is used.
    pub(super) fn returned_to(&mut self, at: u32, now: u32, uses: u8) {
        self.count_regret(uses > 1, now.wrapping_sub(at));
    }

    /// A resident block in its first use is used again, `after` uses later.
    #[inline]
    pub(super) fn reused(&mut self, after: u64) {
        if let Some(admission) = &mut self.admission {
            admission.hits += 1.0;
            admission.time += after as f64;
        }
    }

    /// A new block is admitted. It may not be resident yet when its successors in the chain arrive.
    pub(super) fn accepted(&mut self, hash: u64) {
        if let Some(admission) = &mut self.admission {
            admission.accepted.push(hash, 0, 0, false);
        }
    }

    /// True if a new block was admitted recently.
    pub(super) fn was_accepted(&self, hash: u64) -> bool {
        self.admission.as_ref().is_some_and(|admission| admission.accepted.contains(hash))
    }

    /// True if the tier, which is full, should not take a new block. `coin` is one random draw for it and its
    /// successors.
    pub(super) fn refuses(&self, coin: u64) -> bool {
        coin as f64 / 2f64.powi(64) > self.share()
    }

    /// A block was refused, which is a use. `at` is the low half of the clock.
    pub(super) fn refused(&mut self, hash: u64, at: u32) {
        if let Some(admission) = &mut self.admission {
            admission.accepted.take(hash);
        }
        let uses = self.returned(hash, at);
        self.ghosts.push(hash, at, uses + 1, true);
        self.count();
    }

    /// True if a block that is in no tier is remembered, so that this is not its first use.
    pub(super) fn remembers(&self, hash: u64) -> bool {
        self.ghosts.contains(hash)
    }
}

/// Evictions and refusals between two adaptations.
fn period(slots: f64) -> u32 {
    ((slots / 32.0) as u32).max(16)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tier that evicts blocks that are requested again at once, and admits others that never are.
    fn thrash(rb: &mut Rb, evictions: u32) {
        for now in 0..evictions {
            rb.evicted(Used { last: 0, uses: 2 }, u64::from(now));
            rb.returned_to(now, now, 2);
            rb.evicted(Used { last: u64::from(now), uses: 1 }, u64::from(now) + 1000);
        }
    }

    #[test]
    fn the_share_of_new_blocks_falls_while_what_they_displace_is_missed() {
        let mut rb = Rb::refusing(100);
        assert!(!rb.refuses(u64::MAX), "nothing is refused before it is known to thrash");
        thrash(&mut rb, 10_000);
        assert!((rb.share() - SHARE_MIN).abs() < 1e-9, "{}", rb.share());
        assert!(rb.refuses(u64::MAX) && rb.refuses(u64::MAX / 8) && !rb.refuses(u64::MAX / 32));
        for now in 0..10_000 {
            rb.reused(1);
            rb.evicted(Used { last: now, uses: 2 }, now);
        }
        assert!((rb.share() - 1.0).abs() < 1e-9, "{}", rb.share());
        assert_eq!(rb.validate(&Slab::new(), Tier::Host), Ok(0));
    }

    /// Of what comes back after more uses than there are slots, no slot would have brought a hit.
    #[test]
    fn slots_out_of_use_neither_keep_a_block_nor_make_its_eviction_a_regret() {
        let head_after = |slots| {
            let mut rb = Rb::new(1000);
            rb.resize(slots);
            for now in 0..1000 {
                rb.evicted(Used { last: 0, uses: 2 }, u64::from(now));
                rb.returned_to(now, now + 100, 2);
                rb.evicted(Used { last: 0, uses: 1 }, u64::from(now));
            }
            assert_eq!(rb.validate(&Slab::new(), Tier::Host), Ok(0));
            let head = rb.head() / f64::from(slots);
            rb.resize(0);
            assert!(rb.validate(&Slab::new(), Tier::Host) == Ok(0) && rb.head() == 0.0);
            rb.resize(16);
            assert_eq!(rb.head(), HEAD_FIRST * 16.0);
            head
        };
        assert!(head_after(1000) > HEAD_FIRST);
        assert_eq!(head_after(50), HEAD_FIRST);
    }

    #[test]
    fn without_the_setting_nothing_is_refused() {
        let mut rb = Rb::new(100);
        thrash(&mut rb, 10_000);
        assert!(!rb.refuses(u64::MAX));
    }
}
