//! The command as a whole: help, versions, terminals, signals, settings, and the end of a store.

#[path = "command/wipe.rs"]
mod wipe;

use std::{
    fs,
    io::{Read, Write},
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
    path::Path,
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use serde_json::Value;

fn kvhoist(args: &[&str]) -> Output {
    command(args).output().expect("the command runs")
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvhoist"));
    command.args(args).stdin(Stdio::null()).env("TMPDIR", env!("CARGO_TARGET_TMPDIR"));
    command
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8")
}

fn shown(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a temporary directory")
}

fn object(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", text(&output.stderr)))
}

/// Small tiers, so that a run is short.
const SMALL: [&str; 8] =
    ["--block-bytes", "4KiB", "--host-blocks", "64", "--device-blocks", "0", "--disk-blocks", "256"];

fn replay<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&["replay", "--quiet", "--json"], &SMALL[..], more].concat()
}

#[test]
fn a_command_without_its_arguments_prints_its_help_and_fails() {
    for args in [&[][..], &["bench"], &["verify"], &["inspect"], &["serve"], &["wipe"]] {
        let output = kvhoist(args);
        assert_eq!((output.status.code(), text(&output.stdout)), (Some(2), ""), "{args:?}");
        let help = kvhoist(&[args, &["--help"]].concat());
        assert_eq!(help.status.code(), Some(0), "{args:?}");
        // The short help: the same up to paragraphs that only the long one has.
        let usage = text(&output.stderr).lines().find(|line| line.starts_with("Usage: ")).expect("a line of usage");
        assert!(text(&help.stdout).contains(usage), "{args:?}: {usage}");
        for said in [text(&output.stderr), text(&help.stdout)] {
            assert!(said.contains("Exit status:") && said.contains("130  interrupted"), "{args:?}: {said}");
            assert!(!args.is_empty() || said.starts_with("Tiered cache"), "{said}");
        }
    }
}

#[test]
fn every_command_tells_its_exit_statuses() {
    let commands = [
        &["replay"][..],
        &["doctor"],
        &["inspect"],
        &["verify"],
        &["wipe"],
        &["serve"],
        &["status"],
        &["top"],
        &["bench", "disk"],
        &["bench", "store"],
        &["bench", "copy"],
        &["space", "rm"],
        &["completions"],
        &["man"],
    ];
    for command in commands {
        let help = kvhoist(&[command, &["--help"]].concat());
        assert!(help.status.success() && text(&help.stdout).contains("130  interrupted"), "{command:?}");
    }
}

#[test]
fn help_is_as_wide_as_the_terminal() {
    for command in ["replay", "doctor", "verify", "bench"] {
        let args = [command, "--help"];
        for columns in [70, 100] {
            let output = self::command(&args)
                .env("COLUMNS", columns.to_string())
                .stderr(Stdio::null())
                .output()
                .expect("it runs");
            let help = text(&output.stdout).split("Exit status:").next().expect("options");
            let widest = help.lines().map(|line| line.chars().count()).max().expect("lines");
            assert!(widest <= columns && widest > columns / 2, "{command} at {columns}: {widest}\n{help}");
        }
    }
}

#[test]
fn the_version_names_the_commit() {
    let output = kvhoist(&["--version"]);
    let version = text(&output.stdout).trim();
    let expected = concat!("kvhoist ", env!("CARGO_PKG_VERSION"));
    let git =
        Command::new("git").args(["rev-parse", "--short=12", "HEAD"]).current_dir(env!("CARGO_MANIFEST_DIR")).output();
    let is_checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.git").exists();
    match git.ok().filter(|git| git.status.success() && is_checkout) {
        Some(git) => assert_eq!(version, format!("{expected} ({})", text(&git.stdout).trim())),
        None => assert!(version.starts_with(expected), "{version}"),
    }
}

/// A terminal of 80 columns: what the command sees, and what a person would.
fn terminal() -> (OwnedFd, OwnedFd) {
    let (mut ours, mut theirs) = (-1, -1);
    let size = libc::winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the out pointers are of live integers, the size is read, the others may be null.
    let opened = unsafe {
        libc::openpty(&raw mut ours, &raw mut theirs, std::ptr::null_mut(), std::ptr::null(), &raw const size)
    };
    assert_eq!(opened, 0, "a terminal: {}", std::io::Error::last_os_error());
    // SAFETY: both are open, and owned by nothing else.
    unsafe { (OwnedFd::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) }
}

/// What is on an endless screen after these bytes, and the longest line that ever was. Knows what a bar of progress
/// sends: text, returns, erasing, cursor up and down.
fn screen(bytes: &str) -> (Vec<String>, usize) {
    let (mut lines, mut row, mut column, mut widest) = (vec![Vec::new()], 0usize, 0usize, 0);
    let mut rest = bytes.chars().peekable();
    while let Some(c) = rest.next() {
        match c {
            '\r' => column = 0,
            '\n' => row += 1,
            '\u{1b}' => {
                assert_eq!(rest.next(), Some('['), "a sequence of the terminal's");
                let mut number = String::new();
                while let Some(digit) = rest.next_if(|c| c.is_ascii_digit() || *c == ';' || *c == '?') {
                    number.push(digit);
                }
                let count = number.parse().unwrap_or(1usize);
                match rest.next().expect("the end of a sequence") {
                    'A' => row = row.saturating_sub(count),
                    'B' => row += count,
                    'K' => lines[row].clear(),
                    'J' => lines[row].truncate(column),
                    'm' | 'h' | 'l' => {}
                    other => panic!("an unknown sequence: {number}{other}"),
                }
            }
            c => {
                if lines[row].len() <= column {
                    lines[row].resize(column + 1, ' ');
                }
                lines[row][column] = c;
                column += 1;
                widest = widest.max(column);
            }
        }
        if lines.len() <= row {
            lines.resize(row + 1, Vec::new());
        }
    }
    (lines.into_iter().map(|line| line.into_iter().collect::<String>().trim_end().to_owned()).collect(), widest)
}

#[test]
fn progress_fits_80_columns_and_leaves_nothing_behind() {
    let (ours, theirs) = terminal();
    let dir = directory();
    let args = [&["replay", "--path", shown(dir.path())], &SMALL[..]].concat();
    // The last copies of the terminal's other side are the child's.
    let child = command(&args).env("TERM", "xterm").stderr(theirs).stdout(Stdio::null()).spawn();
    let mut child = child.expect("the command runs");
    let mut seen = Vec::new();
    // The end of a terminal whose other side is closed is an error.
    drop(fs::File::from(ours.as_fd().try_clone_to_owned().expect("a copy")).read_to_end(&mut seen));
    assert!(child.wait().expect("it ends").success(), "{}", text(&seen));
    let (lines, widest) = screen(text(&seen));
    assert!(text(&seen).contains("/1000 requests") && widest <= 80, "{widest} columns");
    assert!(lines.iter().all(String::is_empty), "left on the screen: {lines:?}");
}

#[test]
fn a_second_signal_leaves_no_temporary_store() {
    let place = directory();
    // Nobody reads what it says, so that it does not end by the first.
    let (_unread, mut full) = std::io::pipe().expect("a pipe");
    // SAFETY: a plain system call on a descriptor that is open.
    let bytes = unsafe { libc::fcntl(full.as_raw_fd(), libc::F_SETPIPE_SZ, 4096) };
    full.write_all(&vec![b' '; usize::try_from(bytes).expect("bytes")]).expect("room");
    let mut child = command(&[&["replay"][..], &SMALL].concat())
        .env("TMPDIR", place.path())
        .env("KVHOIST_LOG", "off")
        .stdout(Stdio::null())
        .stderr(full)
        .spawn()
        .expect("the command runs");
    let has_store = |folder: fs::DirEntry| folder.path().join("kvhoist.store").exists();
    let give_up = Instant::now() + Duration::from_secs(60);
    while !fs::read_dir(&place).expect("there").any(|entry| entry.is_ok_and(has_store)) {
        assert!(child.try_wait().expect("a child").is_none() && Instant::now() < give_up, "it opens a store");
        std::thread::yield_now();
    }
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: a plain system call; the child was not waited for, so the number is its own.
        assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
    }
    assert_eq!(child.wait().expect("it ends").code(), Some(130));
    assert_eq!(fs::read_dir(&place).expect("there").count(), 0, "nothing is left");
}

/// Where it is no terminal, a line each.
#[test]
fn long_waits_are_announced() {
    let dir = directory();
    let (trace, store) = (dir.path().join("trace"), dir.path().join("store"));
    fs::write(&trace, TRACE).expect("written");
    let said = |args: &[&str]| text(&command(args).output().expect("it runs").stderr).to_owned();
    let args = [&["replay", "--trace", shown(&trace), "--path", shown(&store)], &SMALL[..]].concat();
    let replayed = said(&args);
    assert!(replayed.starts_with(&format!("reading {}\n", shown(&trace))), "{replayed}");
    assert!(replayed.ends_with("\nwriting what is in memory only\n"), "{replayed}");
    let verified = said(&["verify", shown(&store)]);
    assert_eq!(verified.matches("reading the records of the store\n").count(), 1, "{verified}");
    assert_eq!(said(&[&args[..], &["--quiet"]].concat()), "");
}

const TRACE: &str = "{\"timestamp\": 1000, \"hash_ids\": [1, 2]}\n{\"timestamp\": 61000, \"hash_ids\": [1, 2, 3]}\n";

#[test]
fn a_trace_comes_from_standard_input_and_at_its_own_pace() {
    let with_input = |args: &[&str]| {
        let mut command = command(&replay(args));
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = child.expect("the command runs");
        child.stdin.take().expect("a pipe").write_all(TRACE.as_bytes()).expect("it reads");
        let output = child.wait_with_output().expect("it ends");
        assert!(output.status.success(), "{}", text(&output.stderr));
        object(&output)
    };
    let timed = with_input(&["--trace", "-", "--speed", "100"]);
    assert_eq!((&timed["references"], &timed["hits"]), (&5.into(), &2.into()));
    assert!(timed["seconds"].as_f64().is_some_and(|seconds| seconds >= 0.6), "a minute at 100 times: {timed}");
    assert_eq!((&timed["complete"], &timed["requests"]), (&true.into(), &2.into()));
    assert!(with_input(&["--trace", "-"])["seconds"].as_f64().is_some_and(|seconds| seconds < 60.0));
}

/// Waits until the process has handlers for all signals that end it.
fn wait_for_handlers(child: &mut Child) {
    let give_up = Instant::now() + Duration::from_secs(60);
    loop {
        let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap_or("0");
        let mask = u64::from_str_radix(mask.trim(), 16).expect("a mask");
        let signals = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];
        if signals.iter().all(|signal| mask & (1 << (signal - 1)) != 0) {
            return;
        }
        assert!(child.try_wait().expect("a child").is_none(), "it has ended");
        assert!(Instant::now() < give_up, "signals have no handler: {mask:x}");
        std::thread::yield_now();
    }
}

fn send(child: &Child, signal: i32) {
    // SAFETY: a plain system call; the child was not waited for, so the number is its own.
    assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
}

#[test]
fn an_interrupted_replay_prints_what_it_has_and_cleans_up() {
    let (dir, temporary) = (directory(), directory());
    let trace = dir.path().join("trace");
    // The second request comes tomorrow.
    fs::write(&trace, TRACE.replace("61000", "86400000")).expect("written");
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        let mut child = command(&replay(&["--trace", shown(&trace), "--speed", "1"]));
        let child = child.env("TMPDIR", temporary.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = child.spawn().expect("the command runs");
        wait_for_handlers(&mut child);
        send(&child, signal);
        let output = child.wait_with_output().expect("it ends");
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(130), "kvhoist: interrupted\n"), "{signal}");
        let report = object(&output);
        assert_eq!((&report["complete"], &report["requests_in_trace"]), (&false.into(), &2.into()));
        assert!(report["requests"].as_u64().is_some_and(|requests| requests < 2), "{report}");
        assert_eq!(temporary.path().read_dir().expect("a directory").count(), 0, "signal {signal} left a store");
    }
}

#[test]
fn a_path_that_does_not_exist_is_made_a_directory() {
    let dir = directory();
    let (trace, store) = (dir.path().join("trace"), dir.path().join("new"));
    fs::write(&trace, TRACE).expect("written");
    let args = replay(&["--trace", shown(&trace), "--path", shown(&store)]);
    // What is refused leaves no directory either.
    let refused = kvhoist(&[&args[..], &["--plot", "/nonexistent/a.svg"]].concat());
    assert_eq!((refused.status.code(), store.exists()), (Some(2), false), "{}", text(&refused.stderr));
    // The requests may overlap: the second one hits what the first has stored by then.
    assert!(object(&kvhoist(&args))["hits"].as_u64().is_some_and(|hits| hits <= 2));
    assert!(store.join("kvhoist.store").is_file());
    assert_eq!(object(&kvhoist(&args))["hits"], 5, "the second run starts warm");
}

#[test]
fn settings_come_from_a_file_and_flags_go_first() {
    let dir = directory();
    let (trace, file) = (dir.path().join("trace"), dir.path().join("settings.json"));
    fs::write(&trace, TRACE).expect("written");
    let paths = [dir.path().join("a"), dir.path().join("b")];
    let settings = serde_json::json!({
        "path": paths, "capacity": "3 MiB", "host_bytes": "40 kB", "block_bytes": "8KiB", "write_policy": "write_back",
        "deadline_ms": 9000, "module_path": "kvhoist.sglang",
    });
    fs::write(&file, settings.to_string()).expect("written");
    let args = ["replay", "--quiet", "--json", "--trace", shown(&trace), "--config", shown(&file)];
    let report = object(&kvhoist(&args));
    let slots = |report: &Value| ["device", "host", "disk"].map(|tier| report["tiers"][tier]["slots"].as_u64());
    // Half of the bytes on each path, and 1 MiB of records: 64 slots.
    assert_eq!(slots(&report), [Some(0), Some(4), Some(128)]);
    assert!(paths.iter().all(|path| path.join("kvhoist.store").is_file()));
    let elsewhere = dir.path().join("c");
    let other = [&args[..], &["--path", shown(&elsewhere), "--host-blocks", "7"]].concat();
    let other = object(&kvhoist(&[&other[..], &["--capacity", "2MiB"]].concat()));
    assert_eq!(slots(&other), [Some(0), Some(7), Some(128)]);
}

#[test]
fn wrong_flags_are_refused_in_one_sentence_that_names_them() {
    for (args, said) in [
        (&["serve", "--path", "x"][..], "not provided: --capacity <SIZE>, --host-bytes <SIZE>; for"),
        (&["replay", "--disk-blocks", "-1"], "invalid value '-1' for '--disk-blocks <N>'"),
        (&["replay", "--policy", "best"], "for '--policy <POLICY>'; expected one of lru, rb, rb_refuse; for"),
        (&["replay", "--disk-blocks", "many"], "for '--disk-blocks <N>': expected a whole number, 0 or more; for"),
        (&["top", "--count", "99999999999999999999"], "for '--count <N>': expected a smaller number; for"),
        (&["serve", "--capcity", "1G"], "found; a similar argument exists: '--capacity'; for the flags, try '--help'"),
    ] {
        let output = kvhoist(args);
        assert_eq!((output.status.code(), text(&output.stderr).lines().count()), (Some(2), 1), "{args:?}");
        assert!(text(&output.stderr).contains(said), "{args:?}: {}", text(&output.stderr));
    }
}

#[test]
fn a_log_filter_that_selects_nothing_is_refused() {
    let run =
        |filter: &str| command(&["inspect", "/nonexistent"]).env("KVHOIST_LOG", filter).output().expect("it runs");
    for filter in ["bogus", "warn,bogus", "kvhoist=bogus"] {
        let output = run(filter);
        assert_eq!(output.status.code(), Some(2), "{filter}");
        let said = text(&output.stderr);
        assert!(said.contains("KVHOIST_LOG: found") && said.contains("expected off, error"), "{filter}: {said}");
    }
    for filter in ["off", "info", "warn,kvhoist_service=debug"] {
        assert!(text(&run(filter).stderr).contains("/nonexistent: found no store"), "{filter}");
    }
}
