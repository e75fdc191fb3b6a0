//! All metrics, with their names and descriptions.
//!
//! Each counter and histogram is kept twice: in a tally that [`Cache::stats`](crate::Cache::stats) reads, and in a
//! handle of the `metrics` crate, acquired once at open. Install the recorder before opening a cache.
//!
//! The recorder is the user's code: it is never called under the index lock, so it may call the cache. If it panics,
//! only that figure is lost.

mod count;
mod durations;
mod tally;

pub(crate) use count::{Count, Export, Gauge};
pub use durations::Durations;
pub(crate) use durations::Histogram;
pub(crate) use tally::{Held, Tally};

use std::{path::Path, sync::Arc, time::Duration};

use metrics::Unit;

use crate::{
    block::{Route, Tier},
    shield::caught,
};

/// Counters of one tier.
pub(crate) struct TierMetrics {
    pub(crate) hits: Count,
    pub(crate) evictions: Count,
    pub(crate) refused: Count,
    pub(crate) bytes_in: Count,
    pub(crate) bytes_out: Count,
}

impl TierMetrics {
    fn new(of: &Of<'_>, tier: Tier) -> Self {
        let count = |name| of.labelled(name, "tier", tier.name());
        TierMetrics {
            hits: count("kvhoist_hits_total"),
            evictions: count("kvhoist_evictions_total"),
            refused: count("kvhoist_refused_total"),
            bytes_in: count("kvhoist_bytes_in_total"),
            bytes_out: count("kvhoist_bytes_out_total"),
        }
    }
}

/// Counters of one route.
pub(crate) struct RouteMetrics {
    pub(crate) blocks: Count,
    pub(crate) bytes: Count,
    pub(crate) durations: Histogram,
}

impl RouteMetrics {
    fn new(of: &Of<'_>, route: Route) -> Self {
        RouteMetrics {
            blocks: of.labelled("kvhoist_moved_blocks_total", "route", route.name()),
            bytes: of.labelled("kvhoist_moved_bytes_total", "route", route.name()),
            durations: of.histogram("kvhoist_movement_seconds", route),
        }
    }
}

/// The copy engines, as metric labels.
pub(crate) const COPY_ENGINES: [&str; 3] = ["memcpy", "cuda", "gdr"];

/// Counters of copies between memories, by engine.
pub(crate) struct CopyMetrics {
    batches: [Count; COPY_ENGINES.len()],
    bytes: [Count; COPY_ENGINES.len()],
    /// Batches that the RDMA device failed and another engine copied.
    pub(crate) failovers: Count,
}

impl CopyMetrics {
    fn new(of: &Of<'_>) -> Self {
        CopyMetrics {
            batches: COPY_ENGINES.map(|engine| of.labelled("kvhoist_copies_total", "engine", engine)),
            bytes: COPY_ENGINES.map(|engine| of.labelled("kvhoist_copied_bytes_total", "engine", engine)),
            failovers: of.plain("kvhoist_gdr_failovers_total"),
        }
    }

    /// Counts a batch that an engine has copied.
    pub(crate) fn copied(&self, engine: &str, bytes: u64) {
        if let Some(at) = COPY_ENGINES.iter().position(|&known| known == engine) {
            self.batches[at].add(1);
            self.bytes[at].add(bytes);
        }
    }

    /// Batches and bytes of an engine, given by its index in [`COPY_ENGINES`].
    pub(crate) fn of(&self, engine: usize) -> (u64, u64) {
        (self.batches[engine].get(), self.bytes[engine].get())
    }
}

/// Why a block is dropped that could be written to disk.
pub(crate) const DECLINED: [&str; 2] = ["value", "budget"];

/// Declares the counters of a cache that have no label but its own: the field, the name, and what is counted.
macro_rules! metrics {
    ($($field:ident: $name:literal, $text:literal;)*) => {
        /// All metrics of one cache.
        pub(crate) struct Metrics {
            pub(crate) tiers: [TierMetrics; Tier::COUNT],
            pub(crate) routes: [RouteMetrics; Route::COUNT],
            /// By why.
            pub(crate) writes_declined: [Count; DECLINED.len()],
            pub(crate) write_share: Gauge,
            pub(crate) work_done: Arc<Count>,
            pub(crate) copies: Arc<CopyMetrics>,
            pub(crate) movements: Gauge,
            pub(crate) cufile_in_use: Gauge,
            $(pub(crate) $field: Count,)*
        }

        const PLAIN: &[(&str, &str)] = &[$(($name, $text)),*];

        impl Metrics {
            /// The metrics of the cache of a namespace, which is their label `cache`.
            pub(crate) fn new(namespace: &str) -> Self {
                _ = caught(describe);
                let of = Of(namespace);
                Metrics {
                    tiers: Tier::ALL.map(|tier| TierMetrics::new(&of, tier)),
                    routes: Route::ALL.map(|route| RouteMetrics::new(&of, route)),
                    writes_declined: DECLINED.map(|why| of.labelled("kvhoist_writes_declined_total", "reason", why)),
                    write_share: of.gauge("kvhoist_write_share", None),
                    work_done: Arc::new(of.plain("kvhoist_work_done_total")),
                    copies: Arc::new(CopyMetrics::new(&of)),
                    movements: of.gauge("kvhoist_movements", None),
                    cufile_in_use: of.gauge("kvhoist_cufile_in_use", None),
                    $($field: of.plain($name),)*
                }
            }
        }
    };
}

metrics! {
    misses: "kvhoist_misses_total", "Blocks fetched or loaded that were in no tier";
    joined: "kvhoist_joined_total", "Misses that another caller's computation answered (get_or_fetch_with)";
    stores: "kvhoist_stores_total", "Blocks stored";
    stores_known: "kvhoist_stores_known_total", "Stores of blocks that were already resident";
    stores_failed: "kvhoist_stores_failed_total", "Stores that failed";
    writes_refused: "kvhoist_writes_refused_total", "Writes that the disk tier refused";
    checksum_failures: "kvhoist_checksum_failures_total", "Blocks read from disk whose checksum did not match";
    read_errors: "kvhoist_read_errors_total", "Reads of the disk tier that failed";
    write_errors: "kvhoist_write_errors_total", "Writes to the disk tier that failed";
    copy_errors: "kvhoist_copy_errors_total", "Copies between memories that failed";
    quarantined: "kvhoist_quarantined_total", "Disk slots taken out of service until the store is opened again";
    changed_memory: "kvhoist_changed_memory_total",
        "Blocks given up because their caller's memory was changed while they were stored from it";
    background_refused: "kvhoist_background_refused_total",
        "Prefetches and background writes refused because their queue was full";
    released: "kvhoist_released_total", "Blocks of chains that callers released";
    released_unwritten: "kvhoist_released_unwritten_total",
        "Released blocks that were evicted from host memory without a write to disk";
    busy: "kvhoist_busy_total", "Calls answered with Error::Busy";
    timeouts: "kvhoist_timeouts_total", "Calls answered with Error::Timeout";
    record_writes: "kvhoist_record_writes_total", "Pages of the record table written";
    records_bad: "kvhoist_records_bad_total", "Records refused at recovery: torn or damaged";
    cufile_errors: "kvhoist_cufile_errors_total",
        "Requests that libcufile failed; their blocks went through host memory";
}

/// Counters with labels, and one that the copies share.
const LABELED: [(&str, Unit, &str); 12] = [
    ("kvhoist_hits_total", Unit::Count, "Blocks fetched or loaded from a tier, by tier"),
    ("kvhoist_evictions_total", Unit::Count, "Blocks evicted, by tier"),
    ("kvhoist_refused_total", Unit::Count, "New blocks that a full tier refused, by tier"),
    ("kvhoist_bytes_in_total", Unit::Bytes, "Bytes moved into a tier, by tier"),
    ("kvhoist_bytes_out_total", Unit::Bytes, "Bytes moved out of a tier, by tier"),
    ("kvhoist_moved_blocks_total", Unit::Count, "Blocks served or moved, by route"),
    ("kvhoist_moved_bytes_total", Unit::Bytes, "Bytes served or moved, by route"),
    (
        "kvhoist_writes_declined_total",
        Unit::Count,
        "Blocks that were not worth a write to the disk tier, or for which its budget had no room, by reason",
    ),
    ("kvhoist_copies_total", Unit::Count, "Batches of copies between memories, by engine"),
    ("kvhoist_copied_bytes_total", Unit::Bytes, "Bytes copied between memories, by engine"),
    (
        "kvhoist_gdr_failovers_total",
        Unit::Count,
        "Batches of copies that the RDMA device failed; another engine copied them",
    ),
    ("kvhoist_work_done_total", Unit::Count, "Checksums and copies done by worker threads"),
];

impl Metrics {
    pub(crate) fn tier(&self, tier: Tier) -> &TierMetrics {
        &self.tiers[tier as usize]
    }

    /// Counts a look-up, by the tier that has the block.
    pub(crate) fn looked_up(&self, found: Option<Tier>) {
        match found {
            Some(tier) => self.tier(tier).hits.add(1),
            None => self.misses.add(1),
        }
    }

    /// Counts a hit in `tier`, whose block is lent to the caller where it is, by `add`.
    #[inline]
    pub(crate) fn hit(&self, tier: Tier, route: Route, bytes: usize, mut add: impl FnMut(&Count, u64)) {
        add(&self.tier(tier).hits, 1);
        self.took(route, bytes, add);
    }

    /// Counts a block that took `route`.
    #[inline]
    fn took(&self, route: Route, bytes: usize, mut add: impl FnMut(&Count, u64)) {
        let metrics = &self.routes[route as usize];
        add(&metrics.blocks, 1);
        add(&metrics.bytes, bytes as u64);
    }

    /// Counts a moved block and its duration.
    pub(crate) fn moved(&self, route: Route, bytes: usize, took: Duration) {
        self.routes[route as usize].durations.record(took);
        self.moved_untimed(route, bytes);
    }

    /// Counts a moved block without its duration.
    pub(crate) fn moved_untimed(&self, route: Route, bytes: usize) {
        self.moved_by(route, bytes, Count::add);
    }

    /// Counts a moved block by `add`.
    pub(crate) fn moved_by(&self, route: Route, bytes: usize, mut add: impl FnMut(&Count, u64)) {
        self.took(route, bytes, &mut add);
        let (from, to) = ends(route);
        if let Some(tier) = from {
            add(&self.tier(tier).bytes_out, bytes as u64);
        }
        if let Some(tier) = to {
            add(&self.tier(tier).bytes_in, bytes as u64);
        }
    }
}

/// The tiers that a route's bytes leave and enter. The host slot of a bounced load counts in the
/// read that filled it.
fn ends(route: Route) -> (Option<Tier>, Option<Tier>) {
    match route {
        Route::DeviceHit | Route::HostHit => (None, None),
        Route::DiskToHost => (Some(Tier::Disk), Some(Tier::Host)),
        Route::DiskToHostToDevice | Route::HostToDevice => (Some(Tier::Host), Some(Tier::Device)),
        Route::DeviceToHost => (Some(Tier::Device), Some(Tier::Host)),
        Route::CallerToHost => (None, Some(Tier::Host)),
        Route::HostToCaller => (Some(Tier::Host), None),
        Route::DeviceToCaller => (Some(Tier::Device), None),
        Route::DiskToDevice => (Some(Tier::Disk), Some(Tier::Device)),
        Route::HostToDisk => (Some(Tier::Host), Some(Tier::Disk)),
        Route::DiskToRegion => (Some(Tier::Disk), None),
        Route::RegionToDisk => (None, Some(Tier::Disk)),
        Route::DeviceToDisk => (Some(Tier::Device), Some(Tier::Disk)),
    }
}

/// Sets the gauges and the counter of a drive's wear, by a path on it: the share of its life that is used, the years
/// until all of it is used, and the bytes written to it.
pub(crate) fn export_wear(path: &Path, used: f64, years_left: Option<f64>, bytes_written: u64) {
    let path = || path.display().to_string();
    _ = caught(|| {
        metrics::gauge!("kvhoist_drive_used", "path" => path()).set(used);
        if let Some(years) = years_left {
            metrics::gauge!("kvhoist_drive_years_left", "path" => path()).set(years);
        }
        metrics::counter!("kvhoist_drive_written_bytes_total", "path" => path()).absolute(bytes_written);
    });
}

/// The namespace of a cache: the label `cache` of its metrics.
pub(crate) struct Of<'a>(pub(crate) &'a str);

impl Of<'_> {
    fn cache(&self) -> String {
        self.0.to_owned()
    }

    fn plain(&self, name: &'static str) -> Count {
        Count::new(caught(|| metrics::counter!(name, "cache" => self.cache())))
    }

    fn labelled(&self, name: &'static str, label: &'static str, value: &'static str) -> Count {
        Count::new(caught(|| metrics::counter!(name, "cache" => self.cache(), label => value)))
    }

    fn histogram(&self, name: &'static str, route: Route) -> Histogram {
        Histogram::new(caught(|| metrics::histogram!(name, "cache" => self.cache(), "route" => route.name())))
    }

    /// Sets the gauge that shows the version and the storage engine.
    pub(crate) fn info(&self, storage: &'static str) {
        let version = env!("CARGO_PKG_VERSION");
        _ = caught(|| {
            metrics::gauge!("kvhoist_info", "cache" => self.cache(), "version" => version, "storage" => storage).set(1);
        });
    }

    pub(crate) fn gauge(&self, name: &'static str, tier: Option<Tier>) -> Gauge {
        let gauge = caught(|| match tier {
            Some(tier) => metrics::gauge!(name, "cache" => self.cache(), "tier" => tier.name()),
            None => metrics::gauge!(name, "cache" => self.cache()),
        });
        Gauge::new(gauge)
    }
}

/// Descriptions of the gauges that `Cache::export_gauges` sets.
const GAUGES: [(&str, Unit, &str); 13] = [
    ("kvhoist_info", Unit::Count, "Always 1: the version, and what serves the disk"),
    ("kvhoist_resident_blocks", Unit::Count, "Blocks in a tier, by tier"),
    ("kvhoist_slots", Unit::Count, "Slots of a tier, by tier"),
    ("kvhoist_free_slots", Unit::Count, "Slots that hold nothing, by tier"),
    ("kvhoist_dirty_blocks", Unit::Count, "Blocks of the host tier that are not on disk yet"),
    ("kvhoist_retired", Unit::Count, "1 while a tier is out of service, by tier"),
    ("kvhoist_read_only", Unit::Count, "1 while a tier takes no blocks, by tier"),
    ("kvhoist_direct_io", Unit::Count, "1 if the disk is read and written directly"),
    ("kvhoist_registered", Unit::Count, "1 if host memory is registered with the ring"),
    ("kvhoist_workers", Unit::Count, "Threads that take checksums and copies"),
    ("kvhoist_io_threads", Unit::Count, "Threads that read and write; 0 with io_uring"),
    (
        "kvhoist_gdr_in_use",
        Unit::Count,
        "1 while copies go through an RDMA device, 0.5 while its self-test is repeated after a failure, 0 otherwise",
    ),
    (
        "kvhoist_write_budget_bytes",
        Unit::Bytes,
        "Bytes a day that may be written to disk: write_budget, or drive_writes_per_day times drive_bytes",
    ),
];

fn describe() {
    for (name, text) in PLAIN {
        metrics::describe_counter!(*name, Unit::Count, *text);
    }
    for (name, unit, text) in LABELED {
        metrics::describe_counter!(name, unit, text);
    }
    for (name, unit, text) in GAUGES {
        metrics::describe_gauge!(name, unit, text);
    }
    metrics::describe_counter!(
        "kvhoist_drive_written_bytes_total",
        Unit::Bytes,
        "Bytes written to an NVMe drive in its whole life, by path; none where it may not be asked"
    );
    metrics::describe_histogram!("kvhoist_movement_seconds", Unit::Seconds, "Duration of movements, by route");
    metrics::describe_gauge!("kvhoist_movements", "Movements in flight");
    metrics::describe_gauge!(
        "kvhoist_drive_years_left",
        "Years until the life of an NVMe drive is used, at the pace so far, by path; none where it may not be asked"
    );
    metrics::describe_gauge!(
        "kvhoist_drive_used",
        "Share of the life of an NVMe drive that is used, by path; none where it may not be asked"
    );
    metrics::describe_gauge!(
        "kvhoist_write_share",
        "Share of the chains in their first use that the budget of writes takes now, 0 to 1"
    );
    metrics::describe_gauge!(
        "kvhoist_cufile_in_use",
        "1 while libcufile moves blocks directly, 0.5 in its compat mode, 0 otherwise"
    );
}
