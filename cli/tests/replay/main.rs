//! `kvhoist replay` as a person runs it.

mod policies;
#[path = "../../../tests/common/skip.rs"]
mod skip;
mod traces;

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{FileExt, PermissionsExt},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use kvhoist::{Cache, Config, DirectIo, DiskPath, block_on};
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

/// Each begins with an empty store, although the ids of both are the same, and each has its progress.
#[test]
fn several_traces_are_replayed_one_after_another() {
    let dir = directory();
    let (trace, plot) = (small_trace(dir.path()), dir.path().join("plot.svg"));
    let other = dir.path().join("other.jsonl");
    fs::write(&other, "{\"hash_ids\": [0, 1]}\n{\"hash_ids\": [0, 1, 2]}\n").expect("write");
    let [trace, other, plot] = [&trace, &other, &plot].map(|path| path.to_str().expect("UTF-8"));
    // One request at a time: the second of `other` finds what the first has stored.
    let args = ["--trace", trace, "--trace", other, "--block-bytes", "8KiB", "--disk-blocks", "500", "--plot", plot];
    let args = [&args[..], &["--in-flight", "1"]].concat();
    let found = report(&args);
    let figures = found["traces"].as_array().expect("traces").iter().map(|trace| {
        assert_eq!(trace["verification_failures"], 0);
        (trace["trace"].as_str().expect("a name"), trace["references"].as_u64(), trace["hits"].as_u64())
    });
    assert_eq!(figures.collect::<Vec<_>>(), [("trace.jsonl", Some(480), Some(240)), ("other.jsonl", Some(5), Some(2))]);
    assert_eq!(fs::read_to_string(plot).expect("the plot").matches("<g ").count(), 2);

    let shown = replay_to(&[&["replay"][..], &args].concat(), Stdio::piped(), Stdio::piped());
    let [table, said] = [&shown.stdout, &shown.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    assert!(shown.status.success(), "{said}");
    assert_eq!(table.matches("verification failures             0").count(), 2, "{table}");
    assert!(said.contains("trace.jsonl (trace 1 of 2)") && said.contains("120/120 requests"), "{said}");
    assert!(said.contains("other.jsonl (trace 2 of 2)") && said.contains("2/2 requests"), "{said}");
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
    assert!(svg.contains(">200</text>") && !svg.contains(">250</text>"), "round marks: {svg}");
    assert!(table.lines().all(|line| line.chars().count() <= 80), "no number wraps on a terminal: {table}");
    let left: Vec<_> = fs::read_dir(env!("CARGO_TARGET_TMPDIR")).expect("a directory").flatten().collect();
    assert!(!left.iter().any(|entry| entry.file_name().to_string_lossy().contains(&output_marker())), "{left:?}");
}

/// What a store of this very process would be called; none may stay behind.
fn output_marker() -> String {
    format!("kvhoist-replay-{}", std::process::id())
}

#[test]
fn what_the_end_writes_is_counted() {
    let dir = directory();
    let trace = small_trace(dir.path());
    let trace = trace.to_str().expect("UTF-8");
    let args = ["--trace", trace, "--block-bytes", "8KiB", "--disk-blocks", "1000", "--device-blocks", "0"];
    let written =
        |policy| report(&[&args[..], &["--write-policy", policy]].concat())["tiers"]["disk"]["bytes_in"].clone();
    // Host memory has room for all of them.
    assert_eq!(written("write_back"), written("write_through"));
    assert!(written("write_back").as_u64().is_some_and(|bytes| bytes >= 240 * 8192), "{}", written("write_back"));
}

#[test]
fn a_file_of_settings_is_taken_as_it_is_but_for_the_flags() {
    let dir = directory();
    let trace = small_trace(dir.path());
    let file = dir.path().join("settings.json");
    let settings = serde_json::json!({
        "path": dir.path().join("store"), "capacity": "16MiB", "host_bytes": "1MiB", "block_bytes": "8KiB",
        "write_policy": "by_value", "drive_writes_per_day": 1.0, "drive_bytes": "1TiB", "device": "simulated",
        "remote": "redis://127.0.0.1:1/0",
    });
    fs::write(&file, settings.to_string()).expect("written");
    let (trace, file) = (trace.to_str().expect("UTF-8"), file.to_str().expect("UTF-8"));
    let output = replay(&["--trace", trace, "--config", file, "--write-budget", "2TiB"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("the remote store of --config is left out"), "{said}");
}

#[test]
fn wrong_input_is_one_line_and_status_2() {
    let dir = directory();
    let path = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_owned();
    let good = "{\"hash_ids\": [1, 2]}\n";
    fs::write(path("cut.jsonl"), format!("{good}{good}{{\"hash_ids\": [1,")).expect("write");
    fs::write(path("good.jsonl"), good).expect("write");
    fs::write(path("empty.jsonl"), "").expect("write");
    fs::write(path("foreign"), "this is no store, and must stay as it is").expect("write");
    fs::set_permissions(path("foreign"), fs::Permissions::from_mode(0o600)).expect("chmod");
    std::os::unix::fs::symlink(path("foreign"), path("link")).expect("link");
    fs::write(path("small.json"), r#"{"host_bytes": "1KiB"}"#).expect("write");
    fs::write(path("workers.json"), r#"{"workers": 1000}"#).expect("write");
    let cases: &[(&[&str], &str)] = &[
        (&["--block-bytes", "0"], "--block-bytes"),
        (&["--block-bytes", "64XB"], "64KiB"),
        (&["--block-bytes", "-1"], "-1"),
        (&["--block-bytes", "2GiB"], "--block-bytes: found 2147483648"),
        (&["--host-blocks", "0"], "--host-blocks: found 0"),
        (&["--host-blocks", "-5"], "-5"),
        (&["--in-flight", "0"], "in-flight"),
        (&["--disk-blocks", "2000000000"], "lower `--disk-blocks`"),
        (&["--write-policy", "sometimes"], "write_through"),
        (&["--policy", "fifo"], "lru"),
        (&["--trace", &path("missing.jsonl")], "missing.jsonl"),
        (&["--trace", dir.path().to_str().expect("UTF-8")], "directory"),
        (&["--trace", &path("cut.jsonl")], "line 3"),
        (&["--trace", &path("empty.jsonl")], "no request"),
        (&["--path", &path("no/such/place")], "correct `--path`"),
        (&["--disk-blocks", "1", "--path", &path("a"), "--path", &path("b")], "--disk-blocks: found 1 for 2 paths"),
        (&["--trace", "missing", "--host-bytes", "1KiB"], "--host-bytes: found 1024 bytes"),
        (&["--capacity", "1KiB"], "--capacity: found 1024 bytes"),
        (&["--capacity", "9TiB", "--block-bytes", "4096"], "larger blocks make use of more"),
        (&["--host-bytes", "1MiB", "--host-blocks", "5"], "--host-blocks"),
        (&["--speed", "0"], "--speed"),
        (&["--config", &path("foreign")], "foreign: found no JSON (expected ident at line 1"),
        (&["--config", &path("small.json")], "small.json: host_bytes: found 1024 bytes"),
        (&["--config", &path("small.json"), "--host-bytes", "2KiB"], "kvhoist: --host-bytes: found 2048 bytes"),
        (&["--config", &path("workers.json")], "workers.json: workers: found 1000"),
        (&["--path", &path("foreign")], "kvhoist did not write"),
        (&["--path", &path("link")], "symbolic link"),
        (&["--path", "/dev/null"], "block device"),
        (&["--trace", "missing", "--plot", &path("plot.png")], ".svg"),
        (&["--plot", &path("no/such/plot.svg")], "plot.svg"),
        (&["--trace", &path("good.jsonl"), "--trace", &path("good.jsonl"), "--path", &path("a")], "one store"),
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
    let (trace, place) = (trace.to_str().expect("UTF-8"), dir.path().join("s"));
    let base = ["--trace", trace, "--path", place.to_str().expect("UTF-8"), "--block-bytes"];
    report(&[&base[..], &["8KiB", "--disk-blocks", "100"]].concat());
    let store = place.join("kvhoist.store");
    let before = fs::read(&store).expect("the store");
    for (block_bytes, flag, size) in
        [("16KiB", "--disk-blocks", "100"), ("8KiB", "--disk-blocks", "200"), ("8KiB", "--capacity", "9MiB")]
    {
        let output = replay(&[&base[..], &[block_bytes, flag, size]].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), stderr.lines().count()), (Some(2), 1), "{stderr}");
        assert!(stderr.contains("expected") && !stderr.contains("disks"), "{stderr}");
        let other = if flag == "--capacity" { "--disk-blocks" } else { "--capacity" };
        assert!(!stderr.contains(other), "in the words of the flag that was given: {stderr}");
        assert!(block_bytes != "16KiB" || stderr.contains("set `--block-bytes` to 8192, or remove"), "{stderr}");
    }
    assert!(fs::read(&store).expect("the store") == before, "a refused store is untouched");
    // An engine's is not to be removed for a replay.
    let path = dir.path().join("llama");
    fs::create_dir(&path).expect("made");
    let config = Config::default().block_bytes(8 << 10).host_blocks(1).namespace("llama").direct_io(DirectIo::Prefer);
    let engines = block_on(Cache::open(config.disks(vec![DiskPath::with_blocks(&path, 100)]))).expect("a cache");
    block_on(engines.close()).expect("closed");
    let path = path.to_str().expect("UTF-8");
    let output = replay(&["--trace", trace, "--path", path, "--block-bytes", "8KiB", "--disk-blocks", "100"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("`namespace` = \"llama\", expected a store of a replay"), "{stderr}");
    assert!(stderr.ends_with("; choose another `--path`\n") && output.status.code() == Some(2), "{stderr}");
}

/// A run with its standard output and errors at these places. Without warnings, such as that of a small RLIMIT_MEMLOCK.
fn replay_to(args: &[&str], stdout: Stdio, stderr: Stdio) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvhoist"));
    command.env("TMPDIR", env!("CARGO_TARGET_TMPDIR")).env("KVHOIST_LOG", "error").args(args);
    command.stdout(stdout).stderr(stderr).spawn().expect("the command runs").wait_with_output().expect("it ends")
}

fn full() -> Stdio {
    fs::File::options().write(true).open("/dev/full").expect("Linux has one").into()
}

#[test]
fn a_report_that_cannot_be_written_is_a_failure_and_a_reader_that_has_gone_is_none() {
    let dir = directory();
    let (trace, store) = (small_trace(dir.path()), dir.path().join("s"));
    let store = store.to_str().expect("UTF-8");
    let replay = ["replay", "--quiet", "--trace", trace.to_str().expect("UTF-8"), "--path", store];
    let replay = [&replay[..], &["--block-bytes", "8KiB", "--disk-blocks", "500"]].concat();
    let commands: [&[&str]; 6] = [
        &[&replay[..], &["--json"]].concat(),
        &replay,
        &["inspect", store],
        &["verify", "--quiet", "--json", store],
        &["--help"],
        &["replay", "--help"],
    ];
    for args in commands {
        let output = replay_to(args, full(), Stdio::piped());
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{args:?}: {said}");
        assert!(said.starts_with("kvhoist: standard output: "), "{said}");
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = replay_to(args, writer.into(), Stdio::piped());
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), &*said), (Some(0), ""), "{args:?}");
    }
    // Nothing can be said there: the status says it.
    let output = replay_to(&["replay", "--nonsense"], Stdio::piped(), full());
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn an_old_plot_is_replaced_by_a_whole_one_and_by_nothing_else() {
    let dir = directory();
    let (trace, plot) = (small_trace(dir.path()), dir.path().join("plot.svg"));
    fs::write(&plot, "the old plot").expect("written");
    let plot_args = ["--plot", plot.to_str().expect("UTF-8"), "--block-bytes", "8KiB", "--disk-blocks", "500"];
    let trace_args = ["--trace", trace.to_str().expect("UTF-8")];
    for wrong in [["--trace", "/nonexistent"], ["--host-blocks", "0"], ["--path", "/dev/null"], ["--in-flight", "0"]] {
        let output = replay(&[&plot_args[..], &wrong].concat());
        assert_eq!(output.status.code(), Some(2), "{wrong:?}");
        assert_eq!(fs::read_to_string(&plot).expect("there"), "the old plot", "{wrong:?}");
    }
    let output = replay(&[&plot_args[..], &trace_args].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(fs::read_to_string(&plot).expect("there").starts_with("<svg"));
    assert_eq!(fs::read_dir(dir.path()).expect("a directory").count(), 2, "the trace and the plot");
}

#[test]
fn paths_with_escapes_drive_no_terminal() {
    let dir = directory();
    let evil = dir.path().join("a\u{1b}]0;title\u{7}\u{1b}[31m\u{9b}2J\nb");
    let evil = evil.to_str().expect("UTF-8");
    let svg = format!("{evil}/x.svg");
    let quiet = |text: &[u8]| {
        let text = String::from_utf8(text.to_vec()).expect("UTF-8");
        assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
        text
    };
    for args in [
        &["replay", "--quiet", "--trace", evil][..],
        &["replay", "--quiet", "--plot", evil],
        &["replay", "--quiet", "--plot", &svg],
        &["replay", "--quiet", "--path", &svg],
        &["replay", "--quiet", evil],
        &["replay", "--quiet", "--block-bytes", evil],
        &["bench", "disk", "--path", evil],
        &["inspect", evil],
        &["verify", evil],
    ] {
        let output = replay_to(args, Stdio::piped(), Stdio::piped());
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        let said = quiet(&output.stderr);
        assert_eq!(said.lines().count(), 1, "{args:?}: {said}");
        // clap drops escape sequences of the arguments that it refuses itself.
        let by_clap = said.contains("try '--help'");
        assert!(said.contains("\\u{1b}]0;title\\u{7}") || by_clap, "{args:?}: {said}");
    }
    let report = quiet(&replay_to(&["doctor", "--path", evil], Stdio::piped(), Stdio::piped()).stdout);
    assert!(report.contains("\\u{1b}]0;title\\u{7}"), "{report}");
    let trace = small_trace(dir.path());
    let made = ["replay", "--quiet", "--trace", trace.to_str().expect("UTF-8"), "--block-bytes", "8KiB"];
    let made = [&made[..], &["--disk-blocks", "500", "--path", evil]].concat();
    for args in [&made[..], &["inspect", evil], &["verify", "--quiet", evil]] {
        let output = replay_to(args, Stdio::piped(), Stdio::piped());
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", quiet(&output.stderr));
        let said = quiet(&output.stdout);
        assert!(args[0] == "replay" || said.contains("\\u{1b}]0;title\\u{7}"), "{said}");
    }
}

#[test]
fn absurd_numbers_are_refused_in_a_line() {
    for args in [
        &["replay", "--quiet", "--block-bytes", "18446744073709551615"][..],
        &["replay", "--quiet", "--block-bytes", "16777215T"],
        &["replay", "--quiet", "--block-bytes", "1GiB", "--host-blocks", "4294967295"],
        &["replay", "--quiet", "--block-bytes", "1GiB", "--device", "simulated", "--device-blocks", "4294967295"],
        &["replay", "--quiet", "--block-bytes", "1GiB", "--disk-blocks", "4294967295"],
        &["replay", "--quiet", "--in-flight", "18446744073709551615"],
        &["replay", "--quiet", "--seed", "99999999999999999999"],
        &["bench", "disk", "--quiet", "--bytes", "18446744073709551615"],
        &["bench", "disk", "--quiet", "--rounds", "18446744073709551615"],
        &["bench", "store", "--quiet", "--in-flight", "18446744073709551615"],
        &["bench", "store", "--quiet", "--block-bytes", "18446744073709551615"],
        &["bench", "copy", "--batch-bytes", "18446744073709551615"],
        &["bench", "copy", "--rounds", "18446744073709551615"],
        &["bench", "copy", "--engine", "gdr", "--batch-bytes", "18446744073709551615"],
        &["verify", "--depth", "4294967295", "/dev/null"],
        &["inspect", "--list", "18446744073709551615", "/dev/null"],
    ] {
        let output = replay_to(args, Stdio::piped(), Stdio::piped());
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), said.lines().count()), (Some(2), 1), "{args:?}: {said}");
    }
}

#[test]
fn checksum_failures_are_in_the_table_and_a_warning_names_the_drive_once() {
    let dir = directory();
    let (trace, store) = (small_trace(dir.path()), dir.path().join("s"));
    let store = store.to_str().expect("UTF-8");
    let args = ["--trace", trace.to_str().expect("UTF-8"), "--path", store, "--block-bytes", "8KiB"];
    // One request at a time, so that a block is asked for once while it is bad.
    let args = [&args[..], &["--disk-blocks", "500", "--device-blocks", "0", "--in-flight", "1"]].concat();
    assert_eq!(report(&args)["checksum_failures"], 0);
    let inspected = replay_to(&["inspect", "--json", store], Stdio::piped(), Stdio::piped());
    let inspected: Value = serde_json::from_slice(&inspected.stdout).expect("one JSON object");
    let data = inspected["members"][0]["data_offset"].as_u64().expect("a number");
    let file = fs::File::options().write(true).open(Path::new(store).join("kvhoist.store")).expect("the store");
    for slot in 0..500 {
        file.write_all_at(b"spoiled", data + slot * 8192 + 100).expect("written");
    }
    let output = replay(&args);
    let (table, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    let failures = table.lines().find_map(|line| line.strip_prefix("checksum failures")).expect("a line of its own");
    assert_eq!(failures.trim(), "240", "every block that was stored: {table}");
    let warnings: Vec<&str> = said.lines().filter(|line| line.contains("quarantined")).collect();
    assert!(warnings.len() == 1 && warnings[0].contains(store), "{said}");
}
