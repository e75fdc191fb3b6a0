//! The index against a plain model: maps, naive scans, every answer compared.

mod common;

use std::collections::BTreeMap;

use common::{Rng, key};
use kvhoist::{
    BlockKey, Tier,
    internals::index::{EntryId, EvictionPolicy as _, Index, Policy, Rb, Used},
};

/// What the model knows of a key.
#[derive(Clone, Default)]
struct Known {
    parent: Option<u64>,
    /// Slot, pins, dirty.
    copies: [Option<(u32, u32, bool)>; Tier::COUNT],
    last_use: u64,
    released: bool,
    /// Until when it is kept.
    kept: Option<u64>,
    /// More than one child has been here at a time.
    forked: bool,
}

#[derive(Default)]
struct Model {
    known: BTreeMap<u64, Known>,
    next_slot: u32,
    clock: u64,
    now: u64,
}

/// Copies that a tier may keep.
const KEPT_MAX: usize = 2;

/// Trees of four: 0 <- 1, 0 <- 2 <- 3, 4 <- 5 ...
fn parent_of(n: u64) -> Option<u64> {
    [None, Some(n.wrapping_sub(1)), Some(n.wrapping_sub(2)), Some(n.wrapping_sub(1))][(n % 4) as usize]
}

/// The chain that ends with `n`, its beginning first.
fn chain_to(n: u64) -> Vec<u64> {
    let mut chain: Vec<u64> = std::iter::successors(Some(n), |n| parent_of(*n)).collect();
    chain.reverse();
    chain
}

impl Model {
    fn children(&self, n: u64, tier: Tier) -> Vec<u64> {
        let all = self.known.iter();
        let children = all.filter(|(_, other)| other.parent == Some(n) && other.copies[tier as usize].is_some());
        children.map(|(&child, _)| child).collect()
    }

    fn is_held(&self, n: u64, tier: Tier) -> bool {
        let known = &self.known[&n];
        !matches!(known.copies[tier as usize], Some((_, 0, dirty)) if !dirty || known.released)
    }

    /// Those that may be evicted: the coldest leaf of those that go first, or where no leaf may, any that has only held
    /// ones right below it.
    fn victims(&self, tier: Tier) -> Vec<u64> {
        let free = || self.known.keys().copied().filter(|n| !self.is_held(*n, tier));
        let coldest = |wanted: &dyn Fn(&Known) -> bool| {
            let leaves = free().filter(|n| wanted(&self.known[n]) && self.children(*n, tier).is_empty());
            leaves.min_by_key(|n| self.known[n].last_use)
        };
        let kept = self.known.values().filter(|known| known.kept.is_some() && known.copies[tier as usize].is_some());
        let is_over = kept.count() > KEPT_MAX;
        let [first, last] = [coldest(&|known| known.released), coldest(&|known| known.kept.is_some())];
        let usual = match is_over {
            false => coldest(&|known| !known.released && known.kept.is_none()),
            true => coldest(&|known| !known.released),
        };
        let leaf = first.or(usual).or(last);
        let last_resort = || free().filter(|n| self.children(*n, tier).iter().all(|child| self.is_held(*child, tier)));
        leaf.map_or_else(|| last_resort().collect(), |leaf| vec![leaf])
    }

    fn touch(&mut self, n: u64) {
        self.clock += 1;
        self.known.get_mut(&n).expect("known").last_use = self.clock;
    }

    fn is_resident(&self, n: u64) -> bool {
        self.best(n).is_some()
    }

    fn children_anywhere(&self, n: u64) -> Vec<u64> {
        self.known.keys().copied().filter(|child| parent_of(*child) == Some(n) && self.is_resident(*child)).collect()
    }

    /// A use takes the release back, for all that is before the block as well.
    fn end_release(&mut self, n: u64) {
        for n in chain_to(n).into_iter().rev() {
            match self.known.get_mut(&n) {
                Some(known) if known.released => known.released = false,
                _ => break,
            }
        }
    }

    fn release(&mut self, keys: &[u64]) -> usize {
        let mut released = 0;
        for (at, &n) in keys.iter().enumerate().rev() {
            let next = keys.get(at + 1).filter(|next| self.known.get(next).is_some_and(|next| next.released));
            let others = self.children_anywhere(n).into_iter().any(|child| Some(&child) != next);
            let Some(known) = self.known.get(&n) else { continue };
            if known.forked || known.kept.is_some() || others {
                break;
            }
            if self.is_resident(n) {
                self.known.get_mut(&n).expect("resident").released = true;
                released += 1;
            }
        }
        released
    }

    fn keep(&mut self, n: u64, until: u64) {
        for n in chain_to(n).into_iter().rev() {
            let known = self.known.entry(n).or_default();
            if known.kept.is_some_and(|known| known >= until) {
                break;
            }
            known.kept = Some(until);
            self.end_release(n);
            if !self.is_resident(n) {
                break;
            }
        }
    }

    /// What is resident nowhere is released no longer, and where no other block names it nothing is known of it.
    fn forget(&mut self, n: u64) {
        if self.is_resident(n) {
            return;
        }
        self.known.get_mut(&n).expect("known").released = false;
        if self.children_anywhere(n).is_empty() {
            self.known.insert(n, Known::default());
        }
        if let Some(parent) = parent_of(n).filter(|parent| self.known.contains_key(parent)) {
            self.forget(parent);
        }
    }

    fn best(&self, n: u64) -> Option<Tier> {
        let known = self.known.get(&n)?;
        Tier::ALL.into_iter().find(|tier| known.copies[*tier as usize].is_some())
    }
}

/// One random operation on both; every answer is compared.
fn step(rng: &mut Rng, index: &mut Index, model: &mut Model) {
    let n = rng.below(24);
    let tier = Tier::ALL[rng.below(3) as usize];
    let at = tier as usize;
    let id = index.find(&key(n)).filter(|id| index.best_tier(*id).is_some());
    assert_eq!(id.is_some(), model.best(n).is_some(), "key {n}");
    match (rng.below(12), id) {
        (0 | 1, _) => fill(n, tier, index, model),
        (2, Some(id)) => {
            let pinned = index.pin(id, tier);
            let copy = &mut model.known.get_mut(&n).expect("resident").copies[at];
            assert_eq!(pinned, copy.map(|(slot, ..)| slot));
            if let Some((_, pins, _)) = copy {
                *pins += 1;
            }
        }
        (3, Some(id)) if matches!(model.known[&n].copies[at], Some((_, 1.., _))) => {
            let freed = index.unpin(id, tier);
            if let Some((_, pins, _)) = &mut model.known.get_mut(&n).expect("resident").copies[at] {
                *pins -= 1;
            }
            model.touch(n);
            assert_eq!(freed, None);
        }
        (4, Some(id)) => {
            index.touch(id);
            model.end_release(n);
            model.touch(n);
        }
        (9, _) => {
            let chain = chain_to(n);
            let keys: Vec<_> = chain.iter().copied().map(key).collect();
            assert_eq!(index.release(&keys), model.release(&chain), "the chain to {n}");
        }
        (10, Some(id)) => {
            let until = model.now + rng.below(20);
            assert!(index.keep(id, until));
            model.keep(n, until);
        }
        (11, _) => {
            model.now += rng.below(8);
            index.expire(model.now);
            let times = model.known.values_mut().map(|known| &mut known.kept);
            times.filter(|until| until.is_some_and(|until| until <= model.now)).for_each(|until| *until = None);
        }
        (5, Some(id)) => {
            let dirty = rng.below(2) == 0;
            index.set_dirty(id, tier, dirty);
            if let Some((.., mark)) = &mut model.known.get_mut(&n).expect("resident").copies[at] {
                *mark = dirty;
            }
        }
        (6 | 7, _) => evict(tier, index, model),
        (8, Some(id)) if model.known[&n].copies.iter().flatten().all(|(_, pins, _)| *pins == 0) => {
            let freed = index.remove(id);
            let known = model.known.get_mut(&n).expect("resident");
            assert_eq!(freed, known.copies.map(|copy| copy.map(|(slot, ..)| slot)));
            known.copies = Default::default();
            model.forget(n);
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
        if let Some(until) = model.known.get(&n).and_then(|known| known.kept) {
            model.keep(parent, until);
        }
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
    let demoted = Tier::ALL[..tier as usize].iter().any(|faster| known.copies[*faster as usize].is_some());
    known.copies[tier as usize] = Some((model.next_slot, 0, false));
    if !demoted {
        model.touch(n);
    }
    assert!(index.complete_fill(id, tier, model.next_slot));
}

fn evict(tier: Tier, index: &mut Index, model: &mut Model) {
    let victim = index.victim(tier);
    let expected = model.victims(tier);
    let found = victim.and_then(|id| expected.iter().copied().find(|n| key(*n) == index.key(id)));
    assert_eq!(found.is_some(), victim.is_some(), "exact leaf-first LRU of {tier}, expected one of {expected:?}");
    assert_eq!(victim.is_some(), !expected.is_empty(), "{tier}: expected one of {expected:?}");
    if let (Some(id), Some(n)) = (victim, found) {
        let slot = index.evict(id, tier);
        let copy = model.known.get_mut(&n).expect("resident").copies[tier as usize].take();
        assert_eq!(Some(slot), copy.map(|(slot, ..)| slot));
        model.forget(n);
    }
}

fn index(seed: u64) -> Index {
    let mut index = Index::new(seed);
    Tier::ALL.into_iter().for_each(|tier| index.limit_kept(tier, KEPT_MAX));
    index
}

#[test]
fn every_answer_is_the_models() {
    let seed = common::seed();
    for run in 0..60 {
        let mut rng = Rng(seed.wrapping_add(run));
        let (mut index, mut model) = (index(seed), Model::default());
        for _ in 0..400 {
            step(&mut rng, &mut index, &mut model);
            index.validate().unwrap_or_else(|what| panic!("run {run}: {what}"));
            for tier in Tier::ALL {
                let resident = model.known.values().filter(|known| known.copies[tier as usize].is_some()).count();
                assert_eq!(index.resident(tier), resident);
            }
            for (&n, known) in model.known.iter().filter(|(n, _)| model.is_resident(**n)) {
                let id = index.find(&key(n)).expect("resident");
                let (released, kept) = (index.is_released(id), index.is_kept(id));
                assert_eq!((released, kept), (known.released, known.kept.is_some()), "run {run}: {n}");
            }
        }
        let chain: Vec<BlockKey> = (0..4).map(key).collect();
        let leading = (0..4).take_while(|n| model.best(*n).is_some()).count();
        assert_eq!((index.match_len(&chain), index.match_prefix(&chain).len()), (leading, leading));
    }
}

/// What a restart finds comes in the order of slots, with suffixes before prefixes and the other way round; evicted
/// from then on it is in the order of last use, leaves first, mixed with what was used since.
#[test]
fn what_was_restored_in_any_order_is_evicted_like_the_model() {
    let seed = common::seed();
    for run in 0..40 {
        let mut rng = Rng(seed.wrapping_add(run));
        let (mut index, mut model) = (index(seed), Model::default());
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
            let used = Used { last: last_use, uses: 1 };
            let id = index.restore(key(n), parent.map(key), Tier::Disk, slot, used).expect("not there yet");
            assert_eq!(index.restore(key(n), parent.map(key), Tier::Disk, 99, used), Err(id));
            let known = model.known.entry(n).or_default();
            *known = Known { parent, last_use, ..known.clone() };
            known.copies[Tier::Disk as usize] = Some((slot, 0, false));
            model.clock = model.clock.max(last_use);
        }
        assert_eq!(index.victim(Tier::Disk), None, "not before the end");
        index.restored(Tier::Disk);
        index.validate().unwrap_or_else(|what| panic!("run {run}: {what}"));
        model.next_slot = 100;
        for _ in 0..rng.below(60) {
            step(&mut rng, &mut index, &mut model);
            index.validate().unwrap_or_else(|what| panic!("run {run}: {what}"));
        }
        while index.victim(Tier::Disk).is_some() {
            evict(Tier::Disk, &mut index, &mut model);
        }
        assert_eq!(model.victims(Tier::Disk), []);
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
fn a_fill_of_a_removed_block_is_refused() {
    let mut index = Index::new(1);
    let id = index.insert(key(1), Some(key(0)));
    assert!(index.begin_fill(id, Tier::Disk));
    assert_eq!(index.remove(id), [None; 3]);
    assert!(!index.complete_fill(id, Tier::Disk, 3));
    assert!(index.is_empty(), "nothing is left of it, nor of the parent that only it named");
    index.validate().expect("valid");
}

/// Makes `n` resident in `tier`, in the slot of its number.
fn full(index: &mut Index, n: u64, parent: Option<u64>, tier: Tier) -> EntryId {
    let id = index.insert(key(n), parent.map(key));
    assert!(index.begin_fill(id, tier) && index.complete_fill(id, tier, n as u32));
    id
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
        assert_eq!(index.match_len(&(0..8).map(key).collect::<Vec<_>>()), n as usize, "what is left is a prefix");
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

/// An index in which every tier of four slots is RB-LRU.
fn counting() -> Index {
    let index = Index::with_policies(1, |_| Policy::Rb(Box::new(Rb::new(4))));
    assert!(Rb::new(4).counts_requests());
    index
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
