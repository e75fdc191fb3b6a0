//! A service in a process of its own, that can be killed.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use kvhoist::{Config, DirectIo, Error, ServiceFault};
use kvhoist_service::{Client, ClientOptions, Server, ServerConfig, ServiceStatus, status};
use tempfile::TempDir;

use crate::common;

/// Tells the child what it is.
pub const ROLE: &str = "KVHOIST_SERVICE_ROLE";
const PREFIX: &str = "service-child: ";

/// More than this for anything is a hang.
pub const HANG: Duration = Duration::from_secs(60);

pub const BLOCK_BYTES: usize = 64 << 10;
pub const HOST_BLOCKS: u64 = 16;
pub const DISK_BLOCKS: u64 = 256;

/// A line for whoever started this process.
pub fn say(word: &str) {
    let mut out = std::io::stdout();
    out.write_all(format!("{PREFIX}{word}\n").as_bytes()).and_then(|()| out.flush()).expect("somebody who reads");
}

/// The service's process: until its standard input ends.
pub fn run(words: &[&str]) {
    let [socket, path, stall_ms, connections_max] = words else { panic!("{words:?}") };
    let mut config = ServerConfig::new(*socket);
    config.paths = vec![path.into()];
    config.capacity_bytes = 4 * DISK_BLOCKS * BLOCK_BYTES as u64;
    config.host_bytes = 4 * HOST_BLOCKS * BLOCK_BYTES as u64;
    config.cache = Config::default().bypass_host(true).direct_io(DirectIo::Prefer);
    config.stall_ms = stall_ms.parse().expect("a number");
    config.connections_max = connections_max.parse().expect("a number");
    config.regions_max = 8;
    config.region_bytes_max = 64 << 20;
    serve(config);
}

/// Serves until the process's standard input ends.
pub fn serve(config: ServerConfig) {
    let server = Server::start(config).expect("a service");
    say("ready");
    std::io::stdin().read_to_end(&mut Vec::new()).expect("the end of the input");
    server.drain();
    server.wait().expect("a whole store");
}

/// A child of this test, killed with its owner.
pub struct Process {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl Process {
    pub fn start(role: &str) -> Self {
        Process::start_with(role, &[])
    }

    /// With these variables in its environment.
    pub fn start_with(role: &str, variables: &[(&str, &str)]) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("this test"))
            .args(["--exact", "child::child", "--nocapture", "--test-threads", "1"])
            .env(ROLE, role)
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("spawn");
        let lines = BufReader::new(child.stdout.take().expect("piped"));
        Process { child, lines }
    }

    /// The next word that it says; `None` once it has ended.
    pub fn word(&mut self) -> Option<String> {
        loop {
            let mut line = String::new();
            if self.lines.read_line(&mut line).expect("text") == 0 {
                return None;
            }
            if let Some(at) = line.find(PREFIX) {
                return Some(line[at + PREFIX.len()..].trim_end().to_owned());
            }
        }
    }

    /// Gives it a line.
    pub fn tell(&mut self, line: &str) {
        let input = self.child.stdin.as_mut().expect("piped, and not ended");
        input.write_all(format!("{line}\n").as_bytes()).expect("somebody who reads");
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Begins to kill it: [`kill`](Self::kill) waits until it is dead.
    pub fn send_kill(&mut self) {
        self.child.kill().expect("killed");
    }

    /// Kills it. It may have ended well before, and may not have failed.
    pub fn kill(&mut self) {
        self.child.kill().expect("killed");
        let status = self.child.wait().expect("dead");
        assert!(status.signal() == Some(libc::SIGKILL) || status.success(), "it failed: {status}");
    }

    /// Ends its input.
    pub fn end_input(&mut self) {
        drop(self.child.stdin.take());
    }

    /// Ends its input, and waits for its end.
    pub fn end(&mut self) -> ExitStatus {
        self.end_input();
        self.child.wait().expect("an end")
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> ExitStatus {
        while self.word().is_some() {}
        self.child.wait().expect("an end")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// What a service holds of its clients.
#[derive(Debug)]
pub struct Held {
    pub descriptors: usize,
    pub mappings: usize,
    /// Memory of its own, bytes.
    pub own_bytes: u64,
}

/// A service, its store and its socket.
pub struct Node {
    pub process: Process,
    store: TempDir,
    place: TempDir,
    settings: String,
}

impl Node {
    pub fn new() -> Self {
        Node::with("120000 64")
    }

    /// Settings: milliseconds before a stalled client is cut off, and connections.
    pub fn with(settings: &str) -> Self {
        Node::with_variables(settings, &[])
    }

    /// With these variables in its first process's environment.
    pub fn with_variables(settings: &str, variables: &[(&str, &str)]) -> Self {
        // The path of a socket is short.
        let (store, place) = (common::directory(), tempfile::tempdir().expect("a directory"));
        let process = start(&place.path().join("s"), store.path(), settings, variables);
        Node { process, store, place, settings: settings.into() }
    }

    pub fn socket(&self) -> PathBuf {
        self.place.path().join("s")
    }

    /// Folders of spaces in its store.
    pub fn folders(&self) -> usize {
        let name = |entry: std::io::Result<fs::DirEntry>| entry.expect("an entry").file_name();
        let entries = fs::read_dir(self.store.path()).expect("there").map(name);
        entries.filter(|name| name.to_string_lossy().starts_with("space-")).count()
    }

    /// Starts it again, over the same store.
    pub fn restart(&mut self) {
        self.process = start(&self.socket(), self.store.path(), &self.settings, &[]);
    }

    pub fn status(&self) -> ServiceStatus {
        status_of(&self.socket())
    }

    /// Descriptors of the service, and mappings of clients' memory.
    pub fn held(&self) -> Held {
        let proc = PathBuf::from(format!("/proc/{}", self.process.pid()));
        let descriptors = fs::read_dir(proc.join("fd")).expect("alive").count();
        let maps = fs::read_to_string(proc.join("maps")).expect("alive");
        let status = fs::read_to_string(proc.join("status")).expect("alive");
        let own =
            status.lines().find_map(|line| line.strip_prefix("RssAnon:")?.trim().strip_suffix(" kB")?.parse().ok());
        let own_bytes = own.map_or(0, |kib: u64| kib << 10);
        Held { descriptors, mappings: maps.lines().filter(|line| line.contains("memfd:")).count(), own_bytes }
    }

    /// Waits until there are as many clients as that, and the connection that asks.
    pub fn wait_for_clients(&self, clients: usize) {
        let hang = Instant::now() + HANG;
        while self.status().clients.len() != clients + 1 {
            assert!(Instant::now() < hang, "{:?}", self.status());
        }
    }

    /// Waits until the service holds no more than it held before: its descriptors, and mappings of clients' memory.
    pub fn wait_for_held(&self, expected: &Held) {
        let hang = Instant::now() + HANG;
        loop {
            let held = self.held();
            // What is expected may count a connection that was just closing.
            if held.mappings == expected.mappings && held.descriptors <= expected.descriptors {
                return;
            }
            assert!(Instant::now() < hang, "{held:?}, expected {expected:?}: {:?}", self.status());
            std::thread::yield_now();
        }
    }
}

/// A process that does not run, until dropped.
pub struct Stopped(libc::pid_t);

impl Stopped {
    pub fn new(pid: u32) -> Self {
        let pid = libc::pid_t::try_from(pid).expect("a process");
        // SAFETY: plain system call.
        assert_eq!(unsafe { libc::kill(pid, libc::SIGSTOP) }, 0);
        let stops = |task: std::io::Result<fs::DirEntry>| {
            let status = fs::read_to_string(task.expect("an entry").path().join("status"));
            status.is_ok_and(|status| status.contains("State:\tT"))
        };
        let hang = Instant::now() + HANG;
        while !fs::read_dir(format!("/proc/{pid}/task")).expect("alive").all(stops) {
            assert!(Instant::now() < hang, "{pid} does not stop");
            std::thread::yield_now();
        }
        Stopped(pid)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // SAFETY: plain system call.
        unsafe { libc::kill(self.0, libc::SIGCONT) };
    }
}

/// The figures of a service, which may take longer to answer on a busy machine than the question waits.
pub fn status_of(socket: &Path) -> ServiceStatus {
    let hang = Instant::now() + HANG;
    loop {
        match status(socket) {
            Err(Error::Service { fault: ServiceFault::Timeout, text }) => assert!(Instant::now() < hang, "{text}"),
            answered => return answered.expect("a service"),
        }
    }
}

fn start(socket: &Path, store: &Path, settings: &str, variables: &[(&str, &str)]) -> Process {
    let role = format!("service {} {} {settings}", socket.display(), store.display());
    let mut process = Process::start_with(&role, variables);
    assert_eq!(process.word().as_deref(), Some("ready"));
    process
}

pub fn options() -> ClientOptions {
    options_of("tests")
}

/// Of a client of this space.
pub fn options_of(space: &str) -> ClientOptions {
    let mut options = ClientOptions::new(space, BLOCK_BYTES);
    options.capacity_bytes = DISK_BLOCKS * BLOCK_BYTES as u64;
    options.host_bytes = HOST_BLOCKS * BLOCK_BYTES as u64;
    options.deadline = HANG;
    options
}

pub fn connect(socket: &Path) -> Client {
    kvhoist::block_on(Client::connect(socket, options())).expect("a service")
}
