//! A service's figures in Prometheus's text format.

use std::fmt::{Display, Write as _};

use kvhoist::{
    Tier,
    service::protocol::{ClientStatus, ServiceStatus, SpaceStats, SpaceStatus},
};

use super::drives::Drive;

/// The type of what [`text`] returns.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A name, what it says, and where the figure is.
type OfSpace = (&'static str, &'static str, fn(&SpaceStats) -> u64);

/// Likewise, for each tier.
type OfTier = (&'static str, &'static str, fn(&SpaceStats, Tier) -> u64);

/// Figures of an open space, under the names that the library and the Python package have for those of a cache.
const OF_SPACES: [OfSpace; 9] = [
    ("kvhoist_misses_total", "Blocks fetched or loaded that no tier had", |stats| stats.misses),
    ("kvhoist_stores_total", "Blocks stored", |stats| stats.stores),
    ("kvhoist_stores_known_total", "Stores of blocks that were resident already", |stats| stats.stores_known),
    ("kvhoist_writes_refused_total", "Writes that the disk tier did not take", |stats| stats.writes_refused),
    ("kvhoist_checksum_failures_total", "Blocks read from disk whose checksum did not match", |stats| {
        stats.checksum_failures
    }),
    ("kvhoist_read_errors_total", "Reads of the disk tier that failed", |stats| stats.read_errors),
    ("kvhoist_write_errors_total", "Writes to the disk tier that failed", |stats| stats.write_errors),
    ("kvhoist_quarantined_total", "Disk slots taken out of use", |stats| stats.quarantined),
    ("kvhoist_service_straight_bytes_total", "Bytes that went straight between disk and clients' memory", |stats| {
        stats.straight_bytes
    }),
];

/// Figures of the tiers of an open space.
const OF_TIERS: [OfTier; 4] = [
    ("kvhoist_hits_total", "Blocks fetched or loaded that were found, by the tier that had them", |stats, tier| {
        stats.tier(tier).hits
    }),
    ("kvhoist_evictions_total", "Slots given up to make room, by tier", |stats, tier| stats.tier(tier).evictions),
    ("kvhoist_resident_blocks", "Blocks in a tier", |stats, tier| stats.tier(tier).resident),
    ("kvhoist_slots", "Slots of a tier", |stats, tier| stats.tier(tier).slots),
];

/// Tiers that a service has.
const TIERS: [(&str, Tier); 2] = [("host", Tier::Host), ("disk", Tier::Disk)];

/// The text, one metric after the other.
pub fn text(status: &ServiceStatus, drives: &[Drive]) -> String {
    let mut page = Page(String::new());
    of_service(&mut page, status);
    of_drives(&mut page, drives);
    let open: Vec<_> = status.spaces.iter().filter_map(|space| Some((labels(space), space.stats.as_ref()?))).collect();
    for (name, help, of) in OF_TIERS {
        page.metric(name, help);
        for ((own, stats), (tier_name, tier)) in open.iter().flat_map(|space| TIERS.map(|tier| (space, tier))) {
            page.sample(name, &format!("{own},tier=\"{tier_name}\""), of(stats, tier));
        }
    }
    for (name, help, of) in OF_SPACES {
        page.metric(name, help);
        open.iter().for_each(|(own, stats)| page.sample(name, own, of(stats)));
    }
    page.metric("kvhoist_read_only", "1 while a tier takes no blocks, and why");
    for (own, stats) in &open {
        let trouble = escaped(&stats.disk_trouble);
        let sample = format!("{own},tier=\"disk\",reason=\"{trouble}\"");
        page.sample("kvhoist_read_only", &sample, u64::from(!trouble.is_empty()));
    }
    page.0
}

fn of_service(page: &mut Page, status: &ServiceStatus) {
    page.metric("kvhoist_service_info", "Always 1: the service's version");
    page.sample("kvhoist_service_info", &format!("version=\"{}\"", escaped(&status.version)), 1);
    let sum = |of: fn(&ClientStatus) -> u64| status.clients.iter().map(of).sum();
    let figures = [
        ("kvhoist_service_draining", "1 while the service takes no more work", u64::from(status.draining)),
        ("kvhoist_service_disk_bytes", "Disk for all spaces", status.capacity_bytes),
        ("kvhoist_service_disk_left_bytes", "Disk that no space has", status.capacity_left),
        ("kvhoist_service_host_bytes", "Host memory for the blocks of all spaces", status.host_bytes),
        ("kvhoist_service_host_left_bytes", "Host memory that no space has", status.host_left),
        ("kvhoist_service_cut_off_total", "Connections that were cut off", status.cut_off),
        ("kvhoist_service_spaces", "Spaces, closed ones included", status.spaces.len() as u64),
        // The one that asks is no client.
        ("kvhoist_service_clients", "Connections", (status.clients.len() as u64).saturating_sub(1)),
        ("kvhoist_service_requests_in_flight", "Requests that are not answered yet", sum(|one| one.requests.into())),
        ("kvhoist_service_lent_bytes", "Memory that clients have lent", sum(|one| one.region_bytes)),
        ("kvhoist_service_bytes_in_flight", "Bytes of blocks that move now", sum(|one| one.bytes_in_flight)),
    ];
    for (name, help, figure) in figures {
        page.metric(name, help);
        page.sample(name, "", figure);
    }
}

fn of_drives(page: &mut Page, drives: &[Drive]) {
    let name = "kvhoist_drive_used";
    page.metric(name, "Share of the life of an NVMe drive that is used, by path");
    for drive in drives {
        let labels = format!("path=\"{}\",drive=\"{}\"", escaped(&drive.path), escaped(&drive.name));
        drive.used.iter().for_each(|used| page.sample(name, &labels, used));
    }
}

/// What tells spaces apart, under the labels that caches have: a space is one, and its folder is its own.
fn labels(space: &SpaceStatus) -> String {
    format!("cache=\"{}\",number=\"{}\"", escaped(&space.namespace), escaped(&space.folder))
}

/// A label's value between its quotes.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

struct Page(String);

impl Page {
    fn metric(&mut self, name: &str, help: &str) {
        let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
        // Writing to a String cannot fail.
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &str, figure: impl Display) {
        let _ = match labels {
            "" => writeln!(self.0, "{name} {figure}"),
            labels => writeln!(self.0, "{name}{{{labels}}} {figure}"),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sample_has_its_labels_and_no_text_of_a_client_ends_them() {
        let mut stats = SpaceStats { misses: 7, disk_trouble: "EIO\non \"sda\"".into(), ..SpaceStats::default() };
        stats.tiers[Tier::Disk as usize].hits = 5;
        let (namespace, folder) = ("a\"} 1\\".to_owned(), "space-1".to_owned());
        let open = SpaceStatus { namespace, folder, stats: Some(stats), ..SpaceStatus::default() };
        let status = ServiceStatus { spaces: vec![open, SpaceStatus::default()], ..ServiceStatus::default() };
        let worn = Drive { path: "/a".into(), name: "nvme0n1".into(), used: Some(0.25), wear: String::new() };
        let silent = Drive { path: "/b".into(), name: String::new(), used: None, wear: String::new() };
        let text = text(&status, &[worn, silent]);
        let own = r#"cache="a\"} 1\\",number="space-1""#;
        for line in [
            format!("kvhoist_misses_total{{{own}}} 7"),
            format!("kvhoist_hits_total{{{own},tier=\"disk\"}} 5"),
            format!(r#"kvhoist_read_only{{{own},tier="disk",reason="EIO\non \"sda\""}} 1"#),
            "kvhoist_service_spaces 2".to_owned(),
            r#"kvhoist_drive_used{path="/a",drive="nvme0n1"} 0.25"#.to_owned(),
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
        let samples = text.lines().filter(|line| line.starts_with("kvhoist_misses_total")).count();
        assert_eq!(samples, 1, "a closed space has no figures");
        assert!(!text.contains("path=\"/b\""), "a drive that says nothing has no figure");
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let name = line.split(['{', ' ']).next().expect("a name");
            assert!(text.contains(&format!("# TYPE {name} ")), "{name}");
        }
    }
}
