//! Registered memory.

use std::sync::Mutex;

use kvhoist::{Cache, Region, block_on};
use pyo3::prelude::*;

use crate::{buffer::Buffer, cache::Process, errors};

/// Memory that blocks are loaded into and stored from in place, registered until `unregister`.
#[pyclass(frozen, module = "kvhoist", name = "Region")]
pub struct PyRegion {
    process: Process,
    cache: Cache,
    /// `None` once unregistered.
    region: Mutex<Option<Region>>,
    /// Keeps the memory where it is, if it came from a buffer object.
    buffer: Mutex<Option<Buffer>>,
    #[pyo3(get)]
    address: usize,
    #[pyo3(get)]
    nbytes: usize,
    /// The kernel keeps the memory pinned, as a buffer of the ring.
    #[pyo3(get)]
    pinned: bool,
}

impl PyRegion {
    /// Registers memory, and has the kernel pin it if `pin`, where it will. `buffer` keeps it mapped, or the caller
    /// does, as documented, until the region is unregistered.
    pub fn new(py: Python<'_>, cache: &Cache, buffer: Option<Buffer>, at: (usize, usize), pin: bool) -> PyResult<Self> {
        let (address, nbytes) = at;
        let registered = py.detach(|| {
            // SAFETY: as promised above.
            let region = unsafe { cache.register_host(std::ptr::with_exposed_provenance_mut(address), nbytes) }?;
            if !pin {
                return Ok((region, false));
            }
            match block_on(cache.pin_region(&region)) {
                Ok(pinned) => Ok((region, pinned)),
                Err(error) => {
                    block_on(cache.unregister(region));
                    Err(error)
                }
            }
        });
        let (region, pinned) = registered.map_err(|error| errors::to_python(py, &error))?;
        Ok(PyRegion {
            process: Process::this(),
            cache: cache.clone(),
            region: Mutex::new(Some(region)),
            buffer: Mutex::new(buffer),
            address,
            nbytes,
            pinned,
        })
    }

    fn forget(&self) {
        let region = self.region.lock().expect("nothing panics under it").take();
        if let Some(region) = region {
            block_on(self.cache.unregister(region));
        }
    }
}

impl Drop for PyRegion {
    fn drop(&mut self) {
        if self.process != Process::this() {
            // The parent's memory is in use by the parent; see `PyCache`.
            std::mem::forget(self.buffer.lock().expect("nothing panics under it").take());
            return;
        }
        Python::attach(|py| py.detach(|| self.forget()));
    }
}

#[pymethods]
impl PyRegion {
    /// Waits until no movement uses the memory, and forgets it. It may be freed afterwards. A second call does nothing.
    fn unregister(&self, py: Python<'_>) -> PyResult<()> {
        self.process.check(py)?;
        py.detach(|| self.forget());
        drop(self.buffer.lock().expect("nothing panics under it").take());
        Ok(())
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __exit__(&self, py: Python<'_>, _kind: Py<PyAny>, _value: Py<PyAny>, _trace: Py<PyAny>) -> PyResult<()> {
        self.unregister(py)
    }

    fn __repr__(&self) -> String {
        format!("<kvhoist.Region of {} bytes at {:#x}>", self.nbytes, self.address)
    }
}
