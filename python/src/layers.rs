//! `kvhoist.LayerLoad`: a load that completes layer by layer. `kvhoist.Held`: blocks that stay in host memory.

use std::sync::{Mutex, MutexGuard};

use kvhoist::{BlockKey, Cache, Error, LayerLoad, Lease, Segment, Tier};
use kvhoist_service::Pins;
use pyo3::{prelude::*, types::PyList};

use crate::{
    convert::{self, OnError},
    errors,
    process::ProcessLocal,
    wait,
};

/// A load that completes layer by layer. `Cache.load_layers` makes it.
#[pyclass(frozen, module = "kvhoist", name = "LayerLoad")]
pub struct PyLayerLoad(ProcessLocal<LayerLoad>);

impl PyLayerLoad {
    pub fn begin(
        py: Python<'_>,
        cache: &Cache,
        keys: &[BlockKey],
        segments: &[Vec<Segment>],
        layer_of: &[usize],
    ) -> PyResult<Self> {
        // A load that is taken on is never without its handle: not interruptible, and it waits for the queue only.
        let load = wait::to_the_end(py, cache.load_layers(keys, segments, layer_of));
        PyLayerLoad::of(py, load)
    }

    /// A load that a cache or a service has taken on.
    pub fn of(py: Python<'_>, load: Result<LayerLoad, Error>) -> PyResult<Self> {
        Ok(PyLayerLoad(ProcessLocal::new(load.map_err(|error| errors::to_python(py, &error))?)))
    }
}

#[pymethods]
impl PyLayerLoad {
    /// The number of layers.
    #[getter]
    fn layers(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.0.get(py)?.layers())
    }

    /// Waits for a layer: how many leading blocks have it in place, and the error of the next one, if it has one.
    fn layer<'py>(&self, py: Python<'py>, layer: usize) -> PyResult<(usize, Option<Bound<'py, PyAny>>)> {
        let load = self.0.get(py)?;
        let (leading, error) =
            wait::interruptible(py, load.layer(layer))?.map_err(|error| errors::to_python(py, &error))?;
        Ok((leading, error.map(|error| errors::to_python(py, &error).into_value(py).into_bound(py).into_any())))
    }

    /// Waits for the end of the load: one entry for each block, as of `Cache.load`.
    #[pyo3(signature = (errors="return"))]
    fn blocks<'py>(&self, py: Python<'py>, errors: &str) -> PyResult<Bound<'py, PyList>> {
        let (load, on_error) = (self.0.get(py)?, OnError::parse(py, errors)?);
        let results = wait::interruptible(py, load.blocks())?;
        convert::results(py, results, on_error)
    }

    /// Waits for a layer: a stream of the CUDA device does, if one is named and there is such a device, else this call.
    /// Before a stream waits for a layer this call waits for the layer before it, as `LayerLoad::stream_wait` asks.
    #[pyo3(signature = (layer, stream=None))]
    fn wait(&self, py: Python<'_>, layer: usize, stream: Option<usize>) -> PyResult<()> {
        let load = self.0.get(py)?;
        let stream = stream.filter(|_| load.has_streams());
        let on_host = if stream.is_some() { layer.checked_sub(1) } else { Some(layer) };
        if let Some(layer) = on_host {
            wait::interruptible(py, load.layer(layer))?.map_err(|error| errors::to_python(py, &error))?;
        }
        let Some(stream) = stream else { return Ok(()) };
        // SAFETY: the caller's promise, as documented: a stream of the device that exists during the call.
        let waited = unsafe { load.stream_wait(layer, stream) };
        waited.map_err(|error| errors::to_python(py, &error))
    }

    /// Where kernels find what a layer came to: the device's address of a 32-bit word.
    fn poison_address(&self, py: Python<'_>, layer: usize) -> PyResult<u64> {
        self.0.get(py)?.poison_address(layer).map_err(|error| errors::to_python(py, &error))
    }
}

/// Blocks that stay in host memory until they are released. `Cache.hold` and `Client.hold` make it.
#[pyclass(frozen, module = "kvhoist", name = "Held")]
pub struct PyHeld(ProcessLocal<Mutex<Blocks>>);

/// Blocks that are held.
#[derive(Default)]
enum Blocks {
    #[default]
    None,
    Leases(Vec<Lease>),
    Pins(Pins),
}

impl PyHeld {
    /// Of the keys, the first `most` that are in host memory.
    pub fn of(py: Python<'_>, cache: &Cache, keys: &[BlockKey], most: usize) -> PyResult<Self> {
        let leases = py.detach(|| {
            let found = keys.iter().filter_map(|key| cache.lease(key).transpose());
            found.take(most).collect::<Result<Vec<_>, _>>()
        });
        let leases = leases.map_err(|error| errors::to_python(py, &error))?;
        Ok(PyHeld(ProcessLocal::new(Mutex::new(Blocks::Leases(leases)))))
    }

    /// Of blocks that a service has pinned.
    pub fn pinned(pins: Pins) -> Self {
        PyHeld(ProcessLocal::new(Mutex::new(Blocks::Pins(pins))))
    }

    fn blocks(&self, py: Python<'_>) -> PyResult<MutexGuard<'_, Blocks>> {
        Ok(self.0.get(py)?.lock().expect("nothing panics under it"))
    }
}

#[pymethods]
impl PyHeld {
    /// How many blocks it holds.
    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(match &*self.blocks(py)? {
            Blocks::None => 0,
            Blocks::Leases(leases) => leases.len(),
            Blocks::Pins(pins) => pins.count(),
        })
    }

    /// Lets the blocks go. Again: does nothing.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        let blocks = std::mem::take(&mut *self.blocks(py)?);
        py.detach(|| drop(blocks));
        Ok(())
    }
}

/// The name of the fastest tier of each leading resident block.
pub fn tiers(py: Python<'_>, cache: &Cache, keys: &[BlockKey]) -> Vec<&'static str> {
    names(py.detach(|| cache.match_prefix(keys)))
}

pub fn names(tiers: Vec<Tier>) -> Vec<&'static str> {
    tiers.into_iter().map(Tier::name).collect()
}
