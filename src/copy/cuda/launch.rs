//! Puts copies into a stream, by each of the methods.

use std::{cell::RefCell, ptr::NonNull, sync::Arc};

use super::method::CopyMethod;
use crate::{
    copy::{CopyOp, Direction},
    error::Result,
    gpu::{BatchArrays, CopyKernel, Event, Fault, Gpu, HostPin, Stream, Tile},
    io::AlignedBuf,
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
    fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        let bytes = TILES_PER_BUFFER * size_of::<Tile>();
        let mut memory = AlignedBuf::zeroed(bytes);
        let start = NonNull::from(&mut *memory).cast::<u8>();
        // SAFETY: the memory of a buffer stays where it is when the buffer is moved, and lives as long as its owner.
        let pin = unsafe { HostPin::new(Arc::clone(gpu), start, bytes, Arc::new(memory))? };
        Ok(TileBuffer { tiles: start.cast(), _pin: pin })
    }

    /// Fills it from the front; returns how many it took.
    fn fill(&mut self, tiles: &mut impl Iterator<Item = Tile>) -> usize {
        let mut count = 0;
        for tile in tiles.take(TILES_PER_BUFFER) {
            // SAFETY: within the buffer, aligned to pages, which nobody else knows while it is not in a stream.
            unsafe { self.tiles.add(count).write(tile) };
            count += 1;
        }
        count
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
        ops: &[CopyOp],
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
        ops: &[CopyOp],
        direction: Direction,
        method: CopyMethod,
        launched: &mut Launched,
    ) -> std::result::Result<(), Fault> {
        match (method, &self.kernel) {
            (CopyMethod::Kernel, Some(kernel)) => {
                // SAFETY: the caller's promise.
                unsafe { self.queue_kernel(kernel, stream, ops, &mut launched.tiles) }
            }
            (CopyMethod::Batch, _) if self.gpu.has_batches() => {
                // SAFETY: the caller's promise.
                unsafe { stream.copy_batch(ops, direction, &mut self.arrays.borrow_mut()) }
            }
            _ => ops.iter().try_for_each(|op| {
                // SAFETY: the caller's promise.
                unsafe { stream.copy(op) }
            }),
        }
    }

    /// # Safety
    /// As [`launch`](Self::launch).
    unsafe fn queue_kernel(
        &self,
        kernel: &CopyKernel,
        stream: &Stream,
        ops: &[CopyOp],
        used: &mut Vec<TileBuffer>,
    ) -> std::result::Result<(), Fault> {
        let bytes: usize = ops.iter().map(|op| op.len).sum();
        let tile_bytes = self.tile_bytes(bytes);
        let mut tiles = ops.iter().flat_map(|op| Tile::cut(op, tile_bytes)).peekable();
        while tiles.peek().is_some() {
            let Some(mut buffer) = self.tile_buffer() else {
                // Without memory for descriptions: slower, and right.
                // SAFETY: the caller's promise; what a launch before this one copies is copied again, from the same
                // sources to the same places, behind it in the same stream.
                return ops.iter().try_for_each(|op| unsafe { stream.copy(op) });
            };
            let count = buffer.fill(&mut tiles);
            let blocks = count.div_ceil(WARPS_PER_BLOCK).min(self.blocks_max as usize) as u32;
            let start = buffer.tiles.as_ptr();
            used.push(buffer);
            // SAFETY: the descriptions are in `used`, which the caller keeps; for the rest the caller's promise.
            unsafe { kernel.launch(stream, start, count as u32, blocks)? };
        }
        Ok(())
    }

    fn tile_bytes(&self, bytes: usize) -> usize {
        let warps = self.blocks_max as usize * WARPS_PER_BLOCK;
        let even = bytes.div_ceil(warps * TILES_PER_WARP).next_multiple_of(TILE_BYTES_MIN);
        even.clamp(TILE_BYTES_MIN, TILE_BYTES_MAX)
    }

    fn tile_buffer(&self) -> Option<TileBuffer> {
        if let Some(buffer) = self.tiles.borrow_mut().pop() {
            return Some(buffer);
        }
        match TileBuffer::new(&self.gpu) {
            Ok(buffer) => Some(buffer),
            Err(error) => {
                tracing::warn!(%error, "no pinned memory for the copy kernel's descriptions");
                None
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
