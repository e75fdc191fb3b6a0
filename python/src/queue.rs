//! `kvhoist.Queue`: submit, an eventfd, drain.

use std::{
    collections::HashMap,
    os::fd::{AsRawFd, RawFd},
    sync::{Mutex, MutexGuard},
};

use kvhoist::{BlockKey, Cache, CompletionQueue, Error};
use pyo3::{
    PyTraverseError, PyVisit,
    prelude::*,
    types::{PyList, PyTuple},
};

use crate::{
    blocks::{self, Blocks},
    buffer::Buffer,
    cache::Movement,
    client_queue::{ClientQueue, Completion},
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
    /// Dropped first: then nothing uses the memory.
    queue: Queue,
    /// Memory of submissions that were not drained yet, by ticket. Used with the interpreter's lock only, and nothing
    /// of Python's is called under its own: no drain comes between a submission and its entry, and the collector of
    /// cycles finds it unlocked, and the same from one of its passes to the next.
    under_way: Mutex<HashMap<u64, Kept>>,
}

/// Who moves the blocks.
enum Queue {
    Cache(Cache, CompletionQueue),
    Client(ClientQueue),
}

/// The memory of a submission.
enum Kept {
    Blocks(Blocks),
    Buffers(Vec<Buffer>),
}

impl Kept {
    /// Shows the objects that are kept to the collector of cycles.
    fn visit(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        match self {
            Kept::Blocks(blocks) => blocks.visit(visit),
            Kept::Buffers(buffers) => buffers.iter().try_for_each(|buffer| buffer.visit(visit)),
        }
    }
}

/// Where the blocks of a submission lie, as Python says it.
enum Places<'a, 'py> {
    /// One entry for each block.
    Blocks(&'a Bound<'py, PyAny>),
    /// The addresses of all segments, and the bytes of those of one block.
    Addresses(&'a Bound<'py, PyAny>, &'a Bound<'py, PyAny>),
}

impl Queue {
    fn event_fd(&self) -> RawFd {
        match self {
            Queue::Cache(_, queue) => queue.event_fd().as_raw_fd(),
            Queue::Client(queue) => queue.event_fd().as_raw_fd(),
        }
    }

    fn outstanding(&self) -> usize {
        match self {
            Queue::Cache(_, queue) => queue.outstanding(),
            Queue::Client(queue) => queue.outstanding(),
        }
    }

    fn drain(&self) -> Vec<Completion> {
        match self {
            Queue::Cache(_, queue) => queue.drain(),
            Queue::Client(queue) => queue.drain(),
        }
    }

    /// Submits a movement: its ticket, and the memory to be kept until it is drained.
    fn submit(
        &self,
        py: Python<'_>,
        keys: Vec<BlockKey>,
        places: &Places<'_, '_>,
        movement: Movement,
    ) -> PyResult<(u64, Kept)> {
        let failed = |error: Error| errors::to_python(py, &error);
        let writable = matches!(movement, Movement::Load);
        match self {
            Queue::Cache(cache, queue) => {
                let blocks = match places {
                    Places::Blocks(blocks) => Blocks::from_python(cache, blocks, writable)?,
                    Places::Addresses(addresses, sizes) => Blocks::from_addresses(cache, keys.len(), addresses, sizes)?,
                };
                let ticket = match movement {
                    Movement::Load => blocks.region.submit_load(queue, &keys, &blocks.segments),
                    Movement::Store(parent) => {
                        blocks.region.submit_store(queue, &keys, parent.as_ref(), &blocks.segments)
                    }
                };
                Ok((ticket.map_err(failed)?, Kept::Blocks(blocks)))
            }
            Queue::Client(queue) => {
                let (segments, buffers) = match places {
                    Places::Blocks(blocks) => blocks::parse(blocks, writable)?,
                    Places::Addresses(addresses, sizes) => {
                        (blocks::parse_addresses(keys.len(), addresses, sizes)?, Vec::new())
                    }
                };
                let lent = buffers.iter().map(Buffer::segment).collect();
                Ok((queue.submit(movement, keys, segments, lent).map_err(failed)?, Kept::Buffers(buffers)))
            }
        }
    }
}

impl Submissions {
    fn under_way(&self) -> MutexGuard<'_, HashMap<u64, Kept>> {
        self.under_way.lock().expect("nothing panics under it")
    }

    fn submit(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        places: &Places<'_, '_>,
        movement: Movement,
    ) -> PyResult<u64> {
        let (ticket, kept) = self.queue.submit(py, keys::from_python(keys)?, places, movement)?;
        self.under_way().insert(ticket, kept);
        Ok(ticket)
    }
}

impl PyQueue {
    pub fn of_cache(cache: Cache, queue: CompletionQueue) -> Self {
        PyQueue::new(Queue::Cache(cache, queue))
    }

    pub fn of_client(queue: ClientQueue) -> Self {
        PyQueue::new(Queue::Client(queue))
    }

    fn new(queue: Queue) -> Self {
        PyQueue { submissions: ProcessLocal::new(Submissions { queue, under_way: Mutex::default() }) }
    }
}

#[pymethods]
impl PyQueue {
    /// Readable when `drain` has something to give. The queue's own: not to be read from or closed.
    #[getter]
    fn event_fd(&self, py: Python<'_>) -> PyResult<RawFd> {
        Ok(self.submissions.get(py)?.queue.event_fd())
    }

    /// Submissions that were not drained yet.
    #[getter]
    fn outstanding(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.submissions.get(py)?.queue.outstanding())
    }

    /// Begins a load; returns its ticket. Buffer objects are kept until it was drained. BusyError past the depth.
    fn submit_load(&self, py: Python<'_>, keys: &Bound<'_, PyAny>, blocks: &Bound<'_, PyAny>) -> PyResult<u64> {
        self.submissions.get(py)?.submit(py, keys, &Places::Blocks(blocks), Movement::Load)
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
        self.submissions.get(py)?.submit(py, keys, &Places::Blocks(blocks), movement)
    }

    /// Begins a load of blocks in segments of registered memory, all of them cut in the same way.
    fn submit_load_pages(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        addresses: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
    ) -> PyResult<u64> {
        self.submissions.get(py)?.submit(py, keys, &Places::Addresses(addresses, sizes), Movement::Load)
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
        self.submissions.get(py)?.submit(py, keys, &Places::Addresses(addresses, sizes), movement)
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
        submissions.under_way().values().try_for_each(|kept| kept.visit(&visit))
    }

    /// Waits until submissions in flight do not use their memory, and releases it.
    fn __clear__(&self) {
        if let Some(submissions) = self.submissions.here() {
            if let Queue::Client(queue) = &submissions.queue {
                queue.end();
            }
            let under_way = std::mem::take(&mut *submissions.under_way());
            drop(under_way);
        }
    }
}
