//! Links between entries, by their ids.

/// No entry: the parent of a chain's first block, or an unknown parent.
pub(super) const NONE: u32 = u32::MAX;
/// No neighbor, at either end of an order.
pub(super) const END: u32 = NONE - 1;
/// No neighbor, among the late arrivals. Ids are smaller.
pub(super) const LATE: u32 = NONE - 2;

/// The neighbors of an entry in an order by last use, or why it has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Link {
    /// The entry used before it; [`END`] if it is the coldest, [`NONE`] if it is in no order, [`LATE`] if it is among
    /// the order's late arrivals.
    pub(super) colder: u32,
    /// The entry used after it; [`END`] if it is the hottest.
    pub(super) hotter: u32,
}

impl Link {
    pub(super) const OUT: Link = Link { colder: NONE, hotter: END };
    pub(super) const LATE: Link = Link { colder: LATE, hotter: END };
}
