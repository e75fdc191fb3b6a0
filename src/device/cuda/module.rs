//! Kernels, loaded; the copy kernel, and the descriptions that it works from.

use std::{
    ffi::{CStr, c_void},
    sync::Arc,
};

use cudarc::driver::sys::{self, CUfunction, CUmodule};

use super::{
    context::Gpu,
    driver::{Fault, check},
    stream::Stream,
};
use crate::block::CopyOp;

/// `kernels/copy.cu` for every device since compute capability 8.0; the driver compiles it for the one at hand.
const PTX: &str = concat!(include_str!("kernels/copy.ptx"), "\0");

/// Threads of a thread block: 16 warps, one tile each at a time.
pub(crate) const BLOCK_THREADS: u32 = 512;

/// What one warp copies without a look at anything else. As `Tile` in `kernels/copy.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub(crate) struct Tile {
    src: u64,
    dst: u64,
    len: u64,
}

impl Tile {
    /// The copy of `len` bytes from the byte `at` of a copy on.
    pub(crate) fn part(op: &CopyOp, at: usize, len: usize) -> Tile {
        let (src, dst) = (op.src.expose_provenance() as u64, op.dst.expose_provenance() as u64);
        Tile { src: src + at as u64, dst: dst + at as u64, len: len as u64 }
    }
}

/// A kernel, loaded.
pub(super) struct Loaded {
    gpu: Arc<Gpu>,
    module: CUmodule,
    function: CUfunction,
}

impl Loaded {
    /// Loads the kernel `name` of `image`, a PTX that ends in 0.
    pub(super) fn new(gpu: &Arc<Gpu>, image: &'static str, name: &CStr) -> Result<Self, Fault> {
        assert!(image.ends_with('\0'), "the driver looks for the end");
        gpu.bind()?;
        let mut module = std::ptr::null_mut();
        // SAFETY: the context is current; the image is a string that ends in 0; unloaded when this is dropped.
        check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&mut module, image.as_ptr().cast()) })?;
        let mut loaded = Loaded { gpu: Arc::clone(gpu), module, function: std::ptr::null_mut() };
        // SAFETY: our own module, and the name of a kernel in it.
        check("cuModuleGetFunction", unsafe { sys::cuModuleGetFunction(&mut loaded.function, module, name.as_ptr()) })?;
        Ok(loaded)
    }

    pub(super) fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Queues a launch. The context is current.
    ///
    /// # Safety
    /// The arguments must be of the kernel's types, and what they lead to valid until the stream has passed it.
    pub(super) unsafe fn launch(
        &self,
        stream: &Stream,
        blocks: u32,
        threads: u32,
        arguments: &mut [*mut c_void],
    ) -> Result<(), Fault> {
        // SAFETY: our own function and stream; the driver copies the arguments during the call; the rest is the
        // caller's promise.
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
        // SAFETY: our own module, unloaded once, when no launch is under way.
        let unloaded =
            self.gpu.bind().and_then(|()| check("cuModuleUnload", unsafe { sys::cuModuleUnload(self.module) }));
        if let Err(fault) = unloaded {
            tracing::debug!(%fault, "a kernel was not unloaded");
        }
    }
}

/// The gather/scatter kernel, loaded.
pub(crate) struct CopyKernel(Loaded);

impl CopyKernel {
    pub(crate) fn load(gpu: &Arc<Gpu>) -> Result<Self, Fault> {
        Loaded::new(gpu, PTX, c"kvhoist_copy").map(CopyKernel)
    }

    /// Queues the copy of `count` tiles from `tiles` on, an address that the device knows, by `blocks` thread blocks.
    /// The context is current.
    ///
    /// # Safety
    /// The tiles and all that they name must stay valid, and untouched by others, until the stream has passed them.
    pub(crate) unsafe fn launch(
        &self,
        stream: &Stream,
        tiles: *const Tile,
        count: u32,
        blocks: u32,
    ) -> Result<(), Fault> {
        let (mut tiles, mut count) = (tiles.expose_provenance() as u64, count);
        let mut arguments: [*mut c_void; 2] = [(&raw mut tiles).cast(), (&raw mut count).cast()];
        // SAFETY: arguments of the kernel's types; what they lead to is as the caller promises.
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
