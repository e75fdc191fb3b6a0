//! Turns record pages into a list without duplicates, in order of last use. No I/O.

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

/// What sorting and comparing needs of a record, so that the 96-byte records move once.
#[derive(Clone, Copy)]
struct Ticket {
    last_use: u64,
    slot: u32,
    /// Place in `records`.
    at: u32,
}

pub(super) struct Collector {
    stripe: Stripe,
    seals: Vec<RecordSeal>,
    records: Vec<RecoveredRecord>,
    tickets: Vec<Ticket>,
    /// A hash of each record's key.
    hashes: Vec<u32>,
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
            tickets: Vec::new(),
            hashes: Vec::new(),
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
                    let slot = self.stripe.slot(file, local);
                    let at = self.records.len() as u32;
                    self.tickets.push(Ticket { last_use: record.last_use, slot, at });
                    self.hashes.push(hash(&record.key));
                    self.generation_next = self.generation_next.max(record.generation + 1);
                    self.clock_next = self.clock_next.max(record.last_use + 1);
                    self.records.push(RecoveredRecord {
                        key: record.key,
                        parent: record.parent,
                        slot,
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

    /// The list. One piece of work that does not yield: some 40 ms for a million records.
    pub fn finish(mut self, uuid: [u8; 16], created: bool) -> Recovered {
        if created {
            self.counts.free = self.stripe.slots().into();
        }
        self.drop_duplicates();
        self.counts.valid = self.tickets.len() as u64;
        self.tickets.sort_unstable_by_key(|ticket| (ticket.last_use, ticket.slot));
        self.stale.sort_unstable();
        self.stale.dedup();
        let records = self.tickets.iter().map(|ticket| self.records[ticket.at as usize]).collect();
        let counts = self.counts;
        let sum = counts.valid + counts.free + counts.bad + counts.duplicate + counts.unreadable;
        assert_eq!(sum, u64::from(self.stripe.slots()), "every slot was counted once: {counts:?}");
        Recovered {
            uuid,
            created,
            records,
            counts,
            stale: self.stale,
            generation_next: self.generation_next,
            clock_next: self.clock_next,
            stripe: self.stripe,
        }
    }

    /// Keeps the highest generation of every key.
    ///
    /// Duplicates are rare, so a filter of a few bits a key first finds the keys that may have any; only those
    /// are sorted. Keys chosen to collide cost the sort of all, not more.
    fn drop_duplicates(&mut self) {
        let mut suspects = self.suspects();
        let records = &self.records;
        // Of the same key and generation (the medium was tampered with, or copied) the lower slot counts.
        suspects.sort_unstable_by_key(|&at| {
            let record = &records[at as usize];
            (record.key, std::cmp::Reverse(record.generation), record.slot)
        });
        let mut dropped = Vec::new();
        for pair in suspects.windows(2) {
            let [kept, next] = [pair[0], pair[1]].map(|at| &records[at as usize]);
            if kept.key == next.key {
                dropped.push(pair[1]);
                self.stale.push(self.stripe.page_of(next.slot));
            }
        }
        self.counts.duplicate = dropped.len() as u64;
        dropped.sort_unstable();
        if !dropped.is_empty() {
            // `tickets` is still in the order of `records`.
            self.tickets.retain(|ticket| dropped.binary_search(&ticket.at).is_err());
        }
    }

    /// Records whose key may occur twice.
    fn suspects(&self) -> Vec<u32> {
        // 32 bits a key: one in thirty is suspected without cause. 16 MiB at most.
        let bits = (self.hashes.len() * 32).next_power_of_two().clamp(64, 1 << 27);
        let place = |hash: u32| {
            let bit = hash as usize & (bits - 1);
            (bit / 64, 1u64 << (bit % 64))
        };
        let mut seen = vec![0u64; bits / 64];
        let mut twice = vec![0u64; bits / 64];
        for &hash in &self.hashes {
            let (word, bit) = place(hash);
            twice[word] |= seen[word] & bit;
            seen[word] |= bit;
        }
        let suspected = |(_, hash): &(u32, &u32)| {
            let (word, bit) = place(**hash);
            twice[word] & bit != 0
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
