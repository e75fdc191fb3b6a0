//! `kvhoist.Keys`: the keys of resident blocks, one after the other.

use std::sync::Mutex;

use kvhoist::BlockKey;
use pyo3::{prelude::*, types::PyBytes};

use crate::process::ProcessLocal;

/// Yields keys as `bytes` of length 32. `Cache.keys` makes it.
#[pyclass(frozen, module = "kvhoist._native", name = "Keys")]
pub struct PyKeys(ProcessLocal<Mutex<Keys>>);

type Keys = Box<dyn Iterator<Item = BlockKey> + Send>;

impl PyKeys {
    pub fn new(keys: impl Iterator<Item = BlockKey> + Send + 'static) -> Self {
        PyKeys(ProcessLocal::new(Mutex::new(Box::new(keys))))
    }
}

#[pymethods]
impl PyKeys {
    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    /// With the interpreter's lock held: most keys are there already, and a page of them takes microseconds.
    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let next = self.0.get(py)?.lock().expect("nothing panics under it").next();
        Ok(next.map(|key| PyBytes::new(py, key.as_bytes())))
    }
}
