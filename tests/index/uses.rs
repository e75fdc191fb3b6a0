//! Uses: by calls, once a request, and remembered.

use kvhoist::{
    BlockKey, Tier,
    internals::index::{EntryId, Index, Policy, Rb},
};

use crate::{common::key, drawn::POLICIES, full};

/// An index in which every tier of four slots is RB-LRU.
fn counting() -> Index {
    Index::with_policies(1, |_| Policy::Rb(Box::new(Rb::new(4))))
}

fn uses(index: &Index, n: u64) -> u8 {
    index.used(index.find(&key(n)).expect("it is here")).uses
}

/// The order in which `tier` evicts what it may.
fn evicted(index: &mut Index, tier: Tier) -> Vec<BlockKey> {
    let victims = std::iter::from_fn(|| {
        let id = index.victim(tier)?;
        let victim = index.key(id);
        index.evict(id, tier);
        index.validate().unwrap_or_else(|what| panic!("{what}"));
        Some(victim)
    });
    victims.collect()
}

/// A read from disk: a use by its call, a copy in host memory, and the ends of two pins.
#[test]
fn the_ends_of_pins_and_fills_leave_a_block_where_its_last_use_has_put_it() {
    for (name, policy) in POLICIES {
        let mut index = Index::with_policies(1, |_| policy());
        let ids: Vec<_> = (0..4).map(|n| full(&mut index, n, None, Tier::Disk)).collect();
        for (at, &id) in ids.iter().enumerate() {
            index.touch(id);
            index.pin(id, Tier::Disk).expect("resident");
            assert!(index.begin_fill(id, Tier::Host), "{name}: block {at}");
        }
        let used: Vec<_> = ids.iter().map(|&id| index.used(id)).collect();
        // The movements end in another order than that of the uses.
        for at in [2, 0, 3, 1] {
            assert!(index.complete_fill_pinned(ids[at], Tier::Host, at as u32));
            assert_eq!(index.unpin(ids[at], Tier::Disk), None);
        }
        for at in [3, 1, 0, 2] {
            assert_eq!(index.unpin(ids[at], Tier::Host), None);
        }
        assert_eq!((index.clock(), ids.iter().map(|&id| index.used(id)).collect()), (8, used), "{name}");
        let in_order: Vec<_> = (0..4).map(key).collect();
        assert_eq!(evicted(&mut index, Tier::Host), in_order, "{name}");
        assert_eq!(evicted(&mut index, Tier::Disk), in_order, "{name}");
    }
}

/// The search for a victim takes what is pinned out of the order; it comes back by its last use, not by its last pin.
#[test]
fn a_copy_that_was_passed_over_while_it_was_pinned_is_evicted_by_its_last_use() {
    for (name, policy) in POLICIES {
        let mut index = Index::with_policies(1, |_| policy());
        // So many that it comes after more than an order is searched for the place of a late arrival.
        let ids: Vec<_> = (0..20).map(|n| full(&mut index, n, None, Tier::Host)).collect();
        for at in [0, 2] {
            index.pin(ids[at], Tier::Host).expect("resident");
        }
        assert_eq!(index.victim(Tier::Host), Some(ids[1]), "{name}: the coldest is pinned");
        index.evict(ids[1], Tier::Host);
        assert_eq!(index.victim(Tier::Host), Some(ids[3]), "{name}: both are pinned");
        for at in [2, 0] {
            assert_eq!(index.unpin(ids[at], Tier::Host), None);
        }
        let left: Vec<_> = (0..20).filter(|n| *n != 1).map(key).collect();
        assert_eq!(evicted(&mut index, Tier::Host), left, "{name}");
    }
}

/// A ghost that calls have named, and that was used before it left: what is stored is as recent as its store.
#[test]
fn a_block_that_is_stored_again_is_the_most_recent() {
    for (name, policy) in POLICIES {
        let mut index = Index::with_policies(1, |_| policy());
        let parent = full(&mut index, 0, None, Tier::Disk);
        full(&mut index, 1, Some(0), Tier::Disk);
        _ = index.remove(parent);
        assert_eq!(index.find(&key(0)), Some(parent), "its child names it");
        index.touch(parent);
        full(&mut index, 2, None, Tier::Disk);
        let before = index.clock();
        assert_eq!(full(&mut index, 0, None, Tier::Disk), parent);
        assert_eq!((index.clock(), index.last_use(parent), uses(&index, 0)), (before + 1, before + 1, 1), "{name}");
        assert_eq!(evicted(&mut index, Tier::Disk), [1, 2, 0].map(key), "{name}");
    }
}

#[test]
fn an_announced_use_counts_once_however_many_requests_begin_before_it() {
    let mut index = counting();
    let id = full(&mut index, 0, None, Tier::Disk);
    assert_eq!(uses(&index, 0), 1);
    index.announce(id);
    index.announce(id);
    index.begin_request(1);
    index.touch(id);
    assert_eq!(uses(&index, 0), 2, "it was prefetched, twice, and then fetched");
    index.begin_request(1);
    index.touch(id);
    assert_eq!(uses(&index, 0), 3);
}

/// A prefetch whose caller never came, and one much later.
#[test]
fn a_block_that_is_announced_again_or_fetched_is_recent_and_its_use_counts_once() {
    let mut index = counting();
    let ids: Vec<_> = (0..3).map(|n| full(&mut index, n, None, Tier::Disk)).collect();
    ids.iter().for_each(|id| index.announce(*id));
    index.begin_request(1);
    index.announce(ids[0]);
    assert_eq!(uses(&index, 0), 2);
    index.begin_request(1);
    index.touch(ids[1]);
    assert_eq!(uses(&index, 1), 2);
    assert_eq!(evicted(&mut index, Tier::Disk), [2, 0, 1].map(key), "the one that nobody asked for since");
}

/// How many evictions from host memory the policy there regrets, of a block that comes back after `away` has happened
/// to its copies. It is seen in the head start, which sixteen evictions move: up where those of what was used again are
/// regretted, down where those of what was used once are.
fn head_after(away: impl Fn(&mut Index, EntryId)) -> f64 {
    let mut index = Index::with_policies(1, |_| Policy::Rb(Box::new(Rb::new(64))));
    for n in 0..16 {
        let id = full(&mut index, n, None, Tier::Disk);
        assert!(index.begin_fill(id, Tier::Host) && index.complete_fill(id, Tier::Host, n as u32));
        assert_eq!(index.victim(Tier::Host), Some(id));
        let before = index.clock();
        index.evict(id, Tier::Host);
        away(&mut index, id);
        let id = index.insert(key(n), None);
        if index.best_tier(id).is_none() {
            assert!(index.begin_fill(id, Tier::Disk) && index.complete_fill(id, Tier::Disk, n as u32));
        } else {
            index.touch(id);
        }
        assert_eq!(index.clock(), before + 1, "one use");
        index.validate().unwrap_or_else(|what| panic!("{what}"));
    }
    index.head(Tier::Host).expect("it is RB")
}

#[test]
fn a_block_that_host_memory_evicted_is_regretted_whatever_became_of_its_other_copies() {
    let missed = head_after(|_, _| ());
    assert!(missed < 32.0, "evictions of what was used once are regretted: {missed}");
    let also_from_disk = head_after(|index, id| _ = index.evict(id, Tier::Disk));
    assert!((also_from_disk - missed).abs() < 1e-9, "evicted from disk as well: {also_from_disk}, {missed}");
    let failed_read = head_after(|index, id| {
        assert!(index.begin_fill(id, Tier::Host));
        index.abort_fill(id, Tier::Host);
    });
    assert!((failed_read - missed).abs() < 1e-9, "a read of it failed: {failed_read}, {missed}");
    let removed = head_after(|index, id| _ = index.remove(id));
    assert!(removed >= 32.0, "what was removed is not missed: {removed}");
}

#[test]
fn uses_of_blocks_that_were_used_before_are_noted_and_later_ones_leave_room_for_second_ones() {
    let mut index = counting();
    let ids: Vec<_> = (0..3).map(|n| full(&mut index, n, None, Tier::Disk)).collect();
    index.touch(ids[0]);
    assert_eq!(index.take_reused(), [], "nobody asked");
    index.note_reused();
    [0, 0, 1].into_iter().for_each(|at| index.touch(ids[at]));
    assert_eq!(index.take_reused(), [0, 0, 1].map(key));
    (0..1 << 15).for_each(|_| index.touch(ids[0]));
    index.touch(ids[2]);
    let noted = index.take_reused();
    assert_eq!((noted.len(), noted.last()), ((1 << 13) + 1, Some(&key(2))));
}
