//! Which blocks are worth a write to disk.
//!
//! A block that is about to leave host memory is written if blocks of its class are requested again, often enough,
//! while the disk tier would keep them. A class is the number of requests that used the block (one, two, more) and its
//! depth in the chain, to a power of two. For each class the outcomes of earlier decisions are counted, whichever way
//! they went: the block was *requested again*, or the disk tier has meanwhile evicted blocks that were used later, so
//! that a write would have been in vain. The counts are halved after as many outcomes as decisions are remembered: two
//! for each slot of the disk tier.
//!
//! A class with few outcomes is judged by all blocks with as many uses, and without any outcomes a block is worth a
//! write.
//!
//! For a write budget each chain has a *coin*, a random draw for its first block, which its later blocks inherit; a
//! chain that branches off another one has a coin of its own. So a budget that takes a share of the coins takes whole
//! chains.

use kvhoist_base::block::{BlockKey, Tier};

use super::{
    EntryId, Index,
    entry::{FILLING, FULL},
    link::NONE,
    write_outcomes::WriteValues,
};

/// A block is written if it is requested again with at least this probability.
const THRESHOLD: f64 = 0.25;
/// Blocks of a chain that are counted at once.
const DEPTH_MAX: u16 = 1 << 14;

/// What the index knows of a block that may be written.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Worth {
    /// The probability that it is requested again while the disk tier would keep it.
    pub probability: f64,
    /// The probability is enough for a write.
    pub is_enough: bool,
    /// It was used in more than one request.
    pub again: bool,
    /// The chain's random draw, from 0 on and below 1: a share of 1 takes every chain.
    pub coin: f64,
}

impl Index {
    /// Values writes from now on, for a disk tier of `slots` slots. Uses are then counted by requests, whatever the
    /// policies. Takes 30 bytes per slot, and 4 bytes per entry, all at once if [`try_reserve`](Self::try_reserve) was
    /// called before. The error is the number of bytes that were refused.
    pub fn value_writes(&mut self, slots: u32) -> Result<(), usize> {
        self.values = Some(Box::new(WriteValues::try_new(slots, self.entries.capacity())?));
        self.counts_requests = true;
        Ok(())
    }

    /// The worth of a write of the block to disk. `full`: the disk tier is full.
    ///
    /// # Panics
    /// Unless [`value_writes`](Self::value_writes) was called.
    pub fn worth(&mut self, id: EntryId, full: bool) -> Worth {
        // The last use of what the policy would evict from the disk tier next: a hint tells nothing of how long it
        // keeps blocks.
        let Index { entries, policies, .. } = self;
        let next = if full { policies[Tier::Disk as usize].victim(entries, Tier::Disk) } else { None };
        let floor = next.map(|victim| self.last_use(victim) as u32);
        let depth = self.depth_class(id);
        let uses = self.entry(id).used().uses;
        let values = self.values.as_mut().expect("writes are valued");
        if let Some(floor) = floor {
            values.judge_before(floor);
        }
        let probability = values.probability(uses, depth);
        let coin = f64::from(values.chained(id.0).coin) / f64::from(1 << u16::BITS);
        Worth { probability, is_enough: probability >= THRESHOLD, again: uses > 1, coin }
    }

    /// A decision on the block was made: its outcome will be counted.
    pub fn decided(&mut self, id: EntryId) {
        let depth = self.depth_class(id);
        let used = self.entry(id).used();
        let hash = self.hash_of(id);
        if let Some(values) = &mut self.values {
            values.decide(hash, used.last as u32, used.uses, depth);
        }
    }

    /// The block and its ancestors that are in host memory and neither on disk nor being written, the topmost first; up
    /// to the first that is or for which `is_known` is true, and `max` at most.
    pub fn unwritten_chain(&self, id: EntryId, max: usize, is_known: impl Fn(&BlockKey) -> bool) -> Vec<EntryId> {
        let is_unwritten = |id: EntryId| {
            let entry = self.entry(id);
            let is_written = entry.has(Tier::Disk, FULL | FILLING);
            entry.has(Tier::Host, FULL) && !is_written && !entry.is_removed() && !is_known(&entry.key)
        };
        let mut chain: Vec<_> =
            std::iter::successors(Some(id), |&id| self.parent(id).filter(|above| is_unwritten(*above)))
                .take(max)
                .collect();
        chain.reverse();
        chain
    }

    /// A new block inherits the coin of its parent if it is the parent's first child; else one is drawn.
    pub(super) fn toss_coin(&mut self, id: EntryId) {
        let parent = self.parent(id).filter(|parent| !self.entry(*parent).is_named());
        let hash = self.hash_of(id);
        let Some(values) = &mut self.values else { return };
        if values.chained(id.0).coin != 0 {
            return;
        }
        let inherited = parent.map_or(0, |parent| values.chained(parent.0).coin);
        // Half of the hash chooses the place in the table; this mixes both.
        let drawn = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ hash.rotate_left(32);
        values.chained(id.0).coin = if inherited != 0 { inherited } else { (drawn >> 48) as u16 | 1 };
    }

    /// The class of a block by its depth. Counts the blocks above it, up to the first whose depth is known.
    fn depth_class(&mut self, id: EntryId) -> u8 {
        let Index { entries, values: Some(values), .. } = self else { return 0 };
        let above = |id: EntryId| Some(entries[id.0 as usize].parent).filter(|parent| *parent != NONE).map(EntryId);
        let (mut steps, mut known, mut at) = (0u16, 0, Some(id));
        while let Some(found) = at
            && steps < DEPTH_MAX
        {
            known = values.chained(found.0).depth;
            if known > 0 {
                break;
            }
            steps += 1;
            at = above(found);
        }
        let depth = known.saturating_add(steps);
        let mut at = Some(id);
        for step in 0..steps {
            let Some(found) = at else { break };
            values.chained(found.0).depth = depth - step;
            at = above(found);
        }
        depth.max(1).ilog2() as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u32) -> BlockKey {
        let mut bytes = [0; 32];
        bytes[..4].copy_from_slice(&n.to_le_bytes());
        BlockKey::new(bytes)
    }

    /// An index whose host tier holds the blocks, each the child of the one before.
    fn chain(slots: u32, blocks: std::ops::Range<u32>, parent: Option<u32>) -> (Index, Vec<EntryId>) {
        let mut index = Index::new(1);
        index.value_writes(slots).expect("there is memory");
        let ids = store(&mut index, blocks, parent);
        (index, ids)
    }

    fn store(index: &mut Index, blocks: std::ops::Range<u32>, mut parent: Option<u32>) -> Vec<EntryId> {
        blocks
            .map(|n| {
                let id = index.insert(key(n), parent.replace(n).map(key));
                assert!(index.begin_fill(id, Tier::Host) && index.complete_fill(id, Tier::Host, n));
                id
            })
            .collect()
    }

    #[test]
    fn what_is_never_asked_for_again_stops_being_worth_it_and_what_is_stays() {
        let (mut index, ids) = chain(16, 0..1, None);
        assert!(index.worth(ids[0], false).is_enough, "nothing is known");
        for n in 1..400 {
            let id = store(&mut index, n..n + 1, None)[0];
            index.decided(id);
            let slot = index.evict(id, Tier::Host);
            assert_eq!(slot, n);
            // A block that is asked for after each decision on it.
            index.decided(ids[0]);
            index.touch(ids[0]);
            index.validate().expect("valid");
        }
        let once = store(&mut index, 1000..1001, None)[0];
        let (once, again) = (index.worth(once, false), index.worth(ids[0], false));
        assert!(!once.again && !once.is_enough, "{once:?}");
        assert!(again.again && again.is_enough && again.probability > 0.9, "{again:?}");
    }

    /// Blocks that a caller releases are the next victims, and were used a moment ago.
    #[test]
    fn a_release_closes_no_decision() {
        let (mut index, ids) = chain(16, 0..1, None);
        let kept = ids[0];
        assert!(index.begin_fill(kept, Tier::Disk) && index.complete_fill(kept, Tier::Disk, 0));
        let open = store(&mut index, 1..2, None)[0];
        index.decided(open);
        let done = store(&mut index, 2..3, None)[0];
        assert!(index.begin_fill(done, Tier::Disk) && index.complete_fill(done, Tier::Disk, 1));
        index.touch(done);
        assert_eq!(index.release(&[key(2)], 0), 1);
        assert_eq!(index.victim(Tier::Disk), Some(done));
        assert_eq!(index.worth(open, true).probability, 1.0, "its decision is open");
        index.touch(kept);
        assert!(index.worth(open, true).probability < 1.0, "the disk tier would have evicted it");
    }

    #[test]
    fn a_block_that_was_dropped_is_known_when_it_comes_back() {
        let (mut index, ids) = chain(16, 0..1, None);
        index.decided(ids[0]);
        let _ = index.evict(ids[0], Tier::Host);
        assert_eq!(index.find(&key(0)), None);
        let id = store(&mut index, 0..1, None)[0];
        assert!(index.worth(id, false).again);
    }

    #[test]
    fn the_unwritten_part_of_a_chain_comes_from_its_top() {
        let (mut index, ids) = chain(16, 0..6, None);
        assert!(index.begin_fill(ids[1], Tier::Disk) && index.complete_fill(ids[1], Tier::Disk, 0));
        assert_eq!(index.unwritten_chain(ids[4], usize::MAX, |_| false), ids[2..5]);
        assert_eq!(index.unwritten_chain(ids[0], usize::MAX, |_| false), ids[..1]);
        assert_eq!(index.unwritten_chain(ids[5], usize::MAX, |above| *above == key(3)), ids[4..6]);
    }

    #[test]
    fn a_chain_has_one_coin_and_its_branches_have_their_own() {
        let (mut index, ids) = chain(16, 0..8, None);
        let coin = index.worth(ids[0], false).coin;
        assert!(ids.iter().all(|&id| index.worth(id, false).coin == coin), "one chain");
        let branches = [100, 200, 300].map(|first| store(&mut index, first..first + 3, Some(3)));
        let coins = branches.each_ref().map(|branch| index.worth(branch[0], false).coin);
        for (branch, coin) in branches.iter().zip(coins) {
            assert!(branch.iter().all(|&id| index.worth(id, false).coin == coin), "one branch");
        }
        assert!(coins.iter().any(|other| *other != coin), "{coins:?} and {coin}");
        index.values.as_mut().expect("writes are valued").chained(ids[0].0).coin = u16::MAX;
        assert!(index.worth(ids[0], false).coin < 1.0, "a share of 1 takes every chain");
    }

    #[test]
    fn depths_are_classes_of_powers_of_two() {
        let (mut index, ids) = chain(16, 0..40, None);
        let classes: Vec<_> = [39, 0, 1, 2, 3, 6, 7, 15, 31].map(|at| index.depth_class(ids[at])).to_vec();
        assert_eq!(classes, [5, 0, 1, 1, 2, 2, 3, 4, 5]);
    }
}
