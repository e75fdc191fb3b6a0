//! `kvhoist replay` as a person runs it.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::Value;

fn replay(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvhoist"));
    // The store of a run without --path: on a real file system, so that direct I/O is what it is in production.
    command.env("TMPDIR", env!("CARGO_TARGET_TMPDIR")).arg("replay").arg("--quiet").args(args);
    command.output().expect("the command runs")
}

fn report(args: &[&str]) -> Value {
    let output = replay(&[args, &["--json"]].concat());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a temporary directory")
}

/// A trace of 40 sessions of 3 requests; each adds 2 blocks.
fn small_trace(dir: &Path) -> PathBuf {
    let mut text = String::new();
    for turn in 1..=3u64 {
        for session in 0..40u64 {
            let ids: Vec<u64> = (0..turn * 2).map(|i| session * 100 + i).collect();
            text +=
                &format!("{{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": {ids:?}}}\n");
        }
    }
    let path = dir.join("trace.jsonl");
    fs::write(&path, text).expect("write the trace");
    path
}

#[test]
fn every_byte_of_a_trace_is_verified_and_a_kept_store_starts_warm() {
    let dir = directory();
    let trace = small_trace(dir.path());
    let store = dir.path().join("store");
    fs::create_dir(&store).expect("a directory");
    for policy in ["write_through", "write_back"] {
        let args = ["--trace", trace.to_str().expect("UTF-8"), "--block-bytes", "8KiB", "--host-blocks", "32"];
        let args = [&args[..], &["--device-blocks", "16", "--disk-blocks", "1000", "--write-policy", policy]].concat();
        let cold = report(&args);
        // Per session: 2 blocks, then 4 of which 2 are known, then 6 of which 4 are.
        assert_eq!((&cold["references"], &cold["hits"]), (&480.into(), &240.into()), "{policy}");
        assert_eq!(cold["verification_failures"], 0);
        assert_eq!(cold["storage"], "uring");
        let tiers = cold["tiers"].as_object().expect("tiers");
        let hits: u64 = tiers.values().map(|tier| tier["hits"].as_u64().expect("a number")).sum();
        assert_eq!(hits, 240, "hits of the tiers add up");
    }
    let args = ["--trace", trace.to_str().expect("UTF-8"), "--block-bytes", "8KiB", "--path"];
    let args = [&args[..], &[store.to_str().expect("UTF-8"), "--disk-blocks", "1000"]].concat();
    assert_eq!(report(&args)["hits"], 240);
    assert_eq!(report(&args)["hits"], 480, "the second run starts warm");
}

#[test]
fn the_built_in_workload_runs_anywhere_and_draws_its_plot() {
    let dir = directory();
    let plot = dir.path().join("hits.svg");
    let args = ["--block-bytes", "4KiB", "--disk-blocks", "2000", "--plot", plot.to_str().expect("UTF-8")];
    let output = replay(&args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let table = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(table.contains("verification failures             0"), "{table}");
    let svg = fs::read_to_string(plot).expect("the plot");
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>") && svg.matches("<path").count() == 5);
    let left: Vec<_> = fs::read_dir(env!("CARGO_TARGET_TMPDIR")).expect("a directory").flatten().collect();
    assert!(!left.iter().any(|entry| entry.file_name().to_string_lossy().contains(&output_marker())), "{left:?}");
}

/// What a store of this very process would be called; none may stay behind.
fn output_marker() -> String {
    format!("kvhoist-replay-{}", std::process::id())
}

#[test]
fn wrong_input_is_one_line_and_status_2() {
    let dir = directory();
    let path = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_owned();
    let good = "{\"hash_ids\": [1, 2]}\n";
    fs::write(path("cut.jsonl"), format!("{good}{good}{{\"hash_ids\": [1,")).expect("write");
    fs::write(path("empty.jsonl"), "").expect("write");
    fs::write(path("foreign"), "this is no store, and must stay as it is").expect("write");
    fs::set_permissions(path("foreign"), fs::Permissions::from_mode(0o600)).expect("chmod");
    std::os::unix::fs::symlink(path("foreign"), path("link")).expect("link");
    let cases: &[(&[&str], &str)] = &[
        (&["--block-bytes", "0"], "block_bytes"),
        (&["--block-bytes", "64KB"], "64KiB"),
        (&["--block-bytes", "-1"], "-1"),
        (&["--block-bytes", "2GiB"], "block_bytes"),
        (&["--host-blocks", "0"], "host_blocks"),
        (&["--host-blocks", "-5"], "-5"),
        (&["--in-flight", "0"], "in-flight"),
        (&["--disk-blocks", "2000000000"], "bytes available"),
        (&["--write-policy", "sometimes"], "write_through"),
        (&["--policy", "fifo"], "lru"),
        (&["--trace", &path("missing.jsonl")], "missing.jsonl"),
        (&["--trace", dir.path().to_str().expect("UTF-8")], "directory"),
        (&["--trace", &path("cut.jsonl")], "line 3"),
        (&["--trace", &path("empty.jsonl")], "no request"),
        (&["--path", &path("no/such/place")], "no directory"),
        (&["--path", &path("foreign")], "kvhoist did not write"),
        (&["--path", &path("link")], "symbolic link"),
        (&["--path", "/dev/null"], "block device"),
        (&["--plot", &path("plot.png")], ".svg"),
        (&["--plot", &path("no/such/plot.svg")], "plot.svg"),
        (&["--nonsense"], "nonsense"),
    ];
    for (args, wanted) in cases {
        let output = replay(args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{args:?}: {stderr}");
        assert!(stderr.starts_with("kvhoist: ") && stderr.contains(wanted), "{args:?}: {stderr}");
        assert!(output.stdout.is_empty());
    }
    assert_eq!(fs::read_to_string(path("foreign")).expect("still there"), "this is no store, and must stay as it is");
}

#[test]
fn a_store_of_another_shape_is_refused_and_untouched() {
    let dir = directory();
    let trace = small_trace(dir.path());
    let (trace, store) = (trace.to_str().expect("UTF-8"), dir.path().join("s"));
    let base = ["--trace", trace, "--path", store.to_str().expect("UTF-8"), "--block-bytes"];
    report(&[&base[..], &["8KiB", "--disk-blocks", "100"]].concat());
    let before = fs::read(&store).expect("the store");
    for (block_bytes, disk_blocks) in [("16KiB", "100"), ("8KiB", "200")] {
        let output = replay(&[&base[..], &[block_bytes, "--disk-blocks", disk_blocks]].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), stderr.lines().count()), (Some(2), 1), "{stderr}");
        assert!(stderr.contains("expected"), "{stderr}");
    }
    assert!(fs::read(&store).expect("the store") == before, "a refused store is untouched");
}

/// Exact LRU of one cache of `slots` blocks: what an ideal replay hits.
fn exact_lru_hits(trace: &str, slots: usize) -> (u64, u64) {
    let (mut by_id, mut by_time) = (BTreeMap::new(), BTreeMap::new());
    let (mut hits, mut references, mut now) = (0, 0, 0u64);
    for line in trace.lines() {
        let request: Value = serde_json::from_str(line).expect("a request");
        for id in request["hash_ids"].as_array().expect("a list") {
            let id = id.as_u64().expect("a number");
            now += 1;
            references += 1;
            if let Some(used) = by_id.insert(id, now) {
                by_time.remove(&used);
                hits += 1;
            } else if by_time.len() == slots {
                let (_, coldest) = by_time.pop_first().expect("full");
                by_id.remove(&coldest);
            }
            by_time.insert(now, id);
        }
    }
    (hits, references)
}

#[test]
fn the_conversation_trace_hits_as_exact_lru_does() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/traces/conversation_trace.jsonl");
    let Ok(trace) = fs::read_to_string(path) else {
        println!("SKIPPED: {path} is missing");
        return;
    };
    let slots = 9_139;
    let (hits, references) = exact_lru_hits(&trace, slots);
    let exact = hits as f64 / references as f64;
    assert!((exact - 0.1954).abs() < 0.0001, "the reference gives {exact}");
    let args = ["--trace", path, "--block-bytes", "4KiB", "--host-blocks", "1024", "--disk-blocks", "9139"];
    let report = report(&args);
    let ratio = report["hit_ratio"].as_f64().expect("a number");
    println!("exact LRU {exact:.4}, replay {ratio:.4}");
    assert_eq!(report["references"].as_u64(), Some(references));
    assert_eq!(report["verification_failures"], 0);
    assert!((ratio - exact).abs() < 0.005, "exact LRU {exact}, replay {ratio}");
}
