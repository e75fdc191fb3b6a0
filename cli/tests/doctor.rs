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
    for args in
        [&["doctor", "--path", "/nonexistent"][..], &["doctor", "--want", "wings"], &["bench", "copy", "--rounds", "0"]]
    {
        let output = kvhoist(args);
        let said = text(&output.stderr);
        assert_eq!((output.status.code(), said.lines().count()), (Some(2), 1), "{args:?}: {said}");
    }
}

#[test]
fn a_benchmark_without_a_device_says_why() {
    let output = kvhoist(&["bench", "copy"]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("libcuda.so was not found") || said.contains("cuInit") || said.contains("no GPU"), "{said}");
}
