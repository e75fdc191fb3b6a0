//! Uses: once a request, and remembered.

use kvhoist::{
    Tier,
    internals::index::{EntryId, Index, Policy, Rb},
};

use crate::{common::key, full};

/// An index in which every tier of four slots is RB-LRU.
fn counting() -> Index {
    Index::with_policies(1, |_| Policy::Rb(Box::new(Rb::new(4))))
}

fn uses(index: &Index, n: u64) -> u8 {
    index.used(index.find(&key(n)).expect("it is here")).uses
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
