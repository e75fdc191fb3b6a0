//! Compares the index with the model after each call.

use kvhoist::{Tier, internals::index::EntryId};

use super::{KEPT_MAX, KEYS, Pair, block_key, model::Copy};

impl Pair {
    /// Compares every answer of the index with the model, and checks its invariants.
    pub(super) fn compare(&mut self) {
        self.marks();
        for tier in Tier::ALL {
            self.compare_lists(tier);
        }
        let Pair { index, model, .. } = self;
        index.validate().unwrap_or_else(|what| panic!("{what}"));
        assert_eq!((index.len(), index.is_empty(), index.clock()), (model.len(), model.len() == 0, model.clock()));
        for key in 0..KEYS {
            assert_eq!(index.find(&block_key(key)), model.live(key).map(|at| model.id(at)), "key {key}");
        }
        for (at, entity) in model.entities() {
            let id = model.id(at);
            assert_eq!(index.key(id), block_key(entity.key));
            assert_eq!(index.parent_key(id), model.parent_key(at).map(block_key), "parent of {}", entity.key);
            assert_eq!((index.hits(id), index.last_use(id)), (entity.hits, entity.last_use));
            assert_eq!(index.used(id).uses, entity.uses, "uses of {}", entity.key);
            assert_eq!(index.best_tier(id), model.best_tier(at).filter(|_| !entity.removed));
            for tier in Tier::ALL {
                let (slot, pins, dirty) = match entity.copies[tier as usize] {
                    Copy::Full { slot, pins, dirty } => (Some(slot).filter(|_| !entity.removed), pins, dirty),
                    _ => (None, 0, false),
                };
                let found = (index.slot(id, tier), index.pins(id, tier), index.is_dirty(id, tier));
                assert_eq!(found, (slot, pins, dirty), "{tier} of {}", entity.key);
                assert_eq!(index.is_filling(id, tier), entity.copies[tier as usize] == Copy::Filling);
            }
        }
    }

    fn compare_lists(&mut self, tier: Tier) {
        let Pair { index, model, .. } = self;
        assert_eq!(index.resident(tier), model.full(tier).count());
        let (evictable, demotable) = (model.evictable(tier), model.demotable(tier));
        assert_eq!(index.evictable(tier), evictable.len(), "{tier}");
        // Where no leaf may go, or only kept ones, the search leaves marks: it is made by `Op::Evict`, and not after
        // every operation.
        let has_leaf = evictable.iter().any(|at| !model.entity(*at).kept);
        let victim = has_leaf.then(|| index.victim(tier)).flatten();
        self.coldest(self.index.demotable(tier).next(), &demotable);
        if has_leaf {
            self.check_leaf(tier, victim, &evictable);
        }
    }

    /// The choice is the coldest of what is released; then the policy's, or the coldest of what is kept where more than
    /// may be is kept, and the policy would have that go before.
    fn check_leaf(&self, tier: Tier, victim: Option<EntryId>, among: &[usize]) {
        let (released, others): (Vec<usize>, Vec<usize>) =
            among.iter().partition(|&&at| self.model.entity(at).released);
        if !released.is_empty() {
            return self.coldest(victim, &released);
        }
        let (kept, usual): (Vec<usize>, Vec<usize>) = others.iter().partition(|&&at| self.model.entity(at).kept);
        let usual = match self.model.counts_requests() {
            true => self.colder_front(tier, &usual),
            false => usual,
        };
        let last_use = |at: &usize| self.model.entity(*at).last_use;
        let front = usual.iter().copied().min_by_key(last_use).expect("one is not kept");
        let is_before = |at: &usize| self.is_before(tier, *at, front);
        let coldest: Vec<usize> =
            kept.iter().copied().filter(|at| kept.iter().all(|of| last_use(at) <= last_use(of))).collect();
        // Of several that are as cold any may be the one.
        let may_go = self.index.kept(tier) > KEPT_MAX && coldest.iter().any(is_before);
        let must_go = may_go && coldest.iter().all(is_before);
        let choice = victim.map(|id| self.model.by_id(id)).filter(|at| coldest.contains(at));
        match choice {
            Some(at) => assert!(may_go && is_before(&at), "{tier}: a kept block goes"),
            None => {
                assert!(!must_go, "{tier}: too much is kept");
                self.coldest(victim, &usual);
            }
        }
    }

    /// Whether the policy has the first go before the second.
    fn is_before(&self, tier: Tier, one: usize, other: usize) -> bool {
        let of = |at| {
            let entity = self.model.entity(at);
            let head = self.index.head(tier).filter(|_| entity.uses > 1);
            (entity.last_use as f64 + head.unwrap_or(0.0), head.is_some())
        };
        of(one) < of(other)
    }

    /// The class whose coldest goes: it is colder than the other one's, as far as that one is favored.
    fn colder_front(&self, tier: Tier, among: &[usize]) -> Vec<usize> {
        let (again, once): (Vec<usize>, Vec<usize>) = among.iter().partition(|&&at| self.model.entity(at).uses > 1);
        let head = self.index.head(tier).expect("it is RB");
        let last_use = |at: &usize| self.model.entity(*at).last_use as f64;
        let coldest = |of: &[usize]| of.iter().map(last_use).min_by(f64::total_cmp);
        let goes_once = match (coldest(&once), coldest(&again)) {
            (Some(once), Some(again)) => once <= again + head,
            (once, _) => once.is_some(),
        };
        if goes_once { once } else { again }
    }

    /// Where no leaf may go but kept ones, the choice is the coldest of what is above held copies, then of kept leaves,
    /// which go first where more than may be is kept, then of what is kept above held copies.
    pub(super) fn check_last_resort(&self, tier: Tier, victim: Option<EntryId>) {
        let (kept, others): (Vec<usize>, Vec<usize>) =
            self.model.last_resorts(tier).iter().partition(|&&at| self.model.entity(at).kept);
        let leaves = self.model.evictable(tier);
        let order = if self.index.kept(tier) > KEPT_MAX { [leaves, others, kept] } else { [others, leaves, kept] };
        let among = order.into_iter().find(|of| !of.is_empty()).unwrap_or_default();
        self.coldest(victim, &among);
    }

    /// The choice is among those that may be chosen, and none of them was used before it.
    pub(super) fn coldest(&self, choice: Option<EntryId>, among: &[usize]) {
        let last_use = |at: &usize| self.model.entity(*at).last_use;
        let choice = choice.map(|id| self.model.by_id(id));
        assert_eq!(choice.as_ref().map(last_use), among.iter().map(last_use).min());
        assert!(choice.is_none_or(|at| among.contains(&at)));
    }
}
