//! Opens what a cache needs of a device: memory for its pool, and the engine that copies to and from it.

use std::sync::Arc;

use kvhoist_base::{
    error::Result,
    memory::{Arena, DeviceMemory},
    panics::log,
};

use super::{CudaCopy, DeviceBuffer, Gpu, discover::discover};
use crate::CudaCopyOptions;

/// Whether the machine has a CUDA device that this build can use.
pub fn has_device() -> bool {
    !discover().devices.is_empty()
}

impl Gpu {
    /// Allocates `bytes` bytes of device memory, and makes the engine that copies between them and `arena`.
    ///
    /// # Errors
    /// As of [`DeviceBuffer::new`] and [`CudaCopy::new`].
    pub fn open_pool(
        self: &Arc<Self>,
        options: CudaCopyOptions,
        arena: &Arc<Arena>,
        bytes: usize,
    ) -> Result<(Box<dyn DeviceMemory>, CudaCopy)> {
        let memory = DeviceBuffer::new(Arc::clone(self), bytes)?;
        let copy = CudaCopy::new(self, arena, options)?;
        log(|| tracing::info!(device = %self.device(), bytes, "the device tier is a CUDA device"));
        Ok((Box::new(memory), copy))
    }
}
