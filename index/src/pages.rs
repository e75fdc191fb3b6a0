//! All resident blocks, a page at a time.

use kvhoist_base::block::{BlockKey, Tier};

use super::Index;

/// Entries that one page looks at: some tens of microseconds, where they have to come from memory.
const ENTRIES_PER_PAGE: u32 = 4096;

impl Index {
    /// Number of blocks that are resident in some tier, each counted once.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Visits the resident blocks of one page, with the fastest tier of each, in no particular order. Returns the next
    /// page, or `None` after the last. The first page is 0.
    ///
    /// The index may change between pages: a block that is resident throughout is visited exactly once, since an entry
    /// keeps its number while it lives. A block that is stored or evicted meanwhile may be visited or not, and one that
    /// is evicted and stored again may be visited twice.
    pub fn visit_page(&self, page: u32, mut visit: impl FnMut(BlockKey, Tier)) -> Option<u32> {
        let first = page.saturating_mul(ENTRIES_PER_PAGE);
        let end = u32::try_from(self.entries.capacity()).unwrap_or(u32::MAX);
        for id in first..end.min(first.saturating_add(ENTRIES_PER_PAGE)) {
            if let Some(entry) = self.entries.get(id as usize)
                && !entry.is_removed()
                && let Some(tier) = entry.best_tier()
            {
                visit(entry.key, tier);
            }
        }
        (end > first.saturating_add(ENTRIES_PER_PAGE)).then_some(page + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u32) -> BlockKey {
        let mut bytes = [0; 32];
        bytes[..4].copy_from_slice(&number.to_le_bytes());
        BlockKey::new(bytes)
    }

    fn put(index: &mut Index, number: u32, tier: Tier) {
        let id = index.insert(key(number), None);
        assert!(index.begin_fill(id, tier) && index.complete_fill(id, tier, number));
    }

    fn all(index: &Index) -> Vec<BlockKey> {
        let (mut found, mut page) = (Vec::new(), Some(0));
        while let Some(at) = page {
            page = index.visit_page(at, |key, _| found.push(key));
        }
        found.sort_unstable();
        found
    }

    #[test]
    fn pages_have_every_resident_block_once_and_no_other() {
        let mut index = Index::new(1);
        assert_eq!((all(&index), index.blocks()), (vec![], 0));
        let blocks = 2 * ENTRIES_PER_PAGE + 10;
        (0..blocks).for_each(|number| put(&mut index, number, Tier::Disk));
        // A second copy is no second block; a ghost, a fill and a removed block that is pinned are none.
        put(&mut index, 3, Tier::Host);
        index.insert(key(4), Some(key(blocks)));
        let filling = index.insert(key(blocks + 1), None);
        assert!(index.begin_fill(filling, Tier::Host));
        let removed = index.find(&key(5)).expect("resident");
        index.pin(removed, Tier::Disk).expect("full");
        index.remove(removed);
        let evicted = index.find(&key(6)).expect("resident");
        index.evict(evicted, Tier::Disk);

        let mut expected: Vec<_> = (0..blocks).filter(|number| ![5, 6].contains(number)).map(key).collect();
        expected.sort_unstable();
        assert_eq!(all(&index), expected);
        assert_eq!(index.blocks(), expected.len());
        index.validate().expect("valid");
    }

    #[test]
    fn a_block_that_stays_is_visited_once_while_others_come_and_go() {
        let mut index = Index::new(1);
        let blocks = 3 * ENTRIES_PER_PAGE;
        (0..blocks).for_each(|number| put(&mut index, number, Tier::Host));
        let (mut found, mut page, mut next) = (Vec::new(), Some(0), blocks);
        while let Some(at) = page {
            page = index.visit_page(at, |key, _| found.push(key));
            // Odd blocks leave, and their numbers are given to new ones.
            for number in (0..blocks).filter(|number| number % 2 == 1).skip(next as usize % 7).step_by(100) {
                if let Some(id) = index.find(&key(number)) {
                    index.remove(id);
                }
                put(&mut index, next, Tier::Host);
                next += 1;
            }
        }
        found.sort_unstable();
        for number in (0..blocks).step_by(2) {
            let times = found.partition_point(|found| *found <= key(number))
                - found.partition_point(|found| *found < key(number));
            assert_eq!(times, 1, "block {number}");
        }
    }
}
