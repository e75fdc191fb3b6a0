//! An order by last use of few blocks.

use std::collections::BTreeSet;

use lru::LruCache;

use super::hash::BuildIdHasher;

/// Entries by last use, each in a node of its own: for lists in which most blocks never are. Exact, also for entries
/// that arrive out of order: late arrivals are in an ordered set, and the coldest is the colder of the two fronts.
pub(super) struct RecencyList {
    in_order: LruCache<u32, (), BuildIdHasher>,
    late: BTreeSet<(u64, u32)>,
    /// No `last_use` in `in_order` is above this. A bound, not the maximum: the most recent may have left.
    newest: u64,
}

impl RecencyList {
    /// True if `id` is held. `last_use` is its last known one.
    pub(super) fn contains(&self, id: u32, last_use: u64) -> bool {
        self.in_order.contains(&id) || self.late.contains(&(last_use, id))
    }

    /// Checks that both parts are in the order of `last_use`, with no entry in both.
    pub(super) fn validate(&self, last_use: &dyn Fn(u32) -> u64) -> Result<(), String> {
        let mut after = self.newest;
        for (&id, &()) in &self.in_order {
            let used = last_use(id);
            if used > after {
                return Err(format!("entry {id}, last used at {used}, is listed before one used at {after}"));
            }
            after = used;
        }
        let is_wrong = |&(used, id): &(u64, u32)| used != last_use(id) || self.in_order.contains(&id);
        self.late.iter().copied().find(is_wrong).map_or(Ok(()), |(used, id)| {
            Err(format!("entry {id} is listed as a late arrival, used at {used}, or is listed twice"))
        })
    }

    pub(super) fn insert(&mut self, id: u32, last_use: u64) {
        if last_use >= self.newest || self.in_order.is_empty() {
            self.newest = last_use;
            self.in_order.put(id, ());
        } else {
            self.late.insert((last_use, id));
        }
    }

    pub(super) fn remove(&mut self, id: u32, last_use: u64) {
        if self.in_order.pop(&id).is_none() {
            let held = self.late.remove(&(last_use, id));
            debug_assert!(held, "entry {id} with last use {last_use} is not held");
        }
    }

    pub(super) fn touch(&mut self, id: u32, from: u64, to: u64) {
        if to >= self.newest && self.in_order.promote(&id) {
            self.newest = to;
        } else {
            self.remove(id, from);
            self.insert(id, to);
        }
    }

    /// All of them, the coldest first.
    pub(super) fn coldest_first(&self, last_use: impl Fn(u32) -> u64) -> impl Iterator<Item = u32> {
        let mut in_order = self.in_order.iter().rev().map(move |(&id, &())| (last_use(id), id)).peekable();
        let mut late = self.late.iter().copied().peekable();
        std::iter::from_fn(move || {
            let is_late = late.peek().is_some_and(|late| in_order.peek().is_none_or(|next| late < next));
            let next = if is_late { late.next() } else { in_order.next() };
            next.map(|(_, id)| id)
        })
    }

    pub(super) fn len(&self) -> usize {
        self.in_order.len() + self.late.len()
    }
}

impl Default for RecencyList {
    fn default() -> Self {
        let in_order = LruCache::unbounded_with_hasher(BuildIdHasher::default());
        RecencyList { in_order, late: BTreeSet::new(), newest: 0 }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Op {
        Insert(u32, u64),
        Remove(u32),
        Touch(u32, u64),
        Evict,
    }

    fn op() -> impl Strategy<Value = Op> {
        let (id, time) = (0..24u32, 0..64u64);
        prop_oneof![
            4 => (id.clone(), time.clone()).prop_map(|(id, time)| Op::Insert(id, time)),
            2 => id.clone().prop_map(Op::Remove),
            2 => (id, time.clone()).prop_map(|(id, time)| Op::Touch(id, time)),
            1 => Just(Op::Evict),
        ]
    }

    proptest! {
        /// In any order of arrivals, removals and uses, the victim is the entry used longest ago.
        #[test]
        fn the_victim_is_the_coldest(ops in proptest::collection::vec(op(), 1..200)) {
            let mut list = RecencyList::default();
            let mut model = BTreeMap::<u32, u64>::new();
            for op in ops {
                match op {
                    Op::Insert(id, time) => {
                        if let Some(old) = model.insert(id, time) {
                            list.remove(id, old);
                        }
                        list.insert(id, time);
                    }
                    Op::Remove(id) => {
                        if let Some(time) = model.remove(&id) {
                            list.remove(id, time);
                        }
                    }
                    Op::Touch(id, to) => {
                        if let Some(time) = model.get_mut(&id) {
                            let from = std::mem::replace(time, to);
                            list.touch(id, from, to);
                        }
                    }
                    Op::Evict => {
                        let coldest = list.coldest_first(|id| model[&id]).next();
                        if let Some(id) = coldest {
                            let time = model.remove(&id).expect("the victim is held");
                            list.remove(id, time);
                        }
                    }
                }
                prop_assert_eq!(list.len(), model.len());
                let times: Vec<u64> = list.coldest_first(|id| model[&id]).map(|id| model[&id]).collect();
                let mut expected: Vec<u64> = model.values().copied().collect();
                expected.sort_unstable();
                prop_assert_eq!(times, expected);
                for (&id, &time) in &model {
                    prop_assert!(list.contains(id, time));
                }
            }
        }
    }

    /// The order of equal times is the order of arrival: a clock that stands still is a queue.
    #[test]
    fn a_saturated_clock_leaves_a_queue() {
        let mut list = RecencyList::default();
        for id in [5, 3, 9] {
            list.insert(id, u64::MAX);
        }
        list.touch(5, u64::MAX, u64::MAX);
        assert_eq!(list.coldest_first(|_| u64::MAX).collect::<Vec<_>>(), [3, 9, 5]);
    }
}
