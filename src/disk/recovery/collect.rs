//! Decodes record pages and counts invalid records. No I/O.

use std::{
    future::Future,
    ops::{ControlFlow, Deref},
    sync::Arc,
};

use super::{PageVisitor, RecordSink, Recovered, pages::RecordPages, table::PAGES_PER_YIELD};
use crate::{
    disk::{
        DiskSlots,
        format::{
            PAGE_BYTES, RECORD_BYTES, RECORDS_PER_PAGE,
            record::Record,
            stripe::{PageId, Stripe},
        },
    },
    memory::AlignedBuf,
};

/// More than the generations of a run: no store writes so many blocks.
const UNKNOWN_GENERATIONS: u64 = 1 << 40;

/// The record of a full slot. Its length is the store's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecoveredRecord {
    /// The slot.
    pub slot: u32,
    /// What its record says of the block.
    pub record: Record,
}

impl Deref for RecoveredRecord {
    type Target = Record;

    fn deref(&self) -> &Record {
        &self.record
    }
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

/// Pure work may run beside its caller: on the workers of a cache.
pub trait Threads {
    /// True if there is a thread.
    fn any(&self) -> bool;

    /// Runs `work`; `bytes` is its size. `None` if no thread did: it has been dropped, or is about to be.
    fn run<T: Send + 'static>(
        &self,
        bytes: u64,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> impl Future<Output = Option<T>>;

    /// What a thread calls with the number of records that it has decoded, before they are entered.
    fn decoded(&self) -> impl Fn(usize) + Send + 'static {
        |_| ()
    }
}

/// No threads: the caller does the work.
impl Threads for () {
    fn any(&self) -> bool {
        false
    }

    async fn run<T: Send + 'static>(&self, _bytes: u64, _work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        None
    }
}

/// Decodes pages, on threads too.
pub(super) struct Decoder(RecordPages);

/// Decoded pages.
#[derive(Default)]
pub(super) struct Decoded {
    records: Vec<RecoveredRecord>,
    counts: Counts,
    /// Pages with invalid records.
    stale: Vec<PageId>,
}

impl Decoded {
    fn clear(&mut self) {
        self.records.clear();
        self.stale.clear();
        self.counts = Counts::default();
    }
}

impl Decoder {
    /// Accepts only records of store `uuid`.
    pub fn new(stripe: Stripe, uuid: [u8; 16]) -> Self {
        Decoder(RecordPages::new(stripe, &uuid))
    }

    /// Has consecutive pages decoded by one of the threads, if there are any. Returns the pages.
    pub async fn decode_on(
        self: &Arc<Self>,
        threads: &impl Threads,
        first: PageId,
        pages: AlignedBuf,
    ) -> (Option<Decoded>, AlignedBuf) {
        let bytes = pages.len() as u64;
        if !threads.any() {
            return (None, pages);
        }
        let pages = Arc::new(pages);
        let (this, shared, told) = (Arc::clone(self), Arc::clone(&pages), threads.decoded());
        let work = move || {
            let mut decoded =
                Decoded { records: Vec::with_capacity(shared.len() / RECORD_BYTES), ..Decoded::default() };
            for (page, bytes) in (first.0..).map(PageId).zip(shared.as_chunks::<PAGE_BYTES>().0) {
                this.decode(page, bytes, &mut decoded);
            }
            told(decoded.records.len());
            decoded
        };
        let decoded = threads.run(bytes, work).await;
        // Work that no thread did may still be about to be dropped.
        let pages = Arc::try_unwrap(pages).unwrap_or_else(|shared| {
            let mut copy = AlignedBuf::zeroed(shared.len());
            copy.copy_from_slice(&shared);
            copy
        });
        (decoded, pages)
    }

    fn decode(&self, page: PageId, bytes: &[u8; PAGE_BYTES], into: &mut Decoded) {
        let bad = into.counts.bad;
        let past_end = self.0.decode(page, bytes, |slot, _, record| match record {
            Ok(None) => into.counts.free += 1,
            Ok(Some(record)) => {
                into.counts.valid += 1;
                into.records.push(RecoveredRecord { slot, record });
            }
            Err(_) => into.counts.bad += 1,
        });
        if past_end.is_some() || into.counts.bad > bad {
            into.stale.push(page);
        }
    }
}

pub(super) struct Collector<'a> {
    slots: DiskSlots,
    decoder: Arc<Decoder>,
    sink: &'a mut RecordSink<'a>,
    /// The current page.
    page: Decoded,
    counts: Counts,
    /// Pages replaced by zeros because they could not be read.
    unreadable: Vec<PageId>,
    generation_next: u64,
}

impl<'a> Collector<'a> {
    /// Collects what `decoder` accepts.
    pub fn new(decoder: &Arc<Decoder>, slots: DiskSlots, sink: &'a mut RecordSink<'a>) -> Self {
        Collector {
            slots,
            decoder: Arc::clone(decoder),
            sink,
            page: Decoded::default(),
            counts: Counts::default(),
            unreadable: Vec::new(),
            generation_next: 1,
        }
    }

    /// Enters the records of a page.
    fn enter(&mut self, records: &[RecoveredRecord]) {
        let newest = records.iter().map(|record| record.generation).max();
        self.generation_next = self.generation_next.max(newest.map_or(1, |newest| newest + 1));
        (self.sink)(&mut self.slots, records);
    }

    /// Counts the records of pages, and marks those with invalid ones.
    fn count(&mut self, Decoded { counts, stale, .. }: &Decoded) {
        self.counts.valid += counts.valid;
        self.counts.free += counts.free;
        self.counts.bad += counts.bad;
        stale.iter().for_each(|&page| self.slots.mark_leftover(page, None));
    }

    /// Returns the recovered store.
    pub fn finish(self) -> Recovered {
        let sum = self.counts.valid + self.counts.free + self.counts.bad;
        let slots = self.slots.stripe().slots();
        assert_eq!(sum, u64::from(slots), "every slot was counted once: {:?}", self.counts);
        // Records that are not known now may be read by a later open, and are older than what is stored from now on.
        let is_whole = self.unreadable.is_empty() && self.counts.bad == 0;
        let unknown = if is_whole { 0 } else { UNKNOWN_GENERATIONS };
        let next_generation = self.generation_next.saturating_add(unknown);
        Recovered { slots: self.slots, counts: self.counts, next_generation, is_new: false }
    }
}

impl PageVisitor for Collector<'_> {
    type Parsed = Decoded;

    const UNREADABLE_MAX: u64 = 64;

    fn unreadable(&mut self, page: PageId) {
        self.unreadable.push(page);
    }

    fn page(&mut self, page: PageId, bytes: &[u8; PAGE_BYTES]) -> ControlFlow<()> {
        if self.unreadable.contains(&page) {
            let (_, _, count) = self.slots.stripe().page_slots(page);
            self.counts.bad += u64::from(count);
            self.slots.mark_leftover(page, None);
            return ControlFlow::Continue(());
        }
        let mut decoded = std::mem::take(&mut self.page);
        self.decoder.decode(page, bytes, &mut decoded);
        self.enter(&decoded.records);
        self.count(&decoded);
        decoded.clear();
        self.page = decoded;
        ControlFlow::Continue(())
    }

    async fn parsed(&mut self, chunk: Decoded) {
        for (at, records) in chunk.records.chunks(RECORDS_PER_PAGE).enumerate() {
            self.enter(records);
            if at % PAGES_PER_YIELD == PAGES_PER_YIELD - 1 {
                crate::io::yield_now().await;
            }
        }
        self.count(&chunk);
    }
}
