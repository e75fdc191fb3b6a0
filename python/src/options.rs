//! The arguments of `Cache(...)` as the engine's configuration.

use std::path::PathBuf;

use kvhoist::{Config, DeviceKind, DirectIo, DiskPath, EngineMode, Eviction, StorageKind, WritePolicy};
use pyo3::{
    prelude::*,
    types::{PyBool, PyDict, PyList, PyTuple},
};

use crate::errors::{self, shown};

/// Settings whose names and values are the engine's.
pub fn config(py: Python<'_>, settings: &Bound<'_, PyDict>) -> PyResult<Config> {
    let mut config = Config::default().device(DeviceKind::Simulated);
    for (name, value) in settings.iter() {
        let name: String = name.extract()?;
        config = set(py, config, &name, &value)?;
    }
    Ok(config)
}

fn set(py: Python<'_>, config: Config, name: &str, value: &Bound<'_, PyAny>) -> PyResult<Config> {
    Ok(match name {
        "block_bytes" => config.block_bytes(number(value, "block_bytes")?),
        "host_blocks" => config.host_blocks(number(value, "host_blocks")?),
        "disks" => config.disks(disks(value)?),
        "namespace" => config.namespace(text(value, "namespace")?),
        "write_policy" | "eviction_policy" | "storage" | "direct_io" | "device" | "cufile" => {
            return choose(config, name, value);
        }
        "bypass_host" => {
            let on = value.extract().map_err(|_| errors::config(py, "bypass_host", shown(value), "a bool"))?;
            config.bypass_host(on)
        }
        "device_ordinal" => config.device_ordinal(number(value, "device_ordinal")?),
        "device_blocks" => config.device_blocks(number(value, "device_blocks")?),
        "copy_blocks_max" => config.copy_blocks_max(number(value, "copy_blocks_max")?),
        "selective_hits" => config.selective_hits(number(value, "selective_hits")?),
        "write_budget" => config.write_budget(number::<u64>(value, "write_budget")?),
        "drive_writes_per_day" => config.drive_writes_per_day(real(value, "drive_writes_per_day")?),
        "drive_bytes" => config.drive_bytes(number::<u64>(value, "drive_bytes")?),
        "blocking_threads" => config.blocking_threads(number(value, "blocking_threads")?),
        "read_bytes_in_flight_max" => config.read_bytes_in_flight_max(number(value, "read_bytes_in_flight_max")?),
        "write_bytes_in_flight_max" => config.write_bytes_in_flight_max(number(value, "write_bytes_in_flight_max")?),
        "movements_max" => config.movements_max(number(value, "movements_max")?),
        "waiters_max" => config.waiters_max(number(value, "waiters_max")?),
        "background_max" => config.background_max(number(value, "background_max")?),
        "quarantine_max" => config.quarantine_max(number(value, "quarantine_max")?),
        "disk_failures_max" => config.disk_failures_max(number(value, "disk_failures_max")?),
        "workers" => config.workers(number::<u32>(value, "workers")?),
        "spin_us" => config.spin_us(number(value, "spin_us")?),
        "deadline_ms" => config.deadline_ms(number(value, "deadline_ms")?),
        other => return Err(errors::argument(py, "settings", format!("{other:?}"), "a setting of the engine")),
    })
}

/// Settings that are one of a few words.
fn choose(config: Config, name: &str, value: &Bound<'_, PyAny>) -> PyResult<Config> {
    Ok(match name {
        "write_policy" => config.write_policy(word(
            value,
            "write_policy",
            &[
                ("write_through", WritePolicy::WriteThrough),
                ("write_through_selective", WritePolicy::WriteThroughSelective),
                ("write_back", WritePolicy::WriteBack),
                ("by_value", WritePolicy::ByValue),
            ],
        )?),
        "eviction_policy" => {
            let kinds = [("lru", Eviction::Lru), ("rb", Eviction::Rb), ("rb_refuse", Eviction::RbRefuse)];
            config.eviction_policy(word(value, "eviction_policy", &kinds)?)
        }
        "storage" => {
            let kinds =
                [("auto", StorageKind::Auto), ("uring", StorageKind::Uring), ("blocking", StorageKind::Blocking)];
            config.storage(word(value, "storage", &kinds)?)
        }
        "direct_io" => {
            let kinds = [("require", DirectIo::Require), ("prefer", DirectIo::Prefer)];
            config.direct_io(word(value, "direct_io", &kinds)?)
        }
        "device" => {
            let kinds = [("auto", DeviceKind::Auto), ("cuda", DeviceKind::Cuda), ("simulated", DeviceKind::Simulated)];
            config.device(word(value, "device", &kinds)?)
        }
        _ => {
            let modes = [("off", EngineMode::Off), ("auto", EngineMode::Auto), ("on", EngineMode::On)];
            config.cufile(word(value, "cufile", &modes)?)
        }
    })
}

fn number<T: TryFrom<u64>>(value: &Bound<'_, PyAny>, field: &'static str) -> PyResult<T> {
    let flag = value.is_instance_of::<PyBool>();
    let number = value.extract::<u64>().ok().filter(|_| !flag).and_then(|number| T::try_from(number).ok());
    number.ok_or_else(|| errors::config(value.py(), field, shown(value), "a whole number in its range"))
}

fn real(value: &Bound<'_, PyAny>, field: &'static str) -> PyResult<f64> {
    let number = value.extract::<f64>().ok().filter(|_| !value.is_instance_of::<PyBool>());
    number.ok_or_else(|| errors::config(value.py(), field, shown(value), "a number"))
}

fn text(value: &Bound<'_, PyAny>, field: &'static str) -> PyResult<String> {
    value.extract().map_err(|_| errors::config(value.py(), field, shown(value), "a str"))
}

fn word<T: Copy>(value: &Bound<'_, PyAny>, field: &'static str, words: &[(&str, T)]) -> PyResult<T> {
    let found: Option<String> = value.extract().ok();
    let known = words.iter().find(|(name, _)| Some(*name) == found.as_deref());
    known.map(|(_, value)| *value).ok_or_else(|| {
        let expected = words.iter().map(|(name, _)| format!("{name:?}")).collect::<Vec<_>>().join(", ");
        errors::config(value.py(), field, shown(value), format!("one of {expected}"))
    })
}

fn disks(value: &Bound<'_, PyAny>) -> PyResult<Vec<DiskPath>> {
    let wrong = || errors::config(value.py(), "disks", shown(value), "a list of (path, slots)");
    let list = value.cast::<PyList>().map_err(|_| wrong())?;
    let one = |item: Bound<'_, PyAny>| -> PyResult<DiskPath> {
        let pair = item.cast::<PyTuple>().map_err(|_| wrong())?;
        let (path, blocks): (PathBuf, u32) = pair.extract().map_err(|_| wrong())?;
        Ok(DiskPath::with_blocks(path, blocks))
    };
    list.iter().map(one).collect()
}
