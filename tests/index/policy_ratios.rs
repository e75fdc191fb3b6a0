//! Hit ratios of the eviction policies: on a made workload always, on recorded traces where `KVHOIST_TRACE` names one.

use crate::{common, matched};

use std::collections::{BTreeSet, HashMap, HashSet};

use common::{Rng, key};
use kvhoist::{
    BlockKey, Tier,
    internals::index::{EntryId, Index, Lru, Policy, Rb},
};

/// One tier of the index alone, in which every missing block of a request is stored.
struct Tiered {
    index: Index,
    slots: usize,
    next_slot: u32,
    hits: u64,
    uses: u64,
    stores: u64,
}

impl Tiered {
    fn new(policy: Policy, slots: usize) -> Self {
        let mut policy = Some(policy);
        let index = Index::with_policies(1, |tier| match tier {
            Tier::Disk => policy.take().expect("there is one disk tier"),
            _ => Policy::Lru(Lru::new()),
        });
        Tiered { index, slots, next_slot: 0, hits: 0, uses: 0, stores: 0 }
    }

    fn request(&mut self, chain: &[BlockKey]) {
        let here = &chain[..matched(&self.index, chain)];
        let mut held: Vec<EntryId> = here.iter().map(|key| self.index.find(key).expect("resident")).collect();
        self.index.begin_request(chain.len());
        self.index.touch_chain(&held);
        self.hits += here.len() as u64;
        self.uses += chain.len() as u64;
        // What the request has is held while the rest comes, as by the request's leases.
        for &id in &held {
            self.index.pin(id, Tier::Disk).expect("resident");
        }
        for at in here.len()..chain.len() {
            let parent = at.checked_sub(1).map(|parent| chain[parent]);
            if self.index.resident(Tier::Disk) == self.slots {
                if self.index.refuses(&chain[at], parent.as_ref(), false, Tier::Disk) {
                    continue;
                }
                let Some(victim) = self.index.victim(Tier::Disk) else { break };
                self.index.evict(victim, Tier::Disk);
            }
            let id = self.index.insert(chain[at], parent);
            if !self.index.begin_fill(id, Tier::Disk) {
                // It was left over behind a gap.
                continue;
            }
            self.next_slot += 1;
            self.stores += 1;
            assert!(self.index.complete_fill(id, Tier::Disk, self.next_slot));
            self.index.pin(id, Tier::Disk).expect("resident");
            held.push(id);
        }
        for id in held.into_iter().rev() {
            let _ = self.index.unpin(id, Tier::Disk);
        }
    }

    /// Hits and stores of all references.
    fn ratio(&self) -> [f64; 2] {
        [self.hits, self.stores].map(|count| count as f64 / self.uses as f64)
    }
}

/// Hits and stores of LRU, of RB, and of RB that may refuse.
fn ratios(trace: &[Vec<BlockKey>], slots: usize) -> [[f64; 2]; 3] {
    let [rb, refusing] = [Rb::new(slots as u32), Rb::refusing(slots as u32)].map(|rb| Policy::Rb(Box::new(rb)));
    [Policy::Lru(Lru::new()), rb, refusing].map(|policy| {
        let mut tier = Tiered::new(policy, slots);
        trace.iter().for_each(|chain| tier.request(chain));
        tier.index.validate().unwrap_or_else(|what| panic!("{what}"));
        tier.ratio()
    })
}

/// For each request, how many of its blocks come before those at its end that no later request asks for.
fn lasting(trace: &[Vec<BlockKey>]) -> Vec<usize> {
    let mut last = HashMap::new();
    for (at, chain) in trace.iter().enumerate() {
        last.extend(chain.iter().map(|key| (*key, at)));
    }
    let lasting =
        |(at, chain): (usize, &Vec<BlockKey>)| chain.iter().rposition(|key| last[key] > at).map_or(0, |at| at + 1);
    trace.iter().enumerate().map(lasting).collect()
}

/// The most blocks, at any time, that were asked for and will be again.
fn going_on(trace: &[Vec<BlockKey>]) -> usize {
    let mut last = HashMap::new();
    for (at, chain) in trace.iter().enumerate() {
        last.extend(chain.iter().map(|key| (*key, at)));
    }
    let (mut now, mut most) = (HashSet::new(), 0);
    for (at, chain) in trace.iter().enumerate() {
        for key in chain {
            if last[key] > at {
                now.insert(*key)
            } else {
                now.remove(key)
            };
        }
        most = most.max(now.len());
    }
    most
}

/// Hits of a tier of `slots` blocks whose callers say of each chain where it is over, of all references.
fn released(trace: &[Vec<BlockKey>], slots: usize, policy: Policy) -> f64 {
    let mut tier = Tiered::new(policy, slots);
    for (chain, lasting) in trace.iter().zip(lasting(trace)) {
        tier.request(chain);
        // The whole chain is named where all of it is over, its end where a beginning is asked for again.
        tier.index.release(&chain[lasting..], 0);
    }
    tier.index.validate().unwrap_or_else(|what| panic!("{what}"));
    tier.ratio()[0]
}

/// Belady's MIN with bypass.
fn belady(trace: &[Vec<BlockKey>], slots: usize) -> f64 {
    let references: Vec<BlockKey> = trace.iter().flatten().copied().collect();
    let (mut next, mut seen) = (vec![0; references.len()], HashMap::new());
    for (at, key) in references.iter().enumerate().rev() {
        next[at] = seen.insert(*key, at).unwrap_or(references.len() + at);
    }
    let (mut by_next, mut held, mut hits) = (BTreeSet::new(), HashMap::new(), 0u32);
    for (key, next) in references.iter().zip(next) {
        if let Some(known) = held.insert(*key, next) {
            hits += 1;
            by_next.remove(&(known, *key));
        }
        by_next.insert((next, *key));
        if by_next.len() > slots {
            let (_, last) = by_next.pop_last().expect("it holds one more than it may");
            held.remove(&last);
        }
    }
    f64::from(hits) / references.len() as f64
}

/// Conversations that go on and come back, among prompts that never do.
fn workload() -> Vec<Vec<BlockKey>> {
    let mut rng = Rng(7);
    let mut lengths = vec![4u64; 40];
    let mut scans = 0;
    let mut trace = Vec::new();
    for _ in 0..3000 {
        if rng.below(3) > 0 {
            scans += 1;
            trace.push((0..20).map(|n| key(1_000_000 + scans * 20 + n)).collect());
            continue;
        }
        let user = rng.below(40);
        let length = &mut lengths[user as usize];
        *length = if *length > 24 { 4 } else { *length + 2 };
        trace.push((0..*length).map(|n| key(user * 1000 + n)).collect());
    }
    trace
}

#[test]
fn what_is_used_again_survives_what_never_is() {
    let trace = workload();
    for slots in [200, 400] {
        let [[lru, lru_stores], [rb, _], [refusing, stores]] = ratios(&trace, slots);
        println!("{slots} slots: LRU {lru:.4}, RB {rb:.4}, where it may refuse {refusing:.4}");
        assert!(rb > lru * 1.3, "{slots} slots: LRU {lru:.4}, RB {rb:.4}");
        assert!(refusing > lru * 1.3, "{slots} slots: LRU {lru:.4}, RB that may refuse {refusing:.4}");
        assert!(stores <= lru_stores, "{slots} slots: LRU stores {lru_stores:.4}, RB that may refuse {stores:.4}");
    }
}

/// Exact releases close the gap to the bound where every conversation that goes on fits: only blocks whose chain is
/// over are evicted then, and nobody asks for these again.
#[test]
fn exact_releases_reach_the_bound_where_all_that_goes_on_fits() {
    let trace = workload();
    let (going_on, longest) = (going_on(&trace), trace.iter().map(Vec::len).max().expect("requests"));
    let slots = going_on + longest;
    let [[lru, _], [rb, _], _] = ratios(&trace, slots);
    let bound = belady(&trace, slots);
    assert!(lru < bound - 0.05, "{slots} slots: LRU {lru:.4}, bound {bound:.4}: nothing to be gained");
    for policy in [Policy::Lru(Lru::new()), Policy::Rb(Box::new(Rb::new(slots as u32)))] {
        let released = released(&trace, slots, policy);
        println!("{slots} slots: LRU {lru:.4}, RB {rb:.4}, released {released:.4}, bound {bound:.4}");
        assert!(bound - released < 1e-9, "{slots} slots: {released} of {bound}");
    }
}

/// `KVHOIST_TRACE` is a file of requests, a JSON object with `hash_ids` a line; `KVHOIST_SLOTS` are numbers of slots.
#[test]
fn on_a_recorded_trace() {
    let Ok(path) = std::env::var("KVHOIST_TRACE") else {
        common::skip::skipped("KVHOIST_TRACE names no trace");
        return;
    };
    let text = std::fs::read_to_string(path).expect("the trace can be read");
    let ids = |line: &str| -> Vec<BlockKey> {
        let list =
            line.split("\"hash_ids\":").nth(1).and_then(|rest| rest.split(&['[', ']']).nth(1)).expect("hash_ids");
        list.split(',').filter(|id| !id.trim().is_empty()).map(|id| key(id.trim().parse().expect("a number"))).collect()
    };
    let trace: Vec<_> = text.lines().map(ids).collect();
    let distinct: HashSet<_> = trace.iter().flatten().collect();
    let slots = std::env::var("KVHOIST_SLOTS").unwrap_or_else(|_| "1827,3655,9139,18279,36558,73116".into());
    println!("{} requests, {} distinct blocks", trace.len(), distinct.len());
    for slots in slots.split(',').map(|slots| slots.parse().expect("a number")) {
        let [[lru, _], [rb, _], [refusing, stores]] = ratios(&trace, slots);
        println!("{slots} slots: LRU {lru:.4}, RB {rb:.4}, where it may refuse {refusing:.4} with {stores:.4} stores");
        let bound = belady(&trace, slots);
        let policies = [Policy::Lru(Lru::new()), Policy::Rb(Box::new(Rb::new(slots as u32)))];
        let [released_lru, released_rb] = policies.map(|policy| released(&trace, slots, policy));
        let closed = |hits: f64| 100.0 * (hits - lru) / (bound - lru);
        println!(
            "  released: LRU {released_lru:.4} ({:.1} % of the gap to {bound:.4}), RB {released_rb:.4} ({:.1} %)",
            closed(released_lru),
            closed(released_rb)
        );
    }
}
