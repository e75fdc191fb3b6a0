//! The cost model of the copy engines: durations of batches, measured once per process.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

/// Measured durations of batches of copies in one direction, by size and number of the copies.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Times(Vec<Row>);

/// Measurements of one copy length.
#[derive(Debug, Clone, PartialEq)]
struct Row {
    bytes: usize,
    /// Number of copies, ascending, and their total duration.
    points: Vec<(usize, Duration)>,
}

impl Times {
    /// Records that `count` copies of `bytes` each took `time`. Called with ascending counts of ascending lengths.
    pub(super) fn note(&mut self, bytes: usize, count: usize, time: Duration) {
        match self.0.last_mut().filter(|row| row.bytes == bytes) {
            Some(row) => row.points.push((count, time)),
            None => self.0.push(Row { bytes, points: vec![(count, time)] }),
        }
    }

    /// Expected duration of `count` copies of `bytes` each; `None` if nothing was measured.
    pub(super) fn estimate(&self, bytes: usize, count: usize) -> Option<Duration> {
        let distance = |row: &&Row| {
            let (a, b) = (row.bytes.max(1) as f64, bytes.max(1) as f64);
            (a / b).max(b / a)
        };
        let row = self.0.iter().min_by(|a, b| distance(a).total_cmp(&distance(b)))?;
        let (time, largest) = (row.at(count), self.0.last()?.bytes);
        // Beyond the largest measured length the duration grows with the bytes.
        Some(if bytes > largest { time.mul_f64(bytes as f64 / largest as f64) } else { time })
    }
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

/// The measurements of this process, by device and settings.
pub(super) struct Kept<T>(Mutex<Vec<(String, Arc<T>)>>);

impl<T> Kept<T> {
    pub(super) const fn new() -> Self {
        Kept(Mutex::new(Vec::new()))
    }

    pub(super) fn get(&self, key: &str) -> Option<Arc<T>> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.iter().find(|(known, _)| known == key).map(|(_, measured)| Arc::clone(measured))
    }

    pub(super) fn keep(&self, key: String, measured: T) -> Arc<T> {
        let measured = Arc::new(measured);
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push((key, Arc::clone(&measured)));
        measured
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: fn(u64) -> Duration = Duration::from_micros;

    #[test]
    fn estimates_lie_on_lines_and_grow_beyond() {
        let mut times = Times::default();
        assert_eq!(times.estimate(4096, 1), None, "nothing was measured");
        for (bytes, count, us) in [(4096, 1, 9), (4096, 1024, 90), (1 << 20, 1, 30), (1 << 20, 16, 400)] {
            times.note(bytes, count, US(us));
        }
        assert_eq!(times.estimate(4096, 1), Some(US(9)));
        let between = times.estimate(4096, 500);
        assert!(between > Some(US(40)) && between < Some(US(55)), "{between:?}");
        assert_eq!(times.estimate(4096, 4096), Some(US(360)));
        assert_eq!(times.estimate(4 << 20, 1), Some(US(120)));
        assert_eq!(times.estimate(5000, 1), Some(US(9)), "the nearest size");
        assert_eq!(times.estimate(100, 1), Some(US(9)), "a smaller one is no quicker");
    }

    #[test]
    fn measurements_are_kept_by_their_key() {
        let kept = Kept::new();
        assert_eq!(kept.get("a"), None);
        kept.keep("a".into(), 1);
        kept.keep("b".into(), 2);
        assert_eq!((kept.get("a").as_deref(), kept.get("b").as_deref()), (Some(&1), Some(&2)));
    }
}
