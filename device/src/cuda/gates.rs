//! Gates are stream semaphores: words in pinned memory that a stream of the caller waits for.
//!
//! A stream may reach its wait long after the load has ended, its handle was dropped, and the cache was closed. So the
//! words belong to the process, are never freed, and only ever grow: a wait for a value that was once reached never
//! blocks again, even if the gate is reused.

use std::{
    ptr::NonNull,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use cudarc::driver::sys;
use kvhoist_base::error::{Error, Result};

use super::{
    context::Gpu,
    driver::{CudaError, check},
    memory::HostPin,
};

/// Gates pinned at once (128 KiB). The first slab is pinned before any stream waits. A second should never be needed:
/// pinning may wait for the device, which may be blocked in a wait for one of these gates.
const GATES_PER_SLAB: usize = 16_384;

/// Largest number of gates per device.
const GATES_MAX: usize = 4 * GATES_PER_SLAB;

/// Layout shared with the device.
#[repr(C)]
struct Gate {
    /// Incremented each time the gate opens.
    opened: AtomicU32,
    /// Written before `opened`: 0, or the error status that waiting kernels read.
    poison: AtomicU32,
}

/// Pinned memory that is never freed.
struct Slab {
    gates: NonNull<Gate>,
    /// Address on the device.
    address: u64,
    _pin: HostPin,
}

// SAFETY: the gates are atomics, in memory that is never freed.
unsafe impl Send for Slab {}
// SAFETY: the gates are atomics, in memory that is never freed.
unsafe impl Sync for Slab {}

/// The gates of one device.
struct Pool {
    pci_address: String,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    slabs: Vec<&'static Slab>,
    free: Vec<u32>,
}

/// Closed gates, each opened once. Released when dropped; until then no other load opens them.
pub struct Gates {
    gpu: Arc<Gpu>,
    pool: &'static Pool,
    gates: Vec<Taken>,
}

struct Taken {
    number: u32,
    slab: &'static Slab,
    /// Value of `opened` that releases the wait.
    value: u32,
}

impl Gates {
    /// Takes `count` gates. Pins more memory if too few are free; that waits for no stream.
    pub fn take(gpu: &Arc<Gpu>, count: usize) -> Result<Gates> {
        if !gpu.has_stream_memory_ops() {
            let reason = "the driver has no stream memory operations; install CUDA 11.7's or a newer one";
            return Err(Error::unavailable("device", reason));
        }
        let pool = Pool::of(&gpu.device().pci_address);
        let mut inner = pool.inner.lock().unwrap_or_else(PoisonError::into_inner);
        while inner.free.len() < count {
            if inner.slabs.len() * GATES_PER_SLAB >= GATES_MAX {
                return Err(Error::busy("layers that streams wait for", GATES_MAX as u64, "none"));
            }
            let unavailable = |fault: CudaError| Error::unavailable("device", fault);
            inner.grow(gpu).map_err(unavailable)?;
        }
        let at = inner.free.len() - count;
        let numbers = inner.free.split_off(at);
        let gates = numbers.into_iter().map(|number| {
            let slab = inner.slabs[number as usize / GATES_PER_SLAB];
            let gate = slab.gate(number);
            gate.poison.store(0, Ordering::Relaxed);
            Taken { number, slab, value: gate.opened.load(Ordering::Relaxed).wrapping_add(1) }
        });
        let gates = gates.collect();
        Ok(Gates { gpu: Arc::clone(gpu), pool, gates })
    }

    /// Opens a gate: streams that wait for it continue and read `poison`, which is 0 for success. Opening it
    /// again has no effect.
    pub fn open(&self, at: usize, poison: u32) {
        let Taken { number, slab, value } = &self.gates[at];
        let gate = slab.gate(*number);
        gate.poison.store(poison, Ordering::Relaxed);
        gate.opened.store(*value, Ordering::Release);
    }

    /// Makes a stream wait for a gate.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with the driver's error.
    ///
    /// # Safety
    /// `stream` must be a `CUstream` of the device's primary context that exists during the call.
    pub unsafe fn wait(&self, at: usize, stream: usize) -> Result<()> {
        let Taken { number, slab, value } = &self.gates[at];
        let geq = sys::CUstreamWaitValue_flags_enum::CU_STREAM_WAIT_VALUE_GEQ as u32;
        let stream = std::ptr::with_exposed_provenance_mut(stream);
        let waits = self.gpu.enter().and_then(|_entered| {
            // SAFETY: the function exists (checked in `take`); the word is pinned and never freed; the caller vouches
            // for the stream.
            check("cuStreamWaitValue32", unsafe {
                sys::cuStreamWaitValue32_v2(stream, slab.address_of(*number), *value, geq)
            })
        });
        waits.map_err(|fault| Error::unavailable("device", fault))
    }

    /// Device address of a gate's poison word.
    pub fn poison_address(&self, at: usize) -> u64 {
        let Taken { number, slab, .. } = &self.gates[at];
        slab.address_of(*number) + std::mem::offset_of!(Gate, poison) as u64
    }
}

impl Drop for Gates {
    fn drop(&mut self) {
        let mut inner = self.pool.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.free.extend(self.gates.iter().map(|gate| gate.number));
    }
}

impl Slab {
    fn gate(&self, number: u32) -> &'static Gate {
        // SAFETY: inside the slab, which is zeroed, page-aligned, and never freed.
        unsafe { self.gates.add(number as usize % GATES_PER_SLAB).as_ref() }
    }

    fn address_of(&self, number: u32) -> u64 {
        self.address + (number as usize % GATES_PER_SLAB * size_of::<Gate>()) as u64
    }
}

impl Pool {
    fn of(pci_address: &str) -> &'static Pool {
        static POOLS: OnceLock<Mutex<Vec<&'static Pool>>> = OnceLock::new();
        let mut pools = POOLS.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pool) = pools.iter().find(|pool| pool.pci_address == pci_address) {
            return pool;
        }
        let pool = Box::leak(Box::new(Pool { pci_address: pci_address.to_owned(), inner: Mutex::default() }));
        pools.push(pool);
        pool
    }
}

impl Inner {
    fn grow(&mut self, gpu: &Arc<Gpu>) -> std::result::Result<(), CudaError> {
        let pin = HostPin::zeroed(gpu, GATES_PER_SLAB * size_of::<Gate>())?;
        let start = pin.start();
        let _entered = gpu.enter()?;
        let mut address = 0;
        // SAFETY: memory registered above; the call writes one address.
        check("cuMemHostGetDevicePointer", unsafe {
            sys::cuMemHostGetDevicePointer_v2(&mut address, start.as_ptr().cast(), 0)
        })?;
        let first = (self.slabs.len() * GATES_PER_SLAB) as u32;
        self.slabs.push(Box::leak(Box::new(Slab { gates: start.cast(), address, _pin: pin })));
        self.free.extend((first..first + GATES_PER_SLAB as u32).rev());
        Ok(())
    }
}
