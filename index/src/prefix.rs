//! The resident beginning of a prefix chain.

use kvhoist_base::block::{BlockKey, Tier};

use super::Index;

impl Index {
    /// The fastest tier of each of the leading `keys` that are resident, up to the first that is resident nowhere.
    /// Touches nothing.
    pub fn match_prefix(&self, keys: &[BlockKey]) -> Vec<Tier> {
        let mut found = keys.iter().map_while(|key| self.find_resident(key));
        let Some(first) = found.next() else { return Vec::new() };
        let mut tiers = Vec::with_capacity(keys.len());
        tiers.push(first);
        tiers.extend(found);
        tiers
    }

    /// The length of [`match_prefix`](Self::match_prefix), without allocating.
    pub fn match_len(&self, keys: &[BlockKey]) -> usize {
        keys.iter().map_while(|key| self.find_resident(key)).count()
    }

    #[inline]
    fn find_resident(&self, key: &BlockKey) -> Option<Tier> {
        // A removed entry is not found.
        self.entry(self.find(key)?).best_tier()
    }
}
