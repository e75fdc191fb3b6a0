//! `kvhoist.Queue`: submit, an eventfd, drain.

use std::{
    collections::HashMap,
    os::fd::{AsRawFd, RawFd},
    sync::{Mutex, MutexGuard},
};

use kvhoist::{Cache, CompletionQueue};
use pyo3::{
    PyTraverseError, PyVisit,
    prelude::*,
    types::{PyList, PyTuple},
};

use crate::{
    blocks::Blocks,
    cache::Movement,
    convert::{self, OnError},
    errors, keys,
    process::ProcessLocal,
};

/// Submissions without a waiting caller, and their results.
#[pyclass(frozen, module = "kvhoist", name = "Queue")]
pub struct PyQueue {
    submissions: ProcessLocal<Submissions>,
}

struct Submissions {
    cache: Cache,
    queue: CompletionQueue,
    /// Memory of submissions that were not drained yet, by ticket. Used with the interpreter's lock only, and nothing
    /// of Python's is called under its own: no drain comes between a submission and its entry, and the collector of
    /// cycles finds it unlocked, and the same from one of its passes to the next.
    under_way: Mutex<HashMap<u64, Blocks>>,
}

/// Where the blocks of a submission lie, as Python says it.
enum Places<'a, 'py> {
    /// One entry for each block.
    Blocks(&'a Bound<'py, PyAny>),
    /// The addresses of all segments, and the bytes of those of one block.
    Addresses(&'a Bound<'py, PyAny>, &'a Bound<'py, PyAny>),
}

impl Submissions {
    fn under_way(&self) -> MutexGuard<'_, HashMap<u64, Blocks>> {
        self.under_way.lock().expect("nothing panics under it")
    }

    fn submit(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        places: &Places<'_, '_>,
        movement: &Movement,
    ) -> PyResult<u64> {
        let keys = keys::from_python(keys)?;
        let blocks = match places {
            Places::Blocks(blocks) => Blocks::from_python(&self.cache, blocks, matches!(movement, Movement::Load))?,
            Places::Addresses(addresses, sizes) => Blocks::from_addresses(&self.cache, keys.len(), addresses, sizes)?,
        };
        let ticket = match movement {
            Movement::Load => blocks.loan.submit_load(&self.queue, &keys, &blocks.segments),
            Movement::Store(parent) => blocks.loan.submit_store(&self.queue, &keys, parent.as_ref(), &blocks.segments),
        };
        let ticket = ticket.map_err(|error| errors::to_python(py, &error))?;
        self.under_way().insert(ticket, blocks);
        Ok(ticket)
    }
}

impl PyQueue {
    pub fn new(cache: Cache, queue: CompletionQueue) -> Self {
        PyQueue { submissions: ProcessLocal::new(Submissions { cache, queue, under_way: Mutex::default() }) }
    }
}

#[pymethods]
impl PyQueue {
    /// Readable when `drain` has something to give. The queue's own: not to be read from or closed.
    #[getter]
    fn event_fd(&self, py: Python<'_>) -> PyResult<RawFd> {
        Ok(self.submissions.get(py)?.queue.event_fd().as_raw_fd())
    }

    /// Submissions that were not drained yet.
    #[getter]
    fn outstanding(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.submissions.get(py)?.queue.outstanding())
    }

    /// Begins a load; returns its ticket. Buffer objects are kept until it was drained. BusyError past the depth.
    fn submit_load(&self, py: Python<'_>, keys: &Bound<'_, PyAny>, blocks: &Bound<'_, PyAny>) -> PyResult<u64> {
        self.submissions.get(py)?.submit(py, keys, &Places::Blocks(blocks), &Movement::Load)
    }

    /// Begins a store; returns its ticket. As `submit_load`.
    #[pyo3(signature = (keys, blocks, parent=None))]
    fn submit_store(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        blocks: &Bound<'_, PyAny>,
        parent: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<u64> {
        let movement = Movement::Store(keys::optional(parent)?);
        self.submissions.get(py)?.submit(py, keys, &Places::Blocks(blocks), &movement)
    }

    /// Begins a load of blocks in segments of registered memory, all of them cut in the same way.
    fn submit_load_pages(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        addresses: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
    ) -> PyResult<u64> {
        self.submissions.get(py)?.submit(py, keys, &Places::Addresses(addresses, sizes), &Movement::Load)
    }

    /// Begins a store of blocks from segments of registered memory, all of them cut in the same way.
    #[pyo3(signature = (keys, addresses, sizes, parent=None))]
    fn submit_store_pages(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        addresses: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
        parent: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<u64> {
        let movement = Movement::Store(keys::optional(parent)?);
        self.submissions.get(py)?.submit(py, keys, &Places::Addresses(addresses, sizes), &movement)
    }

    /// Completed submissions, oldest first: (ticket, results), with an exception in the place of a failed block.
    fn drain<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let submissions = self.submissions.get(py)?;
        let done = submissions.queue.drain();
        let ended = {
            let mut under_way = submissions.under_way();
            done.iter().filter_map(|(ticket, _)| under_way.remove(ticket)).collect::<Vec<_>>()
        };
        drop(ended);
        let all = PyList::empty(py);
        for (ticket, results) in done {
            let results = convert::results(py, results, OnError::Return)?;
            all.append(PyTuple::new(py, [ticket.into_pyobject(py)?.into_any(), results.into_any()])?)?;
        }
        Ok(all)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        let Some(submissions) = self.submissions.here() else { return Ok(()) };
        submissions.under_way().values().try_for_each(|blocks| blocks.visit(&visit))
    }

    /// Waits for submissions in flight, and releases their memory.
    fn __clear__(&self) {
        if let Some(submissions) = self.submissions.here() {
            let under_way = std::mem::take(&mut *submissions.under_way());
            drop(under_way);
        }
    }
}
