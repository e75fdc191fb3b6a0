//! TLS: with servers that have a certificate by an authority of the test's own.

#[path = "common/certificates.rs"]
mod certificates;
mod common;
#[path = "../../tests/common/skip.rs"]
mod skip;

use std::sync::Arc;

use certificates::Certificates;
use common::{SECRET, Server, check_any_store, check_store, double::Double, is_asked_for};
use kvhoist::remote::{RemoteError, RemoteStore};
use kvhoist_remote::open;
use pollster::block_on;

/// More than an answer takes on a busy machine.
const PATIENT: &str = "timeout_ms=60000&connect_timeout_ms=60000";

fn certificates() -> Option<Certificates> {
    let made = Certificates::make();
    if made.is_none() {
        skip::skipped("found no openssl; install it (Debian's package openssl)");
    }
    made
}

/// A store is reached by who trusts the authority of its certificate, and by nobody else.
fn check_trust(url: impl Fn(&str) -> String, authority: &str, check: fn(&Arc<dyn RemoteStore>)) {
    let other = Certificates::make().expect("as before");
    for parameters in [String::new(), format!("&ca_file={}", other.authority())] {
        let error = block_on(open(&url(&parameters)).expect("opened").read("a", 0..1)).expect_err("another authority");
        assert!(matches!(error, RemoteError::Refused(_)), "{parameters}: {error}");
        assert!(error.to_string().contains("certificate"), "{parameters}: {error}");
    }
    check(&open(&url(&format!("&ca_file={authority}"))).expect("opened"));
}

#[test]
fn redis_over_tls_is_a_store_for_who_trusts_its_authority() {
    let Some(certificates) = certificates() else { return };
    let [certificate, key] = certificates.server();
    let authority = certificates.authority();
    let tls = ["--tls-cert-file", &certificate, "--tls-key-file", &key, "--tls-ca-cert-file", &authority];
    let port = ["--port", "0", "--tls-port", "{port}", "--tls-auth-clients", "no", "--bind", "127.0.0.1", "--save", ""];
    let Some(server) = Server::start("redis-server", &[&port[..], &tls].concat()) else {
        return skip::skipped("found no redis-server; install it (Debian's package redis-server)");
    };
    let url = |parameters: &str| format!("rediss://127.0.0.1:{}/1?{PATIENT}{parameters}", server.port);
    check_trust(url, &authority, check_store);
    // Who speaks no TLS is not answered.
    let error = block_on(
        open(&url("").replace("rediss", "redis").replace(PATIENT, "timeout_ms=5000")).expect("opened").read("a", 0..1),
    )
    .expect_err("no TLS");
    assert!(matches!(error, RemoteError::Unavailable(_)), "{error}");
}

#[test]
fn s3_over_tls_is_a_store_for_who_trusts_its_authority() {
    let Some(certificates) = certificates() else { return };
    common::set_credentials();
    let double = Double::start();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let port = certificates.before(double.port, &runtime);
    let url = |parameters: &str| format!("s3://bucket/tls?endpoint=https://127.0.0.1:{port}&{PATIENT}{parameters}");
    check_trust(url, &certificates.authority(), check_store);
}

#[test]
fn rclone_over_tls_is_a_store_for_who_trusts_its_authority() {
    if !is_asked_for("rclone") {
        return;
    }
    let Some(certificates) = certificates() else { return };
    let [certificate, key] = certificates.server();
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(folder.path().join("bucket")).expect("a bucket");
    let keys = format!("AKIATEST,{SECRET}");
    let arguments = ["serve", "s3", "--auth-key", &keys, "--addr", "127.0.0.1:{port}", "--vfs-cache-mode", "off"];
    let tls = ["--cert", &certificate, "--key", &key, folder.path().to_str().expect("UTF-8")];
    let server = Server::start("rclone", &[&arguments[..], &tls].concat()).expect("rclone is installed");
    common::set_credentials();
    let url = |parameters: &str| format!("s3://bucket/tls?endpoint=https://127.0.0.1:{}{parameters}", server.port);
    check_trust(url, &certificates.authority(), check_any_store);
}
