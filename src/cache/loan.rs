//! Host memory that is lent to the cache for one call.

use std::{ops::Range, sync::Arc};

use super::{Cache, CompletionQueue};
use crate::{
    block::{BlockKey, Segment},
    error::{Error, Result},
    mover::RegionInner,
};

/// Host memory lent for one call: any number of ranges, which may overlap each other, registered regions and other
/// loans, so that two callers can store from one buffer at a time.
///
/// The calls that may use it are its own methods, until it is [returned](Loan::returned): then they refuse the memory,
/// which its owner may have unmapped. Dropping it changes nothing: movements under way go on, and the memory must stay
/// mapped until [`returned`](Loan::returned) has resolved, or [`is_returned`](Loan::is_returned) is true, before that.
pub struct Loan {
    cache: Cache,
    /// Counts the movements that use the memory.
    region: Arc<RegionInner>,
    /// Sorted; no two of them touch.
    ranges: Vec<Range<usize>>,
}

impl Cache {
    /// Lends host memory for one call. Unlike [`register`](Cache::register) it takes no place in a table, and its
    /// ranges may overlap others. Empty ranges are left out.
    ///
    /// # Errors
    /// [`Error::Argument`] for a range at address 0, or past the end of memory.
    ///
    /// # Safety
    /// Until the loan is [returned](Loan::returned), or the cache is closed and every call on it has returned, every
    /// range must stay mapped and readable; writable where blocks are loaded into it. While a segment is loaded nobody
    /// else may touch it; while it is stored from, nobody may write to it. That a future was dropped does not end its
    /// load.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_cache(async |cache| {
    /// use kvhoist::Segment;
    ///
    /// # let key = kvhoist::BlockKey::new([1; 32]);
    /// let mut block = vec![7; 4096];
    /// let place = Segment { ptr: block.as_mut_ptr(), len: 4096 };
    /// // SAFETY: the block lives until the loan is returned, and nobody writes to it before.
    /// let loan = unsafe { cache.lend(&[place]) }?;
    /// let stored = loan.store_from(&[key], None, &[vec![place]]).await?;
    /// loan.returned().await;
    /// assert!(matches!(stored[..], [Ok(true)]));
    /// # Ok(()) });
    /// ```
    pub unsafe fn lend(&self, memory: &[Segment]) -> Result<Loan> {
        let ranges = memory.iter().filter(|segment| segment.len > 0).map(|segment| segment.addresses("memory"));
        let ranges = joined(ranges.collect::<Result<_>>()?);
        Ok(Loan { cache: self.clone(), region: RegionInner::lent(Arc::clone(&self.shared().lenders.of_loans)), ranges })
    }
}

impl Loan {
    /// [`Cache::load_into`], with segments in this memory or in registered regions.
    ///
    /// # Errors
    /// As [`Cache::load_into`]; [`Error::Argument`] for memory of a loan that was [returned](Loan::returned).
    ///
    /// # Cancel safety
    /// The loads go on: the memory stays in use until [`returned`](Loan::returned) resolves.
    pub async fn load_into(&self, keys: &[BlockKey], segments: &[Vec<Segment>]) -> Result<Vec<Result<bool>>> {
        self.cache.load_jobs(self.cache.jobs(keys, None, segments, Some(self))?).await
    }

    /// [`Cache::store_from`], with segments in this memory or in registered regions.
    ///
    /// # Errors
    /// As [`Cache::store_from`]; [`Error::Argument`] for memory of a loan that was [returned](Loan::returned).
    ///
    /// # Cancel safety
    /// The stores go on: the memory stays in use until [`returned`](Loan::returned) resolves.
    pub async fn store_from(
        &self,
        keys: &[BlockKey],
        parent: Option<&BlockKey>,
        segments: &[Vec<Segment>],
    ) -> Result<Vec<Result<bool>>> {
        self.cache.store_jobs(self.cache.jobs(keys, Some(parent), segments, Some(self))?).await
    }

    /// [`CompletionQueue::submit_load`], with segments in this memory or in registered regions.
    ///
    /// # Errors
    /// As [`CompletionQueue::submit_load`]; [`Error::Argument`] for a queue of another cache.
    pub fn submit_load(&self, queue: &CompletionQueue, keys: &[BlockKey], segments: &[Vec<Segment>]) -> Result<u64> {
        self.check(queue)?;
        queue.submit_load_jobs(self.cache.jobs(keys, None, segments, Some(self))?)
    }

    /// [`CompletionQueue::submit_store`], with segments in this memory or in registered regions.
    ///
    /// # Errors
    /// As [`CompletionQueue::submit_store`]; [`Error::Argument`] for a queue of another cache.
    pub fn submit_store(
        &self,
        queue: &CompletionQueue,
        keys: &[BlockKey],
        parent: Option<&BlockKey>,
        segments: &[Vec<Segment>],
    ) -> Result<u64> {
        self.check(queue)?;
        queue.submit_store_jobs(self.cache.jobs(keys, Some(parent), segments, Some(self))?)
    }

    /// Ends the loan: from the first poll on, its calls refuse the memory. Resolves when no movement uses the memory.
    ///
    /// # Cancel safety
    /// The loan has ended when the future is dropped; call again to wait for the movements.
    pub async fn returned(&self) {
        self.region.end();
        crate::shield::shield(self.region.wait_unused()).await;
    }

    /// Whether no movement uses the memory. If so, the loan has ended, as with [`returned`](Loan::returned).
    pub fn is_returned(&self) -> bool {
        self.region.end_if_unused()
    }

    /// What a movement that uses `segment` holds, if the segment lies in this memory.
    pub(super) fn region_of(&self, segment: &Segment) -> Option<&Arc<RegionInner>> {
        let start = segment.ptr as usize;
        let at = self.ranges.partition_point(|range| range.start <= start).checked_sub(1)?;
        let range = &self.ranges[at];
        (start <= range.end && segment.len <= range.end - start).then_some(&self.region)
    }

    fn check(&self, queue: &CompletionQueue) -> Result<()> {
        if queue.is_of(&self.cache) {
            return Ok(());
        }
        Err(Error::argument("queue", "a queue of another cache", "one of the cache that the memory was lent to"))
    }
}

debug_fields!(Loan, loan => ranges: loan.ranges.len());

/// The ranges in order, those that overlap or touch made one.
fn joined(mut ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut joined: Vec<Range<usize>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_overlap_or_touch_are_one() {
        let ranges = joined(vec![40..50, 10..20, 15..30, 30..35, 41..42]);
        assert_eq!(ranges, [10..35, 40..50]);
        assert_eq!(joined(vec![]), []);
    }
}
