//! Movements that are awaited by now.

/// Movements requested as [`Urgency::Background`](crate::urgency::Urgency) that have a waiter by now.
#[derive(Debug, Default)]
pub(crate) struct Raised {
    /// By number.
    pub(crate) flights: Vec<u64>,
    /// All movements that hold a host slot.
    pub(crate) holders: bool,
}

impl Raised {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.flights.is_empty() && !self.holders
    }
}
