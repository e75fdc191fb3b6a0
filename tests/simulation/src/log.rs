//! A log that is read while the cache runs, and a recorder of metrics. Neither may be called under the index lock:
//! every caller would wait for them, for ever if they call the cache.

use std::{
    cell::Cell,
    sync::{
        Arc, Once,
        atomic::{AtomicU64, Ordering},
    },
};

use metrics::{Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Recorder, SharedString, Unit};
use tracing::{Event, Metadata, Subscriber, span};

std::thread_local! {
    static EVENTS: Cell<u64> = const { Cell::new(0) };
    static UNDER_LOCK: Cell<u64> = const { Cell::new(0) };
}

/// Panics where anything is logged under the index lock. The cache catches the panic, and the run notes it.
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
    UNDER_LOCK.set(UNDER_LOCK.get() + u64::from(kvhoist::internals::seams::holds_lock()));
    assert!(!kvhoist::internals::seams::holds_lock(), "{what} is reported under the index lock");
}

/// Panics where a figure is recorded under the index lock. The cache catches the panic, and the run notes it.
struct Figure(String);

impl CounterFn for Figure {
    fn increment(&self, _: u64) {
        check(&self.0);
    }

    fn absolute(&self, _: u64) {
        check(&self.0);
    }
}

impl GaugeFn for Figure {
    fn increment(&self, _: f64) {
        check(&self.0);
    }

    fn decrement(&self, _: f64) {
        check(&self.0);
    }

    fn set(&self, _: f64) {
        check(&self.0);
    }
}

impl HistogramFn for Figure {
    fn record(&self, _: f64) {
        check(&self.0);
    }
}

impl Drop for Figure {
    fn drop(&mut self) {
        check(&self.0);
    }
}

/// Makes [`Figure`]s.
struct Figures;

impl Recorder for Figures {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &metrics::Metadata<'_>) -> Counter {
        Counter::from_arc(Arc::new(Figure(key.name().to_owned())))
    }

    fn register_gauge(&self, key: &Key, _: &metrics::Metadata<'_>) -> Gauge {
        Gauge::from_arc(Arc::new(Figure(key.name().to_owned())))
    }

    fn register_histogram(&self, key: &Key, _: &metrics::Metadata<'_>) -> Histogram {
        Histogram::from_arc(Arc::new(Figure(key.name().to_owned())))
    }
}

/// Watches all that is logged and recorded in this process from now on.
pub fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let watch = Watch { spans: AtomicU64::new(0) };
        tracing::subscriber::set_global_default(watch).expect("nobody else subscribes in a simulation");
        metrics::set_global_recorder(Figures).expect("nobody else records in a simulation");
    });
}

/// How often this thread has logged or recorded something under the index lock, from [`watch`] on.
pub fn under_lock() -> u64 {
    UNDER_LOCK.get()
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
