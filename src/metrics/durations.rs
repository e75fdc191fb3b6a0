//! Histograms of durations, with their handles in the `metrics` crate.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser::SerializeMap};

use crate::shield::caught;

/// The end of the first bucket. Each other one ends at twice the end of the one before.
const FIRST_NS: u64 = 4_000;
const BUCKETS: usize = Durations::BOUNDS_SECONDS.len() + 1;

/// How long the movements of one route took, from their start to their completion: counts in buckets that end at 4 us,
/// 8 us, 16 us, ... 16.8 s, and one for those that took longer.
///
/// Serialized, it is a map of `count`, `sum`, `p50`, `p99` and `buckets`, a list of ends and counts; times are seconds,
/// and `null` where there is none. `buckets` is empty before the first movement.
///
/// ```
/// # kvhoist_bench_kit::examples::with_cache(async |cache| {
/// use kvhoist::Route;
///
/// let stats = cache.stats();
/// let reads = stats.route_durations(Route::DiskToHost);
/// println!("{} reads, median {:?}, p99 {:?}", reads.count(), reads.quantile(0.5), reads.quantile(0.99));
/// # assert_eq!(reads.quantile(0.5), None);
/// # Ok(()) });
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Durations {
    buckets: [u64; BUCKETS],
    sum_ns: u64,
}

impl Durations {
    /// The ends of the buckets but the last, which has none, in seconds. A recorder of the `metrics` crate that is
    /// given them counts `kvhoist_movement_seconds` in the same buckets.
    pub const BOUNDS_SECONDS: [f64; 23] = {
        let (mut bounds, mut at) = ([0.0; 23], 0);
        while at < bounds.len() {
            bounds[at] = (FIRST_NS << at) as f64 / 1e9;
            at += 1;
        }
        bounds
    };

    /// From the counts of the buckets and the sum of the durations.
    #[doc(hidden)]
    pub fn from_counts(buckets: [u64; Durations::BOUNDS_SECONDS.len() + 1], sum_ns: u64) -> Self {
        Durations { buckets, sum_ns }
    }

    /// Number of movements.
    pub fn count(&self) -> u64 {
        self.buckets.iter().fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// The sum of their durations.
    pub fn sum(&self) -> Duration {
        Duration::from_nanos(self.sum_ns)
    }

    /// The duration that a share `q` of the movements, 0 to 1, did not exceed; `None` without movements.
    ///
    /// It is interpolated between the ends of its bucket, so it is off by a factor of two at most. Of those that took
    /// longer than the last end it is that end.
    pub fn quantile(&self, q: f64) -> Option<Duration> {
        let rank = q.clamp(0.0, 1.0) * self.count() as f64;
        let (mut below, mut start) = (0.0, 0.0);
        for (end, count) in self.buckets() {
            if count > 0 && below + count as f64 >= rank {
                let end = end.unwrap_or(start);
                return Some(Duration::from_secs_f64(start + (end - start) * (rank - below) / count as f64));
            }
            below += count as f64;
            start = end.unwrap_or(start);
        }
        None
    }

    /// Each bucket: its end in seconds, `None` for the last, and the number of movements in it.
    pub fn buckets(&self) -> impl Iterator<Item = (Option<f64>, u64)> {
        let ends = Durations::BOUNDS_SECONDS.into_iter().map(Some).chain([None]);
        ends.zip(self.buckets)
    }

    /// The movements since `before`, which are the figures of the same route at an earlier time.
    #[must_use]
    pub fn since(&self, before: &Durations) -> Durations {
        Durations {
            buckets: std::array::from_fn(|at| self.buckets[at].saturating_sub(before.buckets[at])),
            sum_ns: self.sum_ns.saturating_sub(before.sum_ns),
        }
    }
}

impl Serialize for Durations {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let quantile = |q| self.quantile(q).map(|time| time.as_secs_f64());
        let buckets: Vec<(Option<f64>, u64)> = self.buckets().filter(|_| self.count() > 0).collect();
        let mut map = serializer.serialize_map(Some(5))?;
        map.serialize_entry("count", &self.count())?;
        map.serialize_entry("sum", &self.sum().as_secs_f64())?;
        map.serialize_entry("p50", &quantile(0.5))?;
        map.serialize_entry("p99", &quantile(0.99))?;
        map.serialize_entry("buckets", &buckets)?;
        map.end()
    }
}

impl<'de> Deserialize<'de> for Durations {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Counted {
            sum: f64,
            buckets: Vec<(Option<f64>, u64)>,
        }
        let Counted { sum, buckets } = Counted::deserialize(from)?;
        let mut durations = Durations { sum_ns: (sum * 1e9).round() as u64, ..Durations::default() };
        match buckets.len() {
            0 => {}
            BUCKETS => durations.buckets = std::array::from_fn(|at| buckets[at].1),
            other => return Err(de::Error::custom(format!("found {other} buckets, expected {BUCKETS}, or none"))),
        }
        Ok(durations)
    }
}

/// A histogram, with its handle in the `metrics` crate.
pub(crate) struct Histogram {
    buckets: [AtomicU64; BUCKETS],
    sum_ns: AtomicU64,
    exported: metrics::Histogram,
}

impl Histogram {
    pub(super) fn new(exported: Option<metrics::Histogram>) -> Self {
        Histogram {
            buckets: Default::default(),
            sum_ns: AtomicU64::new(0),
            exported: exported.unwrap_or(metrics::Histogram::noop()),
        }
    }

    pub(crate) fn record(&self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let bucket = ns.div_ceil(FIRST_NS).next_power_of_two().trailing_zeros() as usize;
        self.buckets[bucket.min(BUCKETS - 1)].fetch_add(1, Ordering::Relaxed);
        self.sum_ns.fetch_add(ns, Ordering::Relaxed);
        _ = caught(|| self.exported.record(took.as_secs_f64()));
    }

    pub(crate) fn get(&self) -> Durations {
        Durations {
            buckets: std::array::from_fn(|at| self.buckets[at].load(Ordering::Relaxed)),
            sum_ns: self.sum_ns.load(Ordering::Relaxed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(times: &[Duration]) -> Durations {
        let histogram = Histogram::new(None);
        times.iter().for_each(|&time| histogram.record(time));
        histogram.get()
    }

    #[test]
    fn a_duration_is_in_the_first_bucket_that_does_not_end_before_it() {
        for (at, bound) in Durations::BOUNDS_SECONDS.into_iter().enumerate() {
            let end = Duration::from_secs_f64(bound);
            assert_eq!(end.as_nanos(), 4_000 << at);
            for (time, bucket) in [(end, at), (end + Duration::from_nanos(1), at + 1)] {
                assert_eq!(of(&[time]).buckets.iter().position(|&count| count == 1), Some(bucket), "{time:?}");
            }
        }
        assert_eq!(of(&[Duration::ZERO]).buckets[0], 1);
        let longest = of(&[Duration::MAX]);
        assert_eq!((longest.buckets[BUCKETS - 1], longest.count(), longest.sum_ns), (1, 1, u64::MAX));
    }

    #[test]
    fn a_quantile_lies_in_the_bucket_of_its_rank() {
        let [quick, slow, stuck] = [10, 100_000, 60_000_000].map(Duration::from_micros);
        let times: Vec<Duration> = [vec![quick; 98], vec![slow; 2]].concat();
        let durations = of(&times);
        let between = |q: f64, above: f64, end: f64| {
            let found = durations.quantile(q).expect("movements").as_secs_f64();
            assert!(above < found && found <= end, "{q}: {found}");
        };
        between(0.5, 8e-6, 16e-6);
        between(0.98, 8e-6, 16e-6);
        between(0.99, 65.536e-3, 131.072e-3);
        between(1.0, 65.536e-3, 131.072e-3);
        assert_eq!(durations.sum(), quick * 98 + slow * 2);
        assert_eq!(of(&[stuck]).quantile(0.5), Some(Duration::from_nanos(4_000 << 22)), "the last end");
        assert_eq!(of(&[]).quantile(0.5), None);
    }

    #[test]
    fn those_since_an_earlier_time_are_the_new_ones() {
        let [a, b] = [5, 500].map(Duration::from_micros);
        assert_eq!(of(&[a, b, b]).since(&of(&[a, b])), of(&[b]));
        assert_eq!(of(&[a]).since(&of(&[a, b])), of(&[]), "another cache, that began anew");
    }

    #[test]
    fn serialized_it_has_the_words_of_an_operator() {
        let json = serde_json::to_value(of(&[Duration::from_micros(6)])).expect("numbers");
        assert_eq!((&json["count"], &json["sum"]), (&1.into(), &6e-6.into()));
        assert_eq!((&json["p50"], &json["p99"]), (&6e-6.into(), &7.96e-6.into()));
        assert_eq!(json["buckets"][1], serde_json::json!([8e-6, 1]));
        assert_eq!(json["buckets"][23], serde_json::json!([null, 0]));
        assert_eq!(serde_json::from_value::<Durations>(json).expect("its own"), of(&[Duration::from_micros(6)]));
        serde_json::from_str::<Durations>(r#"{"buckets": [[1.0, 1]]}"#).expect_err("too few");
        let none = serde_json::to_value(of(&[])).expect("numbers");
        assert_eq!(none, serde_json::json!({ "count": 0, "sum": 0.0, "p50": null, "p99": null, "buckets": [] }));
    }
}
