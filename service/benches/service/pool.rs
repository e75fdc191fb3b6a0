//! A client's memory, and what all parts of the bench share.

use std::{sync::Arc, time::Instant};

use kvhoist::{BlockKey, Segment, SharedMemory};

use crate::options::Outcome;

/// Pages of one of SGLang's calls.
pub const PAGES: usize = 128;

pub fn key(number: u64) -> BlockKey {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    BlockKey::new(bytes)
}

/// A pool of pages, and where each of them lies.
pub struct Pool {
    pub memory: Arc<SharedMemory>,
    pub places: Vec<Vec<Segment>>,
    block_bytes: usize,
}

impl Pool {
    pub fn new(block_bytes: usize) -> Outcome<Self> {
        let memory = Arc::new(SharedMemory::new(PAGES * block_bytes)?);
        let place = |at: usize| vec![Segment { ptr: memory.as_ptr().wrapping_add(at * block_bytes), len: block_bytes }];
        Ok(Pool { places: (0..PAGES).map(place).collect(), memory, block_bytes })
    }

    /// Other bytes for every round: what is known is not written again.
    pub fn fill(&self, round: u64) {
        for at in 0..PAGES {
            let mut state = (round << 32 | at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            let mut page = vec![0u8; self.block_bytes];
            for word in page.chunks_exact_mut(8) {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                word.copy_from_slice(&state.to_le_bytes());
            }
            self.memory.write(at * self.block_bytes, &page);
        }
    }
}

pub fn all_done(results: &[Result<bool, kvhoist::Error>]) -> Outcome<()> {
    match results.iter().position(|result| !matches!(result, Ok(true))) {
        None => Ok(()),
        Some(at) => Err(format!("page {at}: {:?}", results[at]).into()),
    }
}

pub fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

pub fn timed(run: impl FnOnce() -> Outcome<()>) -> Outcome<f64> {
    let begun = Instant::now();
    run()?;
    Ok(begun.elapsed().as_secs_f64())
}
