//! What is exported of a cache's figures, for every exporter: a recorder of the `metrics` crate here, the service's
//! address, the Python package's.

use super::{
    Cache, Stats,
    stats::{PLAIN, PLAIN_BY_TIER},
};
use crate::{
    block::{Route, Tier},
    config::Config,
    machine::{DriveWear, drive_wear},
    metrics::{
        self, COPIED_BYTES, COPIES, Described, MOVED_BLOCKS, MOVED_BYTES, MOVEMENT_SECONDS, Of, WRITES_DECLINED,
    },
    shield::caught,
};

/// A metric of a cache.
pub struct Metric {
    /// Its name, whose end says its [`Kind`].
    pub name: &'static str,
    /// What it shows.
    pub help: &'static str,
    /// Its samples, without the label that names the cache.
    pub samples: fn(&Stats) -> Vec<Sample>,
}

/// One figure and its labels.
pub struct Sample {
    /// What follows the metric's name: `_bucket`, `_sum` and `_count` of a histogram.
    pub suffix: &'static str,
    /// Names and values.
    pub labels: Vec<(&'static str, String)>,
    /// The figure.
    pub value: f64,
}

/// How a metric's samples are read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It only grows.
    Counter,
    /// It may fall.
    Gauge,
    /// Counters of the samples up to each of some bounds, with their sum and their number.
    Histogram,
}

impl Kind {
    /// The kind of a metric of this name.
    pub fn of(name: &str) -> Kind {
        match name {
            _ if name.ends_with("_total") => Kind::Counter,
            _ if name.ends_with("_seconds") => Kind::Histogram,
            _ => Kind::Gauge,
        }
    }

    /// As Prometheus calls it.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        }
    }
}

/// A figure as a sample's value.
pub(super) trait Value {
    fn value(&self) -> f64;
}

impl Value for u64 {
    fn value(&self) -> f64 {
        *self as f64
    }
}

impl Value for bool {
    fn value(&self) -> f64 {
        f64::from(u8::from(*self))
    }
}

impl Sample {
    pub(super) fn new(value: f64, labels: impl IntoIterator<Item = (&'static str, &'static str)>) -> Self {
        let labels = labels.into_iter().map(|(name, value)| (name, value.to_owned())).collect();
        Sample { suffix: "", labels, value }
    }
}

/// Those that more than one field of [`Stats`] fills.
const COMBINED: [Metric; 11] = [
    of(MOVED_BLOCKS, |stats| by_route(|route| stats.route_blocks(route))),
    of(MOVED_BYTES, |stats| by_route(|route| stats.route_bytes(route))),
    of(MOVEMENT_SECONDS, durations),
    of(COPIES, |stats| by_engine(stats.copied_batches())),
    of(COPIED_BYTES, |stats| by_engine(stats.copied_bytes())),
    of(WRITES_DECLINED, |stats| {
        let reasons = [("value", stats.writes_declined), ("budget", stats.writes_over_budget)];
        reasons.map(|(reason, count)| Sample::new(count.value(), [("reason", reason)])).into()
    }),
    of(("kvhoist_retired", "1 while a tier is out of service, by tier"), |stats| {
        vec![out(Tier::Device, stats.device_retired.as_deref()), out(Tier::Disk, stats.disk_retired.as_deref())]
    }),
    of(("kvhoist_read_only", "1 while a tier takes no blocks, by tier"), |stats| {
        vec![out(Tier::Disk, stats.disk_read_only.as_deref())]
    }),
    of(("kvhoist_remote_read_only", "1 while nothing is written to the remote store"), |stats| {
        vec![why([], stats.remote_read_only.as_deref())]
    }),
    of(
        (
            "kvhoist_write_budget_bytes",
            "Bytes a day that may be written to disk: write_budget, or drive_writes_per_day times drive_bytes",
        ),
        |stats| stats.write_budget.iter().map(|bytes| Sample::new(bytes.value(), [])).collect(),
    ),
    of(("kvhoist_info", "Always 1: the version, and what serves the disk"), |stats| {
        let version = ("version", env!("CARGO_PKG_VERSION").to_owned());
        vec![Sample { suffix: "", labels: vec![version, ("storage", stats.storage.to_string())], value: 1.0 }]
    }),
];

/// Every metric that [`Stats`] has.
pub fn metrics() -> impl Iterator<Item = &'static Metric> {
    PLAIN.iter().chain(PLAIN_BY_TIER).chain(&COMBINED)
}

const fn of((name, help): Described, samples: fn(&Stats) -> Vec<Sample>) -> Metric {
    Metric { name, help, samples }
}

fn by_route(figure: impl Fn(Route) -> u64) -> Vec<Sample> {
    Route::ALL.map(|route| Sample::new(figure(route).value(), [("route", route.name())])).into()
}

fn by_engine(figures: impl IntoIterator<Item = (&'static str, u64)>) -> Vec<Sample> {
    figures.into_iter().map(|(engine, figure)| Sample::new(figure.value(), [("engine", engine)])).collect()
}

/// Whether there is a reason why a tier is out of service, with it.
fn out(tier: Tier, reason: Option<&str>) -> Sample {
    why([("tier", tier.name())], reason)
}

/// Whether there is a reason, with it.
fn why(labels: impl IntoIterator<Item = (&'static str, &'static str)>, reason: Option<&str>) -> Sample {
    let mut sample = Sample::new(reason.is_some().value(), labels);
    sample.labels.push((REASON, reason.unwrap_or_default().to_owned()));
    sample
}

/// The label that has an operator's words.
const REASON: &str = "reason";

/// Durations by route, of the routes that moved something: counts of those that took no longer than each bound.
fn durations(stats: &Stats) -> Vec<Sample> {
    let mut samples = Vec::new();
    for route in Route::ALL {
        let durations = stats.route_durations(route);
        let count = durations.count() as f64;
        if count == 0.0 {
            continue;
        }
        let mut sample = |suffix, bound: Option<String>, value| {
            let mut sample = Sample::new(value, [("route", route.name())]);
            sample.labels.extend(bound.map(|bound| ("le", bound)));
            samples.push(Sample { suffix, ..sample });
        };
        let mut below = 0.0;
        for (end, count) in durations.buckets() {
            below += count as f64;
            sample("_bucket", Some(end.map_or("+Inf".into(), |end| end.to_string())), below);
        }
        sample("_sum", None, durations.sum().as_secs_f64());
        sample("_count", None, count);
    }
    samples
}

/// A figure of a drive's wear.
pub type OfDrive = fn(&DriveWear) -> Option<f64>;

/// The metrics of a drive's wear, by path: names, what they show, and values of drives that answer.
pub const WEAR: [(&str, &str, OfDrive); 3] = [
    (
        "kvhoist_drive_used",
        "Share of the life of an NVMe drive that is used, by path; none where it may not be asked",
        |wear| Some(wear.used()),
    ),
    (
        "kvhoist_drive_years_left",
        "Years until the life of an NVMe drive is used, at the pace so far, by path; none where it may not be asked",
        DriveWear::years_left,
    ),
    (
        "kvhoist_drive_written_bytes_total",
        "Bytes written to an NVMe drive in its whole life, by path; none where it may not be asked",
        |wear| Some(wear.bytes_written.value()),
    ),
];

/// What only a recorder gets.
const GDR_IN_USE: Described = (
    "kvhoist_gdr_in_use",
    "1 while copies go through an RDMA device, 0.5 while its self-test is repeated after a failure, 0 otherwise",
);

/// Describes all metrics to the recorder.
pub(super) fn describe() {
    let drives = WEAR.map(|(name, help, _)| (name, help));
    metrics::describe(metrics().map(|metric| (metric.name, metric.help)).chain(drives).chain([GDR_IN_USE]));
}

/// Exports the wear of the disk tier's drives, of those that answer.
pub(super) fn export_wear(config: &Config) {
    for disk in &config.disk.paths {
        let Ok(wear) = drive_wear(&disk.path) else { continue };
        for (name, _, figure) in WEAR {
            let (Some(value), path) = (figure(&wear), disk.path.display().to_string()) else { continue };
            _ = caught(|| match Kind::of(name) {
                Kind::Counter => ::metrics::counter!(name, "path" => path).absolute(value as u64),
                _ => ::metrics::gauge!(name, "path" => path).set(value),
            });
        }
    }
}

impl Cache {
    /// Sets this cache's gauges of the `metrics` crate to its figures now: resident blocks, slots, dirty blocks, tiers
    /// out of service, threads, use of an RDMA device, the wear of its drives. Call it before each scrape. Counters
    /// need no call. Gauges do, because setting them at each change would cost time on the path of a hit.
    ///
    /// Takes one short lock, and asks each NVMe drive for its wear, which may take a millisecond.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_cache(async |cache| {
    /// // In the handler of /metrics, before the recorder renders its page:
    /// cache.export_gauges();
    /// # Ok(()) });
    /// ```
    pub fn export_gauges(&self) {
        let (config, stats) = (self.config(), self.stats());
        let of = Of(&config.namespace);
        for metric in metrics().filter(|metric| Kind::of(metric.name) == Kind::Gauge) {
            for Sample { labels, value, .. } in (metric.samples)(&stats) {
                // A recorder keeps each set of labels that it was ever given.
                of.set(metric.name, labels.into_iter().filter(|(name, _)| *name != REASON), value);
            }
        }
        of.set(GDR_IN_USE.0, std::iter::empty(), self.inner.facts.gdr.get().in_use());
        export_wear(config);
    }
}
