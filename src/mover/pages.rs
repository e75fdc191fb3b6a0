//! The pages of the record table that are being written. Pure data.

use std::{
    cell::RefCell,
    collections::{BTreeMap, btree_map::Entry},
};

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

/// The pages of the blocks that one call stores. The last of the call's blocks on a page has it written for all of
/// them: the caller waits for all blocks of the call in any case, and a page costs about as much as a block.
#[derive(Default)]
pub(super) struct CallPages(RefCell<BTreeMap<PageId, Sharers>>);

/// The blocks of a call whose records are on one page.
#[derive(Default)]
struct Sharers {
    /// Those whose payload is being written.
    writing: u32,
    /// Waiters of those whose payload is written.
    waiting: Vec<Waiter>,
}

impl CallPages {
    /// A block whose payload is about to be written, with its record on the page.
    pub(super) fn enter(&self, page: PageId) {
        self.0.borrow_mut().entry(page).or_default().writing += 1;
    }

    /// The payload of a block that has [entered](Self::enter) is written, and `waiter` waits for its record; without a
    /// waiter, the block needs no record. Returns the waiters for the page once no other block will have one.
    pub(super) fn leave(&self, page: PageId, waiter: Option<Waiter>) -> Vec<Waiter> {
        let mut pages = self.0.borrow_mut();
        let Entry::Occupied(mut sharers) = pages.entry(page) else { unreachable!("a block leaves once") };
        sharers.get_mut().waiting.extend(waiter);
        sharers.get_mut().writing -= 1;
        if sharers.get().writing > 0 { Vec::new() } else { sharers.remove().waiting }
    }
}
