//! The pages of the record tables: one decoder for a cache that opens a store and for the inspection of one.

use crate::disk::format::{
    PAGE_BYTES, RECORD_BYTES, is_zero,
    record::{Record, RecordError, RecordSeal},
    stripe::{PageId, Stripe},
};

/// Decodes the record pages of one store.
pub(crate) struct RecordPages {
    pub stripe: Stripe,
    seals: Vec<RecordSeal>,
}

impl RecordPages {
    /// Accepts only records of store `uuid`.
    pub fn new(stripe: Stripe, uuid: &[u8; 16]) -> Self {
        let seals = (0..stripe.members().len() as u16).map(|member| RecordSeal::new(uuid, member)).collect();
        RecordPages { stripe, seals }
    }

    /// Gives `each` the slots of a page in order, with the bytes of their records and what they say. Returns the place
    /// of the first record past those that is not zero, if there is one.
    pub fn decode(
        &self,
        page: PageId,
        bytes: &[u8; PAGE_BYTES],
        mut each: impl FnMut(u32, &[u8; RECORD_BYTES], Result<Option<Record>, RecordError>),
    ) -> Option<usize> {
        let (file, first, count) = self.stripe.page_slots(page);
        let seal = self.seals[usize::from(file.0)];
        let (records, past_end) = bytes.as_chunks::<RECORD_BYTES>().0.split_at(count as usize);
        for (local, bytes) in (first..).zip(records) {
            let decoded = seal.decode(local, self.stripe.block_bytes(), bytes);
            each(self.stripe.slot(file, local), bytes, decoded);
        }
        past_end.iter().position(|record| !is_zero(record)).map(|at| count as usize + at)
    }
}
