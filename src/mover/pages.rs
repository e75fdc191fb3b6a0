//! The pages of the record table that are being written. Pure data.

use std::collections::{BTreeMap, btree_map::Entry};

use tokio::sync::oneshot;

use crate::{disk::PageId, error::Result};

pub(super) type Waiter = oneshot::Sender<Result<()>>;

/// The waiters for writes of a page.
#[derive(Default)]
pub(super) struct Waiters {
    /// For the write in flight.
    pub(super) current: Vec<Waiter>,
    /// For the next write.
    pub(super) next: Vec<Waiter>,
}

/// Pages being written, or about to be.
#[derive(Default)]
pub(super) struct RecordPages(pub(super) BTreeMap<PageId, Waiters>);

impl RecordPages {
    /// Pages being written.
    #[cfg(feature = "sim")]
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Begins a write of the page for its waiters; false if there are none, and the page is given up.
    pub(super) fn begin(&mut self, page: PageId) -> bool {
        let Entry::Occupied(mut waiters) = self.0.entry(page) else { return false };
        if waiters.get().next.is_empty() {
            waiters.remove();
            return false;
        }
        let Waiters { current, next } = waiters.get_mut();
        std::mem::swap(current, next);
        true
    }

    /// Ends the write; returns its waiters.
    pub(super) fn end(&mut self, page: PageId) -> Vec<Waiter> {
        self.0.get_mut(&page).map(|waiters| std::mem::take(&mut waiters.current)).unwrap_or_default()
    }
}
