//! A service's metrics in Prometheus's text format.

use std::fmt::Write as _;

use super::figures::Metric;

/// The type of what [`text`] returns.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The text, one metric after the other.
pub fn text(metrics: &[Metric]) -> String {
    let mut page = String::new();
    for metric in metrics {
        let name = metric.name;
        let kind = metric.kind().name();
        // Writing to a String cannot fail.
        let _ = writeln!(page, "# HELP {name} {}\n# TYPE {name} {kind}", metric.help);
        for sample in &metric.samples {
            let labels: Vec<String> =
                sample.labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
            let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
            let _ = writeln!(page, "{name}{}{labels} {}", sample.suffix, sample.value);
        }
    }
    page
}

/// A label's value between its quotes.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use kvhoist::{BlockKey, Cache, Config, DirectIo, DiskPath, Stats, block_on, internals::machine::DriveWear};
    use kvhoist_service::{ServiceStatus, internals::OpenSpace};

    use super::*;
    use crate::http::{drives::Drive, figures::collect};

    fn of(namespace: &str, folder: &str, is_served: bool, stats: Stats) -> OpenSpace {
        OpenSpace { namespace: namespace.to_owned(), folder: folder.to_owned(), is_served, stats }
    }

    #[test]
    fn a_space_has_figures_of_a_device_if_it_is_for_one() {
        let of_gpu = serde_json::json!({
            "tiers": {"device": {"slots": 1}}, "copies": {"cuda": {"batches": 3}}, "device_retired": "it has stopped",
        });
        let of_gpu: Stats = serde_json::from_value(of_gpu).expect("figures");
        let spaces = [of("a", "space-1", true, Stats::default()), of("b", "space-2", true, of_gpu)];
        let text = text(&collect(&ServiceStatus::default(), &spaces, &[]));
        for line in [
            r#"kvhoist_copies_total{cache="b",number="space-2",engine="cuda"} 3"#,
            r#"kvhoist_retired{cache="b",number="space-2",tier="device",reason="it has stopped"} 1"#,
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
        let is_of_device = |line: &str| line.contains("space-1") && (line.contains("device") || line.contains("cuda"));
        assert!(!text.lines().any(is_of_device), "it is no space for a GPU");
    }

    #[test]
    fn every_sample_has_its_labels_and_no_text_of_a_client_ends_them() {
        let place = tempfile::tempdir().expect("a directory");
        let on_disk = Config::default().disks(vec![DiskPath::with_blocks(place.path(), 8)]).direct_io(DirectIo::Prefer);
        let cache = block_on(Cache::open(on_disk.block_bytes(4096).host_blocks(4))).expect("a cache");
        block_on(cache.store(&BlockKey::new([1; 32]), None, &[1; 4096])).expect("stored");
        block_on(cache.fetch(&BlockKey::new([1; 32]))).expect("fetched").expect("there");
        let mut stats = cache.stats();
        block_on(cache.close()).expect("closed");
        (stats.misses, stats.storage) = (7, "blocking".into());
        (stats.io_threads, stats.write_budget) = (4, Some(1 << 39));
        stats.disk_read_only = Some("EIO\non \"sda\"".into());
        stats.writes_over_budget = 2;
        let mut damaged = Stats::default();
        damaged.disk_retired = Some("no superblock".into());
        let spaces = [
            of("a\"} 1\\", "space-1", true, stats),
            of("b", "space-2", true, Stats::default()),
            of("c", "space-3", false, damaged),
        ];
        let worn: DriveWear = DriveWear::new("nvme0n1", 25, 512_000, 13_149);
        let drive = |path: &str, name: &str, wear| Drive { path: path.into(), name: name.into(), wear };
        let drives = [drive("/a", "nvme0n1", Ok(worn)), drive("/b", "", Err("it may not be asked".into()))];
        let text = text(&collect(&ServiceStatus::default(), &spaces, &drives));
        let own = r#"cache="a\"} 1\\",number="space-1""#;
        for line in [
            format!("kvhoist_misses_total{{{own}}} 7"),
            format!("kvhoist_hits_total{{{own},tier=\"host\"}} 1"),
            format!("kvhoist_free_slots{{{own},tier=\"host\"}} 3"),
            format!(r#"kvhoist_read_only{{{own},tier="disk",reason="EIO\non \"sda\""}} 1"#),
            format!(r#"kvhoist_retired{{{own},tier="disk",reason=""}} 0"#),
            format!(r#"kvhoist_writes_declined_total{{{own},reason="budget"}} 2"#),
            format!("kvhoist_io_threads{{{own}}} 4"),
            format!("kvhoist_write_budget_bytes{{{own}}} {}", 1u64 << 39),
            r#"kvhoist_io_threads{cache="b",number="space-2"} 0"#.to_owned(),
            format!("kvhoist_movement_seconds_bucket{{{own},route=\"host_to_disk\",le=\"+Inf\"}} 1"),
            format!("kvhoist_movement_seconds_count{{{own},route=\"host_to_disk\"}} 1"),
            "# TYPE kvhoist_movement_seconds histogram".to_owned(),
            "kvhoist_service_spaces 0".to_owned(),
            r#"kvhoist_drive_used{path="/a",drive="nvme0n1"} 0.25"#.to_owned(),
            r#"kvhoist_drive_years_left{path="/a",drive="nvme0n1"} 4.5"#.to_owned(),
            r#"kvhoist_drive_written_bytes_total{path="/a",drive="nvme0n1"} 512000"#.to_owned(),
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
        let of_damaged: Vec<&str> = text.lines().filter(|line| line.contains("space-3")).collect();
        let retired = r#"kvhoist_retired{cache="c",number="space-3",tier="disk",reason="no superblock"} 1"#;
        assert_eq!(of_damaged, [retired], "nothing else is known of a space that is not served");
        let budgets = text.lines().filter(|line| line.starts_with("kvhoist_write_budget_bytes")).count();
        assert_eq!(budgets, 1, "a space without a budget has no figure");
        assert!(!text.contains("path=\"/b\""), "a drive that does not answer has no figure");
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let name = line.split(['{', ' ']).next().expect("a name");
            let name = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
            assert!(text.contains(&format!("# TYPE {name} ")), "{name}");
        }
    }
}
