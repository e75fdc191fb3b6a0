//! `kvhoist.Queue`: submit, an eventfd, drain.

use std::{
    collections::HashMap,
    os::fd::{AsRawFd, RawFd},
    sync::{Mutex, MutexGuard},
};

use kvhoist::{BlockKey, Cache, CompletionQueue};
use pyo3::{
    prelude::*,
    types::{PyList, PyTuple},
};

use crate::{
    blocks::Blocks,
    cache::{Movement, Process},
    convert::{self, OnError},
    errors, keys,
};

/// Submissions that nobody waits for, and their results.
#[pyclass(frozen, module = "kvhoist", name = "Queue")]
pub struct PyQueue {
    process: Process,
    cache: Cache,
    queue: CompletionQueue,
    /// Memory in use by submissions that were not drained yet. Also their lock: a submission is entered before it can
    /// be drained.
    under_way: Mutex<HashMap<u64, Blocks>>,
}

impl PyQueue {
    pub fn new(process: Process, cache: Cache, queue: CompletionQueue) -> Self {
        PyQueue { process, cache, queue, under_way: Mutex::default() }
    }

    fn under_way(&self) -> MutexGuard<'_, HashMap<u64, Blocks>> {
        self.under_way.lock().expect("nothing panics under it")
    }

    fn submit(&self, py: Python<'_>, keys: &[BlockKey], blocks: Blocks, movement: Movement) -> PyResult<u64> {
        let submitted = py.detach(|| {
            let mut blocks = blocks;
            let mut under_way = self.under_way();
            let ticket = match &movement {
                Movement::Load => self.queue.submit_load(keys, &blocks.segments),
                Movement::Store(parent) => self.queue.submit_store(keys, parent.as_ref(), &blocks.segments),
            };
            match ticket {
                Ok(ticket) => {
                    under_way.insert(ticket, blocks);
                    Ok(ticket)
                }
                Err(error) => {
                    drop(under_way);
                    blocks.give_back(&self.cache);
                    Err(error)
                }
            }
        });
        submitted.map_err(|error| errors::to_python(py, &error))
    }
}

#[pymethods]
impl PyQueue {
    /// Readable when `drain` has something to give. The queue's own: not to be read from or closed.
    #[getter]
    fn event_fd(&self) -> RawFd {
        self.queue.event_fd().as_raw_fd()
    }

    #[getter]
    fn outstanding(&self) -> usize {
        self.queue.outstanding()
    }

    /// Begins a load; returns its ticket. As `Cache.load`.
    fn submit_load(&self, py: Python<'_>, keys: &Bound<'_, PyAny>, blocks: &Bound<'_, PyAny>) -> PyResult<u64> {
        self.process.check(py)?;
        let keys = keys::from_python(keys)?;
        let blocks = Blocks::from_python(&self.cache, blocks, true)?;
        self.submit(py, &keys, blocks, Movement::Load)
    }

    /// Begins a store; returns its ticket. As `Cache.store`.
    #[pyo3(signature = (keys, blocks, parent=None))]
    fn submit_store(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        blocks: &Bound<'_, PyAny>,
        parent: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<u64> {
        self.process.check(py)?;
        let (keys, parent) = (keys::from_python(keys)?, keys::optional(parent)?);
        let blocks = Blocks::from_python(&self.cache, blocks, false)?;
        self.submit(py, &keys, blocks, Movement::Store(parent))
    }

    /// What has completed, oldest first: (ticket, list of results), a failed block's exception in its place.
    fn drain<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.process.check(py)?;
        let done = py.detach(|| {
            let done = self.queue.drain();
            let mut ended = {
                let mut under_way = self.under_way();
                done.iter().filter_map(|completion| under_way.remove(&completion.ticket)).collect::<Vec<_>>()
            };
            ended.iter_mut().for_each(|blocks| blocks.give_back(&self.cache));
            done
        });
        let all = PyList::empty(py);
        for completion in done {
            let results = convert::results(py, completion.results, OnError::Return)?;
            all.append(PyTuple::new(py, [completion.ticket.into_pyobject(py)?.into_any(), results.into_any()])?)?;
        }
        Ok(all)
    }
}

impl Drop for PyQueue {
    fn drop(&mut self) {
        let under_way = std::mem::take(&mut *self.under_way());
        if self.process != Process::this() {
            // As for the cache: what the parent has under way is not ours to end.
            std::mem::forget(under_way);
            return;
        }
        Python::attach(|py| {
            py.detach(|| {
                for mut blocks in under_way.into_values() {
                    blocks.give_back(&self.cache);
                }
            });
        });
    }
}
