//! What needs a CUDA device: memory for pools, and blocks from disk to the device without the cache.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    ptr::NonNull,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use cudarc::driver::sys;
use kvhoist::internals::{
    checksum::checksum,
    gpu::{DeviceBuffer, Gpu, HostPin},
    memory::DeviceMemory,
};

use crate::{
    drive::{measured, other},
    measure::Entrant,
    pattern::shuffled,
    peers::{Places, THREADS, check_stamped},
    scratch::Slab,
};

/// `bytes` bytes of memory of the first device.
///
/// # Errors
/// Without a CUDA device, or without so much memory.
pub fn memory(bytes: usize) -> io::Result<Box<dyn DeviceMemory>> {
    let memory = Gpu::open(0).and_then(|gpu| DeviceBuffer::new(gpu, bytes)).map_err(other)?;
    Ok(Box::new(memory))
}

/// One thread's memory: a pinned block, and its place on the device. In this order of dropping.
struct Lane {
    _pin: HostPin,
    buffer: DeviceBuffer,
    slab: Arc<Mutex<Slab>>,
}

impl Lane {
    fn new(gpu: &Arc<Gpu>, block_bytes: usize) -> io::Result<Lane> {
        let mut slab = Slab::new(block_bytes, 1)?;
        let start = NonNull::from(slab.block(0)).cast();
        let slab = Arc::new(Mutex::new(slab));
        // SAFETY: the slab's mapping, which stays where it is for as long as the slab lives.
        let pin = unsafe { HostPin::new(Arc::clone(gpu), start, block_bytes, Arc::clone(&slab) as _) };
        let buffer = DeviceBuffer::new(Arc::clone(gpu), block_bytes).map_err(other)?;
        Ok(Lane { _pin: pin.map_err(other)?, buffer, slab })
    }

    /// Reads a block and copies it to the device, if it likes with its checksum.
    fn bring(&self, (file, at): (&File, u64), sums: bool) -> io::Result<()> {
        let mut slab = self.slab.lock().map_err(other)?;
        let host = slab.block(0);
        file.read_exact_at(host, at)?;
        check_stamped(host)?;
        if sums {
            std::hint::black_box(checksum(host));
        }
        let device = self.buffer.base().as_ptr().expose_provenance() as u64;
        // SAFETY: two ranges of that length that only this thread uses, and a context made current by it.
        let copied = unsafe { sys::cuMemcpyHtoD_v2(device, host.as_ptr().cast(), host.len()) };
        if copied == sys::CUresult::CUDA_SUCCESS { Ok(()) } else { Err(other(format!("cuMemcpyHtoD: {copied:?}"))) }
    }
}

/// `pread` and `cuMemcpy`, one after the other, from [`THREADS`] threads.
///
/// # Errors
/// Without a CUDA device, or without memory.
pub fn pread_and_copy(places: Places<'_>) -> io::Result<Entrant<'_>> {
    let place = move |block| (places.file, places.data_offset + block * places.block_bytes as u64);
    pread_and_copy_of((places.blocks, places.block_bytes), false, place)
}

/// As [`pread_and_copy`], of so many blocks, which lie anywhere. With `sums`, they also take the checksum.
///
/// # Errors
/// As of [`pread_and_copy`].
pub fn pread_and_copy_of<'a>(
    blocks: (u64, usize),
    sums: bool,
    place: impl Fn(u64) -> (&'a File, u64) + Sync + 'a,
) -> io::Result<Entrant<'a>> {
    let gpu = Gpu::open(0).map_err(other)?;
    let lanes = (0..THREADS).map(|_| Lane::new(&gpu, blocks.1)).collect::<io::Result<Vec<_>>>()?;
    let one = move |lane: &Lane, block: u64| lane.bring(place(block), sums);
    let look = |lane: &Lane| check_on_device(&lane.buffer);
    let summed = if sums { " + checksum" } else { "" };
    Ok(threads(format!("pread{summed} + cuMemcpy, {THREADS} threads"), gpu, blocks, lanes, one, look))
}

/// Reads a block back from the device and checks that it is one. The context is current.
///
/// # Errors
/// What was found.
pub fn check_on_device(buffer: &DeviceBuffer) -> io::Result<()> {
    let mut bytes = vec![0_u8; buffer.bytes()];
    let from = buffer.base().as_ptr().expose_provenance() as u64;
    // SAFETY: two ranges of that length, and nothing is on its way to either.
    let copied = unsafe { sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), from, bytes.len()) };
    if copied != sys::CUresult::CUDA_SUCCESS {
        return Err(other(format!("cuMemcpyDtoH: {copied:?}")));
    }
    check_stamped(&bytes)
}

/// Threads that each bring one block after the other by `one`, in a random order over all of them; `look` checks what
/// each of them brought last, after the measured time.
pub fn threads<'a, L: Sync + 'a>(
    name: String,
    gpu: Arc<Gpu>,
    (blocks, block_bytes): (u64, usize),
    lanes: Vec<L>,
    one: impl Fn(&L, u64) -> io::Result<()> + Sync + 'a,
    look: impl Fn(&L) -> io::Result<()> + 'a,
) -> Entrant<'a> {
    Entrant::new(name, move |round| {
        // An order of its own, as the cache's.
        let order: Vec<u64> = shuffled(round ^ (1 << 32), blocks).collect();
        let next = AtomicUsize::new(0);
        let run = |lane: &L| {
            gpu.make_current().map_err(other)?;
            while let Some(&block) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
                one(lane, block)?;
            }
            Ok(())
        };
        let sample = measured(blocks * block_bytes as u64, || {
            std::thread::scope(|scope| {
                let threads: Vec<_> = lanes.iter().map(|lane| scope.spawn(|| run(lane))).collect();
                threads.into_iter().try_for_each(|thread| thread.join().expect("a peer does not panic"))
            })
        })?;
        gpu.make_current().map_err(other)?;
        lanes.iter().try_for_each(&look)?;
        Ok(sample)
    })
}
