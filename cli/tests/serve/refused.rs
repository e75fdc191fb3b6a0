//! What a service refuses before it has made anything, in an operator's words; and what a healthy one says.

use std::{
    fs,
    io::{BufRead, BufReader},
    net::TcpListener,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use kvhoist::block_on;
use kvhoist_service::{Client, ClientOptions};

use super::{BLOCK_BYTES, Serving, kvhoist, served, skip, status, stores, text};

/// Starts a service that must be refused with this status, and returns its one line. Nothing may be left at the socket,
/// and in `path`.
fn refused(status: i32, path: &Path, sizes: [&str; 2], more: &[&str]) -> String {
    let place = tempfile::tempdir().expect("a directory");
    let (socket, path) = (place.path().join("s").display().to_string(), path.display().to_string());
    let flags = ["serve", "--socket", &socket, "--path", &path, "--capacity", sizes[0], "--host-bytes", sizes[1]];
    let output = kvhoist(&[&flags[..], more].concat());
    let said = text(&output.stderr).to_owned();
    assert_eq!(output.status.code(), Some(status), "{said}");
    assert_eq!(said.lines().filter(|line| line.starts_with("kvhoist: ")).count(), 1, "{said}");
    let left: Vec<_> = fs::read_dir(place.path()).expect("there").map(|entry| entry.expect("one").path()).collect();
    assert!(left.is_empty(), "a refused service leaves {left:?}");
    assert!(!said.contains("os error"), "a number of the system is no message: {said}");
    said
}

#[test]
fn a_drive_that_is_not_mounted_is_no_reason_to_fill_the_root() {
    let said = refused(1, Path::new("/nonexistent/kv"), ["1GiB", "1MiB"], &[]);
    assert!(said.contains("/nonexistent/kv: found no folder /nonexistent") && said.contains("mount"), "{said}");
    assert!(!Path::new("/nonexistent").exists());
    let store = stores();
    let file = store.path().join("file");
    fs::write(&file, "mine").expect("written");
    assert!(refused(1, &file, ["1GiB", "1MiB"], &[]).contains("expected a folder"));
}

#[test]
fn wrong_places_and_sizes_are_said_in_the_words_of_the_command() {
    let (place, store) = (tempfile::tempdir().expect("a directory"), stores());
    let path = store.path().display().to_string();
    for (sizes, more, wanted) in [
        (["64MiB", "1MiB"], &["--path", &path][..], format!("--path: found {path} twice, expected each folder once")),
        (["1MiB", "1MiB"], &[], "--capacity: found 1048576 bytes, expected 1052672 bytes or more".into()),
        (["64MiB", "1MiB"], &["--region-bytes-total", "900TiB"], "--region-bytes-total: found 989560464998400".into()),
        (
            ["64MiB", "1MiB"],
            &["--share", "a"],
            "for '--share <NAME:disk=MIN..MAX,host=MIN..MAX,uid=UID>': found ".into(),
        ),
        (["64MiB", "1MiB"], &["--linger", "0"], "'--linger <SECONDS>': expected 1 to 86400".into()),
    ] {
        let said = refused(2, store.path(), sizes, more);
        assert!(said.contains(&wanted), "{wanted} in {said}");
    }
    let group = refused(1, store.path(), ["64MiB", "1MiB"], &["--socket-group", "nobody's"]);
    assert!(group.contains("--socket-group: found \"nobody's\""), "the network may know it later: {group}");
    let nowhere = place.path().join("no/s").display().to_string();
    let flags = ["serve", "--socket", &nowhere, "--path", &path, "--capacity", "64MiB", "--host-bytes", "1MiB"];
    let output = kvhoist(&flags);
    let said = text(&output.stderr);
    let wanted = format!("{nowhere}: found no folder {}", place.path().join("no").display());
    assert!(said.contains(&wanted) && !said.contains("os error"), "{said}");
    assert_eq!(output.status.code(), Some(1), "a folder that may be there later");
    let file = place.path().join("settings");
    for (settings, wanted) in [
        (
            format!(r#"{{"path": "{path}", "capacity": "1GiB"}}"#),
            "found no host_bytes, expected `host_bytes`, or --host-bytes",
        ),
        (r#"{"workers": -1}"#.into(), "workers: found -1, expected a whole number from 0 to 4294967295"),
        (r#"{"direct_io": true}"#.into(), "direct_io: found true, expected `require` or `prefer`"),
        (r#"{"eviction_policy": 1}"#.into(), "eviction_policy: found 1, expected one of `"),
        (r#"{"namespace": 5}"#.into(), "namespace: found 5, expected text"),
        (r#"{"disks": 5}"#.into(), "disks: found 5, expected a list"),
        (r#"{"disks": [{"path": "/a"}]}"#.into(), r#"disks: found [{"path":"/a"}], expected it, or `blocks`"#),
    ] {
        fs::write(&file, &settings).expect("written");
        let output = kvhoist(&["serve", "--socket", &nowhere, "--config", &file.display().to_string()]);
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(wanted), "{settings}: {said}");
    }
}

#[test]
fn more_than_the_machine_has_is_refused_at_the_start() {
    // A drive may be mounted later, so the status is not that of a wrong flag.
    let store = stores();
    let disk = refused(1, store.path(), ["900TiB", "1MiB"], &[]);
    assert!(disk.contains("--capacity: found 900.0 TiB (989560464998400 bytes), expected "), "{disk}");
    assert!(disk.contains(" at most, which the file systems of the paths have"), "{disk}");
    let memory = refused(1, store.path(), ["1GiB", "900TiB"], &[]);
    assert!(memory.contains("--host-bytes: found 900.0 TiB (989560464998400 bytes), expected "), "{memory}");
    let disk = refused(1, store.path(), ["2PiB", "1MiB"], &[]);
    assert!(disk.contains("--capacity: found 2.0 PiB (2251799813685248 bytes), expected "), "{disk}");
    // Nor the file with the secret of a remote store; but a wrong URL stays wrong.
    let settings = store.path().join("settings.json");
    let secret = format!("rediss://host/0?password_file={}", store.path().join("secret").display());
    let (path, settings_path) = (store.path().display().to_string(), settings.display().to_string());
    let sizes = ["--capacity", "64MiB", "--host-bytes", "1MiB"];
    for (remote, status, found) in [(&*secret, 1, "password_file"), ("redis://host/0?threads=0", 2, "threads")] {
        fs::write(&settings, format!(r#"{{"remote": "{remote}"}}"#)).expect("written");
        let output =
            kvhoist(&[&["serve", "--socket", "s", "--path", &path, "--config", &settings_path][..], &sizes].concat());
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(status) && said.contains(&format!("remote: found {found}")), "{said}");
    }
    fs::remove_file(settings).expect("there");
    assert_eq!(fs::read_dir(store.path()).expect("there").count(), 0, "nothing is made");
}

/// Two services are refused that have a folder in common with another, or its socket.
#[test]
fn a_service_that_another_one_is_in_the_way_of_leaves_no_new_folder() {
    let other = Serving::start();
    let (socket, taken) = (other.socket(), other.store.path().display().to_string());
    let place = stores();
    let path = |name: &str| place.path().join(name).display().to_string();
    for (socket, paths) in [(&socket, vec![path("a")]), (&path("s"), vec![path("a"), path("b"), taken])] {
        let flags = ["serve", "--socket", socket, "--capacity", "8MiB", "--host-bytes", "1MiB"];
        let paths = paths.iter().flat_map(|path| ["--path", path.as_str()]);
        let output = kvhoist(&flags.into_iter().chain(paths).collect::<Vec<_>>());
        assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
        assert!(text(&output.stderr).contains("another service's"), "{}", text(&output.stderr));
        assert_eq!(fs::read_dir(place.path()).expect("there").count(), 0, "nothing is left");
    }
}

#[test]
fn a_place_for_figures_that_cannot_be_had_is_said_before_the_service_starts() {
    let (store, taken) = (stores(), TcpListener::bind("127.0.0.1:0").expect("bound"));
    let sizes = ["64MiB", "1MiB"];
    for wrong in ["text", "9401", "localhost", "example.com:9401"] {
        let said = refused(2, store.path(), sizes, &["--http", wrong]);
        assert!(
            said.contains("--http") && said.contains("expected IP:PORT, such as 127.0.0.1:9401"),
            "{wrong}: {said}"
        );
    }
    // The other is of no machine (RFC 5737), as one that a network has not given yet.
    for later in [&taken.local_addr().expect("an address").to_string(), "192.0.2.1:9401"] {
        let said = refused(1, store.path(), sizes, &["--http", later]);
        assert!(said.contains("name an address of this machine and a port that is free"), "{said}");
    }
    assert_eq!(fs::read_dir(store.path()).expect("there").count(), 0, "nothing is made");
}

#[test]
fn a_refusal_after_the_locks_were_taken_leaves_none() {
    let (place, store) = (tempfile::tempdir().expect("a directory"), stores());
    fs::write(place.path().join("s"), "mine").expect("written");
    let (socket, path) = (place.path().join("s").display().to_string(), store.path().display().to_string());
    let output =
        kvhoist(&["serve", "--socket", &socket, "--path", &path, "--capacity", "2MiB", "--host-bytes", "1MiB"]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(!place.path().join("s.lock").exists() && !store.path().join("kvhoist-service.lock").exists());
    // Nor is a file that cannot be written for Prometheus a wrong flag.
    fs::create_dir(place.path().join("t.targets.json")).expect("made");
    let (socket, http) = (place.path().join("t").display().to_string(), ["--http", "127.0.0.1:0"]);
    let flags = ["serve", "--socket", &socket, "--path", &path, "--capacity", "2MiB", "--host-bytes", "1MiB"];
    let output = kvhoist(&[&flags[..], &http].concat());
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("found a directory"), "{}", text(&output.stderr));
    assert!(!place.path().join("t.lock").exists() && fs::read_dir(store.path()).expect("there").next().is_none());
}

/// What is refused once the service listens ends it as a signal does.
#[test]
fn a_service_that_cannot_say_where_it_listens_leaves_no_socket() {
    let (place, store) = (tempfile::tempdir().expect("a directory"), stores());
    let (socket, path) = (place.path().join("s"), store.path().display().to_string());
    let full = fs::File::options().write(true).open("/dev/full").expect("a device");
    let output = Command::new(env!("CARGO_BIN_EXE_kvhoist"))
        .args(["serve", "--path", &path, "--capacity", "2MiB", "--host-bytes", "1MiB", "--socket"])
        .arg(&socket)
        .stdout(full)
        .stderr(Stdio::piped())
        .output()
        .expect("the command runs");
    let said = text(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("standard output: "), "{said}");
    assert!(said.contains("the service has ended") && !socket.exists(), "{said}");
}

#[test]
fn a_signal_ends_a_service_that_has_not_started() {
    let place = tempfile::tempdir().expect("a directory");
    let settings = place.path().join("settings");
    let name = std::ffi::CString::new(settings.clone().into_os_string().into_encoded_bytes()).expect("no zero");
    // SAFETY: plain system call; the name outlives it.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvhoist"));
    let mut child = command.args(["serve", "--config"]).arg(&settings).spawn().expect("the command runs");
    // It has its handlers when it opens the pipe, and reads until nobody writes there any more.
    let pipe = fs::File::options().write(true).open(&settings).expect("a reader");
    // SAFETY: a plain system call; the child was not waited for, so the number is its own.
    assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGTERM) }, 0);
    let hang = Instant::now() + Duration::from_secs(60);
    let ended = loop {
        match child.try_wait().expect("a child") {
            None if Instant::now() < hang => thread::yield_now(),
            ended => break ended,
        }
    };
    drop((pipe, child.kill()));
    assert!(ended.is_some_and(|status| status.success()), "{ended:?}");
}

/// A file system is mounted read-only after an error in it. Spaces fail then; files and figures are served.
#[test]
fn a_further_path_that_is_read_only_keeps_no_service_from_starting_but_another_service_does() {
    let (mut other, place, first) = (Serving::start(), tempfile::tempdir().expect("a directory"), stores());
    let (socket, second) = (place.path().join("s").display().to_string(), other.store.path().to_owned());
    // A namespace of its own: the mount ends with the command.
    let script = "mount --bind \"$1\" \"$1\" && mount -o remount,bind,ro \"$1\" || exit 99; path=$1; shift; \
                  exec \"$0\" serve \"$@\" --path \"$path\" 2>&1";
    let start = || {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount", "sh", "-c", script, env!("CARGO_BIN_EXE_kvhoist")]);
        command.arg(&second).args(["--capacity", "4MiB", "--host-bytes", "1MiB", "--direct-io", "prefer"]);
        command.args(["--socket", &socket, "--path"]).arg(first.path());
        command.stdout(Stdio::piped()).spawn().expect("unshare, of util-linux")
    };
    let output = start().wait_with_output().expect("an end");
    let said = text(&output.stdout);
    if output.status.code() == Some(99) || said.is_empty() {
        return skip::skipped(format!("no file system can be mounted here: {said}"));
    }
    let wanted = format!("{}: found another service's, which may listen at {}, ", second.display(), other.socket());
    assert!(said.contains(&wanted) && output.status.code() == Some(1), "{wanted} in {said}");
    other.signal();
    assert!(other.child.wait().expect("an end").success());
    for is_locked in [true, false] {
        let lock = second.join("kvhoist-service.lock");
        assert!(lock.exists(), "a service has run there");
        if !is_locked {
            fs::remove_file(lock).expect("removed");
        }
        let mut child = start();
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines().map(|line| line.expect("a line"));
        let before: Vec<String> = lines.by_ref().take_while(|line| !line.starts_with("kvhoist: listening")).collect();
        assert_eq!(before.iter().any(|line| line.contains("a read-only file system")), !is_locked, "{before:?}");
        let seen = status(&socket);
        assert_eq!((seen["draining"] == false, seen["trouble"].is_null()), (true, is_locked), "{seen}");
        let refused = block_on(Client::connect(&socket, ClientOptions::new("a", BLOCK_BYTES))).expect_err("no space");
        assert!(refused.to_string().contains("ead-only file system"), "{refused}");
        let trouble = status(&socket)["trouble"].to_string();
        assert!(trouble.contains("ead-only file system"), "{trouble}");
        // SAFETY: a plain system call; the child was not waited for, so the number is its own.
        assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGTERM) }, 0);
        assert!(child.wait().expect("an end").success());
    }
}

/// The first path has the files of all spaces.
#[test]
fn a_first_path_that_is_read_only_is_refused_with_what_to_do() {
    let place = tempfile::tempdir().expect("a directory");
    let script = "mount -t tmpfs -o ro tmpfs \"$1\" || exit 99; exec \"$0\" serve --socket \"$2\" --path \"$1\" \
                  --capacity 2MiB --host-bytes 1MiB 2>&1";
    let (path, socket) = (place.path().join("kv"), place.path().join("s"));
    fs::create_dir(&path).expect("made");
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "sh", "-c", script, env!("CARGO_BIN_EXE_kvhoist")]);
    let output = command.args([path, socket]).output().expect("unshare, of util-linux");
    let said = text(&output.stdout);
    if output.status.code() == Some(99) || said.is_empty() {
        return skip::skipped(format!("no file system can be mounted here: {said}"));
    }
    assert!(said.contains("a read-only file system") && said.contains("another path in `--path`"), "{said}");
    assert_eq!(output.status.code(), Some(1), "{said}");
}

/// The lines of a service's log: a start, a client, an end.
#[test]
fn a_healthy_service_has_a_line_for_its_start_for_each_client_and_for_its_end() {
    let (place, store) = (tempfile::tempdir().expect("a directory"), stores());
    let path = store.path().display().to_string();
    let flags = ["--path", &path, "--capacity", "64MiB", "--host-bytes", "8MiB", "--direct-io", "prefer"];
    let (_, log) = served(place.path(), &flags, |socket| {
        let client = block_on(Client::connect(socket, ClientOptions::new("model", BLOCK_BYTES))).expect("connected");
        block_on(client.close()).expect("closed");
    });
    let lines = |what: &str| log.lines().filter(|line| line.contains(what)).count();
    for what in ["the service listens", "a client has attached", "a client has gone", "the service drains"] {
        assert_eq!(lines(what), 1, "{what} in {log}");
    }
    assert_eq!((lines("the service has ended"), lines("the cache is open")), (1, 1), "{log}");
    let open = log.lines().find(|line| line.contains("the cache is open")).expect("a line");
    for figure in ["disk_slots=", "host_slots=", "resident=0", "storage=", "registered=", "namespace=\"model\""] {
        assert!(open.contains(figure), "{figure} in {open}");
    }
    assert!(!log.to_lowercase().contains("cufile") && !log.contains("device"), "there is no device tier: {log}");
}
