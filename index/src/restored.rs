//! An entry as a restart found it.

use super::{EntryId, Used};

/// An entry that a restart found, in 16 bytes: there may be millions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Restored {
    last: u64,
    id: EntryId,
    uses: u8,
}

impl Restored {
    /// An entry and its known uses.
    pub fn new(id: EntryId, Used { last, uses }: Used) -> Self {
        Restored { last, id, uses }
    }

    /// The entry.
    pub fn id(&self) -> EntryId {
        self.id
    }

    /// Its known uses.
    pub fn used(&self) -> Used {
        Used { last: self.last, uses: self.uses }
    }
}
