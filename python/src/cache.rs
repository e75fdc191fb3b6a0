//! `kvhoist.Cache`: the engine's cache, as Python holds it.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, Ordering},
};

use kvhoist::{BlockKey, Cache};
use pyo3::{
    PyTraverseError, PyVisit,
    prelude::*,
    types::{PyBytes, PyDict, PyList},
};

use crate::{
    answers::PyAnswers,
    blocks::{self, Blocks},
    buffer::Buffer,
    convert::{self, OnError, Sampled, Worn, seconds_of, whole},
    errors, keys,
    layers::{self, PyHeld, PyLayerLoad},
    listing::PyKeys,
    opened::Opened,
    options,
    process::ProcessLocal,
    queue::PyQueue,
    region::{Memory, PyRegion},
    wait,
};

/// The native half of `kvhoist.Cache`.
#[pyclass(frozen, subclass, module = "kvhoist._native", name = "Cache")]
pub struct PyCache {
    opened: ProcessLocal<Opened>,
    closed: AtomicBool,
    block_bytes: usize,
    namespace: String,
}

impl PyCache {
    fn use_it(&self, py: Python<'_>) -> PyResult<&Cache> {
        Ok(&self.opened.get(py)?.cache)
    }

    /// Runs a load or a store to its end, and releases memory that was lent for it.
    fn moved<'py>(
        &self,
        py: Python<'py>,
        movement: &Movement,
        keys: &Bound<'_, PyAny>,
        places: Places<'_, '_>,
        errors: &str,
    ) -> PyResult<Bound<'py, PyList>> {
        let (on_error, opened) = (OnError::parse(py, errors)?, self.opened.get(py)?);
        opened.reap();
        let keys = keys::from_python(keys)?;
        let blocks = match places {
            Places::Blocks(blocks) => Blocks::from_python(&opened.cache, blocks, matches!(movement, Movement::Load))?,
            Places::Lists(addresses, sizes) => Blocks::from_lists(&opened.cache, keys.len(), addresses, sizes)?,
        };
        let waited = wait::interruptible(py, async {
            let results = match movement {
                Movement::Load => blocks.region.load_into(&keys, &blocks.segments).await,
                Movement::Store(parent) => blocks.region.store_from(&keys, parent.as_ref(), &blocks.segments).await,
            };
            blocks.release().await;
            results
        });
        match waited {
            Ok(results) => {
                drop(blocks);
                convert::results(py, results.map_err(|error| errors::to_python(py, &error))?, on_error)
            }
            Err(interrupt) => {
                opened.interrupted().push(blocks);
                Err(interrupt)
            }
        }
    }
}

/// Where the blocks of a call lie, as Python says it.
#[derive(Clone, Copy)]
pub enum Places<'a, 'py> {
    /// One entry for each block.
    Blocks(&'a Bound<'py, PyAny>),
    /// Addresses and bytes of as many segments for each.
    Lists(&'a Bound<'py, PyList>, &'a Bound<'py, PyList>),
}

/// Which way blocks go.
#[derive(Clone, Copy)]
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
        let config = kvhoist_cli::open_remote(config).map_err(|error| errors::to_python(py, &error))?;
        let cache = wait::answer(py, Cache::open(config))?;
        let (block_bytes, namespace) = (cache.config().block_bytes, cache.config().namespace.clone());
        let opened =
            Opened { cache, registrations: Arc::default(), interrupted: Mutex::default(), told: AtomicBool::default() };
        Ok(PyCache { opened: ProcessLocal::new(opened), closed: AtomicBool::new(false), block_bytes, namespace })
    }

    /// Size of every block, bytes.
    #[getter]
    fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// The name that keys belong to.
    #[getter]
    fn namespace(&self) -> &str {
        &self.namespace
    }

    /// True once `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// How many leading keys are resident. One short lock, no I/O, no use counted.
    fn match_prefix(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let (cache, keys) = (self.use_it(py)?, keys::from_python(keys)?);
        Ok(py.detach(|| cache.match_len(&keys)))
    }

    /// Whether a key is resident. One short lock, no I/O, no use counted.
    fn contains(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> PyResult<bool> {
        let cache = self.use_it(py)?;
        // With the interpreter's lock held: to let go of it would take longer than the answer.
        Ok(cache.contains(&keys::one(key)?))
    }

    /// How many blocks are resident, each counted once.
    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.use_it(py)?.len())
    }

    /// A cache is true, also while it is empty: `if cache:` asks whether there is one.
    fn __bool__(&self) -> bool {
        true
    }

    fn __iter__(&self, py: Python<'_>) -> PyResult<PyKeys> {
        self.keys(py)
    }

    /// The keys of all resident blocks.
    fn keys(&self, py: Python<'_>) -> PyResult<PyKeys> {
        Ok(PyKeys::new(self.use_it(py)?.keys()))
    }

    /// Forgets every block that is resident now; how many there were.
    fn clear(&self, py: Python<'_>) -> PyResult<u64> {
        wait::answer(py, self.use_it(py)?.clear())
    }

    /// Answers with these objects; `known` has the names of which the program knows better than the index.
    fn answers(
        &self,
        py: Python<'_>,
        resident: Py<PyAny>,
        absent: Py<PyAny>,
        known: Py<PyDict>,
    ) -> PyResult<PyAnswers> {
        Ok(PyAnswers::new(self.use_it(py)?.clone(), resident, absent, known))
    }

    /// Counts a use of every resident block of a chain, as a load of it would. No I/O.
    fn touch(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        let (cache, keys) = (self.use_it(py)?, keys::from_python(keys)?);
        py.detach(|| cache.touch(&keys));
        Ok(())
    }

    /// Says that a chain is over: its blocks are evicted first. Returns the number of released blocks.
    fn release(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let (cache, keys) = (self.use_it(py)?, keys::from_python(keys)?);
        Ok(py.detach(|| cache.release(&keys)))
    }

    /// Keeps the resident blocks of a chain for a time in seconds: they are evicted last. Returns their number.
    fn keep(&self, py: Python<'_>, keys: &Bound<'_, PyAny>, seconds: &Bound<'_, PyAny>) -> PyResult<usize> {
        let (cache, keys, time) = (self.use_it(py)?, keys::from_python(keys)?, seconds_of(seconds)?);
        Ok(py.detach(|| cache.keep(&keys, time)))
    }

    /// Which keys are resident.
    fn contains_each<'py>(&self, py: Python<'py>, keys: &Bound<'_, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let (cache, keys) = (self.use_it(py)?, keys::from_python(keys)?);
        let found = py.detach(|| keys.iter().map(|key| cache.contains(key)).collect::<Vec<_>>());
        PyList::new(py, found)
    }

    /// Registers mapped memory of `nbytes` bytes at an address; `Cache.register_host` is its public face.
    fn register_address(
        &self,
        py: Python<'_>,
        address: &Bound<'_, PyAny>,
        nbytes: &Bound<'_, PyAny>,
        pin: bool,
    ) -> PyResult<PyRegion> {
        let at = (whole(address, "address")?, whole(nbytes, "nbytes")?);
        PyRegion::new(py, self.opened.get(py)?, Memory::Host { buffer: None, pin }, at)
    }

    fn register_device(
        &self,
        py: Python<'_>,
        address: &Bound<'_, PyAny>,
        nbytes: &Bound<'_, PyAny>,
    ) -> PyResult<PyRegion> {
        let at = (whole(address, "address")?, whole(nbytes, "nbytes")?);
        PyRegion::new(py, self.opened.get(py)?, Memory::Device, at)
    }

    /// Registers the memory of a buffer object; `Cache.register_host` is its public face.
    fn register_buffer(&self, py: Python<'_>, memory: &Bound<'_, PyAny>, pin: bool) -> PyResult<PyRegion> {
        let buffer = Buffer::new(memory, true)?;
        let at = (buffer.ptr().expose_provenance(), buffer.len());
        PyRegion::new(py, self.opened.get(py)?, Memory::Host { buffer: Some(buffer), pin }, at)
    }

    fn load<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'_, PyAny>,
        blocks: &Bound<'_, PyAny>,
        errors: &str,
    ) -> PyResult<Bound<'py, PyList>> {
        self.moved(py, &Movement::Load, keys, Places::Blocks(blocks), errors)
    }

    fn store<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'_, PyAny>,
        blocks: &Bound<'_, PyAny>,
        parent: Option<&Bound<'_, PyAny>>,
        errors: &str,
    ) -> PyResult<Bound<'py, PyList>> {
        self.moved(py, &Movement::Store(keys::optional(parent)?), keys, Places::Blocks(blocks), errors)
    }

    fn load_pages<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'_, PyAny>,
        addresses: &Bound<'_, PyList>,
        sizes: &Bound<'_, PyList>,
        errors: &str,
    ) -> PyResult<Bound<'py, PyList>> {
        self.moved(py, &Movement::Load, keys, Places::Lists(addresses, sizes), errors)
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
        self.moved(py, &Movement::Store(keys::optional(parent)?), keys, Places::Lists(addresses, sizes), errors)
    }

    /// Begins a load that completes layer by layer: `Cache.load_layers` is its public face.
    fn load_layers(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        addresses: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
        layer_of: Vec<usize>,
    ) -> PyResult<PyLayerLoad> {
        let (cache, keys) = (self.use_it(py)?, keys::from_python(keys)?);
        let segments = blocks::parse_addresses(keys.len(), addresses, sizes)?;
        PyLayerLoad::begin(py, cache, &keys, &segments, &layer_of)
    }

    /// The name of the fastest tier of each leading resident block. One short lock, no I/O, no use counted.
    fn tiers(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Vec<&'static str>> {
        Ok(layers::tiers(py, self.use_it(py)?, &keys::from_python(keys)?))
    }

    /// Holds the blocks of `keys` that are in host memory, `most` of them at most, until `Held.release`.
    fn hold(&self, py: Python<'_>, keys: &Bound<'_, PyAny>, most: usize) -> PyResult<PyHeld> {
        PyHeld::of(py, self.use_it(py)?, &keys::from_python(keys)?, most)
    }

    /// The bytes of a block, or None.
    fn get<'py>(&self, py: Python<'py>, key: &Bound<'_, PyAny>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let (cache, key) = (self.use_it(py)?, keys::one(key)?);
        let lease = wait::answer(py, cache.fetch(&key))?;
        Ok(lease.map(|lease| PyBytes::new(py, &lease)))
    }

    /// Begins to bring blocks into host memory. Returns the number of begun movements.
    fn prefetch(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let (cache, keys) = (self.use_it(py)?, keys::from_python(keys)?);
        py.detach(|| cache.prefetch(&keys)).map_err(|error| errors::to_python(py, &error))
    }

    fn remove(&self, py: Python<'_>, key: &Bound<'_, PyAny>, durable: bool) -> PyResult<bool> {
        let (cache, key) = (self.use_it(py)?, keys::one(key)?);
        wait::answer(py, async { if durable { cache.remove_durably(&key).await } else { cache.remove(&key).await } })
    }

    /// Returns when all blocks that were stored before are written and flushed.
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        wait::answer(py, self.use_it(py)?.sync())
    }

    /// Figures of the cache since it was opened, and its residency.
    /// ``routes[route]['seconds']``: how long movements took, with ``p50``, ``p99`` and the counts of their buckets.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let cache = self.use_it(py)?;
        convert::stats(py, &py.detach(|| cache.stats()))
    }

    /// The samples of each of `kvhoist.metrics.METRICS` but those of drives: suffix, labels, value.
    fn samples(&self, py: Python<'_>) -> PyResult<Vec<Vec<Sampled>>> {
        let cache = self.use_it(py)?;
        Ok(convert::samples(&py.detach(|| cache.stats())))
    }

    /// Of each path whose NVMe drive answers: the path, the share of the drive's life that is used, the bytes written
    /// to the drive in its whole life, and the years that are left at the pace so far (None if too little is used).
    fn drives(&self, py: Python<'_>) -> PyResult<Vec<Worn>> {
        let cache = self.use_it(py)?;
        Ok(py.detach(|| convert::drives(cache)))
    }

    /// Checks every invariant of the index, from scratch; slow. AssertionError with the first that is broken.
    fn validate(&self, py: Python<'_>) -> PyResult<()> {
        let cache = self.use_it(py)?;
        py.detach(|| kvhoist::internals::validate(cache)).map_err(pyo3::exceptions::PyAssertionError::new_err)
    }

    fn queue(&self, py: Python<'_>, depth: &Bound<'_, PyAny>) -> PyResult<PyQueue> {
        let cache = self.use_it(py)?;
        let queue = cache.completion_queue(whole(depth, "depth")?).map_err(|error| errors::to_python(py, &error))?;
        Ok(PyQueue::of_cache(cache.clone(), queue))
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let opened = self.opened.get(py)?;
        self.closed.store(true, Ordering::Release);
        let closed = wait::interruptible(py, opened.cache.close())?;
        opened.told.store(true, Ordering::Release);
        opened.release(py);
        closed.map_err(|error| errors::of_close(py, &error))
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        let Some(opened) = self.opened.here() else { return Ok(()) };
        opened.registrations.visit(&visit)?;
        opened.interrupted().iter().try_for_each(|blocks| blocks.visit(&visit))
    }

    /// Unregisters the memory that it keeps.
    fn __clear__(&self) {
        if let Some(opened) = self.opened.here() {
            Python::attach(|py| opened.release(py));
        }
    }
}

impl Drop for PyCache {
    fn drop(&mut self) {
        let Some(opened) = self.opened.here() else { return };
        // Dirty blocks are written, and movements that use the program's memory end, before the memory is released.
        Python::attach(|py| {
            let closed = wait::to_the_end(py, opened.cache.close());
            opened.release(py);
            if let Err(error) = closed
                && !opened.told.load(Ordering::Acquire)
            {
                // Logged, because no caller has got it or can, and blocks may be lost.
                errors::of_close(py, &error).write_unraisable(py, None);
            }
        });
    }
}
