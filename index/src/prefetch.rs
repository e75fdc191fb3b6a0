//! Hints to the processor. A step under the lock reads some ten places of a block that were last used by another
//! processor, or long ago: asked for one after the other, each would be waited for.

use kvhoist_base::{
    block::{BlockKey, Tier},
    memory::prefetch,
};

use super::{
    EntryId, Index,
    entry::Entry,
    link::{LATE, Link},
};

/// How many keys before its turn the processor is told of an entry.
pub(super) const AHEAD: usize = 16;

impl Index {
    /// Tells the processor what a look-up of these keys will read.
    pub fn prefetch_keys<'a>(&self, keys: impl Iterator<Item = &'a BlockKey>) {
        // Nearly always the key's own entry. For an empty chain any: a branch on the head would wait for it.
        let load_first = |chain| self.prefetch_entry(self.map.first(chain).unwrap_or(0));
        // Chains whose heads are on their way: read at once, each would be waited for.
        let (mut heads, mut count) = ([0; AHEAD], 0);
        for key in keys {
            let chain = self.map.chain(self.hasher.hash(key));
            prefetch(self.map.head(chain));
            let before = std::mem::replace(&mut heads[count % AHEAD], chain);
            if count >= AHEAD {
                load_first(before);
            }
            count += 1;
        }
        heads.into_iter().take(count).for_each(load_first);
    }

    /// Tells the processor that an entry will be read. Any id will do.
    #[inline]
    pub fn prefetch(&self, id: EntryId) {
        self.prefetch_entry(id.0);
    }

    /// Tells the processor which entries a use of this one, a fill or the end of a pin changes too.
    #[inline]
    pub fn prefetch_around(&self, id: EntryId) {
        let entry = self.entry(id);
        self.prefetch_entry(entry.parent);
        for tier in Tier::ALL {
            let Link { colder, hotter } = entry.link(tier);
            self.prefetch_entry(colder);
            self.prefetch_entry(hotter);
        }
    }

    #[inline]
    fn prefetch_entry(&self, id: u32) {
        if id < LATE {
            prefetch(std::ptr::without_provenance::<Entry>(self.entries_at).wrapping_add(id as usize));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_of_the_first_entry_follows_the_entries() {
        let mut index = Index::new(1);
        let key = |number: u32| {
            let mut bytes = [0; 32];
            bytes[..4].copy_from_slice(&number.to_le_bytes());
            BlockKey::new(bytes)
        };
        let mut moves = 0;
        for number in 0..5000 {
            let before = index.entries_at;
            let id = index.insert(key(number), None);
            assert!(index.begin_fill(id, Tier::Host));
            let first = index.entry(EntryId(0));
            assert_eq!(index.entries_at, std::ptr::from_ref(first).addr(), "after {number}");
            moves += u32::from(before != index.entries_at);
        }
        assert!(moves > 1, "it grew where it was");
    }
}
