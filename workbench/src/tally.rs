//! What became of the blocks of a trace.

use std::{collections::BTreeMap, time::Duration};

use hdrhistogram::Histogram;
use kvhoist::{Route, Tier};

/// Where one reference found its block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Served by this tier.
    Hit(Tier),
    /// Served by none.
    Miss,
}

/// One route's figures.
pub struct RouteTally {
    /// Bytes that went this way.
    pub bytes: u64,
    /// From the call to its answer, nanoseconds.
    pub latency_ns: Histogram<u64>,
}

/// Counts of a whole replay.
#[derive(Default)]
pub struct Tally {
    /// Blocks asked for.
    pub references: u64,
    /// Served by each tier, indexed by [`Tier`]` as usize`.
    pub hits: [u64; Tier::COUNT],
    /// Blocks whose bytes were not those stored under their key.
    pub verification_failures: u64,
    /// Stores that failed.
    pub store_failures: u64,
    /// By the path of the bytes.
    pub routes: BTreeMap<Route, RouteTally>,
    /// Per request, in trace order: hits of each tier, then misses.
    pub per_request: Vec<[u32; Tier::COUNT + 1]>,
}

impl Tally {
    /// Hits of all tiers.
    pub fn all_hits(&self) -> u64 {
        self.hits.iter().sum()
    }

    /// Hits a reference.
    pub fn hit_ratio(&self) -> f64 {
        self.all_hits() as f64 / (self.references as f64).max(1.0)
    }

    /// Counts one reference of request number `request`.
    pub fn count(&mut self, request: usize, outcome: Outcome) {
        if self.per_request.len() <= request {
            self.per_request.resize(request + 1, [0; Tier::COUNT + 1]);
        }
        self.references += 1;
        match outcome {
            Outcome::Hit(tier) => {
                self.hits[tier as usize] += 1;
                self.per_request[request][tier as usize] += 1;
            }
            Outcome::Miss => self.per_request[request][Tier::COUNT] += 1,
        }
    }

    /// Counts one block that went a route.
    pub fn moved(&mut self, route: Route, bytes: usize, took: Duration) {
        let tally = self.routes.entry(route).or_insert_with(|| RouteTally {
            bytes: 0,
            latency_ns: Histogram::new_with_bounds(1, 600_000_000_000, 3).expect("constant bounds"),
        });
        tally.bytes += bytes as u64;
        tally.latency_ns.saturating_record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).max(1));
    }
}
