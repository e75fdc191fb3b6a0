//! `kvhoist.Answers`: whether one key is resident, in the words of an engine that asks for each key of each prompt.

use kvhoist::Cache;
use pyo3::{
    PyTraverseError, PyVisit,
    prelude::*,
    types::{PyBytes, PyDict},
};

use crate::{keys, process::ProcessLocal};

/// Answers with objects of the engine's own. `Cache.answers` makes it.
#[pyclass(frozen, module = "kvhoist", name = "Answers")]
pub struct PyAnswers {
    cache: ProcessLocal<Cache>,
    resident: Py<PyAny>,
    absent: Py<PyAny>,
    /// Keys with answers that override the index.
    known: Py<PyDict>,
}

impl PyAnswers {
    pub fn new(cache: Cache, resident: Py<PyAny>, absent: Py<PyAny>, known: Py<PyDict>) -> Self {
        PyAnswers { cache: ProcessLocal::new(cache), resident, absent, known }
    }
}

#[pymethods]
impl PyAnswers {
    /// With the interpreter's lock held: to let go of it would take longer than the answer.
    #[pyo3(signature = (key, context=None))]
    fn answer(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        context: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        // The engine passes the request's context; the answer does not depend on it.
        let _ = context;
        let known = self.known.bind(py);
        if !known.is_empty()
            && let Some(answer) = known.get_item(key)?
        {
            return Ok(answer.unbind());
        }
        // An object that is no name is absent, and so is every key in a forked child: no exception may be raised here.
        let is_resident = match (self.cache.here(), key.cast::<PyBytes>()) {
            (Some(cache), Ok(name)) => cache.contains(&keys::of_chunk(name.as_bytes())),
            _ => false,
        };
        Ok(if is_resident { &self.resident } else { &self.absent }.clone_ref(py))
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.resident)?;
        visit.call(&self.absent)?;
        visit.call(&self.known)
    }
}
