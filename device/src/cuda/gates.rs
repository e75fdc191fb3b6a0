//! Gates are stream semaphores: words in pinned memory that a stream of the caller waits for.
//!
//! A stream may reach its wait long after the load has ended, its handle was dropped, and the cache was closed. So the
//! words belong to the process, are never freed, and only ever grow: a wait for a value that was once reached never
//! blocks again, even if the gate is reused.
//!
//! All of them are pinned when the device is opened. Pinning may wait for the device, which may wait for one of these
//! gates.

use std::{
    ptr::NonNull,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use cudarc::driver::sys;
use kvhoist_base::{
    error::{Error, Result},
    panics::log,
};

use super::{
    context::Gpu,
    driver::{CudaError, check},
    memory::HostPin,
};

/// Gates of a device (512 KiB).
const GATES_MAX: usize = 65_536;

/// Layout shared with the device.
#[repr(C)]
struct Gate {
    /// Incremented each time the gate opens.
    opened: AtomicU32,
    /// Written before `opened`: 0, or the error status that waiting kernels read.
    poison: AtomicU32,
}

/// The gates of one device, which are never freed.
struct Pool {
    pci_address: String,
    gates: NonNull<Gate>,
    /// Address on the device.
    address: u64,
    _pin: HostPin,
    free: Mutex<Vec<u32>>,
}

// SAFETY: the gates are atomics, in memory that is never freed.
unsafe impl Send for Pool {}
// SAFETY: the gates are atomics, in memory that is never freed.
unsafe impl Sync for Pool {}

/// One for each device that was opened.
static POOLS: Mutex<Vec<&'static Pool>> = Mutex::new(Vec::new());

/// Closed gates, each opened once. Released when dropped; until then no other load opens them.
pub struct Gates {
    gpu: Arc<Gpu>,
    pool: &'static Pool,
    gates: Vec<Taken>,
}

struct Taken {
    number: u32,
    /// Value of `opened` that releases the wait.
    value: u32,
}

impl Gates {
    /// Pins the gates of a device, before any stream waits. Without them the device's streams cannot wait.
    pub fn pin(gpu: &Arc<Gpu>) {
        let pci_address = &gpu.device().pci_address;
        if !gpu.has_stream_memory_ops() || Pool::of(pci_address).is_some() {
            return;
        }
        match Pool::pinned(gpu) {
            Ok(pool) => {
                let mut pools = lock(&POOLS);
                if pools.iter().all(|pool| pool.pci_address != *pci_address) {
                    pools.push(Box::leak(Box::new(pool)));
                }
            }
            Err(fault) => log(|| tracing::warn!(%fault, "no memory was pinned for layers that streams wait for")),
        }
    }

    /// Takes `count` gates.
    pub fn take(gpu: &Arc<Gpu>, count: usize) -> Result<Gates> {
        if !gpu.has_stream_memory_ops() {
            let reason = "the driver has no stream memory operations; install CUDA 11.7's or a newer one";
            return Err(Error::unavailable("device", reason));
        }
        let Some(pool) = Pool::of(&gpu.device().pci_address) else {
            let reason = "no memory was pinned for layers that streams wait for when the device was opened; await them";
            return Err(Error::unavailable("device", reason));
        };
        let mut free = lock(&pool.free);
        let Some(at) = free.len().checked_sub(count) else {
            return Err(Error::busy("layers that streams wait for", GATES_MAX as u64, "none"));
        };
        let gates = free.split_off(at).into_iter().map(|number| {
            let gate = pool.gate(number);
            gate.poison.store(0, Ordering::Relaxed);
            Taken { number, value: gate.opened.load(Ordering::Relaxed).wrapping_add(1) }
        });
        let gates = gates.collect();
        Ok(Gates { gpu: Arc::clone(gpu), pool, gates })
    }

    /// Opens a gate: streams that wait for it continue and read `poison`, which is 0 for success. Opening it
    /// again has no effect.
    pub fn open(&self, at: usize, poison: u32) {
        let Taken { number, value } = &self.gates[at];
        let gate = self.pool.gate(*number);
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
        let Taken { number, value } = &self.gates[at];
        let geq = sys::CUstreamWaitValue_flags_enum::CU_STREAM_WAIT_VALUE_GEQ as u32;
        let stream = std::ptr::with_exposed_provenance_mut(stream);
        let waits = self.gpu.enter().and_then(|_entered| {
            // SAFETY: the function exists (checked in `take`); the word is pinned and never freed; the caller vouches
            // for the stream.
            check("cuStreamWaitValue32", unsafe {
                sys::cuStreamWaitValue32_v2(stream, self.pool.address_of(*number), *value, geq)
            })
        });
        waits.map_err(|fault| Error::unavailable("device", fault))
    }

    /// Device address of a gate's poison word.
    pub fn poison_address(&self, at: usize) -> u64 {
        self.pool.address_of(self.gates[at].number) + std::mem::offset_of!(Gate, poison) as u64
    }
}

impl Drop for Gates {
    fn drop(&mut self) {
        lock(&self.pool.free).extend(self.gates.iter().map(|gate| gate.number));
    }
}

impl Pool {
    fn of(pci_address: &str) -> Option<&'static Pool> {
        lock(&POOLS).iter().copied().find(|pool| pool.pci_address == pci_address)
    }

    fn pinned(gpu: &Arc<Gpu>) -> std::result::Result<Pool, CudaError> {
        let pin = HostPin::zeroed(gpu, GATES_MAX * size_of::<Gate>())?;
        let (gates, mut address) = (pin.start().cast(), 0);
        let _entered = gpu.enter()?;
        // SAFETY: memory registered above; the call writes one address.
        check("cuMemHostGetDevicePointer", unsafe {
            sys::cuMemHostGetDevicePointer_v2(&mut address, pin.start().as_ptr().cast(), 0)
        })?;
        let free = Mutex::new((0..GATES_MAX as u32).rev().collect());
        Ok(Pool { pci_address: gpu.device().pci_address.clone(), gates, address, _pin: pin, free })
    }

    fn gate(&self, number: u32) -> &'static Gate {
        // SAFETY: one of `GATES_MAX`, in memory that is zeroed, page-aligned, and never freed.
        unsafe { self.gates.add(number as usize).as_ref() }
    }

    fn address_of(&self, number: u32) -> u64 {
        self.address + (number as usize * size_of::<Gate>()) as u64
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
