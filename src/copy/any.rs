//! The engine picked at run time.

use std::{any::Any, sync::Arc, time::Duration};

use super::{CopyBatch, CopyEngine, Memcpy, cuda::CudaCopy};
use crate::{block::Segment, error::Result};

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

    async fn checksum(&self, segments: &[Segment], owner: Arc<dyn Any + Send + Sync>) -> Option<Result<u64>> {
        match self {
            AnyCopy::Memcpy(engine) => engine.checksum(segments, owner).await,
            AnyCopy::Cuda(engine) => engine.checksum(segments, owner).await,
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
