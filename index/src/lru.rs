//! The order by last use, linked through the entries.

use std::collections::BTreeSet;

use kvhoist_base::{block::Tier, memory::prefetch};
use slab::Slab;

use super::{
    EntryId,
    entry::Entry,
    link::{END, LATE, Link, NONE},
};

/// Entries that a late arrival is compared with before it goes into the ordered set.
const STEPS_MAX: u32 = 8;

/// Evicts the entry that was used longest ago. Exact, also for entries that arrive out of order.
///
/// The order is a list through the entries: a use moves one to its end, whatever else may hold it. So a leaf may stay
/// in its place while it is pinned or being filled; the search for a victim takes those out that may
/// not be evicted, each of which cost an arrival.
///
/// Almost all arrivals are in order: an entry was just used. But when a leaf is evicted, its parent can be evicted from
/// then on and was used long ago; at the recent end it would stay another whole round, and so would every block of the
/// chain after it. A demoted block was used long ago too, and a copy that a search took out was so before its last pin
/// or fill ended. Such late arrivals enter an ordered set, and the victim is the colder of the two fronts.
pub struct Lru {
    coldest: u32,
    hottest: u32,
    late: BTreeSet<(u64, u32)>,
}

impl Lru {
    /// An empty order.
    pub fn new() -> Self {
        Lru { coldest: END, hottest: END, late: BTreeSet::new() }
    }

    /// Enters an entry that is in no order of `tier`, by its last use.
    #[inline]
    pub(super) fn insert(&mut self, entries: &mut Slab<Entry>, tier: Tier, id: EntryId) {
        let last_use = entries[id.0 as usize].last_use;
        let mut before = self.hottest;
        for _ in 0..STEPS_MAX {
            if before == END || entries[before as usize].last_use <= last_use {
                return self.link_after(entries, tier, before, id);
            }
            before = entries[before as usize].link(tier).colder;
        }
        self.late.insert((last_use, id.0));
        entries[id.0 as usize].links[tier as usize] = Link::LATE;
    }

    /// Enters an entry right after another one, or first.
    #[inline]
    fn link_after(&mut self, entries: &mut Slab<Entry>, tier: Tier, before: u32, id: EntryId) {
        let after = match before {
            END => std::mem::replace(&mut self.coldest, id.0),
            before => std::mem::replace(&mut entries[before as usize].links[tier as usize].hotter, id.0),
        };
        match after {
            END => self.hottest = id.0,
            after => entries[after as usize].links[tier as usize].colder = id.0,
        }
        entries[id.0 as usize].links[tier as usize] = Link { colder: before, hotter: after };
    }

    /// Takes an entry out, if it is in. `last_use` is that with which it entered or was last moved.
    #[inline]
    pub(super) fn remove(&mut self, entries: &mut Slab<Entry>, tier: Tier, id: EntryId, last_use: u64) {
        let link = std::mem::replace(&mut entries[id.0 as usize].links[tier as usize], Link::OUT);
        let Link { colder, hotter } = link;
        match colder {
            NONE => return,
            LATE => {
                let held = self.late.remove(&(last_use, id.0));
                debug_assert!(held, "{id:?} with last use {last_use} is a late arrival");
                return;
            }
            END => self.coldest = hotter,
            colder => entries[colder as usize].links[tier as usize].hotter = hotter,
        }
        match hotter {
            END => self.hottest = colder,
            hotter => entries[hotter as usize].links[tier as usize].colder = colder,
        }
    }

    /// Moves an entry that is in, and was used: `from` is its last use before.
    #[inline]
    pub(super) fn touch(&mut self, entries: &mut Slab<Entry>, tier: Tier, id: EntryId, from: u64) {
        if self.hottest != id.0 {
            self.remove(entries, tier, id, from);
            self.insert(entries, tier, id);
        }
    }

    /// The entry that was used longest ago of those that may be evicted.
    #[inline]
    pub(super) fn victim(&mut self, entries: &mut Slab<Entry>, tier: Tier) -> Option<EntryId> {
        loop {
            let in_order = (self.coldest != END).then(|| (entries[self.coldest as usize].last_use, self.coldest));
            let (last_use, id) = match (in_order, self.late.first().copied()) {
                (Some(a), Some(b)) => a.min(b),
                (a, b) => a.or(b)?,
            };
            if entries[id as usize].is_evictable(tier) {
                prefetch_next(entries, tier, id);
                return Some(EntryId(id));
            }
            self.remove(entries, tier, EntryId(id), last_use);
        }
    }

    /// The entries, the one that was used longest ago first, also those that may not be evicted.
    pub(super) fn coldest_first<'a>(
        &'a self,
        entries: &'a Slab<Entry>,
        tier: Tier,
    ) -> impl Iterator<Item = (u64, EntryId)> + 'a {
        let first = (self.coldest != END).then_some(self.coldest);
        let in_order = std::iter::successors(first, move |&at| {
            let hotter = entries[at as usize].link(tier).hotter;
            (hotter != END).then_some(hotter)
        });
        let in_order = in_order.map(|at| (entries[at as usize].last_use, at));
        merged(in_order, self.late.iter().copied(), |a, b| a <= b).map(|(last_use, id)| (last_use, EntryId(id)))
    }

    /// Checks the links, the order, and that each entry that is in is one of those that `belongs` here. Returns how
    /// many are in.
    pub(super) fn validate(
        &self,
        entries: &Slab<Entry>,
        tier: Tier,
        belongs: &dyn Fn(&Entry) -> bool,
    ) -> Result<usize, String> {
        let (mut at, mut before, mut after, mut count) = (self.coldest, END, 0, 0);
        while at != END {
            let entry = entries.get(at as usize).ok_or(format!("entry {at} is in the order, and gone"))?;
            if !belongs(entry) || entry.link(tier).colder != before || entry.last_use < after {
                let (link, last_use) = (entry.link(tier), entry.last_use);
                return Err(format!("entry {at}, used at {last_use}, {link:?}, after {before}, used at {after}"));
            }
            (before, at, after) = (at, entry.link(tier).hotter, entry.last_use);
            count += 1;
            if count > entries.len() {
                return Err("the order is a ring".into());
            }
        }
        if before != self.hottest {
            return Err(format!("the order ends in {before}, not in {}", self.hottest));
        }
        for &(last_use, id) in &self.late {
            let entry = entries.get(id as usize).filter(|entry| entry.last_use == last_use && belongs(entry));
            if entry.is_none_or(|entry| entry.link(tier) != Link::LATE) {
                return Err(format!("entry {id}, used at {last_use}, is no late arrival"));
            }
        }
        Ok(count + self.late.len())
    }
}

/// Two orders as one: the next of `a` goes first where `is_first` says so of it and the next of `b`.
pub(super) fn merged<T>(
    a: impl Iterator<Item = T>,
    b: impl Iterator<Item = T>,
    is_first: impl Fn(&T, &T) -> bool,
) -> impl Iterator<Item = T> {
    let (mut a, mut b) = (a.peekable(), b.peekable());
    std::iter::from_fn(move || match (a.peek(), b.peek()) {
        (Some(next), Some(other)) if !is_first(next, other) => b.next(),
        (Some(_), _) => a.next(),
        (None, _) => b.next(),
    })
}

impl Default for Lru {
    fn default() -> Self {
        Self::new()
    }
}

/// Tells the processor what the eviction after that of `id` changes, and the entry of the one after it.
#[inline]
fn prefetch_next(entries: &Slab<Entry>, tier: Tier, id: u32) {
    let entry = &entries[id as usize];
    let Some(next) = entries.get(entry.link(tier).hotter as usize) else { return };
    for soon in [next.parent, next.link(tier).hotter].into_iter().filter(|&soon| soon < LATE) {
        prefetch(std::ptr::from_ref(entry).wrapping_offset(soon as isize - id as isize));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::{
        Used,
        entry::{FULL, LISTED},
    };

    const TIER: Tier = Tier::Disk;

    #[derive(Debug, Clone)]
    enum Op {
        Insert(u32, u64),
        Remove(u32),
        /// Uses it so much later.
        Touch(u32, u64),
        /// Changes whether it may be evicted.
        Hold(u32),
        Evict,
    }

    fn op() -> impl Strategy<Value = Op> {
        let (id, time) = (0..24u32, 0..64u64);
        prop_oneof![
            4 => (id.clone(), time.clone()).prop_map(|(id, time)| Op::Insert(id, time)),
            2 => id.clone().prop_map(Op::Remove),
            2 => (id.clone(), time).prop_map(|(id, time)| Op::Touch(id, time)),
            2 => id.prop_map(Op::Hold),
            1 => Just(Op::Evict),
        ]
    }

    /// An order beside a map of what is in it: last use, and whether it may be evicted.
    struct Both {
        entries: Slab<Entry>,
        lru: Lru,
        model: BTreeMap<u32, (u64, bool)>,
    }

    impl Both {
        fn new() -> Self {
            let mut entries = Slab::new();
            (0..24).for_each(|_| _ = entries.insert(Entry::EMPTY));
            Both { entries, lru: Lru::new(), model: BTreeMap::new() }
        }

        fn set_last(&mut self, id: u32, last: u64) {
            self.entries[id as usize].set_used(Used { last, uses: 1 });
        }

        fn may_evict(&mut self, id: u32, may: bool) {
            let entry = &mut self.entries[id as usize];
            entry.set(TIER, FULL);
            if may { entry.set(TIER, LISTED) } else { entry.clear(TIER, LISTED) }
        }

        fn remove(&mut self, id: u32) {
            let last_use = self.entries[id as usize].last_use;
            self.lru.remove(&mut self.entries, TIER, EntryId(id), last_use);
            self.model.remove(&id);
        }

        fn insert(&mut self, id: u32, last: u64) {
            self.set_last(id, last);
            self.may_evict(id, true);
            self.lru.insert(&mut self.entries, TIER, EntryId(id));
            self.model.insert(id, (last, true));
        }

        fn apply(&mut self, op: Op) {
            match op {
                Op::Insert(id, time) => {
                    self.remove(id);
                    self.insert(id, time);
                }
                Op::Remove(id) => self.remove(id),
                Op::Touch(id, later) => {
                    let Some((last, _)) = self.model.get_mut(&id) else { return };
                    let from = *last;
                    *last += later;
                    let to = *last;
                    self.set_last(id, to);
                    self.lru.touch(&mut self.entries, TIER, EntryId(id), from);
                }
                Op::Hold(id) => {
                    let Some((last, may)) = self.model.get_mut(&id) else { return };
                    *may = !*may;
                    let (last, may) = (*last, *may);
                    self.may_evict(id, may);
                    // The index enters it again where a search has taken it out.
                    if may && self.entries[id as usize].link(TIER) == Link::OUT {
                        self.insert(id, last);
                    }
                }
                Op::Evict => {
                    if let Some(id) = self.lru.victim(&mut self.entries, TIER) {
                        self.remove(id.0);
                    }
                }
            }
        }

        fn check(&mut self, evicts: bool) -> Result<(), TestCaseError> {
            let valid = self.lru.validate(&self.entries, TIER, &|entry| entry.has(TIER, FULL));
            let entered = self.entries.iter().filter(|(_, entry)| entry.link(TIER) != Link::OUT).count();
            prop_assert_eq!(valid, Ok(entered));
            if evicts {
                let victim = self.lru.victim(&mut self.entries, TIER).map(|id| self.model[&id.0]);
                prop_assert_eq!(victim, self.model.values().filter(|(_, may)| *may).min().copied());
            }
            for (&id, &(_, may)) in &self.model {
                prop_assert!(!may || self.entries[id as usize].link(TIER) != Link::OUT);
            }
            Ok(())
        }
    }

    proptest! {
        /// In any order of arrivals, removals and uses, the victim is the entry used longest ago of those that may be
        /// evicted. A search takes others out, so it is not made after each step.
        #[test]
        fn the_victim_is_the_coldest(ops in proptest::collection::vec((op(), any::<bool>()), 1..200)) {
            let mut both = Both::new();
            for (op, evicts) in ops {
                both.apply(op);
                both.check(evicts)?;
            }
        }
    }

    /// The order of equal times is the order of arrival: a clock that stands still is a queue.
    #[test]
    fn a_saturated_clock_leaves_a_queue() {
        let mut both = Both::new();
        [5, 3, 9].into_iter().for_each(|id| both.insert(id, u64::MAX));
        both.lru.touch(&mut both.entries, TIER, EntryId(5), u64::MAX);
        assert_eq!(both.lru.victim(&mut both.entries, TIER), Some(EntryId(3)));
    }
}
