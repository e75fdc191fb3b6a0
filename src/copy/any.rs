//! The engine picked at run time, and beside it the RDMA device, where there is one.

use std::{any::Any, sync::Arc, time::Duration};

use super::{CopyBatch, CopyEngine, CopyRegion, Direction, Memcpy, cuda::CudaCopy, gdr::GdrCopy};
use crate::{
    block::Segment,
    config::{CopyPrefer, GdrMode},
    error::Result,
    metrics::CopyMetrics,
};

/// The engines that production uses, chosen when a cache is opened.
pub struct AnyCopy {
    base: Base,
    gdr: Option<Gdr>,
    metrics: Arc<CopyMetrics>,
}

/// What copies where nothing else does.
enum Base {
    /// The processor: without a device, or with a simulated one.
    Memcpy(Memcpy),
    /// A CUDA device.
    Cuda(CudaCopy),
}

struct Gdr {
    engine: GdrCopy,
    mode: GdrMode,
    prefer: CopyPrefer,
}

impl AnyCopy {
    pub(crate) fn memcpy(metrics: Arc<CopyMetrics>) -> Self {
        AnyCopy { base: Base::Memcpy(Memcpy::new()), gdr: None, metrics }
    }

    pub(crate) fn cuda(engine: CudaCopy, metrics: Arc<CopyMetrics>) -> Self {
        AnyCopy { base: Base::Cuda(engine), gdr: None, metrics }
    }

    /// The same, with an RDMA device that takes the copies which `mode` and `prefer` give it.
    #[must_use]
    pub(crate) fn with_gdr(self, engine: GdrCopy, mode: GdrMode, prefer: CopyPrefer) -> Self {
        AnyCopy { gdr: Some(Gdr { engine, mode, prefer }), ..self }
    }

    async fn copy_by_base(&self, batch: CopyBatch) -> (Result<()>, CopyBatch) {
        match &self.base {
            Base::Memcpy(engine) => engine.copy(batch).await,
            Base::Cuda(engine) => engine.copy(batch).await,
        }
    }

    fn base_cost(&self, batch: &CopyBatch) -> Duration {
        match &self.base {
            Base::Memcpy(engine) => engine.cost(batch),
            Base::Cuda(engine) => engine.cost(batch),
        }
    }

    /// The RDMA device, if it is to take this batch.
    fn chosen(&self, batch: &CopyBatch) -> Option<&GdrCopy> {
        let Gdr { engine, mode, prefer } = self.gdr.as_ref()?;
        // Between ranges of host memory the processor copies at home, unless one of them plays the device.
        let between_hosts = matches!(self.base, Base::Cuda(_)) && batch.direction() == Direction::HostToHost;
        if between_hosts || !engine.is_up() || !engine.covers(batch) {
            return None;
        }
        let chosen = *mode == GdrMode::On || better(*prefer, engine.cost(batch), self.base_cost(batch));
        chosen.then_some(engine)
    }
}

fn better(prefer: CopyPrefer, gdr: Duration, base: Duration) -> bool {
    match prefer {
        CopyPrefer::Latency | CopyPrefer::Throughput => gdr < base,
        CopyPrefer::SpareGpu => gdr < base * 2,
    }
}

impl CopyEngine for AnyCopy {
    fn name(&self) -> &'static str {
        match &self.base {
            Base::Memcpy(engine) => engine.name(),
            Base::Cuda(engine) => engine.name(),
        }
    }

    async fn copy(&self, batch: CopyBatch) -> (Result<()>, CopyBatch) {
        let mut batch = batch;
        if let Some(gdr) = self.chosen(&batch) {
            let (result, back) = gdr.copy(batch).await;
            match result {
                Ok(()) => {
                    self.metrics.copied(gdr.name(), back.bytes());
                    return (Ok(()), back);
                }
                // What it has written is the same bytes at the same place, and it writes no more.
                Err(error) => {
                    tracing::debug!(%error, "a batch of copies goes another way");
                    self.metrics.failovers.add(1);
                    batch = back;
                }
            }
        }
        let (result, batch) = self.copy_by_base(batch).await;
        if result.is_ok() {
            self.metrics.copied(self.name(), batch.bytes());
        }
        (result, batch)
    }

    async fn forget(&self, region: &CopyRegion) {
        if let Some(gdr) = &self.gdr {
            gdr.engine.forget(region).await;
        }
    }

    async fn checksum(&self, segments: &[Segment], owner: Arc<dyn Any + Send + Sync>) -> Option<Result<u64>> {
        match &self.base {
            Base::Memcpy(engine) => engine.checksum(segments, owner).await,
            Base::Cuda(engine) => engine.checksum(segments, owner).await,
        }
    }

    async fn checksum_host(&self, segment: Segment, owner: Arc<dyn Any + Send + Sync>) -> Option<Result<u64>> {
        match &self.base {
            Base::Memcpy(engine) => engine.checksum_host(segment, owner).await,
            Base::Cuda(engine) => engine.checksum_host(segment, owner).await,
        }
    }

    fn fault(&self) -> Option<String> {
        match &self.base {
            Base::Memcpy(engine) => engine.fault(),
            Base::Cuda(engine) => engine.fault(),
        }
    }

    fn cost(&self, batch: &CopyBatch) -> Duration {
        match self.chosen(batch) {
            Some(gdr) => gdr.cost(batch),
            None => self.base_cost(batch),
        }
    }
}
