//! The resident beginning of a prefix chain.

use super::{EntryId, Index};
use crate::block::{BlockKey, Tier};

/// Room reserved at first: most chains are shorter.
const FIRST_ROOM: usize = 256;

/// The leading blocks of a chain that are resident, and where.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PrefixMatch {
    tiers: Vec<Tier>,
    ids: Vec<EntryId>,
}

impl PrefixMatch {
    /// Number of leading blocks that are resident in at least one tier.
    pub fn len(&self) -> usize {
        self.tiers.len()
    }

    /// True if the first block is resident nowhere.
    pub fn is_empty(&self) -> bool {
        self.tiers.is_empty()
    }

    /// The fastest tier of each block.
    pub fn tiers(&self) -> &[Tier] {
        &self.tiers
    }

    /// The fastest tier of each block, as a list.
    pub fn into_tiers(self) -> Vec<Tier> {
        self.tiers
    }

    /// The entry of each block, good until the index next changes; for [`Index::touch_chain`] above all.
    pub fn ids(&self) -> &[EntryId] {
        &self.ids
    }
}

impl Index {
    /// The leading run of `keys` that is resident, up to the first that is resident nowhere. Touches nothing.
    pub fn match_prefix(&self, keys: &[BlockKey]) -> PrefixMatch {
        let mut found = PrefixMatch::default();
        for key in keys {
            let Some((id, tier)) = self.find_resident(key) else { break };
            if found.ids.len() == found.ids.capacity() {
                let room = if found.is_empty() { keys.len().min(FIRST_ROOM) } else { keys.len() - found.len() };
                found.tiers.reserve_exact(room);
                found.ids.reserve_exact(room);
            }
            found.tiers.push(tier);
            found.ids.push(id);
        }
        found
    }

    /// The length of [`match_prefix`](Self::match_prefix), without allocating.
    pub fn match_len(&self, keys: &[BlockKey]) -> usize {
        keys.iter().take_while(|key| self.find_resident(key).is_some()).count()
    }

    #[inline]
    fn find_resident(&self, key: &BlockKey) -> Option<(EntryId, Tier)> {
        let id = self.find(key)?;
        Some((id, self.best_tier(id)?))
    }
}
