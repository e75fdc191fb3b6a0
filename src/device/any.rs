//! The copy engine chosen at run time, with an optional RDMA device beside it.

use std::{
    any::Any,
    cell::{Cell, RefCell},
    sync::Arc,
    time::Duration,
};

use super::{
    CopyBatch, CopyEngine, CopyRegion, Memcpy, Offered,
    cuda::{CudaCopy, Gpu, device_of},
    gdr::GdrCopy,
};
use crate::{
    block::{Direction, Segment},
    config::{CopyPrefer, EngineMode},
    error::{Error, Result},
    metrics::CopyMetrics,
    shield::log,
};

/// The engines used in production, chosen when a cache is opened.
pub struct AnyCopy {
    /// CUDA devices, the one with the slots first; without one, and with a simulated one, the processor makes all
    /// copies.
    cuda: RefCell<Vec<CudaCopy>>,
    /// Makes the copies within host memory.
    processor: Memcpy,
    in_flight: Cell<u64>,
    gdr: Option<Gdr>,
    metrics: Arc<CopyMetrics>,
}

struct Gdr {
    engine: GdrCopy,
    mode: EngineMode,
    prefer: CopyPrefer,
    in_flight: Cell<u64>,
}

impl AnyCopy {
    /// The processor alone.
    pub(crate) fn new(processor: Memcpy, metrics: Arc<CopyMetrics>) -> Self {
        let cuda = RefCell::default();
        AnyCopy { cuda, processor, in_flight: Cell::new(0), gdr: None, metrics }
    }

    /// Adds the CUDA device that has the slots.
    #[must_use]
    pub(crate) fn with_cuda(self, cuda: CudaCopy) -> Self {
        self.cuda.borrow_mut().push(cuda);
        self
    }

    /// Adds an RDMA device, which takes the copies that `mode` and `prefer` select.
    #[must_use]
    pub(crate) fn with_gdr(self, engine: GdrCopy, mode: EngineMode, prefer: CopyPrefer) -> Self {
        AnyCopy { gdr: Some(Gdr { engine, mode, prefer, in_flight: Cell::new(0) }), ..self }
    }

    /// The CUDA device, if one makes this copy where the RDMA device does not.
    fn cuda(&self, batch: &CopyBatch) -> Option<CudaCopy> {
        let on_device = batch.ops().first().map(|op| match batch.direction() {
            Direction::DeviceToHost => op.src,
            _ => op.dst.cast_const(),
        });
        if batch.direction() == Direction::HostToHost { None } else { self.cuda_of(on_device) }
    }

    /// The CUDA device that an address belongs to.
    fn cuda_of(&self, address: Option<*const u8>) -> Option<CudaCopy> {
        let all = self.cuda.borrow();
        let ordinal = if all.len() > 1 { address.and_then(device_of) } else { None };
        all.iter().find(|cuda| Some(cuda.ordinal()) == ordinal).or(all.first()).cloned()
    }

    /// Whether a copy's memory is that of the device with the slots: the one that the RDMA device was tested with, and
    /// flushes writes of.
    fn is_of_first(&self, batch: &CopyBatch) -> bool {
        let first = self.cuda.borrow().first().map(CudaCopy::ordinal);
        self.cuda(batch).is_none_or(|cuda| Some(cuda.ordinal()) == first)
    }

    fn has_cuda(&self) -> bool {
        !self.cuda.borrow().is_empty()
    }

    fn base_cost(&self, batch: &CopyBatch) -> Duration {
        self.cuda(batch).map_or_else(|| self.processor.cost(batch), |cuda| cuda.cost(batch))
    }

    /// The RDMA device, if it should take this batch.
    fn chosen(&self, batch: &CopyBatch) -> Option<&Gdr> {
        let gdr = self.gdr.as_ref()?;
        // With a CUDA device the processor makes host-to-host copies; with a simulated device all copies are such
        // copies.
        let on_processor = self.has_cuda() && batch.direction() == Direction::HostToHost;
        if on_processor || !gdr.engine.is_up() || !self.is_of_first(batch) {
            return None;
        }
        let choice = || Choice {
            times: [gdr.engine.cost(batch), self.base_cost(batch)],
            in_flight: [gdr.in_flight.get(), self.in_flight.get()],
        };
        (gdr.mode == EngineMode::On || choice().takes_gdr(gdr.prefer)).then_some(gdr)
    }
}

/// Input to the choice between the RDMA device (index 0) and the base engine (index 1).
#[derive(Debug, Clone, Copy)]
struct Choice {
    /// Expected duration of the batch.
    times: [Duration; 2],
    /// Bytes in flight.
    in_flight: [u64; 2],
}

impl Choice {
    /// Durations within 25 % of each other count as equal; with [`CopyPrefer::SpareGpu`] the RDMA device may take twice
    /// as long.
    fn takes_gdr(&self, prefer: CopyPrefer) -> bool {
        let [gdr, base] = self.times;
        let much_quicker = |a: Duration, b: Duration| a.saturating_mul(5) < b.saturating_mul(4);
        match prefer {
            CopyPrefer::SpareGpu => gdr <= base.saturating_mul(2),
            _ if much_quicker(gdr, base) => true,
            _ if much_quicker(base, gdr) => false,
            CopyPrefer::Latency => gdr < base,
            CopyPrefer::Throughput => self.in_flight[0] < self.in_flight[1],
        }
    }
}

/// Counts bytes in flight until dropped, including when the copy is cancelled.
struct InFlight<'a>(&'a Cell<u64>, u64);

impl<'a> InFlight<'a> {
    fn new(count: &'a Cell<u64>, bytes: u64) -> Self {
        count.set(count.get() + bytes);
        InFlight(count, bytes)
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - self.1);
    }
}

impl CopyEngine for AnyCopy {
    fn name(&self) -> &'static str {
        self.cuda.borrow().first().map_or_else(|| self.processor.name(), CopyEngine::name)
    }

    async fn copy(&self, batch: CopyBatch) -> (Result<()>, CopyBatch) {
        let bytes = batch.bytes();
        let mut batch = batch;
        if let Some(gdr) = self.chosen(&batch) {
            let in_flight = InFlight::new(&gdr.in_flight, bytes);
            let offered = gdr.engine.offer(batch).await;
            drop(in_flight);
            batch = match offered {
                Offered::Copied(Ok(()), batch) => {
                    self.metrics.copied(gdr.engine.name(), bytes);
                    return (Ok(()), batch);
                }
                // The failed copy has ended; if it wrote anything, it wrote the same bytes to the same places.
                Offered::Copied(Err(error), batch) => {
                    log(|| tracing::debug!(%error, "a batch falls back to the base copy engine"));
                    self.metrics.failovers.add(1);
                    batch
                }
                Offered::Refused(batch) => batch,
            };
        }
        let in_flight = InFlight::new(&self.in_flight, bytes);
        let (name, (result, batch)) = match self.cuda(&batch) {
            Some(cuda) => (cuda.name(), cuda.copy(batch).await),
            None => (self.processor.name(), self.processor.copy(batch).await),
        };
        drop(in_flight);
        if result.is_ok() {
            self.metrics.copied(name, bytes);
        }
        (result, batch)
    }

    fn add_gpu(&self, gpu: &Arc<Gpu>) -> Result<()> {
        let ordinal = gpu.device().ordinal;
        let (first, known) = {
            let all = self.cuda.borrow();
            (all.first().cloned(), all.iter().find(|cuda| cuda.ordinal() == ordinal).cloned())
        };
        let Some(first) = first else {
            return Err(Error::unavailable("device", "this cache was opened without a CUDA device"));
        };
        match known.map(|cuda| cuda.fault()) {
            None => {
                let cuda = first.beside(gpu)?;
                self.cuda.borrow_mut().push(cuda);
                Ok(())
            }
            Some(None) => Ok(()),
            Some(Some(reason)) => {
                let advice = "close the cache and start its process again";
                Err(Error::unavailable("device", format!("GPU {ordinal} is out of service: {reason}; {advice}")))
            }
        }
    }

    async fn forget(&self, region: &CopyRegion) {
        if let Some(gdr) = &self.gdr {
            gdr.engine.forget(region).await;
        }
    }

    fn checksums(&self) -> bool {
        self.has_cuda() && self.cuda.borrow().iter().all(CopyEngine::checksums)
    }

    async unsafe fn checksum(&self, segments: &[Segment], owner: Arc<dyn Any + Send + Sync>) -> Option<Result<u64>> {
        let cuda = self.cuda_of(segments.first().map(|segment| segment.ptr.cast_const()))?;
        // SAFETY: the caller upholds the same contract.
        unsafe { cuda.checksum(segments, owner) }.await
    }

    fn is_of_tier(&self, batch: &CopyBatch) -> bool {
        self.is_of_first(batch)
    }

    fn fault(&self) -> Option<String> {
        self.cuda.borrow().first().and_then(CopyEngine::fault)
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
        let choice = |gdr_us, base_us, in_flight| Choice {
            times: [Duration::from_micros(gdr_us), Duration::from_micros(base_us)],
            in_flight,
        };
        for prefer in [Latency, Throughput, SpareGpu] {
            assert!(choice(10, 100, [1 << 30, 0]).takes_gdr(prefer), "{prefer:?}: ten times as quick");
            assert!(!choice(300, 100, [0, 1 << 30]).takes_gdr(prefer), "{prefer:?}: three times as slow");
        }
        let tie =
            |gdr_us, in_flight| [Latency, Throughput, SpareGpu].map(|p| choice(gdr_us, 100, in_flight).takes_gdr(p));
        assert_eq!(tie(110, [0, 1]), [false, true, true]);
        assert_eq!(tie(110, [1, 1]), [false, false, true]);
        assert_eq!(tie(90, [1, 0]), [true, false, true]);
        assert_eq!(tie(199, [0, 1]), [false, false, true], "spare_gpu pays up to twice the time");
    }

    #[test]
    fn bytes_in_flight_are_counted_until_dropped() {
        let count = Cell::new(5);
        let first = InFlight::new(&count, 10);
        drop(InFlight::new(&count, 100));
        assert_eq!(count.get(), 15);
        drop(first);
        assert_eq!(count.get(), 5);
    }
}
