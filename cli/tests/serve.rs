//! `kvhoist serve` and `kvhoist status` as an operator runs them.

#[path = "serve/browser.rs"]
mod browser;
#[path = "serve/http.rs"]
mod http;
#[cfg(feature = "otel")]
#[path = "serve/otlp.rs"]
mod otlp;
#[path = "serve/page.rs"]
mod page;
#[path = "serve/refused.rs"]
mod refused;
#[path = "serve/served.rs"]
mod served;
#[path = "serve/settings.rs"]
mod settings;
#[path = "../../tests/common/skip.rs"]
mod skip;

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{Shutdown, TcpStream},
    os::unix::{
        net::{UnixDatagram, UnixListener, UnixStream},
        process::ExitStatusExt,
    },
    path::Path,
    process::{Child, Command, Output, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use kvhoist::{BlockKey, Segment, SharedMemory, block_on};
use kvhoist_service::{Client, ClientOptions};
use serde_json::Value;
use served::{Ended, served};
use tempfile::TempDir;

const BLOCK_BYTES: usize = 64 << 10;

fn kvhoist(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvhoist")).args(args).output().expect("the command runs")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8")
}

/// A service that is ready, killed with its owner.
struct Serving {
    child: Child,
    place: TempDir,
    store: TempDir,
    /// Where it answers HTTP.
    http: Option<String>,
}

impl Serving {
    fn start() -> Self {
        Serving::start_with(&[])
    }

    fn start_with(flags: &[&str]) -> Self {
        Serving::start_in(flags, &[])
    }

    fn start_in(flags: &[&str], environment: &[(&str, &str)]) -> Self {
        let (place, store) = (tempfile::tempdir().expect("a directory"), stores());
        let manager = UnixDatagram::bind(place.path().join("notify")).expect("bound");
        manager.set_read_timeout(Some(Duration::from_secs(60))).expect("set");
        let mut child = Command::new(env!("CARGO_BIN_EXE_kvhoist"))
            .args(["serve", "--capacity", "64MiB", "--host-bytes", "8MiB", "--direct-io", "prefer", "--socket"])
            .arg(place.path().join("s"))
            .arg("--path")
            .arg(store.path())
            .args(flags)
            .env("NOTIFY_SOCKET", place.path().join("notify"))
            .envs(environment.iter().copied())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the command runs");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines().map(|line| line.expect("a line"));
        let line = lines.next().expect("where it listens");
        assert!(line.starts_with("kvhoist: listening at "), "{line}");
        let http = flags.contains(&"--http").then(|| lines.next().expect("where it answers"));
        let http = http.map(|line| line.strip_prefix("kvhoist: http://").expect("an address").to_owned());
        let mut state = [0; 100];
        let len = manager.recv(&mut state).expect("a word for the manager");
        assert_eq!(&state[..len], b"READY=1");
        Serving { child, place, store, http }
    }

    fn socket(&self) -> String {
        self.place.path().join("s").display().to_string()
    }

    fn signal(&self) {
        // SAFETY: a plain system call; the child was not waited for, so the number is its own.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, libc::SIGTERM) }, 0);
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn stores() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory")
}

fn status(socket: &str) -> Value {
    // A busy machine may answer later than the command waits.
    let late = |output: &Output| text(&output.stderr).contains("no answer within");
    let mut asked = (0..6).map(|_| kvhoist(&["status", "--json", "--socket", socket]));
    let output = asked.find(|output| !late(output)).expect("an answer");
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[test]
fn a_service_tells_what_it_has_and_ends_when_it_is_told_to() {
    let mut serving = Serving::start();
    let socket = serving.socket();
    let client = block_on(Client::connect(&socket, ClientOptions::new("a\u{1b}[31m", BLOCK_BYTES))).expect("connected");
    let pool = Arc::new(SharedMemory::new(BLOCK_BYTES).expect("memory"));
    // SAFETY: nobody touches a block of it while the block is on its way.
    let lent = unsafe { kvhoist::Memory::shared(Arc::clone(&pool)) };
    block_on(client.register(lent.pinned(true))).expect("registered");
    let (keys, places) = ([BlockKey::new([1; 32])], [vec![Segment { ptr: pool.as_ptr(), len: BLOCK_BYTES }]]);
    assert!(matches!(block_on(client.store_from(&keys, None, &places)).expect("a service")[..], [Ok(true)]));
    assert!(matches!(block_on(client.load_into(&keys, &places)).expect("a service")[..], [Ok(true)]));

    let found = status(&socket);
    assert_eq!((&found["pid"], &found["draining"]), (&serving.child.id().into(), &false.into()));
    let space = &found["spaces"][0];
    assert_eq!((&space["namespace"], &space["capacity_bytes"]), (&"a\u{1b}[31m".into(), &(64 << 20).into()));
    assert_eq!((&space["stats"]["stores"], &space["stats"]["tiers"]["disk"]["hits"]), (&1.into(), &1.into()));
    let disk = &space["stats"]["tiers"]["disk"];
    assert_eq!((&disk["bytes_in"], &disk["refused"]), (&BLOCK_BYTES.into(), &0.into()));
    assert_eq!((&space["stats"]["writes_declined"], &space["stats"]["writes_over_budget"]), (&0.into(), &0.into()));
    // What a drive answers depends on the machine; some answer there is.
    let drives = found["drives"].as_array().expect("drives");
    assert_eq!(drives.len(), 1, "{drives:?}");
    assert_eq!(drives[0]["path"], serving.store.path().display().to_string());
    assert!(drives[0]["wear"].as_str().is_some_and(|wear| !wear.is_empty()), "{drives:?}");
    let own = &found["clients"][0];
    assert_eq!((&own["pid"], &own["regions"]), (&std::process::id().into(), &1.into()));
    assert_eq!((&own["region_bytes"], &own["bytes_in_flight"]), (&BLOCK_BYTES.into(), &0.into()));

    let table = kvhoist(&["status", "--socket", &socket]);
    assert!(table.status.success());
    let shown = text(&table.stdout);
    assert!(shown.contains("a\\u{1b}[31m") && !shown.contains('\u{1b}'));
    let has = |name: &str, value: &str| shown.lines().any(|line| line.starts_with(name) && line.ends_with(value));
    assert!(has("drive ", drives[0]["wear"].as_str().expect("a text")), "{shown}");
    assert!(has("written to disk ", &kvhoist_cli::size::show_bytes(BLOCK_BYTES as u64)), "{shown}");
    assert!(has("not written ", "0 not worth it, 0 over the budget, 0 failed"), "{shown}");
    assert!(has("refused by policy ", " 0"), "{shown}");

    serving.signal();
    let ended = serving.child.wait().expect("an end");
    assert!(ended.success() && !Path::new(&socket).exists(), "{ended:?}");
    let away = kvhoist(&["status", "--socket", &socket]);
    assert_eq!(away.status.code(), Some(1));
    assert!(text(&away.stderr).contains("start `kvhoist serve` there"), "{}", text(&away.stderr));
}

#[test]
fn a_killed_service_leaves_a_socket_that_the_next_one_replaces() {
    let mut serving = Serving::start();
    let (socket, store) = (serving.socket(), serving.store.path().display().to_string());
    let second =
        kvhoist(&["serve", "--socket", &socket, "--path", &store, "--capacity", "2MiB", "--host-bytes", "1MiB"]);
    assert_eq!(second.status.code(), Some(1));
    assert!(text(&second.stderr).contains("another service's"), "{}", text(&second.stderr));
    serving.child.kill().expect("killed");
    assert_eq!(serving.child.wait().expect("dead").signal(), Some(9));
    assert!(Path::new(&socket).exists());
    let next = Command::new(env!("CARGO_BIN_EXE_kvhoist"))
        .args(["serve", "--capacity", "64MiB", "--host-bytes", "8MiB", "--direct-io", "prefer"])
        .args(["--socket", &socket, "--path", &store])
        .stdout(Stdio::piped())
        .spawn();
    let mut next = Ended(next.expect("the command runs"));
    let mut line = String::new();
    BufReader::new(next.0.stdout.take().expect("piped")).read_line(&mut line).expect("a line");
    assert_eq!(status(&socket)["pid"], next.0.id());
}

#[test]
fn a_space_is_removed_and_settings_come_from_a_file() {
    let (place, store) = (tempfile::tempdir().expect("a directory"), stores());
    let (socket, file) = (place.path().join("s"), place.path().join("settings.json"));
    let settings = serde_json::json!({
        "path": store.path(), "capacity": "64MiB", "host_bytes": "8MiB", "direct_io": "prefer", "deadline_ms": 9_000,
    });
    std::fs::write(&file, settings.to_string()).expect("written");
    let child = Command::new(env!("CARGO_BIN_EXE_kvhoist"))
        .args(["serve", "--host-bytes", "4MiB"])
        .arg("--config")
        .arg(&file)
        .arg("--socket")
        .arg(&socket)
        .stdout(Stdio::piped())
        .spawn();
    let mut child = Ended(child.expect("the command runs"));
    let mut line = String::new();
    BufReader::new(child.0.stdout.take().expect("piped")).read_line(&mut line).expect("a line");
    let socket = socket.display().to_string();
    let found = status(&socket);
    assert_eq!((&found["capacity_bytes"], &found["host_bytes"]), (&(64 << 20).into(), &(4 << 20).into()));
    let client = block_on(Client::connect(&socket, ClientOptions::new("a b", BLOCK_BYTES))).expect("connected");
    let remove = |name: &str| kvhoist(&["space", "rm", "--socket", &socket, name]);
    let busy = remove("a b");
    assert!(!busy.status.success() && text(&busy.stderr).contains("attached"), "{}", text(&busy.stderr));
    assert_eq!(remove("other").status.code(), Some(2));
    block_on(client.close()).expect("closed");
    // The one that asks is the last.
    let hang = Instant::now() + Duration::from_secs(60);
    while status(&socket)["clients"].as_array().expect("clients").len() > 1 {
        assert!(Instant::now() < hang, "the service has not seen that its client has gone");
    }
    let removed = remove("a b");
    assert!(removed.status.success(), "{}", text(&removed.stderr));
    assert_eq!(status(&socket)["spaces"], serde_json::json!([]));
}

#[test]
fn a_service_and_its_clients_meet_where_nobody_named_a_socket() {
    let (place, store) = (tempfile::tempdir().expect("a directory"), stores());
    let socket = place.path().join("kvhoist.sock");
    let kvhoist = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvhoist"));
        command.args(args).env("KVHOIST_SOCKET", &socket);
        command
    };
    let child = kvhoist(&["serve", "--capacity", "64MiB", "--host-bytes", "8MiB", "--direct-io", "prefer", "--path"])
        .arg(store.path())
        .stdout(Stdio::piped())
        .spawn();
    let mut child = Ended(child.expect("the command runs"));
    let mut line = String::new();
    BufReader::new(child.0.stdout.take().expect("piped")).read_line(&mut line).expect("a line");
    assert_eq!(line, format!("kvhoist: listening at {}\n", socket.display()));
    let status = kvhoist(&["status"]).output().expect("it runs");
    assert!(status.status.success() && text(&status.stdout).contains("serving"), "{}", text(&status.stderr));
    let top = kvhoist(&["top", "--count", "1"]).output().expect("it runs");
    assert!(top.status.success(), "{}", text(&top.stderr));
}

#[test]
fn wrong_flags_are_said() {
    let place = tempfile::tempdir().expect("a directory");
    let path = place.path().display().to_string();
    let none = kvhoist(&["serve", "--socket", &format!("{path}/s"), "--capacity", "2MiB", "--host-bytes", "1MiB"]);
    assert_eq!(none.status.code(), Some(2), "no path");
    let sizes = ["--path", &path, "--capacity", "2MiB", "--host-bytes", "1MiB"];
    let slash =
        kvhoist(&[&["serve", "--socket", &format!("{path}/s"), "--share", "a/:disk=1MiB.."][..], &sizes].concat());
    assert_eq!(slash.status.code(), Some(2));
    assert!(text(&slash.stderr).contains("NAME has no / at its end"), "{}", text(&slash.stderr));
    std::fs::write(place.path().join("file"), "mine").expect("written");
    let taken = kvhoist(&[
        "serve",
        "--socket",
        &format!("{path}/file"),
        "--path",
        &path,
        "--capacity",
        "2MiB",
        "--host-bytes",
        "1MiB",
    ]);
    assert_eq!(taken.status.code(), Some(1));
    assert!(text(&taken.stderr).contains("no socket"), "{}", text(&taken.stderr));
    assert_eq!(std::fs::read_to_string(place.path().join("file")).expect("there"), "mine");
    let root = kvhoist(&[&["serve", "--socket", "/"][..], &sizes].concat());
    assert_eq!(root.status.code(), Some(2));
    let wanted = "--socket: found \"/\", expected the name of a file in a folder that exists";
    assert!(text(&root.stderr).contains(wanted), "{}", text(&root.stderr));
}

#[test]
fn what_is_no_socket_is_not_advised_to_be_served_at() {
    let place = tempfile::tempdir().expect("a directory");
    std::fs::write(place.path().join("file"), "mine").expect("written");
    for (name, wanted) in [("", "found a folder, expected"), ("file", "found a file that is no socket, expected")] {
        let asked = kvhoist(&["status", "--socket", &place.path().join(name).display().to_string()]);
        let said = text(&asked.stderr);
        assert!(said.contains(wanted) && said.contains("name the socket of") && !said.contains("start"), "{said}");
    }
}

/// One request by HTTP/1.0: status line and body.
fn get(address: &str, path: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).expect("connected");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("set");
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n").expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    (head.lines().next().expect("a status line").to_owned(), body.to_owned())
}

/// Its terminal is as it was, and nobody has to interrupt it twice.
#[test]
fn an_interrupt_ends_top_while_the_service_hangs() {
    let (serving, place) = (Serving::start(), tempfile::tempdir().expect("a directory"));
    let between = place.path().join("s");
    let listener = UnixListener::bind(&between).expect("bound");
    let child = Command::new(env!("CARGO_BIN_EXE_kvhoist"))
        .args(["top", "--every", "0.1", "--socket"])
        .arg(&between)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command runs");
    let (ours, _) = listener.accept().expect("the first question");
    let theirs = UnixStream::connect(serving.socket()).expect("a service");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            drop(std::io::copy(&mut &ours, &mut &theirs));
            theirs.shutdown(Shutdown::Write).expect("shut");
        });
        drop(std::io::copy(&mut &theirs, &mut &ours));
        drop(ours.shutdown(Shutdown::Both));
    });
    let _hangs = listener.accept().expect("the second question");
    // SAFETY: a plain system call; the child was not waited for, so the number is its own.
    assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGINT) }, 0);
    let output = child.wait_with_output().expect("an end");
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(130), "kvhoist: interrupted\n"));
}

#[test]
fn top_shows_rates_until_the_service_is_gone() {
    let mut serving = Serving::start();
    let socket = serving.socket();
    let shown = kvhoist(&["top", "--socket", &socket, "--every", "0.1", "--count", "2"]);
    assert!(shown.status.success(), "{}", text(&shown.stderr));
    assert_eq!(text(&shown.stdout).matches("hits/s").count(), 2);
    assert!(!text(&shown.stdout).contains('\u{1b}'), "not for a terminal");
    let wrong = kvhoist(&["top", "--socket", &socket, "--every", "0"]);
    assert_eq!(wrong.status.code(), Some(2));
    let mut unread = Command::new(env!("CARGO_BIN_EXE_kvhoist"))
        .args(["top", "--socket", &socket, "--every", "0.1"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("the command runs");
    drop(unread.stdout.take());
    assert!(unread.wait().expect("an end").success(), "nobody reads it");
    let mut watching = Command::new(env!("CARGO_BIN_EXE_kvhoist"))
        .args(["top", "--socket", &socket, "--every", "0.1"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the command runs");
    let mut lines = BufReader::new(watching.stdout.take().expect("piped")).lines();
    lines.next().expect("a line").expect("UTF-8");
    serving.signal();
    assert!(serving.child.wait().expect("an end").success());
    lines.for_each(drop);
    assert_eq!(watching.wait().expect("an end").code(), Some(1), "nothing answers");
}
