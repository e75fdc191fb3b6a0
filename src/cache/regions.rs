//! Registered memory: [`Region`], and the table of a cache's regions.

use std::{
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use super::loan::Loan;
use crate::{
    block::Segment,
    error::{Error, Result},
    memory::{Memory, MemoryKind},
    mover::{RegionInner, RegionMemory, RegionUse},
    state::Lender,
};

/// A registered range of a caller's memory. Give it back with [`Cache::unregister`](super::Cache::unregister): until
/// that has resolved the memory must stay mapped.
///
/// Dropping it changes nothing: the range stays registered for the life of the cache.
pub struct Region {
    pub(super) inner: Arc<RegionInner>,
    /// The number of the cache's [`Regions`].
    registry: u64,
    /// As [`Regions::registered`].
    registered: Arc<AtomicBool>,
}

impl Region {
    /// Whether the kernel keeps the memory pinned ([`Memory::pinned`](crate::Memory::pinned)). Every change pins all
    /// regions anew: if the kernel refuses one, no region is pinned until the next change.
    pub fn is_pinned(&self) -> bool {
        self.inner.is_fixed() && self.registered.load(Ordering::Acquire)
    }
}

debug_fields!(Region, region => len: region.inner.len, memory: region.inner.memory);

/// One whose memory is registered, in any number of regions: what is stored from them is charged to it.
#[derive(Clone)]
pub(crate) struct MemoryOwner(pub(super) Arc<Lender>);

/// Regions that may be registered at once.
const REGIONS_MAX: usize = 4096;

/// The regions of one cache.
pub(super) struct Regions {
    /// Tells them from those of every other cache of this process.
    number: u64,
    entries: Mutex<Vec<Arc<RegionInner>>>,
    /// Whether the kernel has the regions that it was asked to pin.
    registered: Arc<AtomicBool>,
}

impl Regions {
    pub(super) fn new(registered: Arc<AtomicBool>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Regions { number: NEXT.fetch_add(1, Ordering::Relaxed), entries: Mutex::default(), registered }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<RegionInner>>> {
        self.entries.lock().expect("nothing panics under it")
    }

    pub(super) fn add(&self, memory: Memory, whose: MemoryOwner) -> Result<Region> {
        let Memory { range, kind, .. } = memory;
        let (memory, owner) = match kind {
            MemoryKind::Host | MemoryKind::Memfd { .. } => (RegionMemory::Host, None),
            MemoryKind::Shared(owner) => (RegionMemory::Host, Some(owner)),
            MemoryKind::Device => (RegionMemory::Device, None),
        };
        let Range { start, end } = range.addresses("region")?;
        let mut regions = self.lock();
        if regions.len() >= REGIONS_MAX {
            return Err(Error::busy("registered regions", REGIONS_MAX as u64, "none"));
        }
        let shares = |region: &Arc<RegionInner>| start < region.start + region.len && region.start < end;
        if regions.iter().any(shares) {
            return Err(Error::argument(
                "region",
                format!("{} bytes at {start:#x}, part of which is registered", range.len),
                "each range registered once",
            ));
        }
        let inner = RegionInner::new(range.ptr, range.len, memory, owner, whose.0);
        regions.push(Arc::clone(&inner));
        Ok(Region { inner, registry: self.number, registered: Arc::clone(&self.registered) })
    }

    /// Refuses a region of another cache.
    fn check(&self, region: &Region) -> Result<()> {
        if region.registry == self.number {
            return Ok(());
        }
        Err(Error::argument("region", "a region of another cache", "a region that this cache has registered"))
    }

    /// Holds a region, wherever its movements go.
    pub(super) fn hold_one(&self, region: &Region) -> Result<RegionUse> {
        self.check(region)?;
        let regions = self.lock();
        if regions.iter().any(|other| Arc::ptr_eq(other, &region.inner)) {
            // Under the lock: who forgets a region counts its users after that.
            return Ok(region.inner.hold());
        }
        Err(Error::argument("region", "a region that was unregistered", "a region that is registered"))
    }

    /// Forgets a region, if it is not forgotten already: nothing begins to use it after that.
    pub(super) fn remove(&self, region: &Region) -> Result<()> {
        self.check(region)?;
        self.lock().retain(|other| !Arc::ptr_eq(other, &region.inner));
        Ok(())
    }

    /// Holds the memory that `segments` lie in: lent for the call, or registered.
    pub(super) fn hold(&self, segments: &[Segment], block_bytes: usize, lent: Option<&Loan>) -> Result<Vec<RegionUse>> {
        Segment::check_block(segments, block_bytes)?;
        let regions = self.lock();
        let mut held: Vec<RegionUse> = Vec::new();
        for segment in segments {
            let lent = lent.and_then(|loan| loan.region_of(segment));
            let Some(region) = lent.or_else(|| regions.iter().find(|region| region.contains(segment))) else {
                return Err(Error::argument(
                    "segments",
                    format!("{} bytes at {:p}, in no registered region", segment.len, segment.ptr),
                    "registered memory",
                ));
            };
            if held.first().is_some_and(|first| first.memory() != region.memory) {
                return Err(Error::argument("segments", "host and device memory in one block", "one kind of memory"));
            }
            if !held.iter().any(|other| other.is_of(region)) {
                held.push(region.try_hold().ok_or_else(|| {
                    Error::argument(
                        "segments",
                        "memory of a loan that was returned",
                        "memory that `Cache::lend` lends anew",
                    )
                })?);
            }
        }
        Ok(held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::Lenders;

    fn at(address: usize) -> *mut u8 {
        std::ptr::without_provenance_mut(address)
    }

    fn memory(address: usize, len: usize) -> Memory {
        // SAFETY: nothing is loaded into it or stored from it.
        unsafe { Memory::host(at(address), len) }
    }

    #[test]
    fn no_memory_is_registered_twice() {
        let (regions, lenders) = (Regions::new(Arc::default()), Lenders::new());
        let add = |memory| regions.add(memory, MemoryOwner(Arc::clone(&lenders.of_loans)));
        let pool = add(memory(4096, 8192)).expect("the first");
        add(memory(8192, 4096)).expect_err("part of it is registered");
        add(memory(12288, 4096)).expect("beside the pool");
        add(memory(0, 10)).expect_err("no memory lies there");

        let segment = [Segment { ptr: at(4096), len: 10 }];
        assert_eq!(regions.hold(&segment, 10, None).expect("registered").len(), 1);
        regions.remove(&pool).expect("its own");
        assert!(regions.hold(&segment, 10, None).is_err(), "the pool is gone");
    }
}
