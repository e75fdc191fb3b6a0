//! An engine between host memory and a device's, and copies through it whose every byte is looked at.

use std::{any::Any, future::Future, ptr::NonNull, sync::Arc};

use kvhoist::{
    Error,
    internals::{
        device::{
            CopyBatch, CopyEngine, CopyOp, Direction, GdrState,
            gdr::{GdrCopy, GdrMemory, GdrOptions},
        },
        gpu::{DeviceBuffer, Gpu},
        memory::{Arena, DeviceMemory},
    },
};
use tokio::task::LocalSet;

use super::common::{Rng, mix, payload};

/// Bytes on each side.
pub const SIDE_BYTES: usize = 40 << 20;

/// What lies where nothing was copied to.
const UNTOUCHED: u8 = 0xa5;

/// Runs a test as the reactor runs: on one thread, with I/O and time.
pub fn on_reactor<T>(body: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(LocalSet::new().run_until(body))
}

/// Host memory that plays a device.
struct Played(NonNull<u8>, std::alloc::Layout);

// SAFETY: an address; who may touch what is there is decided by the tests.
unsafe impl Send for Played {}
// SAFETY: as above.
unsafe impl Sync for Played {}

impl Drop for Played {
    fn drop(&mut self) {
        // SAFETY: allocated in `played` with this layout.
        unsafe { std::alloc::dealloc(self.0.as_ptr(), self.1) };
    }
}

fn played(bytes: usize) -> Played {
    let layout = std::alloc::Layout::from_size_align(bytes, 64 << 10).expect("a size");
    // SAFETY: a layout of some bytes.
    let memory = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).expect("memory");
    Played(memory, layout)
}

// SAFETY: one allocation of so many bytes, valid until dropped, aligned.
unsafe impl DeviceMemory for Played {
    fn kind(&self) -> &'static str {
        "simulated"
    }

    fn base(&self) -> NonNull<u8> {
        self.0
    }

    fn bytes(&self) -> usize {
        self.1.size()
    }

    fn promote_direction(&self) -> Direction {
        Direction::HostToHost
    }

    fn demote_direction(&self) -> Direction {
        Direction::HostToHost
    }
}

/// A device's memory but for its last page: bytes that are there, and that the engine is not told of.
struct ButLastPage(Arc<dyn DeviceMemory>);

// SAFETY: the beginning of other memory.
unsafe impl DeviceMemory for ButLastPage {
    fn kind(&self) -> &'static str {
        self.0.kind()
    }

    fn base(&self) -> NonNull<u8> {
        self.0.base()
    }

    fn bytes(&self) -> usize {
        self.0.bytes() - 4096
    }

    fn promote_direction(&self) -> Direction {
        self.0.promote_direction()
    }

    fn demote_direction(&self) -> Direction {
        self.0.demote_direction()
    }
}

/// A way of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    ToDevice,
    ToHost,
}

/// One copy by its places in the two sides: bytes from `host` and `device` on.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    pub host: usize,
    pub device: usize,
    pub len: usize,
}

/// The engine and its memory. The device's is host memory also where it is not simulated: it is CUDA's double then.
pub struct Rig {
    pub engine: GdrCopy,
    pub arena: Arc<Arena>,
    pub pool: Arc<dyn DeviceMemory>,
}

impl Rig {
    /// On a simulated device, or on the double of a CUDA device.
    pub async fn open(cuda: bool) -> Result<Self, Error> {
        Self::with(cuda, GdrOptions::default()).await
    }

    pub async fn with(cuda: bool, options: GdrOptions) -> Result<Self, Error> {
        Self::over_new(cuda, options, |pool| pool).await
    }

    /// An engine that does not know the last page of the device's memory, which no registered memory follows then.
    pub async fn without_last_page(cuda: bool, options: GdrOptions) -> Result<Self, Error> {
        Self::over_new(cuda, options, |pool| Arc::new(ButLastPage(pool))).await
    }

    async fn over_new(
        cuda: bool,
        options: GdrOptions,
        shown: impl FnOnce(Arc<dyn DeviceMemory>) -> Arc<dyn DeviceMemory>,
    ) -> Result<Self, Error> {
        let arena = Arc::new(Arena::new((SIDE_BYTES >> 20) as u32, 1 << 20)?);
        let gpu = if cuda { Some(Gpu::open(0)?) } else { None };
        let pool: Arc<dyn DeviceMemory> = match &gpu {
            Some(gpu) => Arc::new(DeviceBuffer::new(Arc::clone(gpu), SIDE_BYTES)?),
            None => Arc::new(played(SIDE_BYTES)),
        };
        Self::over(options, arena, shown(pool), gpu).await
    }

    pub async fn over(
        options: GdrOptions,
        arena: Arc<Arena>,
        pool: Arc<dyn DeviceMemory>,
        gpu: Option<Arc<Gpu>>,
    ) -> Result<Self, Error> {
        let memory = GdrMemory { arena: Some(Arc::clone(&arena)), pool: Some(Arc::clone(&pool)), gpu };
        Ok(Rig { engine: GdrCopy::open(&options, memory).await?, arena, pool })
    }

    pub fn host(&self, at: usize) -> *mut u8 {
        self.arena.slot_ptr(0).as_ptr().wrapping_add(at)
    }

    pub fn device(&self, at: usize) -> *mut u8 {
        self.pool.base().as_ptr().wrapping_add(at)
    }

    #[expect(clippy::mut_from_ref, reason = "the memory is shared with the engine; what is looked at is held once")]
    fn bytes(&self, at: *mut u8, len: usize) -> &mut [u8] {
        // SAFETY: within one of the two sides; tests look at and write to places that no copy is in flight in.
        unsafe { std::slice::from_raw_parts_mut(at, len) }
    }

    /// Bytes of a number's own where a copy begins, others where it ends, and a few of those on both sides of it.
    pub fn prepare(&self, way: Way, place: Place, number: u64) {
        let (from, _) = self.ends(way, place);
        self.bytes(from, place.len).copy_from_slice(&payload(number, place.len));
        self.clear(way, place);
    }

    /// # Panics
    /// If a byte is wrong.
    pub fn verify(&self, way: Way, place: Place, number: u64) {
        let (_, to) = self.ends(way, place);
        let (found, expected) = (self.bytes(to, place.len), payload(number, place.len));
        if *found != expected[..] {
            let wrong = found.iter().zip(&expected).position(|(found, expected)| found != expected);
            panic!("{way:?} {place:?}, number {number}: the first wrong byte is {wrong:?}");
        }
    }

    /// Makes the destination what it is where nothing was copied to.
    pub fn clear(&self, way: Way, place: Place) {
        let (_, to) = self.ends(way, place);
        self.bytes(to, place.len).fill(UNTOUCHED);
    }

    pub fn is_clear(&self, way: Way, place: Place) -> bool {
        let (_, to) = self.ends(way, place);
        self.bytes(to, place.len).iter().all(|byte| *byte == UNTOUCHED)
    }

    fn ends(&self, way: Way, Place { host, device, .. }: Place) -> (*mut u8, *mut u8) {
        match way {
            Way::ToDevice => (self.host(host), self.device(device)),
            Way::ToHost => (self.device(device), self.host(host)),
        }
    }

    pub fn batch(&self, way: Way, places: &[Place]) -> CopyBatch {
        let op = |place: &Place| {
            let (from, to) = self.ends(way, *place);
            CopyOp { src: from, dst: to, len: place.len }
        };
        let direction = match way {
            Way::ToDevice => self.pool.promote_direction(),
            Way::ToHost => self.pool.demote_direction(),
        };
        let owners: Vec<Arc<dyn Any + Send + Sync>> =
            vec![Arc::clone(&self.arena) as _, Arc::new(Arc::clone(&self.pool))];
        // SAFETY: the owners keep both sides; each test uses a place for one copy at a time.
        unsafe { CopyBatch::new(places.iter().map(op).collect(), direction, owners) }
    }

    /// Copies, and compares.
    pub async fn copy(&self, way: Way, places: &[Place], number: u64) -> Result<(), Error> {
        for (at, place) in places.iter().enumerate() {
            self.prepare(way, *place, mix(number) + at as u64);
        }
        let (result, batch) = self.engine.copy(self.batch(way, places)).await;
        drop(batch);
        result?;
        for (at, place) in places.iter().enumerate() {
            self.verify(way, *place, mix(number) + at as u64);
        }
        Ok(())
    }

    pub fn state(&self) -> GdrState {
        self.engine.status().get()
    }

    /// Waits until the engine says of itself what is wanted.
    pub async fn until(&self, wanted: impl Fn(&GdrState) -> bool) {
        while !wanted(&self.state()) {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    }
}

/// So many places of at most `len_max` bytes that do not touch one another, in no order on either side.
pub fn scattered(rng: &mut Rng, count: usize, len_max: usize, within: std::ops::Range<usize>) -> Vec<Place> {
    let stride = within.len() / count;
    assert!(stride > len_max, "{count} places of {len_max} bytes in {within:?}");
    let order = |rng: &mut Rng| {
        let mut order: Vec<usize> = (0..count).collect();
        (1..count).rev().for_each(|at| order.swap(at, rng.below(at as u64 + 1) as usize));
        order
    };
    let (hosts, devices) = (order(rng), order(rng));
    let at = |rng: &mut Rng, slot: usize, len: usize| {
        within.start + slot * stride + rng.below((stride - len) as u64) as usize
    };
    (0..count)
        .map(|n| {
            let len = 1 + rng.below(len_max as u64) as usize;
            Place { host: at(rng, hosts[n], len), device: at(rng, devices[n], len), len }
        })
        .collect()
}

/// Whether an error is the engine's own.
pub fn is_of_engine(error: &Error) -> bool {
    matches!(error, Error::Copy { engine: "gdr", .. })
}
