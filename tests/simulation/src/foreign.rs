//! A caller's own memory, registered with the cache.

use crate::sim::Rng;
use kvhoist::{Cache, Config, Error, Region, Segment, internals::io::IO_ALIGN};

/// What memory holds that nothing was loaded into.
const UNTOUCHED: u8 = 0x55;

/// What its owner writes to memory that was given back.
const GIVEN_BACK: u8 = 0xa6;

/// Room for some blocks. It outlives the life in which it is used: operations of a cache that died may still name it.
pub struct Memory {
    /// From a box that [`Pool`] keeps.
    start: *mut u8,
    block_bytes: usize,
    blocks: usize,
    device: bool,
    region: Option<Region>,
    /// It was given back, and its owner has written to all of it.
    given_back: bool,
}

/// Keeps the memory of callers until their runtime is gone.
#[derive(Default)]
pub struct Pool(Vec<*mut [u8]>);

impl Pool {
    /// Memory that begins `shift` bytes into a page.
    pub fn take(&mut self, block_bytes: usize, blocks: usize, device: bool, shift: usize) -> Memory {
        let memory = Box::into_raw(vec![UNTOUCHED; block_bytes * blocks + 2 * IO_ALIGN].into_boxed_slice());
        self.0.push(memory);
        let start = memory.cast::<u8>();
        let start = start.wrapping_add(start.align_offset(IO_ALIGN) + shift);
        Memory { start, block_bytes, blocks, device, region: None, given_back: false }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        for memory in self.0.drain(..) {
            // SAFETY: it came from `Box::into_raw` in `take`, once; whoever could name it is gone: a pool is dropped
            // after the runtime of its life.
            drop(unsafe { Box::from_raw(memory) });
        }
    }
}

impl Memory {
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// A block may be here before it is verified.
    pub fn takes_unverified(&self, config: &Config) -> bool {
        self.device || config.host.bypass
    }

    pub fn is_registered(&self) -> bool {
        self.region.is_some()
    }

    pub fn region(&self) -> Option<&Region> {
        self.region.as_ref()
    }

    pub async fn register(&mut self, cache: &Cache, pinned: bool) -> Result<(), Error> {
        self.given_back = false;
        let len = self.block_bytes * self.blocks;
        // SAFETY: the pool keeps the memory mapped for longer than the cache lives, and nobody touches a block of it
        // while a call on it is under way: each caller makes one call at a time, and waits for `unregister` after
        // one that it dropped.
        let memory = unsafe {
            match self.device {
                true => kvhoist::Memory::device(self.start, len),
                false => kvhoist::Memory::host(self.start, len),
            }
        };
        self.region = Some(cache.register(memory.pinned(pinned)).await?);
        Ok(())
    }

    /// Lends all of it for one call.
    pub fn lend(&mut self, cache: &Cache) -> Result<Region, Error> {
        self.given_back = false;
        let all = Segment { ptr: self.start, len: self.block_bytes * self.blocks };
        // SAFETY: as in `register`; the caller waits for its end, or for the submission to complete.
        unsafe { cache.lend(&[all]) }
    }

    /// Resolves when no call uses the memory any longer.
    pub async fn unregister(&mut self, cache: &Cache) {
        if let Some(region) = self.region.take() {
            cache.unregister(&region).await.expect("its own region");
        }
    }

    /// As [`unregister`](Self::unregister), by two callers at once; the memory is its owner's after either.
    pub async fn unregister_twice(&mut self, cache: &Cache) {
        if let Some(region) = self.region.take() {
            let (first, second) = tokio::join!(cache.unregister(&region), cache.unregister(&region));
            first.and(second).expect("its own region");
        }
    }

    /// Its owner writes to all of it.
    pub fn use_otherwise(&mut self) {
        assert!(self.region.is_none(), "its owner has it back");
        self.given_back = true;
        // SAFETY: as in `fill`; `unregister` has been waited for.
        unsafe { self.start.write_bytes(GIVEN_BACK, self.block_bytes * self.blocks) }
    }

    /// False where somebody wrote to memory that was given back.
    pub fn is_left_alone(&self) -> bool {
        // SAFETY: as in `holds`.
        let bytes = unsafe { std::slice::from_raw_parts(self.start, self.block_bytes * self.blocks) };
        !self.given_back || bytes.iter().all(|byte| *byte == GIVEN_BACK)
    }

    /// The place of block `at`, in one to three segments.
    pub fn segments(&self, at: usize, rng: &mut Rng) -> Vec<Segment> {
        let mut cuts = vec![0, self.block_bytes];
        cuts.extend((0..rng.below(3)).map(|_| rng.below(self.block_bytes as u64) as usize));
        cuts.sort_unstable();
        cuts.dedup();
        let start = self.place(at);
        cuts.windows(2).map(|cut| Segment { ptr: start.wrapping_add(cut[0]), len: cut[1] - cut[0] }).collect()
    }

    /// The place of block `at`, in as many segments as there are `layers`, the same in every block.
    pub fn layers(&self, at: usize, layers: usize) -> Vec<Segment> {
        let (start, len) = (self.place(at), self.block_bytes / layers);
        let segment = |layer: usize| {
            let end = if layer + 1 == layers { self.block_bytes } else { (layer + 1) * len };
            Segment { ptr: start.wrapping_add(layer * len), len: end - layer * len }
        };
        (0..layers).map(segment).collect()
    }

    /// Whether block `at` has the bytes of a layer, of so many.
    pub fn holds_layer(&self, at: usize, layer: usize, layers: usize, data: &[u8]) -> bool {
        let segment = self.layers(at, layers)[layer];
        let offset = segment.ptr.addr() - self.place(at).addr();
        // SAFETY: the range is in the memory, initialized, and no copy of this layer is under way any longer.
        let found = unsafe { std::slice::from_raw_parts(segment.ptr, segment.len) };
        found == &data[offset..offset + segment.len]
    }

    pub fn fill(&mut self, at: usize, data: &[u8]) {
        assert_eq!(data.len(), self.block_bytes, "one block");
        // SAFETY: the range is in the memory (`place` checks), and no call is under way on it.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), self.place(at), data.len()) }
    }

    pub fn clear(&mut self, at: usize) {
        // SAFETY: as in `fill`.
        unsafe { self.place(at).write_bytes(UNTOUCHED, self.block_bytes) }
    }

    pub fn holds(&self, at: usize, data: &[u8]) -> bool {
        // SAFETY: the range is in the memory, initialized, and no call is under way on it.
        unsafe { std::slice::from_raw_parts(self.place(at), self.block_bytes) == data }
    }

    pub fn is_clear(&self, at: usize) -> bool {
        // SAFETY: as in `holds`.
        unsafe { std::slice::from_raw_parts(self.place(at), self.block_bytes).iter().all(|byte| *byte == UNTOUCHED) }
    }

    fn place(&self, at: usize) -> *mut u8 {
        assert!(at < self.blocks, "a block of this memory");
        self.start.wrapping_add(at * self.block_bytes)
    }
}
