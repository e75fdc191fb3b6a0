//! Memory of a client, as its own process has it.

use std::{ops::Range, sync::Arc};

use kvhoist::{Error, Segment, SharedMemory};
use kvhoist_service::{Client, ClientRegion};

use crate::sim::Rng;

/// What memory holds that nothing was loaded into.
const UNTOUCHED: u8 = 0x55;

/// What its owner writes to memory that was given back.
const GIVEN_BACK: u8 = 0xa6;

/// Room for some blocks in a memfd.
pub struct Memory {
    shared: Arc<SharedMemory>,
    block_bytes: usize,
    blocks: usize,
    pub region: Option<ClientRegion>,
}

impl Memory {
    pub fn new(block_bytes: usize, blocks: usize) -> Self {
        let shared = Arc::new(SharedMemory::new(block_bytes * blocks).expect("a memfd of some pages"));
        Memory { shared, block_bytes, blocks, region: None }
    }

    pub fn blocks(&self) -> usize {
        self.blocks
    }

    pub async fn register(&mut self, client: &Client, pinned: bool) -> Result<(), Error> {
        self.region = Some(client.register(self.lent().pinned(pinned)).await?);
        Ok(())
    }

    /// As memory of the space's device.
    pub async fn register_device(&mut self, client: &Client) -> Result<(), Error> {
        self.region = Some(client.register_device(self.lent()).await?);
        Ok(())
    }

    fn lent(&self) -> kvhoist::Memory {
        // SAFETY: nobody touches a block of it while the block is on its way.
        unsafe { kvhoist::Memory::shared(Arc::clone(&self.shared)) }
    }

    /// The place of block `at`, in one to three segments.
    pub fn segments(&self, at: usize, rng: &mut Rng) -> Vec<Segment> {
        cut(self.shared.as_ptr().wrapping_add(at * self.block_bytes), self.block_bytes, rng)
    }

    /// The place of block `at`, cut where these bytes of a block begin.
    pub fn cut_at(&self, at: usize, starts: &[usize]) -> Vec<Segment> {
        let start = self.shared.as_ptr().wrapping_add(at * self.block_bytes);
        let ends = starts[1..].iter().copied().chain([self.block_bytes]);
        starts.iter().zip(ends).map(|(&from, to)| Segment { ptr: start.wrapping_add(from), len: to - from }).collect()
    }

    /// Whether a range of block `at` is that of the data.
    pub fn holds_part(&self, at: usize, range: Range<usize>, data: &[u8]) -> bool {
        let mut bytes = vec![0; range.len()];
        self.shared.read(at * self.block_bytes + range.start, &mut bytes);
        bytes == data[range]
    }

    pub fn fill(&self, at: usize, data: &[u8]) {
        self.shared.write(at * self.block_bytes, data);
    }

    pub fn clear(&self, at: usize) {
        self.fill(at, &vec![UNTOUCHED; self.block_bytes]);
    }

    pub fn holds(&self, at: usize, data: &[u8]) -> bool {
        let mut bytes = vec![0; self.block_bytes];
        self.shared.read(at * self.block_bytes, &mut bytes);
        bytes == data
    }

    /// Its owner writes to all of it: the service does not use it any longer.
    pub fn take_back(&self) {
        self.shared.write(0, &vec![GIVEN_BACK; self.shared.len()]);
    }

    /// False where somebody wrote to memory that was given back.
    pub fn is_left_alone(&self) -> bool {
        let mut bytes = vec![0; self.shared.len()];
        self.shared.read(0, &mut bytes);
        bytes.iter().all(|byte| *byte == GIVEN_BACK)
    }
}

/// A range in one to three segments.
pub fn cut(start: *mut u8, len: usize, rng: &mut Rng) -> Vec<Segment> {
    let mut cuts = vec![0, len];
    cuts.extend((0..rng.below(3)).map(|_| rng.below(len as u64) as usize));
    cuts.sort_unstable();
    cuts.dedup();
    cuts.windows(2).map(|cut| Segment { ptr: start.wrapping_add(cut[0]), len: cut[1] - cut[0] }).collect()
}
