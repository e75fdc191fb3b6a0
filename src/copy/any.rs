//! The engine picked at run time.

use std::time::Duration;

use super::{CopyBatch, CopyEngine, Memcpy, cuda::CudaCopy};
use crate::error::Result;

/// One of the engines that production uses, chosen when a cache is opened.
pub enum AnyCopy {
    /// The processor: without a device, or with a simulated one.
    Memcpy(Memcpy),
    /// A CUDA device.
    Cuda(CudaCopy),
}

impl CopyEngine for AnyCopy {
    fn name(&self) -> &'static str {
        match self {
            AnyCopy::Memcpy(engine) => engine.name(),
            AnyCopy::Cuda(engine) => engine.name(),
        }
    }

    async fn copy(&self, batch: CopyBatch) -> (Result<()>, CopyBatch) {
        match self {
            AnyCopy::Memcpy(engine) => engine.copy(batch).await,
            AnyCopy::Cuda(engine) => engine.copy(batch).await,
        }
    }

    fn fault(&self) -> Option<String> {
        match self {
            AnyCopy::Memcpy(engine) => engine.fault(),
            AnyCopy::Cuda(engine) => engine.fault(),
        }
    }

    fn cost(&self, batch: &CopyBatch) -> Duration {
        match self {
            AnyCopy::Memcpy(engine) => engine.cost(batch),
            AnyCopy::Cuda(engine) => engine.cost(batch),
        }
    }
}
