//! The arguments of `Cache(...)` as the engine's configuration.

use std::path::PathBuf;

use kvhoist::{
    Config, DeviceKind, DiskPath,
    internals::config::{SETTING_NAMES, expected_by},
};
use pyo3::{
    prelude::*,
    types::{PyDict, PyList, PyTuple},
};
use serde_json::{Map, Value};

use crate::errors::{self, shown};

/// The names of the engine's settings.
#[pyfunction]
pub fn setting_names() -> Vec<&'static str> {
    SETTING_NAMES.to_vec()
}

/// Settings whose names and values are the engine's, and `disks`, a list of paths with bytes, or with slots.
pub fn config(py: Python<'_>, settings: &Bound<'_, PyDict>) -> PyResult<Config> {
    let mut given = Map::new();
    let mut paths = Vec::new();
    for (name, value) in settings.iter() {
        let name: String = name.extract()?;
        let known = SETTING_NAMES.iter().find(|known| **known == name);
        match known.copied() {
            // Paths may be no text.
            Some("disks") => paths = disks(&value)?,
            Some(known) => drop(given.insert(name, setting(py, known, &value)?)),
            None => return Err(errors::argument(py, "settings", format!("{name:?}"), "a setting of the engine")),
        }
    }
    let config = serde_json::from_value::<Config>(Value::Object(given));
    // Each alone is right.
    let config = config.map_err(|error| errors::config(py, "settings", error, "settings that go together"))?;
    let kind = if settings.contains("device")? { config.device.kind } else { DeviceKind::Simulated };
    Ok(config.disks(paths).device(kind))
}

/// A setting as the engine's own reader takes it, which it tries.
fn setting(py: Python<'_>, name: &'static str, value: &Bound<'_, PyAny>) -> PyResult<Value> {
    let wrong = |expected: String| errors::config(py, name, shown(value), expected);
    let text = py.import("json")?.call_method1("dumps", (value,));
    let text: String = text.map_err(|_| wrong("a number, a bool, text, or a list of these".into()))?.extract()?;
    let value: Value = serde_json::from_str(&text).map_err(|error| wrong(format!("a finite number ({error})")))?;
    let alone = Map::from_iter([(name.to_owned(), value.clone())]);
    serde_json::from_value::<Config>(Value::Object(alone)).map_err(|error| wrong(expected_by(name, &error)))?;
    Ok(value)
}

fn disks(value: &Bound<'_, PyAny>) -> PyResult<Vec<DiskPath>> {
    let wrong = || errors::config(value.py(), "disks", shown(value), "a list of (path, bytes or None, slots)");
    let list = value.cast::<PyList>().map_err(|_| wrong())?;
    let one = |item: Bound<'_, PyAny>| -> PyResult<DiskPath> {
        let (path, bytes, blocks): (PathBuf, Option<u64>, u32) =
            item.cast::<PyTuple>().map_err(|_| wrong())?.extract().map_err(|_| wrong())?;
        Ok(bytes.map_or_else(|| DiskPath::with_blocks(&path, blocks), |bytes| DiskPath::with_bytes(&path, bytes)))
    };
    list.iter().map(one).collect()
}
