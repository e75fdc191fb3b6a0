//! S3: against the double in this process, and against the servers of others where the caller asks for them.

mod common;
#[path = "../../tests/common/skip.rs"]
mod skip;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use common::{
    SECRET, Server, check_any_store, check_store,
    double::{Double, Fault},
    free_port, is_asked_for,
};
use kvhoist::remote::{Created, RemoteError, RemoteStore};
use kvhoist_remote::open;
use pollster::block_on;

/// A store on a port of this machine.
fn store(port: u16, parameters: &str) -> Arc<dyn RemoteStore> {
    common::set_credentials();
    open(&format!("s3://bucket/team?endpoint=http://127.0.0.1:{port}{parameters}")).expect("opened")
}

const QUICK: &str = "&timeout_ms=500&connect_timeout_ms=500";
/// More than an answer takes on a busy machine.
const PATIENT: &str = "&timeout_ms=60000&connect_timeout_ms=60000";

#[test]
fn the_double_is_a_store() {
    let double = Double::start();
    check_store(&store(double.port, PATIENT));
    let names: Vec<String> = double.state.objects.lock().expect("no panic").keys().cloned().collect();
    assert_eq!(names, [""; 0], "all below the prefix, and deleted");
}

#[test]
fn an_object_costs_one_request_to_write_and_one_a_range_to_read() {
    let double = Double::start();
    let store = store(double.port, PATIENT);
    let object = vec![7; 8 << 20];
    assert_eq!(block_on(store.create("a", vec![object.into()])), Ok(Created::Now));
    assert_eq!(double.requests(), 1);
    block_on(store.read("a", 0..8 << 20)).expect("read");
    assert_eq!(double.requests(), 2);
    let head = double.state.heads.lock().expect("no panic")[0].to_lowercase();
    assert!(head.contains("if-none-match: *"), "{head}");
}

#[test]
fn each_failure_says_what_to_do_and_no_secret() {
    let double = Double::start();
    let (patient, quick) = (store(double.port, PATIENT), store(double.port, QUICK));
    assert_eq!(block_on(patient.create("a", vec![vec![1; 100].into()])), Ok(Created::Now));
    let kind = |error: &RemoteError| match error {
        RemoteError::Refused(_) => "refused",
        RemoteError::Throttled(_) => "throttled",
        RemoteError::Unavailable(_) => "unavailable",
        RemoteError::Invalid { .. } => "invalid",
        _ => "other",
    };
    for (fault, expected, word) in [
        (Fault::Answer(403, "AccessDenied"), "refused", "AccessDenied"),
        (Fault::Answer(403, "SignatureDoesNotMatch"), "refused", "SignatureDoesNotMatch"),
        (Fault::Answer(403, "InvalidAccessKeyId"), "refused", "credentials"),
        (Fault::Answer(404, "NoSuchBucket"), "refused", "NoSuchBucket"),
        (Fault::Answer(503, "SlowDown"), "throttled", "SlowDown"),
        (Fault::Answer(429, "TooManyRequests"), "throttled", "TooManyRequests"),
        (Fault::Answer(503, "ServiceUnavailable"), "unavailable", "ServiceUnavailable"),
        (Fault::Answer(500, "InternalError"), "unavailable", "InternalError"),
        (Fault::Silence, "unavailable", ""),
        (Fault::Slow(Duration::from_secs(600)), "unavailable", ""),
        (Fault::HalfBody, "unavailable", ""),
        (Fault::ShortBody, "invalid", "ends before"),
    ] {
        double.fail(fault);
        let (store, began) =
            (if matches!(fault, Fault::Silence | Fault::Slow(_)) { &quick } else { &patient }, Instant::now());
        let error = block_on(store.read("a", 0..100)).expect_err("a fault");
        assert_eq!(kind(&error), expected, "{fault:?}: {error}");
        assert!(error.to_string().contains(word), "{fault:?}: {error}");
        assert!(!error.to_string().contains(SECRET) && !error.to_string().contains("AKIATEST"), "{fault:?}: {error}");
        assert!(began.elapsed() < Duration::from_secs(50), "{fault:?} took {:?}", began.elapsed());
    }
    double.fail(None);
    block_on(patient.read("a", 0..100)).expect("as before");
    assert!(!double.state.heads.lock().expect("no panic").iter().any(|head| head.contains(SECRET)));
}

#[test]
fn an_answer_that_does_not_end_is_an_error() {
    let double = Double::start();
    let store = store(double.port, PATIENT);
    for status in [200, 500] {
        double.fail(Fault::Endless(status));
        let error = block_on(store.list("", None)).expect_err("endless");
        assert!(error.to_string().contains("an answer of more than 16777216 bytes"), "{error}");
    }
    let error = block_on(store.read("a", 0..100)).expect_err("endless");
    assert!(error.to_string().contains("an answer of more than 16777216 bytes"), "{error}");
}

#[test]
fn a_page_of_a_listing_has_ten_times_as_long() {
    let double = Double::start();
    let store = store(double.port, "&timeout_ms=2500&connect_timeout_ms=60000");
    double.fail(Fault::Slow(Duration::from_secs(3)));
    block_on(store.list("", None)).expect("in time");
    double.fail(Fault::Slow(Duration::from_secs(600)));
    block_on(store.read("a", 0..1)).expect_err("late");
}

#[test]
fn no_request_is_repeated() {
    let double = Double::start();
    let store = store(double.port, PATIENT);
    double.fail(Fault::Answer(503, "ServiceUnavailable"));
    block_on(store.read("a", 0..1)).expect_err("503");
    block_on(store.create("a", vec![vec![1].into()])).expect_err("503");
    block_on(store.list("", None)).expect_err("503");
    assert_eq!(double.requests(), 3);
}

#[test]
fn a_call_begins_when_it_is_polled_and_ends_when_it_is_dropped() {
    let double = Double::start();
    let store = store(double.port, "");
    drop(store.read("a", 0..1));
    assert_eq!(double.requests(), 0);
    double.fail(Fault::Silence);
    let mut read = store.read("a", 0..1);
    let waker = std::task::Waker::noop();
    assert!(read.as_mut().poll(&mut std::task::Context::from_waker(waker)).is_pending());
    drop((read, store));
}

#[test]
fn a_store_that_nobody_has_is_unavailable() {
    let refused = store(free_port(), PATIENT);
    let error = block_on(refused.read("a", 0..1)).expect_err("nobody listens");
    assert!(matches!(&error, RemoteError::Unavailable(_)) && error.to_string().contains("refused"), "{error}");
}

#[test]
fn tls_with_what_speaks_none_is_an_error() {
    let double = Double::start();
    let url = format!("s3://bucket?endpoint=https://127.0.0.1:{}{QUICK}", double.port);
    let store = open(&url).expect("opened");
    let error = block_on(store.read("a", 0..1)).expect_err("no TLS");
    assert!(matches!(error, RemoteError::Unavailable(_) | RemoteError::Refused(_)), "{error}");
}

#[test]
fn rclone_is_a_store() {
    if !is_asked_for("rclone") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(folder.path().join("bucket")).expect("a bucket");
    let keys = format!("AKIATEST,{SECRET}");
    let path = folder.path().to_str().expect("a path");
    let arguments = ["serve", "s3", "--auth-key", &keys, "--addr", "127.0.0.1:{port}", "--vfs-cache-mode", "off", path];
    let server = Server::start("rclone", &arguments).expect("rclone is installed, and serves S3");
    // It knows no `If-None-Match`.
    check_any_store(&store(server.port, ""));
}

#[test]
fn moto_is_a_store() {
    if !is_asked_for("moto_server") {
        return;
    }
    let server = Server::start("moto_server", &["-H", "127.0.0.1", "-p", "{port}"]).expect("moto is installed");
    make_bucket(server.port);
    check_store(&store(server.port, ""));
}

/// Makes the bucket of a server that asks for no signature.
fn make_bucket(port: u16) {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).expect("it listens");
    let head = "PUT /bucket HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
    stream.write_all(head.as_bytes()).expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}
