//! Faults of a store, and where they are.

use std::{collections::BTreeMap, fmt, path::PathBuf};

use crate::block::BlockKey;

/// A fault of a store: a place that does not hold what was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The file or device.
    pub path: PathBuf,
    /// Offset of the damaged part.
    pub offset: u64,
    /// The slot, counted over all paths, if the fault concerns one.
    pub slot: Option<u32>,
    /// The first four bytes of the block's key in hex, if known. The whole key would reveal the prompt.
    pub key_prefix: Option<String>,
    pub(super) kind: FaultKind,
}

impl Fault {
    /// What is wrong, as a name for programs, in snake case. [`Display`](fmt::Display) says it in words.
    pub fn kind(&self) -> &'static str {
        self.kind.name()
    }
}

/// What is wrong, in words.
impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kind.fmt(f)
    }
}

/// The kind of a fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum FaultKind {
    /// One copy of the superblock is invalid, the other is valid: repaired when a cache next opens the store.
    SuperblockCopy,
    /// Both copies of the superblock are invalid: the store cannot be opened.
    Superblocks,
    /// The file is empty, or nothing but zeros: the store cannot be opened.
    Blank,
    /// The file is shorter than the store: the store cannot be opened.
    CutShort {
        /// Bytes that the file should have.
        expected: u64,
    },
    /// A torn or corrupted record. Its block is a miss.
    RecordCrc,
    /// A valid record of this store in the wrong place. Its block is a miss.
    RecordMisplaced {
        /// The slot that it was written for.
        written_for: u32,
    },
    /// A record with a correct crc but an impossible field. Its block is a miss.
    RecordField(&'static str),
    /// An unreadable page of the record table. Its blocks are misses.
    RecordsUnreadable,
    /// Data after the last slot's record, where zeros belong. Harmless.
    RecordsPastEnd,
    /// A block whose payload differs from what was stored: a miss. A process killed during the write leaves this too,
    /// so it need not be a sign of a bad disk.
    Payload,
    /// An unreadable block: a miss.
    PayloadUnreadable {
        /// The system's error.
        error: String,
    },
}

impl FaultKind {
    fn name(&self) -> &'static str {
        match self {
            FaultKind::SuperblockCopy => "superblock_copy",
            FaultKind::Superblocks => "superblocks",
            FaultKind::Blank => "blank",
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
            FaultKind::Blank => f.write_str("an empty file, or one of zeros, in the place of a member"),
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

/// The faults of a store: all are counted, the first ones listed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Faults {
    pub(super) listed: Vec<Fault>,
    listed_max: usize,
    pub(super) counts: BTreeMap<&'static str, u64>,
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
}

/// The part of a key that may be shown.
pub(super) fn key_prefix(key: &BlockKey) -> String {
    key.as_bytes()[..4].iter().map(|byte| format!("{byte:02x}")).collect()
}
