//! `kvhoist doctor` and `kvhoist bench`, as a person runs them on a machine without a GPU.

#[path = "../../tests/common/skip.rs"]
mod skip;

use std::{
    path::Path,
    process::{Command, Output},
};

fn kvhoist(args: &[&str]) -> Output {
    // Where there is a driver it shows no device.
    Command::new(env!("CARGO_BIN_EXE_kvhoist")).args(args).env("CUDA_VISIBLE_DEVICES", "").output().expect("it starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a temporary directory")
}

fn shown(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

#[test]
fn the_report_has_every_section_and_leaves_nothing_behind() {
    let directory = directory();
    let output = kvhoist(&["doctor", "--full", "--path", shown(directory.path()), "--want", "direct-io"]);
    let report = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{report}{}", text(&output.stderr));
    for line in [
        "system\n",
        "disk\n",
        "device\n",
        "rdma\n",
        "libibverbs",
        "routes\n",
        "kernel ",
        "  measured at ",
        "+ direct I/O ",
        "  a store there ",
        "libcuda",
    ] {
        assert!(report.contains(line), "{line:?} in {report}");
    }
    assert_eq!(directory.path().read_dir().expect("the directory").count(), 0, "nothing is left");
    assert!(report.trim_end().ends_with("verdict: no problems found"), "{report}");
}

#[test]
fn a_report_is_at_most_a_screen_and_ends_in_a_verdict() {
    let directory = directory();
    let path = shown(directory.path());
    let file = directory.path().join("file");
    std::fs::write(&file, "mine").expect("written");
    for (args, verdict) in [
        (&["--path", path, "--want", "direct-io"][..], "verdict: no problems found"),
        (&["--path", shown(&file)], "verdict: found 1 problem (path)"),
        (&["--path", "/nonexistent/kv"], "verdict: found 1 problem (path)"),
        (&["--path", path, "--want", "direct-io,cuda"], "verdict: not available on this machine: cuda"),
    ] {
        let output = kvhoist(&[&["doctor"], args].concat());
        let report = text(&output.stdout);
        assert_eq!(report.lines().last(), Some(verdict), "{report}");
        assert_eq!(output.status.success(), verdict.contains("no problems"), "{report}");
        let rows = report.lines().count();
        assert!(rows <= 24 || args.contains(&"direct-io,cuda"), "{rows} lines, and a screen has 24: {report}");
    }
}

/// The directory for temporary files is nobody's choice for a store.
#[test]
fn a_verdict_names_the_troubles_with_a_place_that_nobody_has_named() {
    let doctor = || Command::new(env!("CARGO_BIN_EXE_kvhoist"));
    let output = doctor().arg("doctor").env("TMPDIR", "/nonexistent/tmp").output().expect("it starts");
    let report = text(&output.stdout);
    let verdict = report.lines().last().expect("a verdict");
    let troubles = verdict.strip_prefix("verdict: no problems found; with --path or --config would count: ");
    assert!(troubles.is_some_and(|troubles| troubles.split(", ").any(|trouble| trouble == "path")), "{report}");
    assert!(output.status.success(), "{report}");
}

/// A drive that is full: the report of no feature, and no word of a container's profile.
#[test]
fn a_drive_without_room_is_called_that_and_nothing_else() {
    let directory = directory();
    let path = shown(directory.path());
    // A namespace of its own: the mount ends with the command.
    for args in ["--path \"$1\"", "--want ring,direct-io"] {
        let script = "mount -t tmpfs -o size=1m tmpfs \"$1\" || exit 99; export TMPDIR=\"$1\"; exec \"$0\" doctor";
        let script = format!("{script} {args} 2>&1");
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount", "sh", "-c", &script]);
        let output = command.args([env!("CARGO_BIN_EXE_kvhoist"), path]).output().expect("unshare, of util-linux");
        let said = text(&output.stdout);
        if output.status.code() == Some(99) || said.is_empty() {
            skip::skipped(format!("no file system can be mounted here: {}", text(&output.stderr).trim()));
            return;
        }
        let there = said.lines().find(|line| line.starts_with("! a store there")).unwrap_or_else(|| panic!("{said}"));
        let expected = "bytes available on tmpfs, expected room for";
        assert!(there.contains(expected) && there.contains("`capacity`"), "{said}");
        assert!(
            !said.contains("seccomp") && !said.contains("io_uring ") && !said.contains("pool of threads"),
            "{said}"
        );
        assert_eq!(output.status.code(), Some(1), "{said}");
    }
}

#[test]
fn a_folder_that_cannot_be_written_is_a_finding_in_the_report() {
    let path = "/proc/self";
    for args in
        [&["doctor", "--path", path][..], &["doctor", "--config", r#"{"path": "/proc/self", "capacity": 999999999}"#]]
    {
        let output = kvhoist(args);
        let (report, said) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(1), "{report}{said}");
        assert!(report.contains("kernel ") && report.contains("no directory can be made there ("), "{report}{said}");
        assert!(report.contains("-> look at dmesg for the drive") && !said.contains("--path"), "{said}");
    }
}

/// What the settings do not use is not missed.
#[test]
fn a_path_is_not_refused_for_a_feature_that_the_settings_leave_out() {
    let directory = directory();
    let settings = |more: serde_json::Value| {
        let mut settings = serde_json::json!({ "path": directory.path(), "capacity": "8MiB", "host_bytes": "1MiB" });
        settings.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        let output = kvhoist(&["doctor", "--json", "--config", &settings.to_string()]);
        serde_json::from_slice::<serde_json::Value>(&output.stdout).expect("JSON")["wanted"].clone()
    };
    assert_eq!(settings(serde_json::json!({})), serde_json::json!(["ring", "direct-io"]));
    assert_eq!(settings(serde_json::json!({ "direct_io": "prefer" })), serde_json::json!(["ring"]));
    assert_eq!(settings(serde_json::json!({ "storage": "blocking" })), serde_json::json!(["direct-io"]));
}

/// Without paths a service has the caches: the doctor of an engine that is its client counts no memory of its own.
#[test]
fn memory_that_nobody_opens_is_not_counted() {
    let of = |settings: &str| text(&kvhoist(&["doctor", "--json", "--config", settings]).stdout);
    assert!(!of("{}").contains("configured for the host tiers"), "{}", of("{}"));
    assert!(of(r#"{"host_bytes": "16MiB"}"#).contains("16.0 MiB are configured for the host tiers"));
}

/// Settings that no engine could open, as its operator wrote them.
#[test]
fn settings_that_cannot_work_are_named() {
    let good = |more: serde_json::Value| {
        let mut settings = serde_json::json!({ "path": "/tmp", "capacity": "1GiB" });
        settings.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        settings.to_string()
    };
    for (wrong, named) in [
        (serde_json::json!({ "capacity": "4096" }), "capacity: found 4096 bytes"),
        (serde_json::json!({ "path": "kv" }), "path: found \"kv\", expected an absolute path"),
        (serde_json::json!({ "path": ["/tmp", "/tmp/"] }), "path: found /tmp twice"),
        (serde_json::json!({ "deadline_ms": 0 }), "deadline_ms: found 0"),
        (serde_json::json!({ "write_budget": "1TiB" }), "write_budget: found 1099511627776"),
        (serde_json::json!({ "module_path": "kvhoist" }), "module_path: found \"kvhoist\""),
        (serde_json::json!({ "module_path": "kvhoist.sglang", "class_name": "X" }), "class_name: found \"X\""),
        (
            serde_json::json!({ "module_path": "kvhoist.sglang", "class_name": "HiCacheKvhoist" }),
            "interface_v1: found nothing, expected 1",
        ),
    ] {
        let output = kvhoist(&["doctor", "--config", &good(wrong)]);
        let said = text(&output.stderr);
        assert_eq!((output.status.code(), said.lines().count()), (Some(2), 1), "{said}");
        assert!(said.contains(named), "{named}: {said}");
    }
}

#[test]
fn what_is_wanted_and_missing_is_named_by_the_exit_status() {
    let directory = directory();
    let path = shown(directory.path());
    let output = kvhoist(&["doctor", "--path", path, "--want", "direct-io,cuda", "--json"]);
    assert_eq!((output.status.code(), text(&output.stderr).lines().count()), (Some(1), 1));
    assert!(text(&output.stderr).contains("not available on this machine: cuda"), "{}", text(&output.stderr));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let device = report["device"].as_array().expect("a list");
    assert!(device.iter().any(|finding| finding["there"] == false && finding["found"].is_string()), "{report}");
}

#[test]
fn a_wrong_path_is_one_line_and_status_2() {
    for args in [
        &["doctor", "--want", "wings"][..],
        &["doctor", "--ranks", "0"],
        &["bench", "copy", "--rounds", "0"],
        &["bench", "disk", "--path", "/nonexistent"],
        &["bench", "store", "--block-bytes", "5000"],
        &["bench", "disk", "--bytes", "1MiB"],
        &["bench", "disk", "--in-flight", "0"],
        // As many blocks as there is memory for.
        &["bench", "disk", "--bytes", "4MiB", "--block-bytes", "128KiB", "--in-flight", "16"],
    ] {
        let output = kvhoist(args);
        let said = text(&output.stderr);
        assert_eq!((output.status.code(), said.lines().count()), (Some(2), 1), "{args:?}: {said}");
    }
}

/// What a doctor with these settings says, and its exit status.
fn planned(directory: &Path, settings: &serde_json::Value, more: &[&str]) -> (serde_json::Value, Option<i32>, String) {
    let file = directory.join("settings.json");
    std::fs::write(&file, settings.to_string()).expect("written");
    let args = [&["doctor", "--json", "--want", "direct-io", "--config", shown(&file)], more].concat();
    let output = kvhoist(&args);
    let said = text(&output.stderr);
    (serde_json::from_slice(&output.stdout).unwrap_or_default(), output.status.code(), said)
}

#[test]
fn what_the_machine_has_no_room_for_is_told_with_what_mends_it() {
    let directory = directory();
    let missing = directory.path().join("mnt/nvme");
    let small = |path: &Path| serde_json::json!({ "path": path, "capacity": "64MiB", "host_bytes": "1 MiB" });
    let trouble = |report: &serde_json::Value, what: &str| {
        let all = report["system"].as_array().expect("a list").iter().filter(|it| it["what"] == what);
        all.filter(|it| it["trouble"] == true).map(|it| format!("{} -> {}", it["found"], it["fix"])).collect::<Vec<_>>()
    };
    let (report, ..) = planned(directory.path(), &small(directory.path()), &[]);
    assert_eq!((trouble(&report, "space"), trouble(&report, "memory")), (vec![], vec![]), "{report}");
    let huge = serde_json::json!({ "path": directory.path(), "capacity": "900TiB", "host_bytes": "900TiB" });
    let (report, status, said) = planned(directory.path(), &huge, &["--ranks", "8"]);
    // Beside them locked memory, where the user of the tests has a limit.
    assert!(status == Some(1) && said.contains("problems (memory, ") && said.contains("space)"), "{said}");
    assert!(trouble(&report, "space")[0].contains("lower capacity to "), "{report}");
    assert!(trouble(&report, "memory")[0].contains("lower host_bytes"), "{report}");
    assert!(trouble(&report, "space")[0].contains("7.0 PiB configured: 8 rank(s)"), "{report}");
    // What is not there is not looked for above, and nothing is measured in its place.
    // An engine makes the last part of a path, so that is no problem, and nothing of it is made here.
    let new = directory.path().join("new");
    let (report, ..) = planned(directory.path(), &small(&new), &[]);
    assert!(trouble(&report, "path").is_empty() && !new.exists(), "{report}");
    assert_ne!(report["disk"], serde_json::json!([]), "{report}");
    let (report, status, _) = planned(directory.path(), &small(&missing), &[]);
    assert!(status == Some(1) && trouble(&report, "path")[0].contains("mkdir -p -m 700"), "{report}");
    assert_eq!(report["disk"], serde_json::json!([]), "{report}");
    let (_, status, said) = planned(directory.path(), &serde_json::json!({ "capacity": "much" }), &[]);
    assert!(status == Some(2) && said.contains("capacity: found \"much\""), "{said}");
    assert_eq!(directory.path().read_dir().expect("the directory").count(), 1, "only the settings are left");
}

/// Every contender's row, figures that are figures, a plot, and nothing left behind.
#[test]
fn routes_are_measured_beside_the_bare_loop() {
    let directory = directory();
    let plot = directory.path().join("plot.svg");
    // Beside reads to the host there is a bare loop that verifies, too.
    let disk = [("disk to host", 3), ("disk to device", 2)];
    let store = [("host to disk", 2), ("device to disk", 2)];
    for (what, routes) in [("disk", disk), ("store", store)] {
        let mut args = vec!["bench", what, "--path", shown(directory.path()), "--bytes", "4MiB", "--rounds", "1"];
        args.extend(["--block-bytes", "64KiB,128KiB", "--in-flight", "4", "--quiet", "--json", "--plot", shown(&plot)]);
        let output = kvhoist(&args);
        let said = text(&output.stderr);
        if said.contains("io_uring") || said.contains("O_DIRECT") {
            skip::skipped(format_args!("no ring or no direct I/O here: {said}"));
            return;
        }
        assert_eq!(output.status.code(), Some(0), "{said}");
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
        let rows = report["tables"][0]["rows"].as_array().expect("rows");
        let of_a_size: Vec<_> =
            routes.into_iter().flat_map(|(route, count)| (0..count).map(move |n| (route, n))).collect();
        assert_eq!(rows.len(), 2 * of_a_size.len(), "sizes, routes, contenders: {report}");
        for (row, &(route, contender)) in rows.iter().zip(of_a_size.iter().cycle()) {
            assert_eq!(row["route"], route, "{report}");
            assert!(row["mib_per_s"].as_f64().is_some_and(|speed| speed > 0.0), "{row}");
            assert!(row["block_bytes"] == 65536 || row["block_bytes"] == 131072, "a number: {row}");
            assert!(contender > 0 || row["of_bare"] == 1.0, "the first is the bare loop: {report}");
        }
        let drawn = std::fs::read_to_string(&plot).expect("the plot");
        assert_eq!(drawn.matches("<title>").count(), rows.len(), "{drawn}");
        std::fs::remove_file(&plot).expect("the plot");
        assert_eq!(directory.path().read_dir().expect("the directory").count(), 0, "nothing is left");
    }
}

#[test]
fn a_benchmark_without_a_device_says_why() {
    let output = kvhoist(&["bench", "copy"]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("libcuda.so was not found") || said.contains("cuInit") || said.contains("no GPU"), "{said}");
}

/// The doubles of the driver's library and of libcufile, which the library's own tests use.
fn doubles(with_cufile: bool) -> tempfile::TempDir {
    let built = directory();
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/doubles");
    let all = [("cuda/libcuda.c", "libcuda.so"), ("cufile/libcufile.c", "libcufile.so.0")];
    for (source, library) in all.into_iter().take(1 + usize::from(with_cufile)) {
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-pthread", "-o"]).arg(built.path().join(library)).arg(sources.join(source));
        assert!(compiler.status().expect("Rust links with cc").success(), "{source} does not compile");
    }
    built
}

#[test]
fn the_way_between_disk_and_device_is_told_with_the_evidence_and_the_fix() {
    let (both, cuda_only) = (doubles(true), doubles(false));
    // How libcufile behaves, the exit status where it is wanted, what is found, which way bytes go, and why.
    let cases = [
        ("direct", &both, 0, "direct by nvidia-fs; libcufile.so.0 1.15: of 1 reads", "libcufile, straight into", ""),
        ("compat", &both, 1, "not used: compat mode", "through pinned host memory", "n_posix_reads 1"),
        ("record", &both, 1, "cuFileHandleRegister: 5027", "through pinned host memory", "/run/udev/data"),
        ("open", &both, 1, "cuFileDriverOpen has not returned", "through pinned host memory", "cufile.log"),
        ("direct", &cuda_only, 1, "libcufile.so was not found", "through pinned host memory", "CUDA toolkit"),
    ];
    for (mode, doubles, status, found, way, why) in cases {
        let directory = directory();
        let output = Command::new(env!("CARGO_BIN_EXE_kvhoist"))
            .args(["doctor", "--json", "--want", "cuda,cufile", "--path", shown(directory.path())])
            .env("LD_LIBRARY_PATH", doubles.path())
            .env("CUFILE_DOUBLE", mode)
            .output()
            .expect("it starts");
        let said = text(&output.stderr);
        if text(&output.stdout).contains("no direct I/O") {
            skip::skipped("no direct I/O here");
            return;
        }
        assert_eq!(output.status.code(), Some(status), "{mode}: {said}");
        assert!(status == 0 || said.contains("not available on this machine: cufile"), "{mode}: {said}");
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
        let line = |section: &str, what: &str| {
            let lines = report[section].as_array().expect("a list");
            lines.iter().find(|line| line["what"] == what).unwrap_or_else(|| panic!("no {what} in {report}")).clone()
        };
        let holds = |value: &serde_json::Value, part: &str| value.as_str().unwrap_or_default().contains(part);
        assert!(holds(&line("device", "cuFile")["found"], found), "{mode}: {report}");
        assert_eq!(line("device", "cuFile")["there"], status == 0, "{mode}: {report}");
        for what in ["disk -> device", "device -> disk"] {
            let route = line("routes", what);
            assert!(holds(&route["found"], way) || (status == 0 && what == "device -> disk"), "{mode}: {report}");
            assert!(holds(&route["fix"], why), "{mode}: {report}");
        }
        assert!(line("device", "PCI P2PDMA")["found"].is_string() && line("device", "nvidia-fs")["found"].is_string());
        assert_eq!(directory.path().read_dir().expect("the directory").count(), 0, "nothing is left");
    }
}

/// A process that finds the double of libibverbs, told to behave so.
fn with_double(words: &str, args: &[&str]) -> Output {
    let directory = directory();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/doubles/gdr/libibverbs.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O1", "-pthread", "-o"]).arg(directory.path().join("libibverbs.so.1"));
    assert!(compiler.arg(source).status().expect("Rust links with cc").success(), "the double does not compile");
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvhoist"));
    command.args(args).env("CUDA_VISIBLE_DEVICES", "").env_remove("KVHOIST_GDR");
    command.env("LD_LIBRARY_PATH", directory.path()).env("IBV_DOUBLE", words).output().expect("it starts")
}

#[test]
fn rdma_devices_are_shown_with_their_ports_and_the_self_test() {
    let directory = directory();
    let args = ["doctor", "--full", "--path", shown(directory.path()), "--want", "direct-io"];
    let report = text(&with_double("now", &args).stdout);
    for line in
        ["double0 (software)", "256 work requests", "1: active, Ethernet, MTU 2048", "::ffff:10.9.9.1 (RoCE v2)"]
    {
        assert!(report.contains(line), "{line:?} in {report}");
    }
    assert!(report.contains("the self-test copied bytes both ways (between ranges of host memory"), "{report}");
    let report = text(&with_double("down", &args).stdout);
    for line in ["1: state 1 (4 is active)", "- GDR            not used: ", "port 1 is not active"] {
        assert!(report.contains(line), "{line:?} in {report}");
    }
    let report = text(&with_double("now,lose", &args).stdout);
    assert!(report.contains("failed its self-test") && report.contains("lost bytes"), "{report}");
}

#[test]
fn copies_through_an_rdma_device_are_shown_beside_the_published_ones() {
    let args = ["bench", "copy", "--engine", "gdr", "--rounds", "1", "--batch-bytes", "1MiB"];
    let output = with_double("now", &args);
    let table = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{table}{}", text(&output.stderr));
    for part in ["soft-RoCE, correctness only", "gdr in stream order", "11.36", "7.61", "from device", "true"] {
        assert!(table.contains(part), "{part:?} in {table}");
    }
    let verified = table.lines().filter(|line| line.contains("iB ") && line.ends_with("true")).count();
    assert_eq!(verified, 8, "four sizes, both ways: {table}");
    for (words, told) in [("none", "no RDMA device"), ("down", "port 1 is not active"), ("wrong", "lost bytes")] {
        let output = with_double(words, &args);
        assert_eq!((output.status.code(), text(&output.stdout)), (Some(1), String::new()), "{words}");
        assert!(text(&output.stderr).contains(told), "{words}: {}", text(&output.stderr));
    }
}
