//! The metrics of a running service: names, descriptions and samples, for every format that exports them.

pub use kvhoist::internals::exported::{Kind, Sample};
use kvhoist::{Tier, internals::exported};
use kvhoist_service::{ClientStatus, ServiceStatus, internals::OpenSpace};

use super::{drives::Drive, troubles};

/// A metric with its samples.
pub struct Metric {
    pub name: &'static str,
    pub help: &'static str,
    pub samples: Vec<Sample>,
}

impl Metric {
    pub fn kind(&self) -> Kind {
        Kind::of(self.name)
    }
}

/// Name, description, and the figure's place.
type Of<T> = (&'static str, &'static str, fn(&T) -> u64);

/// What a space has beyond the metrics of a cache.
const STRAIGHT: exported::Metric = exported::Metric {
    name: "kvhoist_service_straight_bytes_total",
    help: "Bytes moved directly between disk and clients' memory",
    samples: |stats| vec![Sample { suffix: "", labels: Vec::new(), value: stats.straight_bytes() as f64 }],
};

const OF_SERVICE: [Of<ServiceStatus>; 14] = [
    ("kvhoist_service_draining", "1 while the service takes no more work", |status| status.draining.into()),
    ("kvhoist_service_trouble", "Reasons for which /healthz answers 503", |status| troubles(status).len() as u64),
    ("kvhoist_service_disk_bytes", "Disk for all spaces", |status| status.capacity_bytes),
    ("kvhoist_service_disk_left_bytes", "Disk that no space has", |status| status.capacity_left),
    ("kvhoist_service_host_bytes", "Host memory for the blocks of all spaces", |status| status.host_bytes),
    ("kvhoist_service_host_left_bytes", "Host memory that no space has", |status| status.host_left),
    ("kvhoist_service_files", "Whole files that are held for clients", |status| status.files.into()),
    ("kvhoist_service_file_bytes", "Host memory of held files", |status| status.file_bytes),
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
    let of_caches = exported::metrics().chain([&STRAIGHT]).map(|metric| of_spaces(metric, spaces));
    of_service(status).into_iter().chain(of_drives(drives)).chain(of_caches).collect()
}

fn of_service(status: &ServiceStatus) -> Vec<Metric> {
    let version = Sample { suffix: "", labels: vec![("version", status.version.clone())], value: 1.0 };
    let info = Metric { name: "kvhoist_service_info", help: "Always 1: the service's version", samples: vec![version] };
    let alone = |value: u64| vec![Sample { suffix: "", labels: Vec::new(), value: value as f64 }];
    let figures = OF_SERVICE.map(|(name, help, of)| Metric { name, help, samples: alone(of(status)) });
    std::iter::once(info).chain(figures).collect()
}

/// SMART figures, of the drives that answer.
fn of_drives(drives: &[Drive]) -> [Metric; exported::WEAR.len()] {
    exported::WEAR.map(|(name, help, of)| {
        let sample = |drive: &Drive| {
            let labels = vec![("path", drive.path.clone()), ("drive", drive.name.clone())];
            Some(Sample { suffix: "", labels, value: of(drive.wear.as_ref().ok()?)? })
        };
        Metric { name, help, samples: drives.iter().filter_map(sample).collect() }
    })
}

/// What is known of a space that is not served: a zero of another figure would be no measurement.
const OF_UNSERVED: &str = "kvhoist_retired";

/// A metric of every open space, with its namespace and a folder that no other space has. Only a space for a GPU has
/// figures of one.
fn of_spaces(metric: &exported::Metric, spaces: &[OpenSpace]) -> Metric {
    let of_device = |(name, value): &(&str, String)| match *name {
        "tier" => value == "device",
        "route" => value.contains("device"),
        "engine" => value != "memcpy",
        _ => false,
    };
    let shown = spaces.iter().filter(|space| space.is_served || metric.name == OF_UNSERVED);
    let of_space = |space: &OpenSpace| {
        let samples = (metric.samples)(&space.stats).into_iter();
        let own = [("cache", space.namespace.clone()), ("number", space.folder.clone())];
        let named =
            move |sample: Sample| Sample { labels: own.iter().cloned().chain(sample.labels).collect(), ..sample };
        let has_device = space.stats.tier(Tier::Device).slots > 0;
        let is_shown = |sample: &Sample| has_device || !sample.labels.iter().any(of_device);
        samples.filter(is_shown).map(named).collect::<Vec<_>>()
    };
    Metric { name: metric.name, help: metric.help, samples: shown.flat_map(of_space).collect() }
}
