//! A log that cannot be written: every event panics. The calls of a cache have their results nevertheless.

#[path = "../common/mod.rs"]
mod common;

#[path = "../common/on_event.rs"]
mod on_event;

use std::sync::atomic::{AtomicU64, Ordering};

use common::{config, directory, fetch_verified, store};
use kvhoist::{Cache, StorageKind, block_on};
use on_event::OnEvent;

static EVENTS: AtomicU64 = AtomicU64::new(0);

#[test]
fn a_cache_opens_and_closes_with_a_log_that_panics() {
    let log = OnEvent(|event: &tracing::Event<'_>| {
        EVENTS.fetch_add(1, Ordering::Relaxed);
        panic!("an event cannot be written, on purpose: {}", event.metadata().name());
    });
    tracing::subscriber::set_global_default(log).expect("nothing else in this process subscribes");
    for storage in [StorageKind::Auto, StorageKind::Blocking] {
        let dir = directory();
        for is_new in [true, false] {
            let before = EVENTS.load(Ordering::Relaxed);
            let cache = block_on(Cache::open(config(&dir, storage, 4, 64))).expect("it opens");
            let opened = EVENTS.load(Ordering::Relaxed);
            assert!(opened > before, "the open is logged");
            if is_new {
                block_on(store(&cache, 0));
            }
            assert!(block_on(fetch_verified(&cache, 0)));
            block_on(cache.close()).expect("it closes");
            assert!(EVENTS.load(Ordering::Relaxed) > opened, "and so is the close");
        }
    }
}
