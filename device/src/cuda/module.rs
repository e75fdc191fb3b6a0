//! Loaded kernels; the copy kernel and its descriptors.

use std::{
    ffi::{CStr, c_void},
    sync::Arc,
};

use cudarc::driver::sys::{self, CUfunction, CUmodule};
use kvhoist_base::block::CopyOp;

use super::{
    context::Gpu,
    driver::{CudaError, check},
    stream::Stream,
};

/// `kernels/copy.cu` for compute capability 8.0 and later; the driver compiles it for the device.
const PTX: &str = concat!(include_str!("kernels/copy.ptx"), "\0");

/// Threads of a thread block: 16 warps, one tile each at a time.
pub(crate) const BLOCK_THREADS: u32 = 512;

/// A range that one warp copies in one piece. `Tile` in `kernels/copy.cu` has the same layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub(crate) struct Tile {
    src: u64,
    dst: u64,
    len: u64,
}

impl Tile {
    /// The tile of `len` bytes at offset `at` of a copy.
    pub(crate) fn part(op: &CopyOp, at: usize, len: usize) -> Tile {
        let (src, dst) = (op.src.expose_provenance() as u64, op.dst.expose_provenance() as u64);
        Tile { src: src + at as u64, dst: dst + at as u64, len: len as u64 }
    }
}

/// A loaded kernel.
pub(super) struct Loaded {
    gpu: Arc<Gpu>,
    module: CUmodule,
    function: CUfunction,
}

impl Loaded {
    /// Loads the kernel `name` of `image`, a PTX text that ends in a zero byte.
    pub(super) fn new(gpu: &Arc<Gpu>, image: &'static str, name: &CStr) -> Result<Self, CudaError> {
        assert!(image.ends_with('\0'), "the driver needs a terminating zero byte");
        gpu.bind()?;
        let mut module = std::ptr::null_mut();
        // SAFETY: the context is current; the image is a string that ends in a zero byte; unloaded when this is
        // dropped.
        check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&mut module, image.as_ptr().cast()) })?;
        let mut loaded = Loaded { gpu: Arc::clone(gpu), module, function: std::ptr::null_mut() };
        // SAFETY: our own module, and the name of a kernel in it.
        check("cuModuleGetFunction", unsafe { sys::cuModuleGetFunction(&mut loaded.function, module, name.as_ptr()) })?;
        Ok(loaded)
    }

    pub(super) fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Queues a launch. The context must be current.
    ///
    /// # Safety
    /// The arguments must have the kernel's types. Memory that they lead to must be valid until the stream has passed
    /// the launch.
    pub(super) unsafe fn launch(
        &self,
        stream: &Stream,
        blocks: u32,
        threads: u32,
        arguments: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        // SAFETY: our own function and stream; the driver copies the arguments during the call; the caller vouches for
        // the rest.
        check("cuLaunchKernel", unsafe {
            sys::cuLaunchKernel(
                self.function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream.raw(),
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        })
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        // SAFETY: our own module, unloaded once, with no launch in flight.
        self.gpu.give_back("cuModuleUnload", || unsafe { sys::cuModuleUnload(self.module) });
    }
}

/// The gather/scatter kernel.
pub(crate) struct CopyKernel(Loaded);

impl CopyKernel {
    pub(crate) fn load(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        Loaded::new(gpu, PTX, c"kvhoist_copy").map(CopyKernel)
    }

    /// Queues the copy of `count` tiles at the device address `tiles`, on `blocks` thread blocks. The context must be
    /// current.
    ///
    /// # Safety
    /// The tiles and their ranges must stay valid, and untouched by others, until the stream has passed the launch.
    pub unsafe fn launch(&self, stream: &Stream, tiles: *const Tile, count: u32, blocks: u32) -> Result<(), CudaError> {
        let (mut tiles, mut count) = (tiles.expose_provenance() as u64, count);
        let mut arguments: [*mut c_void; 2] = [(&raw mut tiles).cast(), (&raw mut count).cast()];
        // SAFETY: the arguments have the kernel's types; the caller vouches for the memory they lead to.
        unsafe { self.0.launch(stream, blocks, BLOCK_THREADS, &mut arguments) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tile_is_what_the_kernel_reads() {
        assert_eq!(size_of::<Tile>(), 24);
        assert!(PTX.contains(".entry kvhoist_copy("), "the kernel of that name");
    }
}
