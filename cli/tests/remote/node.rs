//! A node: a service with a drive of its own, and its clients.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    ops::Range,
    path::Path,
    process::{Child, Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use kvhoist::{BlockKey, Error, Memory, Segment, SharedMemory, block_on};
use kvhoist_service::{Client, ClientOptions};
use serde_json::Value;
use tempfile::TempDir;

pub const BLOCK_BYTES: usize = 64 << 10;
/// Of the store: for S3 the secret key, for Redis the password.
pub const SECRET: &str = "hunter2hunter2";
/// Blocks that a client's memory has places for.
const PLACES: u64 = 64;

/// The command, with credentials in its environment.
pub fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvhoist"));
    command.env("AWS_ACCESS_KEY_ID", "AKIATEST").env("AWS_SECRET_ACCESS_KEY", SECRET).env("REDISCLI_AUTH", SECRET);
    command.env("AWS_EC2_METADATA_DISABLED", "true").env("RUST_LOG", "trace");
    command
}

/// The block of a number: its bytes follow from it.
pub fn payload(n: u64) -> Vec<u8> {
    let word = |at: u64| (n << 32 | at).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29).to_le_bytes();
    (0..BLOCK_BYTES as u64 / 8).flat_map(word).collect()
}

pub fn keys(blocks: Range<u64>) -> Vec<BlockKey> {
    let key = |n: u64| {
        let mut bytes = [7; 32];
        bytes[..8].copy_from_slice(&n.to_be_bytes());
        BlockKey::new(bytes)
    };
    blocks.map(key).collect()
}

/// A service on a folder, killed with its owner.
pub struct Node {
    child: Child,
    pub folder: Arc<TempDir>,
    url: String,
    /// Where it answers HTTP.
    http: Option<String>,
}

impl Node {
    pub fn start(url: &str, flags: &[&str]) -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        Self::start_on(Arc::new(folder), url, flags)
    }

    /// A service on a folder that another has left.
    pub fn start_on(folder: Arc<TempDir>, url: &str, flags: &[&str]) -> Self {
        let mut child = serve(folder.path(), url).args(flags).spawn().expect("the command runs");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let mut lines = lines.map(|line| line.expect("a line"));
        let first = lines.next();
        assert!(first.is_some_and(|line| line.contains("listening")), "{}", said(folder.path()));
        let http = flags.contains(&"--http").then(|| lines.next().expect("where it answers"));
        let http = http.map(|line| line.strip_prefix("kvhoist: http://").expect("an address").to_owned());
        Node { child, folder, url: url.to_owned(), http }
    }

    /// What a service says that does not start with such a URL.
    pub fn refused(url: &str) -> String {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        let ended = serve(folder.path(), url).status().expect("the command runs");
        assert_eq!(ended.code(), Some(2), "{}", said(folder.path()));
        said(folder.path())
    }

    /// The address of its page.
    pub fn http(&self) -> &str {
        self.http.as_ref().expect("started with --http")
    }

    pub fn client(&self) -> NodeClient {
        NodeClient::connect(self.folder.path()).expect("connected")
    }

    /// The figures of its only space.
    pub fn stats(&self) -> Value {
        let output = command().args(["status", "--json", "--socket"]).arg(self.folder.path().join("s")).output();
        let output = output.expect("the command runs");
        let mut status: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        status.pointer_mut("/spaces/0/stats").map(Value::take).unwrap_or_default()
    }

    pub fn wait_for(&self, what: &str, is_so: impl Fn(&Value) -> bool) {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            let stats = self.stats();
            if is_so(&stats) {
                return;
            }
            assert!(Instant::now() < until, "{what}: {stats}\n{}", said(self.folder.path()));
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until it knows so many blocks of the store.
    pub fn wait_for_remote(&self, blocks: u64) {
        self.wait_for("blocks of the store", |stats| stats["tiers"]["remote"]["resident"] == blocks);
    }

    /// Looks for the secret where a service tells something: log, status, metrics, page.
    pub fn check_nothing_tells_a_secret(&self) {
        let log = said(self.folder.path());
        assert!(!log.contains(SECRET), "{log}");
        let status = command().args(["status", "--socket"]).arg(self.folder.path().join("s")).output();
        let status = String::from_utf8(status.expect("the command runs").stdout).expect("UTF-8");
        assert!(!status.contains(SECRET) && !self.stats().to_string().contains(SECRET), "{status}");
        let Some(address) = &self.http else { return };
        for path in ["/metrics", "/status.json", "/"] {
            let mut stream = TcpStream::connect(address).expect("it answers");
            write!(stream, "GET {path} HTTP/1.0\r\nhost: localhost\r\n\r\n").expect("asked");
            let mut answer = String::new();
            stream.read_to_string(&mut answer).expect("an answer");
            assert!(answer.starts_with("HTTP/1.0 200") && !answer.contains(SECRET), "{path}: {answer}");
        }
    }

    /// Kills it, and starts another on what it left.
    pub fn restart(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
        let (folder, url) = (Arc::clone(&self.folder), self.url.clone());
        *self = Self::start_on(folder, &url, &[]);
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn serve(folder: &Path, url: &str) -> Command {
    let settings = serde_json::json!({
        "path": folder.join("drive"), "capacity": "64MiB", "host_bytes": "16MiB", "direct_io": "prefer",
        "write_policy": "write_through",
        "remote": url, "remote_policy": "stored", "remote_interval_s": 1, "remote_deadline_ms": 60_000,
    });
    fs::create_dir_all(folder.join("drive")).expect("a drive");
    fs::write(folder.join("settings.json"), settings.to_string()).expect("written");
    let log = File::options().create(true).append(true).open(folder.join("log")).expect("a log");
    let mut command = command();
    command.args(["serve", "--config"]).arg(folder.join("settings.json")).arg("--socket").arg(folder.join("s"));
    command.stdout(Stdio::piped()).stderr(log);
    command
}

/// What the services on a folder wrote to stderr.
fn said(folder: &Path) -> String {
    fs::read_to_string(folder.join("log")).unwrap_or_default()
}

/// A client with memory for some blocks, whose bytes are those of the last load.
pub struct NodeClient {
    client: Client,
    memory: Arc<SharedMemory>,
}

impl NodeClient {
    /// # Errors
    /// Of a service that is not there.
    pub fn connect(folder: &Path) -> Result<Self, Error> {
        let client = block_on(Client::connect(folder.join("s"), ClientOptions::new("a model", BLOCK_BYTES)))?;
        let memory = Arc::new(SharedMemory::new(PLACES as usize * BLOCK_BYTES).expect("memory"));
        // SAFETY: this client alone reads and writes it, and while no call of it is under way.
        block_on(client.register(unsafe { Memory::shared(Arc::clone(&memory)) }.pinned(false)))?;
        Ok(NodeClient { client, memory })
    }

    fn place(&self, n: u64) -> *mut u8 {
        // SAFETY: the places end within the memory.
        unsafe { self.memory.as_ptr().add((n % PLACES) as usize * BLOCK_BYTES) }
    }

    fn segments(&self, blocks: Range<u64>) -> Vec<Vec<Segment>> {
        blocks.map(|n| vec![Segment { ptr: self.place(n), len: BLOCK_BYTES }]).collect()
    }

    /// Stores a chain: which blocks were taken.
    ///
    /// # Errors
    /// Of a service that is gone.
    pub fn try_store(&self, blocks: Range<u64>) -> Result<Vec<bool>, Error> {
        for n in blocks.clone() {
            // SAFETY: the place has a block's bytes, and no call is under way.
            unsafe { self.place(n).copy_from_nonoverlapping(payload(n).as_ptr(), BLOCK_BYTES) };
        }
        let stored = block_on(self.client.store_from(&keys(blocks.clone()), None, &self.segments(blocks)))?;
        Ok(stored.into_iter().map(|stored| stored.unwrap_or(false)).collect())
    }

    /// Loads blocks: which are there.
    ///
    /// # Errors
    /// Of a service that is gone.
    pub fn try_load(&self, blocks: Range<u64>) -> Result<Vec<bool>, Error> {
        // SAFETY: the memory has as many bytes, and no call is under way.
        unsafe { self.memory.as_ptr().write_bytes(0, PLACES as usize * BLOCK_BYTES) };
        let loaded = block_on(self.client.load_into(&keys(blocks.clone()), &self.segments(blocks)))?;
        loaded.into_iter().collect()
    }

    pub fn store(&self, blocks: Range<u64>) {
        assert!(self.try_store(blocks).expect("a service").iter().all(|is_stored| *is_stored));
    }

    pub fn load(&self, blocks: Range<u64>) -> Vec<bool> {
        self.try_load(blocks).expect("a service")
    }

    /// The bytes of a block in the place that the last call had for it.
    pub fn bytes(&self, n: u64) -> Vec<u8> {
        // SAFETY: as for a load.
        unsafe { std::slice::from_raw_parts(self.place(n), BLOCK_BYTES) }.to_vec()
    }
}
