//! Engines that the settings of a service ask for and the machine does not have.

use kvhoist::{Config, EngineMode, Error, StorageKind, internals::gpu};
use kvhoist_service::{Server, ServerConfig};

use crate::{apart, common};

/// The setting that keeps a service from starting with this cache, and what was found there.
fn refused(cache: Config) -> (&'static str, String) {
    let folder = common::directory();
    let mut config = ServerConfig::new(folder.path().join("socket"));
    config.paths = vec![folder.path().join("kv")];
    (config.capacity_bytes, config.host_bytes) = (4 << 20, 1 << 20);
    config.cache = cache;
    let error = Server::start(config).expect_err("no client could attach");
    assert_eq!(std::fs::read_dir(folder.path()).expect("there").count(), 0, "nothing is made: {error}");
    match error {
        Error::Config { field, found, .. } => (field, found),
        other => panic!("{other}"),
    }
}

#[test]
fn a_forbidden_ring_that_was_asked_for_is_refused_at_the_start() {
    apart::apart("engines::a_forbidden_ring_that_was_asked_for_is_refused_at_the_start", || {
        apart::forbid(&[libc::SYS_io_uring_setup], libc::EPERM);
        let (field, found) = refused(Config::default().storage(StorageKind::Uring));
        assert!(field == "storage" && found.contains("seccomp"), "{field}: {found}");
    });
}

#[test]
fn cufile_without_a_gpu_is_refused_at_the_start() {
    if gpu::has_device() {
        return common::skip::skipped("there is a GPU");
    }
    assert_eq!(refused(Config::default().cufile(EngineMode::On)).0, "cufile");
}
