//! The table of memory regions registered with the NIC, looked up by address.

use std::{
    cell::{Cell, RefCell},
    os::fd::AsRawFd,
    rc::Rc,
    sync::Arc,
};

use crate::{
    CopyBatch, CopyRegion,
    cuda::Gpu,
    rdma::{MemoryRegion, ProtectionDomain},
};

/// How device memory is registered with the NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DeviceAccess {
    /// The device is simulated in host memory.
    Simulated,
    /// Through a dma-buf.
    DmaBuf,
    /// Through nvidia-peermem.
    Peermem,
}

impl DeviceAccess {
    /// Name in reports.
    pub(super) fn name(self) -> &'static str {
        ["simulated", "dma-buf", "nvidia-peermem"][self as usize]
    }
}

/// Ranges of memory that are registered, without overlap.
pub(super) struct Regions {
    /// Sorted by start.
    entries: RefCell<Vec<Entry>>,
    /// Index of the entry that the last look-up of each side found; the next look-up usually finds the same one.
    last: [Cell<usize>; 2],
    /// Ids of callers' regions that could not be registered.
    refused: RefCell<Vec<u64>>,
    /// Largest number of callers' regions registered at a time; the least recently used one makes room.
    registered_max: usize,
    /// Counts batches, for the least-recently-used order.
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
    /// Id of the caller's region, and the time of its last use.
    caller: Option<(u64, u64)>,
}

/// Result of a look-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Keys {
    pub(super) end: usize,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
}

/// Source or destination of a copy.
#[derive(Debug, Clone, Copy)]
pub(super) enum Side {
    Source,
    Target,
}

/// Keeps the regions of a batch registered until its last work request is done.
pub(super) type RegionRefs = Vec<Rc<MemoryRegion>>;

impl Regions {
    pub(super) fn new(domain: &Arc<ProtectionDomain>, region_bytes_max: u64, registered_max: usize) -> Self {
        const PAGE: usize = 1 << 21;
        let most = usize::try_from(region_bytes_max).unwrap_or(usize::MAX);
        Regions {
            entries: RefCell::default(),
            last: Default::default(),
            refused: RefCell::default(),
            registered_max: registered_max.max(1),
            clock: Cell::new(0),
            region_bytes_max: (most / PAGE * PAGE).max(PAGE),
            domain: Arc::clone(domain),
        }
    }

    /// Registers a range for the lifetime of the table.
    ///
    /// # Safety
    /// The range must stay mapped while batches in it are accepted, and until they complete.
    pub(super) unsafe fn add(
        &self,
        start: usize,
        len: usize,
        device: Option<&Gpu>,
    ) -> Result<Option<DeviceAccess>, String> {
        let mut how = None;
        for at in (0..len).step_by(self.region_bytes_max) {
            let (start, len) = (start + at, self.region_bytes_max.min(len - at));
            // SAFETY: part of the range that the caller vouches for.
            let (region, access) = unsafe { register(&self.domain, start, len, device) }?;
            how = access;
            self.insert(start, len, region, None);
        }
        Ok(how)
    }

    fn insert(&self, start: usize, len: usize, region: MemoryRegion, caller: Option<(u64, u64)>) {
        let (lkey, rkey) = (region.lkey(), region.rkey());
        let mut entries = self.entries.borrow_mut();
        let at = entries.partition_point(|entry| entry.start < start);
        entries.insert(at, Entry { start, end: start + len, lkey, rkey, region: Rc::new(region), caller });
    }

    /// The region that contains this address.
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

    /// Handles of the callers' regions that the batch's ranges lie in; `None` if a range is not registered.
    pub(super) fn cover(&self, batch: &CopyBatch) -> Option<RegionRefs> {
        let mut refs = RegionRefs::new();
        let now = self.clock.replace(self.clock.get() + 1);
        let mut entries = self.entries.borrow_mut();
        for op in batch.ops() {
            for (side, start) in [(Side::Source, op.src.addr()), (Side::Target, op.dst.addr())] {
                let (mut at, end) = (start, start.checked_add(op.len)?);
                while at < end {
                    let place = self.place(&entries, side, at)?;
                    let entry = &mut entries[place];
                    at = entry.end;
                    if let Some((_, used)) = &mut entry.caller
                        && !refs.iter().any(|used| Rc::ptr_eq(used, &entry.region))
                    {
                        *used = now;
                        refs.push(Rc::clone(&entry.region));
                    }
                }
            }
        }
        Some(refs)
    }

    /// The batch's regions that are neither registered nor known to be unregistrable.
    pub(super) fn missing(&self, batch: &CopyBatch) -> Vec<CopyRegion> {
        let refused = self.refused.borrow();
        let known = |region: &CopyRegion| refused.contains(&region.id()) || self.overlaps(region);
        batch.regions().iter().filter(|region| !known(region)).copied().collect()
    }

    /// Records that a region cannot be registered, so that it is not tried again.
    pub(super) fn refuse(&self, region: &CopyRegion) {
        self.refused.borrow_mut().push(region.id());
    }

    fn overlaps(&self, region: &CopyRegion) -> bool {
        let end = region.start() + region.len();
        self.entries.borrow().iter().any(|entry| entry.start < end && region.start() < entry.end)
    }

    /// The protection domain, for registering a region on another thread.
    pub(super) fn domain(&self) -> &Arc<ProtectionDomain> {
        &self.domain
    }

    /// Enters a caller's region that was just registered. Returns the regions to deregister on a blocking thread:
    /// evicted ones, or `registered` itself if an overlapping region was entered meanwhile.
    pub(super) fn enter(&self, region: &CopyRegion, registered: MemoryRegion) -> Vec<MemoryRegion> {
        if self.overlaps(region) {
            return vec![registered];
        }
        let evicted = self.make_room();
        self.insert(region.start(), region.len(), registered, Some((region.id(), self.clock.get())));
        evicted
    }

    /// Removes the least recently used regions until there is room for one more. Regions in use stay, even past the
    /// limit.
    fn make_room(&self) -> Vec<MemoryRegion> {
        let mut entries = self.entries.borrow_mut();
        let callers = entries.iter().filter(|entry| entry.caller.is_some()).count();
        let mut evicted = Vec::new();
        for _ in self.registered_max..=callers {
            let unused = entries.iter().enumerate().filter(|(_, entry)| Rc::strong_count(&entry.region) == 1);
            let oldest = unused.filter_map(|(at, entry)| Some((entry.caller?.1, at))).min();
            let Some((_, at)) = oldest else { break };
            evicted.extend(Rc::into_inner(entries.remove(at).region));
        }
        evicted
    }

    /// Removes a caller's region from the table, to be deregistered on a blocking thread.
    pub(super) fn forget(&self, region: &CopyRegion) -> Option<MemoryRegion> {
        self.refused.borrow_mut().retain(|&id| id != region.id());
        let mut entries = self.entries.borrow_mut();
        let at = entries.iter().position(|entry| entry.caller.is_some_and(|(id, _)| id == region.id()))?;
        // If a batch of an overlapping region still uses it, that batch drops the last reference.
        Rc::into_inner(entries.remove(at).region)
    }
}

/// Registers a range with the NIC: device memory through a dma-buf, or through nvidia-peermem if that fails.
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
        // SAFETY: the caller vouches for the range.
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
    // SAFETY: the caller vouches for the range.
    let by_peermem = unsafe { MemoryRegion::new(domain, start, len) };
    by_peermem
        .map(|region| (region, Some(DeviceAccess::Peermem)))
        .map_err(|fault| format!("{len} bytes of device memory: by dma-buf: {refused}; by nvidia-peermem: {fault}"))
}
