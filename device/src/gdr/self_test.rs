//! The self-test: random bytes go through the NIC in both directions and are compared on the other side. Some machines
//! route no reads, or no writes, between two PCI devices; some lose them silently.

use std::{
    hash::{BuildHasher, RandomState},
    ptr::NonNull,
    sync::Arc,
};

use kvhoist_base::{
    block::{CopyOp, Direction},
    memory::DeviceMemory,
};

use crate::{
    CopyBatch,
    cuda::{DeviceBuffer, Gpu, Stream},
    pool::simulated_memory,
};

/// Bytes on each side: one half per direction.
pub(super) const SCRATCH_BYTES: usize = 2 * HALF_BYTES;
const HALF_BYTES: usize = 32 << 10;

/// Scratch memory of the self-test, on both sides.
pub(super) struct Scratch {
    host: Arc<dyn DeviceMemory>,
    device: Arc<dyn DeviceMemory>,
    gpu: Option<(Arc<Gpu>, Stream)>,
}

impl Scratch {
    /// Scratch memory for a test of `gpu`, or of a simulated device.
    pub(super) fn new(gpu: Option<&Arc<Gpu>>) -> Result<Self, String> {
        let host_memory = || simulated_memory(SCRATCH_BYTES).map_err(|error| error.to_string());
        let host = host_memory()?;
        let Some(gpu) = gpu else { return Ok(Scratch { host, device: host_memory()?, gpu: None }) };
        let device = DeviceBuffer::new(Arc::clone(gpu), SCRATCH_BYTES).map_err(|error| error.to_string())?;
        let stream = Stream::new(gpu).map_err(|fault| fault.to_string())?;
        Ok(Scratch { host, device: Arc::new(device), gpu: Some((Arc::clone(gpu), stream)) })
    }

    /// Addresses of the two sides: host, device.
    pub(super) fn places(&self) -> [usize; 2] {
        [self.host.base(), self.device.base()].map(|base| base.as_ptr().expose_provenance())
    }

    /// Copies without the NIC, synchronously. Nothing else may use these ranges during the call.
    fn copy_directly(&self, op: &CopyOp) -> Result<(), String> {
        match &self.gpu {
            None => {
                // SAFETY: ranges of the two scratch memories, which nothing else uses during the call.
                unsafe { std::ptr::copy_nonoverlapping(op.src, op.dst, op.len) };
                Ok(())
            }
            Some((gpu, stream)) => {
                // SAFETY: ranges of the two scratch memories; the stream is synchronized before they are used again.
                let copied = gpu.bind().and_then(|()| unsafe { stream.copy(op) });
                copied.and_then(|()| stream.synchronize()).map_err(|fault| fault.to_string())
            }
        }
    }

    fn host_half(&self, at: usize) -> *mut u8 {
        self.host.base().as_ptr().wrapping_add(at * HALF_BYTES)
    }

    /// The scratch memory's place on the device.
    pub(super) fn own_place(&self) -> Place {
        Place { start: self.device.base(), bytes: SCRATCH_BYTES, owner: Arc::clone(&self.device) }
    }

    /// Fills a half of the host side with fresh random bytes.
    fn fill(&self, at: usize) -> Vec<u8> {
        let random = RandomState::new();
        let bytes: Vec<u8> = (0..HALF_BYTES as u64 / 8).flat_map(|word| random.hash_one(word).to_ne_bytes()).collect();
        // SAFETY: a half of our own memory, which nothing else uses now.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.host_half(at), HALF_BYTES) };
        bytes
    }

    fn first_wrong(&self, at: usize, expected: &[u8]) -> Option<usize> {
        // SAFETY: a half of our own memory, which nothing writes to now.
        let found = unsafe { std::slice::from_raw_parts(self.host_half(at), HALF_BYTES) };
        found.iter().zip(expected).position(|(found, expected)| found != expected)
    }

    fn batch(&self, src: *const u8, dst: *mut u8, len: usize, direction: Direction, place: &Place) -> CopyBatch {
        // Pieces with unaligned offsets, as scattered blocks have.
        let cuts = [0, 1, 4096 + 1, 5000, 20_001, HALF_BYTES].map(|cut: usize| cut.min(len));
        let op = |cut: &[usize]| CopyOp {
            src: src.wrapping_add(cut[0]),
            dst: dst.wrapping_add(cut[0]),
            len: cut[1] - cut[0],
        };
        let owners: Vec<Arc<dyn std::any::Any + Send + Sync>> =
            vec![Arc::new(Arc::clone(&self.host)), Arc::new(Arc::clone(&place.owner))];
        // SAFETY: halves of the scratch memory and of the place, which the owners keep and only the self-test uses.
        unsafe { CopyBatch::new(cuts.windows(2).map(op).collect(), direction, owners) }
    }

    /// Copies to and from a place on the device with `copy`, and compares.
    pub(super) async fn self_test(
        &self,
        place: &Place,
        copy: impl AsyncFn(CopyBatch) -> Result<(), String>,
    ) -> Result<(), String> {
        let (to_device, to_host) = match self.gpu {
            Some(_) => (Direction::HostToDevice, Direction::DeviceToHost),
            None => (Direction::HostToHost, Direction::HostToHost),
        };
        let len = HALF_BYTES.min(place.bytes / 2);
        let device_half = |at: usize| place.start.as_ptr().wrapping_add(at * len);
        // To the device through the NIC, back without it.
        let sent = self.fill(0);
        copy(self.batch(self.host_half(0), device_half(0), len, to_device, place))
            .await
            .map_err(|reason| format!("a write to the device failed: {reason}"))?;
        self.copy_directly(&CopyOp { src: device_half(0), dst: self.host_half(1), len })?;
        if let Some(at) = self.first_wrong(1, &sent[..len]) {
            return Err(format!("a write to the device lost bytes (from byte {at} of {len} on), silently"));
        }
        // To the device without the NIC, back through it.
        let sent = self.fill(0);
        self.copy_directly(&CopyOp { src: self.host_half(0), dst: device_half(1), len })?;
        copy(self.batch(device_half(1), self.host_half(1), len, to_host, place))
            .await
            .map_err(|reason| format!("a write from the device failed: {reason}"))?;
        match self.first_wrong(1, &sent[..len]) {
            Some(at) => Err(format!("a write from the device lost bytes (from byte {at} of {len} on), silently")),
            None => Ok(()),
        }
    }
}

/// Device memory that the self-test may overwrite.
pub(super) struct Place {
    start: NonNull<u8>,
    bytes: usize,
    owner: Arc<dyn DeviceMemory>,
}

impl Place {
    /// Both ends of a pool: each must be where the NIC expects it.
    pub(super) fn ends(pool: &Arc<dyn DeviceMemory>) -> [Place; 2] {
        let bytes = SCRATCH_BYTES.min(pool.bytes());
        let end = pool.base().as_ptr().wrapping_add(pool.bytes() - bytes);
        let end = NonNull::new(end).expect("within an allocation");
        [pool.base(), end].map(|start| Place { start, bytes, owner: Arc::clone(pool) })
    }
}
