//! What a simulated storage was asked, in order.

use std::{collections::VecDeque, time::Duration};

use kvhoist::internals::io::{FileId, OpKind};

use super::FaultKind;

/// One completed or started operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogEntry {
    /// Numbers operations in the order in which they started, from 0.
    pub op: u64,
    /// What it does.
    pub kind: OpKind,
    /// On which file.
    pub file: FileId,
    /// Where in the file.
    pub offset: u64,
    /// Bytes asked for.
    pub len: usize,
    /// Virtual time since the simulation started.
    pub at: Duration,
    /// Whether it started, or how it ended.
    pub event: Event,
}

/// What a log entry says about its operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// It reached the storage.
    Started,
    /// It ended, having moved this many bytes.
    Done(usize),
    /// It failed with this `errno`.
    Failed(i32),
}

/// Operations so far, by what became of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Operations started, by `OpKind as usize`.
    pub started: [u64; 3],
    /// Operations that ended without an error, by `OpKind as usize`.
    pub done: [u64; 3],
    /// Operations that failed, by `OpKind as usize`.
    pub failed: [u64; 3],
    /// Bytes that completed operations moved, by `OpKind as usize`.
    pub bytes: [u64; 3],
    /// Faults of any sort that were injected.
    pub faults: u64,
    /// The same, by `OpKind as usize` and `FaultKind as usize`.
    pub faults_by_kind: [[u64; FaultKind::COUNT]; 3],
    /// Operations that started while a conflicting one was in flight on the same bytes.
    pub conflicts: u64,
    /// The most operations that were in flight at once.
    pub in_flight_max: usize,
}

/// The newest entries, and a digest of all.
pub(super) struct Log {
    entries: VecDeque<LogEntry>,
    entries_max: usize,
    digest: u64,
}

impl Log {
    pub(super) fn new(entries_max: usize) -> Self {
        Log { entries: VecDeque::new(), entries_max, digest: 0xcbf2_9ce4_8422_2325 }
    }

    pub(super) fn push(&mut self, entry: LogEntry) {
        let (event, count) = match entry.event {
            Event::Started => (0, 0),
            Event::Done(bytes) => (1, bytes as u64),
            Event::Failed(errno) => (2, u64::from(errno.unsigned_abs())),
        };
        let place = [entry.op, entry.kind as u64, u64::from(entry.file.0), entry.offset, entry.len as u64];
        for word in place.into_iter().chain([entry.at.as_nanos() as u64, event, count]) {
            // FNV-1a by words: only to tell two logs apart.
            self.digest = (self.digest ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
        }
        self.entries.push_back(entry);
        if self.entries.len() > self.entries_max {
            self.entries.pop_front();
        }
    }

    pub(super) fn entries(&self) -> Vec<LogEntry> {
        self.entries.iter().cloned().collect()
    }

    pub(super) fn digest(&self) -> u64 {
        self.digest
    }
}
