//! Counters and gauges, with their handles in the `metrics` crate.

use metrics::Counter;

use super::tally::{Held, Tally};
use crate::shield::caught;

/// A counter, with its handle in the `metrics` crate.
pub(crate) struct Count {
    own: Tally,
    exported: Counter,
}

impl Count {
    pub(super) fn new(exported: Option<Counter>) -> Self {
        Count { own: Tally::default(), exported: exported.unwrap_or(Counter::noop()) }
    }

    /// A counter that is not exported.
    pub(crate) fn unexported() -> Self {
        Count::new(None)
    }

    pub(crate) fn add(&self, n: u64) {
        self.add_unexported(n);
        self.export(n);
    }

    /// Counts what is [exported](Self::export) by who calls.
    pub(crate) fn add_unexported(&self, n: u64) {
        self.own.add(n);
    }

    /// Counts, for the holder of the index lock, who [exports](Self::export) it after the unlock.
    #[inline]
    pub(crate) fn add_locked(&self, n: u64, held: &mut impl Held) {
        self.own.add_locked(n, held);
    }

    /// Reports what was counted to the recorder.
    #[inline]
    pub(crate) fn export(&self, n: u64) {
        _ = caught(|| self.exported.increment(n));
    }

    /// What the holder of the index lock leaves to be exported after the unlock.
    pub(crate) fn exported_later(&self, n: u64) -> Export {
        Export::Count(self.exported.clone(), n)
    }

    pub(crate) fn get(&self) -> u64 {
        self.own.get()
    }
}

/// A counter that follows from others, for the recorder alone.
pub(crate) struct Derived(Counter);

impl Derived {
    pub(super) fn new(exported: Option<Counter>) -> Self {
        Derived(exported.unwrap_or(Counter::noop()))
    }

    /// Reports what the others have counted to the recorder.
    #[inline]
    pub(crate) fn export(&self, n: u64) {
        _ = caught(|| self.0.increment(n));
    }
}

/// What the recorder is told after the unlock: it is the user's code, and may call the cache.
pub(crate) enum Export {
    Count(Counter, u64),
    Gauge(metrics::Gauge, f64),
}

impl Export {
    pub(crate) fn run(self) {
        // The handle is dropped in there too.
        _ = caught(|| match self {
            Export::Count(counter, n) => counter.increment(n),
            Export::Gauge(gauge, value) => gauge.set(value),
        });
    }
}

/// A gauge of the `metrics` crate.
pub(crate) struct Gauge(metrics::Gauge);

impl Gauge {
    pub(super) fn new(exported: Option<metrics::Gauge>) -> Self {
        Gauge(exported.unwrap_or(metrics::Gauge::noop()))
    }

    pub(crate) fn set(&self, value: f64) {
        _ = caught(|| self.0.set(value));
    }

    pub(crate) fn add(&self, n: f64) {
        _ = caught(|| self.0.increment(n));
    }

    /// As [`set`](Self::set), for the holder of the index lock.
    pub(crate) fn set_later(&self, value: f64) -> Export {
        Export::Gauge(self.0.clone(), value)
    }
}
