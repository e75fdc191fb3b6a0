//! Chains that are stored, read, evicted and removed.

use kvhoist::{
    Tier,
    internals::index::{EntryId, Index, Lru, Policy, Rb},
};

use crate::{
    common::{self, Rng, key},
    full, matched,
};

#[test]
fn a_removed_block_lives_on_for_its_readers_only() {
    let mut index = Index::new(1);
    let old = index.insert(key(1), None);
    assert!(index.begin_fill(old, Tier::Host) && index.complete_fill(old, Tier::Host, 7));
    assert_eq!(index.pin(old, Tier::Host), Some(7));
    assert_eq!(index.remove(old), [None; 3], "the slot is a reader's");
    assert_eq!(index.find(&key(1)), None);
    let new = index.insert(key(1), None);
    assert_ne!(new, old);
    assert!(index.begin_fill(new, Tier::Host) && index.complete_fill(new, Tier::Host, 8));
    assert_eq!(index.unpin(old, Tier::Host), Some(7));
    assert_eq!(index.slot(new, Tier::Host), Some(8));
    index.validate().expect("valid");
}

#[test]
fn a_copy_with_readers_is_given_up_by_the_last_of_them() {
    let mut index = Index::new(1);
    let id = full(&mut index, 1, None, Tier::Host);
    let slot = index.pin(id, Tier::Host).expect("resident");
    assert_eq!(index.pin(id, Tier::Host), Some(slot));
    assert_eq!(index.drop_copy(id, Tier::Host), None, "the slot is its readers'");
    assert_eq!(index.remove(id), [None; 3], "the slot is its readers'");
    assert_eq!(index.pin(id, Tier::Host), None, "it gets no more readers");
    assert!(!index.keep(id, 1), "and no hint");
    assert_eq!(index.unpin(id, Tier::Host), None, "the slot is the other reader's");
    assert_eq!(index.unpin(id, Tier::Host), Some(slot));
    assert!(index.is_empty());
    index.validate().expect("valid");
}

#[test]
#[should_panic(expected = "may not be evicted")]
fn a_dirty_copy_is_not_evicted() {
    let mut index = Index::new(1);
    let id = full(&mut index, 1, None, Tier::Host);
    index.set_dirty(id, Tier::Host, true);
    index.evict(id, Tier::Host);
}

#[test]
fn a_fill_of_a_removed_block_is_refused() {
    let mut index = Index::new(1);
    let id = index.insert(key(1), Some(key(0)));
    assert!(index.begin_fill(id, Tier::Disk));
    assert_eq!(index.remove(id), [None; 3]);
    assert!(!index.complete_fill(id, Tier::Disk, 3));
    assert!(index.is_empty(), "nothing is left of it, nor of the parent that only it named");
    index.validate().expect("valid");
}

#[test]
fn a_pinned_tail_holds_back_itself_alone_and_its_chain_goes_from_its_end() {
    let mut index = Index::new(1);
    let ids: Vec<_> = (0..8).map(|n| full(&mut index, n, n.checked_sub(1), Tier::Host)).collect();
    index.pin(ids[7], Tier::Host).expect("resident");
    index.touch_chain(&ids);
    for n in (0..7).rev() {
        let victim = index.victim(Tier::Host).expect("only the tail is held");
        assert_eq!(index.key(victim), key(n));
        index.evict(victim, Tier::Host);
        assert_eq!(matched(&index, &(0..8).map(key).collect::<Vec<_>>()), n as usize, "what is left is a prefix");
        index.validate().unwrap_or_else(|what| panic!("{what}"));
    }
    assert_eq!(index.victim(Tier::Host), None, "the tail is held");
    assert_eq!(index.unpin(ids[7], Tier::Host), None);
    assert_eq!(index.victim(Tier::Host), Some(ids[7]));
}

#[test]
fn a_free_leaf_goes_before_any_block_above_a_held_one() {
    let mut index = Index::new(1);
    let cold: Vec<_> = (0..3).map(|n| full(&mut index, n, n.checked_sub(1), Tier::Host)).collect();
    let leaf = full(&mut index, 9, None, Tier::Host);
    index.set_dirty(cold[2], Tier::Host, true);
    assert_eq!(index.victim(Tier::Host), Some(leaf), "although it is the most recent");
    index.evict(leaf, Tier::Host);
    assert_eq!(index.victim(Tier::Host), Some(cold[1]));
    // With the copy below held, the next one up becomes the victim.
    assert!(index.begin_fill(cold[1], Tier::Device));
    assert_eq!(index.victim(Tier::Host), Some(cold[0]), "a fill holds the copy that it may read from");
}

#[test]
fn blocks_that_come_and_go_leave_no_ghosts_behind() {
    let mut index = Index::new(1);
    full(&mut index, 0, None, Tier::Host);
    for n in 1..1000 {
        full(&mut index, n, Some(n - 1), Tier::Host);
        let above = index.find(&key(n - 1)).expect("it is named");
        assert_eq!(index.remove(above)[Tier::Host as usize], Some(n as u32 - 1));
        assert_eq!(index.len(), 2, "the block, and the one that it names");
        index.validate().unwrap_or_else(|what| panic!("{what}"));
    }
    let last = index.find(&key(999)).expect("it is resident");
    index.remove(last);
    assert!(index.is_empty());
}

/// However chains are stored, evicted and removed, no more ghosts are kept than blocks.
#[test]
fn there_are_never_more_ghosts_than_blocks() {
    let seed = common::seed();
    let mut rng = Rng(seed);
    let mut index = Index::new(seed);
    for n in 0..20_000u64 {
        let chain = rng.below(4) * 100_000;
        full(&mut index, chain + n, n.checked_sub(1).map(|n| chain + n), Tier::Disk);
        while index.resident(Tier::Disk) > 16 {
            let at = chain + n - rng.below(16.min(n));
            let at = index.find(&key(at)).filter(|id| index.best_tier(*id).is_some());
            let victim = at.or_else(|| index.victim(Tier::Disk)).expect("none is held");
            index.remove(victim);
        }
        assert!(index.len() <= 2 * index.resident(Tier::Disk), "{} entries after {n} blocks", index.len());
    }
    index.validate().unwrap_or_else(|what| panic!("{what}"));
}

#[test]
fn absurd_parents_and_long_chains_are_survived() {
    let mut index = Index::new(1);
    let mut fill = |n: u64, parent: Option<u64>| -> EntryId {
        let id = index.insert(key(n), parent.map(key));
        if index.begin_fill(id, Tier::Disk) {
            assert!(index.complete_fill(id, Tier::Disk, n as u32));
        }
        id
    };
    fill(1, Some(1));
    fill(2, Some(3));
    fill(3, Some(2));
    let length = 100_000;
    for n in 10..10 + length {
        fill(n, Some(n + 1));
    }
    index.validate().expect("no rings");
    while let Some(id) = index.victim(Tier::Disk) {
        index.evict(id, Tier::Disk);
    }
    assert_eq!(index.resident(Tier::Disk), 0);
    assert!(index.is_empty(), "ghosts go with the last that names them");
}

/// Chains whose blocks are used now and then: what is said to be evicted next is, in that order.
#[test]
fn the_next_victims_are_evicted_next() {
    let policies: [fn() -> Policy; 2] = [|| Policy::Lru(Lru::new()), || Policy::Rb(Box::new(Rb::new(4096)))];
    for policy in policies {
        let mut index = Index::with_policies(1, |_| policy());
        let mut rng = Rng(common::seed());
        for n in 0..600_u64 {
            let parent = (!n.is_multiple_of(12)).then(|| n - 1);
            full(&mut index, n, parent, Tier::Disk);
        }
        for _ in 0..60 {
            let chain = rng.below(50) * 12;
            index.begin_request(12);
            let ids: Vec<_> = (chain..chain + 12).map(|n| index.find(&key(n)).expect("resident")).collect();
            index.touch_chain(&ids);
        }
        let [kept, pinned] = [11, 23].map(|n| index.find(&key(n)).expect("resident"));
        index.limit_kept(Tier::Disk, 16);
        assert!(index.keep(kept, 1_000_000));
        index.pin(pinned, Tier::Disk).expect("resident");
        let next = index.next_victims(Tier::Disk, 200);
        assert_eq!(next.len(), 200);
        assert!(!next.contains(&key(11)) && !next.contains(&key(23)));
        for (at, expected) in next.into_iter().enumerate() {
            let victim = index.victim(Tier::Disk).expect("most may be evicted");
            assert_eq!(index.key(victim), expected, "victim {at}");
            index.evict(victim, Tier::Disk);
        }
        assert!(
            index.next_victims(Tier::Disk, 10_000).len() <= 600 - 200 - 2,
            "neither the kept one nor the pinned one"
        );
    }
}
