//! Which blocks the store has, as far as this cache knows.
//!
//! Objects are written once, so what was read of one stays true until it is deleted: then a read finds nothing, which
//! is a miss, and the object is forgotten. One that was created anew since has another length, which a listing says, or
//! other checksums, which a read finds: its table is read again.

use std::{mem, sync::Arc};

use hashbrown::HashTable;
use slab::Slab;

use crate::{block::BlockKey, index::KeyHasher};

/// A block of an object: its place in the object's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub(crate) object: u32,
    pub(crate) at: u32,
}

/// A block, as the table of its object has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Known {
    pub(crate) key: BlockKey,
    pub(crate) offset: u64,
    pub(crate) checksum: u64,
}

/// An object, as its table has it: a run of one chain's blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) name: Arc<str>,
    /// The key before the first block in its chain.
    pub(crate) parent: Option<BlockKey>,
    pub(crate) blocks: Box<[Known]>,
    /// The number of the latest listing that had it, or during which it was entered.
    pub(crate) seen: u64,
    /// The block of its name was to be written, found it in the store, and is not offered all the same: how often all
    /// was forgotten before.
    refuses_writes: Option<u32>,
    /// Its table is to be read again. A block of it was read with another checksum: it is damaged, or was deleted and
    /// created anew since. Or its table was not read yet, or is none.
    is_doubted: bool,
    /// None of its blocks is offered until its table was read again: a read of them was not what it should be.
    is_hidden: bool,
    /// Its table is none.
    is_passed_over: bool,
}

impl Run {
    pub(crate) fn new(name: &str, parent: Option<BlockKey>, blocks: Box<[Known]>, seen: u64) -> Self {
        let name = name.into();
        let (is_doubted, is_hidden, is_passed_over) = (false, false, false);
        Run { name, parent, blocks, seen, refuses_writes: None, is_doubted, is_hidden, is_passed_over }
    }
}

/// A block to be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReadBlock {
    pub(crate) object: Arc<str>,
    pub(crate) known: Known,
    pub(crate) parent: Option<BlockKey>,
    /// The block before it in its read is the one before it in its object: both are one range.
    pub(crate) follows: bool,
}

/// How many blocks are read together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReadLimits {
    /// Of one range of an object.
    pub(crate) range_blocks: usize,
    /// Ranges of one read; each of its own objects.
    pub(crate) ranges: usize,
    /// Of one read of several ranges.
    pub(crate) blocks: usize,
}

/// Tables that the keys are spread over: one that grows moves its entries under the lock.
pub(crate) const SHARDS: usize = 256;

/// Objects that are looked at under one lock, and the blocks of those that are forgotten: some tens of microseconds.
const OBJECTS_AT_ONCE: usize = 4096;
const BLOCKS_AT_ONCE: usize = 256;

/// The map of a namespace.
///
/// A block takes 48 bytes in its object and 9 to 19 in the table by key; an object takes its name and some 100 bytes
/// more.
pub(crate) struct Presence {
    objects: Slab<Run>,
    by_key: Box<[HashTable<Place>]>,
    by_name: HashTable<u32>,
    hasher: KeyHasher,
    /// Bytes of the objects.
    object_bytes: usize,
    /// What all may take.
    bytes_max: usize,
    /// An object found no room, and none was forgotten since.
    is_full: bool,
    /// How often all blocks were forgotten.
    forgotten: u32,
}

impl Presence {
    pub(crate) fn new(hasher: KeyHasher, bytes_max: usize) -> Self {
        Presence {
            objects: Slab::new(),
            by_key: (0..SHARDS).map(|_| HashTable::new()).collect(),
            by_name: HashTable::new(),
            hasher,
            object_bytes: 0,
            bytes_max,
            is_full: false,
            forgotten: 0,
        }
    }

    /// Blocks that are known, each counted once for each object that has it.
    pub(crate) fn len(&self) -> usize {
        self.by_key.iter().map(HashTable::len).sum()
    }

    /// Objects that are known.
    pub(crate) fn objects(&self) -> usize {
        self.objects.len()
    }

    /// Bytes of memory that the map takes.
    pub(crate) fn bytes(&self) -> usize {
        let tables: usize = self.by_key.iter().map(HashTable::allocation_size).sum();
        let tables = tables + self.by_name.allocation_size();
        self.object_bytes + self.objects.capacity() * (size_of::<Run>() + size_of::<usize>()) + tables
    }

    /// Whether an object would find no room: its table need not be read.
    pub(crate) fn is_full(&self) -> bool {
        self.is_full
    }

    pub(crate) fn contains(&self, key: &BlockKey) -> bool {
        self.find(key).is_some()
    }

    pub(crate) fn knows(&self, name: &str) -> bool {
        self.id_of(name).is_some()
    }

    fn id_of(&self, name: &str) -> Option<u32> {
        self.by_name.find(self.hash_name(name), |&id| &*self.objects[id as usize].name == name).copied()
    }

    /// Enters an object, unless it is known or the map is full; true if it is known from now on. One that was doubted
    /// stays as it is known if its table is the same, and hidden no longer, and is entered anew if not.
    pub(crate) fn enter(&mut self, run: Run) -> bool {
        if let Some(id) = self.id_of(&run.name) {
            let known = &mut self.objects[id as usize];
            if !mem::take(&mut known.is_doubted) {
                return true;
            }
            known.is_hidden = false;
            if known.blocks == run.blocks {
                return true;
            }
            self.forget_object(&run.name);
        }
        let bytes = run_bytes(&run);
        // A table that grows holds twice its entries.
        let grown = run.blocks.len().max(1) * 2 * (size_of::<Place>() + 1);
        if self.bytes() + bytes + grown > self.bytes_max {
            self.is_full = true;
            return false;
        }
        let id = u32::try_from(self.objects.vacant_key()).expect("the map is full before");
        let keys: Vec<BlockKey> = run.blocks.iter().map(|block| block.key).collect();
        let name_hash = self.hash_name(&run.name);
        self.object_bytes += bytes;
        self.objects.insert(run);
        let Presence { objects, by_key, by_name, hasher, .. } = self;
        for (at, key) in keys.iter().enumerate() {
            let place = Place { object: id, at: at as u32 };
            let hash = hasher.hash(key);
            by_key[shard(hash)].insert_unique(hash, place, |place| hasher.hash(&key_of(objects, *place)));
        }
        by_name.insert_unique(name_hash, id, |&id| hash_name(hasher, &objects[id as usize].name));
        true
    }

    /// Forgets an object: it is gone from the store, or is not what it should be.
    pub(crate) fn forget_object(&mut self, name: &str) {
        let hash = self.hash_name(name);
        let Presence { objects, by_name, .. } = self;
        let found = by_name.find_entry(hash, |&id| &*objects[id as usize].name == name);
        let Ok(found) = found else { return };
        let id = found.remove().0;
        self.unlist(id);
        self.is_full = false;
        let forgotten = self.objects.remove(id as usize);
        self.object_bytes -= run_bytes(&forgotten);
    }

    /// Offers no block of an object, which is not what it should be, until a listing has had its table read again and
    /// that is sound. What is forgotten meanwhile stays forgotten, so the blocks keep their places in the table by key.
    pub(crate) fn hide_object(&mut self, name: &str) {
        if let Some(id) = self.id_of(name) {
            let run = &mut self.objects[id as usize];
            (run.is_doubted, run.is_hidden) = (true, true);
        }
    }

    /// Offers a block again, if it is at this place of an object's table with this checksum; whether it is offered.
    pub(crate) fn offer(&mut self, name: &str, at: usize, key: &BlockKey, checksum: u64) -> bool {
        if self.contains(key) {
            return true;
        }
        let Some(object) = self.id_of(name) else { return false };
        let Presence { objects, by_key, hasher, .. } = self;
        let run = &objects[object as usize];
        let known = run.blocks.get(at).filter(|_| !run.is_hidden);
        if known.is_none_or(|known| known.key != *key || known.checksum != checksum) {
            return false;
        }
        let (hash, place) = (hasher.hash(key), Place { object, at: at as u32 });
        by_key[shard(hash)].insert_unique(hash, place, |place| hasher.hash(&key_of(objects, *place)));
        true
    }

    /// Takes the blocks of an object out of the table by key.
    fn unlist(&mut self, id: u32) {
        let Presence { objects, by_key, hasher, .. } = self;
        for (at, block) in objects[id as usize].blocks.iter().enumerate() {
            let place = Place { object: id, at: at as u32 };
            let hash = hasher.hash(&block.key);
            if let Ok(found) = by_key[shard(hash)].find_entry(hash, |other| *other == place) {
                found.remove();
            }
        }
    }

    /// Forgets a block in every object; false if none has it, not even one that is hidden. The objects stay known, so
    /// the next listing does not bring it back.
    pub(crate) fn forget(&mut self, key: &BlockKey) -> bool {
        let Presence { objects, by_key, hasher, .. } = self;
        let (hash, mut was_known) = (hasher.hash(key), false);
        while let Ok(found) = by_key[shard(hash)].find_entry(hash, |place| key_of(objects, *place) == *key) {
            found.remove();
            was_known = true;
        }
        was_known
    }

    /// The keys of the blocks in one of [`SHARDS`] that are offered, or hidden with their object.
    pub(crate) fn keys_of(&self, shard: usize) -> impl Iterator<Item = BlockKey> {
        self.by_key[shard].iter().map(|place| key_of(&self.objects, *place))
    }

    /// Forgets every block, as [`forget`](Self::forget) does one, and which writes would be in vain.
    pub(crate) fn forget_all(&mut self) {
        self.forgotten = self.forgotten.wrapping_add(1);
        self.by_key.iter_mut().for_each(HashTable::clear);
    }

    /// Notes that a block was read from an object with another checksum: it is forgotten, and the object's table is to
    /// be read again. Nothing if that was done since the read began.
    pub(crate) fn doubt(&mut self, name: &str, known: &Known) {
        let run = self.id_of(name).map(|id| &mut self.objects[id as usize]);
        if let Some(run) = run.filter(|run| run.blocks.contains(known)) {
            run.is_doubted = true;
            self.forget(&known.key);
        }
    }

    /// Notes that a listing has an object of so many blocks; false if its table is to be read: it is not known so, and
    /// not at all from now on unless it is known without blocks, or it is doubted.
    pub(crate) fn see(&mut self, name: &str, blocks: Option<usize>, listing: u64) -> bool {
        let Some(run) = self.id_of(name).map(|id| &mut self.objects[id as usize]) else { return false };
        run.seen = listing;
        let (is_same, is_doubted) = (Some(run.blocks.len()) == blocks, run.is_doubted);
        if !is_same && !run.blocks.is_empty() {
            self.forget_object(name);
        }
        is_same && !is_doubted
    }

    /// Forgets those of some objects, from this place on, that the listing of this number does not have; the place of
    /// the next one, if there are more.
    pub(crate) fn forget_unseen(&mut self, listing: u64, from: usize) -> Option<usize> {
        let (mut blocks, mut at) = (0, from);
        let end = from.saturating_add(OBJECTS_AT_ONCE).min(self.objects.capacity());
        while at < end && blocks < BLOCKS_AT_ONCE {
            if let Some(run) = self.objects.get(at).filter(|run| run.seen < listing) {
                let name = Arc::clone(&run.name);
                blocks += run.blocks.len();
                self.forget_object(&name);
            }
            at += 1;
        }
        (at < self.objects.capacity()).then_some(at)
    }

    /// The reads that bring these blocks: ranges of those that follow one another in an object, each read with as many
    /// ranges as the limits say. The keys that are not there come back.
    pub(crate) fn plan(&self, keys: &[BlockKey], limits: ReadLimits) -> (Vec<Vec<ReadBlock>>, Vec<BlockKey>) {
        let mut places = Vec::with_capacity(keys.len());
        let mut unknown = Vec::new();
        for key in keys {
            match self.find(key) {
                Some(place) => places.push(place),
                None => unknown.push(*key),
            }
        }
        places.sort_unstable();
        places.dedup();
        let mut reads: Vec<Vec<ReadBlock>> = Vec::new();
        let (mut last, mut ranges, mut of_range): (Option<Place>, usize, usize) = (None, 0, 0);
        for place in places {
            let run = &self.objects[place.object as usize];
            let known = run.blocks[place.at as usize];
            let parent = place.at.checked_sub(1).map_or(run.parent, |before| Some(run.blocks[before as usize].key));
            let follows =
                last.is_some_and(|last| Place { at: last.at + 1, ..last } == place) && of_range < limits.range_blocks;
            last = Some(place);
            let block = ReadBlock { object: Arc::clone(&run.name), known, parent, follows };
            match reads.last_mut() {
                Some(read) if follows => read.push(block),
                Some(read) if ranges < limits.ranges && read.len() < limits.blocks => {
                    ranges += 1;
                    read.push(block);
                }
                _ => {
                    ranges = 1;
                    reads.push(vec![block]);
                }
            }
            of_range = if follows { of_range + 1 } else { 1 };
        }
        (reads, unknown)
    }

    /// Where a block is: in any of the objects that have it and are not hidden.
    fn find(&self, key: &BlockKey) -> Option<Place> {
        let hash = self.hasher.hash(key);
        let is_offered = |place: &Place| {
            let run = &self.objects[place.object as usize];
            run.blocks[place.at as usize].key == *key && !run.is_hidden
        };
        self.by_key[shard(hash)].find(hash, is_offered).copied()
    }

    fn hash_name(&self, name: &str) -> u64 {
        hash_name(&self.hasher, name)
    }
}

/// The table of a hash. The tables themselves use its low bits and the highest seven.
fn shard(hash: u64) -> usize {
    (hash >> 40) as usize % SHARDS
}

fn key_of(objects: &Slab<Run>, place: Place) -> BlockKey {
    objects[place.object as usize].blocks[place.at as usize].key
}

/// The hash of a name: of its bytes, folded into a key.
fn hash_name(hasher: &KeyHasher, name: &str) -> u64 {
    let mut folded = [0; 32];
    for chunk in name.as_bytes().chunks(32) {
        let mut words = [0; 32];
        words[..chunk.len()].copy_from_slice(chunk);
        let carried = hasher.hash(&BlockKey::new(folded)).to_le_bytes();
        folded = words;
        folded.iter_mut().zip(carried).for_each(|(byte, carried)| *byte ^= carried);
    }
    hasher.hash(&BlockKey::new(folded))
}

/// Bytes of an object beside its place in the slab.
fn run_bytes(run: &Run) -> usize {
    run.name.len() + run.blocks.len() * size_of::<Known>()
}

mod refused;
#[cfg(test)]
mod tests;
