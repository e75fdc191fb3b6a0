//! Turns record pages into a list without duplicates, in order of last use. No I/O.

use std::cmp::Reverse;

use super::{Recovered, radix::sort_by_high_half};
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
    /// A hash of each record's key.
    hashes: Vec<u32>,
    /// Each record's last use, so that sorting need not walk the records.
    last_uses: Vec<u64>,
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
            stripe,
            seals: Vec::new(),
            records: Vec::new(),
            hashes: Vec::new(),
            last_uses: Vec::new(),
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
                    self.hashes.push(hash(&record.key));
                    self.last_uses.push(record.last_use);
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

    /// The result. One piece of work that does not yield, about half of all CPU time of a recovery.
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
        let order = order(&self.last_uses, &dropped);
        Recovered {
            uuid,
            created,
            // One tight loop, so that cache misses overlap; whoever walks the list then has none.
            records: order.into_iter().map(|at| self.records[at as usize]).collect(),
            counts,
            stale: self.stale,
            generation_next: self.generation_next,
            clock_next: self.clock_next,
            stripe: self.stripe,
        }
    }

    /// Places of the records whose key has a higher generation elsewhere, ascending.
    ///
    /// Equal keys have equal hashes, so only the few records that share a hash are looked at. Keys chosen to
    /// collide cost a sort of all records, not more.
    fn duplicates(&mut self) -> Vec<u32> {
        let hashes = std::mem::take(&mut self.hashes);
        let words = (0u64..).zip(hashes).map(|(at, hash)| u64::from(hash) << 32 | at).collect();
        let mut dropped = Vec::new();
        for group in sort_by_high_half(words).chunk_by(|a, b| a >> 32 == b >> 32) {
            if group.len() > 1 {
                self.duplicates_among(group.iter().map(|&word| word as u32).collect(), &mut dropped);
            }
        }
        dropped.sort_unstable();
        dropped
    }

    fn duplicates_among(&self, mut group: Vec<u32>, dropped: &mut Vec<u32>) {
        let record = |at: u32| &self.records[at as usize];
        // Of the same key and generation (the medium was tampered with, or copied) the lower slot counts.
        group.sort_unstable_by_key(|&at| (record(at).key, Reverse(record(at).generation), record(at).slot));
        let same_key = |pair: &&[u32]| record(pair[0]).key == record(pair[1]).key;
        dropped.extend(group.windows(2).filter(same_key).map(|pair| pair[1]));
    }
}

/// Places of the records that are not `dropped` (ascending), by ascending last use, then place.
fn order(last_uses: &[u64], dropped: &[u32]) -> Vec<u32> {
    let mut dropped = dropped.iter().copied().peekable();
    let kept = (0..last_uses.len() as u32).filter(|at| dropped.next_if_eq(at).is_none());
    let order: Vec<u32> = kept.collect();
    let first = last_uses.iter().copied().min().unwrap_or(0);
    // Digit by digit, the lowest first: a stable sort by the low half, then one by the high half where any differs.
    let age = |at: u32| last_uses[at as usize] - first;
    let sort_by = |order: Vec<u32>, half: &dyn Fn(u32) -> u64| -> Vec<u32> {
        let words = order.into_iter().map(|at| half(at) << 32 | u64::from(at)).collect();
        sort_by_high_half(words).into_iter().map(|word| word as u32).collect()
    };
    let order = sort_by(order, &|at| age(at) & u64::from(u32::MAX));
    match last_uses.iter().all(|last_use| last_use - first <= u64::from(u32::MAX)) {
        true => order,
        false => sort_by(order, &|at| age(at) >> 32),
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
