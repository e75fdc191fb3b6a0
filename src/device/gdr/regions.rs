//! What memory the NIC knows: a table of ranges, looked up by address.

use std::{
    cell::{Cell, RefCell},
    os::fd::AsRawFd,
    rc::Rc,
    sync::Arc,
};

use crate::device::{
    CopyBatch, CopyRegion,
    cuda::Gpu,
    rdma::{MemoryRegion, ProtectionDomain},
};

/// How device memory was made known to the NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceAccess {
    /// It is host memory that plays a device.
    Simulated,
    /// By a dma-buf.
    DmaBuf,
    /// By nvidia-peermem.
    Peermem,
}

impl DeviceAccess {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        ["simulated", "dma-buf", "nvidia-peermem"][self as usize]
    }
}

/// Ranges of memory that are registered, without overlap.
pub(super) struct Regions {
    /// By start.
    entries: RefCell<Vec<Entry>>,
    /// Where the last look-ups of either side ended: the next one mostly ends there too.
    last: [Cell<usize>; 2],
    /// Foreign regions that could not be registered.
    refused: RefCell<Vec<u64>>,
    /// Foreign regions that are registered at a time; the one that was unused for longest makes room.
    foreign_max: usize,
    /// Counts batches, to tell which region was unused for longest.
    clock: Cell<u64>,
    region_bytes_max: usize,
    domain: Arc<ProtectionDomain>,
}

struct Entry {
    start: usize,
    end: usize,
    lkey: u32,
    rkey: u32,
    region: Rc<MemoryRegion>,
    /// Of a foreign region, and when it was used last.
    foreign: Option<(u64, u64)>,
}

/// What a look-up gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Keys {
    pub(super) end: usize,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
}

/// Which end of a copy an address is.
#[derive(Debug, Clone, Copy)]
pub(super) enum Side {
    Source,
    Target,
}

/// Regions that a batch needs until its last work request is done.
pub(super) type Holds = Vec<Rc<MemoryRegion>>;

impl Regions {
    pub(super) fn new(domain: &Arc<ProtectionDomain>, region_bytes_max: u64, foreign_max: usize) -> Self {
        const PAGE: usize = 1 << 21;
        let most = usize::try_from(region_bytes_max).unwrap_or(usize::MAX);
        Regions {
            entries: RefCell::default(),
            last: Default::default(),
            refused: RefCell::default(),
            foreign_max: foreign_max.max(1),
            clock: Cell::new(0),
            region_bytes_max: (most / PAGE * PAGE).max(PAGE),
            domain: Arc::clone(domain),
        }
    }

    /// Registers a range for as long as the table is there.
    ///
    /// # Safety
    /// The range must stay mapped while batches in it are accepted, and until they are done.
    pub(super) unsafe fn add(
        &self,
        start: usize,
        len: usize,
        device: Option<&Gpu>,
    ) -> Result<Option<DeviceAccess>, String> {
        let mut how = None;
        for at in (0..len).step_by(self.region_bytes_max) {
            let (start, len) = (start + at, self.region_bytes_max.min(len - at));
            // SAFETY: a part of the range that the caller speaks of.
            let (region, access) = unsafe { register(&self.domain, start, len, device) }?;
            how = access;
            self.insert(start, len, region, None);
        }
        Ok(how)
    }

    fn insert(&self, start: usize, len: usize, region: MemoryRegion, foreign: Option<(u64, u64)>) {
        let (lkey, rkey) = (region.lkey(), region.rkey());
        let mut entries = self.entries.borrow_mut();
        let at = entries.partition_point(|entry| entry.start < start);
        entries.insert(at, Entry { start, end: start + len, lkey, rkey, region: Rc::new(region), foreign });
    }

    /// The region that an address of this side lies in.
    pub(super) fn find(&self, side: Side, address: usize) -> Option<Keys> {
        let entries = self.entries.borrow();
        let at = self.place(&entries, side, address)?;
        let Entry { end, lkey, rkey, .. } = entries[at];
        Some(Keys { end, lkey, rkey })
    }

    fn place(&self, entries: &[Entry], side: Side, address: usize) -> Option<usize> {
        let holds = |entry: &Entry| (entry.start..entry.end).contains(&address);
        let last = self.last[side as usize].get();
        if entries.get(last).is_some_and(holds) {
            return Some(last);
        }
        let at = entries.partition_point(|entry| entry.start <= address).checked_sub(1)?;
        holds(&entries[at]).then(|| {
            self.last[side as usize].set(at);
            at
        })
    }

    /// Whether a range is registered.
    pub(super) fn holds(&self, start: usize, len: usize) -> bool {
        let Some(end) = start.checked_add(len) else { return false };
        let mut at = start;
        while at < end {
            let Some(keys) = self.find(Side::Source, at) else { return false };
            at = keys.end;
        }
        true
    }

    /// The foreign regions that the batch's ranges lie in, if all of them are registered.
    pub(super) fn cover(&self, batch: &CopyBatch) -> Option<Holds> {
        let mut holds = Holds::new();
        let now = self.clock.replace(self.clock.get() + 1);
        let mut entries = self.entries.borrow_mut();
        for op in batch.ops() {
            for (side, start) in [(Side::Source, op.src.addr()), (Side::Target, op.dst.addr())] {
                let (mut at, end) = (start, start.checked_add(op.len)?);
                while at < end {
                    let place = self.place(&entries, side, at)?;
                    let entry = &mut entries[place];
                    at = entry.end;
                    if let Some((_, used)) = &mut entry.foreign
                        && !holds.iter().any(|held| Rc::ptr_eq(held, &entry.region))
                    {
                        *used = now;
                        holds.push(Rc::clone(&entry.region));
                    }
                }
            }
        }
        Some(holds)
    }

    /// The regions of a batch that are not registered yet and could be.
    pub(super) fn missing(&self, batch: &CopyBatch) -> Vec<CopyRegion> {
        let refused = self.refused.borrow();
        let known = |region: &CopyRegion| refused.contains(&region.id()) || self.overlaps(region);
        batch.regions().iter().filter(|region| !known(region)).copied().collect()
    }

    /// Notes that a region cannot be registered: it is not tried again.
    pub(super) fn refuse(&self, region: &CopyRegion) {
        self.refused.borrow_mut().push(region.id());
    }

    fn overlaps(&self, region: &CopyRegion) -> bool {
        let end = region.start() + region.len();
        self.entries.borrow().iter().any(|entry| entry.start < end && region.start() < entry.end)
    }

    /// What is needed to register a foreign region on another thread.
    pub(super) fn domain(&self) -> &Arc<ProtectionDomain> {
        &self.domain
    }

    /// Enters a foreign region that was registered meanwhile; what had to go to make room, to be given back elsewhere.
    pub(super) fn enter(&self, region: &CopyRegion, registered: MemoryRegion) -> Vec<MemoryRegion> {
        if self.overlaps(region) {
            return vec![registered];
        }
        let evicted = self.make_room();
        self.insert(region.start(), region.len(), registered, Some((region.id(), self.clock.get())));
        evicted
    }

    /// Takes out what was unused for longest, until there is room for one more. What is in use stays, also past the
    /// limit.
    fn make_room(&self) -> Vec<MemoryRegion> {
        let mut entries = self.entries.borrow_mut();
        let foreign = entries.iter().filter(|entry| entry.foreign.is_some()).count();
        let mut evicted = Vec::new();
        for _ in self.foreign_max..=foreign {
            let unused = entries.iter().enumerate().filter(|(_, entry)| Rc::strong_count(&entry.region) == 1);
            let oldest = unused.filter_map(|(at, entry)| Some((entry.foreign?.1, at))).min();
            let Some((_, at)) = oldest else { break };
            evicted.extend(Rc::into_inner(entries.remove(at).region));
        }
        evicted
    }

    /// Takes a foreign region out of the table: to be given back elsewhere.
    pub(super) fn forget(&self, region: &CopyRegion) -> Option<MemoryRegion> {
        self.refused.borrow_mut().retain(|&id| id != region.id());
        let mut entries = self.entries.borrow_mut();
        let at = entries.iter().position(|entry| entry.foreign.is_some_and(|(id, _)| id == region.id()))?;
        // Where a batch of an overlapping region still uses it, that batch gives it back.
        Rc::into_inner(entries.remove(at).region)
    }
}

/// Makes a range known to the NIC: device memory by dma-buf, or by nvidia-peermem where that fails.
///
/// # Safety
/// As [`MemoryRegion::new`].
pub(super) unsafe fn register(
    domain: &Arc<ProtectionDomain>,
    start: usize,
    len: usize,
    device: Option<&Gpu>,
) -> Result<(MemoryRegion, Option<DeviceAccess>), String> {
    let Some(gpu) = device else {
        // SAFETY: the caller's promise.
        let region = unsafe { MemoryRegion::new(domain, start, len) };
        return region.map(|region| (region, None)).map_err(|fault| format!("{len} bytes of host memory: {fault}"));
    };
    let by_dma_buf = gpu.export_dma_buf(start, len).and_then(|(dma_buf, offset)| {
        MemoryRegion::of_dma_buf(domain, dma_buf.as_raw_fd(), offset, start, len).map_err(|fault| fault.to_string())
    });
    let refused = match by_dma_buf {
        Ok(region) => return Ok((region, Some(DeviceAccess::DmaBuf))),
        Err(refused) => refused,
    };
    // SAFETY: the caller's promise.
    let by_peermem = unsafe { MemoryRegion::new(domain, start, len) };
    by_peermem
        .map(|region| (region, Some(DeviceAccess::Peermem)))
        .map_err(|fault| format!("{len} bytes of device memory: by dma-buf: {refused}; by nvidia-peermem: {fault}"))
}
