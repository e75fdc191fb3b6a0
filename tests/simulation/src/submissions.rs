//! What a caller has for lent memory and for its completion queue. Pure data.

use kvhoist::{BlockKey, Cache, CompletionQueue, Region, Segment};

use crate::{
    foreign::{Memory, Pool},
    model::Began,
    plan::{Call, Plan},
    sim::Rng,
};

/// Memory of a caller for these calls: pieces, and the blocks of each.
const PIECES: usize = 3;
const PIECE_BLOCKS: usize = 2;

/// A caller's completion queue, its memory, and what it has submitted.
#[derive(Default)]
pub struct Submissions {
    pub queue: Option<(CompletionQueue, usize)>,
    pub free: Vec<Memory>,
    pub under_way: Vec<Submission>,
}

/// What was submitted, and has not completed.
pub struct Submission {
    pub ticket: u64,
    pub job: Job,
    pub memory: Memory,
    pub region: Option<Region>,
}

/// Blocks that are loaded into a piece of memory, or stored from it.
pub struct Job {
    pub loads: bool,
    pub blocks: Vec<usize>,
    pub keys: Vec<BlockKey>,
    pub parent: Option<BlockKey>,
    pub segments: Vec<Vec<Segment>>,
    pub began: Vec<Began>,
}

impl Submissions {
    /// What a caller of the run has for these calls: nothing where the run makes none.
    pub fn new(plan: &Plan, cache: &Cache, rng: &mut Rng, pool: &mut Pool) -> Self {
        let drawn = plan.habits.weights[Call::Lend as usize] + plan.habits.weights[Call::Submit as usize];
        if plan.habits.extra == 0.0 && drawn == 0 {
            return Submissions::default();
        }
        let depth = rng.between(1, PIECES as u64) as usize;
        let queue = cache.completion_queue(depth).expect("the system has a descriptor left");
        let blocks = PIECE_BLOCKS.min(plan.config.limits.movements_max as usize);
        let free = (0..PIECES).map(|_| pool.take(plan.config.block_bytes, blocks, false, plan.memory_shift));
        Submissions { queue: Some((queue, depth)), free: free.collect(), under_way: Vec::new() }
    }
}
