//! Blocks that were found to be worth a write, in the order in which they are written. Pure data.

use std::collections::{BTreeSet, VecDeque};

use crate::block::BlockKey;

/// Keys in the order in which they were added, each of them once.
#[derive(Default)]
pub(crate) struct WriteQueue {
    order: VecDeque<BlockKey>,
    keys: BTreeSet<BlockKey>,
}

impl WriteQueue {
    pub(crate) fn contains(&self, key: &BlockKey) -> bool {
        self.keys.contains(key)
    }

    pub(crate) fn push_back(&mut self, key: BlockKey) {
        if self.keys.insert(key) {
            self.order.push_back(key);
        }
    }

    pub(crate) fn pop_front(&mut self) -> Option<BlockKey> {
        let key = self.order.pop_front()?;
        self.keys.remove(&key);
        Some(key)
    }

    /// Forgets all keys but those for which `is_kept` is true.
    pub(crate) fn retain(&mut self, mut is_kept: impl FnMut(&BlockKey) -> bool) {
        let WriteQueue { order, keys } = self;
        order.retain(|key| is_kept(key) || !keys.remove(key));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.order.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_there_once_until_it_is_taken_or_forgotten() {
        let keys = [3, 1, 2].map(|n| BlockKey::new([n; 32]));
        let mut queue = WriteQueue::default();
        keys.iter().chain(&keys).for_each(|key| queue.push_back(*key));
        assert_eq!(queue.len(), keys.len(), "each key once");
        assert_eq!(queue.pop_front(), Some(keys[0]), "the first to be added");
        queue.retain(|key| *key == keys[2]);
        assert_eq!(keys.map(|key| queue.contains(&key)), [false, false, true]);
        queue.push_back(keys[0]);
        assert_eq!([queue.pop_front(), queue.pop_front()], [Some(keys[2]), Some(keys[0])]);
        assert!(queue.is_empty() && keys.iter().all(|key| !queue.contains(key)));
    }
}
