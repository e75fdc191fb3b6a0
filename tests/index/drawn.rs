//! Drawn operations on the index and on the model; every answer is compared.

use kvhoist::{
    BlockKey, Tier,
    internals::index::{Index, Lru, Policy, Rb, Used},
};

use crate::{
    common::{self, Rng, key},
    matched,
    model::{KEPT_MAX, Model, chain_to, parent_of},
};

/// Slots of a tier whose policy counts requests: few, so that it forgets evictions.
const SLOTS: u32 = 6;

/// Makes a tier's policy.
type MakePolicy = fn() -> Policy;

pub const POLICIES: [(&str, MakePolicy); 3] = [
    ("LRU", || Policy::Lru(Lru::new())),
    ("RB", || Policy::Rb(Box::new(Rb::new(SLOTS)))),
    ("RB that may refuse", || Policy::Rb(Box::new(Rb::refusing(SLOTS)))),
];

/// An index with a policy in every tier, and its model.
pub fn index(seed: u64, policy: MakePolicy) -> (Index, Model) {
    let mut index = Index::with_policies(seed, |_| policy());
    Tier::ALL.into_iter().for_each(|tier| index.limit_kept(tier, KEPT_MAX));
    let slots = matches!(policy(), Policy::Rb(_)).then_some(SLOTS);
    (index, Model::new(slots))
}

/// One random operation on both; every answer is compared.
pub fn step(rng: &mut Rng, index: &mut Index, model: &mut Model) {
    let n = rng.below(24);
    let tier = Tier::ALL[rng.below(3) as usize];
    let at = tier as usize;
    let id = index.find(&key(n)).filter(|id| index.best_tier(*id).is_some());
    assert_eq!(id.is_some(), model.best(n).is_some(), "key {n}");
    match (rng.below(13), id) {
        (0 | 1, _) => fill(n, tier, index, model),
        (2, Some(id)) => {
            let pinned = index.pin(id, tier);
            let copy = &mut model.known_mut(n).copies[at];
            assert_eq!(pinned, copy.map(|(slot, ..)| slot));
            if let Some((_, pins, _)) = copy {
                *pins += 1;
            }
        }
        (3, Some(id)) if matches!(model.known[&n].copies[at], Some((_, 1.., _))) => {
            let freed = index.unpin(id, tier);
            if let Some((_, pins, _)) = &mut model.known_mut(n).copies[at] {
                *pins -= 1;
            }
            assert_eq!(freed, None);
        }
        (4, Some(id)) => {
            index.touch(id);
            model.end_release(n);
            model.touch(n);
        }
        (5, Some(id)) => {
            let dirty = rng.below(2) == 0;
            index.set_dirty(id, tier, dirty);
            if let Some((.., mark)) = &mut model.known_mut(n).copies[at] {
                *mark = dirty;
            }
        }
        (6 | 7, _) => evict(tier, index, model),
        (8, Some(id)) if model.known[&n].copies.iter().flatten().all(|(_, pins, _)| *pins == 0) => {
            let freed = index.remove(id);
            let known = model.known_mut(n);
            assert_eq!(freed, known.copies.map(|copy| copy.map(|(slot, ..)| slot)));
            known.clear();
            model.forget(n);
        }
        (12, _) => {
            let blocks = rng.below(6) as usize;
            index.begin_request(blocks);
            model.begin_request(blocks);
        }
        (hint, id) => hint_step(hint, n, id.is_some(), rng, index, model),
    }
}

fn hint_step(hint: u64, n: u64, is_resident: bool, rng: &mut Rng, index: &mut Index, model: &mut Model) {
    match hint {
        9 => {
            let chain = chain_to(n);
            let keys: Vec<_> = chain.iter().copied().map(key).collect();
            assert_eq!(index.release(&keys, model.now), model.release(&chain), "the chain to {n}");
        }
        10 if is_resident => {
            let until = model.now + rng.below(20);
            let id = index.find(&key(n)).expect("resident");
            assert!(index.keep(id, until));
            _ = std::iter::successors(Some(id), |&id| index.keep_before(id, until)).last();
            model.keep(n, until);
        }
        11 => {
            model.now += rng.below(8);
            index.expire(model.now);
            let times = model.known.values_mut().map(|known| &mut known.kept);
            times.filter(|until| until.is_some_and(|until| until <= model.now)).for_each(|until| *until = None);
        }
        _ => {}
    }
}

fn fill(n: u64, tier: Tier, index: &mut Index, model: &mut Model) {
    let parent = parent_of(n);
    let id = index.insert(key(n), parent.map(key));
    if let Some(parent) = parent.filter(|_| !model.is_resident(n)) {
        // It is linked now.
        let is_named = !model.children_anywhere(parent).is_empty();
        model.known.entry(parent).or_default().forked |= is_named;
        model.end_release(parent);
    }
    let known = model.known.entry(n).or_default();
    known.parent = parent;
    let free = known.copies[tier as usize].is_none();
    assert_eq!(index.begin_fill(id, tier), free);
    if !free {
        return;
    }
    assert!(!index.begin_fill(id, tier), "one fill at a time");
    model.next_slot += 1;
    let is_new = known.uses == 0;
    known.fill(tier, model.next_slot);
    if is_new {
        model.touch(n);
    }
    assert!(index.complete_fill(id, tier, model.next_slot));
}

pub fn evict(tier: Tier, index: &mut Index, model: &mut Model) {
    let victim = index.victim(tier);
    let expected = model.victim(tier, index.head(tier).unwrap_or(0.0));
    assert_eq!(victim.map(|id| index.key(id)), expected.map(key), "the victim of {tier}, expected {expected:?}");
    if let (Some(id), Some(n)) = (victim, expected) {
        assert_eq!(Some(index.evict(id, tier)), model.evict(n, tier));
    }
}

#[test]
fn every_answer_is_the_models() {
    let seed = common::seed();
    for run in 0..90 {
        let mut rng = Rng(seed.wrapping_add(run));
        let (name, policy) = POLICIES[(run % 3) as usize];
        let (mut index, mut model) = index(seed, policy);
        for _ in 0..400 {
            step(&mut rng, &mut index, &mut model);
            index.validate().unwrap_or_else(|what| panic!("run {run}, {name}: {what}"));
            assert_eq!(index.clock(), model.clock, "run {run}, {name}");
            for tier in Tier::ALL {
                let resident = model.known.values().filter(|known| known.copies[tier as usize].is_some()).count();
                assert_eq!(index.resident(tier), resident);
            }
            for (&n, known) in model.known.iter().filter(|(n, _)| model.is_resident(**n)) {
                let id = index.find(&key(n)).expect("resident");
                let (released, kept) = (index.is_released(id), index.is_kept(id));
                assert_eq!((released, kept), (known.released, known.kept.is_some()), "run {run}, {name}: {n}");
                let used = Used { last: known.last_use, uses: known.uses };
                assert_eq!(index.used(id), used, "run {run}, {name}: {n}");
            }
        }
        let chain: Vec<BlockKey> = (0..4).map(key).collect();
        let leading = (0..4).take_while(|n| model.best(*n).is_some()).count();
        assert_eq!(matched(&index, &chain), leading);
    }
}
