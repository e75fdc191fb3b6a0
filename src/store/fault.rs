//! What can be wrong with a store, and where.

use std::{collections::BTreeMap, fmt, path::PathBuf};

use crate::block::BlockKey;

/// One place of a store that is not as it was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The file or device.
    pub path: PathBuf,
    /// Where in it the damaged part begins.
    pub offset: u64,
    /// The slot, counted over all paths, where it is about one.
    pub slot: Option<u32>,
    /// The first four bytes of the block's key, in hex, where that is known. The whole key tells what was asked.
    pub key_prefix: Option<String>,
    /// What is wrong.
    pub kind: FaultKind,
}

/// What is wrong in one place.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum FaultKind {
    /// One copy of the superblock does not count, the other does: mended when a cache next opens the store.
    SuperblockCopy,
    /// Neither copy of the superblock counts: the store cannot be opened.
    Superblocks,
    /// The file ends before the store does: the store cannot be opened.
    CutShort {
        /// The bytes that it should have.
        expected: u64,
    },
    /// A record that is torn or rotten. Its block is a miss.
    RecordCrc,
    /// A sound record of this store in the wrong place. Its block is a miss.
    RecordMisplaced {
        /// The slot that it was written for.
        written_for: u32,
    },
    /// A record whose crc holds, but with a field that is impossible. Its block is a miss.
    RecordField(&'static str),
    /// A page of the record table that cannot be read. Its blocks are misses.
    RecordsUnreadable,
    /// Something after the last slot's record, where zeros belong. Costs nothing.
    RecordsPastEnd,
    /// A block with other bytes than were stored: a miss. Where its process was killed while it was written, this is
    /// what that leaves, and no sign of a bad disk.
    Payload,
    /// A block that cannot be read: a miss.
    PayloadUnreadable {
        /// What the system said.
        error: String,
    },
}

impl FaultKind {
    /// A name for programs, in snake case.
    pub fn name(&self) -> &'static str {
        match self {
            FaultKind::SuperblockCopy => "superblock_copy",
            FaultKind::Superblocks => "superblocks",
            FaultKind::CutShort { .. } => "cut_short",
            FaultKind::RecordCrc => "record_crc",
            FaultKind::RecordMisplaced { .. } => "record_misplaced",
            FaultKind::RecordField(_) => "record_field",
            FaultKind::RecordsUnreadable => "records_unreadable",
            FaultKind::RecordsPastEnd => "records_past_end",
            FaultKind::Payload => "payload",
            FaultKind::PayloadUnreadable { .. } => "payload_unreadable",
        }
    }
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FaultKind::SuperblockCopy => f.write_str("this copy of the superblock is damaged, the other is sound"),
            FaultKind::Superblocks => f.write_str("both superblocks are damaged"),
            FaultKind::CutShort { expected } => write!(f, "the file ends here, expected {expected} bytes"),
            FaultKind::RecordCrc => f.write_str("record torn or rotten (crc)"),
            FaultKind::RecordMisplaced { written_for } => write!(f, "record written for slot {written_for}"),
            FaultKind::RecordField(field) => write!(f, "record with an impossible field ({field})"),
            FaultKind::RecordsUnreadable => f.write_str("page of the record table cannot be read"),
            FaultKind::RecordsPastEnd => f.write_str("data after the last slot's record"),
            FaultKind::Payload => f.write_str("payload differs from what was stored (crc)"),
            FaultKind::PayloadUnreadable { error } => write!(f, "payload cannot be read ({error})"),
        }
    }
}

/// The faults of a store: all counted, the first ones listed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Faults {
    listed: Vec<Fault>,
    listed_max: usize,
    counts: BTreeMap<&'static str, u64>,
}

impl Faults {
    pub(super) fn new(listed_max: usize) -> Self {
        Faults { listed: Vec::new(), listed_max, counts: BTreeMap::new() }
    }

    pub(super) fn add(&mut self, fault: Fault) {
        *self.counts.entry(fault.kind.name()).or_default() += 1;
        if self.listed.len() < self.listed_max {
            self.listed.push(fault);
        }
    }

    pub(super) fn extend(&mut self, faults: impl IntoIterator<Item = Fault>) {
        faults.into_iter().for_each(|fault| self.add(fault));
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.counts.values().sum()
    }

    /// How many there are of each kind, by [`FaultKind::name`].
    pub fn counts(&self) -> &BTreeMap<&'static str, u64> {
        &self.counts
    }

    /// The first ones found, [`listed_max`](super::Options::listed_max) at most.
    pub fn listed(&self) -> &[Fault] {
        &self.listed
    }
}

/// As much of a key as may be shown.
pub(super) fn key_prefix(key: &BlockKey) -> String {
    key.as_bytes()[..4].iter().map(|byte| format!("{byte:02x}")).collect()
}
