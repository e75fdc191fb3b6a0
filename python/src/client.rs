//! `kvhoist.Client`: a space of a node's service, with the calls of `kvhoist.Cache`.

mod memory;

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use kvhoist::{BlockKey, Error, Segment, ServiceFault};
use kvhoist_service::{Client, ClientOptions};
use pyo3::{
    PyTraverseError, PyVisit,
    prelude::*,
    types::{PyBytes, PyDict, PyList},
};

use memory::Kind;

use crate::{
    blocks,
    buffer::Buffer,
    cache::{Movement, Places},
    client_queue::ClientQueue,
    convert::{self, OnError, seconds_of, whole},
    errors, keys,
    layers::{self, PyHeld, PyLayerLoad},
    process::ProcessLocal,
    queue::PyQueue,
    region::{PyRegion, Registrations},
    wait,
};

/// The native half of `kvhoist.Client`.
#[pyclass(frozen, subclass, module = "kvhoist._native", name = "Client")]
pub struct PyClient {
    opened: ProcessLocal<Opened>,
    closed: Arc<AtomicBool>,
    /// Questions to the index end after so long.
    ask_max: Option<Duration>,
    block_bytes: usize,
    namespace: String,
    socket: PathBuf,
    device: Option<String>,
}

struct Opened {
    client: Client,
    registrations: Arc<Registrations>,
}

impl PyClient {
    fn use_it(&self, py: Python<'_>) -> PyResult<&Client> {
        Ok(&self.opened.get(py)?.client)
    }

    /// Waits for an answer from the service's index, for as long as the caller has said.
    fn looked_up<T: Send>(&self, py: Python<'_>, answer: impl Future<Output = Result<T, Error>> + Send) -> PyResult<T> {
        let Some(limit) = self.ask_max else { return wait::answer(py, answer) };
        let answer = wait::within(py, limit, answer)?.unwrap_or_else(|| {
            let text = format!("timeout: the service has not answered for {limit:?} (`ask_ms`)");
            Err(Error::Service { fault: ServiceFault::Timeout, text })
        });
        answer.map_err(|error| errors::to_python(py, &error))
    }

    /// Runs a load or a store to its end. Interrupted, it leaves the memory of buffers alone; what the service has goes
    /// on until the region is unregistered.
    fn moved<'py>(
        &self,
        py: Python<'py>,
        movement: &Movement,
        keys: &Bound<'_, PyAny>,
        places: Places<'_, '_>,
        errors: &str,
    ) -> PyResult<Bound<'py, PyList>> {
        let (on_error, client) = (OnError::parse(py, errors)?, self.use_it(py)?);
        let keys = keys::from_python(keys)?;
        let (segments, buffers) = match places {
            Places::Blocks(blocks) => blocks::parse(blocks, matches!(movement, Movement::Load))?,
            Places::Lists(addresses, sizes) => (blocks::parse_lists(keys.len(), addresses, sizes)?, Vec::new()),
        };
        let lent: Vec<_> = buffers.iter().map(Buffer::segment).collect();
        // SAFETY: the exports keep the memory mapped until they are dropped, which is after the call. That nobody else
        // writes to it meanwhile is the caller's part, as documented; bytes are bytes, whatever they come to.
        let region = unsafe { client.lend(&lent) }.map_err(|error| errors::to_python(py, &error))?;
        let waited = wait::interruptible(py, async {
            match movement {
                Movement::Load => region.load_into(&keys, &segments).await,
                Movement::Store(parent) => region.store_from(&keys, parent.as_ref(), &segments).await,
            }
        });
        drop(buffers);
        match waited? {
            Ok(results) => convert::results(py, results, on_error),
            // Raised however the caller wants errors: of a wrong call nothing moved, and memory that is given up is not
            // to be used again.
            Err(
                error
                @ (Error::Argument { .. } | Error::Closed | Error::Service { fault: ServiceFault::Abandoned, .. }),
            ) => Err(errors::to_python(py, &error)),
            // Away: the error is in each block's place, as the caller asked.
            Err(error) => convert::results(py, vec![Err(error); keys.len()], on_error),
        }
    }
}

#[pymethods]
impl PyClient {
    #[new]
    #[pyo3(signature = (socket, namespace, block_bytes, sizes, deadlines_ms, space))]
    fn open(
        py: Python<'_>,
        socket: PathBuf,
        namespace: String,
        block_bytes: usize,
        sizes: (u64, u64, usize),
        deadlines_ms: (u64, Option<u64>, Option<u64>),
        space: (bool, Option<String>, u32),
    ) -> PyResult<Self> {
        let mut options = ClientOptions::new(namespace.clone(), block_bytes);
        (options.capacity_bytes, options.host_bytes, options.bounce_bytes) = sizes;
        let (deadline_ms, ask_ms, give_up_ms) = deadlines_ms;
        options.deadline = Duration::from_millis(deadline_ms);
        options.give_up = give_up_ms.map(Duration::from_millis);
        let (shared, device, ordinal) = space;
        (options.shared, options.device_ordinal) = (shared, ordinal);
        options.device = device.as_deref().map(memory::device_kind);
        let client = wait::answer(py, Client::connect(socket.clone(), options))?;
        let opened = Opened { client, registrations: Arc::default() };
        let (closed, ask_max) = (Arc::default(), ask_ms.map(Duration::from_millis));
        Ok(PyClient { opened: ProcessLocal::new(opened), closed, ask_max, block_bytes, namespace, socket, device })
    }

    /// Size of every block, bytes.
    #[getter]
    fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// The space's name.
    #[getter]
    fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The device whose memory it registers: ``"cuda"``, ``"simulated"`` or None.
    #[getter]
    fn device(&self) -> Option<&str> {
        self.device.as_deref()
    }

    /// Where the service listens.
    #[getter]
    fn socket(&self) -> &PathBuf {
        &self.socket
    }

    /// True once `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// True while the service can be reached; False in a forked child.
    #[getter]
    fn connected(&self) -> bool {
        !self.closed() && self.opened.here().is_some_and(|opened| opened.client.is_connected())
    }

    /// How many leading keys are resident. Asks the service; no I/O, no use counted.
    fn match_prefix(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let (client, keys) = (self.use_it(py)?, keys::from_python(keys)?);
        self.looked_up(py, client.match_len(&keys))
    }

    /// Whether a key is resident. Asks the service; no I/O, no use counted.
    fn contains(&self, py: Python<'_>, key: &Bound<'_, PyAny>) -> PyResult<bool> {
        let (client, key) = (self.use_it(py)?, [keys::one(key)?]);
        Ok(self.looked_up(py, client.contains(&key))? == [true])
    }

    /// Which keys are resident, in one request.
    fn contains_each(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Vec<bool>> {
        let (client, keys) = (self.use_it(py)?, keys::from_python(keys)?);
        self.looked_up(py, client.contains(&keys))
    }

    /// Counts a use of every resident block of a chain, as a load of it would. No I/O.
    fn touch(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        let (client, keys) = (self.use_it(py)?, keys::from_python(keys)?);
        self.looked_up(py, client.touch(&keys))
    }

    /// Says that a chain is over: its blocks are evicted first. Returns the number of released blocks.
    fn release(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let (client, keys) = (self.use_it(py)?, keys::from_python(keys)?);
        self.looked_up(py, client.release(&keys))
    }

    /// Keeps the resident blocks of a chain for a time in seconds: they are evicted last. Returns their number.
    fn keep(&self, py: Python<'_>, keys: &Bound<'_, PyAny>, seconds: &Bound<'_, PyAny>) -> PyResult<usize> {
        let (client, keys, time) = (self.use_it(py)?, keys::from_python(keys)?, seconds_of(seconds)?);
        self.looked_up(py, client.keep(&keys, time))
    }

    /// Lends mapped memory of `nbytes` bytes at an address; `Client.register_host` is its public face.
    #[pyo3(signature = (address, nbytes, memfd, pin))]
    fn register_address(
        &self,
        py: Python<'_>,
        address: &Bound<'_, PyAny>,
        nbytes: &Bound<'_, PyAny>,
        memfd: Option<(i32, u64)>,
        pin: bool,
    ) -> PyResult<PyRegion> {
        self.register(py, None, (whole(address, "address")?, whole(nbytes, "nbytes")?), memfd, Kind::Host { pin })
    }

    /// Lends the memory of a buffer object; `Client.register_host` is its public face.
    #[pyo3(signature = (memory, memfd, pin))]
    fn register_buffer(
        &self,
        py: Python<'_>,
        memory: &Bound<'_, PyAny>,
        memfd: Option<(i32, u64)>,
        pin: bool,
    ) -> PyResult<PyRegion> {
        let buffer = Buffer::new(memory, true)?;
        let at = (buffer.ptr().expose_provenance(), buffer.len());
        self.register(py, Some(buffer), at, memfd, Kind::Host { pin })
    }

    /// Registers memory of the space's device; `Client.register_device` is its public face.
    #[pyo3(signature = (address, nbytes, memfd))]
    fn register_device(
        &self,
        py: Python<'_>,
        address: &Bound<'_, PyAny>,
        nbytes: &Bound<'_, PyAny>,
        memfd: Option<(i32, u64)>,
    ) -> PyResult<PyRegion> {
        self.register(py, None, (whole(address, "address")?, whole(nbytes, "nbytes")?), memfd, Kind::Device)
    }

    /// Begins a load that completes layer by layer, as `Cache.load_layers`.
    fn load_layers(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        addresses: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
        layer_of: Vec<usize>,
    ) -> PyResult<PyLayerLoad> {
        let (client, keys) = (self.use_it(py)?, keys::from_python(keys)?);
        let segments = blocks::parse_addresses(keys.len(), addresses, sizes)?;
        PyLayerLoad::of(py, py.detach(|| client.load_layers(&keys, &segments, &layer_of)))
    }

    /// The name of the fastest tier of each leading resident block. Asks the service; no I/O, no use counted.
    fn tiers(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Vec<&'static str>> {
        let (client, keys) = (self.use_it(py)?, keys::from_python(keys)?);
        Ok(layers::names(self.looked_up(py, client.match_prefix(&keys))?))
    }

    /// Holds the blocks of `keys` that are in the service's host memory, `most` of them at most, until `Held.release`.
    fn hold(&self, py: Python<'_>, keys: &Bound<'_, PyAny>, most: usize) -> PyResult<PyHeld> {
        let (client, keys) = (self.use_it(py)?, keys::from_python(keys)?);
        Ok(PyHeld::pinned(self.looked_up(py, client.pin(&keys, most))?))
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

    /// The bytes of a block, or None.
    fn get<'py>(&self, py: Python<'py>, key: &Bound<'_, PyAny>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let (client, key) = (self.use_it(py)?, [keys::one(key)?]);
        let mut block = vec![0; self.block_bytes];
        let place = Segment { ptr: block.as_mut_ptr(), len: block.len() };
        // SAFETY: the block outlives the region, and is used by the call alone.
        let region = unsafe { client.lend(&[place]) }.map_err(|error| errors::to_python(py, &error))?;
        let segments = [vec![place]];
        let loaded = wait::answer(py, async { region.load_into(&key, &segments).await?.remove(0) })?;
        Ok(loaded.then(|| PyBytes::new(py, &block)))
    }

    /// Begins to bring blocks into the service's host memory. Returns the number of begun movements.
    fn prefetch(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let (client, keys) = (self.use_it(py)?, keys::from_python(keys)?);
        wait::answer(py, client.prefetch(&keys))
    }

    fn remove(&self, py: Python<'_>, key: &Bound<'_, PyAny>, durable: bool) -> PyResult<bool> {
        let (client, key): (_, BlockKey) = (self.use_it(py)?, keys::one(key)?);
        wait::answer(py, async { if durable { client.remove_durably(&key).await } else { client.remove(&key).await } })
    }

    /// Returns when all blocks of the space that were stored before are written and flushed.
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        let client = self.use_it(py)?;
        wait::answer(py, client.sync())
    }

    /// The space's figures for all clients, since the service opened it.
    /// ``routes[route]['seconds']``: how long movements took, with ``p50``, ``p99`` and the counts of their buckets.
    #[pyo3(signature = (briefly=false))]
    fn stats<'py>(&self, py: Python<'py>, briefly: bool) -> PyResult<Bound<'py, PyDict>> {
        let client = self.use_it(py)?;
        let stats = if briefly { self.looked_up(py, client.stats())? } else { wait::answer(py, client.stats())? };
        convert::stats(py, &stats)
    }

    fn queue(&self, py: Python<'_>, depth: usize) -> PyResult<PyQueue> {
        let client = self.use_it(py)?.clone();
        let queue = ClientQueue::new(client, Arc::clone(&self.closed), depth);
        queue.map(PyQueue::of_client).map_err(|error| errors::to_python(py, &error))
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let opened = self.opened.get(py)?;
        self.closed.store(true, Ordering::Release);
        wait::answer(py, memory::end_of_close(&opened.client))?;
        opened.registrations.clear(py);
        Ok(())
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.opened.here().map_or(Ok(()), |opened| opened.registrations.visit(&visit))
    }

    /// Unregisters the memory that it keeps.
    fn __clear__(&self) {
        if let Some(opened) = self.opened.here() {
            Python::attach(|py| opened.registrations.clear(py));
        }
    }
}

impl Drop for PyClient {
    fn drop(&mut self) {
        let Some(opened) = self.opened.here() else { return };
        self.closed.store(true, Ordering::Release);
        // Movements that use the program's memory end before it is released.
        Python::attach(|py| {
            drop(wait::to_the_end(py, opened.client.close()));
            opened.registrations.clear(py);
        });
    }
}
