//! A log that is read while the cache runs: nothing may be logged under the index lock, where every caller would wait
//! for whoever reads the log.

use std::{
    cell::Cell,
    sync::{
        Once,
        atomic::{AtomicU64, Ordering},
    },
};

use tracing::{Event, Metadata, Subscriber, span};

std::thread_local! {
    static EVENTS: Cell<u64> = const { Cell::new(0) };
}

/// Panics where anything is logged under the index lock.
struct Watch {
    spans: AtomicU64,
}

impl Subscriber for Watch {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("kvhoist")
    }

    fn new_span(&self, _span: &span::Attributes<'_>) -> span::Id {
        check("a span");
        span::Id::from_u64(self.spans.fetch_add(1, Ordering::Relaxed) + 1)
    }

    fn record(&self, _span: &span::Id, _values: &span::Record<'_>) {}

    fn record_follows_from(&self, _span: &span::Id, _follows: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        check(event.metadata().name());
        EVENTS.set(EVENTS.get() + 1);
    }

    fn enter(&self, _span: &span::Id) {}

    fn exit(&self, _span: &span::Id) {}
}

fn check(what: &str) {
    assert!(!kvhoist::internals::seams::holds_lock(), "{what} is logged under the index lock");
}

/// Watches all that is logged in this process from now on.
pub fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let watch = Watch { spans: AtomicU64::new(0) };
        tracing::subscriber::set_global_default(watch).expect("nobody else subscribes in a simulation");
    });
}

/// Events that this thread has logged, from [`watch`] on.
pub fn events() -> u64 {
    EVENTS.get()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::sim::{self, FaultRates, Sim, SimOptions, Simulated, World};
    use kvhoist::{BlockKey, Config, DiskPath};

    /// A disk whose writes fail, then its reads: what is said of that is said to nobody's cost.
    #[test]
    fn nothing_is_logged_while_every_caller_waits() {
        super::watch();
        let before = super::events();
        sim::block_on(async {
            let disks = vec![DiskPath::with_blocks("simulated", 8)];
            let config =
                Config::default().block_bytes(4096).host_blocks(1).disks(disks).disk_failures_max(2).quarantine_max(8);
            let latency = Duration::from_millis(1)..=Duration::from_millis(1);
            let mut world = World::new(1, Vec::new());
            world.storage = Sim::new(1, sim::blank_files(&config), SimOptions { latency, ..SimOptions::default() });
            let Simulated { cache, reactor } = sim::open(config, &world).await.expect("blank files open");
            let key = |n| BlockKey::new([n; 32]);
            for n in 0..4 {
                cache.store(&key(n), None, &[n; 4096]).await.expect("a sound disk");
            }
            world.storage.set_rates(FaultRates { write_error: 1.0, read_error: 1.0, ..FaultRates::default() });
            for n in 4..6 {
                cache.store(&key(n), None, &[n; 4096]).await.expect_err("no write goes well");
            }
            assert!(cache.stats().disk_read_only.is_some());
            for n in 0..2 {
                cache.fetch(&key(n)).await.expect_err("no read goes well");
            }
            assert!(cache.stats().disk_retired.is_some());
            drop(cache);
            reactor.ended().await;
        });
        assert!(super::events() >= before + 4, "what happened was logged");
    }
}
