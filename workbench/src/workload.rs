//! Made workloads: chat, agents and scans, with the statistics of recorded ones. The same seed gives the same requests.
//!
//! Sizes are in blocks of 512 tokens. Chat is as in the hour of conversations that Mooncake published with its paper
//! (FAST 2025; 12,031 requests of 8,072 conversations); agents are as in six hours of coding sessions (11,780 requests
//! of 457 sessions). The tables below are quantiles of these two; the tests check the means that follow from them.
//! Scans are long documents that are requested once: nobody has recorded them, so theirs are made up.

use std::collections::BinaryHeap;

/// One request.
#[derive(Debug, Clone, PartialEq)]
pub struct Asked {
    /// When it comes, milliseconds.
    pub at_ms: f64,
    /// The prefix chain, first block first. Equal numbers stand for equal prefixes up to there.
    pub blocks: Vec<u64>,
    /// Nothing follows in its conversation.
    pub is_last: bool,
}

/// A kind of load.
pub struct Kind {
    /// Conversations that begin, a second.
    begun_per_s: f64,
    /// Shared by this many conversations of all: the first blocks of their first prompts.
    shared_share: f64,
    shared_blocks: u64,
    turns: Quantiles,
    /// Blocks of the first prompt.
    first: Quantiles,
    /// Blocks that a turn adds.
    growth: Quantiles,
    /// Seconds from a turn to the next.
    pause_s: Quantiles,
    /// The last block of a prompt is not full, and so is another one in the next turn.
    has_partial_block: bool,
}

/// Values at 0, 10, 25, 50, 75, 90, 99 and 100 % of a distribution; between them the logarithm of the value and one is
/// linear.
struct Quantiles([f64; 8]);

const SHARES: [f64; 8] = [0.0, 0.10, 0.25, 0.50, 0.75, 0.90, 0.99, 1.0];

/// Conversations of people: most have one turn, prompts differ widely, answers are read for minutes.
pub const CHAT: Kind = Kind {
    begun_per_s: 2.28,
    shared_share: 0.91,
    shared_blocks: 1,
    turns: Quantiles([1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 7.0, 14.0]),
    first: Quantiles([1.0, 2.0, 3.0, 12.0, 29.0, 52.0, 171.0, 250.0]),
    growth: Quantiles([0.0, 0.0, 0.0, 1.0, 2.0, 9.0, 33.0, 60.0]),
    pause_s: Quantiles([10.0, 39.0, 66.0, 123.0, 267.0, 474.0, 1458.0, 2500.0]),
    has_partial_block: true,
};

/// Coding agents: tens of turns in quick succession over a long prompt that grows.
pub const AGENTS: Kind = Kind {
    begun_per_s: 0.0212,
    shared_share: 0.65,
    shared_blocks: 28,
    turns: Quantiles([1.0, 1.0, 4.0, 16.0, 38.0, 69.0, 105.0, 150.0]),
    first: Quantiles([20.0, 26.0, 36.0, 69.0, 187.0, 309.0, 1187.0, 1200.0]),
    growth: Quantiles([0.0, 0.0, 1.0, 1.0, 3.0, 8.0, 32.0, 80.0]),
    pause_s: Quantiles([4.0, 8.0, 10.0, 16.0, 34.0, 100.0, 1133.0, 2000.0]),
    has_partial_block: false,
};

/// Documents that are read once.
pub const SCANS: Kind = Kind {
    begun_per_s: 0.2,
    shared_share: 0.0,
    shared_blocks: 0,
    turns: Quantiles([1.0; 8]),
    first: Quantiles([20.0, 30.0, 50.0, 100.0, 150.0, 200.0, 250.0, 250.0]),
    growth: Quantiles([0.0; 8]),
    pause_s: Quantiles([0.0; 8]),
    has_partial_block: false,
};

impl Quantiles {
    fn draw(&self, random: &mut Random) -> f64 {
        let share = random.share();
        let above = SHARES.iter().position(|&at| at > share).unwrap_or(SHARES.len() - 1);
        let (from, to) = (SHARES[above - 1], SHARES[above]);
        let (low, high) = (self.0[above - 1], self.0[above]);
        let way = (share - from) / (to - from);
        (1.0 + low).powf(1.0 - way) * (1.0 + high).powf(way) - 1.0
    }

    fn draw_whole(&self, random: &mut Random) -> u64 {
        self.draw(random).round() as u64
    }
}

/// A turn that is to come.
struct Turn {
    at_ms: f64,
    /// In the order of their making, for equal times.
    number: u64,
    kind: usize,
    /// Its conversation so far; empty before the first turn.
    blocks: Vec<u64>,
    /// Turns to come, this one included; 0: a conversation begins.
    left: u64,
}

impl Ord for Turn {
    /// The next one is the greatest.
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        other.at_ms.total_cmp(&self.at_ms).then(other.number.cmp(&self.number))
    }
}

impl PartialOrd for Turn {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Turn {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Turn {}

/// The first requests of these loads together, each at so many times its usual rate.
pub fn mix(seed: u64, kinds: &[(&Kind, f64)], requests: usize) -> Vec<Asked> {
    let mut random = Random(seed);
    let mut made = 0;
    let mut number = move || {
        made += 1;
        made
    };
    // The blocks that the conversations of a kind share come first.
    let shared: Vec<Vec<u64>> =
        kinds.iter().map(|(kind, _)| (0..kind.shared_blocks).map(|_| number()).collect()).collect();
    let mut turns = BinaryHeap::new();
    for kind in 0..kinds.len() {
        turns.push(Turn { at_ms: 0.0, number: number(), kind, blocks: Vec::new(), left: 0 });
    }
    let mut asked = Vec::with_capacity(requests);
    while asked.len() < requests
        && let Some(mut turn) = turns.pop()
    {
        let (kind, rate) = kinds[turn.kind];
        if turn.left == 0 {
            let wait_ms = -1e3 * (1.0 - random.share()).ln() / (kind.begun_per_s * rate);
            turns.push(Turn { at_ms: turn.at_ms + wait_ms, number: number(), blocks: Vec::new(), ..turn });
            turn.left = kind.turns.draw_whole(&mut random).max(1);
            let blocks = kind.first.draw_whole(&mut random).max(1) as usize;
            let is_shared = random.share() < kind.shared_share;
            let begin = shared[turn.kind].iter().filter(|_| is_shared).take(blocks);
            turn.blocks.extend(begin);
            let more = blocks - turn.blocks.len();
            turn.blocks.extend((0..more).map(|_| number()));
        } else {
            if kind.has_partial_block && turn.blocks.len() > kind.shared_blocks as usize {
                turn.blocks.pop();
                turn.blocks.push(number());
            }
            let more = kind.growth.draw_whole(&mut random);
            turn.blocks.extend((0..more).map(|_| number()));
        }
        turn.left -= 1;
        asked.push(Asked { at_ms: turn.at_ms, blocks: turn.blocks.clone(), is_last: turn.left == 0 });
        if turn.left > 0 {
            let at_ms = turn.at_ms + 1e3 * kind.pause_s.draw(&mut random);
            turns.push(Turn { at_ms, number: number(), ..turn });
        }
    }
    asked
}

/// `SplitMix64` (Steele, Lea, Flood 2014).
struct Random(u64);

impl Random {
    /// From 0 on, and below 1.
    fn share(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}
