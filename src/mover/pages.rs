//! The pages of the record table that are being written. Pure data.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    io,
};

use tokio::sync::oneshot;

use crate::{disk::PageId, error::Result, state::blames_disk};

/// The waiters for a write of a page.
#[derive(Default)]
pub(super) struct Waiters {
    pub(super) all: Vec<oneshot::Sender<Result<()>>>,
    /// One of them is a store's.
    pub(super) is_of_store: bool,
}

/// Pages being written, or about to be, and those whose last write failed.
#[derive(Default)]
pub(super) struct RecordPages {
    /// With the waiters for the next write.
    pub(super) written: BTreeMap<PageId, Waiters>,
    failed: BTreeSet<PageId>,
}

impl RecordPages {
    /// Pages being written.
    #[cfg(feature = "sim")]
    pub(super) fn len(&self) -> usize {
        self.written.len()
    }

    /// Begins a write of the page for its waiters; `None` if there are none, and the page is given up.
    pub(super) fn begin(&mut self, page: PageId) -> Option<Waiters> {
        let Entry::Occupied(mut waiters) = self.written.entry(page) else { return None };
        if waiters.get().all.is_empty() {
            waiters.remove();
            return None;
        }
        Some(std::mem::take(waiters.get_mut()))
    }

    /// Notes how a write of the page ended. Whether that counts for the health of its disk: a write that fails again
    /// does not unless a store waits for it. Each sync repeats it, also of an idle cache, and one bad place says
    /// nothing of the others.
    pub(super) fn counts(&mut self, page: PageId, is_of_store: bool, written: &io::Result<()>) -> bool {
        match written {
            Ok(()) => {
                self.failed.remove(&page);
                true
            }
            Err(error) => blames_disk(error) && self.failed.insert(page) || is_of_store,
        }
    }
}
