//! What the index promises, in maps and scans.

mod uses;

use std::collections::{BTreeMap, BTreeSet};

use kvhoist::{
    Tier,
    internals::index::{EntryId, Used},
};

#[derive(Debug, Clone, std::marker::Copy, PartialEq, Eq)]
pub enum Copy {
    None,
    Filling,
    Full { slot: u32, pins: u32, dirty: bool },
}

/// One life of one key.
#[derive(Debug)]
pub struct Entity {
    pub key: u8,
    id: EntryId,
    parent: Option<usize>,
    pub removed: bool,
    pub copies: [Copy; Tier::COUNT],
    pub last_use: u64,
    /// Uses that are known, 3 at most.
    pub uses: u8,
    announced: bool,
    /// Tiers that have evicted it, while it is in another, and were not told that it came back.
    evicted: [bool; Tier::COUNT],
    pub hits: u8,
    /// It goes first, and last.
    pub released: bool,
    pub kept: bool,
}

/// All lives, each under a number that is never used again.
#[derive(Debug, Default)]
pub struct Model {
    entities: BTreeMap<usize, Entity>,
    live: BTreeMap<u8, usize>,
    created: usize,
    clock: u64,
    /// Of policies that count requests: how many evictions a tier remembers, and which.
    requests: Option<usize>,
    request: std::ops::Range<u64>,
    /// Keys and uses.
    ghosts: [Vec<Option<(u8, u8)>>; Tier::COUNT],
}

impl Model {
    pub fn new(counts_requests: bool, slots: usize) -> Self {
        Model { requests: counts_requests.then_some(2 * slots), ..Model::default() }
    }

    pub fn mark(&mut self, hints: impl Fn(EntryId) -> (bool, bool)) {
        for entity in self.entities.values_mut() {
            (entity.released, entity.kept) = hints(entity.id);
        }
    }

    pub fn released(&self) -> impl Iterator<Item = usize> {
        self.entities().filter(|(_, entity)| entity.released).map(|(at, _)| at)
    }

    pub fn entity(&self, at: usize) -> &Entity {
        &self.entities[&at]
    }

    fn entity_mut(&mut self, at: usize) -> &mut Entity {
        self.entities.get_mut(&at).expect("it lives")
    }

    pub fn entities(&self) -> impl Iterator<Item = (usize, &Entity)> {
        self.entities.iter().map(|(&at, entity)| (at, entity))
    }

    pub fn id(&self, at: usize) -> EntryId {
        self.entity(at).id
    }

    pub fn by_id(&self, id: EntryId) -> usize {
        let mut found = self.entities().filter(|(_, entity)| entity.id == id);
        found.next().expect("an id that is good").0
    }

    pub fn live(&self, key: u8) -> Option<usize> {
        self.live.get(&key).copied()
    }

    pub fn len(&self) -> usize {
        self.live.len()
    }

    pub fn clock(&self) -> u64 {
        self.clock
    }

    pub fn parent_key(&self, at: usize) -> Option<u8> {
        self.entity(at).parent.map(|parent| self.entity(parent).key)
    }

    /// Any entity: ghosts and removed ones too.
    pub fn any(&self, pick: u8) -> Option<usize> {
        nth(&self.entities.keys().copied().collect::<Vec<_>>(), pick)
    }

    /// Any fill in flight.
    pub fn filling(&self, pick: u8) -> Option<(usize, Tier)> {
        nth(&self.copies(|copy| copy == Copy::Filling), pick)
    }

    /// Any copy that someone has pinned.
    pub fn pinned(&self, pick: u8) -> Option<(usize, Tier)> {
        nth(&self.copies(|copy| matches!(copy, Copy::Full { pins: 1.., .. })), pick)
    }

    fn copies(&self, wanted: impl Fn(Copy) -> bool) -> Vec<(usize, Tier)> {
        let all = self.entities().flat_map(|(at, _)| Tier::ALL.map(|tier| (at, tier)));
        all.filter(|&(at, tier)| wanted(self.copy(at, tier))).collect()
    }

    fn copy(&self, at: usize, tier: Tier) -> Copy {
        self.entity(at).copies[tier as usize]
    }

    fn set(&mut self, at: usize, tier: Tier, copy: Copy) {
        self.entity_mut(at).copies[tier as usize] = copy;
    }

    pub fn best_tier(&self, at: usize) -> Option<Tier> {
        Tier::ALL.into_iter().find(|&tier| matches!(self.copy(at, tier), Copy::Full { .. }))
    }

    /// The fastest tier where a key can be found.
    pub fn resident(&self, key: u8) -> Option<Tier> {
        self.best_tier(self.live(key)?)
    }

    pub fn full(&self, tier: Tier) -> impl Iterator<Item = usize> {
        let full = move |&at: &usize| matches!(self.copy(at, tier), Copy::Full { .. });
        self.live.values().copied().filter(full)
    }

    /// Full, unpinned, clean or released, of a block that is in the map and is filled in no tier.
    fn may_go(&self, at: usize, tier: Tier) -> bool {
        let settled = Tier::ALL.into_iter().all(|tier| self.copy(at, tier) != Copy::Filling);
        let released = self.entity(at).released;
        let free = matches!(self.copy(at, tier), Copy::Full { pins: 0, dirty, .. } if !dirty || released);
        settled && free && !self.entity(at).removed
    }

    /// The parents of those with a copy in `tier`, full or filling.
    fn parents(&self, tier: Tier) -> BTreeSet<usize> {
        let children = self.entities().filter(|&(at, _)| self.copy(at, tier) != Copy::None);
        children.filter_map(|(_, child)| child.parent).collect()
    }

    /// What may go, and has no child's copy in the same tier.
    pub fn evictable(&self, tier: Tier) -> Vec<usize> {
        let parents = self.parents(tier);
        self.full(tier).filter(|&at| self.may_go(at, tier) && !parents.contains(&at)).collect()
    }

    /// What may go, and has children's copies in the same tier, of which none may go, nor any copy below them.
    pub fn last_resorts(&self, tier: Tier) -> Vec<usize> {
        let free: Vec<usize> = self.full(tier).filter(|&at| self.may_go(at, tier)).collect();
        let parent = |&at: &usize| self.entity(at).parent.filter(|parent| self.copy(*parent, tier) != Copy::None);
        let above: BTreeSet<usize> = free.iter().flat_map(|at| std::iter::successors(parent(at), parent)).collect();
        let parents = self.parents(tier);
        free.into_iter().filter(|at| parents.contains(at) && !above.contains(at)).collect()
    }

    /// Full, unpinned and dirty, and not released.
    pub fn demotable(&self, tier: Tier) -> Vec<usize> {
        let full = self.full(tier).filter(|&at| !self.entity(at).released);
        full.filter(|&at| matches!(self.copy(at, tier), Copy::Full { pins: 0, dirty: true, .. })).collect()
    }

    fn find_or_create(&mut self, key: u8, id: &impl Fn(u8) -> EntryId) -> usize {
        if let Some(at) = self.live(key) {
            return at;
        }
        let at = self.created;
        self.created += 1;
        let copies = [Copy::None; Tier::COUNT];
        let entity = Entity {
            key,
            id: id(key),
            parent: None,
            removed: false,
            copies,
            last_use: 0,
            uses: 0,
            announced: false,
            evicted: [false; Tier::COUNT],
            hits: 0,
            released: false,
            kept: false,
        };
        self.entities.insert(at, entity);
        self.live.insert(key, at);
        at
    }

    /// `id` says what a new entry was named.
    pub fn insert(&mut self, key: u8, parent: Option<u8>, id: impl Fn(u8) -> EntryId) -> usize {
        let at = self.find_or_create(key, &id);
        let Some(parent) = parent.filter(|parent| *parent != key) else { return at };
        if self.entity(at).parent.is_some_and(|parent| !self.entity(parent).removed) {
            return at;
        }
        let parent = self.find_or_create(parent, &id);
        if !self.is_ancestor(at, parent) {
            self.entity_mut(at).parent = Some(parent);
        }
        self.collect(Some(at));
        at
    }

    fn is_ancestor(&self, at: usize, of: usize) -> bool {
        let mut chain = std::iter::successors(Some(of), |&at| self.entity(at).parent);
        chain.any(|ancestor| ancestor == at)
    }

    /// What has no copy names no parent, and is dropped where no child names it; `kept` is about to get a copy.
    pub fn collect(&mut self, kept: Option<usize>) {
        let is_empty = |entity: &Entity| entity.copies == [Copy::None; Tier::COUNT];
        let mut evicted = Vec::new();
        for (at, entity) in &mut self.entities {
            if is_empty(entity) && Some(*at) != kept {
                entity.parent = None;
                if self.requests.is_some() && entity.uses > 0 {
                    evicted.push((entity.key, entity.uses, std::mem::take(&mut entity.evicted)));
                    (entity.last_use, entity.uses, entity.announced) = (0, 0, false);
                }
            }
        }
        for (key, uses, tiers) in evicted {
            Tier::ALL.into_iter().filter(|tier| tiers[*tier as usize]).for_each(|tier| self.remember(key, tier, uses));
        }
        let named: BTreeSet<usize> = self.entities.values().filter_map(|entity| entity.parent).collect();
        self.entities.retain(|at, entity| !is_empty(entity) || Some(*at) == kept || named.contains(at));
        let Model { entities, live, .. } = self;
        live.retain(|_, at| entities.contains_key(at));
    }

    pub fn begin_fill(&mut self, at: usize, tier: Tier) -> bool {
        let may = !self.entity(at).removed && self.copy(at, tier) == Copy::None;
        if may {
            let entity = self.entity_mut(at);
            if entity.copies == [Copy::None; Tier::COUNT] {
                // What is stored is new, also where a ghost was used.
                (entity.last_use, entity.uses) = (0, 0);
            }
            self.set(at, tier, Copy::Filling);
        }
        may
    }

    pub fn complete_fill(&mut self, at: usize, tier: Tier, slot: u32) -> bool {
        if self.entity(at).removed {
            self.vacate(at, tier);
            return false;
        }
        self.entity_mut(at).evicted[tier as usize] = false;
        self.set(at, tier, Copy::Full { slot, pins: 0, dirty: false });
        if self.entity(at).uses == 0 {
            self.touch(at);
        }
        true
    }

    pub fn vacate(&mut self, at: usize, tier: Tier) {
        self.set(at, tier, Copy::None);
        self.collect(None);
    }

    pub fn pin(&mut self, at: usize, tier: Tier) -> Option<u32> {
        let entity = self.entity_mut(at);
        match &mut entity.copies[tier as usize] {
            Copy::Full { slot, pins, .. } if !entity.removed => {
                *pins += 1;
                Some(*slot)
            }
            _ => None,
        }
    }

    /// The slot that came free.
    pub fn unpin(&mut self, at: usize, tier: Tier) -> Option<u32> {
        let removed = self.entity(at).removed;
        let Copy::Full { slot, pins, .. } = &mut self.entity_mut(at).copies[tier as usize] else {
            panic!("pinned copies are full")
        };
        *pins -= 1;
        let last = *pins == 0;
        let slot = *slot;
        let freed = (removed && last).then_some(slot);
        if freed.is_some() {
            self.vacate(at, tier);
        }
        freed
    }

    pub fn hit(&mut self, at: usize) -> u8 {
        let hits = &mut self.entity_mut(at).hits;
        *hits = hits.saturating_add(1);
        *hits
    }

    pub fn set_dirty(&mut self, at: usize, tier: Tier, mark: bool) {
        let entity = self.entity_mut(at);
        if let Copy::Full { dirty, .. } = &mut entity.copies[tier as usize]
            && !entity.removed
        {
            *dirty = mark;
        }
    }

    pub fn evict(&mut self, at: usize, tier: Tier) -> Option<u32> {
        assert!(self.evictable(tier).contains(&at) || self.last_resorts(tier).contains(&at));
        // What goes because of a hint is no choice of the policy.
        let entity = self.entity_mut(at);
        entity.evicted[tier as usize] = !entity.released && !entity.kept;
        self.drop_copy(at, tier)
    }

    pub fn drop_copy(&mut self, at: usize, tier: Tier) -> Option<u32> {
        match self.copy(at, tier) {
            Copy::Full { slot, pins: 0, .. } if !self.entity(at).removed => {
                self.vacate(at, tier);
                Some(slot)
            }
            _ => None,
        }
    }

    pub fn remove(&mut self, at: usize) -> [Option<u32>; 3] {
        let mut freed = [None; Tier::COUNT];
        if self.entity(at).removed {
            return freed;
        }
        let mut lives_on = false;
        for tier in Tier::ALL {
            match self.copy(at, tier) {
                Copy::None => {}
                Copy::Full { slot, pins: 0, .. } => {
                    freed[tier as usize] = Some(slot);
                    self.set(at, tier, Copy::None);
                }
                Copy::Full { slot, pins, .. } => {
                    self.set(at, tier, Copy::Full { slot, pins, dirty: false });
                    lives_on = true;
                }
                Copy::Filling => lives_on = true,
            }
        }
        let entity = self.entity_mut(at);
        entity.hits = 0;
        entity.evicted = [false; Tier::COUNT];
        entity.removed = lives_on;
        let key = entity.key;
        if lives_on {
            self.live.remove(&key);
        }
        self.collect(None);
        freed
    }

    pub fn restore(&mut self, at: usize, tier: Tier, slot: u32, used: Used) -> bool {
        if self.copy(at, tier) != Copy::None {
            return false;
        }
        self.entity_mut(at).evicted[tier as usize] = false;
        self.set(at, tier, Copy::Full { slot, pins: 0, dirty: false });
        self.used_as(at, used);
        true
    }

    /// The slot that the block was in.
    pub fn restore_instead(&mut self, at: usize, tier: Tier, to: u32, used: Used) -> Option<u32> {
        let Copy::Full { slot, pins: 0, .. } = &mut self.entity_mut(at).copies[tier as usize] else { return None };
        let other = std::mem::replace(slot, to);
        self.used_as(at, used);
        Some(other)
    }
}

fn nth<T: std::marker::Copy>(all: &[T], pick: u8) -> Option<T> {
    (!all.is_empty()).then(|| all[usize::from(pick) % all.len()])
}
