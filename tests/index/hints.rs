//! Hints against the order of eviction: what goes first, and what last.

use kvhoist::{
    Tier,
    internals::index::{Index, Policy, Rb},
};

use crate::{common::key, full};

const TIER: Tier = Tier::Host;

/// A hint that is beyond the limit changes nothing: the policy keeps what was used again longer, whoever kept it.
#[test]
fn a_kept_block_beyond_the_limit_goes_no_sooner_than_the_policy_would_have_it_go() {
    for is_kept in [false, true] {
        let mut index = Index::with_policies(1, |_| Policy::Rb(Box::new(Rb::new(64))));
        index.limit_kept(TIER, 0);
        let again = full(&mut index, 0, None, TIER);
        index.touch(again);
        let once = full(&mut index, 1, None, TIER);
        assert!(!is_kept || index.keep(again, 1));
        assert_eq!(index.victim(TIER), Some(once), "kept: {is_kept}");
    }
    let mut index = Index::with_policies(1, |_| Policy::Rb(Box::new(Rb::new(64))));
    index.limit_kept(TIER, 0);
    let once = full(&mut index, 0, None, TIER);
    full(&mut index, 1, None, TIER);
    assert!(index.keep(once, 1));
    assert_eq!(index.victim(TIER), Some(once), "it competes with the others");
}

#[test]
fn a_released_leaf_behind_a_spared_one_goes_before_what_is_not_released() {
    let mut index = Index::new(1);
    let [other, dirty, clean] = [0, 1, 2].map(|n| full(&mut index, n, None, TIER));
    index.set_dirty(dirty, TIER, true);
    assert_eq!(index.release(&[key(1)], 0) + index.release(&[key(2)], 0), 2);
    assert_eq!(index.victim(TIER), Some(dirty), "the coldest");
    assert_eq!(index.victim_unless(TIER, true), Some(clean));
    index.evict(clean, TIER);
    assert_eq!(index.victim_unless(TIER, true), Some(other));
}

/// Chains of which only the ends are held, and a kept block.
#[test]
fn above_held_copies_the_coldest_goes_and_what_is_kept_goes_last() {
    let mut index = Index::new(1);
    index.limit_kept(TIER, 2);
    let chains: Vec<_> = (0..4)
        .map(|n| [2 * n, 2 * n + 1].map(|at| full(&mut index, at, at.checked_sub(1).filter(|_| at % 2 == 1), TIER)))
        .collect();
    let leaf = full(&mut index, 8, None, TIER);
    for chain in &chains {
        index.pin(chain[1], TIER).expect("resident");
    }
    for at in [2, 0, 1] {
        index.touch(chains[at][0]);
    }
    assert!(index.keep(leaf, 1) && index.keep(chains[3][0], 1));
    let mut evicted = Vec::new();
    while let Some(victim) = index.victim(TIER) {
        evicted.push(victim);
        index.evict(victim, TIER);
        index.validate().unwrap_or_else(|what| panic!("{what}"));
    }
    assert_eq!(evicted, [chains[2][0], chains[0][0], chains[1][0], leaf, chains[3][0]]);
}

#[test]
fn a_kept_leaf_beyond_the_limit_goes_before_what_is_above_held_copies() {
    let mut index = Index::new(1);
    index.limit_kept(TIER, 0);
    let above = full(&mut index, 0, None, TIER);
    let held = full(&mut index, 1, Some(0), TIER);
    let leaf = full(&mut index, 2, None, TIER);
    index.pin(held, TIER).expect("resident");
    assert!(index.keep(leaf, 1));
    assert_eq!(index.victim(TIER), Some(leaf), "as if it were not kept");
    index.evict(leaf, TIER);
    assert_eq!(index.victim(TIER), Some(above));
}
