//! Queues copies on a stream, by each of the methods.

use std::{cell::RefCell, ptr::NonNull, rc::Rc, sync::Arc};

use kvhoist_base::{
    block::{CopyOp, Direction},
    panics::log,
};

use crate::{
    CopyMethod,
    cuda::{BatchArrays, CopyKernel, CudaError, Event, Gpu, HostPin, Stream, Tile},
};

/// Tiles per buffer.
const TILES_PER_BUFFER: usize = 16 << 10;

/// Smallest tile: what a warp copies before it reads the next descriptor.
const TILE_BYTES_MIN: usize = 4 << 10;

/// Largest tile. Copies are cut so that all warps end at about the same time.
const TILE_BYTES_MAX: usize = 64 << 10;

/// Warps of a thread block, as the kernel is launched.
const WARPS_PER_BLOCK: usize = 16;

/// Tiles per warp, so that warps that start late still end with the others.
const TILES_PER_WARP: usize = 4;

/// Pinned memory for tile descriptors.
pub(super) struct TileBuffer {
    tiles: NonNull<Tile>,
    _pin: HostPin,
}

impl TileBuffer {
    fn new(gpu: &Arc<Gpu>) -> std::result::Result<Self, CudaError> {
        let pin = HostPin::zeroed(gpu, TILES_PER_BUFFER * size_of::<Tile>())?;
        Ok(TileBuffer { tiles: pin.start().cast(), _pin: pin })
    }

    /// Writes descriptor number `at`.
    fn write(&mut self, at: usize, tile: Tile) {
        assert!(at < TILES_PER_BUFFER, "tile {at} of {TILES_PER_BUFFER}");
        // SAFETY: within the page-aligned buffer; nothing else uses it outside a launch.
        unsafe { self.tiles.add(at).write(tile) };
    }
}

/// The copies of several batches, to be launched together. Empty copies are skipped.
pub(super) struct Ops<'a> {
    pub(super) lists: Vec<&'a [CopyOp]>,
    /// Number of copies, and their bytes.
    pub(super) count: usize,
    pub(super) bytes: usize,
}

impl<'a> Ops<'a> {
    pub(super) fn new(lists: impl Iterator<Item = &'a [CopyOp]>) -> Self {
        let mut ops = Ops { lists: lists.collect(), count: 0, bytes: 0 };
        for op in ops.lists.iter().copied().flatten() {
            ops.count += usize::from(op.len > 0);
            ops.bytes += op.len;
        }
        ops
    }

    fn iter(&self) -> impl Iterator<Item = CopyOp> {
        self.lists.iter().copied().flatten().copied().filter(|op| op.len > 0)
    }

    /// Average length of a copy.
    pub(super) fn mean_bytes(&self) -> usize {
        self.bytes / self.count.max(1)
    }
}

/// State of launches apart from the stream. Used by one thread.
pub(super) struct Launcher {
    gpu: Arc<Gpu>,
    kernel: Option<Rc<CopyKernel>>,
    blocks_max: u32,
    arrays: RefCell<BatchArrays>,
    tiles: RefCell<Vec<TileBuffer>>,
    events: RefCell<Vec<Event>>,
}

/// Resources of a launch, in use until the stream has passed it.
pub(super) struct Launched {
    event: Option<Event>,
    tiles: Vec<TileBuffer>,
}

impl Launcher {
    /// `blocks_max`: largest number of thread blocks per kernel launch.
    pub(super) fn new(gpu: &Arc<Gpu>, blocks_max: u32) -> std::result::Result<Self, CudaError> {
        // The kernel reads descriptors and blocks by their host addresses.
        let kernel = if gpu.device().host_addresses { Some(Rc::new(CopyKernel::load(gpu)?)) } else { None };
        Ok(Launcher {
            gpu: Arc::clone(gpu),
            kernel,
            blocks_max,
            arrays: RefCell::default(),
            tiles: RefCell::default(),
            events: RefCell::default(),
        })
    }

    /// True if this device and driver support the method.
    pub(super) fn has(&self, method: CopyMethod) -> bool {
        match method {
            CopyMethod::Loop => true,
            CopyMethod::Batch => self.gpu.has_batches(),
            CopyMethod::Kernel => self.kernel.is_some(),
        }
    }

    /// Queues the copies, and an event behind them. After an error some of the copies may be queued; the event, if
    /// there is one, is behind those.
    ///
    /// # Safety
    /// All ranges must stay valid, and untouched by others, until the launch [is done](Self::is_done). With a `method`
    /// other than `Loop`, host ranges must be pinned.
    pub(super) unsafe fn launch(
        &self,
        stream: &Stream,
        ops: &Ops<'_>,
        direction: Direction,
        method: CopyMethod,
    ) -> (std::result::Result<(), CudaError>, Launched) {
        let mut launched = Launched { event: None, tiles: Vec::new() };
        let result = self.gpu.bind().and_then(|()| {
            // SAFETY: the caller vouches for the ranges.
            let queued = unsafe { self.queue(stream, ops, direction, method, &mut launched) };
            // Behind everything that was queued, complete or not.
            let event = self.event()?;
            event.record(stream)?;
            launched.event = Some(event);
            queued
        });
        (result, launched)
    }

    /// # Safety
    /// As [`launch`](Self::launch).
    unsafe fn queue(
        &self,
        stream: &Stream,
        ops: &Ops<'_>,
        direction: Direction,
        method: CopyMethod,
        launched: &mut Launched,
    ) -> std::result::Result<(), CudaError> {
        match (method, &self.kernel) {
            (CopyMethod::Kernel, Some(kernel)) => {
                // SAFETY: the caller vouches for the ranges.
                unsafe { self.queue_kernel(kernel, stream, ops, direction, &mut launched.tiles) }
            }
            // SAFETY: the caller vouches for the ranges.
            (CopyMethod::Batch, _) if ops.count > 0 => unsafe { self.queue_batch(stream, ops.iter(), direction) },
            // SAFETY: the caller vouches for the ranges.
            _ => ops.iter().try_for_each(|op| unsafe { stream.copy(&op) }),
        }
    }

    /// Queues copies, one at least, in one call if the driver has it.
    ///
    /// # Safety
    /// As [`launch`](Self::launch).
    unsafe fn queue_batch(
        &self,
        stream: &Stream,
        mut ops: impl Iterator<Item = CopyOp>,
        direction: Direction,
    ) -> std::result::Result<(), CudaError> {
        match self.gpu.has_batches() {
            // SAFETY: the caller vouches for the ranges.
            true => unsafe { stream.copy_batch(ops, direction, &mut self.arrays.borrow_mut()) },
            // SAFETY: the caller vouches for the ranges.
            false => ops.try_for_each(|op| unsafe { stream.copy(&op) }),
        }
    }

    /// # Safety
    /// As [`launch`](Self::launch).
    unsafe fn queue_kernel(
        &self,
        kernel: &CopyKernel,
        stream: &Stream,
        ops: &Ops<'_>,
        direction: Direction,
        used: &mut Vec<TileBuffer>,
    ) -> std::result::Result<(), CudaError> {
        let tile_bytes = self.tile_bytes(ops.bytes);
        let mut buffer = None;
        let mut count = 0;
        let mut ops = ops.iter();
        while let Some(op) = ops.next() {
            let mut at = 0;
            while at < op.len {
                if count == TILES_PER_BUFFER {
                    // SAFETY: the caller vouches for the ranges.
                    unsafe { self.queue_tiles(kernel, stream, buffer.take(), count, used)? };
                    count = 0;
                }
                buffer = buffer.or_else(|| self.tiles.borrow_mut().pop());
                let Some(tiles) = &mut buffer else {
                    // No more buffers: what is left goes without descriptors.
                    let (src, dst) = (op.src.wrapping_add(at), op.dst.wrapping_add(at));
                    let left = std::iter::once(CopyOp { src, dst, len: op.len - at }).chain(ops);
                    // SAFETY: the caller vouches for the ranges.
                    return unsafe { self.queue_batch(stream, left, direction) };
                };
                let len = tile_bytes.min(op.len - at);
                tiles.write(count, Tile::part(&op, at, len));
                count += 1;
                at += len;
            }
        }
        // SAFETY: the caller vouches for the ranges.
        unsafe { self.queue_tiles(kernel, stream, buffer, count, used) }
    }

    /// # Safety
    /// As [`launch`](Self::launch), for the ranges of the first `count` tiles.
    unsafe fn queue_tiles(
        &self,
        kernel: &CopyKernel,
        stream: &Stream,
        buffer: Option<TileBuffer>,
        count: usize,
        used: &mut Vec<TileBuffer>,
    ) -> std::result::Result<(), CudaError> {
        let Some(buffer) = buffer else { return Ok(()) };
        let blocks = count.div_ceil(WARPS_PER_BLOCK).min(self.blocks_max as usize) as u32;
        let start = buffer.tiles.as_ptr();
        used.push(buffer);
        // SAFETY: the descriptors are in `used`, which the caller keeps; the caller vouches for the ranges.
        unsafe { kernel.launch(stream, start, count as u32, blocks) }
    }

    fn tile_bytes(&self, bytes: usize) -> usize {
        let warps = self.blocks_max as usize * WARPS_PER_BLOCK;
        let even = bytes.div_ceil(warps * TILES_PER_WARP).next_multiple_of(TILE_BYTES_MIN);
        even.clamp(TILE_BYTES_MIN, TILE_BYTES_MAX)
    }

    /// Pins the buffers of as many launches as can be in flight, before any is: pinning can wait for the device, and
    /// the device for a layer gate that only this thread opens. Launches have no others.
    pub(super) fn reserve(&self, launches: usize) {
        if self.kernel.is_none() {
            return;
        }
        let mut tiles = self.tiles.borrow_mut();
        while tiles.len() < launches {
            match TileBuffer::new(&self.gpu) {
                Ok(buffer) => tiles.push(buffer),
                // The driver's own copies take the kernel's place.
                Err(fault) => return log(|| tracing::debug!(%fault, "no memory for tile descriptors was pinned")),
            }
        }
    }

    fn event(&self) -> std::result::Result<Event, CudaError> {
        match self.events.borrow_mut().pop() {
            Some(event) => Ok(event),
            None => Event::new(&self.gpu),
        }
    }

    /// Whether the stream has passed the launch; without an event, whether it has passed all launches. The context
    /// must be current.
    pub(super) fn is_done(&self, launched: &Launched, stream: &Stream) -> std::result::Result<bool, CudaError> {
        launched.event.as_ref().map_or_else(|| stream.is_idle(), Event::is_reached)
    }

    /// Keeps the resources of a finished launch for reuse.
    pub(super) fn recycle(&self, launched: Launched) {
        self.tiles.borrow_mut().extend(launched.tiles);
        self.events.borrow_mut().extend(launched.event);
    }

    /// Never frees what a launch that may still run uses.
    pub(super) fn leak(&self, launched: Launched) {
        std::mem::forget((launched, self.kernel.clone(), Arc::clone(&self.gpu)));
    }
}
