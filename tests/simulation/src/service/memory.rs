//! Memory of a client, as its own process has it.

use std::sync::Arc;

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
        // SAFETY: nobody touches a block of it while the block is on its way.
        let lent = unsafe { kvhoist::Memory::shared(Arc::clone(&self.shared)) };
        let region = client.register(lent.pinned(pinned)).await?;
        self.region = Some(region);
        Ok(())
    }

    /// The place of block `at`, in one to three segments.
    pub fn segments(&self, at: usize, rng: &mut Rng) -> Vec<Segment> {
        cut(self.shared.as_ptr().wrapping_add(at * self.block_bytes), self.block_bytes, rng)
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
