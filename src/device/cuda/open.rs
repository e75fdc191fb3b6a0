//! Opens what a cache needs of a device: memory for its pool, and the engine that copies to and from it.

use std::sync::Arc;

use super::{CudaCopy, DeviceBuffer, Gpu, copy::CudaCopyOptions, discover::discover};
use crate::{
    config::DeviceConfig,
    device::Memcpy,
    error::Result,
    memory::{Arena, DeviceMemory},
};

/// Whether the machine has a CUDA device that this build can use.
pub fn has_device() -> bool {
    !discover().devices.is_empty()
}

impl Gpu {
    /// Allocates `bytes` bytes of device memory, and makes the engine that copies between them and `arena`. Copies
    /// within host memory are left to `host`.
    ///
    /// # Errors
    /// As of [`DeviceBuffer::new`] and [`CudaCopy::new`].
    pub(crate) fn open_pool(
        self: &Arc<Self>,
        config: &DeviceConfig,
        arena: &Arc<Arena>,
        bytes: usize,
        host: Memcpy,
    ) -> Result<(Box<dyn DeviceMemory>, CudaCopy)> {
        let options = CudaCopyOptions { method: config.copy, blocks_max: config.copy_blocks_max };
        let memory = DeviceBuffer::new(Arc::clone(self), bytes)?;
        let copy = CudaCopy::new(self, arena, options)?.with_host(host);
        tracing::info!(device = %self.device(), bytes, "the device tier is a CUDA device");
        Ok((Box::new(memory), copy))
    }
}
