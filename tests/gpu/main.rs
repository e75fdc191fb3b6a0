//! What only a real device can show: every byte by every way, checked by the driver's own copies.
//!
//!     KVHOIST_GPU_TESTS=require cargo test -p kvhoist --features gpu-tests --test gpu -- --test-threads 1
//!
//! Without a device every test passes with a line that begins `SKIPPED`; with `KVHOIST_GPU_TESTS=require` it fails
//! instead; `KVHOIST_SANITIZED=1` leaves out what compute-sanitizer must complain about. Stores are put into
//! `KVHOIST_GPU_DIR`, or where temporary files go. The binary needs no other file.

#[path = "../common/apart.rs"]
#[allow(dead_code, reason = "a part of it is used here")]
mod apart;
mod captures;
#[path = "../common/mod.rs"]
mod common;
mod copies;
mod cufile;
mod layers;
mod routes;
mod stops;

use std::{ptr::NonNull, sync::Arc};

use cudarc::driver::sys::{self, CUresult};
use kvhoist::{
    Cache, Config, DeviceKind, DirectIo, DiskPath, block_on,
    internals::{
        gpu::{DeviceBuffer, Gpu},
        memory::DeviceMemory,
    },
};
use tempfile::TempDir;

/// The device, or `None` after saying why the test is skipped.
fn device() -> Option<Arc<Gpu>> {
    match Gpu::open(0) {
        Ok(gpu) => Some(gpu),
        Err(error) if std::env::var("KVHOIST_GPU_TESTS").is_ok_and(|wish| wish == "require") => {
            panic!("found no device ({error}), expected one: KVHOIST_GPU_TESTS=require")
        }
        Err(error) => {
            common::skip::skipped(format_args!("{error}"));
            None
        }
    }
}

fn directory() -> TempDir {
    let place = std::env::var_os("KVHOIST_GPU_DIR").map_or_else(std::env::temp_dir, Into::into);
    tempfile::tempdir_in(place).expect("a temporary directory")
}

/// A cache on the device with few slots in memory and room for `blocks` on disk.
fn config(directory: &TempDir, block_bytes: usize, slots: u32, blocks: u32) -> Config {
    Config::default()
        .block_bytes(block_bytes)
        .host_blocks(slots)
        .device_blocks(slots)
        .device(DeviceKind::Cuda)
        .direct_io(DirectIo::Prefer)
        .disks(vec![DiskPath::with_blocks(directory.path(), blocks)])
}

fn open(config: Config) -> Cache {
    block_on(Cache::open(config)).expect("the device can be used")
}

/// Device memory of the test's own, written and read by the driver's own copies.
struct Pool {
    gpu: Arc<Gpu>,
    buffer: DeviceBuffer,
}

/// What a pool holds that nothing was copied to.
const UNTOUCHED: u8 = 0xa7;

impl Pool {
    fn new(gpu: &Arc<Gpu>, bytes: usize) -> Pool {
        let buffer = DeviceBuffer::new(Arc::clone(gpu), bytes).expect("device memory");
        let pool = Pool { gpu: Arc::clone(gpu), buffer };
        pool.clear();
        pool
    }

    fn base(&self) -> *mut u8 {
        self.buffer.base().as_ptr()
    }

    fn bytes(&self) -> usize {
        self.buffer.bytes()
    }

    fn address(&self) -> u64 {
        self.base().expose_provenance() as u64
    }

    fn clear(&self) {
        self.gpu.make_current().expect("a context");
        // SAFETY: our own memory, to which nothing is on its way.
        succeeded(unsafe { sys::cuMemsetD8_v2(self.address(), UNTOUCHED, self.bytes()) });
        // SAFETY: the stream of the call before: it may return before it is done.
        succeeded(unsafe { sys::cuStreamSynchronize(std::ptr::null_mut()) });
    }

    fn write(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.bytes());
        self.gpu.make_current().expect("a context");
        // SAFETY: as above, and a slice of that length.
        succeeded(unsafe { sys::cuMemcpyHtoD_v2(self.address(), bytes.as_ptr().cast(), bytes.len()) });
        // SAFETY: the stream of the call before: what it took from pageable memory may still be on its way.
        succeeded(unsafe { sys::cuStreamSynchronize(std::ptr::null_mut()) });
    }

    fn read(&self) -> Vec<u8> {
        self.gpu.make_current().expect("a context");
        let mut bytes = vec![0; self.bytes()];
        // SAFETY: our own memory, to which nothing is on its way, and a buffer of that length.
        succeeded(unsafe { sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), self.address(), bytes.len()) });
        bytes
    }

    /// Registers all of it. The pool must outlive the cache's use of it.
    fn register(&self, cache: &Cache) -> kvhoist::Region {
        let base = NonNull::new(self.base()).expect("an allocation");
        // SAFETY: the tests unregister before they drop the pool, and touch no segment in flight.
        let lent = unsafe { kvhoist::Memory::device(base.as_ptr(), self.bytes()) };
        kvhoist::block_on(cache.register(lent)).expect("registered")
    }
}

#[track_caller]
fn succeeded(result: CUresult) {
    assert_eq!(result, CUresult::CUDA_SUCCESS);
}

/// The first difference, if there is one: the slices may be long.
#[track_caller]
fn assert_same(found: &[u8], expected: &[u8], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    if let Some(at) = (0..found.len()).find(|&at| found[at] != expected[at]) {
        panic!("{what}: byte {at} of {}: found {:#x}, expected {:#x}", found.len(), found[at], expected[at]);
    }
}
