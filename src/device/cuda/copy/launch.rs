//! Puts copies into a stream, by each of the methods.

use std::{cell::RefCell, ptr::NonNull, sync::Arc};

use crate::{
    block::{CopyOp, Direction},
    config::CopyMethod,
    device::cuda::{BatchArrays, CopyKernel, Event, Fault, Gpu, HostPin, Stream, Tile},
    memory::AlignedBuf,
};

/// Descriptions that one buffer holds.
const TILES_PER_BUFFER: usize = 16 << 10;

/// The least that a warp copies without a look at the next description.
const TILE_BYTES_MIN: usize = 4 << 10;

/// The most; a copy is cut so that all warps end at about the same time.
const TILE_BYTES_MAX: usize = 64 << 10;

/// Warps of a thread block, as the kernel is launched.
const WARPS_PER_BLOCK: usize = 16;

/// Tiles that a warp should get, so that those that begin late make up for it.
const TILES_PER_WARP: usize = 4;

/// Pinned memory for descriptions of tiles.
pub(super) struct TileBuffer {
    tiles: NonNull<Tile>,
    _pin: HostPin,
}

impl TileBuffer {
    fn new(gpu: &Arc<Gpu>) -> std::result::Result<Self, Fault> {
        let bytes = TILES_PER_BUFFER * size_of::<Tile>();
        let mut memory = AlignedBuf::zeroed(bytes);
        let start = NonNull::from(&mut *memory).cast::<u8>();
        // SAFETY: the memory of a buffer stays where it is when the buffer is moved, and lives as long as its owner.
        let pin = unsafe { HostPin::register(Arc::clone(gpu), start, bytes, Arc::new(memory))? };
        Ok(TileBuffer { tiles: start.cast(), _pin: pin })
    }

    /// Writes a description at the place of this number.
    fn write(&mut self, at: usize, tile: Tile) {
        assert!(at < TILES_PER_BUFFER, "tile {at} of {TILES_PER_BUFFER}");
        // SAFETY: within the buffer, aligned to pages, which nobody else knows while it is not in a stream.
        unsafe { self.tiles.add(at).write(tile) };
    }
}

/// Copies to be launched together, where they are: the lists of several batches. Empty ones are passed over.
pub(super) struct Ops<'a> {
    pub(super) lists: Vec<&'a [CopyOp]>,
    /// How many there are, and their bytes in all.
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

    /// Bytes of one, on average.
    pub(super) fn mean_bytes(&self) -> usize {
        self.bytes / self.count.max(1)
    }
}

/// What launching needs besides a stream. One thread's.
pub(super) struct Launcher {
    gpu: Arc<Gpu>,
    kernel: Option<CopyKernel>,
    blocks_max: u32,
    arrays: RefCell<BatchArrays>,
    tiles: RefCell<Vec<TileBuffer>>,
    events: RefCell<Vec<Event>>,
}

/// What a launch uses until the stream has passed it.
pub(super) struct Launched {
    event: Option<Event>,
    tiles: Vec<TileBuffer>,
}

impl Launcher {
    /// `blocks_max`: thread blocks that the kernel may use.
    pub(super) fn new(gpu: &Arc<Gpu>, blocks_max: u32) -> std::result::Result<Self, Fault> {
        // Kernels read descriptions and blocks by the host's own addresses.
        let kernel = if gpu.device().host_addresses { Some(CopyKernel::load(gpu)?) } else { None };
        Ok(Launcher {
            gpu: Arc::clone(gpu),
            kernel,
            blocks_max,
            arrays: RefCell::default(),
            tiles: RefCell::default(),
            events: RefCell::default(),
        })
    }

    /// True if this device and driver have the method.
    pub(super) fn has(&self, method: CopyMethod) -> bool {
        match method {
            CopyMethod::Loop => true,
            CopyMethod::Batch => self.gpu.has_batches(),
            CopyMethod::Kernel => self.kernel.is_some(),
        }
    }

    /// Puts the copies into the stream, and a mark behind them. On an error some may be in it: the mark, where there
    /// is one, is behind those.
    ///
    /// # Safety
    /// All ranges must stay valid, and untouched by others, until the stream has passed the mark; with a `method`
    /// other than `Loop` the host's ranges must be pinned.
    pub(super) unsafe fn launch(
        &self,
        stream: &Stream,
        ops: &Ops<'_>,
        direction: Direction,
        method: CopyMethod,
    ) -> (std::result::Result<(), Fault>, Launched) {
        let mut launched = Launched { event: None, tiles: Vec::new() };
        let result = self.gpu.bind().and_then(|()| {
            // SAFETY: the caller's promise.
            let queued = unsafe { self.queue(stream, ops, direction, method, &mut launched) };
            // Behind what was queued, be it all or not.
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
    ) -> std::result::Result<(), Fault> {
        match (method, &self.kernel) {
            (CopyMethod::Kernel, Some(kernel)) => {
                // SAFETY: the caller's promise.
                unsafe { self.queue_kernel(kernel, stream, ops, &mut launched.tiles) }
            }
            (CopyMethod::Batch, _) if self.gpu.has_batches() && ops.count > 0 => {
                // SAFETY: the caller's promise.
                unsafe { stream.copy_batch(ops.iter(), direction, &mut self.arrays.borrow_mut()) }
            }
            // SAFETY: the caller's promise.
            _ => ops.iter().try_for_each(|op| unsafe { stream.copy(&op) }),
        }
    }

    /// # Safety
    /// As [`launch`](Self::launch).
    unsafe fn queue_kernel(
        &self,
        kernel: &CopyKernel,
        stream: &Stream,
        ops: &Ops<'_>,
        used: &mut Vec<TileBuffer>,
    ) -> std::result::Result<(), Fault> {
        let tile_bytes = self.tile_bytes(ops.bytes);
        let mut buffer = None;
        let mut count = 0;
        for op in ops.iter() {
            let mut at = 0;
            while at < op.len {
                if count == TILES_PER_BUFFER {
                    // SAFETY: the caller's promise.
                    unsafe { self.queue_tiles(kernel, stream, buffer.take(), count, used)? };
                    count = 0;
                }
                let len = tile_bytes.min(op.len - at);
                let tiles = match &mut buffer {
                    Some(tiles) => tiles,
                    None => buffer.insert(self.tile_buffer()?),
                };
                tiles.write(count, Tile::part(&op, at, len));
                count += 1;
                at += len;
            }
        }
        // SAFETY: the caller's promise.
        unsafe { self.queue_tiles(kernel, stream, buffer, count, used) }
    }

    /// # Safety
    /// As [`launch`](Self::launch), for what the first `count` tiles say.
    unsafe fn queue_tiles(
        &self,
        kernel: &CopyKernel,
        stream: &Stream,
        buffer: Option<TileBuffer>,
        count: usize,
        used: &mut Vec<TileBuffer>,
    ) -> std::result::Result<(), Fault> {
        let Some(buffer) = buffer else { return Ok(()) };
        let blocks = count.div_ceil(WARPS_PER_BLOCK).min(self.blocks_max as usize) as u32;
        let start = buffer.tiles.as_ptr();
        used.push(buffer);
        // SAFETY: the descriptions are in `used`, which the caller keeps; for the rest the caller's promise.
        unsafe { kernel.launch(stream, start, count as u32, blocks) }
    }

    fn tile_bytes(&self, bytes: usize) -> usize {
        let warps = self.blocks_max as usize * WARPS_PER_BLOCK;
        let even = bytes.div_ceil(warps * TILES_PER_WARP).next_multiple_of(TILE_BYTES_MIN);
        even.clamp(TILE_BYTES_MIN, TILE_BYTES_MAX)
    }

    fn tile_buffer(&self) -> std::result::Result<TileBuffer, Fault> {
        match self.tiles.borrow_mut().pop() {
            Some(buffer) => Ok(buffer),
            None => TileBuffer::new(&self.gpu),
        }
    }

    /// Pins buffers for as many launches as are ever under way at once: later, pinning could have to wait for the
    /// device, and the device for us, at a layer that a stream waits for.
    pub(super) fn reserve(&self, launches: usize) {
        if self.kernel.is_none() {
            return;
        }
        let mut tiles = self.tiles.borrow_mut();
        while tiles.len() < launches {
            match TileBuffer::new(&self.gpu) {
                Ok(buffer) => tiles.push(buffer),
                // The kernel is not used then: its blocks could not be pinned either.
                Err(fault) => return tracing::debug!(%fault, "no memory for descriptions of copies was pinned"),
            }
        }
    }

    fn event(&self) -> std::result::Result<Event, Fault> {
        match self.events.borrow_mut().pop() {
            Some(event) => Ok(event),
            None => Event::new(&self.gpu),
        }
    }

    /// Whether the stream has passed the launch. True too where there is no mark: then nothing was ever behind it but
    /// what [`Stream::synchronize`] has waited for.
    pub(super) fn is_done(&self, launched: &Launched) -> std::result::Result<bool, Fault> {
        launched.event.as_ref().map_or(Ok(true), Event::is_reached)
    }

    /// Keeps for later what a launch has used; the stream has passed it.
    pub(super) fn recycle(&self, launched: Launched) {
        self.tiles.borrow_mut().extend(launched.tiles);
        self.events.borrow_mut().extend(launched.event);
    }
}

impl Launched {
    /// True if there is a mark behind what was queued.
    pub(super) fn is_marked(&self) -> bool {
        self.event.is_some()
    }
}
