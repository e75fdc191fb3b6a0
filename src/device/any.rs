//! The engine picked at run time, and beside it the RDMA device, where there is one.

use std::{any::Any, cell::Cell, sync::Arc, time::Duration};

use super::{
    CopyBatch, CopyEngine, CopyRegion, Memcpy,
    cuda::copy::CudaCopy,
    gdr::{CopyOrder, GdrCopy, Offered},
};
use crate::{
    block::{Direction, Segment},
    config::{CopyPrefer, GdrMode},
    error::Result,
    metrics::CopyMetrics,
};

/// The engines that production uses, chosen when a cache is opened.
pub struct AnyCopy {
    base: Base,
    base_under_way: Cell<u64>,
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
    under_way: Cell<u64>,
}

impl AnyCopy {
    pub(crate) fn memcpy(engine: Memcpy, metrics: Arc<CopyMetrics>) -> Self {
        AnyCopy { base: Base::Memcpy(engine), base_under_way: Cell::new(0), gdr: None, metrics }
    }

    pub(crate) fn cuda(engine: CudaCopy, metrics: Arc<CopyMetrics>) -> Self {
        AnyCopy { base: Base::Cuda(engine), base_under_way: Cell::new(0), gdr: None, metrics }
    }

    /// The same, with an RDMA device that takes the copies which `mode` and `prefer` give it.
    #[must_use]
    pub(crate) fn with_gdr(self, engine: GdrCopy, mode: GdrMode, prefer: CopyPrefer) -> Self {
        AnyCopy { gdr: Some(Gdr { engine, mode, prefer, under_way: Cell::new(0) }), ..self }
    }

    fn base_cost(&self, batch: &CopyBatch) -> Duration {
        match &self.base {
            Base::Memcpy(engine) => engine.cost(batch),
            Base::Cuda(engine) => engine.cost(batch),
        }
    }

    /// The RDMA device, if it is to take this batch.
    fn chosen(&self, batch: &CopyBatch) -> Option<&Gdr> {
        let gdr = self.gdr.as_ref()?;
        // Between ranges of host memory the processor copies at home, unless one of them plays the device.
        let at_home = matches!(self.base, Base::Cuda(_)) && batch.direction() == Direction::HostToHost;
        if at_home || !gdr.engine.is_up() {
            return None;
        }
        let choice = || Choice {
            times: [gdr.engine.cost(batch), self.base_cost(batch)],
            under_way: [gdr.under_way.get(), self.base_under_way.get()],
        };
        (gdr.mode == GdrMode::On || choice().takes_gdr(gdr.prefer)).then_some(gdr)
    }
}

/// What is known when one of two ways is to be chosen: through the RDMA device, and the other.
#[derive(Debug, Clone, Copy)]
struct Choice {
    /// What the batch should take.
    times: [Duration; 2],
    /// Bytes under way.
    under_way: [u64; 2],
}

impl Choice {
    /// Within a quarter both are as quick; with [`CopyPrefer::SpareGpu`] the RDMA device may take twice the time.
    fn takes_gdr(&self, prefer: CopyPrefer) -> bool {
        let [gdr, base] = self.times;
        let much_quicker = |a: Duration, b: Duration| a.saturating_mul(5) < b.saturating_mul(4);
        match prefer {
            CopyPrefer::SpareGpu => gdr <= base.saturating_mul(2),
            _ if much_quicker(gdr, base) => true,
            _ if much_quicker(base, gdr) => false,
            CopyPrefer::Latency => gdr < base,
            CopyPrefer::Throughput => self.under_way[0] < self.under_way[1],
        }
    }
}

/// Counts bytes that are under way, also where the copy is given up on.
struct UnderWay<'a>(&'a Cell<u64>, u64);

impl<'a> UnderWay<'a> {
    fn new(count: &'a Cell<u64>, bytes: u64) -> Self {
        count.set(count.get() + bytes);
        UnderWay(count, bytes)
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - self.1);
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
        let bytes = batch.bytes();
        let mut batch = batch;
        if let Some(gdr) = self.chosen(&batch) {
            let under_way = UnderWay::new(&gdr.under_way, bytes);
            let offered = gdr.engine.offer(CopyOrder::default(), batch).await;
            drop(under_way);
            batch = match offered {
                Offered::Copied(Ok(()), batch) => {
                    self.metrics.copied(gdr.engine.name(), bytes);
                    return (Ok(()), batch);
                }
                // What it has written is the same bytes at the same place, and it writes no more.
                Offered::Copied(Err(error), batch) => {
                    tracing::debug!(%error, "a batch of copies goes another way");
                    self.metrics.failovers.add(1);
                    batch
                }
                Offered::Refused(batch) => batch,
            };
        }
        let under_way = UnderWay::new(&self.base_under_way, bytes);
        let (result, batch) = match &self.base {
            Base::Memcpy(engine) => engine.copy(batch).await,
            Base::Cuda(engine) => engine.copy(batch).await,
        };
        drop(under_way);
        if result.is_ok() {
            self.metrics.copied(self.name(), bytes);
        }
        (result, batch)
    }

    async fn forget(&self, region: &CopyRegion) {
        if let Some(gdr) = &self.gdr {
            gdr.engine.forget(region).await;
        }
    }

    async unsafe fn checksum(&self, segments: &[Segment], owner: Arc<dyn Any + Send + Sync>) -> Option<Result<u64>> {
        match &self.base {
            // SAFETY: the caller keeps to the same contract.
            Base::Memcpy(engine) => unsafe { engine.checksum(segments, owner) }.await,
            // SAFETY: as above.
            Base::Cuda(engine) => unsafe { engine.checksum(segments, owner) }.await,
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
            Some(gdr) => gdr.engine.cost(batch),
            None => self.base_cost(batch),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_are_decided_by_the_preference() {
        use CopyPrefer::{Latency, SpareGpu, Throughput};
        let choice = |gdr_us, base_us, under_way| Choice {
            times: [Duration::from_micros(gdr_us), Duration::from_micros(base_us)],
            under_way,
        };
        for prefer in [Latency, Throughput, SpareGpu] {
            assert!(choice(10, 100, [1 << 30, 0]).takes_gdr(prefer), "{prefer:?}: ten times as quick");
            assert!(!choice(300, 100, [0, 1 << 30]).takes_gdr(prefer), "{prefer:?}: three times as slow");
        }
        let tie =
            |gdr_us, under_way| [Latency, Throughput, SpareGpu].map(|p| choice(gdr_us, 100, under_way).takes_gdr(p));
        assert_eq!(tie(110, [0, 1]), [false, true, true]);
        assert_eq!(tie(110, [1, 1]), [false, false, true]);
        assert_eq!(tie(90, [1, 0]), [true, false, true]);
        assert_eq!(tie(199, [0, 1]), [false, false, true], "spare_gpu pays up to twice the time");
    }

    #[test]
    fn what_is_under_way_is_counted_to_its_end() {
        let count = Cell::new(5);
        let first = UnderWay::new(&count, 10);
        drop(UnderWay::new(&count, 100));
        assert_eq!(count.get(), 15);
        drop(first);
        assert_eq!(count.get(), 5);
    }
}
