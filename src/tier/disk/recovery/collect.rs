//! Turns record pages into a list without duplicates, in order of last use. No I/O.

use std::cmp::Reverse;

use super::Recovered;
use crate::{
    block::BlockKey,
    tier::disk::format::{
        PAGE_BYTES, RECORD_BYTES, is_zero,
        record::RecordSeal,
        stripe::{PageId, Stripe},
    },
};

/// A full slot, as its record says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecoveredRecord {
    /// The block's key.
    pub key: BlockKey,
    /// The key of the block before it in its prefix chain.
    pub parent: Option<BlockKey>,
    /// The slot that holds it.
    pub slot: u32,
    /// The block's generation.
    pub generation: u64,
    /// CRC-64/NVME of the payload.
    pub checksum: u64,
    /// The index's logical clock when the block was last used.
    pub last_use: u64,
}

/// The full slots of a store. No key occurs twice.
///
/// They stay where they were parsed (96 bytes each) and are handed out in order: moving a million of them
/// once more would cost as much as parsing them.
#[derive(Debug, Clone, Default)]
pub struct RecoveredRecords {
    table: Vec<RecoveredRecord>,
    order: Vec<u32>,
}

impl RecoveredRecords {
    /// By ascending last use; of equal ones, in the order of the record tables.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &RecoveredRecord> + DoubleEndedIterator + Clone {
        self.order.iter().map(|&at| &self.table[at as usize])
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }
}

/// How many slots were found in which state; they sum to the store's slots.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RecoveryCounts {
    /// Full, and in the list.
    pub valid: u64,
    /// Without a record.
    pub free: u64,
    /// With a record that is torn, rotten, or of another slot or store. Free now.
    pub bad: u64,
    /// With a record whose key another slot has with a higher generation. Free now.
    pub duplicate: u64,
    /// In a page of the record table that could not be read. Free now.
    pub unreadable: u64,
}

pub(super) struct Collector {
    stripe: Stripe,
    seals: Vec<RecordSeal>,
    /// In the order of the tables.
    records: Vec<RecoveredRecord>,
    keys: KeyFilter,
    counts: RecoveryCounts,
    stale: Vec<PageId>,
    /// A page that is all zero for now because it could not be read.
    unreadable: Vec<PageId>,
    generation_next: u64,
    clock_next: u64,
}

impl Collector {
    pub fn new(stripe: Stripe) -> Self {
        Collector {
            keys: KeyFilter::new(stripe.slots()),
            stripe,
            seals: Vec::new(),
            records: Vec::new(),
            counts: RecoveryCounts::default(),
            stale: Vec::new(),
            unreadable: Vec::new(),
            generation_next: 1,
            clock_next: 1,
        }
    }

    /// Accepts records of this store only.
    pub fn seal(&mut self, uuid: &[u8; 16]) {
        self.seals = (0..self.stripe.members().len() as u16).map(|member| RecordSeal::new(uuid, member)).collect();
    }

    /// The page is going to come as zeros, because it could not be read.
    pub fn unreadable(&mut self, page: PageId) {
        self.unreadable.push(page);
    }

    /// Takes in a page of records.
    pub fn page(&mut self, page: PageId, bytes: &[u8; PAGE_BYTES]) {
        let (file, first, count) = self.stripe.page_slots(page);
        if self.unreadable.contains(&page) {
            self.counts.unreadable += u64::from(count);
            self.stale.push(page);
            return;
        }
        let (records, _) = bytes.as_chunks::<RECORD_BYTES>();
        let (records, past_the_end) = records.split_at(count as usize);
        let seal = self.seals[usize::from(file.0)];
        let mut stale = !past_the_end.iter().all(|record| is_zero(record));
        for (local, bytes) in (first..).zip(records) {
            match seal.decode(local, self.stripe.block_bytes(), bytes) {
                Ok(None) => self.counts.free += 1,
                Ok(Some(record)) => {
                    self.keys.insert(&record.key);
                    self.generation_next = self.generation_next.max(record.generation + 1);
                    self.clock_next = self.clock_next.max(record.last_use + 1);
                    self.records.push(RecoveredRecord {
                        key: record.key,
                        parent: record.parent,
                        slot: self.stripe.slot(file, local),
                        generation: record.generation,
                        checksum: record.checksum,
                        last_use: record.last_use,
                    });
                }
                Err(_) => {
                    self.counts.bad += 1;
                    stale = true;
                }
            }
        }
        if stale {
            self.stale.push(page);
        }
    }

    /// The result. One piece of work that does not yield: about a fifth of the whole.
    pub fn finish(mut self, uuid: [u8; 16], created: bool) -> Recovered {
        if created {
            self.counts.free = self.stripe.slots().into();
        }
        let dropped = self.duplicates();
        self.counts.duplicate = dropped.len() as u64;
        self.counts.valid = (self.records.len() - dropped.len()) as u64;
        self.stale.extend(dropped.iter().map(|&at| self.stripe.page_of(self.records[at as usize].slot)));
        self.stale.sort_unstable();
        self.stale.dedup();
        let counts = self.counts;
        let sum = counts.valid + counts.free + counts.bad + counts.duplicate + counts.unreadable;
        assert_eq!(sum, u64::from(self.stripe.slots()), "every slot was counted once: {counts:?}");
        let order = order(&self.records, &dropped);
        Recovered {
            uuid,
            created,
            records: RecoveredRecords { table: self.records, order },
            counts,
            stale: self.stale,
            generation_next: self.generation_next,
            clock_next: self.clock_next,
            stripe: self.stripe,
        }
    }

    /// Places of the records whose key has a higher generation elsewhere, ascending.
    fn duplicates(&mut self) -> Vec<u32> {
        let records = &self.records;
        let mut suspects = self.keys.suspects();
        // Of the same key and generation (the medium was tampered with, or copied) the lower slot counts.
        suspects.sort_unstable_by_key(|&at| {
            let record = &records[at as usize];
            (record.key, Reverse(record.generation), record.slot)
        });
        let same_key = |pair: &&[u32]| records[pair[0] as usize].key == records[pair[1] as usize].key;
        let mut dropped: Vec<u32> = suspects.windows(2).filter(same_key).map(|pair| pair[1]).collect();
        dropped.sort_unstable();
        dropped
    }
}

/// Places of the records that are not `dropped` (ascending), by ascending last use, then place.
fn order(records: &[RecoveredRecord], dropped: &[u32]) -> Vec<u32> {
    let mut dropped = dropped.iter().copied().peekable();
    let kept = (0u32..).zip(records).filter(|(at, _)| dropped.next_if_eq(at).is_none());
    let first = records.iter().map(|record| record.last_use).min().unwrap_or(0);
    let last = records.iter().map(|record| record.last_use).max().unwrap_or(0);
    if last - first <= u64::from(u32::MAX) {
        // The usual case fits a word a record, which sorts twice as fast.
        let mut words: Vec<u64> = kept.map(|(at, record)| (record.last_use - first) << 32 | u64::from(at)).collect();
        words.sort_unstable();
        words.into_iter().map(|word| word as u32).collect()
    } else {
        let mut pairs: Vec<(u64, u32)> = kept.map(|(at, record)| (record.last_use, at)).collect();
        pairs.sort_unstable();
        pairs.into_iter().map(|(_, at)| at).collect()
    }
}

/// Finds the keys that may occur twice. Duplicates are rare, so a few bits a key spare nearly all comparisons.
/// Keys chosen to collide cost the sort of all keys, not more.
struct KeyFilter {
    /// A hash of each key.
    hashes: Vec<u32>,
    /// Two bits a hash value, as many values as `mask` leaves: seen, seen again.
    cells: Vec<u64>,
    mask: u32,
}

const CELLS_PER_WORD: u32 = u64::BITS / 2;

impl KeyFilter {
    /// For at most so many keys. Two bytes a key to four, 32 MiB at most.
    fn new(keys: u32) -> Self {
        let cells = (u64::from(keys) * 8).next_power_of_two().clamp(CELLS_PER_WORD.into(), 1 << 27) as u32;
        KeyFilter { hashes: Vec::new(), cells: vec![0; (cells / CELLS_PER_WORD) as usize], mask: cells - 1 }
    }

    fn insert(&mut self, key: &BlockKey) {
        let hash = hash(key);
        self.hashes.push(hash);
        let (word, shift) = self.place(hash);
        let cell = self.cells[word] >> shift & 1;
        self.cells[word] |= (1 | cell << 1) << shift;
    }

    fn place(&self, hash: u32) -> (usize, u32) {
        let cell = hash & self.mask;
        ((cell / CELLS_PER_WORD) as usize, cell % CELLS_PER_WORD * 2)
    }

    /// The keys, by their number, that share a cell with another.
    fn suspects(&self) -> Vec<u32> {
        let suspected = |(_, hash): &(u32, &u32)| {
            let (word, shift) = self.place(**hash);
            self.cells[word] >> shift & 2 != 0
        };
        (0..).zip(&self.hashes).filter(suspected).map(|(at, _)| at).collect()
    }
}

/// Mixes all of the key: keys are digests, but nothing makes an embedder's keys uniform.
fn hash(key: &BlockKey) -> u32 {
    let (words, _) = key.as_bytes().as_chunks::<8>();
    let mixed = words.iter().fold(0x9E37_79B9_7F4A_7C15u64, |mixed, word| {
        let product = u128::from(mixed ^ u64::from_le_bytes(*word)) * 0xD6E8_FEB8_6659_FD93_u128;
        (product as u64) ^ (product >> 64) as u64
    });
    (mixed >> 32) as u32
}
