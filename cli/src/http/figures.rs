//! The metrics of a running service: names, descriptions and samples, for every format that exports them.

use kvhoist::{Config, Route, Stats, Tier, TierStats};
use kvhoist_service::{ClientStatus, ServiceStatus, internals::OpenSpace};

use super::drives::Drive;

/// A metric with its samples.
pub struct Metric {
    pub name: &'static str,
    pub help: &'static str,
    pub samples: Vec<Sample>,
}

/// One figure and its labels.
pub struct Sample {
    /// What follows the metric's name: `_bucket`, `_sum` and `_count` of a histogram.
    pub suffix: &'static str,
    pub labels: Vec<(&'static str, String)>,
    pub value: f64,
}

impl Metric {
    pub fn kind(&self) -> Kind {
        match self.name {
            name if name.ends_with("_total") => Kind::Counter,
            name if name.ends_with("_seconds") => Kind::Histogram,
            _ => Kind::Gauge,
        }
    }
}

/// How a metric's samples are read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It only grows.
    Counter,
    Gauge,
    /// Counters of the samples up to each of some bounds, with their sum and their number.
    Histogram,
}

/// Name, description, and the figure's place.
type Of<T> = (&'static str, &'static str, fn(&T) -> u64);

/// The same of a route.
type OfRoute = (&'static str, &'static str, fn(&Stats, Route) -> u64);

const OF_TIERS: [Of<TierStats>; 8] = [
    ("kvhoist_hits_total", "Blocks fetched or loaded from a tier, by tier", |tier| tier.hits),
    ("kvhoist_evictions_total", "Blocks evicted, by tier", |tier| tier.evictions),
    ("kvhoist_refused_total", "New blocks that a full tier refused, by tier", |tier| tier.refused),
    ("kvhoist_bytes_in_total", "Bytes moved into a tier, by tier", |tier| tier.bytes_in),
    ("kvhoist_bytes_out_total", "Bytes moved out of a tier, by tier", |tier| tier.bytes_out),
    ("kvhoist_resident_blocks", "Blocks in a tier, by tier", |tier| tier.resident),
    ("kvhoist_slots", "Slots of a tier, by tier", |tier| tier.slots),
    ("kvhoist_free_slots", "Slots that hold nothing, by tier", |tier| tier.free),
];

const OF_ROUTES: [OfRoute; 2] = [
    ("kvhoist_moved_blocks_total", "Blocks served or moved, by route", Stats::route_blocks),
    ("kvhoist_moved_bytes_total", "Bytes served or moved, by route", Stats::route_bytes),
];

const OF_SPACES: [Of<Stats>; 21] = [
    ("kvhoist_misses_total", "Blocks fetched or loaded that were in no tier", |stats| stats.misses),
    ("kvhoist_stores_total", "Blocks stored", |stats| stats.stores),
    ("kvhoist_stores_known_total", "Stores of blocks that were already resident", |stats| stats.stores_known),
    ("kvhoist_writes_refused_total", "Writes that the disk tier refused", |stats| stats.writes_refused),
    ("kvhoist_checksum_failures_total", "Blocks read from disk whose checksum did not match", |stats| {
        stats.checksum_failures
    }),
    ("kvhoist_read_errors_total", "Reads of the disk tier that failed", |stats| stats.read_errors),
    ("kvhoist_write_errors_total", "Writes to the disk tier that failed", |stats| stats.write_errors),
    ("kvhoist_quarantined_total", "Disk slots taken out of service until the store is opened again", |stats| {
        stats.quarantined
    }),
    ("kvhoist_changed_memory_total", "Blocks given up because their memory was changed during their store", |stats| {
        stats.changed_memory
    }),
    ("kvhoist_background_refused_total", "Prefetches and background writes refused by a full queue", |stats| {
        stats.background_refused
    }),
    ("kvhoist_released_total", "Blocks of chains that callers released", |stats| stats.released),
    ("kvhoist_released_unwritten_total", "Released blocks that were evicted without a write to disk", |stats| {
        stats.released_unwritten
    }),
    ("kvhoist_busy_total", "Calls answered with Error::Busy", |stats| stats.busy),
    ("kvhoist_timeouts_total", "Calls answered with Error::Timeout", |stats| stats.timeouts),
    ("kvhoist_records_bad_total", "Records refused at recovery: torn or damaged", |stats| stats.records_bad),
    ("kvhoist_record_writes_total", "Pages of the record table written", |stats| stats.record_writes),
    ("kvhoist_work_done_total", "Checksums and copies done by worker threads", |stats| stats.work_done),
    ("kvhoist_dirty_blocks", "Blocks of the host tier that are not on disk yet", |stats| stats.dirty),
    ("kvhoist_direct_io", "1 if the disk is read and written directly", |stats| stats.direct_io.into()),
    ("kvhoist_registered", "1 if host memory is registered with the ring", |stats| stats.registered.into()),
    ("kvhoist_service_straight_bytes_total", "Bytes moved directly between disk and clients' memory", |stats| {
        stats.route_bytes(Route::DiskToRegion) + stats.route_bytes(Route::RegionToDisk)
    }),
];

const OF_SERVICE: [Of<ServiceStatus>; 11] = [
    ("kvhoist_service_draining", "1 while the service takes no more work", |status| status.draining.into()),
    ("kvhoist_service_disk_bytes", "Disk for all spaces", |status| status.capacity_bytes),
    ("kvhoist_service_disk_left_bytes", "Disk that no space has", |status| status.capacity_left),
    ("kvhoist_service_host_bytes", "Host memory for the blocks of all spaces", |status| status.host_bytes),
    ("kvhoist_service_host_left_bytes", "Host memory that no space has", |status| status.host_left),
    ("kvhoist_service_cut_off_total", "Connections that were cut off", |status| status.cut_off),
    ("kvhoist_service_spaces", "Spaces, closed ones included", |status| status.spaces.len() as u64),
    ("kvhoist_service_clients", "Connections", |status| status.clients.len() as u64),
    ("kvhoist_service_requests_in_flight", "Requests that are not answered yet", |status| {
        sum(status, |client| client.requests.into())
    }),
    ("kvhoist_service_lent_bytes", "Memory that clients have lent", |status| sum(status, |client| client.region_bytes)),
    ("kvhoist_service_bytes_in_flight", "Bytes of blocks that move now", |status| {
        sum(status, |client| client.bytes_in_flight)
    }),
];

fn sum(status: &ServiceStatus, of: fn(&ClientStatus) -> u64) -> u64 {
    status.clients.iter().map(of).sum()
}

/// Every metric of a service, of its open spaces and of its drives.
pub fn collect(status: &ServiceStatus, spaces: &[OpenSpace], drives: &[Drive]) -> Vec<Metric> {
    let mut metrics = of_service(status);
    metrics.extend(of_drives(drives));
    // The service has no device tier.
    let tiers = Tier::ALL.into_iter().filter(|&tier| tier != Tier::Device);
    let routes = Route::ALL.into_iter().filter(|route| !route.name().contains("device"));
    metrics.extend(OF_TIERS.map(|(name, help, of)| {
        of_spaces(name, help, spaces, |space| {
            tiers.clone().map(|tier| (vec![("tier", tier.name().to_owned())], of(space.stats.tier(tier)))).collect()
        })
    }));
    metrics.extend(OF_ROUTES.map(|(name, help, of)| {
        of_spaces(name, help, spaces, |space| {
            routes.clone().map(|route| (vec![("route", route.name().into())], of(&space.stats, route))).collect()
        })
    }));
    metrics.extend(
        OF_SPACES.map(|(name, help, of)| of_spaces(name, help, spaces, |space| vec![(Vec::new(), of(&space.stats))])),
    );
    metrics.push(of_durations(spaces));
    metrics.extend(of_settings(spaces));
    metrics.extend(of_health(spaces));
    metrics
}

fn of_service(status: &ServiceStatus) -> Vec<Metric> {
    let version = Sample { suffix: "", labels: vec![("version", status.version.clone())], value: 1.0 };
    let info = Metric { name: "kvhoist_service_info", help: "Always 1: the service's version", samples: vec![version] };
    let alone = |value: u64| vec![Sample { suffix: "", labels: Vec::new(), value: value as f64 }];
    let figures = OF_SERVICE.map(|(name, help, of)| Metric { name, help, samples: alone(of(status)) });
    std::iter::once(info).chain(figures).collect()
}

/// SMART figures, of the drives that answer.
fn of_drives(drives: &[Drive]) -> [Metric; 3] {
    let samples = |of: fn(&Drive) -> Option<f64>| {
        let sample = |drive: &Drive| {
            let labels = vec![("path", drive.path.clone()), ("drive", drive.name.clone())];
            Some(Sample { suffix: "", labels, value: of(drive)? })
        };
        drives.iter().filter_map(sample).collect()
    };
    [
        Metric {
            name: "kvhoist_drive_used",
            help: "Share of the life of an NVMe drive that is used, by path",
            samples: samples(|drive| drive.used),
        },
        Metric {
            name: "kvhoist_drive_years_left",
            help: "Years until all of the life of an NVMe drive is used, at the pace so far, by path",
            samples: samples(|drive| drive.years_left),
        },
        Metric {
            name: "kvhoist_drive_written_bytes_total",
            help: "Bytes written to an NVMe drive in its whole life, by path",
            samples: samples(|drive| Some(drive.written? as f64)),
        },
    ]
}

/// Durations by route, of the routes that moved something: counts of those that took no longer than each bound.
fn of_durations(spaces: &[OpenSpace]) -> Metric {
    let mut samples = Vec::new();
    for (space, route) in spaces.iter().flat_map(|space| Route::ALL.map(|route| (space, route))) {
        let durations = space.stats.route_durations(route);
        let count = durations.count() as f64;
        if count == 0.0 {
            continue;
        }
        let mut sample = |suffix, bound: Option<String>, value| {
            let of_route = [("route", route.name().to_owned())].into_iter();
            let labels = own(space).into_iter().chain(of_route).chain(bound.map(|bound| ("le", bound)));
            samples.push(Sample { suffix, labels: labels.collect(), value });
        };
        let mut below = 0.0;
        for (end, count) in durations.buckets() {
            below += count as f64;
            sample("_bucket", Some(end.map_or("+Inf".into(), |end| end.to_string())), below);
        }
        sample("_sum", None, durations.sum().as_secs_f64());
        sample("_count", None, count);
    }
    Metric { name: "kvhoist_movement_seconds", help: "Duration of movements, by route", samples }
}

/// What the settings of a space's cache are.
fn of_settings(spaces: &[OpenSpace]) -> [Metric; 4] {
    let alone = |value: u64| vec![(Vec::new(), value)];
    [
        of_spaces("kvhoist_workers", "Threads that take checksums and copies", spaces, |space| {
            alone(space.config.worker_threads().into())
        }),
        of_spaces("kvhoist_io_threads", "Threads that read and write; 0 with io_uring", spaces, |space| {
            alone(io_threads(&space.config, &space.stats))
        }),
        of_spaces(
            "kvhoist_write_budget_bytes",
            "Bytes a day that may be written to disk: write_budget, or drive_writes_per_day times drive_bytes",
            spaces,
            |space| space.config.write_budget_bytes().map(alone).unwrap_or_default(),
        ),
        of_spaces("kvhoist_info", "Always 1: the version, and what serves the disk", spaces, |space| {
            let version = env!("CARGO_PKG_VERSION").to_owned();
            vec![(vec![("version", version), ("storage", space.stats.storage.to_owned())], 1)]
        }),
    ]
}

fn io_threads(config: &Config, stats: &Stats) -> u64 {
    if stats.storage == "blocking" { config.disk.blocking_threads as u64 } else { 0 }
}

/// What is out of service, and writes that were not made, with the reasons.
fn of_health(spaces: &[OpenSpace]) -> [Metric; 3] {
    let disk = |reason: &Option<String>| {
        let labels = vec![("tier", "disk".to_owned()), ("reason", reason.clone().unwrap_or_default())];
        vec![(labels, u64::from(reason.is_some()))]
    };
    [
        of_spaces("kvhoist_retired", "1 while a tier is out of service, with the reason", spaces, |space| {
            disk(&space.stats.disk_retired)
        }),
        of_spaces("kvhoist_read_only", "1 while a tier takes no blocks, with the reason", spaces, |space| {
            disk(&space.stats.disk_read_only)
        }),
        of_spaces(
            "kvhoist_writes_declined_total",
            "Blocks that were not worth a write to disk, or over its budget, by reason",
            spaces,
            |space| {
                let Stats { writes_declined, writes_over_budget, .. } = space.stats;
                [("value", writes_declined), ("budget", writes_over_budget)]
                    .map(|(reason, count)| (vec![("reason", reason.to_owned())], count))
                    .into()
            },
        ),
    ]
}

type Labelled = (Vec<(&'static str, String)>, u64);

/// The labels of a cache: its namespace, and a folder that no other space has.
fn own(space: &OpenSpace) -> [(&'static str, String); 2] {
    [("cache", space.namespace.clone()), ("number", space.folder.clone())]
}

/// A metric of every open space.
fn of_spaces(
    name: &'static str,
    help: &'static str,
    spaces: &[OpenSpace],
    of: impl Fn(&OpenSpace) -> Vec<Labelled>,
) -> Metric {
    let of_space = |space: &OpenSpace| {
        let own = own(space);
        let sample = move |(labels, value): Labelled| Sample {
            suffix: "",
            labels: own.iter().cloned().chain(labels).collect(),
            value: value as f64,
        };
        of(space).into_iter().map(sample).collect::<Vec<_>>()
    };
    Metric { name, help, samples: spaces.iter().flat_map(of_space).collect() }
}
