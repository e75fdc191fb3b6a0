//! What the answers must be. The content of a key never changes, so the model only has to know which keys must be
//! there and which must not.
//!
//! *Present*: a store was acknowledged, and no remove began since. A fetch that begins then must find the block, unless
//! the disk tier gave something up for good ([`Claims`]). *Absent*: a remove has ended, and no store ran since it
//! began. A fetch that begins then must not find it. *Durable*, *durably absent*: the same, and a sync covered it.

use std::cell::Cell;

/// Which promises still stand, given what has gone wrong so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claims {
    /// Nothing was evicted from disk, no disk lied, the disk tier serves reads, and it refused no write.
    pub keeps: bool,
    /// The same, whatever writes it refused: what a sync answered for is there.
    pub keeps_synced: bool,
    /// No disk lied.
    pub honest: bool,
}

#[derive(Debug, Clone, Default)]
struct State {
    stored_ever: bool,
    /// Calls under way; a store that was dropped and may go on counts for the rest of the life.
    stores: u32,
    removes: u32,
    /// Calls begun so far.
    stores_begun: u64,
    removes_begun: u64,
    /// A store was dropped in this life: its write may end at any time.
    write_loose: bool,
    /// A life before was cut off, and may have left a record of the block whose payload is torn. A store finds out; a
    /// sync does not.
    doubtful: bool,
    present: bool,
    absent: bool,
    /// Absent, and the remove said that its record is written.
    recorded_absent: bool,
    durable: bool,
    durably_absent: bool,
    /// A caller was told in this life that the disk did not take the block, or may have been.
    told: bool,
    /// When the latest of the removals that have ended began.
    removed: u64,
}

/// What was so when a call began.
#[derive(Debug, Clone, Copy)]
pub struct Began {
    block: usize,
    /// When the call began, among all that the model was told.
    pub at: u64,
    stores: u64,
    pub removes: u64,
    /// When the latest of the removals that had ended began.
    pub removed: u64,
    /// No other store was under way.
    alone: bool,
    /// A remove was under way: it may take effect after a store that begins now.
    pub removing: bool,
    /// Reports of refused writes so far.
    reports: u64,
    /// No store had found out yet whether the block is whole.
    doubtful: bool,
    pub must_hit: bool,
    pub must_miss: bool,
    /// The index had the block, where the caller looked: its store may have been dropped since.
    pub visible: bool,
}

/// How a store ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreEnd {
    Acknowledged,
    Failed,
    /// Dropped: nothing more becomes visible, though a write may be under way.
    Dropped,
    /// Dropped, and it goes on.
    GoesOn,
}

/// How a remove ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemoveEnd {
    /// The block is forgotten, its record is written, and that is flushed.
    Durable,
    /// The block is forgotten and its record is written.
    Recorded,
    /// The block is forgotten.
    Forgotten,
    /// It may be, or not.
    Unknown,
}

/// How a life ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// What was acknowledged as flushed is there.
    PowerCut,
    /// What was written is there.
    Kill,
}

pub struct Model {
    blocks: Vec<State>,
    /// An acknowledged store is on disk, not only visible.
    writes_through: bool,
    /// An acknowledged store stays.
    keeps: bool,
    /// A removed block may be found again: a store beyond the node has it.
    comes_back: bool,
    /// Syncs that reported refused writes so far.
    reports: u64,
    /// Counts what begins.
    clock: Cell<u64>,
}

impl Model {
    pub fn new(blocks: usize, keeps: bool, writes_through: bool, comes_back: bool) -> Self {
        let blocks = vec![State::default(); blocks];
        Model { blocks, keeps, writes_through, comes_back, reports: 0, clock: Cell::new(0) }
    }

    pub fn begin(&self, block: usize) -> Began {
        let state = &self.blocks[block];
        self.clock.update(|at| at + 1);
        Began {
            block,
            at: self.clock.get(),
            removed: state.removed,
            stores: state.stores_begun,
            removes: state.removes_begun,
            alone: state.stores == 0,
            removing: state.removes > 0,
            reports: self.reports,
            doubtful: state.doubtful,
            must_hit: state.present && state.removes == 0,
            must_miss: state.absent && !self.comes_back,
            visible: false,
        }
    }

    /// Whether a removal of the block may have taken effect since.
    pub fn may_be_removed_since(&self, began: Began) -> bool {
        began.removing || self.blocks[began.block].removes_begun != began.removes
    }

    pub fn store_begins(&mut self, block: usize) -> Began {
        let state = &mut self.blocks[block];
        state.stored_ever = true;
        state.stores += 1;
        state.stores_begun += 1;
        state.absent = false;
        state.recorded_absent = false;
        state.durably_absent = false;
        self.begin(block)
    }

    pub fn store_ends(&mut self, began: Began, end: StoreEnd) {
        // A report since it began may have been of it: a caller hears of its end later than a sync that is under way.
        let keeps = self.keeps && began.reports == self.reports;
        let state = &mut self.blocks[began.block];
        if end != StoreEnd::GoesOn {
            state.stores -= 1;
        }
        state.write_loose |= matches!(end, StoreEnd::Dropped | StoreEnd::GoesOn | StoreEnd::Failed);
        state.told |= end == StoreEnd::Failed;
        let undisturbed = !began.removing && state.removes_begun == began.removes;
        if end == StoreEnd::Acknowledged && undisturbed {
            state.doubtful = false;
            state.present |= keeps;
        }
    }

    pub fn remove_begins(&mut self, block: usize) -> Began {
        let began = self.begin(block);
        let state = &mut self.blocks[block];
        state.removes += 1;
        state.removes_begun += 1;
        state.present = false;
        state.durable = false;
        began
    }

    pub fn remove_ends(&mut self, began: Began, end: RemoveEnd) {
        let state = &mut self.blocks[began.block];
        state.removes -= 1;
        let undisturbed = began.alone && state.stores_begun == began.stores;
        if undisturbed && end != RemoveEnd::Unknown {
            state.absent = true;
            let recorded = matches!(end, RemoveEnd::Recorded | RemoveEnd::Durable) && !state.write_loose;
            state.recorded_absent |= recorded;
            state.durably_absent |= recorded && end == RemoveEnd::Durable;
        }
        if end != RemoveEnd::Unknown {
            state.removed = state.removed.max(began.at);
        }
    }

    /// What is wrong with having found the block, or with having missed it, if anything is.
    pub fn answered(&self, began: Began, found: bool, claims: Claims) -> Result<(), String> {
        let state = &self.blocks[began.block];
        if found && !state.stored_ever {
            return Err(format!("block {} was found, and nobody ever stored it", began.block));
        }
        if found && began.must_miss && state.stores_begun == began.stores {
            return Err(format!("block {} was found, and it was removed", began.block));
        }
        if !found && began.must_hit && state.removes_begun == began.removes && claims.keeps {
            return Err(format!("block {} was not found, and it must be there: {state:?}", began.block));
        }
        Ok(())
    }

    /// What a sync that begins now will have made durable.
    pub fn sync_begins(&self) -> Vec<Began> {
        (0..self.blocks.len()).map(|block| self.begin(block)).collect()
    }

    pub fn sync_ends(&mut self, began: Vec<Began>) {
        for began in began {
            let state = &mut self.blocks[began.block];
            let stored =
                began.visible && self.keeps && began.alone && !began.doubtful && !began.removing && !state.told;
            let undisturbed = state.removes_begun == began.removes && began.reports == self.reports;
            if (began.must_hit && began.visible || stored) && undisturbed {
                state.durable = true;
            }
            if began.must_miss && began.alone && state.recorded_absent && state.stores_begun == began.stores {
                state.durably_absent = true;
            }
        }
    }

    /// A sync reported that blocks were refused, and later ones do not: it may have been any that none answered for.
    pub fn sync_reports(&mut self) {
        self.reports += 1;
        for state in self.blocks.iter_mut().filter(|state| !state.durable) {
            state.present = false;
            state.told = true;
        }
    }

    /// The next life begins on what the last one left.
    pub fn restart(&mut self, ending: Ending, claims: Claims) {
        for state in &mut self.blocks {
            let written = ending == Ending::Kill && self.writes_through;
            let present = (claims.keeps_synced && state.durable) || (claims.keeps && written && state.present);
            let recorded = ending == Ending::Kill && state.recorded_absent;
            let absent = claims.honest && (state.durably_absent || recorded);
            let stored_ever = state.stored_ever;
            // What the next life starts from is on the medium.
            let (durable, recorded_absent, durably_absent) = (present, absent, absent);
            let doubtful = stored_ever && !present;
            *state = State {
                stored_ever,
                doubtful,
                present,
                absent,
                durable,
                recorded_absent,
                durably_absent,
                ..State::default()
            };
        }
    }

    /// The store was wiped.
    pub fn wipe(&mut self) {
        let stored = self.blocks.iter().map(|state| State { stored_ever: state.stored_ever, ..State::default() });
        self.blocks = stored.collect();
    }
}
