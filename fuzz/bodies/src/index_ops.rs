//! The index against a plain model: all its calls, in any order that its contract allows.

mod compare;
mod model;
mod ops;

use std::collections::BTreeSet;

use arbitrary::{Arbitrary, Unstructured};
use kvhoist::{
    BlockKey, Tier,
    internals::index::{EntryId, Index, Policy, Rb, Used},
};
use model::{Copy, Model};
use ops::{Op, Record};

/// Largest number of calls of an input. Each is followed by a comparison of everything.
const OPS_MAX: usize = 256;
const KEYS: u8 = 20;
/// Slots of the policy RB: few, so that it forgets ghosts.
const SLOTS: u32 = 4;
/// Copies that a tier may keep.
const KEPT_MAX: usize = 3;

/// Makes the calls in `data`, and compares every answer, and the whole index after each call.
pub fn run(data: &[u8]) {
    let mut input = Unstructured::new(data);
    let Ok(seed) = input.arbitrary::<u64>() else { return };
    let index = match seed % 3 {
        0 => Index::new(seed),
        1 => Index::with_policies(seed, |_| Policy::Rb(Box::new(Rb::new(SLOTS)))),
        _ => Index::with_policies(seed, |_| Policy::Rb(Box::new(Rb::refusing(SLOTS)))),
    };
    let model = Model::new(!seed.is_multiple_of(3), SLOTS as usize);
    let mut pair = Pair { index, model, slots: 0, accepted: BTreeSet::new(), now: 0 };
    Tier::ALL.into_iter().for_each(|tier| pair.index.limit_kept(tier, KEPT_MAX));
    for _ in 0..OPS_MAX {
        if input.is_empty() {
            break;
        }
        let Ok(op) = Op::arbitrary(&mut input) else { break };
        pair.step(&op);
        pair.compare();
    }
}

struct Pair {
    index: Index,
    model: Model,
    /// Slots given out so far; each has its own number.
    slots: u32,
    /// Blocks that a full tier admitted.
    accepted: BTreeSet<(u8, Tier)>,
    now: u64,
}

fn block_key(key: u8) -> BlockKey {
    BlockKey::new([key; 32])
}

fn tier(number: u8) -> Tier {
    Tier::ALL[usize::from(number) % Tier::COUNT]
}

impl Pair {
    fn step(&mut self, op: &Op) {
        match *op {
            Op::Fill { key, parent, tier: to } => self.fill(key % KEYS, parent.map(|p| p % KEYS), tier(to)),
            Op::Insert { key, parent, by_abort } => self.insert(key % KEYS, parent.map(|p| p % KEYS), by_abort),
            Op::Complete { pick } => self.complete(pick),
            Op::Abort { pick } => self.abort(pick),
            Op::Pin { pick, tier: at } => self.pin(pick, tier(at)),
            Op::Unpin { pick } => self.unpin(pick),
            Op::Touch { pick } => {
                if let Some(at) = self.model.any(pick) {
                    self.index.touch(self.model.id(at));
                    self.model.touch(at);
                }
            }
            Op::Announce { pick } => {
                if let Some(at) = self.model.any(pick) {
                    self.index.announce(self.model.id(at));
                    self.model.announce(at);
                }
            }
            Op::Refuse { key, parent, comes, tier: of } => {
                self.refuse(key % KEYS, parent.map(|parent| parent % KEYS), comes, tier(of));
            }
            Op::TouchChain { from, len } => self.touch_chain(from, len),
            Op::Hit { pick } => {
                if let Some(at) = self.model.any(pick) {
                    assert_eq!(self.index.hit(self.model.id(at)), self.model.hit(at));
                }
            }
            Op::SetDirty { pick, tier: at, dirty } => {
                if let Some(entity) = self.model.any(pick) {
                    self.index.set_dirty(self.model.id(entity), tier(at), dirty);
                    self.model.set_dirty(entity, tier(at), dirty);
                }
            }
            Op::Evict { tier: from } => self.evict(tier(from)),
            Op::Drop { pick, tier: from } => {
                if let Some(at) = self.model.any(pick) {
                    let dropped = self.index.drop_copy(self.model.id(at), tier(from));
                    assert_eq!(dropped, self.model.drop_copy(at, tier(from)));
                }
            }
            Op::Remove { pick } => {
                if let Some(at) = self.model.any(pick) {
                    assert_eq!(self.index.remove(self.model.id(at)), self.model.remove(at));
                }
            }
            Op::Restore { tier: to, ref records } => self.restore_all(records, tier(to)),
            Op::Release { from, len } => self.release(from, len),
            Op::Keep { pick, time } => self.keep(pick, time),
            Op::Expire { time } => {
                self.now += u64::from(time);
                self.index.expire(self.now);
            }
            Op::Reserve { entries } => self.index.try_reserve(entries.into()).expect("room for a few"),
        }
    }

    fn abort(&mut self, pick: u8) {
        if let Some((at, tier)) = self.model.filling(pick) {
            self.index.abort_fill(self.model.id(at), tier);
            self.model.vacate(at, tier);
        }
    }

    fn restore_all(&mut self, records: &[Option<Record>], to: Tier) {
        let keys = records.iter().flatten().map(|record| block_key(record.key % KEYS)).collect::<Vec<_>>();
        self.index.prefetch_keys(keys.iter());
        records.iter().flatten().for_each(|record| self.restore(record, to));
        self.index.restored(to);
    }

    /// The index says what is released, since it knows of past forks: this checks only what the hint must not do.
    fn release(&mut self, from: u8, len: u8) {
        let keys: Vec<BlockKey> = (from..from.saturating_add(len % KEYS)).map(|key| block_key(key % KEYS)).collect();
        let before: BTreeSet<usize> = self.model.released().collect();
        let released = self.index.release(&keys, self.now);
        self.marks();
        let named = |at: &usize| keys.contains(&block_key(self.model.entity(*at).key));
        let after: BTreeSet<usize> = self.model.released().collect();
        assert!(before.is_subset(&after) && after.difference(&before).all(named), "{before:?}, then {after:?}");
        assert!(released >= after.len() - before.len() && released <= keys.len(), "{released} of {keys:?}");
    }

    fn keep(&mut self, pick: u8, time: u8) {
        let Some(at) = self.model.any(pick) else { return };
        let entity = self.model.entity(at);
        let may = !entity.removed && entity.copies != [Copy::None; Tier::COUNT];
        let (id, until) = (self.model.id(at), self.now + u64::from(time));
        assert_eq!(self.index.keep(id, until), may);
        _ = std::iter::successors(Some(id).filter(|_| may), |&id| self.index.keep_before(id, until)).last();
        self.marks();
        let entity = self.model.entity(at);
        assert!(!may || entity.kept && !entity.released, "{} is kept and not released", entity.key);
    }

    /// Tells the model what hints stand; [`Index::validate`] says whether they may.
    fn marks(&mut self) {
        let Pair { index, model, .. } = self;
        model.mark(|id| (index.is_released(id), index.is_kept(id)));
    }

    fn slot(&mut self) -> u32 {
        self.slots += 1;
        self.slots
    }

    /// Inserts in both. The model learns the ids of what is new, ghosts too.
    fn inserted(&mut self, key: u8, parent: Option<u8>) -> (EntryId, usize) {
        let id = self.index.insert(block_key(key), parent.map(block_key));
        let index = &self.index;
        let at = self.model.insert(key, parent, |key| index.find(&block_key(key)).expect("just inserted"));
        assert_eq!(self.model.id(at), id);
        (id, at)
    }

    fn fill(&mut self, key: u8, parent: Option<u8>, tier: Tier) {
        let (id, at) = self.inserted(key, parent);
        let began = self.index.begin_fill(id, tier);
        assert_eq!(began, self.model.begin_fill(at, tier));
        assert!(!self.index.begin_fill(id, tier), "one fill at a time");
    }

    fn insert(&mut self, key: u8, parent: Option<u8>, by_abort: bool) {
        let (id, at) = self.inserted(key, parent);
        let idle = Tier::ALL.into_iter().find(|tier| !self.index.is_filling(id, *tier));
        match idle.filter(|_| by_abort) {
            Some(tier) => {
                self.index.abort_fill(id, tier);
                self.model.collect(None);
            }
            None => assert_eq!(self.index.remove(id), self.model.remove(at)),
        }
    }

    fn complete(&mut self, pick: u8) {
        let Some((at, tier)) = self.model.filling(pick) else { return };
        let (id, slot) = (self.model.id(at), self.slot());
        let completed = self.model.complete_fill(at, tier, slot);
        // Every other one is pinned in the same step.
        if slot % 2 == 0 {
            assert_eq!(self.index.complete_fill(id, tier, slot), completed);
        } else {
            assert_eq!(self.index.complete_fill_pinned(id, tier, slot), completed);
            assert!(!completed || self.model.pin(at, tier) == Some(slot));
        }
    }

    fn pin(&mut self, pick: u8, tier: Tier) {
        let Some(at) = self.model.any(pick) else { return };
        assert_eq!(self.index.pin(self.model.id(at), tier), self.model.pin(at, tier));
    }

    fn unpin(&mut self, pick: u8) {
        let Some((at, tier)) = self.model.pinned(pick) else { return };
        assert_eq!(self.index.unpin(self.model.id(at), tier), self.model.unpin(at, tier));
    }

    fn touch_chain(&mut self, from: u8, len: u8) {
        let keys: Vec<BlockKey> = (from..from.saturating_add(len % KEYS)).map(|key| block_key(key % KEYS)).collect();
        if len >= 128 {
            self.index.begin_request(keys.len());
            self.model.begin_request(keys.len());
        }
        let find = |key| self.index.best_tier(self.index.find(key)?);
        let found: Vec<Tier> = keys.iter().map_while(find).collect();
        let resident = |key: &&BlockKey| self.model.resident(key.as_bytes()[0]).is_some();
        let expected: Vec<usize> =
            keys.iter().take_while(resident).map(|key| self.model.live(key.as_bytes()[0]).expect("resident")).collect();
        assert_eq!(found.len(), expected.len());
        let tiers = expected.iter().map(|&at| self.model.best_tier(at).expect("resident"));
        assert!(found.into_iter().eq(tiers));
        let ids: Vec<EntryId> = expected.iter().map(|&at| self.model.id(at)).collect();
        assert!(keys.iter().zip(&ids).all(|(key, id)| self.index.find(key) == Some(*id)));
        self.index.touch_chain(&ids);
        expected.into_iter().rev().for_each(|at| self.model.touch(at));
    }

    fn evict(&mut self, tier: Tier) {
        let victim = self.index.victim(tier);
        if self.model.evictable(tier).iter().all(|at| self.model.entity(*at).kept) {
            self.check_last_resort(tier, victim);
        }
        if let Some(id) = victim {
            let at = self.model.by_id(id);
            assert_eq!(Some(self.index.evict(id, tier)), self.model.evict(at, tier));
        }
    }

    /// What is refused depends on a coin only where it is its chain's first new block.
    fn refuse(&mut self, key: u8, parent: Option<u8>, comes: bool, tier: Tier) {
        let (index, model) = (&mut self.index, &mut self.model);
        let may = index.share(tier) < 1.0;
        let refused = index.refuses(&block_key(key), parent.map(block_key).as_ref(), comes, tier);
        let copies = |key: u8| model.live(key).map(|at| model.entity(at)).filter(|of| of.copies != [Copy::None; 3]);
        let uses = copies(key).map_or(0, |entity| entity.uses);
        let is_first = uses == 1 || uses == 0 && !model.remembers(key, tier);
        let expected = match (parent, parent.and_then(copies)) {
            _ if !may => Some(false),
            (Some(_), Some(before)) if comes || before.copies[tier as usize] != Copy::None => {
                (!is_first || before.uses <= 1).then_some(false)
            }
            (Some(parent), _) if comes || self.accepted.contains(&(parent, tier)) => Some(false),
            (Some(_), Some(_)) => Some(is_first),
            (Some(parent), None) if model.remembers(parent, tier) => Some(true),
            _ => (!is_first).then_some(false),
        };
        assert!(expected.is_none_or(|expected| expected == refused), "{key} after {parent:?}: {refused}");
        if refused {
            self.accepted.remove(&(key, tier));
            let is_elsewhere = copies(key).is_some();
            model.refuse(key, tier, is_elsewhere);
        } else if may && is_first {
            self.accepted.insert((key, tier));
        }
    }

    fn restore(&mut self, record: &Record, tier: Tier) {
        if self.try_restore(record, tier) || !record.newer {
            return;
        }
        let at = self.model.live(record.key % KEYS).expect("it was refused for its copy");
        let (slot, used) = (self.slot(), Used { last: record.last_use.into(), uses: record.uses % 4 });
        let replaced = self.index.restore_instead(self.model.id(at), tier, slot, used);
        assert_eq!(replaced, self.model.restore_instead(at, tier, slot, used));
    }

    fn try_restore(&mut self, record: &Record, tier: Tier) -> bool {
        let (key, parent) = (record.key % KEYS, record.parent.map(|parent| parent % KEYS));
        let (slot, used) = (self.slot(), Used { last: record.last_use.into(), uses: record.uses % 4 });
        let restored = self.index.restore(block_key(key), parent.map(block_key), tier, slot, used);
        let index = &self.index;
        let at = self.model.insert(key, parent, |key| index.find(&block_key(key)).expect("just inserted"));
        let id = self.model.id(at);
        let expected = if self.model.restore(at, tier, slot, used) { Ok(id) } else { Err(id) };
        assert_eq!(restored, expected);
        restored.is_ok()
    }
}
