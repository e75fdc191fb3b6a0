//! What the tests of real servers share: a call on a plain thread, and servers that end with the test.

// Each test takes a part of it.
#![allow(dead_code)]

pub mod double;

use std::{
    net::TcpStream,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU16, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use kvhoist::block_on;
use kvhoist::remote::{Created, Object, RemoteError, RemoteStore};

/// A server of another project, on a port of this machine, ended with the value.
pub struct Server {
    child: Child,
    pub port: u16,
}

impl Server {
    /// Starts a command that has `{port}` in its arguments; `None` if it is not installed.
    pub fn start(program: &str, arguments: &[&str]) -> Option<Self> {
        // Another process may take the port first.
        let tried = (0..5).find_map(|_| Self::start_at(free_port(), program, arguments).transpose());
        tried.unwrap_or_else(|| panic!("{program} ended five times before it listened")).ok()
    }

    /// As [`start`](Self::start), on this port; `None` if it ended before it listened.
    pub fn start_at(port: u16, program: &str, arguments: &[&str]) -> std::io::Result<Option<Self>> {
        let arguments = arguments.iter().map(|text| text.replace("{port}", &port.to_string()));
        let mut command = Command::new(program);
        let child = command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let mut server = Server { child: child?, port };
        let until = Instant::now() + Duration::from_secs(60);
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            if server.child.try_wait().is_ok_and(|ended| ended.is_some()) {
                return Ok(None);
            }
            assert!(Instant::now() < until, "{program} does not listen on port {port}");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(Some(server))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Whether the caller asks for the tests against this server, whose program must be installed then.
pub fn is_asked_for(program: &str) -> bool {
    let asked = std::env::var("KVHOIST_REMOTE_SERVERS").unwrap_or_default();
    let is_asked = asked.split(',').any(|name| name == program);
    if !is_asked {
        crate::skip::skipped(format_args!("{program} is not among KVHOIST_REMOTE_SERVERS"));
    }
    is_asked
}

/// The secret key of all stores of S3 here.
pub const SECRET: &str = "hunter2hunter2";

/// Gives this process credentials of S3, which all its tests share.
pub fn set_credentials() {
    static CREDENTIALS: std::sync::Once = std::sync::Once::new();
    CREDENTIALS.call_once(|| {
        let set = [
            ("AWS_ACCESS_KEY_ID", "AKIATEST"),
            ("AWS_SECRET_ACCESS_KEY", SECRET),
            ("AWS_EC2_METADATA_DISABLED", "true"),
        ];
        // SAFETY: the threads that read the environment, those of stores, are started behind this.
        set.into_iter().for_each(|(name, value)| unsafe { std::env::set_var(name, value) });
    });
}

/// A port that nobody listens on, and that no other test of this process was given.
///
/// It is below those that the kernel gives by itself, and nobody listens there while it is looked for: a child that
/// another test starts meanwhile would hold the listener until it becomes its program, and seem to be the server.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = (std::process::id() as u16).wrapping_mul(64);
    loop {
        let port = 16384 | (first.wrapping_add(NEXT.fetch_add(1, Relaxed)) % 16384);
        if TcpStream::connect(("127.0.0.1", port)).is_err() {
            return port;
        }
    }
}

/// All objects, page by page.
pub fn list_all(store: &Arc<dyn RemoteStore>, prefix: &str) -> Vec<Object> {
    let (mut objects, mut after): (Vec<Object>, Option<String>) = (Vec::new(), None);
    loop {
        let page = block_on(store.list(prefix, after.as_deref())).expect("a page");
        objects.extend(page.objects);
        match page.next {
            Some(next) => assert!(after.replace(next.clone()) < Some(next), "pages go on"),
            None => return objects,
        }
    }
}

/// What every store does, and what one does that keeps the first object of a name.
pub fn check_store(store: &Arc<dyn RemoteStore>) {
    check_any_store(store);
    assert_eq!(block_on(store.create("t/first", vec![b"first".as_slice().into()])), Ok(Created::Now));
    assert_eq!(block_on(store.create("t/first", vec![b"another".as_slice().into()])), Ok(Created::Already));
    assert_eq!(block_on(store.read("t/first", 0..5)).expect("read"), b"first");
    block_on(store.delete(&["t/first".into()])).expect("deleted");
}

/// What every store does, also one that replaces objects.
pub fn check_any_store(store: &Arc<dyn RemoteStore>) {
    let read = |name: &str, from, to| block_on(store.read(name, from..to));
    let create = |name: &str, bytes: &[u8]| {
        block_on(store.create(name, vec![bytes[..1].to_vec().into(), bytes[1..].to_vec().into()]))
    };
    let large: Vec<u8> = (0..(6 << 20) + 17).map(|at: u32| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();

    assert_eq!(create("t/a/large", &large), Ok(Created::Now));
    assert_eq!(read("t/a/large", 0, large.len() as u64).expect("read"), large);
    assert_eq!(read("t/a/large", 1 << 20, (1 << 20) + 5).expect("read"), large[1 << 20..][..5]);
    assert_eq!(read("t/a/large", 5, 5).expect("read"), b"");
    let end = large.len() as u64;
    assert_eq!(read("t/a/large", end - 1, end).expect("read"), large[large.len() - 1..]);
    for (from, to) in [(end - 1, end + 1), (end, end + 1)] {
        assert!(matches!(read("t/a/large", from, to), Err(RemoteError::Invalid { .. })), "{from} to {to} of {end}");
    }
    assert_eq!(read("t/a/gone", 0, 1), Err(RemoteError::NotFound));

    let names: Vec<String> = (0..1003).map(|at| format!("t/b/{at:05}")).collect();
    for names in names.chunks(64) {
        let calls: Vec<_> =
            names.iter().map(|name| store.create(name, vec![name.clone().into_bytes().into()])).collect();
        calls.into_iter().for_each(|call| assert_eq!(block_on(call), Ok(Created::Now)));
    }
    let listed = list_all(store, "t/b/");
    assert!(listed.iter().map(|object| &object.name).eq(&names), "{} listed", listed.len());
    assert!(listed.iter().all(|object| object.bytes == object.name.len() as u64));
    assert_eq!(list_all(store, "t/b/0100").len(), 3);
    assert_eq!(list_all(store, "t/b/00007").len(), 1);
    assert_eq!(list_all(store, "nothing/").len(), 0);

    block_on(store.delete(&names)).expect("deleted");
    block_on(store.delete(&["t/a/large".into(), "t/a/never".into()])).expect("deleted");
    assert_eq!(list_all(store, "t/").len(), 0);
    assert_eq!(read("t/a/large", 0, 1), Err(RemoteError::NotFound));
}
