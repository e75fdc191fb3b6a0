//! Turns record pages into a list and its order of last use. No I/O.

use std::ops::ControlFlow;

use super::{Pages, Recovered, radix::sort_by_high_half};
use crate::{
    block::BlockKey,
    tier::disk::{
        DiskSlots,
        format::{
            PAGE_BYTES, RECORD_BYTES, is_zero,
            record::RecordSeal,
            stripe::{PageId, Stripe},
        },
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
pub struct Counts {
    /// With a record that names a block.
    pub valid: u64,
    /// Without a record.
    pub free: u64,
    /// With a record that is torn, rotten, of another slot or store, or could not be read. Free now.
    pub bad: u64,
}

pub(super) struct Collector {
    stripe: Stripe,
    seals: Vec<RecordSeal>,
    /// In the order of the tables.
    records: Vec<RecoveredRecord>,
    /// Each record's last use, so that sorting need not walk the records.
    last_uses: Vec<u64>,
    counts: Counts,
    stale: Vec<PageId>,
    /// A page that is all zero for now because it could not be read.
    unreadable: Vec<PageId>,
    generation_next: u64,
}

impl Collector {
    /// Accepts records of the store `uuid` only.
    pub fn new(stripe: Stripe, uuid: &[u8; 16]) -> Self {
        Collector {
            seals: (0..stripe.members().len() as u16).map(|member| RecordSeal::new(uuid, member)).collect(),
            stripe,
            records: Vec::new(),
            last_uses: Vec::new(),
            counts: Counts::default(),
            stale: Vec::new(),
            unreadable: Vec::new(),
            generation_next: 1,
        }
    }

    fn take_in(&mut self, page: PageId, bytes: &[u8; PAGE_BYTES]) {
        let (file, first, count) = self.stripe.page_slots(page);
        if self.unreadable.contains(&page) {
            self.counts.bad += u64::from(count);
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
                    self.counts.valid += 1;
                    self.last_uses.push(record.last_use);
                    self.generation_next = self.generation_next.max(record.generation + 1);
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

    /// The result. One piece of work that does not yield: it sorts small keys, before anybody is served.
    pub fn finish(self, uuid: [u8; 16]) -> Recovered {
        let sum = self.counts.valid + self.counts.free + self.counts.bad;
        assert_eq!(sum, u64::from(self.stripe.slots()), "every slot was counted once: {:?}", self.counts);
        let mut slots = DiskSlots::new(self.stripe, uuid);
        self.stale.iter().for_each(|&page| slots.mark_stale(page));
        Recovered {
            slots,
            order: order(&self.last_uses),
            records: self.records,
            counts: self.counts,
            next_generation: self.generation_next,
        }
    }
}

impl Pages for Collector {
    const UNREADABLE_MAX: u64 = 64;

    fn unreadable(&mut self, page: PageId) {
        self.unreadable.push(page);
    }

    fn page(&mut self, page: PageId, bytes: &[u8; PAGE_BYTES]) -> ControlFlow<()> {
        self.take_in(page, bytes);
        ControlFlow::Continue(())
    }
}

/// Places of the records by ascending last use, then place.
fn order(last_uses: &[u64]) -> Vec<u32> {
    let order: Vec<u32> = (0..last_uses.len() as u32).collect();
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
