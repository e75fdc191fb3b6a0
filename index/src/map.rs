//! Finds entries by their keys.

use kvhoist_base::block::BlockKey;
use slab::Slab;

use super::entry::Entry;

/// Chains through the entries, by the hashes of their keys: the first of each chain is here, the others follow by
/// [`Entry::next`]. There are as many chains as there is room for entries, so most have one entry or none.
///
/// It grows with the slab alone, and moves nothing however often entries come and go: whoever adds one has the lock
/// that all callers share.
#[derive(Default)]
pub(super) struct KeyMap {
    /// The first entry of each chain, [as a link](link_to).
    heads: Vec<u32>,
    len: usize,
}

/// A link to an entry. The link to none is 0: memory that was never written has empty chains.
#[inline]
fn link_to(id: u32) -> u32 {
    id + 1
}

#[inline]
fn linked(link: u32) -> Option<u32> {
    link.checked_sub(1)
}

impl KeyMap {
    /// Entries that can be found.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The chain of a hash.
    #[inline]
    pub(super) fn chain(&self, hash: u64) -> usize {
        ((u128::from(hash) * self.heads.len() as u128) >> 64) as usize
    }

    /// Where the first entry of a chain is found. It is good for hints only.
    #[inline]
    pub(super) fn head(&self, chain: usize) -> *const u32 {
        self.heads.as_ptr().wrapping_add(chain)
    }

    /// The first entry of a chain.
    #[inline]
    pub(super) fn first(&self, chain: usize) -> Option<u32> {
        self.heads.get(chain).copied().and_then(linked)
    }

    #[inline]
    pub(super) fn find(&self, entries: &Slab<Entry>, hash: u64, key: &BlockKey) -> Option<u32> {
        let mut next = self.first(self.chain(hash));
        while let Some(id) = next {
            let entry = &entries[id as usize];
            if entry.key == *key {
                return next;
            }
            next = linked(entry.next);
        }
        None
    }

    /// Adds an entry, which is not in it. It has grown with the slab.
    #[inline]
    pub(super) fn insert(&mut self, entries: &mut Slab<Entry>, hash: u64, id: u32) {
        let chain = self.chain(hash);
        entries[id as usize].next = std::mem::replace(&mut self.heads[chain], link_to(id));
        self.len += 1;
    }

    /// Takes out an entry, which is in it.
    pub(super) fn remove(&mut self, entries: &mut Slab<Entry>, hash: u64, id: u32) {
        let after = std::mem::take(&mut entries[id as usize].next);
        let chain = self.chain(hash);
        let mut before = None;
        let mut at = self.first(chain).expect("an entry that was not removed is in the map");
        while at != id {
            before = Some(at);
            at = linked(entries[at as usize].next).expect("an entry that was not removed is in its chain");
        }
        match before {
            None => self.heads[chain] = after,
            Some(before) => entries[before as usize].next = after,
        }
        self.len -= 1;
    }

    /// Has as many chains as there is room for entries, at least.
    pub(super) fn grow(&mut self, entries: &mut Slab<Entry>, hash: impl Fn(&BlockKey) -> u64) {
        if entries.capacity() <= self.heads.len() {
            return;
        }
        // Its memory follows with the entries.
        self.heads = vec![0; entries.capacity()];
        for (id, entry) in entries.iter_mut().filter(|(_, entry)| !entry.is_removed()) {
            let chain = self.chain(hash(&entry.key));
            entry.next = std::mem::replace(&mut self.heads[chain], link_to(id as u32));
        }
    }

    /// The address of its memory, and its bytes.
    pub(super) fn memory(&self) -> (usize, usize) {
        (self.heads.as_ptr().addr(), size_of_val(&*self.heads))
    }
}
