//! Loads and launches the checksum kernel.

use std::{ffi::c_void, ptr::NonNull, sync::Arc};

use kvhoist_base::block::IO_ALIGN;

use super::model::{CONSTANTS, Piece};
use crate::cuda::{CudaError, Gpu, HostPin, Stream, module::Loaded};

/// `kernels/checksum.cu` for compute capability 8.0 and later.
const PTX: &str = concat!(include_str!("../kernels/checksum.ptx"), "\0");

/// Threads of a thread block, which fill the kernel's tables together.
const BLOCK_THREADS: u32 = 256;

/// Pieces that a thread block sums at a time: one per warp.
const PIECES_PER_BLOCK: usize = 8;

/// The loaded checksum kernel.
pub(crate) struct ChecksumKernel {
    loaded: Loaded,
    blocks_max: u32,
}

/// Pinned memory for the pieces of a launch and their sums.
pub(crate) struct PieceBuffer {
    pieces: NonNull<Piece>,
    sums: NonNull<u64>,
    _pin: HostPin,
}

impl PieceBuffer {
    /// Capacity in pieces.
    pub(crate) const PIECES: usize = 4096;

    /// Writes piece number `at`.
    pub(crate) fn write(&mut self, at: usize, piece: Piece) {
        assert!(at < Self::PIECES, "piece {at} of {}", Self::PIECES);
        // SAFETY: within the buffer and aligned; nothing else uses it outside a launch.
        unsafe { self.pieces.add(at).write(piece) };
    }

    /// The sum of piece number `at`, once the stream has passed the launch.
    pub(crate) fn sum(&self, at: usize) -> u64 {
        assert!(at < Self::PIECES, "piece {at} of {}", Self::PIECES);
        // SAFETY: within the buffer and aligned; volatile, because the device wrote it.
        unsafe { self.sums.add(at).read_volatile() }
    }
}

impl ChecksumKernel {
    pub(crate) fn load(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        let loaded = Loaded::new(gpu, PTX, c"kvhoist_checksum")?;
        // One thread block per multiprocessor: a launch takes microseconds, and with fewer blocks it would take longer.
        let blocks_max = u32::try_from(gpu.device().multiprocessors).unwrap_or(1).max(1);
        Ok(ChecksumKernel { loaded, blocks_max })
    }

    /// Allocates memory for a launch.
    pub(crate) fn buffer(&self) -> Result<PieceBuffer, CudaError> {
        let sums_at = (PieceBuffer::PIECES * size_of::<Piece>()).next_multiple_of(IO_ALIGN);
        let bytes = (sums_at + PieceBuffer::PIECES * size_of::<u64>()).next_multiple_of(IO_ALIGN);
        let pin = HostPin::zeroed(self.loaded.gpu(), bytes)?;
        // SAFETY: within the buffer.
        let sums = unsafe { pin.start().add(sums_at) };
        Ok(PieceBuffer { pieces: pin.start().cast(), sums: sums.cast(), _pin: pin })
    }

    /// Queues the sums of the first `count` pieces of `buffer`. The context must be current.
    ///
    /// # Safety
    /// The pieces must be device memory, with addresses that are multiples of 16 and lengths that are multiples of 512.
    /// They and the buffer must stay mapped until the stream has passed the launch.
    pub(crate) unsafe fn launch(&self, stream: &Stream, buffer: &PieceBuffer, count: usize) -> Result<(), CudaError> {
        let mut pieces = buffer.pieces.as_ptr().expose_provenance() as u64;
        let mut sums = buffer.sums.as_ptr().expose_provenance() as u64;
        let (mut count_32, mut constants) = (count as u32, CONSTANTS);
        let mut arguments: [*mut c_void; 4] =
            [(&raw mut pieces).cast(), (&raw mut count_32).cast(), (&raw mut sums).cast(), (&raw mut constants).cast()];
        let blocks = (count.div_ceil(PIECES_PER_BLOCK) as u32).clamp(1, self.blocks_max);
        // SAFETY: the arguments have the kernel's types; the caller vouches for the memory they lead to.
        unsafe { self.loaded.launch(stream, blocks, BLOCK_THREADS, &mut arguments) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_of_that_name_is_there() {
        assert!(PTX.contains(".entry kvhoist_checksum("));
    }
}
