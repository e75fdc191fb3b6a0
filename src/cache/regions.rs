//! The table of a cache's registered memory.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard},
};

use super::{Region, ranges::Ranges};
use crate::{
    block::Segment,
    error::{Error, Result},
    memory::{Memory, MemoryKind},
    mover::{CallerMemory, RegionMemory, RegionUse},
    state::Lender,
};

/// One whose memory is registered, in any number of regions: what is stored from them is charged to it.
#[derive(Clone)]
pub struct MemoryOwner(pub(super) Arc<Lender>);

/// Regions that may be registered at once.
const REGIONS_MAX: usize = 4096;

/// Blocks whose memory is found under one lock: some tens of microseconds, for blocks in many segments.
const HELD_PER_LOCK: usize = 64;

/// The registered regions of one cache.
#[derive(Default)]
pub(super) struct Regions(Mutex<Entries>);

type Entries = Ranges<Arc<CallerMemory>>;

impl Regions {
    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.0.lock().expect("nothing panics under it")
    }

    pub(super) fn add(&self, memory: Memory, whose: MemoryOwner) -> Result<Arc<CallerMemory>> {
        let Memory { range, kind, guard, .. } = memory;
        let (memory, owner) = match kind {
            MemoryKind::Host | MemoryKind::Memfd { .. } => (RegionMemory::Host, None),
            MemoryKind::Shared(owner) => (RegionMemory::Host, Some(owner)),
            MemoryKind::Device => (RegionMemory::Device, None),
        };
        let addresses = range.addresses("region")?;
        let mut regions = self.lock();
        if regions.len() >= REGIONS_MAX {
            return Err(Error::busy("registered regions", REGIONS_MAX as u64, "none"));
        }
        if !regions.is_free(&addresses) {
            return Err(Error::argument(
                "region",
                format!("{} bytes at {:#x}, part of which is registered", range.len, addresses.start),
                "each range registered once",
            ));
        }
        let region = CallerMemory::new(range.ptr, range.len, memory, owner, whose.0, guard);
        regions.insert(addresses, Arc::clone(&region));
        Ok(region)
    }

    /// Holds a region, wherever its movements go.
    pub(super) fn hold_one(&self, region: &Arc<CallerMemory>) -> Result<RegionUse> {
        let regions = self.lock();
        if regions.get(region.start).is_some_and(|other| Arc::ptr_eq(other, region)) {
            // Under the lock: who forgets a region counts its users after that.
            return Ok(region.hold());
        }
        Err(Error::argument("region", "a region that was lent, or unregistered", "a region that is registered"))
    }

    /// Forgets a region, if it is not forgotten already: nothing begins to use it after that.
    pub(super) fn remove(&self, region: &Arc<CallerMemory>) {
        let removed = self.lock().remove_if(region.start, |other| Arc::ptr_eq(other, region));
        drop(removed);
    }

    /// Holds the memory that the segments of each block lie in: lent for the call, or registered. By their first
    /// addresses. A block whose segments lie in the same regions as those of the one before it, as in the buffers of a
    /// pool, shares its hold.
    pub(super) fn hold(
        &self,
        blocks: &[Vec<Segment>],
        block_bytes: usize,
        lent: Option<&Region>,
    ) -> Result<Vec<Arc<[RegionUse]>>> {
        // Before the lock: the end of a hold may wake a caller.
        let mut held: Vec<Arc<[RegionUse]>> = Vec::with_capacity(blocks.len());
        // Which of the last hold's regions each segment lies in.
        let mut places: Vec<usize> = Vec::new();
        for blocks in blocks.chunks(HELD_PER_LOCK) {
            blocks.iter().try_for_each(|segments| Segment::check_block(segments, block_bytes))?;
            let regions = self.lock();
            for segments in blocks {
                let is_alike = |before: &&Arc<[RegionUse]>| {
                    let mut pairs = places.iter().zip(segments);
                    lent.is_none()
                        && places.len() == segments.len()
                        && pairs.all(|(&at, segment)| before[at].contains(segment))
                };
                let hold = match held.last().filter(is_alike) {
                    Some(before) => Arc::clone(before),
                    None => {
                        let hold = hold_of(&regions, segments, lent)?;
                        places.clear();
                        places.extend(segments.iter().map(|segment| RegionUse::place_of(&hold, segment)));
                        hold
                    }
                };
                held.push(hold);
            }
        }
        Ok(held)
    }
}

/// Holds what one block's segments lie in, by their first addresses.
fn hold_of(regions: &Entries, segments: &[Segment], lent: Option<&Region>) -> Result<Arc<[RegionUse]>> {
    let mut found: BTreeMap<usize, &Arc<CallerMemory>> = BTreeMap::new();
    for segment in segments {
        let lent = lent.filter(|region| region.lent.of(segment).is_some()).map(|region| &region.inner);
        let Some(region) = lent.or_else(|| regions.of(segment).map(|(_, region)| region)) else {
            return Err(Error::argument(
                "segments",
                format!("{} bytes at {:p}, in no registered region", segment.len, segment.ptr),
                "registered memory",
            ));
        };
        if found.values().next().is_some_and(|first| first.memory != region.memory) {
            return Err(Error::argument("segments", "host and device memory in one block", "one kind of memory"));
        }
        found.insert(region.start, region);
    }
    // A lent one has no addresses, so it is the first: where it has ended, nothing is held yet.
    let hold = |region: &Arc<CallerMemory>| {
        region.try_hold().ok_or_else(|| {
            Error::argument("segments", "lent memory that was unregistered", "memory that `Cache::lend` lends anew")
        })
    };
    found.into_values().map(hold).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{mover::COMPARED, state::Lenders};

    fn at(address: usize) -> *mut u8 {
        std::ptr::without_provenance_mut(address)
    }

    fn memory(address: usize, len: usize) -> Memory {
        // SAFETY: nothing is loaded into it or stored from it.
        unsafe { Memory::host(at(address), len) }
    }

    #[test]
    fn no_memory_is_registered_twice() {
        let (regions, lenders) = (Regions::default(), Lenders::new());
        let add = |memory| regions.add(memory, MemoryOwner(Arc::clone(&lenders.of_lent)));
        let pool = add(memory(4096, 8192)).expect("the first");
        assert!(add(memory(8192, 4096)).is_err(), "part of it is registered");
        add(memory(12288, 4096)).expect("beside the pool");
        assert!(add(memory(0, 10)).is_err(), "no memory lies there");

        let block = [vec![Segment { ptr: at(4096), len: 10 }]];
        assert_eq!(regions.hold(&block, 10, None).expect("registered")[0].len(), 1);
        regions.remove(&pool);
        assert!(regions.hold(&block, 10, None).is_err(), "the pool is gone");
    }

    fn at_region(number: usize) -> *mut u8 {
        at(number << 20)
    }

    fn three_regions() -> Regions {
        let (regions, lenders) = (Regions::default(), Lenders::new());
        for number in [3, 1, 2] {
            let whose = MemoryOwner(Arc::clone(&lenders.of_lent));
            regions.add(memory(number << 20, 4096), whose).expect("beside the others");
        }
        regions
    }

    /// A block with segments of two bytes at these offsets in the regions of these numbers.
    fn block(places: [(usize, usize); 5]) -> Vec<Segment> {
        places.map(|(number, offset)| Segment { ptr: at_region(number).wrapping_add(offset), len: 2 }).to_vec()
    }

    #[test]
    fn a_block_holds_each_of_its_regions_once_whatever_their_order() {
        let regions = three_regions();
        let held = regions.hold(&[block([2, 3, 1, 3, 2].map(|number| (number, 0)))], 10, None).expect("registered");
        assert_eq!(held[0].len(), 3);
        for wrong in [at(1 << 19), at((2 << 20) + 4095), at((3 << 20) + 4096)] {
            let refused = regions.hold(&[vec![Segment { ptr: wrong, len: 10 }]], 10, None).is_err();
            assert!(refused, "in no region, or not all of it");
        }
    }

    #[test]
    fn a_place_is_compared_with_few_regions_however_many_there_are() {
        let (regions, lenders) = (Regions::default(), Lenders::new());
        for number in 1..=1000 {
            let whose = MemoryOwner(Arc::clone(&lenders.of_lent));
            regions.add(memory(number << 20, 4096), whose).expect("beside the others");
        }
        let blocks: Vec<_> = (1..=100).map(|n| vec![Segment { ptr: at_region(10 * n), len: 2 }]).collect();
        let before = COMPARED.get();
        assert_eq!(regions.hold(&blocks, 2, None).expect("registered").len(), 100);
        // With that of the block before it, that of its address, and among those that are held.
        assert!(COMPARED.get() - before <= 3 * 100, "{}", COMPARED.get() - before);
    }

    #[test]
    fn blocks_in_the_same_regions_share_a_hold_and_others_have_their_own() {
        let regions = three_regions();
        let first = [(2, 0), (3, 0), (1, 0), (3, 2), (2, 2)];
        let alike = first.map(|(number, offset)| (number, offset + 4094 - 2));
        let (turned, fewer) = ([(3, 0), (2, 0), (1, 0), (3, 2), (2, 2)], [(2, 0); 5]);
        let blocks = [first, alike, turned, fewer].map(block);
        let held = regions.hold(&blocks, 10, None).expect("registered");
        assert!(Arc::ptr_eq(&held[0], &held[1]));
        assert!(!Arc::ptr_eq(&held[1], &held[2]));
        assert_eq!(held.iter().map(|hold| hold.len()).collect::<Vec<_>>(), [3, 3, 3, 1]);

        // Of a block like the first but for its last segment, which is in no region, nothing is held.
        let outside = block([(2, 0), (3, 0), (1, 0), (3, 2), (2, 4095)]);
        assert!(regions.hold(&[block(first), outside], 10, None).is_err());
    }
}
