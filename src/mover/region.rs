//! Memory of callers, and the blocks that they ask to be copied from or to it.

use std::{
    ops::Deref,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicUsize, Ordering},
    },
};

use tokio::sync::Notify;

use super::{offload::Place, route::Shape};
use crate::{
    block::{BlockKey, FIXED_BYTES_MAX, IO_ALIGN, Segment},
    device::CopyRegion,
    disk::Origin,
    error::{Error, Result},
    memory::{Guard, SharedMemory},
    state::{Few, Lender, Shared},
};

/// A block in shorter segments takes one operation through a host slot, and many without.
const SEGMENT_BYTES_MIN: usize = 64 << 10;

#[cfg(test)]
thread_local! {
    /// How often this thread has compared a place with a region.
    pub(crate) static COMPARED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// What kind of memory a region is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RegionMemory {
    Host,
    Device,
}

/// Memory of a caller's, as its [`Region`](crate::Region) and the movements that use it share it.
pub(crate) struct CallerMemory {
    pub(crate) start: usize,
    pub(crate) len: usize,
    pub(crate) memory: RegionMemory,
    /// How copy engines know it. `None` for one that is lent for a call: registering it with a NIC would take longer
    /// than to copy it.
    pub(crate) lasting: Option<CopyRegion>,
    /// Who keeps its bytes unchanged while they are stored.
    lender: Arc<Lender>,
    /// Tells whether the memory was taken away, where that can happen.
    guard: Option<Guard>,
    /// Keeps the memory mapped, if the caller has shared it.
    _owner: Option<Arc<SharedMemory>>,
    /// Holds, and [`ENDED`].
    users: AtomicUsize,
    unused: Notify,
    /// The storage's number for its first piece, or [`UNREGISTERED`].
    pub(super) fixed: AtomicU32,
}

/// The region is not registered with the storage.
pub(super) const UNREGISTERED: u32 = u32::MAX;

/// The flag among the users of lent memory that has been returned to its owner.
const ENDED: usize = 1 << (usize::BITS - 1);

/// A hold on a region, by a movement or by a request about the region: its owner does not get it back before the hold
/// is dropped.
pub(crate) struct RegionUse(Arc<CallerMemory>);

impl CallerMemory {
    pub(crate) fn new(
        start: *mut u8,
        len: usize,
        memory: RegionMemory,
        owner: Option<Arc<SharedMemory>>,
        lender: Arc<Lender>,
        guard: Option<Guard>,
    ) -> Arc<Self> {
        let lasting = Some(CopyRegion::new(start, len, memory == RegionMemory::Device));
        let none = CallerMemory::none(lender);
        Arc::new(CallerMemory { start: start as usize, len, memory, lasting, guard, _owner: owner, ..none })
    }

    /// Stands for host memory that is lent for a call: it counts the movements that use it. It contains no segment,
    /// so neither storage nor copy engines take it for memory that they have registered.
    pub(crate) fn lent(lender: Arc<Lender>) -> Arc<Self> {
        Arc::new(CallerMemory::none(lender))
    }

    fn none(lender: Arc<Lender>) -> Self {
        CallerMemory {
            start: 0,
            len: 0,
            memory: RegionMemory::Host,
            lasting: None,
            lender,
            guard: None,
            _owner: None,
            users: AtomicUsize::new(0),
            unused: Notify::new(),
            fixed: AtomicU32::new(UNREGISTERED),
        }
    }

    /// Whether the segment lies in this memory. Never in memory that is lent for a call.
    pub(crate) fn contains(&self, segment: &Segment) -> bool {
        #[cfg(test)]
        COMPARED.set(COMPARED.get() + 1);
        let start = segment.ptr as usize;
        start >= self.start && segment.len <= self.len && start - self.start <= self.len - segment.len
    }

    /// Whether it is registered with the storage.
    pub(crate) fn is_fixed(&self) -> bool {
        self.fixed.load(Ordering::Acquire) != UNREGISTERED
    }

    /// The storage's number for the piece that a segment lies in, if it lies in one.
    fn fixed(&self, segment: &Segment) -> Option<u16> {
        let first = self.fixed.load(Ordering::Acquire);
        let at = segment.ptr as usize - self.start;
        let piece = at / FIXED_BYTES_MAX;
        let in_one = (at + segment.len).div_ceil(FIXED_BYTES_MAX) == piece + 1;
        (first != UNREGISTERED && in_one).then(|| u16::try_from(first as usize + piece).ok()).flatten()
    }

    pub(crate) fn hold(self: &Arc<Self>) -> RegionUse {
        self.users.fetch_add(1, Ordering::AcqRel);
        RegionUse(Arc::clone(self))
    }

    /// As [`hold`](Self::hold); `None` once it has [ended](Self::end).
    pub(crate) fn try_hold(self: &Arc<Self>) -> Option<RegionUse> {
        let add = |users: usize| (users & ENDED == 0).then_some(users + 1);
        let held = self.users.fetch_update(Ordering::AcqRel, Ordering::Acquire, add);
        held.is_ok().then(|| RegionUse(Arc::clone(self)))
    }

    /// No movement begins to use it from now on.
    pub(crate) fn end(&self) {
        self.users.fetch_or(ENDED, Ordering::AcqRel);
    }

    /// Whether no movement uses the region.
    pub(crate) fn is_unused(&self) -> bool {
        self.users.load(Ordering::Acquire) & !ENDED == 0
    }

    /// Waits until no movement uses the region.
    pub(crate) async fn wait_unused(&self) {
        loop {
            let mut unused = pin!(self.unused.notified());
            unused.as_mut().enable();
            if self.is_unused() {
                return;
            }
            unused.await;
        }
    }
}

impl Deref for RegionUse {
    type Target = CallerMemory;

    fn deref(&self) -> &CallerMemory {
        &self.0
    }
}

impl RegionUse {
    /// The last of these regions that does not begin behind the segment; they are in the order of their addresses.
    pub(crate) fn place_of(regions: &[RegionUse], segment: &Segment) -> usize {
        regions.partition_point(|region| region.start <= segment.ptr as usize).saturating_sub(1)
    }
}

impl Drop for RegionUse {
    fn drop(&mut self) {
        if self.users.fetch_sub(1, Ordering::AcqRel) & !ENDED == 1 {
            self.unused.notify_waiters();
        }
    }
}

/// One block of a load or a store: its key, and where its bytes go to or come from.
pub(crate) struct Job {
    pub(crate) key: BlockKey,
    pub(crate) parent: Option<BlockKey>,
    pub(crate) segments: Vec<Segment>,
    /// Holds every region that the segments lie in, by their first addresses. All are of one kind of memory. Blocks of
    /// one call share it, where they lie in the same regions.
    pub(crate) regions: Arc<[RegionUse]>,
    /// It goes through host memory: other callers may load the same block and join its movement there, or a read to its
    /// place has failed.
    pub(crate) through_host: bool,
    /// Its use is counted.
    pub(crate) is_counted: bool,
}

impl Job {
    pub(crate) fn memory(&self) -> RegionMemory {
        self.regions.first().map_or(RegionMemory::Host, |region| region.memory)
    }

    /// Whose memory its bytes lie in. Segments in memory of several lenders count as the first one's.
    pub(super) fn origin(&self) -> Origin {
        self.regions.first().map_or(Origin::UNKNOWN, |region| region.lender.origin)
    }

    /// False where too many blocks of this memory were changed while they were stored from it.
    pub(super) fn is_kept_unchanged(&self) -> bool {
        self.regions.iter().all(|region| region.lender.is_trusted())
    }

    /// Refuses memory that was taken away: there are zeros in its place, which nobody wants stored.
    pub(super) fn check_is_there(&self) -> Result<()> {
        let is_spoiled = |region: &RegionUse| region.guard.as_ref().is_some_and(Guard::is_spoiled);
        match self.regions.iter().any(is_spoiled) {
            true => Err(Error::argument("region", "memory that was taken away", "memory that stays there")),
            false => Ok(()),
        }
    }

    /// Its regions, as copy engines know them.
    pub(crate) fn copy_regions(&self) -> Vec<CopyRegion> {
        self.regions.iter().filter_map(|region| region.lasting).collect()
    }

    /// What the choice of its way depends on.
    pub(super) fn shape(&self, shared: &Shared) -> Shape {
        // One that several callers want goes through host memory once.
        let is_shared = self.through_host;
        Shape {
            is_device: self.memory() == RegionMemory::Device && !is_shared,
            is_in_place: shared.config.host.bypass && !is_shared && self.may_bypass_host(shared.memory_align_bytes),
        }
    }

    /// True where direct I/O can read and write all segments, and is not slower for it. Their lengths add up to offsets
    /// in the file, which are stricter than addresses.
    fn may_bypass_host(&self, memory_align_bytes: usize) -> bool {
        let aligned = |segment: &Segment| {
            segment.ptr.addr().is_multiple_of(memory_align_bytes)
                && segment.len.is_multiple_of(IO_ALIGN)
                && segment.len > 0
        };
        let long = |segment: &Segment| segment.len >= SEGMENT_BYTES_MIN || self.segments.len() == 1;
        self.memory() == RegionMemory::Host && self.segments.iter().all(|segment| aligned(segment) && long(segment))
    }

    /// Its segments, with the storage's numbers for their memory and the guards of it.
    pub(super) fn places(&self) -> Few<Place> {
        let place = |segment: &Segment| {
            let region = self.region_of(segment);
            (*segment, region.and_then(|region| region.fixed(segment)), region.and_then(|region| region.guard.clone()))
        };
        self.segments.iter().map(place).collect()
    }

    /// The region that one of its segments lies in; `None` for memory that is lent for the call.
    fn region_of(&self, segment: &Segment) -> Option<&CallerMemory> {
        let region = self.regions.get(RegionUse::place_of(&self.regions, segment))?;
        region.contains(segment).then_some(&**region)
    }
}
