//! Chooses the copy method by measurement.

use std::{
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};

use crate::config::CopyMethod;

/// Measured duration of each method on a device, by size and number of copies.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Calibration {
    /// By direction (to the device, from it), then by method.
    times: [[Vec<Row>; 3]; 2],
}

/// Measurements of one copy length.
#[derive(Debug, Clone, PartialEq)]
struct Row {
    bytes: usize,
    /// Number of copies, ascending, and their total duration.
    points: Vec<(usize, Duration)>,
}

impl Calibration {
    /// Records that `count` copies of `bytes` each took `time`. Called with ascending counts of ascending lengths.
    pub(super) fn note(&mut self, to_device: bool, method: CopyMethod, bytes: usize, count: usize, time: Duration) {
        let rows = &mut self.times[usize::from(!to_device)][method as usize];
        match rows.last_mut().filter(|row| row.bytes == bytes) {
            Some(row) => row.points.push((count, time)),
            None => rows.push(Row { bytes, points: vec![(count, time)] }),
        }
    }

    /// Expected duration of `count` copies of `bytes` each. `None` for a method that this device does not support.
    pub fn estimate(&self, to_device: bool, method: CopyMethod, bytes: usize, count: usize) -> Option<Duration> {
        let rows = &self.times[usize::from(!to_device)][method as usize];
        let row = nearest(rows, bytes)?;
        let time = row.at(count);
        // Beyond the largest measured length the duration grows with the bytes.
        let largest = rows.last().expect("there is a nearest row").bytes;
        Some(if bytes > largest { time.mul_f64(bytes as f64 / largest as f64) } else { time })
    }

    /// The method expected to be fastest for `count` copies of `bytes` each.
    pub fn quickest(&self, to_device: bool, bytes: usize, count: usize) -> CopyMethod {
        let timed = |method| Some((self.estimate(to_device, method, bytes, count)?, method));
        CopyMethod::ALL.into_iter().filter_map(timed).min().map_or(CopyMethod::Loop, |(_, method)| method)
    }
}

/// The row with the nearest length, by ratio.
fn nearest(rows: &[Row], bytes: usize) -> Option<&Row> {
    let distance = |row: &&Row| {
        let (a, b) = (row.bytes.max(1) as f64, bytes.max(1) as f64);
        (a / b).max(b / a)
    };
    rows.iter().min_by(|a, b| distance(a).total_cmp(&distance(b)))
}

impl Row {
    /// Interpolates between measured counts; past the last one, scales with the count.
    fn at(&self, count: usize) -> Duration {
        let next = self.points.iter().position(|point| point.0 >= count);
        match next {
            Some(0) => self.points[0].1,
            Some(next) => {
                let ((from, low), (to, high)) = (self.points[next - 1], self.points[next]);
                let share = (count - from) as f64 / (to - from) as f64;
                low + high.saturating_sub(low).mul_f64(share)
            }
            None => {
                let &(most, time) = self.points.last().expect("a row begins with a point");
                time.mul_f64(count as f64 / most.max(1) as f64)
            }
        }
    }
}

/// A calibration, keyed by device and settings.
type Kept = (String, Arc<Calibration>);

/// The calibration of this device and these settings, made at most once per process.
pub(super) fn kept<E>(key: &str, make: impl FnOnce() -> Result<Calibration, E>) -> Result<Arc<Calibration>, E> {
    static KEPT: OnceLock<Mutex<Vec<Kept>>> = OnceLock::new();
    let mut kept = KEPT.get_or_init(Mutex::default).lock().expect("nothing panics under it");
    if let Some((_, calibration)) = kept.iter().find(|(known, _)| known == key) {
        return Ok(Arc::clone(calibration));
    }
    let calibration = Arc::new(make()?);
    kept.push((key.to_owned(), Arc::clone(&calibration)));
    Ok(calibration)
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: fn(u64) -> Duration = Duration::from_micros;

    fn measured() -> Calibration {
        let mut calibration = Calibration::default();
        for (bytes, count, kernel, batch) in
            [(4096, 1, 9, 8), (4096, 1024, 90, 400), (1 << 20, 1, 30, 25), (1 << 20, 16, 400, 320)]
        {
            calibration.note(true, CopyMethod::Kernel, bytes, count, US(kernel));
            calibration.note(true, CopyMethod::Batch, bytes, count, US(batch));
        }
        calibration
    }

    #[test]
    fn the_quickest_depends_on_size_and_count() {
        let calibration = measured();
        assert_eq!(calibration.quickest(true, 4096, 1), CopyMethod::Batch);
        assert_eq!(calibration.quickest(true, 4096, 1000), CopyMethod::Kernel);
        assert_eq!(calibration.quickest(true, 1 << 20, 16), CopyMethod::Batch);
        assert_eq!(calibration.quickest(false, 4096, 1), CopyMethod::Loop, "nothing was measured");
    }

    #[test]
    fn estimates_lie_on_lines_and_grow_beyond() {
        let calibration = measured();
        let kernel = |bytes, count| calibration.estimate(true, CopyMethod::Kernel, bytes, count);
        assert_eq!(kernel(4096, 1), Some(US(9)));
        assert!(kernel(4096, 500) > Some(US(40)) && kernel(4096, 500) < Some(US(55)));
        assert_eq!(kernel(4096, 4096), Some(US(360)));
        assert_eq!(kernel(4 << 20, 1), Some(US(120)));
        assert_eq!(kernel(5000, 1), Some(US(9)), "the nearest size");
        assert_eq!(calibration.estimate(true, CopyMethod::Loop, 4096, 1), None);
    }

    #[test]
    fn one_calibration_is_kept() {
        let made = std::cell::Cell::new(0);
        let make = || {
            made.set(made.get() + 1);
            Ok::<_, ()>(measured())
        };
        for _ in 0..3 {
            kept("a device of this test", make).expect("made");
        }
        assert_eq!(made.get(), 1);
        assert_eq!(kept("another", || Err(7)), Err(7));
    }

    #[test]
    fn each_method_is_found_by_its_name() {
        for method in CopyMethod::ALL {
            assert_eq!(CopyMethod::from_name(method.name()), Some(method));
        }
        assert_eq!(CopyMethod::from_name("gdr"), None);
    }
}
