//! `kvhoist.Cache`: the engine's cache, as Python holds it.

use std::{
    mem::ManuallyDrop,
    sync::atomic::{AtomicBool, Ordering},
};

use kvhoist::{BlockKey, Cache, Error, block_on};
use pyo3::{
    prelude::*,
    types::{PyBytes, PyDict, PyList},
};

use crate::{
    blocks::Blocks,
    buffer::Buffer,
    convert::{self, OnError},
    errors, keys, options,
    queue::PyQueue,
    region::PyRegion,
};

/// The process that opened a cache: its threads and its ring exist there only.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Process(u32);

impl Process {
    pub fn this() -> Self {
        Process(std::process::id())
    }

    /// An error in a forked child.
    pub fn check(self, py: Python<'_>) -> PyResult<()> {
        if self == Process::this() { Ok(()) } else { Err(errors::forked(py)) }
    }
}

/// The native half of `kvhoist.Cache`.
#[pyclass(frozen, subclass, module = "kvhoist._native", name = "Cache")]
pub struct PyCache {
    process: Process,
    cache: ManuallyDrop<Cache>,
    closed: AtomicBool,
}

impl PyCache {
    fn use_it(&self, py: Python<'_>) -> PyResult<&Cache> {
        self.process.check(py)?;
        Ok(&self.cache)
    }

    /// Runs a load or a store to its end, and lets go of memory that was lent for it.
    fn moved<'py>(
        &self,
        py: Python<'py>,
        movement: Movement,
        keys: &Bound<'_, PyAny>,
        places: Places<'_, '_>,
        errors: &str,
    ) -> PyResult<Bound<'py, PyList>> {
        let (on_error, cache) = (OnError::parse(py, errors)?, self.use_it(py)?);
        let keys = keys::from_python(keys)?;
        let mut blocks = match places {
            Places::Blocks(blocks) => Blocks::from_python(cache, blocks, matches!(movement, Movement::Load))?,
            Places::Lists(addresses, sizes) => Blocks::from_lists(py, keys.len(), addresses, sizes)?,
        };
        let results = py.detach(|| {
            let results = match &movement {
                Movement::Load => block_on(cache.load_into(&keys, &blocks.segments)),
                Movement::Store(parent) => block_on(cache.store_from(&keys, parent.as_ref(), &blocks.segments)),
            };
            blocks.give_back(cache);
            results
        });
        convert::results(py, results.map_err(|error| errors::to_python(py, &error))?, on_error)
    }
}

/// Where the blocks of a call lie, as Python says it.
#[derive(Clone, Copy)]
enum Places<'a, 'py> {
    /// One entry for each block.
    Blocks(&'a Bound<'py, PyAny>),
    /// Addresses and bytes of as many segments for each.
    Lists(&'a Bound<'py, PyList>, &'a Bound<'py, PyList>),
}

/// Which way blocks go.
pub enum Movement {
    Load,
    /// With the key before the first.
    Store(Option<BlockKey>),
}

#[pymethods]
impl PyCache {
    #[new]
    #[pyo3(signature = (settings))]
    fn open(py: Python<'_>, settings: &Bound<'_, PyDict>) -> PyResult<Self> {
        let config = options::config(py, settings)?;
        let cache = py.detach(|| block_on(Cache::open(config))).map_err(|error| errors::to_python(py, &error))?;
        Ok(PyCache { process: Process::this(), cache: ManuallyDrop::new(cache), closed: AtomicBool::new(false) })
    }

    #[getter]
    fn block_bytes(&self) -> usize {
        self.cache.config().block_bytes
    }

    #[getter]
    fn namespace(&self) -> &str {
        &self.cache.config().namespace
    }

    #[getter]
    fn closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    fn match_prefix(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let cache = self.use_it(py)?;
        let keys = keys::from_python(keys)?;
        Ok(py.detach(|| cache.match_len(&keys)))
    }

    /// Of one key, with the interpreter's lock held: to let go of it would take longer than the answer.
    fn contains(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> PyResult<bool> {
        let cache = self.use_it(py)?;
        Ok(cache.match_len(&[keys::one(key)?]) == 1)
    }

    fn touch(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        let (cache, keys) = (self.use_it(py)?, keys::from_python(keys)?);
        py.detach(|| cache.touch(&keys));
        Ok(())
    }

    fn contains_each<'py>(&self, py: Python<'py>, keys: &Bound<'_, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let cache = self.use_it(py)?;
        let keys = keys::from_python(keys)?;
        let found = py.detach(|| keys.iter().map(|key| cache.match_len(&[*key]) == 1).collect::<Vec<_>>());
        PyList::new(py, found)
    }

    fn register_address(&self, py: Python<'_>, address: usize, nbytes: usize, pin: bool) -> PyResult<PyRegion> {
        PyRegion::new(py, self.use_it(py)?, None, (address, nbytes), pin)
    }

    fn register_buffer(&self, py: Python<'_>, memory: &Bound<'_, PyAny>, pin: bool) -> PyResult<PyRegion> {
        let cache = self.use_it(py)?;
        let buffer = Buffer::new(memory, true)?;
        let at = (buffer.ptr().expose_provenance(), buffer.len());
        PyRegion::new(py, cache, Some(buffer), at, pin)
    }

    fn load<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'_, PyAny>,
        blocks: &Bound<'_, PyAny>,
        errors: &str,
    ) -> PyResult<Bound<'py, PyList>> {
        self.moved(py, Movement::Load, keys, Places::Blocks(blocks), errors)
    }

    fn store<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'_, PyAny>,
        blocks: &Bound<'_, PyAny>,
        parent: Option<&Bound<'_, PyAny>>,
        errors: &str,
    ) -> PyResult<Bound<'py, PyList>> {
        self.moved(py, Movement::Store(keys::optional(parent)?), keys, Places::Blocks(blocks), errors)
    }

    fn load_pages<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'_, PyAny>,
        addresses: &Bound<'_, PyList>,
        sizes: &Bound<'_, PyList>,
        errors: &str,
    ) -> PyResult<Bound<'py, PyList>> {
        self.moved(py, Movement::Load, keys, Places::Lists(addresses, sizes), errors)
    }

    fn store_pages<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'_, PyAny>,
        addresses: &Bound<'_, PyList>,
        sizes: &Bound<'_, PyList>,
        parent: Option<&Bound<'_, PyAny>>,
        errors: &str,
    ) -> PyResult<Bound<'py, PyList>> {
        self.moved(py, Movement::Store(keys::optional(parent)?), keys, Places::Lists(addresses, sizes), errors)
    }

    fn get<'py>(&self, py: Python<'py>, key: &Bound<'_, PyAny>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let (cache, key) = (self.use_it(py)?, keys::one(key)?);
        let lease = py.detach(|| block_on(cache.fetch(&key))).map_err(|error| errors::to_python(py, &error))?;
        Ok(lease.map(|lease| PyBytes::new(py, &lease)))
    }

    fn prefetch(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let (cache, keys) = (self.use_it(py)?, keys::from_python(keys)?);
        py.detach(|| cache.prefetch(&keys)).map_err(|error| errors::to_python(py, &error))
    }

    fn remove(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> PyResult<bool> {
        let (cache, key) = (self.use_it(py)?, keys::one(key)?);
        py.detach(|| block_on(cache.remove(&key))).map_err(|error| errors::to_python(py, &error))
    }

    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        let cache = self.use_it(py)?;
        py.detach(|| block_on(cache.sync())).map_err(|error| errors::to_python(py, &error))
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let cache = self.use_it(py)?;
        convert::stats(py, &py.detach(|| cache.stats()))
    }

    fn validate(&self, py: Python<'_>) -> PyResult<()> {
        let cache = self.use_it(py)?;
        py.detach(|| cache.validate()).map_err(pyo3::exceptions::PyAssertionError::new_err)
    }

    fn queue(&self, py: Python<'_>, depth: usize) -> PyResult<PyQueue> {
        let cache = self.use_it(py)?;
        let queue = cache.completion_queue(depth).map_err(|error| errors::to_python(py, &error))?;
        Ok(PyQueue::new(self.process, Cache::clone(cache), queue))
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let cache = self.use_it(py)?;
        self.closed.store(true, Ordering::Release);
        match py.detach(|| block_on(cache.close())) {
            Ok(()) | Err(Error::Closed) => Ok(()),
            Err(error) => Err(errors::to_python(py, &error)),
        }
    }
}

impl Drop for PyCache {
    fn drop(&mut self) {
        if self.process != Process::this() {
            // A forked child has the memory of the parent's threads, not the threads: to drop it would wait for them,
            // or wake the parent's. It goes with the process.
            return;
        }
        // SAFETY: dropped here and nowhere else.
        let cache = unsafe { ManuallyDrop::take(&mut self.cache) };
        // What is dirty is written, and nothing uses the program's memory any longer, before its owner lets go of it.
        Python::attach(|py| py.detach(|| drop(block_on(cache.close()))));
    }
}
