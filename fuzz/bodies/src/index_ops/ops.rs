//! The calls of an input.

use arbitrary::Arbitrary;

#[derive(Debug, Arbitrary)]
pub enum Op {
    /// An insert, and a fill unless there is one.
    Fill {
        key: u8,
        parent: Option<u8>,
        tier: u8,
    },
    /// An insert that is given up.
    Insert {
        key: u8,
        parent: Option<u8>,
        by_abort: bool,
    },
    Complete {
        pick: u8,
    },
    Abort {
        pick: u8,
    },
    Pin {
        pick: u8,
        tier: u8,
    },
    Unpin {
        pick: u8,
    },
    Touch {
        pick: u8,
    },
    Announce {
        pick: u8,
    },
    TouchChain {
        from: u8,
        len: u8,
    },
    Hit {
        pick: u8,
    },
    SetDirty {
        pick: u8,
        tier: u8,
        dirty: bool,
    },
    Evict {
        tier: u8,
    },
    Drop {
        pick: u8,
        tier: u8,
    },
    Remove {
        pick: u8,
    },
    /// The records of a restart, in any order, then its end.
    Restore {
        tier: u8,
        records: [Option<Record>; 6],
    },
    Reserve {
        entries: u8,
    },
    /// Asks whether a full tier admits a block.
    Refuse {
        key: u8,
        parent: Option<u8>,
        comes: bool,
        tier: u8,
    },
    Release {
        from: u8,
        len: u8,
    },
    Keep {
        pick: u8,
        time: u8,
    },
    /// Lets time pass.
    Expire {
        time: u8,
    },
}

#[derive(Debug, Arbitrary)]
pub struct Record {
    pub key: u8,
    pub parent: Option<u8>,
    pub last_use: u16,
    pub uses: u8,
    /// It replaces a copy that is already there.
    pub newer: bool,
}
