//! Values between Rust and Python: results, figures, numbers.

use std::time::Duration;

use kvhoist::{
    Cache, DiskPath, Error, Route, Stats, Tier,
    internals::{
        exported::{self, Kind, Sample},
        machine::drive_wear,
    },
};
use pyo3::{
    prelude::*,
    types::{PyBool, PyDict, PyList},
};

use serde_json::Value;

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
        Some((disk.path.display().to_string(), wear.used(), wear.bytes_written, wear.years_left()))
    };
    cache.config().disk.paths.iter().filter_map(wear).collect()
}

/// The figures of a cache as a dict of numbers, words and dicts.
pub fn stats<'py>(py: Python<'py>, stats: &Stats) -> PyResult<Bound<'py, PyDict>> {
    let figures = serde_json::to_value(stats).expect("numbers, texts, and maps by texts");
    let all = to_python(py, &figures)?.cast_into::<PyDict>()?;
    for route in Route::ALL {
        let durations = stats.route_durations(route);
        // The last bucket has no end, and JSON no infinity.
        let buckets = durations.buckets().filter(|_| durations.count() > 0);
        let buckets: Vec<_> = buckets.map(|(end, count)| (end.unwrap_or(f64::INFINITY), count)).collect();
        all.as_any().get_item("routes")?.get_item(route.name())?.get_item("seconds")?.set_item("buckets", buckets)?;
    }
    let copies = PyDict::new(py);
    stats.copied_bytes().into_iter().try_for_each(|(engine, bytes)| copies.set_item(engine, bytes))?;
    all.set_item("copied_bytes", copies)?;
    all.set_item("straight_bytes", stats.straight_bytes())?;
    all.set_item("read_bytes", stats.tier(Tier::Disk).bytes_out)?;
    all.set_item("disk_trouble", stats.disk_trouble())?;
    Ok(all)
}

fn to_python<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        Value::Null => py.None().into_bound(py),
        Value::Bool(flag) => PyBool::new(py, *flag).to_owned().into_any(),
        Value::Number(number) => match number.as_u64() {
            Some(whole) => whole.into_pyobject(py)?.into_any(),
            None => number.as_f64().into_pyobject(py)?.into_any(),
        },
        Value::String(text) => text.into_pyobject(py)?.into_any(),
        Value::Array(items) => {
            let items = items.iter().map(|item| to_python(py, item));
            PyList::new(py, items.collect::<PyResult<Vec<_>>>()?)?.into_any()
        }
        Value::Object(entries) => {
            let dict = PyDict::new(py);
            entries.iter().try_for_each(|(name, entry)| dict.set_item(name, to_python(py, entry)?))?;
            dict.into_any()
        }
    })
}

/// Of each metric of a cache: its name, its kind, and what it shows. Those of drives come last.
#[pyfunction]
pub fn metrics() -> Vec<(&'static str, &'static str, &'static str)> {
    let of_caches = exported::metrics().map(|metric| (metric.name, metric.help));
    let of_drives = exported::WEAR.iter().map(|(name, help, _)| (*name, *help));
    of_caches.chain(of_drives).map(|(name, help)| (name, Kind::of(name).name(), help)).collect()
}

/// What follows a metric's name, labels, and the figure.
pub type Sampled = (&'static str, Vec<(&'static str, String)>, f64);

/// The samples of each metric, in the order of [`metrics`] without those of drives.
pub fn samples(stats: &Stats) -> Vec<Vec<Sampled>> {
    let sampled = |Sample { suffix, labels, value }| (suffix, labels, value);
    exported::metrics().map(|metric| (metric.samples)(stats).into_iter().map(sampled).collect()).collect()
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
