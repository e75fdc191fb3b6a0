//! Measures the duration of copies through the NIC when the engine is opened; results are kept for the process.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kvhoist_base::{
    block::{CopyOp, Direction},
    error::Result,
    memory::{Arena, DeviceMemory},
};

use super::GdrCopy;
use crate::{
    CopyBatch, CopyEngine,
    cost::{Kept, Times},
};

/// Copy lengths measured, in bytes.
const SIZES: [usize; 5] = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];

/// Batch sizes measured, in copies.
const COUNTS: [usize; 4] = [1, 8, 64, 512];

/// Largest batch measured, in bytes.
const BYTES_MAX: usize = 16 << 20;

/// Runs per measurement. The fastest counts: interference only adds time.
const ROUNDS: usize = 3;

/// Measured batches to the device, and from it.
pub(super) type TimesByWay = [Times; 2];

static KEPT: Kept<TimesByWay> = Kept::new();

impl GdrCopy {
    /// Measures copies between the arena and the pool, both still empty. Takes tens of milliseconds on the first call
    /// in a process.
    ///
    /// # Errors
    /// The error of a failed copy.
    pub(crate) async fn calibrate(&self, arena: &Arc<Arena>, pool: &Arc<dyn DeviceMemory>) -> Result<()> {
        let gpu = self.inner.gpu.as_ref().map_or("simulated", |gpu| gpu.device().pci_address.as_str());
        let key = format!("{} {gpu} {} {}", self.device(), arena.bytes(), pool.bytes());
        let times = match KEPT.get(&key) {
            Some(times) => times,
            None => KEPT.keep(key, self.measure(arena, pool).await?),
        };
        // The value is unset: the engine is opened once.
        drop(self.inner.times.set(times));
        Ok(())
    }

    async fn measure(&self, arena: &Arc<Arena>, pool: &Arc<dyn DeviceMemory>) -> Result<TimesByWay> {
        let mut times = TimesByWay::default();
        let room = arena.bytes().min(pool.bytes()).min(BYTES_MAX);
        for bytes in SIZES {
            for count in COUNTS.into_iter().filter(|count| count * bytes <= room) {
                for (to, direction) in [pool.promote_direction(), pool.demote_direction()].into_iter().enumerate() {
                    let mut best = Duration::MAX;
                    for _ in 0..ROUNDS {
                        let batch = batch(arena, pool, to == 0, direction, bytes, count, room);
                        let started = Instant::now();
                        let (result, _) = self.copy(batch).await;
                        best = best.min(started.elapsed());
                        result?;
                    }
                    times[to].note(bytes, count, best);
                }
            }
        }
        Ok(times)
    }
}

fn batch(
    arena: &Arc<Arena>,
    pool: &Arc<dyn DeviceMemory>,
    to_device: bool,
    direction: Direction,
    bytes: usize,
    count: usize,
    room: usize,
) -> CopyBatch {
    let places = room / bytes;
    let op = |at: usize| {
        // Host and device offsets run in opposite directions, so that no two copies are adjacent on both sides.
        let (host, device) = (at * bytes, (places - 1 - at) * bytes);
        let host = arena.slot_ptr(0).as_ptr().wrapping_add(host);
        let device = pool.base().as_ptr().wrapping_add(device);
        match to_device {
            true => CopyOp { src: host, dst: device, len: bytes },
            false => CopyOp { src: device, dst: host, len: bytes },
        }
    };
    // SAFETY: ranges of the arena and the pool, which the owners keep. Both are unused while the cache is being opened.
    unsafe {
        CopyBatch::new(
            (0..count).map(op).collect(),
            direction,
            vec![Arc::clone(arena) as _, Arc::new(Arc::clone(pool))],
        )
    }
}
