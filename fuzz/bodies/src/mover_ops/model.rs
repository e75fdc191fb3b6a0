//! What the answers must be, where one caller makes one call at a time.

use std::collections::BTreeMap;

/// What is promised of a life, given what went wrong in it.
#[derive(Debug, Clone, Copy)]
pub struct Claims {
    /// No disk lied, no read failed, nothing was evicted from disk, and the disk is in service.
    pub keeps: bool,
    /// No disk lied.
    pub honest: bool,
}

impl Claims {
    pub const NONE: Self = Claims { keeps: false, honest: false };
}

/// What is known of a block.
#[derive(Debug, Clone, Copy, Default)]
struct Known {
    /// A store of it failed or was dropped in this life: a write of it may end at any time.
    loose: bool,
    /// A life before was cut off, and may have left a record whose payload is torn. A store of such a block is
    /// acknowledged without a write, and the first read finds out.
    doubtful: bool,
    /// A store was acknowledged, and no remove came after it.
    present: bool,
    /// A remove has ended, and no store came after it.
    absent: bool,
    /// The same, and its record is cleared.
    recorded_absent: bool,
    /// Present, and flushed.
    durable: bool,
    /// Absent, and flushed.
    durably_absent: bool,
}

/// The blocks that were ever stored.
#[derive(Debug)]
pub struct Model {
    blocks: BTreeMap<u8, Known>,
    /// The settings let an acknowledged store stay.
    keeps: bool,
    /// An acknowledged store is on disk, not only visible.
    writes_through: bool,
}

impl Model {
    pub fn new(keeps: bool, writes_through: bool) -> Self {
        Model { blocks: BTreeMap::new(), keeps, writes_through }
    }

    /// True if the block was never stored.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    pub fn writes_through(&self) -> bool {
        self.writes_through
    }

    pub fn store_begins(&mut self, block: u8) {
        let known = self.blocks.entry(block).or_default();
        (known.absent, known.recorded_absent, known.durably_absent) = (false, false, false);
    }

    /// `acknowledged`: else it failed or was dropped.
    pub fn store_ends(&mut self, block: u8, acknowledged: bool) {
        let known = self.blocks.get_mut(&block).expect("it began");
        known.present |= acknowledged && self.keeps && !known.doubtful;
        known.loose |= !acknowledged;
    }

    pub fn remove_begins(&mut self, block: u8) {
        if let Some(known) = self.blocks.get_mut(&block) {
            (known.present, known.durable) = (false, false);
        }
    }

    /// The block is forgotten; `recorded`: on disk as well.
    pub fn remove_ends(&mut self, block: u8, recorded: bool) {
        if let Some(known) = self.blocks.get_mut(&block) {
            known.absent = true;
            known.recorded_absent |= recorded && !known.loose;
        }
    }

    /// All that was acknowledged before is flushed.
    pub fn synced(&mut self) {
        for known in self.blocks.values_mut() {
            known.durable |= known.present;
            known.durably_absent |= known.recorded_absent;
        }
    }

    /// The block was asked for, and its bytes if it was found. Panics where the answer breaks a promise.
    pub fn answered(&mut self, block: u8, found: bool, claims: Claims) {
        self.listed(block, found, claims);
        // A miss ends the doubt: what was torn is given up. A hit may have come from memory, and says nothing of it.
        if let Some(known) = self.blocks.get_mut(&block) {
            known.doubtful &= found;
        }
    }

    /// The same where only the index was asked.
    pub fn listed(&self, block: u8, found: bool, claims: Claims) {
        let known = self.blocks.get(&block);
        match known {
            None => assert!(!found, "block {block} was found but never stored"),
            Some(known) if found => assert!(!known.absent, "block {block} was found, and it was removed: {known:?}"),
            Some(known) => {
                assert!(!(known.present && claims.keeps), "block {block} is gone, and it must be there: {known:?}");
            }
        }
    }

    /// The next life begins; `power_cut`: on what was flushed, else on what was written.
    pub fn restart(&mut self, power_cut: bool, claims: Claims) {
        for known in self.blocks.values_mut() {
            let written = self.writes_through && !power_cut && known.present;
            let present = claims.keeps && (known.durable || written);
            let absent = claims.honest && (known.durably_absent || (!power_cut && known.recorded_absent));
            // What the next life starts from is on the medium.
            *known = Known {
                loose: false,
                doubtful: !present,
                present,
                absent,
                durable: present,
                recorded_absent: absent,
                durably_absent: absent,
            };
        }
    }
}
