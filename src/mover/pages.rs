//! The pages of the record table that are being written. Pure data.

use std::collections::{BTreeMap, btree_map::Entry};

use tokio::sync::oneshot;

use crate::{disk::PageId, error::Result};

type Waiter = oneshot::Sender<Result<()>>;

/// Those who wait for writes of a page.
#[derive(Default)]
pub(super) struct Waiters {
    /// For the one under way.
    pub(super) current: Vec<Waiter>,
    /// For the one after it.
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

    /// A write of the page begins, for those who wait for it; false where nobody does, and it is given up.
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

    /// It has ended, for these.
    pub(super) fn end(&mut self, page: PageId) -> Vec<Waiter> {
        self.0.get_mut(&page).map(|waiters| std::mem::take(&mut waiters.current)).unwrap_or_default()
    }
}
