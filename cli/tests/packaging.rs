//! The packages: what they start exists, and what they contain works.

#[path = "../../tests/common/skip.rs"]
mod skip;

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").to_owned()
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).expect("readable")
}

fn run(command: &mut Command) -> Output {
    let output = command.output().expect("the command runs");
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8")
}

/// Links of pages in a folder, and below it, to files that are not there.
fn links_to_nothing(pages: &Path) -> Vec<String> {
    let mut dead = Vec::new();
    let mut folders = vec![pages.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder").map(|entry| entry.expect("an entry").path()) {
            if entry.is_dir() {
                folders.push(entry);
            } else if entry.extension().is_some_and(|end| end == "md") {
                let page = fs::read_to_string(&entry).expect("UTF-8");
                let targets = page.match_indices("](").map(|(at, _)| page[at + 2..].split([')', '#']).next());
                for target in targets.flatten().filter(|target| !target.is_empty() && !target.contains("://")) {
                    if !folder.join(target).exists() {
                        dead.push(format!("{}: {target}", entry.display()));
                    }
                }
            }
        }
    }
    dead
}

/// Whether a tool is here; says that the test is skipped where it is not.
fn has(tool: &str, package: &str) -> bool {
    let found = Command::new(tool).arg("--version").output().is_ok();
    if !found {
        skip::skipped(format_args!("no {tool}; install it with: apt-get install {package}"));
    }
    found
}

/// Words that begin with `--`, up to what ends a flag in shell, YAML and JSON.
fn flags(text: &str) -> BTreeSet<&str> {
    let ends = |c: char| !(c.is_ascii_alphanumeric() || c == '-');
    text.match_indices("--").filter_map(|(at, _)| text[at..].split(ends).next()).filter(|flag| flag.len() > 2).collect()
}

/// The part of a file from one text to the next.
fn part<'a>(text: &'a str, from: &str, to: &str) -> &'a str {
    let (_, rest) = text.split_once(from).unwrap_or_else(|| panic!("{from} is in the file"));
    rest.split_once(to).map_or(rest, |(part, _)| part)
}

#[test]
fn every_package_starts_the_service_with_flags_that_it_knows() {
    let help = run(Command::new(env!("CARGO_BIN_EXE_kvhoist")).args(["serve", "--help"])).stdout;
    let help = String::from_utf8(help).expect("UTF-8");
    let known = flags(&help);
    let (unit, default) = (read("packaging/systemd/kvhoist.service"), read("packaging/systemd/kvhoist.default"));
    let (container, pods) = (read("packaging/container/Containerfile"), read("packaging/kubernetes/kvhoist.yaml"));
    let install = read("docs/install.md");
    let starts = [
        part(&unit, "ExecStart=/usr/bin/kvhoist serve", "\n"),
        &default,
        part(&container, "CMD [\"serve\"", "]"),
        part(&pods, "args:", "securityContext"),
        part(&install, "KVHOIST_FLAGS=", "\n"),
        part(&install, " serve --socket", "\n"),
    ];
    for start in starts {
        let unknown: Vec<_> = flags(start).into_iter().filter(|flag| !known.contains(flag)).collect();
        assert!(unknown.is_empty(), "{unknown:?} in {start}");
    }
    assert!(flags(starts[3]).len() >= 4, "the flags of the pods are found: {}", starts[3]);
}

#[test]
fn the_unit_is_one_that_systemd_reads() {
    if !has("systemd-analyze", "systemd") {
        return;
    }
    let place = tempfile::tempdir().expect("a directory");
    let unit = place.path().join("kvhoist.service");
    let text = read("packaging/systemd/kvhoist.service");
    fs::write(&unit, text.replace("/usr/bin/kvhoist", env!("CARGO_BIN_EXE_kvhoist"))).expect("written");
    let verified = run(Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&unit));
    let said = String::from_utf8(verified.stderr).expect("UTF-8");
    let about_it: Vec<_> = said.lines().filter(|line| line.contains("kvhoist")).collect();
    assert!(about_it.is_empty(), "{said}");
}

#[test]
fn the_unit_is_started_again_until_it_starts_unless_its_flags_are_wrong() {
    let unit = read("packaging/systemd/kvhoist.service");
    let (head, service) = unit.split_once("\n[Service]\n").expect("two parts");
    for line in
        ["After=local-fs.target network-online.target", "Wants=network-online.target", "StartLimitIntervalSec=0"]
    {
        assert!(head.lines().any(|found| found == line), "{line}");
    }
    for line in ["Restart=on-failure", "RestartSec=5"] {
        assert!(service.lines().any(|found| found == line), "{line}");
    }
    let never =
        format!("\n  {}    wrong or missing flag or setting", part(service, "\nRestartPreventExitStatus=", "\n"));
    let help = run(Command::new(env!("CARGO_BIN_EXE_kvhoist")).args(["serve", "--help"])).stdout;
    assert!(text(&help).contains(&never), "{never}: {}", text(&help));
}

#[test]
fn a_restart_of_the_unit_leaves_the_folder_that_containers_mount() {
    let unit = read("packaging/systemd/kvhoist.service");
    let folder = part(&unit, "\nRuntimeDirectory=", "\n");
    assert!(part(&unit, " --socket ", " ").starts_with(&format!("/run/{folder}/")), "its socket is there");
    assert!(unit.contains("\nRuntimeDirectoryPreserve=yes\n"), "systemd deletes it at each stop otherwise");
}

#[test]
fn the_containers_profile_allows_the_ring() {
    let profile: Value = serde_json::from_str(&read("packaging/container/seccomp.json")).expect("JSON");
    assert_eq!(profile["defaultAction"], "SCMP_ACT_ERRNO");
    let allowed = profile["syscalls"][0]["names"].as_array().expect("names");
    let names: BTreeSet<_> = allowed.iter().filter_map(Value::as_str).collect();
    assert_eq!(names.len(), allowed.len(), "every name once");
    for name in [
        "io_uring_setup",
        "io_uring_enter",
        "io_uring_register",
        "memfd_create",
        "fallocate",
        "flock",
        "madvise",
        "cachestat",
    ] {
        assert!(names.contains(name), "{name}");
    }
    for name in ["mount", "ptrace", "bpf", "unshare", "kexec_load"] {
        assert!(!names.contains(name), "{name}");
    }
}

#[test]
fn a_debian_package_holds_a_command_that_runs_and_its_unit() {
    if !has("dpkg-deb", "dpkg") || !has("objdump", "binutils") {
        return;
    }
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let build = root().join("packaging/debian/build");
    // By somebody whose files are nobody else's.
    let mut build_privately = Command::new("sh");
    build_privately.args(["-c", "umask 077; exec \"$0\" \"$@\""]).arg(build).env("DEB_COMPRESSION", "none");
    let built = run(build_privately.arg(env!("CARGO_BIN_EXE_kvhoist")).arg(place.path())).stdout;
    let package = String::from_utf8(built).expect("UTF-8");
    let package = package.trim();
    let unpacked = place.path().join("root");
    run(Command::new("dpkg-deb").args(["--extract", package]).arg(&unpacked));
    let version = run(Command::new(unpacked.join("usr/bin/kvhoist")).arg("--version")).stdout;
    let control = run(Command::new("dpkg-deb").args(["--field", package, "Version", "Depends"])).stdout;
    let (version, control) = (String::from_utf8_lossy(&version), String::from_utf8_lossy(&control));
    assert!(control.contains(env!("CARGO_PKG_VERSION")) && version.contains(env!("CARGO_PKG_VERSION")), "{control}");
    assert!(control.contains("libc6 (>= 2."), "{control}");
    let unit = fs::read_to_string(unpacked.join("usr/lib/systemd/system/kvhoist.service")).expect("the unit");
    let flags = part(&unit, "EnvironmentFile=", "\n");
    assert!(unpacked.join(flags.trim_start_matches('/')).exists(), "{flags}");
    for completions in [
        "bash-completion/completions/kvhoist",
        "zsh/vendor-completions/_kvhoist",
        "fish/vendor_completions.d/kvhoist.fish",
    ] {
        let script = fs::read_to_string(unpacked.join("usr/share").join(completions)).expect("completions");
        assert!(script.contains("inspect"), "{completions}");
    }
    for page in ["kvhoist.1.gz", "kvhoist-serve.1.gz"] {
        assert!(unpacked.join("usr/share/man/man1").join(page).exists(), "{page}");
    }
    // For everybody to read, whatever the umask of the builder.
    let listed = run(Command::new("dpkg-deb").args(["--contents", package])).stdout;
    for line in text(&listed).lines() {
        let (mode, is_folder) = (&line[..10], line.starts_with('d'));
        let executable = line.contains("/usr/bin/");
        let wanted = if is_folder {
            "drwxr-xr-x"
        } else if executable {
            "-rwxr-xr-x"
        } else {
            "-rw-r--r--"
        };
        assert_eq!(mode, wanted, "{line}");
    }
    assert_eq!(links_to_nothing(&unpacked.join("usr/share/doc/kvhoist")), Vec::<String>::new());
    let named = part(&unit, "Documentation=file:", "\n");
    assert!(unpacked.join(named.trim_start_matches('/')).exists(), "{named}");
    let conffiles = run(Command::new("dpkg-deb").args(["--info", package, "conffiles"])).stdout;
    assert_eq!(String::from_utf8_lossy(&conffiles).trim(), flags, "what an operator changed outlives an upgrade");
}

/// A service that cannot start yet, as its drive is not mounted, leaves no package half-configured.
#[test]
fn an_upgrade_does_not_wait_for_the_service() {
    let place = tempfile::tempdir().expect("a directory");
    let (calls, system) = (place.path().join("calls"), place.path().join("system"));
    fs::create_dir(&system).expect("made");
    let double = |name: &str, ends: &str| {
        let path = place.path().join(name);
        fs::write(&path, format!("#!/bin/sh\necho {name} \"$@\" >>{}\n{ends}\n", calls.display())).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("set");
    };
    double("systemd-sysusers", "");
    double("systemctl", "test \"$1\" = daemon-reload");
    let script = place.path().join("postinst");
    let text = read("packaging/debian/postinst");
    assert!(text.contains("/run/systemd/system"), "a machine with systemd");
    fs::write(&script, text.replace("/run/systemd/system", &system.display().to_string())).expect("written");
    let path = format!("{}:/usr/bin:/bin", place.path().display());
    run(Command::new("sh").arg(script).arg("configure").env("PATH", path));
    let calls = fs::read_to_string(calls).expect("called");
    assert!(calls.contains("systemctl try-restart --no-block kvhoist.service"), "{calls}");
}

#[test]
fn the_manifests_and_the_pages_name_one_image() {
    let version = format!("kvhoist:{}", env!("CARGO_PKG_VERSION"));
    let (container, pods) = (read("packaging/container/Containerfile"), read("packaging/kubernetes/kvhoist.yaml"));
    let install = read("docs/install.md");
    let named = |text: &str, before: &str| -> Vec<String> {
        let after = text.match_indices(before).map(|(at, _)| text[at + before.len()..].split_whitespace().next());
        after.flatten().map(str::to_owned).collect()
    };
    let images = [named(&container, " -t "), named(&install, " -t "), named(&pods, "image: ")].concat();
    assert!(images.len() >= 4 && images.iter().all(|image| *image == version), "{version}: {images:?}");
    // What the line that starts it names.
    assert!(install.contains(&format!("    {version} serve --socket")), "{install}");
}
