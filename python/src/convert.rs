//! Values between Rust and Python: results, figures, numbers.

use std::time::Duration;

use kvhoist::{Cache, Config, DiskPath, Durations, Error, Route, Stats, Tier, internals::machine::drive_wear};
use kvhoist_service::SpaceStats;
use pyo3::{
    prelude::*,
    types::{PyBool, PyDict, PyList},
};

use crate::errors;

/// How a call reports failed blocks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum OnError {
    /// It raises the first failure, when all blocks have ended.
    Raise,
    /// It leaves the exception in the block's place in the list.
    Return,
    /// It leaves `False` there.
    False,
}

impl OnError {
    /// Of the words of `kvhoist.Cache.load`.
    pub fn parse(py: Python<'_>, word: &str) -> PyResult<Self> {
        match word {
            "raise" => Ok(OnError::Raise),
            "return" => Ok(OnError::Return),
            "false" => Ok(OnError::False),
            other => Err(errors::argument(py, "errors", format!("{other:?}"), "'raise', 'return' or 'false'")),
        }
    }
}

/// One entry per block.
pub fn results<'py>(
    py: Python<'py>,
    results: Vec<Result<bool, Error>>,
    on_error: OnError,
) -> PyResult<Bound<'py, PyList>> {
    if on_error == OnError::Raise
        && let Some(error) = results.iter().find_map(|result| result.as_ref().err())
    {
        return Err(errors::to_python(py, error));
    }
    let entry = |result: Result<bool, Error>| -> Bound<'py, PyAny> {
        match result {
            Ok(done) => PyBool::new(py, done).to_owned().into_any(),
            Err(error) if on_error == OnError::Return => {
                errors::to_python(py, &error).into_value(py).into_bound(py).into_any()
            }
            Err(_) => PyBool::new(py, false).to_owned().into_any(),
        }
    };
    PyList::new(py, results.into_iter().map(entry))
}

/// A path, the share of its drive's life that is used, the bytes written to the drive, and the years that are left.
pub type Worn = (String, f64, u64, Option<f64>);

/// The wear of each NVMe drive of a cache that answers.
pub fn drives(cache: &Cache) -> Vec<Worn> {
    let wear = |disk: &DiskPath| {
        let wear = drive_wear(&disk.path).ok()?;
        let used = f64::from(wear.used_percent) / 100.0;
        Some((disk.path.display().to_string(), used, wear.bytes_written, wear.years_left()))
    };
    cache.config().disk.paths.iter().filter_map(wear).collect()
}

/// The figures of a cache as a dict of numbers, words and dicts.
pub fn stats<'py>(py: Python<'py>, stats: &Stats, config: &Config) -> PyResult<Bound<'py, PyDict>> {
    let all = PyDict::new(py);
    all.set_item("tiers", tiers(py, stats)?)?;
    all.set_item("routes", routes(py, stats)?)?;
    let counts = [
        ("misses", stats.misses),
        ("stores", stats.stores),
        ("stores_known", stats.stores_known),
        ("writes_refused", stats.writes_refused),
        ("writes_declined", stats.writes_declined),
        ("writes_over_budget", stats.writes_over_budget),
        ("checksum_failures", stats.checksum_failures),
        ("read_errors", stats.read_errors),
        ("write_errors", stats.write_errors),
        ("quarantined", stats.quarantined),
        ("changed_memory", stats.changed_memory),
        ("background_refused", stats.background_refused),
        ("released", stats.released),
        ("released_unwritten", stats.released_unwritten),
        ("busy", stats.busy),
        ("timeouts", stats.timeouts),
        ("records_bad", stats.records_bad),
        ("record_writes", stats.record_writes),
        ("work_done", stats.work_done),
        ("dirty", stats.dirty),
    ];
    counts.into_iter().try_for_each(|(name, value)| all.set_item(name, value))?;
    all.set_item("workers", config.worker_threads())?;
    let has_threads = stats.storage == "blocking";
    all.set_item("io_threads", if has_threads { config.disk.blocking_threads } else { 0 })?;
    all.set_item("write_budget", config.write_budget_bytes())?;
    all.set_item("storage", stats.storage)?;
    all.set_item("direct_io", stats.direct_io)?;
    all.set_item("memory_align_bytes", stats.memory_align_bytes)?;
    all.set_item("registered", stats.registered)?;
    all.set_item("cufile", stats.cufile)?;
    all.set_item("cufile_reason", stats.cufile_reason.as_str())?;
    let copies = PyDict::new(py);
    stats.copied_bytes().into_iter().try_for_each(|(engine, bytes)| copies.set_item(engine, bytes))?;
    all.set_item("copied_bytes", copies)?;
    all.set_item("device_retired", stats.device_retired.as_deref())?;
    all.set_item("disk_retired", stats.disk_retired.as_deref())?;
    all.set_item("disk_read_only", stats.disk_read_only.as_deref())?;
    Ok(all)
}

/// The figures of a service's space.
pub fn client_stats<'py>(py: Python<'py>, stats: &SpaceStats) -> PyResult<Bound<'py, PyDict>> {
    let all = PyDict::new(py);
    let tiers = PyDict::new(py);
    for (tier, figures) in Tier::ALL.iter().zip(&stats.tiers) {
        let one = PyDict::new(py);
        let (hits, resident, slots) = (figures.hits, figures.resident, figures.slots);
        let named = [("hits", hits), ("resident", resident), ("slots", slots), ("evictions", figures.evictions)];
        let more = [("refused", figures.refused), ("bytes_in", figures.bytes_in)];
        named.into_iter().chain(more).try_for_each(|(name, value)| one.set_item(name, value))?;
        tiers.set_item(tier.name(), one)?;
    }
    all.set_item("tiers", tiers)?;
    let routes = PyDict::new(py);
    for route in Route::ALL {
        let one = PyDict::new(py);
        one.set_item("seconds", seconds(py, stats.route_durations(route))?)?;
        routes.set_item(route.name(), one)?;
    }
    all.set_item("routes", routes)?;
    let counts = [
        ("misses", stats.misses),
        ("stores", stats.stores),
        ("stores_known", stats.stores_known),
        ("writes_refused", stats.writes_refused),
        ("writes_declined", stats.writes_declined),
        ("writes_over_budget", stats.writes_over_budget),
        ("checksum_failures", stats.checksum_failures),
        ("read_errors", stats.read_errors),
        ("write_errors", stats.write_errors),
        ("quarantined", stats.quarantined),
        ("changed_memory", stats.changed_memory),
        ("straight_bytes", stats.straight_bytes),
        ("read_bytes", stats.read_bytes),
    ];
    counts.into_iter().try_for_each(|(name, value)| all.set_item(name, value))?;
    let trouble = Some(stats.disk_trouble.as_str()).filter(|trouble| !trouble.is_empty());
    all.set_item("disk_trouble", trouble)?;
    Ok(all)
}

/// The figures of each tier.
fn tiers<'py>(py: Python<'py>, stats: &Stats) -> PyResult<Bound<'py, PyDict>> {
    let tiers = PyDict::new(py);
    for tier in Tier::ALL {
        let figures = stats.tier(tier);
        let one = PyDict::new(py);
        let named = [
            ("hits", figures.hits),
            ("evictions", figures.evictions),
            ("refused", figures.refused),
            ("bytes_in", figures.bytes_in),
            ("bytes_out", figures.bytes_out),
            ("resident", figures.resident),
            ("slots", figures.slots),
            ("free", figures.free),
            ("kept", figures.kept),
        ];
        named.into_iter().try_for_each(|(name, value)| one.set_item(name, value))?;
        tiers.set_item(tier.name(), one)?;
    }
    Ok(tiers)
}

/// The figures of each route.
fn routes<'py>(py: Python<'py>, stats: &Stats) -> PyResult<Bound<'py, PyDict>> {
    let routes = PyDict::new(py);
    for route in Route::ALL {
        let one = PyDict::new(py);
        one.set_item("blocks", stats.route_blocks(route))?;
        one.set_item("bytes", stats.route_bytes(route))?;
        one.set_item("seconds", seconds(py, stats.route_durations(route))?)?;
        routes.set_item(route.name(), one)?;
    }
    Ok(routes)
}

/// How long movements took: numbers of seconds, and the buckets with the counts of those that ended in each.
fn seconds<'py>(py: Python<'py>, durations: &Durations) -> PyResult<Bound<'py, PyDict>> {
    let all = PyDict::new(py);
    let quantile = |q| durations.quantile(q).map(|time| time.as_secs_f64());
    all.set_item("count", durations.count())?;
    all.set_item("sum", durations.sum().as_secs_f64())?;
    all.set_item("p50", quantile(0.5))?;
    all.set_item("p99", quantile(0.99))?;
    let buckets = durations.buckets().filter(|_| durations.count() > 0);
    all.set_item("buckets", buckets.map(|(end, count)| (end.unwrap_or(f64::INFINITY), count)).collect::<Vec<_>>())?;
    Ok(all)
}

/// A number of bytes, or an address.
pub fn whole(value: &Bound<'_, PyAny>, what: &'static str) -> PyResult<usize> {
    let expected = "a whole number that an address can be";
    value.extract().map_err(|_| errors::argument(value.py(), what, errors::shown(value), expected))
}

/// A time.
pub fn seconds_of(value: &Bound<'_, PyAny>) -> PyResult<Duration> {
    let time = value.extract().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let expected = "a number of seconds, 0 or more";
    time.ok_or_else(|| errors::argument(value.py(), "seconds", errors::shown(value), expected))
}
