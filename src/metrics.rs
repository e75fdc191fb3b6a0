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

pub(crate) use count::{Count, Derived, Export, Gauge};
pub use durations::Durations;
pub(crate) use durations::Histogram;
pub(crate) use tally::{Held, Tally};

use std::{sync::Arc, time::Duration};

use kvhoist_device::COPY_ENGINES;
use metrics::{Label, Unit};

use crate::{
    block::{Route, Tier},
    shield::caught,
};

/// The counters of a tier, each declared once: its field in [`TierMetrics`] and in `TierStats`, and what it counts. The
/// metric is `kvhoist_<field>_total`, with the label `tier`. `derived` ones follow from the blocks of each route: those
/// of which the tier is this end.
macro_rules! tier_counters {
    ($then:ident $($more:tt)*) => {
        $then! {
            counters {
                hits: "Blocks fetched or loaded from a tier, by tier";
                evictions: "Blocks evicted, by tier";
                refused: "New blocks that a full tier refused, by tier";
            }
            derived {
                bytes_in: "Bytes moved into a tier, by tier" = |(_, to)| to;
                bytes_out: "Bytes moved out of a tier, by tier" = |(from, _)| from;
            }
            $($more)*
        }
    };
}

/// The counters of a cache without a label of their own, each declared once: its field in [`Metrics`] and in `Stats`,
/// and what it counts, which is also the first sentence of its documentation. The metric is `kvhoist_<field>_total`.
macro_rules! counters {
    ($then:ident $($more:tt)*) => {
        $then! {
            counters {
                misses: "Blocks fetched or loaded that were in no tier";
                joined: "Misses that another caller's computation answered (get_or_fetch_with)";
                stores: "Blocks stored";
                stores_known: "Stores of blocks that were already resident";
                stores_failed: "Stores that failed";
                writes_refused: "Writes that the disk tier refused";
                checksum_failures: "Blocks read from disk whose checksum did not match";
                read_errors: "Reads of the disk tier that failed";
                write_errors: "Writes to the disk tier that failed";
                copy_errors: "Copies between memories that failed";
                quarantined: "Disk slots taken out of service until the store is opened again";
                /// Their slots stay in use. After 16 such blocks the stores from that memory are copied first.
                changed_memory:
                    "Blocks given up when first read: their caller's memory was changed while they were stored";
                background_refused: "Prefetches and background writes refused because their queue was full";
                /// [`Cache::release`] releases them.
                released: "Blocks of chains that callers released";
                released_unwritten: "Released blocks that were evicted from host memory without a write to disk";
                busy: "Calls answered with Error::Busy";
                timeouts: "Calls answered with Error::Timeout";
                record_writes: "Pages of the record table written";
                records_bad: "Records refused at recovery: torn or damaged";
                cufile_errors: "Requests that libcufile failed; their blocks went through host memory";
                remote_reads: "Reads of the remote store that succeeded";
                remote_writes: "Objects that were created in the remote store";
                remote_deleted: "Objects of the remote store that this cache deleted, to keep it within remote_bytes";
                remote_errors: "Requests that the remote store refused, or did not answer well in time";
                remote_stale: "Objects that were gone from the remote store when they were read";
                remote_invalid: "Blocks and tables of the remote store that were not what they should be";
                remote_unlisted:
                    "Objects of the remote store, and blocks for it, that the memory for knowing them had no room for";
                remote_missed: "Blocks that the remote store was to bring and did not";
                remote_unsent: "Blocks that were to go to the remote store and did not";
            }
            $($more)*
        }
    };
}

pub(crate) use {counters, tier_counters};

/// A metric's name, and what it shows.
pub(crate) type Described = (&'static str, &'static str);

// Those with other labels, which several fields of `Stats` fill.
pub(crate) const MOVED_BLOCKS: Described = ("kvhoist_moved_blocks_total", "Blocks served or moved, by route");
pub(crate) const MOVED_BYTES: Described = ("kvhoist_moved_bytes_total", "Bytes served or moved, by route");
pub(crate) const MOVEMENT_SECONDS: Described = ("kvhoist_movement_seconds", "Duration of movements, by route");
pub(crate) const COPIES: Described = ("kvhoist_copies_total", "Batches of copies between memories, by engine");
pub(crate) const COPIED_BYTES: Described = ("kvhoist_copied_bytes_total", "Bytes copied between memories, by engine");
pub(crate) const WRITES_DECLINED: Described = (
    "kvhoist_writes_declined_total",
    "Blocks that were not worth a write to the disk tier, or for which its budget had no room, by reason",
);

/// Gauges that are set when they change.
const LIVE: [Described; 3] = [
    ("kvhoist_movements", "Movements in flight"),
    ("kvhoist_write_share", "Share of the chains in their first use that the budget of writes takes now, 0 to 1"),
    ("kvhoist_cufile_in_use", "1 while libcufile moves blocks directly, 0.5 in its compat mode, 0 otherwise"),
];

macro_rules! tier_metrics {
    (
        counters { $($field:ident: $text:literal;)* }
        derived { $($derived:ident: $_:literal = $end:expr;)* }
    ) => {
        /// Counters of one tier.
        pub(crate) struct TierMetrics {
            $(pub(crate) $field: Count,)*
            $($derived: Derived,)*
        }

        impl TierMetrics {
            fn new(of: &Of<'_>, tier: Tier) -> Self {
                TierMetrics {
                    $($field: of.labelled(concat!("kvhoist_", stringify!($field), "_total"), "tier", tier.name()),)*
                    $($derived: of.derived(concat!("kvhoist_", stringify!($derived), "_total"), "tier", tier.name()),)*
                }
            }
        }
    };
}

tier_counters!(tier_metrics);

/// Counters of one route.
pub(crate) struct RouteMetrics {
    pub(crate) blocks: Count,
    bytes: Derived,
    pub(crate) durations: Histogram,
}

impl RouteMetrics {
    fn new(of: &Of<'_>, route: Route) -> Self {
        RouteMetrics {
            blocks: of.labelled(MOVED_BLOCKS.0, "route", route.name()),
            bytes: of.derived(MOVED_BYTES.0, "route", route.name()),
            durations: of.histogram(MOVEMENT_SECONDS.0, route),
        }
    }
}

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
            batches: COPY_ENGINES.map(|engine| of.labelled(COPIES.0, "engine", engine)),
            bytes: COPY_ENGINES.map(|engine| of.labelled(COPIED_BYTES.0, "engine", engine)),
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

macro_rules! metrics {
    (counters { $($(#[$more:meta])* $field:ident: $text:literal;)* }) => {
        /// All metrics of one cache.
        pub(crate) struct Metrics {
            pub(crate) tiers: [TierMetrics; Tier::WITH_REMOTE.len()],
            pub(crate) routes: [RouteMetrics; Route::COUNT],
            block_bytes: u64,
            /// By why.
            pub(crate) writes_declined: [Count; DECLINED.len()],
            pub(crate) write_share: Gauge,
            pub(crate) work_done: Arc<Count>,
            pub(crate) copies: Arc<CopyMetrics>,
            pub(crate) movements: Gauge,
            pub(crate) cufile_in_use: Gauge,
            $(pub(crate) $field: Count,)*
        }

        impl Metrics {
            /// The metrics of the cache of a namespace, which is their label `cache`, of blocks of this size.
            pub(crate) fn new(namespace: &str, block_bytes: usize) -> Self {
                let of = Of(namespace);
                Metrics {
                    tiers: Tier::WITH_REMOTE.map(|tier| TierMetrics::new(&of, tier)),
                    routes: Route::ALL.map(|route| RouteMetrics::new(&of, route)),
                    block_bytes: block_bytes as u64,
                    writes_declined: DECLINED.map(|why| of.labelled(WRITES_DECLINED.0, "reason", why)),
                    write_share: of.gauge("kvhoist_write_share"),
                    work_done: Arc::new(of.plain("kvhoist_work_done_total")),
                    copies: Arc::new(CopyMetrics::new(&of)),
                    movements: of.gauge("kvhoist_movements"),
                    cufile_in_use: of.gauge("kvhoist_cufile_in_use"),
                    $($field: of.plain(concat!("kvhoist_", stringify!($field), "_total")),)*
                }
            }
        }
    };
}

counters!(metrics);

impl Metrics {
    pub(crate) fn tier(&self, tier: Tier) -> &TierMetrics {
        &self.tiers[tier as usize]
    }

    /// What counts the look-ups of blocks that this tier has, or none.
    pub(crate) fn look_ups(&self, found: Option<Tier>) -> &Count {
        found.map_or(&self.misses, |tier| &self.tier(tier).hits)
    }

    /// Counts a look-up, by the tier that has the block.
    pub(crate) fn looked_up(&self, found: Option<Tier>) {
        self.look_ups(found).add(1);
    }

    /// Counts a hit in `tier`, whose block is lent to the caller where it is, for the holder of the index lock, who
    /// [exports](Self::export_hit) it after the unlock.
    #[inline]
    pub(crate) fn hit_locked(&self, tier: Tier, route: Route, held: &mut impl Held) {
        self.tier(tier).hits.add_locked(1, held);
        self.moved_locked(route, held);
    }

    #[inline]
    pub(crate) fn export_hit(&self, tier: Tier, route: Route) {
        self.tier(tier).hits.export(1);
        self.export_moved(route);
    }

    /// Reports evictions of each tier to the recorder.
    pub(crate) fn evicted(&self, evicted: [u32; Tier::COUNT]) {
        for (tier, n) in self.tiers.iter().zip(evicted).filter(|(_, n)| *n > 0) {
            tier.evictions.export(n.into());
        }
    }

    /// Counts a store: of a new block, or of one that was resident. What comes from a store beyond the node is no
    /// caller's store. For the holder of the index lock, who [exports](Self::export_stored) it after the unlock.
    #[inline]
    pub(crate) fn stored_locked(&self, is_new: bool, route: Route, held: &mut impl Held) {
        if route == Route::CallerToHost {
            self.stores_of(is_new).add_locked(1, held);
        }
        if is_new {
            self.moved_locked(route, held);
        }
    }

    #[inline]
    pub(crate) fn export_stored(&self, is_new: bool, route: Route) {
        if route == Route::CallerToHost {
            self.stores_of(is_new).export(1);
        }
        if is_new {
            self.export_moved(route);
        }
    }

    fn stores_of(&self, is_new: bool) -> &Count {
        if is_new { &self.stores } else { &self.stores_known }
    }

    /// Counts a moved block and its duration.
    pub(crate) fn moved(&self, route: Route, took: Duration) {
        self.timed(route, took);
        self.routes[route as usize].blocks.add_unexported(1);
        self.export_moved(route);
    }

    /// Records the duration of a movement that is counted elsewhere.
    pub(crate) fn timed(&self, route: Route, took: Duration) {
        self.routes[route as usize].durations.record(took);
    }

    /// Counts a moved block, for the holder of the index lock. It is [exported](Self::export_moved) without the lock.
    #[inline]
    pub(crate) fn moved_locked(&self, route: Route, held: &mut impl Held) {
        self.routes[route as usize].blocks.add_locked(1, held);
    }

    /// Reports a moved block to the recorder.
    #[inline]
    pub(crate) fn export_moved(&self, route: Route) {
        let (metrics, (from, to)) = (&self.routes[route as usize], route.ends());
        metrics.blocks.export(1);
        metrics.bytes.export(self.block_bytes);
        if let Some(tier) = from {
            self.tier(tier).bytes_out.export(self.block_bytes);
        }
        if let Some(tier) = to {
            self.tier(tier).bytes_in.export(self.block_bytes);
        }
    }

    /// The bytes of the blocks that took `route`.
    pub(crate) fn route_bytes(&self, route: Route) -> u64 {
        self.routes[route as usize].blocks.get() * self.block_bytes
    }

    /// The bytes of the routes of which `tier` is this end.
    pub(crate) fn tier_bytes(&self, tier: Tier, end: impl Fn((Option<Tier>, Option<Tier>)) -> Option<Tier>) -> u64 {
        let routes = Route::ALL.into_iter().filter(|route| end(route.ends()) == Some(tier));
        routes.map(|route| self.route_bytes(route)).sum()
    }
}

/// The namespace of a cache: the label `cache` of its metrics.
pub(crate) struct Of<'a>(pub(crate) &'a str);

impl Of<'_> {
    fn derived(&self, name: &'static str, label: &'static str, value: &'static str) -> Derived {
        Derived::new(caught(|| metrics::counter!(name, "cache" => self.cache(), label => value)))
    }

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

    fn gauge(&self, name: &'static str) -> Gauge {
        Gauge::new(caught(|| metrics::gauge!(name, "cache" => self.cache())))
    }

    /// Sets a gauge with these labels beside its own.
    pub(crate) fn set(&self, name: &'static str, labels: impl Iterator<Item = (&'static str, String)>, value: f64) {
        let own = [("cache", self.cache())].into_iter();
        let labels: Vec<Label> = own.chain(labels).map(|(name, value)| Label::new(name, value)).collect();
        _ = caught(|| metrics::gauge!(name, labels).set(value));
    }
}

/// Describes metrics to the recorder.
pub(crate) fn describe(all: impl Iterator<Item = Described>) {
    _ = caught(|| {
        for (name, text) in all.chain(LIVE) {
            let unit = if name.contains("bytes") { Unit::Bytes } else { Unit::Count };
            match name {
                _ if name.ends_with("_seconds") => metrics::describe_histogram!(name, Unit::Seconds, text),
                _ if name.ends_with("_total") => metrics::describe_counter!(name, unit, text),
                _ => metrics::describe_gauge!(name, unit, text),
            }
        }
    });
}
