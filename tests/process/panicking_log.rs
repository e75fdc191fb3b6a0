//! A log that cannot be written: every event panics. The calls of a cache have their results nevertheless.

#[path = "../common/mod.rs"]
mod common;

use std::sync::atomic::{AtomicU64, Ordering};

use common::{config, directory, fetch_verified, store};
use kvhoist::{Cache, StorageKind, block_on};
use tracing::{Event, Metadata, Subscriber, span};

static EVENTS: AtomicU64 = AtomicU64::new(0);

struct Panics;

impl Subscriber for Panics {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        EVENTS.fetch_add(1, Ordering::Relaxed);
        panic!("an event cannot be written, on purpose: {}", event.metadata().name());
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

#[test]
fn a_cache_opens_and_closes_with_a_log_that_panics() {
    tracing::subscriber::set_global_default(Panics).expect("nothing else in this process subscribes");
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
