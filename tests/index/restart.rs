//! What a restart finds.

use kvhoist::{
    Tier,
    internals::index::{EntryId, Index, Used},
};

use crate::{
    common::{self, Rng, key},
    drawn::{POLICIES, evict, index, step},
    model::parent_of,
};

/// What a restart finds comes in the order of slots, with suffixes before prefixes and the other way round; evicted
/// from then on it is in the order of last use, leaves first, mixed with what was used since.
#[test]
fn what_was_restored_in_any_order_is_evicted_like_the_model() {
    let seed = common::seed();
    for run in 0..60 {
        let mut rng = Rng(seed.wrapping_add(run));
        let (name, policy) = POLICIES[(run % 3) as usize];
        let (mut index, mut model) = index(seed, policy);
        let mut order: Vec<u64> = (0..24).collect();
        (0..order.len()).for_each(|i| order.swap(i, rng.below(24) as usize));
        for (slot, n) in (0..20).zip(order) {
            let parent = parent_of(n);
            if let Some(parent) = parent {
                let is_named = !model.children_anywhere(parent).is_empty();
                model.known.entry(parent).or_default().forked |= is_named;
            }
            // Distinct but for a few, as a crash leaves them.
            let last_use = 1 + rng.below(1 << 40) * 32 + n;
            let uses = 1 + rng.below(3) as u8;
            let used = Used { last: last_use, uses };
            let id = index.restore(key(n), parent.map(key), Tier::Disk, slot, used).expect("not there yet");
            assert_eq!(index.restore(key(n), parent.map(key), Tier::Disk, 99, used), Err(id));
            let known = model.known.entry(n).or_default();
            (known.parent, known.last_use, known.uses) = (parent, last_use, uses);
            known.fill(Tier::Disk, slot);
            model.clock = model.clock.max(last_use);
        }
        assert_eq!(index.victim(Tier::Disk), None, "not before the end");
        index.restored(Tier::Disk);
        index.validate().unwrap_or_else(|what| panic!("run {run}, {name}: {what}"));
        model.next_slot = 100;
        for _ in 0..rng.below(60) {
            step(&mut rng, &mut index, &mut model);
            index.validate().unwrap_or_else(|what| panic!("run {run}, {name}: {what}"));
        }
        while index.victim(Tier::Disk).is_some() {
            evict(Tier::Disk, &mut index, &mut model);
        }
        assert_eq!(model.victim(Tier::Disk, 0.0), None, "run {run}, {name}");
    }
}

/// A record of block `n`, in the slot of its number.
fn restore(index: &mut Index, n: u64, parent: Option<u64>) -> Result<EntryId, EntryId> {
    index.restore(key(n), parent.map(key), Tier::Disk, n as u32, Used { last: 1 + n, uses: 1 })
}

/// One prompt of two million tokens, each record after that of its child: a walk up from each would take minutes, and
/// end before the top.
#[test]
fn a_very_long_chain_is_restored_whole_from_records_in_any_order() {
    const BLOCKS: u64 = 200_000;
    let mut index = Index::new(1);
    for n in (0..BLOCKS).map(|n| n ^ 1) {
        let parent = n.checked_sub(1);
        restore(&mut index, n, parent).expect("not there yet");
    }
    // The first would follow the last: a circle, and it had no parent.
    assert!(restore(&mut index, 0, Some(BLOCKS - 1)).is_err());
    index.restored(Tier::Disk);
    for n in 0..BLOCKS {
        let id = index.find(&key(n)).expect("restored");
        assert_eq!(index.parent_key(id), n.checked_sub(1).map(key), "block {n}");
    }
    index.validate().unwrap_or_else(|what| panic!("{what}"));
}

/// Entries that come after others have gone get their numbers, and nothing else of theirs.
#[test]
fn what_goes_while_a_store_is_restored_leaves_nothing_behind() {
    let mut index = Index::new(1);
    // The last one makes the index look up from 5, which is below 4.
    for (n, parent) in [(6, 5), (5, 4), (9, 8), (8, 5)] {
        restore(&mut index, n, Some(parent)).expect("not there yet");
    }
    for n in [9, 8, 6, 5] {
        let id = index.find(&key(n)).expect("restored");
        assert_eq!(index.drop_copy(id, Tier::Disk), Some(n as u32));
    }
    assert!(index.is_empty(), "ghosts go with the last that named them");
    for (n, parent) in [(100, None), (101, None), (102, Some(100))] {
        restore(&mut index, n, parent).expect("not there yet");
    }
    // A record again, which says more.
    let id = restore(&mut index, 100, Some(101)).expect_err("it is there");
    assert_eq!(index.parent_key(id), Some(key(101)), "100 and 101 were never above one another");
    index.restored(Tier::Disk);
    index.validate().unwrap_or_else(|what| panic!("{what}"));
}
