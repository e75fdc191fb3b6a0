//! Exact least-recently-used order over entries that come and go.

use std::collections::BTreeSet;

use lru::LruCache;

use super::{EntryId, Restored, Used, hash::BuildIdHasher};

/// Evicts the entry that was used longest ago. Exact, also for entries that arrive out of order.
///
/// Almost all arrivals are in order: an entry was just used, so it is appended to a linked list. But when a leaf is
/// evicted, its parent can be evicted from then on and was used long ago; at the recent end it would stay another whole
/// round, and so would every block of the chain after it. Such late arrivals enter an ordered set, and the victim is
/// the colder of the two fronts. The blocks of a restart enter the set too: it is built from an ordered list in a tenth
/// of the time that it takes to link a list node by node.
pub struct Lru {
    in_order: LruCache<u32, (), BuildIdHasher>,
    late: BTreeSet<(u64, u32)>,
    /// No `last_use` in `in_order` is above this. A bound, not the maximum: the most recent may have left.
    newest: u64,
}

impl Lru {
    /// An empty order.
    pub fn new() -> Self {
        Lru { in_order: LruCache::unbounded_with_hasher(BuildIdHasher::default()), late: BTreeSet::new(), newest: 0 }
    }

    /// As [`Policy::fill`](super::Policy::fill).
    pub(super) fn fill<'a>(&mut self, entries: impl Iterator<Item = &'a Restored>) {
        let mut entries: BTreeSet<(u64, u32)> = entries.map(|entry| (entry.used().last, entry.id().0)).collect();
        self.late.append(&mut entries);
    }

    /// True if `id` is held. `last_use` is its last known one.
    pub(super) fn contains(&self, id: EntryId, last_use: u64) -> bool {
        self.in_order.contains(&id.0) || self.late.contains(&(last_use, id.0))
    }

    /// Checks that both parts are in the order of `last_use`, with no entry in both.
    pub(super) fn validate(&self, last_use: &dyn Fn(EntryId) -> u64) -> Result<(), String> {
        let mut after = self.newest;
        for (&id, &()) in &self.in_order {
            let used = last_use(EntryId(id));
            if used > after {
                return Err(format!("entry {id}, last used at {used}, is listed before one used at {after}"));
            }
            after = used;
        }
        let is_wrong = |&(used, id): &(u64, u32)| used != last_use(EntryId(id)) || self.in_order.contains(&id);
        self.late.iter().copied().find(is_wrong).map_or(Ok(()), |(used, id)| {
            Err(format!("entry {id} is listed as a late arrival, used at {used}, or is listed twice"))
        })
    }

    pub(super) fn insert(&mut self, id: EntryId, Used { last: last_use, .. }: Used) {
        if last_use >= self.newest || self.in_order.is_empty() {
            self.newest = last_use;
            self.in_order.put(id.0, ());
        } else {
            self.late.insert((last_use, id.0));
        }
    }

    pub(super) fn remove(&mut self, id: EntryId, Used { last: last_use, .. }: Used) {
        if self.in_order.pop(&id.0).is_none() {
            let held = self.late.remove(&(last_use, id.0));
            debug_assert!(held, "{id:?} with last use {last_use} is not held");
        }
    }

    pub(super) fn touch(&mut self, id: EntryId, from: Used, to: Used) {
        if to.last >= self.newest && self.in_order.promote(&id.0) {
            self.newest = to.last;
        } else {
            self.remove(id, from);
            self.insert(id, to);
        }
    }

    pub(super) fn victim(&self, last_use: &dyn Fn(EntryId) -> u64) -> Option<EntryId> {
        let in_order = self.in_order.peek_lru().map(|(&id, &())| (last_use(EntryId(id)), id));
        let late = self.late.first().copied();
        let (_, id) = match (in_order, late) {
            (Some(a), Some(b)) => a.min(b),
            (a, b) => a.or(b)?,
        };
        Some(EntryId(id))
    }

    pub(super) fn len(&self) -> usize {
        self.in_order.len() + self.late.len()
    }
}

impl Default for Lru {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn at(last: u64) -> Used {
        Used { last, uses: 1 }
    }

    #[derive(Debug, Clone)]
    enum Op {
        Insert(u32, u64),
        Remove(u32),
        Touch(u32, u64),
        Fill(Vec<u32>, u64),
        Evict,
    }

    fn op() -> impl Strategy<Value = Op> {
        let (id, time) = (0..24u32, 0..64u64);
        prop_oneof![
            4 => (id.clone(), time.clone()).prop_map(|(id, time)| Op::Insert(id, time)),
            2 => id.clone().prop_map(Op::Remove),
            2 => (id, time.clone()).prop_map(|(id, time)| Op::Touch(id, time)),
            1 => (proptest::collection::vec(24..48u32, 0..8), time).prop_map(|(ids, time)| Op::Fill(ids, time)),
            1 => Just(Op::Evict),
        ]
    }

    proptest! {
        /// In any order of arrivals, removals and uses, the victim is the entry used longest ago.
        #[test]
        fn the_victim_is_the_coldest(ops in proptest::collection::vec(op(), 1..200)) {
            let mut lru = Lru::new();
            let mut model = BTreeMap::<u32, u64>::new();
            for op in ops {
                match op {
                    Op::Insert(id, time) => {
                        if let Some(old) = model.insert(id, time) {
                            lru.remove(EntryId(id), at(old));
                        }
                        lru.insert(EntryId(id), at(time));
                    }
                    Op::Remove(id) => {
                        if let Some(time) = model.remove(&id) {
                            lru.remove(EntryId(id), at(time));
                        }
                    }
                    Op::Touch(id, to) => {
                        if let Some(time) = model.get_mut(&id) {
                            let from = std::mem::replace(time, to);
                            lru.touch(EntryId(id), at(from), at(to));
                        }
                    }
                    Op::Fill(ids, time) => {
                        let new: BTreeSet<u32> = ids.into_iter().filter(|id| !model.contains_key(id)).collect();
                        let entries: Vec<_> = new.into_iter().zip(time..).collect();
                        model.extend(entries.iter().copied());
                        let restored = |&(id, time): &(u32, u64)| Restored::new(EntryId(id), at(time));
                        lru.fill(entries.iter().map(restored).collect::<Vec<_>>().iter());
                    }
                    Op::Evict => {
                        if let Some(id) = lru.victim(&|id| model[&id.0]) {
                            let time = model.remove(&id.0).expect("the victim is held");
                            lru.remove(id, at(time));
                        }
                    }
                }
                prop_assert_eq!(lru.len(), model.len());
                let victim = lru.victim(&|id| model[&id.0]).map(|id| model[&id.0]);
                prop_assert_eq!(victim, model.values().min().copied());
                for (&id, &time) in &model {
                    prop_assert!(lru.contains(EntryId(id), time));
                }
            }
        }
    }

    /// The order of equal times is the order of arrival: a clock that stands still is a queue.
    #[test]
    fn a_saturated_clock_leaves_a_queue() {
        let mut lru = Lru::new();
        for id in [5, 3, 9] {
            lru.insert(EntryId(id), at(u64::MAX));
        }
        lru.touch(EntryId(5), at(u64::MAX), at(u64::MAX));
        assert_eq!(lru.victim(&|_| u64::MAX), Some(EntryId(3)));
    }
}
