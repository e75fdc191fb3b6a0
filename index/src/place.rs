//! What an entry has in a tier.

use super::link::NONE;

/// A block's copy in one tier.
#[derive(Clone, Copy)]
pub(super) struct Place {
    /// The slot, if [`FULL`](super::entry::FULL); else the low half of the clock when the copy was evicted, or
    /// [`NONE`].
    pub(super) slot: u32,
    /// Number of pins.
    pub(super) pins: u32,
    /// Entries with this one as their parent and with a copy here, full or filling.
    pub(super) children: u32,
    /// Children whose copy here is marked [`HELD`](super::entry::HELD).
    pub(super) held: u32,
}

impl Place {
    pub(super) const EMPTY: Place = Place { slot: NONE, pins: 0, children: 0, held: 0 };
}
