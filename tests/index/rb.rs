//! RB-LRU, step by step, against the same policy in scans over one tier of whole requests.

use std::collections::{BTreeMap, BTreeSet};

use kvhoist::{
    BlockKey, Tier,
    internals::index::{EntryId, Index, Lru, Policy, Rb},
};

use crate::{
    common::{self, Rng, key},
    matched,
};

const TIER: Tier = Tier::Disk;

#[derive(Clone, Copy)]
struct Block {
    parent: Option<u64>,
    last: u64,
    uses: u8,
}

#[derive(Clone, Copy)]
struct Ghost {
    block: u64,
    at: u64,
    uses: u8,
    refused: bool,
}

/// What the policy says, in scans.
struct Reference {
    slots: f64,
    clock: u64,
    resident: BTreeMap<u64, Block>,
    pinned: BTreeSet<u64>,
    /// The last evictions and refusals; `None` for those that were requested again.
    ghosts: Vec<Option<Ghost>>,
    head: f64,
    regrets: [f64; 2],
    evictions: [f64; 2],
    /// Evictions and refusals since the last adaptation.
    since: u32,
    refuses: bool,
    share: f64,
    hits: f64,
    time: f64,
}

fn class(uses: u8) -> usize {
    usize::from(uses > 1)
}

impl Reference {
    fn new(slots: u32, refuses: bool) -> Self {
        Reference {
            slots: slots.into(),
            clock: 0,
            resident: BTreeMap::new(),
            pinned: BTreeSet::new(),
            ghosts: Vec::new(),
            head: f64::from(slots) / 2.0,
            regrets: [0.0; 2],
            evictions: [0.0; 2],
            since: 0,
            refuses,
            share: 1.0,
            hits: 0.0,
            time: 0.0,
        }
    }

    fn is_full(&self) -> bool {
        self.resident.len() as f64 == self.slots
    }

    /// Counts a use, and returns the uses before it.
    fn use_block(&mut self, block: u64) -> u8 {
        self.clock += 1;
        if let Some(Block { last, uses, .. }) = self.resident.get_mut(&block) {
            let before = *uses;
            if before == 1 {
                self.hits += 1.0;
                self.time += (self.clock - *last) as f64;
            }
            (*last, *uses) = (self.clock, (before + 1).min(3));
            return before;
        }
        let found = self.ghosts.iter_mut().find(|ghost| ghost.is_some_and(|ghost| ghost.block == block));
        let Some(ghost) = found.and_then(Option::take) else { return 0 };
        if !ghost.refused && (self.clock - ghost.at) as f64 <= self.slots {
            self.regrets[class(ghost.uses)] += 1.0;
        }
        ghost.uses
    }

    fn is_remembered(&self, block: u64) -> bool {
        self.ghosts.iter().flatten().any(|ghost| ghost.block == block)
    }

    fn push_ghost(&mut self, block: u64, uses: u8, refused: bool) {
        self.ghosts.push(Some(Ghost { block, at: self.clock, uses: uses.min(3), refused }));
        let forgotten = self.ghosts.len().saturating_sub(2 * self.slots as usize);
        self.ghosts.drain(..forgotten);
    }

    /// The coldest of the leaves that no request holds, where blocks of the second class count as used later.
    fn victim(&self) -> Option<u64> {
        let parents: BTreeSet<u64> = self.resident.values().filter_map(|block| block.parent).collect();
        let free = self.resident.iter().filter(|(n, _)| !parents.contains(n) && !self.pinned.contains(n));
        let value = |block: &Block| block.last as f64 + if block.uses > 1 { self.head } else { 0.0 };
        let coldest =
            free.min_by(|(_, a), (_, b)| value(a).total_cmp(&value(b)).then(class(a.uses).cmp(&class(b.uses))));
        coldest.map(|(n, _)| *n)
    }

    fn evict(&mut self, block: u64) {
        let Block { last, uses, .. } = self.resident.remove(&block).expect("resident");
        self.evictions[class(uses)] += 1.0;
        if uses == 1 {
            self.time += (self.clock - last) as f64;
        }
        self.push_ghost(block, uses, false);
        self.count();
    }

    fn refuse(&mut self, block: u64) {
        let uses = self.use_block(block);
        self.push_ghost(block, uses + 1, true);
        self.count();
    }

    fn store(&mut self, block: u64, parent: Option<u64>) {
        let uses = (self.use_block(block) + 1).min(3);
        self.resident.insert(block, Block { parent, last: self.clock, uses });
        self.pinned.insert(block);
    }

    fn count(&mut self) {
        self.since += 1;
        if self.since == (self.slots as u32 / 32).max(16) {
            self.since = 0;
            self.adapt();
        }
    }

    fn adapt(&mut self) {
        let Reference { slots, regrets, evictions, .. } = self;
        let slots = *slots;
        let all = (regrets[0] + regrets[1] + 0.5) / (evictions[0] + evictions[1] + 1.0);
        let rate = [0, 1].map(|class| (regrets[class] + 8.0 * all) / (evictions[class] + 8.0));
        let step = 0.02 * slots * (rate[1] - rate[0]) / (rate[1] + rate[0] + 1e-9);
        self.head = (self.head + step).clamp(0.0, 16.0 * slots);
        let period = f64::from((slots as u32 / 32).max(16));
        let decay = 0.5f64.powf(period / (2.0 * slots));
        if self.refuses {
            let class = usize::from(evictions[1] >= 16.0);
            let new = (self.hits + 0.5) / (self.time + slots);
            let old = 0.5 * (regrets[class] + 0.5) / ((evictions[class] + 1.0) * slots);
            self.share = (self.share * (0.1 * (new - old) / (new + old)).exp()).clamp(1.0 / 16.0, 1.0);
            (self.hits, self.time) = (self.hits * decay, self.time * decay);
        }
        regrets.iter_mut().chain(evictions).for_each(|count| *count *= decay);
    }
}

/// The index and the reference, which serve the same requests.
struct Both {
    index: Index,
    reference: Reference,
    next_slot: u32,
    /// Random draws that the share of new chains decided, how many of them refused, and how many were expected to.
    draws: u32,
    refused: u32,
    expected: f64,
}

impl Both {
    fn new(slots: u32, refuses: bool) -> Self {
        let index = Index::with_policies(1, |tier| match tier {
            TIER if refuses => Policy::Rb(Box::new(Rb::refusing(slots))),
            TIER => Policy::Rb(Box::new(Rb::new(slots))),
            _ => Policy::Lru(Lru::new()),
        });
        let reference = Reference::new(slots, refuses);
        Both { index, reference, next_slot: 0, draws: 0, refused: 0, expected: 0.0 }
    }

    fn request(&mut self, chain: &[u64]) {
        let keys: Vec<BlockKey> = chain.iter().copied().map(key).collect();
        let found = matched(&self.index, &keys);
        let resident = chain.iter().take_while(|n| self.reference.resident.contains_key(n)).count();
        assert_eq!(found, resident, "{chain:?}");
        let ids: Vec<EntryId> = keys[..found].iter().map(|key| self.index.find(key).expect("resident")).collect();
        self.index.begin_request(chain.len());
        self.index.touch_chain(&ids);
        for (&id, &block) in ids.iter().zip(chain).rev() {
            self.index.pin(id, TIER).expect("resident");
            self.reference.use_block(block);
            self.reference.pinned.insert(block);
        }
        let mut is_refused = false;
        for at in resident..chain.len() {
            if self.reference.resident.contains_key(&chain[at]) {
                // It is behind a gap: its chain was refused when the tier began to admit all.
                is_refused = false;
                continue;
            }
            is_refused = self.reference.is_full() && self.is_refused(chain, at, is_refused);
            if is_refused {
                self.reference.refuse(chain[at]);
            } else if !self.store(chain, at) {
                break;
            }
        }
        for block in std::mem::take(&mut self.reference.pinned) {
            let id = self.index.find(&key(block)).expect("pinned");
            assert_eq!(self.index.unpin(id, TIER), None);
        }
    }

    /// What the index says, which is a random draw only for the first new block of a chain that no refused one
    /// precedes.
    fn is_refused(&mut self, chain: &[u64], at: usize, parent_refused: bool) -> bool {
        let parent = at.checked_sub(1).map(|at| chain[at]);
        let refused = self.index.refuses(&key(chain[at]), parent.map(key).as_ref(), false, TIER);
        let reference = &self.reference;
        let parent_is_new =
            parent.and_then(|parent| reference.resident.get(&parent)).is_some_and(|parent| parent.uses == 1);
        let expected = match () {
            () if reference.share == 1.0 => Some(false),
            () if parent_refused => Some(true),
            () if reference.is_remembered(chain[at]) || parent_is_new => Some(false),
            () => None,
        };
        assert!(expected.is_none_or(|expected| expected == refused), "{at} of {chain:?}: {refused}");
        if expected.is_none() {
            self.draws += 1;
            self.refused += u32::from(refused);
            self.expected += 1.0 - reference.share;
        }
        refused
    }

    /// False if the request itself holds every leaf.
    fn store(&mut self, chain: &[u64], at: usize) -> bool {
        if self.reference.is_full() {
            let victim = self.index.victim(TIER);
            // Where the request holds every leaf, the index may offer a block above them, which is no matter of RB.
            let Some(block) = self.reference.victim() else { return false };
            assert_eq!(victim.map(|id| self.index.key(id)), Some(key(block)), "{at} of {chain:?}");
            self.index.evict(victim.expect("compared"), TIER);
            self.reference.evict(block);
        }
        let parent = at.checked_sub(1).map(|at| chain[at]);
        let id = self.index.insert(key(chain[at]), parent.map(key));
        self.next_slot += 1;
        assert!(self.index.begin_fill(id, TIER) && self.index.complete_fill(id, TIER, self.next_slot));
        self.index.pin(id, TIER).expect("resident");
        self.reference.store(chain[at], parent);
        true
    }

    fn compare(&self) {
        let Both { index, reference, .. } = self;
        assert_eq!((index.clock(), index.resident(TIER)), (reference.clock, reference.resident.len()));
        let (head, share) = (index.head(TIER).expect("it is RB"), index.share(TIER));
        assert!((head - reference.head).abs() < 1e-6, "a head start of {head}, expected {}", reference.head);
        assert!((share - reference.share).abs() < 1e-9, "a share of {share}, expected {}", reference.share);
        for (&block, Block { last, uses, .. }) in &reference.resident {
            let id = index.find(&key(block)).expect("resident");
            assert_eq!((index.used(id).last, index.used(id).uses), (*last, *uses), "block {block}");
        }
        index.validate().unwrap_or_else(|what| panic!("{what}"));
    }
}

/// A request of a conversation that grows, starts anew or branches off another, or a prompt that never comes again.
fn request(rng: &mut Rng, lengths: &mut [u64], n: u64) -> Vec<u64> {
    if rng.below(3) == 0 {
        let first = 1_000_000 + n * 100;
        return (first..first + 1 + rng.below(12)).collect();
    }
    let user = rng.below(lengths.len() as u64);
    let length = &mut lengths[user as usize];
    *length = if *length > 14 { 1 } else { *length + 1 + rng.below(3) };
    let branch = if rng.below(8) == 0 { n * 100 } else { 0 };
    (0..*length).map(|at| user * 1000 + if at > 4 && branch > 0 { 2_000_000 + branch + at } else { at }).collect()
}

#[test]
fn every_step_of_rb_is_the_references() {
    let seed = common::seed();
    let (mut draws, mut refused, mut expected) = (0, 0, 0.0);
    for (run, slots) in [1, 7, 33, 60, 100, 600].into_iter().enumerate() {
        for refuses in [false, true] {
            let mut rng = Rng(seed.wrapping_add(run as u64));
            let mut lengths = vec![1; slots.max(4)];
            let mut both = Both::new(slots as u32, refuses);
            for n in 0..1500 {
                both.request(&request(&mut rng, &mut lengths, n));
                both.compare();
            }
            draws += both.draws;
            refused += both.refused;
            expected += both.expected;
            assert!(refuses || both.draws == 0);
        }
    }
    println!("of {draws} draws {refused} refused, expected {expected:.0}");
    assert!(draws > 1000, "{draws} draws: nothing thrashed");
    // Twelve times the standard deviation at most.
    let tolerance = 6.0 * f64::from(draws).sqrt();
    assert!((f64::from(refused) - expected).abs() < tolerance, "of {draws} draws {refused} refused, not {expected}");
}
