//! The engine's errors as the exceptions of `kvhoist.errors`.
//!
//! The classes are Python's, so that some of them can be built-in exceptions as well: a bad setting is also a
//! `ValueError`, a deadline also a `TimeoutError`.

use std::{io, sync::Arc};

use kvhoist::{Error, ServiceFault};
use pyo3::{prelude::*, sync::PyOnceLock, types::PyType};

use crate::keys::type_name;

/// The module that defines the classes, imported once.
fn class<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyType>> {
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module = MODULE.get_or_try_init(py, || py.import("kvhoist.errors").map(Bound::unbind))?;
    Ok(module.bind(py).getattr(name)?.cast_into::<PyType>()?)
}

/// An exception of the class `name` with these arguments; whatever went wrong with that is an exception as well.
pub fn exception(py: Python<'_>, name: &str, message: &str) -> PyErr {
    match class(py, name) {
        Ok(class) => PyErr::from_type(class, message.to_owned()),
        Err(error) => error,
    }
}

/// The Python name of a setting.
const SETTINGS: [(&str, &str); 6] = [
    ("disks.blocks", "disk_blocks"),
    ("disks.bytes", "capacity"),
    ("disks.path", "path"),
    ("disks", "path"),
    // Of a service, in which a space has the part that its client asks for.
    ("capacity_bytes", "capacity"),
    ("paths", "path"),
];

/// The exception for an engine's error.
pub fn to_python(py: Python<'_>, error: &Error) -> PyErr {
    let error = &error.clone().with_settings_named(&SETTINGS);
    let name = match error {
        Error::Config { .. } => "ConfigError",
        Error::Argument { .. } => "ArgumentError",
        Error::Store { .. } => "StoreError",
        Error::Busy { .. } => "BusyError",
        Error::Timeout { .. } => "DeadlineError",
        Error::Refused { .. } => "RefusedError",
        Error::Io { .. } => "IoError",
        Error::Copy { .. } => "CopyError",
        Error::Unavailable { .. } => "UnavailableError",
        Error::Service { fault, .. } => service(*fault),
        Error::Closed => "ClosedError",
        _ => "Error",
    };
    let exception = exception(py, name, &error.to_string());
    let detail = match error {
        Error::Config { field, .. } => exception.value(py).setattr("field", *field),
        Error::Io { source, .. } => exception.value(py).setattr("errno", source.raw_os_error()),
        _ => Ok(()),
    };
    detail.err().unwrap_or(exception)
}

/// The exception for the error of a cache's close, which is never refused because of an earlier one: each gets the same
/// result.
pub fn of_close(py: Python<'_>, error: &Error) -> PyErr {
    if !matches!(error, Error::Closed) {
        return to_python(py, error);
    }
    let message = "found a cache that a defect has ended, expected one that runs: blocks that were not on disk by then \
                   are lost; report the panic on standard error, and open the cache anew";
    exception(py, "ClosedError", message)
}

/// The exception class for a fault of a node's service.
fn service(fault: ServiceFault) -> &'static str {
    match fault {
        ServiceFault::Busy => "BusyError",
        ServiceFault::Timeout | ServiceFault::Abandoned => "DeadlineError",
        ServiceFault::Argument | ServiceFault::Memory => "ArgumentError",
        ServiceFault::Capacity => "StoreError",
        ServiceFault::Refused => "RefusedError",
        ServiceFault::Io => "IoError",
        // Away, draining, and whatever keeps this client from its service.
        _ => "UnavailableError",
    }
}

/// An `ArgumentError` in the engine's words.
pub fn argument(py: Python<'_>, what: &'static str, found: impl ToString, expected: impl ToString) -> PyErr {
    to_python(py, &Error::Argument { what, found: found.to_string(), expected: expected.to_string() })
}

/// A `ConfigError` in the engine's words.
pub fn config(py: Python<'_>, field: &'static str, found: impl ToString, expected: impl ToString) -> PyErr {
    to_python(py, &Error::Config { field, found: found.to_string(), expected: expected.to_string() })
}

/// A system call that failed.
pub fn io_error(op: &'static str, path: &'static str, source: io::Error) -> Error {
    Error::Io { op, path: path.into(), source: Arc::new(source) }
}

/// The error of a call in a forked child.
pub fn forked(py: Python<'_>) -> PyErr {
    let message = "found a cache that another process opened, expected one opened by this process: its threads and \
                   files did not come along in the fork; open a cache in the child, or fork first";
    exception(py, "ForkError", message)
}

/// A value as its `repr`, cut to a line.
pub fn shown(value: &Bound<'_, PyAny>) -> String {
    let text = value.repr().map_or_else(|_| type_name(value), |repr| repr.to_string());
    text.chars().take(80).collect()
}
