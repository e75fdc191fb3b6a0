//! Uses of blocks, and the ghosts of those that were evicted.

use kvhoist::{Tier, internals::index::Used};

use super::{Copy, Entity, Model};

impl Model {
    pub fn counts_requests(&self) -> bool {
        self.requests.is_some()
    }

    pub fn begin_request(&mut self, blocks: usize) {
        self.request = self.clock..self.clock + 2 * blocks as u64;
    }

    /// What hints stand, by id.
    pub fn touch(&mut self, at: usize) {
        if !self.counts_requests() {
            return self.count_use(at);
        }
        let announced = std::mem::take(&mut self.entity_mut(at).announced);
        self.touch_unless(at, announced);
    }

    pub fn announce(&mut self, at: usize) {
        if !self.counts_requests() {
            return self.count_use(at);
        }
        self.touch_unless(at, self.entity(at).announced);
        let entity = self.entity_mut(at);
        entity.announced |= entity.copies != [Copy::None; Tier::COUNT];
    }

    fn touch_unless(&mut self, at: usize, announced: bool) {
        let Entity { last_use, copies, .. } = *self.entity(at);
        let counted = self.request.contains(&self.clock) && last_use > self.request.start;
        if copies == [Copy::None; Tier::COUNT] {
            return;
        }
        if announced || counted {
            self.come_back(at);
            if announced {
                self.entity_mut(at).last_use = self.clock;
            }
            return;
        }
        self.count_use(at);
    }

    pub(super) fn count_use(&mut self, at: usize) {
        self.clock += 1;
        let Entity { key, uses, .. } = *self.entity(at);
        let remembered = match uses {
            0 if self.counts_requests() => {
                Tier::ALL.map(|tier| self.take_ghost(key, tier).map_or(0, |uses| uses.max(1))).into_iter().max()
            }
            _ => Some(uses),
        };
        self.come_back(at);
        let clock = self.clock;
        let entity = self.entity_mut(at);
        (entity.last_use, entity.uses) = (clock, (remembered.expect("three tiers") + 1).min(3));
    }

    /// What a record says of the uses.
    pub(super) fn used_as(&mut self, at: usize, used: Used) {
        let entity = self.entity_mut(at);
        entity.last_use = entity.last_use.max(used.last);
        entity.uses = entity.uses.max(used.uses).clamp(1, 3);
        self.clock = self.clock.max(self.entity(at).last_use);
    }

    pub(super) fn come_back(&mut self, at: usize) {
        self.entity_mut(at).evicted = [false; Tier::COUNT];
    }

    pub(super) fn take_ghost(&mut self, key: u8, tier: Tier) -> Option<u8> {
        let is_its = |ghost: &&mut Option<(u8, u8)>| ghost.is_some_and(|(of, _)| of == key);
        self.ghosts[tier as usize].iter_mut().find(is_its)?.take().map(|(_, uses)| uses)
    }

    pub fn remembers(&self, key: u8, tier: Tier) -> bool {
        self.ghosts[tier as usize].iter().flatten().any(|(of, _)| *of == key)
    }

    /// A refusal is a use; that of a block in another tier is counted with its use there.
    pub fn refuse(&mut self, key: u8, tier: Tier, is_elsewhere: bool) {
        self.clock += u64::from(!is_elsewhere);
        let uses = self.take_ghost(key, tier).map_or(0, |uses| uses.max(1));
        self.remember(key, tier, (uses + 1).min(3));
    }

    pub fn remember(&mut self, key: u8, tier: Tier, uses: u8) {
        let Some(room) = self.requests else { return };
        self.take_ghost(key, tier);
        let ghosts = &mut self.ghosts[tier as usize];
        ghosts.push(Some((key, uses)));
        ghosts.drain(..ghosts.len().saturating_sub(room));
    }
}
