//! The blocks of the host tier that are written to disk before they may be evicted. Pure data.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    ops::Bound,
};

use crate::block::BlockKey;

/// Dirty blocks, and in which order those are written that were found to be worth a write.
#[derive(Default)]
pub(crate) struct DirtyBlocks {
    /// With the place of those that wait for their write.
    places: BTreeMap<BlockKey, Option<u64>>,
    queue: BTreeMap<u64, BlockKey>,
    next_place: u64,
}

impl DirtyBlocks {
    pub(crate) fn insert(&mut self, key: BlockKey) {
        self.places.entry(key).or_default();
    }

    /// Takes a block out, and out of the queue; true if it was dirty.
    pub(crate) fn remove(&mut self, key: &BlockKey) -> bool {
        let place = self.places.remove(key);
        if let Some(Some(place)) = place {
            self.queue.remove(&place);
        }
        place.is_some()
    }

    pub(crate) fn contains(&self, key: &BlockKey) -> bool {
        self.places.contains_key(key)
    }

    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    /// At most `most` of the blocks after this one, in the order of their keys.
    pub(crate) fn after(&self, last: Option<BlockKey>, most: usize) -> Vec<BlockKey> {
        let from = last.map_or(Bound::Unbounded, Bound::Excluded);
        self.places.range((from, Bound::Unbounded)).take(most).map(|(key, _)| *key).collect()
    }

    /// Queues a dirty block for its write, behind the others.
    pub(crate) fn enqueue(&mut self, key: BlockKey) {
        if let Entry::Occupied(mut dirty) = self.places.entry(key)
            && dirty.get().is_none()
        {
            dirty.insert(Some(self.next_place));
            self.queue.insert(self.next_place, key);
            self.next_place += 1;
        }
    }

    pub(crate) fn is_queued(&self, key: &BlockKey) -> bool {
        self.places.get(key).is_some_and(Option::is_some)
    }

    /// Takes the first block from the queue. It is still dirty.
    pub(crate) fn dequeue(&mut self) -> Option<BlockKey> {
        let (_, key) = self.queue.pop_first()?;
        self.places.insert(key, None);
        Some(key)
    }

    pub(crate) fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Checks that the queue has each block that has a place, and no other.
    #[cfg(feature = "sim")]
    pub(crate) fn validate(&self) -> Result<(), String> {
        let queued = self.places.iter().filter_map(|(key, place)| place.map(|place| (place, *key)));
        let queued: BTreeMap<u64, BlockKey> = queued.collect();
        if queued == self.queue { Ok(()) } else { Err(format!("queued: {:?}, {queued:?} with a place", self.queue)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dirty(keys: impl IntoIterator<Item = BlockKey>) -> DirtyBlocks {
        let mut blocks = DirtyBlocks::default();
        keys.into_iter().for_each(|key| blocks.insert(key));
        blocks
    }

    #[test]
    fn a_block_is_queued_once_until_it_is_taken_or_clean() {
        let keys = [3, 1, 2].map(|n| BlockKey::new([n; 32]));
        let mut blocks = dirty(keys);
        keys.iter().chain(&keys).for_each(|key| blocks.enqueue(*key));
        blocks.insert(keys[2]);
        blocks.enqueue(BlockKey::new([4; 32]));
        assert_eq!(blocks.queued(), keys.len(), "each dirty block once");
        assert_eq!(blocks.dequeue(), Some(keys[0]), "the first to be added");
        assert!(blocks.remove(&keys[1]) && !blocks.remove(&keys[1]));
        assert_eq!(keys.map(|key| blocks.is_queued(&key)), [false, false, true]);
        assert_eq!(keys.map(|key| blocks.contains(&key)), [true, false, true]);
        blocks.enqueue(keys[0]);
        assert_eq!([blocks.dequeue(), blocks.dequeue()], [Some(keys[2]), Some(keys[0])]);
        assert_eq!((blocks.queued(), blocks.len()), (0, 2));
    }

    #[test]
    fn blocks_are_listed_some_at_a_time_and_each_once() {
        let keys: Vec<BlockKey> = (0..=6).map(|n| BlockKey::new([n; 32])).collect();
        let blocks = dirty(keys.iter().rev().copied());
        let (mut found, mut last) = (Vec::new(), None);
        loop {
            let page = blocks.after(last, 2);
            assert!(page.len() <= 2);
            last = page.last().copied();
            found.extend(page);
            if last.is_none() {
                break;
            }
        }
        assert_eq!(found, keys);
    }
}
