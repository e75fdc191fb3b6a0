//! A service that lasts as long as a test's clients.

use std::{
    io::{BufRead, BufReader, Read},
    path::Path,
    process::{Child, Command, Stdio},
};

use super::{status, stores};

/// A process that ends with its owner.
pub struct Ended(pub Child);

impl Drop for Ended {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Runs a service until `clients` has ended, or panics; its socket and its log.
pub fn served(place: &Path, flags: &[&str], clients: impl FnOnce(&str)) -> (String, String) {
    let socket = place.join("s").display().to_string();
    let child = Command::new(env!("CARGO_BIN_EXE_kvhoist"))
        .args(["serve", "--socket", &socket])
        .args(flags)
        .env_remove("KVHOIST_LOG")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut ended = Ended(child.expect("the command runs"));
    let child = &mut ended.0;
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("a line");
    assert!(line.starts_with("kvhoist: listening"), "{line}");
    clients(&socket);
    // SAFETY: a plain system call; the child was not waited for, so the number is its own.
    assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGTERM) }, 0);
    let mut log = String::new();
    child.stderr.take().expect("piped").read_to_string(&mut log).expect("UTF-8");
    let status = child.wait().expect("an end");
    assert!(status.success(), "{status:?}");
    (socket, log)
}

#[test]
fn a_service_ends_with_a_test_that_panics() {
    let (place, store) = (tempfile::tempdir().expect("a directory"), stores());
    let sizes = ["--capacity", "64MiB", "--host-bytes", "8MiB", "--direct-io", "prefer", "--path"];
    let path = store.path().display().to_string();
    let mut pid = 0;
    let panics = |socket: &str| {
        pid = status(socket)["pid"].as_i64().expect("a number") as i32;
        panic!("as a test that fails");
    };
    let run = || drop(served(place.path(), &[&sizes[..], &[&path]].concat(), panics));
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).expect_err("the clients' panic");
    // SAFETY: a plain system call, which sends nothing.
    assert_eq!(unsafe { libc::kill(pid, 0) }, -1, "process {pid} lives");
}
