//! Measures the copy methods on the device.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kvhoist_base::{
    block::{CopyOp, Direction},
    error::{Error, Result},
    memory::DeviceMemory,
    panics::log,
};

use super::{
    launch::{Launcher, Ops},
    method::Calibration,
};
use crate::{
    CopyMethod,
    cuda::{CudaError, DeviceBuffer, Gpu, HostPin, Stream},
};

/// Scratch memory on each side: holds every measured batch, and is much larger than the fixed cost of a launch.
const SCRATCH_BYTES: usize = 16 << 20;

/// Copy lengths measured, in bytes.
const SIZES: [usize; 6] = [512, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];

/// Batch sizes measured, in copies.
const COUNTS: [usize; 5] = [1, 8, 64, 512, 4096];

/// Runs per measurement. The fastest counts: interference only adds time.
const ROUNDS: usize = 3;

/// Measures every method on this device, and leaves those out that fail. Takes several hundred milliseconds.
pub(super) fn calibrate(gpu: &Arc<Gpu>, launcher: &Launcher) -> Result<Calibration> {
    let scratch = Scratch::new(gpu)?;
    let stream = Stream::new(gpu).map_err(unavailable)?;
    let mut calibration = Calibration::default();
    for direction in [Direction::HostToDevice, Direction::DeviceToHost] {
        let to_device = direction == Direction::HostToDevice;
        for method in CopyMethod::ALL.into_iter().filter(|&method| launcher.has(method)) {
            let sizes = SIZES.into_iter().flat_map(|bytes| COUNTS.map(|count| (bytes, count)));
            let mut sizes = sizes.filter(|(bytes, count)| count * bytes <= SCRATCH_BYTES);
            let measured = sizes.try_for_each(|(bytes, count)| {
                let ops = scratch.ops(direction, bytes, count);
                let time = scratch.time(launcher, &stream, &ops, direction, method)?;
                calibration.note(to_device, method, bytes, count, time);
                Ok::<_, CudaError>(())
            });
            match measured {
                Err(fault) if fault.is_sticky() => return Err(unavailable(fault)),
                Err(fault) => {
                    log(|| tracing::warn!(%fault, %method, ?direction, "a copy method failed and is not used"));
                    calibration.forget(to_device, method);
                }
                Ok(()) => {}
            }
        }
    }
    Ok(calibration)
}

fn unavailable(fault: CudaError) -> Error {
    Error::unavailable("device", format!("calibration failed: {fault}"))
}

struct Scratch {
    host: Arc<HostPin>,
    device: Arc<DeviceBuffer>,
}

impl Scratch {
    fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        let host = HostPin::zeroed(gpu, SCRATCH_BYTES).map_err(unavailable)?;
        let device = DeviceBuffer::new(Arc::clone(gpu), SCRATCH_BYTES)?;
        Ok(Scratch { host: Arc::new(host), device: Arc::new(device) })
    }

    /// Copies between scattered places on both sides.
    fn ops(&self, direction: Direction, bytes: usize, count: usize) -> Vec<CopyOp> {
        let places = SCRATCH_BYTES / bytes;
        // An odd step is coprime to the number of places, a power of two, so that each place is used once.
        let place = |at: usize, step: usize| (at * step) % places * bytes;
        let op = |at| {
            let host = self.host.start().as_ptr().wrapping_add(place(at, 7919));
            let device = self.device.base().as_ptr().wrapping_add(place(at, 104_729));
            match direction {
                Direction::HostToDevice => CopyOp { src: host, dst: device, len: bytes },
                _ => CopyOp { src: device, dst: host, len: bytes },
            }
        };
        (0..count).map(op).collect()
    }

    fn time(
        &self,
        launcher: &Launcher,
        stream: &Stream,
        ops: &[CopyOp],
        direction: Direction,
        method: CopyMethod,
    ) -> std::result::Result<Duration, CudaError> {
        let mut best = Duration::MAX;
        for _ in 0..=ROUNDS {
            let started = Instant::now();
            // SAFETY: ranges of the scratch memory, which lives until the stream is synchronized; the copies of a
            // launch have different destinations.
            let (result, launched) =
                unsafe { launcher.launch(stream, &Ops::new(std::iter::once(ops)), direction, method) };
            let waited = stream.synchronize();
            best = best.min(started.elapsed());
            if let Err(fault) = waited {
                // The device may still copy.
                launcher.leak(launched);
                std::mem::forget((Arc::clone(&self.host), Arc::clone(&self.device)));
                return Err(fault);
            }
            launcher.recycle(launched);
            result?;
        }
        Ok(best)
    }
}
