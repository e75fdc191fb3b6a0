//! Outcomes of decisions on writes: the counts behind [`Worth`](super::Worth).

use super::{entry::USES_MAX, ghosts::Ghosts};

/// Weight of the rate of all depths in the rate of a class, in outcomes.
const PRIOR: f64 = 8.0;
/// Decisions that are closed at once: a microsecond or two.
const JUDGED_AT_ONCE: usize = 64;
/// Classes of depth: one a power of two.
const DEPTHS: usize = 16;

/// What is known of an entry's chain.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Chained {
    /// Blocks up to this one, included, as far as the chain was known; 0 if not counted yet.
    pub(super) depth: u16,
    /// 0 if none was drawn.
    pub(super) coin: u16,
}

/// Outcomes of the decisions on a class: decayed counts.
#[derive(Debug, Clone, Copy, Default)]
struct Outcomes {
    asked: f64,
    over: f64,
}

/// Counts the outcomes of decisions.
pub(super) struct WriteValues {
    classes: [[Outcomes; DEPTHS]; USES_MAX as usize],
    until_decay: usize,
    /// Decisions: the last use of the block, and its uses.
    decided: Ghosts,
    /// The class of depth, by the place in the ring.
    depths: Vec<u8>,
    /// Decisions so far, and how many of them are older than the first open one.
    count: u64,
    judged: u64,
    /// By the number of the entry.
    chains: Vec<Chained>,
}

impl WriteValues {
    /// For a disk tier of `slots` slots and an index with room for `entries` entries. The error is the number of bytes
    /// that the system refused.
    pub(super) fn try_new(slots: u32, entries: usize) -> Result<Self, usize> {
        let mut decided = Ghosts::new(slots.saturating_mul(2));
        decided.try_reserve()?;
        let (mut depths, mut chains) = (Vec::new(), Vec::new());
        depths.try_reserve_exact(decided.room()).map_err(|_| decided.room())?;
        chains.try_reserve_exact(entries).map_err(|_| entries.saturating_mul(size_of::<Chained>()))?;
        Ok(WriteValues {
            classes: Default::default(),
            until_decay: decided.room(),
            decided,
            depths,
            count: 0,
            judged: 0,
            chains,
        })
    }

    pub(super) fn chained(&mut self, id: u32) -> &mut Chained {
        let at = id as usize;
        if at >= self.chains.len() {
            self.chains.resize(at + 1, Chained::default());
        }
        &mut self.chains[at]
    }

    /// A new entry got this number.
    pub(super) fn forget_chain(&mut self, id: u32) {
        if let Some(chained) = self.chains.get_mut(id as usize) {
            *chained = Chained::default();
        }
    }

    /// A block is used. Returns its uses at the last decision on it, 0 if none is remembered.
    pub(super) fn asked(&mut self, hash: u64) -> u8 {
        let Some((place, ghost)) = self.decided.take_placed(hash) else { return 0 };
        if self.number_at(place) >= self.judged {
            self.count_outcome(ghost.uses(), self.depths[place], true);
        }
        ghost.uses()
    }

    /// The number of the decision at a place in the ring.
    fn number_at(&self, place: usize) -> u64 {
        let room = self.decided.room() as u64;
        let last = self.count - 1;
        last - (last + room - place as u64) % room
    }

    fn count_outcome(&mut self, uses: u8, depth: u8, asked: bool) {
        let outcomes = &mut self.classes[usize::from(uses.clamp(1, USES_MAX)) - 1][usize::from(depth)];
        match asked {
            true => outcomes.asked += 1.0,
            false => outcomes.over += 1.0,
        }
        self.until_decay = self.until_decay.saturating_sub(1);
        if self.until_decay == 0 {
            self.until_decay = self.decided.room();
            for outcomes in self.classes.iter_mut().flatten() {
                outcomes.asked *= 0.5;
                outcomes.over *= 0.5;
            }
        }
    }

    /// Closes the oldest open decision: the block was not requested in time.
    fn judge_oldest(&mut self) {
        let place = (self.judged % self.decided.room() as u64) as usize;
        self.judged += 1;
        if let Some(ghost) = self.decided.at(place) {
            self.count_outcome(ghost.uses(), self.depths[place], false);
        }
    }

    /// The disk tier has evicted all blocks that were last used before `floor`. Closes no more than some decisions: a
    /// call follows for each decision that is made.
    pub(super) fn judge_before(&mut self, floor: u32) {
        for _ in 0..JUDGED_AT_ONCE {
            if self.judged == self.count {
                break;
            }
            let place = (self.judged % self.decided.room() as u64) as usize;
            if self.decided.at(place).is_some_and(|ghost| (ghost.at.wrapping_sub(floor)).cast_signed() >= 0) {
                break;
            }
            self.judge_oldest();
        }
    }

    pub(super) fn decide(&mut self, hash: u64, last: u32, uses: u8, depth: u8) {
        let room = self.decided.room() as u64;
        if room == 0 {
            return;
        }
        if self.count - self.judged == room {
            self.judge_oldest();
        }
        let place = (self.count % room) as usize;
        self.count += 1;
        self.decided.push(hash, last, uses, false);
        if place == self.depths.len() {
            self.depths.push(depth);
        } else {
            self.depths[place] = depth;
        }
    }

    pub(super) fn probability(&self, uses: u8, depth: u8) -> f64 {
        let classes = &self.classes[usize::from(uses.clamp(1, USES_MAX)) - 1];
        let all = classes.iter().fold(Outcomes::default(), |all, class| Outcomes {
            asked: all.asked + class.asked,
            over: all.over + class.over,
        });
        let base = (all.asked + PRIOR) / (all.asked + all.over + PRIOR);
        let Outcomes { asked, over } = classes[usize::from(depth)];
        (asked + PRIOR * base) / (asked + over + PRIOR)
    }

    pub(super) fn validate(&self) -> Result<(), String> {
        self.decided.validate()?;
        let room = self.decided.room();
        let open = self.count.checked_sub(self.judged).ok_or("more decisions are judged than were made")?;
        if open > room as u64 || self.depths.len() > room {
            return Err(format!("{open} open decisions, {} classes, room for {room}", self.depths.len()));
        }
        match self.classes.iter().flatten().find(|class| !(class.asked >= 0.0 && class.over >= 0.0)) {
            None => Ok(()),
            Some(class) => Err(format!("outcomes are counted as {class:?}")),
        }
    }
}
