//! Decodes record pages and counts invalid records. No I/O.

use std::ops::ControlFlow;

use super::{PageVisitor, RecordSink, Recovered};
use crate::{
    block::BlockKey,
    disk::{
        DiskSlots,
        format::{
            PAGE_BYTES, RECORD_BYTES, RECORDS_PER_PAGE, is_zero,
            record::RecordSeal,
            stripe::{PageId, Stripe},
        },
    },
    error::Result,
};

/// The record of a full slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecoveredRecord {
    /// The block's key.
    pub key: BlockKey,
    /// The key of the preceding block in its prefix chain.
    pub parent: Option<BlockKey>,
    /// The slot that holds it.
    pub slot: u32,
    /// The block's generation.
    pub generation: u64,
    /// CRC-64/NVME of the payload.
    pub checksum: u64,
    /// The index's logical clock when the block was last used.
    pub last_use: u64,
    /// Number of requests that used it, at most 3; 0 if unknown.
    pub uses: u8,
}

/// Number of slots by state of their record; the counts sum to the store's slots.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Slots with a record that names a block.
    pub valid: u64,
    /// Slots without a record.
    pub free: u64,
    /// Slots with a record that is torn, corrupted, from another slot or store, or unreadable. They are free now.
    pub bad: u64,
}

pub(super) struct Collector<'a> {
    stripe: Stripe,
    slots: DiskSlots,
    seals: Vec<RecordSeal>,
    sink: &'a mut RecordSink<'a>,
    /// The records of the current page.
    page: Vec<RecoveredRecord>,
    counts: Counts,
    /// Pages replaced by zeros because they could not be read.
    unreadable: Vec<PageId>,
    generation_next: u64,
}

impl<'a> Collector<'a> {
    /// Accepts only records of store `uuid`.
    pub fn new(stripe: Stripe, uuid: [u8; 16], records_uses: bool, sink: &'a mut RecordSink<'a>) -> Result<Self> {
        Ok(Collector {
            seals: (0..stripe.members().len() as u16).map(|member| RecordSeal::new(&uuid, member)).collect(),
            slots: DiskSlots::new(stripe.clone(), uuid, records_uses)?,
            stripe,
            sink,
            page: Vec::with_capacity(RECORDS_PER_PAGE),
            counts: Counts::default(),
            unreadable: Vec::new(),
            generation_next: 1,
        })
    }

    fn collect(&mut self, page: PageId, bytes: &[u8; PAGE_BYTES]) {
        let (file, first, count) = self.stripe.page_slots(page);
        if self.unreadable.contains(&page) {
            self.counts.bad += u64::from(count);
            self.slots.mark_leftover(page, None);
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
                    self.generation_next = self.generation_next.max(record.generation + 1);
                    self.page.push(RecoveredRecord {
                        key: record.key,
                        parent: record.parent,
                        slot: self.stripe.slot(file, local),
                        generation: record.generation,
                        checksum: record.checksum,
                        last_use: record.last_use,
                        uses: record.uses,
                    });
                }
                Err(_) => {
                    self.counts.bad += 1;
                    stale = true;
                }
            }
        }
        (self.sink)(&mut self.slots, &self.page);
        self.page.clear();
        if stale {
            self.slots.mark_leftover(page, None);
        }
    }

    /// Returns the recovered store.
    pub fn finish(self) -> Recovered {
        let sum = self.counts.valid + self.counts.free + self.counts.bad;
        assert_eq!(sum, u64::from(self.stripe.slots()), "every slot was counted once: {:?}", self.counts);
        Recovered { slots: self.slots, counts: self.counts, next_generation: self.generation_next, is_new: false }
    }
}

impl PageVisitor for Collector<'_> {
    const UNREADABLE_MAX: u64 = 64;

    fn unreadable(&mut self, page: PageId) {
        self.unreadable.push(page);
    }

    fn page(&mut self, page: PageId, bytes: &[u8; PAGE_BYTES]) -> ControlFlow<()> {
        self.collect(page, bytes);
        ControlFlow::Continue(())
    }
}
