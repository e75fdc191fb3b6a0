//! Every invariant of the index, checked from scratch.

use std::collections::BTreeSet;

use kvhoist_base::block::Tier;

use super::{
    EntryId, Index,
    entry::{DIRTY, Entry, FILLING, FULL, HELD, LISTED, List},
    link::{Link, NONE},
};

/// Fails with a message unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(format!($($message)+));
        }
    };
}

/// Counts of one pass over the entries.
#[derive(Default)]
struct Counts {
    found: usize,
    blocks: usize,
    resident: [usize; Tier::COUNT],
    evictable: [usize; Tier::COUNT],
    ordered: [usize; Tier::COUNT],
    dirty: [usize; Tier::COUNT],
    released: [usize; Tier::COUNT],
    kept: [usize; Tier::COUNT],
    kept_listed: [usize; Tier::COUNT],
    frontier: [u32; Tier::COUNT],
    slots: [BTreeSet<u32>; Tier::COUNT],
}

impl Index {
    /// Checks every invariant from scratch; the error says which does not hold. Linear in the entries: for tests and
    /// fuzzing.
    pub fn validate(&self) -> Result<(), String> {
        let mut counts = Counts::default();
        for (id, entry) in &self.entries {
            let id = EntryId(u32::try_from(id).map_err(|_| format!("id {id} is no u32"))?);
            self.validate_entry(id, entry, &mut counts).map_err(|what| format!("{id:?} {:?}: {what}", entry.key))?;
        }
        ensure!(counts.found == self.map.len(), "{} entries in the map, found {}", self.map.len(), counts.found);
        self.validate_lists(&counts)?;
        self.validate_kept(counts.kept)?;
        self.validate_taking_back()?;
        self.validate_children()?;
        self.values.as_ref().map_or(Ok(()), |values| values.validate())?;
        self.validate_chains()
    }

    /// [Validates](Self::validate), and checks that no copy is pinned and nothing is being filled: the state after the
    /// end of all movements and leases.
    pub fn validate_idle(&self) -> Result<(), String> {
        self.validate()?;
        for (id, entry) in &self.entries {
            for tier in Tier::ALL {
                let (pins, filling) = (entry.place(tier).pins, entry.has(tier, FILLING));
                ensure!(pins == 0, "entry {id} {:?} has {pins} pins in {tier}", entry.key);
                ensure!(!filling, "entry {id} {:?} is being filled in {tier}", entry.key);
            }
        }
        Ok(())
    }

    /// Every copy in `tier`, by ascending id: the entry and its slot.
    pub fn copies(&self, tier: Tier) -> impl Iterator<Item = (EntryId, u32)> + '_ {
        let full = self.entries.iter().filter(move |(_, entry)| entry.has(tier, FULL));
        full.map(move |(id, entry)| (EntryId(id as u32), entry.place(tier).slot))
    }

    fn validate_entry(&self, id: EntryId, entry: &Entry, counts: &mut Counts) -> Result<(), String> {
        let found = self.find(&entry.key);
        if entry.is_removed() {
            ensure!(found != Some(id), "removed, but in the map");
        } else {
            ensure!(found == Some(id), "its key finds {found:?}");
            counts.found += 1;
            counts.blocks += usize::from(entry.best_tier().is_some());
        }
        if !entry.occupies_any() {
            ensure!(entry.is_named(), "resident nowhere and named by no entry");
            ensure!(entry.parent == NONE, "resident nowhere, but names a parent");
        }
        self.validate_hints(id, entry)?;
        ensure!(entry.best_tier().is_none() || entry.used().uses > 0, "stored, which is a use, and never used");
        ensure!(entry.last_use <= self.clock, "last use {} is after the clock {}", entry.last_use, self.clock);
        for tier in Tier::ALL {
            self.validate_place(id, entry, tier, counts).map_err(|what| format!("{tier}: {what}"))?;
        }
        Ok(())
    }

    fn validate_place(&self, id: EntryId, entry: &Entry, tier: Tier, counts: &mut Counts) -> Result<(), String> {
        let [full, filling, dirty, listed] = [FULL, FILLING, DIRTY, LISTED].map(|mark| entry.has(tier, mark));
        let place = entry.place(tier);
        ensure!(!(full && filling), "full and filling");
        ensure!(full || place.pins == 0, "{} pins on what is not full", place.pins);
        ensure!(full || !dirty, "dirty and not full");
        ensure!(listed == entry.belongs_in_list(tier), "listed is {listed}, and should not be");
        let (held, counted) = (entry.is_held(tier), entry.has(tier, HELD));
        ensure!(held || !counted, "counted as held, and is not");
        ensure!(counted || !held || place.children > 0, "held, and a leaf, and not counted as held");
        let frontier = self.frontier[tier as usize].contains(id.0);
        ensure!(frontier == entry.is_frontier(tier), "right above held ones is {frontier}, and should not be");
        counts.frontier[tier as usize] += u32::from(frontier);
        if entry.is_removed() {
            ensure!(!full || place.pins > 0, "removed and unpinned, but full");
            ensure!(!dirty, "removed and dirty");
        }
        let at = tier as usize;
        if full {
            ensure!(counts.slots[at].insert(place.slot), "slot {} is another's too", place.slot);
            counts.resident[at] += usize::from(!entry.is_removed());
        }
        counts.kept[at] += usize::from(full && entry.is_kept());
        let ordered = entry.link(tier) != Link::OUT;
        ensure!(!ordered || entry.occupies(tier) && !entry.is_removed(), "in the order without a copy");
        ensure!(!ordered || entry.list(tier) == List::Policy, "in the order, and belongs in another list");
        ensure!(!ordered || place.children == 0, "in the order, and no leaf");
        counts.ordered[at] += usize::from(ordered);
        if !listed {
            return Ok(());
        }
        let list = entry.list(tier);
        let in_list = match list {
            List::Policy => entry.link(tier) != Link::OUT,
            list => self.lists[list as usize][at].contains(id.0, entry.last_use),
        };
        ensure!(in_list, "not in its list, {list:?}");
        let count = match list {
            List::Dirty => &mut counts.dirty,
            List::Released => &mut counts.released,
            List::Kept => &mut counts.kept_listed,
            List::Policy => &mut counts.evictable,
        };
        count[at] += 1;
        Ok(())
    }

    fn validate_lists(&self, counts: &Counts) -> Result<(), String> {
        ensure!(counts.blocks == self.blocks, "{} blocks, found {}", self.blocks, counts.blocks);
        for tier in Tier::ALL {
            let at = tier as usize;
            let evictable = self.evictable[at];
            let [dirty, released, kept] = List::BY_LAST_USE.map(|list| self.lists[list as usize][at].len());
            ensure!(counts.released[at] == released, "{tier}: {released} in the list of what is released");
            ensure!(counts.kept_listed[at] == kept, "{tier}: {kept} in the list of what is kept");
            ensure!(counts.resident[at] == self.resident[at], "{tier}: resident {}", self.resident[at]);
            ensure!(counts.evictable[at] == evictable, "{tier}: {evictable} in the eviction list");
            ensure!(counts.dirty[at] == dirty, "{tier}: {dirty} in the dirty list");
            let ordered = self.policies[at].validate(&self.entries, tier).map_err(|what| format!("{tier}: {what}"))?;
            ensure!(
                counts.ordered[at] == ordered,
                "{tier}: {ordered} in the order, {} entries say so",
                counts.ordered[at]
            );
            let last_use = |id: u32| self.entries.get(id as usize).map_or(0, |entry| entry.last_use);
            let lists = self.lists.iter().map(|lists| lists[at].validate(&last_use));
            lists.fold(Ok(()), Result::and).map_err(|what| format!("{tier}: {what}"))?;
            let frontier = self.frontier[at].len();
            ensure!(counts.frontier[at] == frontier, "{tier}: {frontier} right above held ones");
            self.frontier[at].validate().map_err(|what| format!("{tier}: right above held ones: {what}"))?;
            let demotable = self.demotable(tier).next();
            ensure!(demotable.is_some() == (dirty > 0), "{tier}: a dirty list of {dirty} gives {demotable:?}");
            let known = |id: EntryId| self.entries.get(id.0 as usize).is_some_and(|entry| entry.has(tier, LISTED));
            ensure!(demotable.is_none_or(known), "{tier}: {demotable:?} is given, but not listed");
        }
        Ok(())
    }

    /// The counts that entries keep of their children.
    fn validate_children(&self) -> Result<(), String> {
        let ids = self.entries.iter().map(|(id, _)| id + 1).max().unwrap_or(0);
        let mut children = vec![[(0u32, 0u32); Tier::COUNT]; ids];
        for (id, entry) in self.entries.iter().filter(|(_, entry)| entry.parent != NONE) {
            let parent = entry.parent as usize;
            ensure!(self.entries.contains(parent), "entry {id} names {parent}, which is not here");
            for tier in Tier::ALL {
                let (present, held) = &mut children[parent][tier as usize];
                *present += u32::from(entry.occupies(tier));
                *held += u32::from(entry.has(tier, HELD));
            }
        }
        for (id, entry) in &self.entries {
            let counted = entry.places.map(|place| (place.children, place.held));
            ensure!(counted == children[id], "entry {id} has children, held: {:?}, not {counted:?}", children[id]);
        }
        Ok(())
    }

    /// Every chain has a root. Each entry is walked over once.
    fn validate_chains(&self) -> Result<(), String> {
        let ids = self.entries.iter().map(|(id, _)| id + 1).max().unwrap_or(0);
        let mut walk_of = vec![0usize; ids];
        for (walk, (start, _)) in (1..).zip(&self.entries) {
            let mut at = Some(EntryId(start as u32));
            while let Some(id) = at {
                let seen = &mut walk_of[id.0 as usize];
                ensure!(*seen != walk, "the chain above entry {start} is a ring");
                if *seen != 0 {
                    break;
                }
                *seen = walk;
                at = self.parent(id);
            }
        }
        Ok(())
    }
}
