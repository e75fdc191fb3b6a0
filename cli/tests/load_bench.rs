//! `kvhoist load-bench`: which interpreter it becomes.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command};

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8")
}

#[test]
fn load_bench_is_the_python_package_s() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::create_dir(folder.path().join("bin")).expect("a folder");
    let python = folder.path().join("bin/python");
    let script = |has: u8| {
        let text = format!("#!/bin/sh\nif [ \"$1\" = -c ]; then exit {has}; fi\necho \"$@\"\nexit 7\n");
        fs::write(&python, text).expect("a script");
        fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).expect("it can be run");
    };
    let run = |name: &str, place: &Path, args: &[&str]| {
        let mut asked = Command::new(env!("CARGO_BIN_EXE_kvhoist"));
        asked.arg("load-bench").args(args);
        asked.env_remove("KVHOIST_PYTHON").env_remove("VIRTUAL_ENV").env(name, place).output().expect("it runs")
    };
    script(0);
    for (name, place) in [("KVHOIST_PYTHON", python.as_path()), ("VIRTUAL_ENV", folder.path())] {
        for (args, said) in [
            (&["a b", "--device", "cpu"][..], "-m kvhoist load-bench a b --device cpu\n"),
            (&["--help"], "-m kvhoist load-bench --help\n"),
        ] {
            let output = run(name, place, args);
            assert_eq!((output.status.code(), text(&output.stdout)), (Some(7), said), "{name}: {args:?}");
        }
    }
    script(1);
    for (place, found) in
        [(python.as_path(), "without the package kvhoist"), (Path::new("/nonexistent"), "found no /non")]
    {
        let output = run("KVHOIST_PYTHON", place, &["a"]);
        let said = text(&output.stderr);
        assert_eq!((output.status.code(), said.lines().count()), (Some(2), 1), "{said}");
        assert!(said.contains(found) && said.contains("name another by KVHOIST_PYTHON"), "{said}");
    }
}
