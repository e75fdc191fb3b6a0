//! Gates: words in pinned memory that a stream of the caller waits for.
//!
//! A stream may come to a wait long after the load that it is for has ended, its handle was dropped, and the cache was
//! closed. So the words are the process's, never given back, and only ever grow: who waits for a value that was
//! reached once never waits again, whoever uses the gate by then.

use std::{
    ptr::NonNull,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use cudarc::driver::sys;

use super::{
    context::Gpu,
    driver::{Fault, check},
    memory::HostPin,
};
use crate::{
    error::{Error, Result},
    memory::AlignedBuf,
};

/// Gates that are pinned at once, 128 KiB of them: the first time nothing waits for a gate yet, and there should be no
/// second time. Pinning may wait for the device, which may be at a wait of ours.
const GATES_PER_SLAB: usize = 16_384;

/// Gates of one device at most.
const GATES_MAX: usize = 4 * GATES_PER_SLAB;

/// As the device reads it.
#[repr(C)]
struct Gate {
    /// Goes up by one whenever the gate is opened.
    opened: AtomicU32,
    /// Written before that: 0, or what is wrong.
    poison: AtomicU32,
}

/// Pinned memory, for the rest of the process's life.
struct Slab {
    gates: NonNull<Gate>,
    /// Where the device finds it.
    address: u64,
    _pin: HostPin,
}

// SAFETY: gates are atomics, in memory that is never given back.
unsafe impl Send for Slab {}
// SAFETY: as above.
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

/// Closed gates, to be opened once each. Given back when dropped; until then nobody else opens or poisons them.
pub(crate) struct Gates {
    gpu: Arc<Gpu>,
    pool: &'static Pool,
    gates: Vec<Taken>,
}

struct Taken {
    number: u32,
    slab: &'static Slab,
    /// What `opened` will be.
    value: u32,
}

impl Gates {
    /// Takes `count` gates. Pins memory where there are too few, which no stream has to end for.
    pub(crate) fn take(gpu: &Arc<Gpu>, count: usize) -> Result<Gates> {
        if !gpu.has_stream_waits() {
            let reason = "the driver has no cuStreamWaitValue32_v2; install CUDA 11.7's or a newer one".into();
            return Err(Error::Unavailable { tier: "device", reason });
        }
        let pool = Pool::of(&gpu.device().pci_address);
        let mut inner = pool.inner.lock().unwrap_or_else(PoisonError::into_inner);
        while inner.free.len() < count {
            if inner.slabs.len() * GATES_PER_SLAB >= GATES_MAX {
                return Err(Error::Busy {
                    what: "layers that streams wait for",
                    limit: GATES_MAX as u64,
                    setting: "none",
                });
            }
            let unavailable = |fault: Fault| Error::Unavailable { tier: "device", reason: fault.to_string() };
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

    /// Opens a gate: whatever waits for it goes on, and finds `poison`, which is 0 where all is well. Once is enough.
    pub(crate) fn open(&self, at: usize, poison: u32) {
        let Taken { number, slab, value } = &self.gates[at];
        let gate = slab.gate(*number);
        gate.poison.store(poison, Ordering::Relaxed);
        gate.opened.store(*value, Ordering::Release);
    }

    /// Makes a stream wait until a gate is open.
    ///
    /// # Safety
    /// A stream of the device's primary context, which exists during the call.
    pub(crate) unsafe fn wait(&self, at: usize, stream: sys::CUstream) -> std::result::Result<(), Fault> {
        let Taken { number, slab, value } = &self.gates[at];
        let geq = sys::CUstreamWaitValue_flags_enum::CU_STREAM_WAIT_VALUE_GEQ as u32;
        self.gpu.bind()?;
        // SAFETY: the function exists (`take`); a word of pinned memory that is never given back; for the stream the
        // caller's promise.
        check("cuStreamWaitValue32", unsafe {
            sys::cuStreamWaitValue32_v2(stream, slab.address_of(*number), *value, geq)
        })
    }

    /// Where the device finds the poison of a gate.
    pub(crate) fn poison_address(&self, at: usize) -> u64 {
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
        // SAFETY: inside the slab, which is zeroed, aligned to pages, and never given back.
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
    fn grow(&mut self, gpu: &Arc<Gpu>) -> std::result::Result<(), Fault> {
        let bytes = GATES_PER_SLAB * size_of::<Gate>();
        let mut memory = AlignedBuf::zeroed(bytes);
        let start = NonNull::from(&mut *memory).cast::<u8>();
        // SAFETY: the memory of a buffer stays where it is when the buffer is moved, and lives as long as its owner.
        let pin = unsafe { HostPin::register(Arc::clone(gpu), start, bytes, Arc::new(memory))? };
        let mut address = 0;
        // SAFETY: memory that was just registered; one address is written.
        check("cuMemHostGetDevicePointer", unsafe {
            sys::cuMemHostGetDevicePointer_v2(&mut address, start.as_ptr().cast(), 0)
        })?;
        let first = (self.slabs.len() * GATES_PER_SLAB) as u32;
        self.slabs.push(Box::leak(Box::new(Slab { gates: start.cast(), address, _pin: pin })));
        self.free.extend((first..first + GATES_PER_SLAB as u32).rev());
        Ok(())
    }
}
