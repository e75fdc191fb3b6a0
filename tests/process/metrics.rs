//! What a recorder of the `metrics` crate gets from the caches of a process.

use kvhoist::{BlockKey, Cache, Config, DirectIo, DiskPath, Durations, Route, WritePolicy, block_on};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};

const BLOCK_BYTES: usize = 4096;

#[test]
fn counters_and_gauges_are_those_of_each_cache() {
    // For the whole process: the counters of a cache are acquired on its own thread.
    let durations = Matcher::Full("kvhoist_movement_seconds".to_owned());
    let prometheus = PrometheusBuilder::new().set_buckets_for_metric(durations, &Durations::BOUNDS_SECONDS);
    let prometheus = prometheus.expect("buckets").install_recorder().expect("the first of this process");
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let config = |name: &str| Config::default().block_bytes(BLOCK_BYTES).host_blocks(8).namespace(name);
    let on_disk = config("disk")
        .disks(vec![DiskPath::with_blocks(directory.path(), 16)])
        .direct_io(DirectIo::Prefer)
        .write_policy(WritePolicy::ByValue)
        .write_budget(1 << 40);
    let disk = block_on(Cache::open(on_disk)).expect("a cache");
    let memory = block_on(Cache::open(config("memory"))).expect("a cache");
    for (cache, blocks) in [(&disk, 2), (&memory, 3)] {
        for n in 0..blocks {
            block_on(cache.store(&BlockKey::new([n; 32]), None, &[n; BLOCK_BYTES])).expect("stored");
        }
        cache.export_gauges();
    }
    block_on(memory.remove(&BlockKey::new([0; 32]))).expect("removed");
    memory.export_gauges();
    let page = prometheus.render();
    for line in [
        r#"kvhoist_stores_total{cache="disk"} 2"#,
        r#"kvhoist_stores_total{cache="memory"} 3"#,
        r#"kvhoist_resident_blocks{cache="disk",tier="host"} 2"#,
        r#"kvhoist_resident_blocks{cache="memory",tier="host"} 2"#,
        r#"kvhoist_free_slots{cache="memory",tier="host"} 6"#,
        r#"kvhoist_slots{cache="disk",tier="disk"} 16"#,
        r#"kvhoist_retired{cache="disk",tier="disk"} 0"#,
        r#"kvhoist_write_budget_bytes{cache="disk"} 1099511627776"#,
        r#"kvhoist_io_threads{cache="memory"} 0"#,
        r#"kvhoist_gdr_in_use{cache="disk"} 0"#,
        r#"kvhoist_gdr_in_use{cache="memory"} 0"#,
    ] {
        assert!(page.lines().any(|found| found == line), "{line} in\n{page}");
    }
    assert!(!page.contains(r#"kvhoist_write_budget_bytes{cache="memory"}"#), "it has no budget");
    // The recorder and the figures count the same movements in the same buckets.
    block_on(disk.sync()).expect("written");
    let (stats, page) = (disk.stats(), prometheus.render());
    let written = stats.route_durations(Route::HostToDisk);
    assert_eq!(written.count(), 2);
    let mut below = 0;
    for (end, count) in written.buckets() {
        below += count;
        let end = end.map_or("+Inf".to_owned(), |end| end.to_string());
        let line =
            format!(r#"kvhoist_movement_seconds_bucket{{cache="disk",route="host_to_disk",le="{end}"}} {below}"#);
        assert!(page.lines().any(|found| found == line), "{line} in\n{page}");
    }
    block_on(disk.close()).expect("closed");
    block_on(memory.close()).expect("closed");
}
