//! `kvhoist doctor` and `kvhoist bench`, as a person runs them on a machine without a GPU.

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
    let output = kvhoist(&["doctor", "--path", shown(directory.path()), "--want", "direct-io"]);
    let report = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{report}{}", text(&output.stderr));
    for line in
        ["system\n", "disk\n", "device\n", "routes\n", "  kernel ", "+ direct I/O ", "  a store there ", "libcuda"]
    {
        assert!(report.contains(line), "{line:?} in {report}");
    }
    assert_eq!(directory.path().read_dir().expect("the directory").count(), 0, "nothing is left");
}

#[test]
fn what_is_wanted_and_missing_is_named_by_the_exit_status() {
    let directory = directory();
    let path = shown(directory.path());
    let output = kvhoist(&["doctor", "--path", path, "--want", "direct-io,cuda", "--json"]);
    assert_eq!((output.status.code(), text(&output.stderr).lines().count()), (Some(1), 1));
    assert!(text(&output.stderr).contains("not on this machine: cuda"), "{}", text(&output.stderr));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let device = report["device"].as_array().expect("a list");
    assert!(device.iter().any(|finding| finding["there"] == false && finding["found"].is_string()), "{report}");
}

#[test]
fn a_wrong_path_is_one_line_and_status_2() {
    for args in [
        &["doctor", "--path", "/nonexistent"][..],
        &["doctor", "--want", "wings"],
        &["bench", "copy", "--rounds", "0"],
        &["bench", "disk", "--path", "/nonexistent"],
        &["bench", "store", "--block-bytes", "5000"],
        &["bench", "disk", "--bytes", "1MiB"],
        &["bench", "disk", "--in-flight", "0"],
    ] {
        let output = kvhoist(args);
        let said = text(&output.stderr);
        assert_eq!((output.status.code(), said.lines().count()), (Some(2), 1), "{args:?}: {said}");
    }
}

/// Every contender's row, figures that are figures, a plot, and nothing left behind.
#[test]
fn routes_are_measured_beside_the_bare_loop() {
    let directory = directory();
    let plot = directory.path().join("plot.svg");
    for (what, routes) in [("disk", ["disk to host", "disk to device"]), ("store", ["host to disk", "device to disk"])]
    {
        let mut args = vec!["bench", what, "--path", shown(directory.path()), "--bytes", "4MiB", "--rounds", "1"];
        args.extend(["--block-bytes", "64KiB,128KiB", "--in-flight", "4", "--quiet", "--json", "--plot", shown(&plot)]);
        let output = kvhoist(&args);
        let said = text(&output.stderr);
        if said.contains("io_uring") || said.contains("O_DIRECT") {
            println!("SKIPPED: no ring or no direct I/O here: {said}");
            return;
        }
        assert_eq!(output.status.code(), Some(0), "{said}");
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
        let rows = report["tables"][0]["rows"].as_array().expect("rows");
        assert_eq!(rows.len(), 2 * 2 * 2, "sizes, routes, contenders: {report}");
        for (row, route) in rows.iter().zip(routes.into_iter().flat_map(|route| [route; 2]).cycle()) {
            assert_eq!(row["route"], route, "{report}");
            assert!(row["MiB/s"].as_f64().is_some_and(|speed| speed > 0.0), "{row}");
        }
        assert!(rows.iter().step_by(2).all(|row| row["of bare"] == 1.0), "the first is the bare loop: {report}");
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
