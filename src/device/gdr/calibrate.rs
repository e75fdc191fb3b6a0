//! Measures the duration of copies through the NIC when the engine is opened; results are kept for the process.

use std::{
    sync::{Arc, Mutex, OnceLock},
    time::{Duration, Instant},
};

use super::GdrCopy;
use crate::{
    block::{CopyOp, Direction},
    device::{CopyBatch, CopyEngine},
    error::Result,
    memory::{Arena, DeviceMemory},
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
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Times {
    points: [Vec<Point>; 2],
}

/// A measured batch.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Point {
    count: usize,
    bytes: usize,
    time: Duration,
}

impl Times {
    /// Expected duration of a batch: that of the nearest measured batch by count and bytes, scaled up in proportion for
    /// a larger batch.
    pub(super) fn estimate(&self, to_device: bool, count: usize, bytes: u64) -> Duration {
        let (count, bytes) = (count.max(1) as f64, bytes.max(1) as f64);
        let distance = |point: &&Point| {
            let ratio = |a: f64, b: f64| (a / b).ln().abs();
            ratio(point.count as f64, count) + ratio(point.bytes as f64, bytes)
        };
        let points = &self.points[usize::from(!to_device)];
        let Some(near) = points.iter().min_by(|a, b| distance(a).total_cmp(&distance(b))) else {
            return Duration::MAX;
        };
        // A larger batch takes longer in proportion to its bytes or its copies, whichever grew more.
        let more = (bytes / near.bytes as f64).max(count / near.count as f64).max(1.0);
        near.time.mul_f64(more)
    }
}

type Kept = (String, Arc<Times>);

fn kept(key: &str) -> Option<Arc<Times>> {
    let all = all().lock().expect("nothing panics under it");
    all.iter().find(|(known, _)| known == key).map(|(_, times)| Arc::clone(times))
}

fn all() -> &'static Mutex<Vec<Kept>> {
    static KEPT: OnceLock<Mutex<Vec<Kept>>> = OnceLock::new();
    KEPT.get_or_init(Mutex::default)
}

impl GdrCopy {
    /// Measures copies between the arena and the pool, both still empty. Takes tens of milliseconds on the first call
    /// in a process.
    ///
    /// # Errors
    /// The error of a failed copy.
    pub(crate) async fn calibrate(&self, arena: &Arc<Arena>, pool: &Arc<dyn DeviceMemory>) -> Result<()> {
        let gpu = self.inner.gpu.as_ref().map_or("simulated", |gpu| gpu.device().pci_address.as_str());
        let key = format!("{} {gpu} {} {}", self.device(), arena.bytes(), pool.bytes());
        let times = match kept(&key) {
            Some(times) => times,
            None => {
                let times = Arc::new(self.measure(arena, pool).await?);
                all().lock().expect("nothing panics under it").push((key, Arc::clone(&times)));
                times
            }
        };
        // The value is unset: the engine is opened once.
        drop(self.inner.times.set(times));
        Ok(())
    }

    async fn measure(&self, arena: &Arc<Arena>, pool: &Arc<dyn DeviceMemory>) -> Result<Times> {
        let mut times = Times::default();
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
                    times.points[to].push(Point { count, bytes: count * bytes, time: best });
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimates_are_of_the_nearest_batch_and_grow_beyond() {
        let us = Duration::from_micros;
        let point = |count, bytes, time| Point { count, bytes, time: us(time) };
        let to = vec![point(1, 4096, 5), point(64, 64 << 12, 25), point(1, 1 << 20, 30), point(16, 16 << 20, 400)];
        let times = Times { points: [to, vec![point(1, 4096, 7)]] };
        assert_eq!(times.estimate(true, 1, 4096), us(5));
        assert_eq!(times.estimate(true, 1, 100), us(5), "a smaller one is no quicker");
        assert_eq!(times.estimate(true, 60, 60 << 12), us(25));
        assert_eq!(times.estimate(true, 32, 32 << 20), us(800));
        assert_eq!(times.estimate(false, 1, 4096), us(7));
        assert_eq!(Times::default().estimate(true, 1, 1), Duration::MAX, "no measurement");
    }
}
