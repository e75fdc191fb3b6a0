//! Registered memory.

use std::{
    future::{Future, poll_fn, ready},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard},
    task::{Context, Poll},
};

use kvhoist::{Error, block_on};
use pyo3::{PyTraverseError, PyVisit, prelude::*};

use crate::{buffer::Buffer, opened::Opened, process::ProcessLocal, wait};

/// The engine's `unregister` of one region. An error: the memory may be in use for good.
pub type Unregister = Pin<Box<dyn Future<Output = Result<(), Error>> + Send>>;

/// One registered range.
pub struct Registration {
    /// First polled when a caller waits; `None` once it has resolved: no movement uses the memory any longer.
    unregister: Mutex<Option<Unregister>>,
    /// Keeps the memory of a buffer object mapped. Locked and dropped with the interpreter's lock held.
    buffer: Mutex<Option<Buffer>>,
}

impl Registration {
    /// Forgets the region. Resolves for every caller when no movement uses the memory any longer; a caller may give
    /// up, and come again.
    async fn unregistered(&self) -> Result<(), Error> {
        poll_fn(|context| self.poll_unregister(context)).await
    }

    /// Polled by every waiter: the one that polled last is woken, the others look again, as every wait here does.
    fn poll_unregister(&self, context: &mut Context<'_>) -> Poll<Result<(), Error>> {
        let mut unregister = self.unregister.lock().expect("nothing panics under it");
        let Some(future) = unregister.as_mut() else { return Poll::Ready(Ok(())) };
        let ended = std::task::ready!(future.as_mut().poll(context));
        // Every later caller gets the error too.
        *unregister = ended.clone().err().map(|error| Box::pin(ready(Err(error))) as Unregister);
        Poll::Ready(ended)
    }

    fn buffer(&self) -> MutexGuard<'_, Option<Buffer>> {
        self.buffer.lock().expect("nothing panics under it")
    }
}

/// The registrations of a cache. One lasts until it is unregistered or the cache is closed, whether or
/// not its [`PyRegion`] is kept.
///
/// Used with the interpreter's lock only, and nothing of Python's is called under its own, so that the collector of
/// cycles finds it unlocked, and the same from one of its passes to the next.
#[derive(Default)]
pub struct Registrations(Mutex<Vec<Arc<Registration>>>);

impl Registrations {
    fn all(&self) -> MutexGuard<'_, Vec<Arc<Registration>>> {
        self.0.lock().expect("nothing panics under it")
    }

    /// Lets go of memory that nothing uses any longer.
    fn forget(&self, registration: &Arc<Registration>) {
        self.all().retain(|other| !Arc::ptr_eq(other, registration));
        let buffer = registration.buffer().take();
        // Its owner's finalizer may come back here.
        drop(buffer);
    }

    /// Unregisters everything, in spite of signals.
    pub fn clear(&self, py: Python<'_>) {
        loop {
            let Some(registration) = self.all().last().cloned() else { return };
            if wait::to_the_end(py, registration.unregistered()).is_err() {
                // It stays mapped for who may still use it.
                std::mem::forget(registration.buffer().take());
            }
            self.forget(&registration);
        }
    }

    /// Shows the objects that are kept to the collector of cycles.
    pub fn visit(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.all().iter().try_for_each(|one| one.buffer().as_ref().map_or(Ok(()), |buffer| buffer.visit(visit)))
    }
}

/// The kind of a region's memory.
pub enum Memory {
    /// Host memory, of a buffer object or else of the caller's. `pin`: the kernel is asked to pin it.
    Host { buffer: Option<Buffer>, pin: bool },
    /// Device memory of the caller's, or host memory that plays it.
    Device,
}

struct Registered {
    registration: Arc<Registration>,
    registrations: Arc<Registrations>,
}

/// Memory that blocks are loaded into and stored from in place, registered until `unregister`.
///
/// Owns nothing: the registration is the cache's, and outlives this value.
#[pyclass(frozen, module = "kvhoist", name = "Region")]
pub struct PyRegion {
    registered: ProcessLocal<Registered>,
    /// Its first byte.
    #[pyo3(get)]
    address: usize,
    /// Its size in bytes.
    #[pyo3(get)]
    nbytes: usize,
    /// The kernel keeps the memory pinned, as a buffer of the ring.
    #[pyo3(get)]
    pinned: bool,
    /// A service has not this memory: its blocks are copied through a buffer of the client's.
    #[pyo3(get)]
    copied: bool,
}

impl PyRegion {
    /// A region that `unregister` gives back.
    pub fn of(
        registrations: &Arc<Registrations>,
        unregister: Unregister,
        buffer: Option<Buffer>,
        (address, nbytes): (usize, usize),
        pinned: bool,
        copied: bool,
    ) -> Self {
        let registration =
            Arc::new(Registration { unregister: Mutex::new(Some(unregister)), buffer: Mutex::new(buffer) });
        registrations.all().push(Arc::clone(&registration));
        let registered = Registered { registration, registrations: Arc::clone(registrations) };
        PyRegion { registered: ProcessLocal::new(registered), address, nbytes, pinned, copied }
    }

    /// Registers memory, and has the kernel pin host memory if it is to and will. The buffer object keeps it mapped, or
    /// the caller does, as documented, until the region is unregistered.
    pub fn new(py: Python<'_>, opened: &Opened, memory: Memory, at: (usize, usize)) -> PyResult<Self> {
        let (address, nbytes) = at;
        let start = std::ptr::with_exposed_provenance_mut(address);
        let (lent, buffer, pin) = match memory {
            // SAFETY: as promised above.
            Memory::Host { buffer, pin } => (unsafe { kvhoist::Memory::host(start, nbytes) }, buffer, pin),
            // SAFETY: as promised above.
            Memory::Device => (unsafe { kvhoist::Memory::device(start, nbytes) }, None, false),
        };
        // Not interruptible: an interrupted call would have registered memory without a handle to unregister it.
        let region = py.detach(|| block_on(opened.cache.register(lent.pinned(pin))));
        let region = region.map_err(|error| crate::errors::to_python(py, &error))?;
        let pinned = region.is_pinned();
        let cache = opened.cache.clone();
        let unregister = Box::pin(async move {
            cache.unregister(&region).await.expect("this cache has registered it");
            Ok(())
        });
        Ok(PyRegion::of(&opened.registrations, unregister, buffer, at, pinned, false))
    }
}

#[pymethods]
impl PyRegion {
    /// Waits until no movement uses the memory, and forgets it: it may be freed afterwards.
    ///
    /// Every caller waits; where it was forgotten already, nothing happens. Interrupted by a signal, the memory may
    /// still be in use: call again. DeadlineError, each time, where the close of its client had one: a service that
    /// hangs may still use the memory.
    fn unregister(&self, py: Python<'_>) -> PyResult<()> {
        let Registered { registration, registrations } = self.registered.get(py)?;
        wait::answer(py, registration.unregistered())?;
        registrations.forget(registration);
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
