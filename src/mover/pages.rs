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

/// The pages of the blocks that one call stores. The last of the call's blocks on a page has it written for all of
/// them: the caller waits for all blocks of the call in any case, and a page costs about as much as a block.
pub(super) struct CallPages<W> {
    pages: BTreeMap<PageId, Sharers<W>>,
    /// More blocks of the call are about to enter: no page is complete.
    is_held: bool,
}

/// The blocks of a call whose records are on one page.
struct Sharers<W> {
    /// How many payloads are being written.
    writing: u32,
    /// Those whose payload is written.
    written: Vec<W>,
}

impl<W> CallPages<W> {
    pub(super) fn new() -> Self {
        CallPages { pages: BTreeMap::new(), is_held: false }
    }

    /// A block whose payload is about to be written, with its record on the page.
    pub(super) fn enter(&mut self, page: PageId) {
        let sharers = self.pages.entry(page).or_insert_with(|| Sharers { writing: 0, written: Vec::new() });
        sharers.writing += 1;
    }

    /// The payload of a block that has [entered](Self::enter) is `written`; or it needs no record. Returns the blocks
    /// of the page once no other one will have a record.
    pub(super) fn leave(&mut self, page: PageId, written: Option<W>) -> Vec<W> {
        let Entry::Occupied(mut sharers) = self.pages.entry(page) else { unreachable!("a block leaves once") };
        sharers.get_mut().written.extend(written);
        sharers.get_mut().writing -= 1;
        if self.is_held || sharers.get().writing > 0 { Vec::new() } else { sharers.remove().written }
    }

    /// No page is complete until the [release](Self::release).
    pub(super) fn hold(&mut self) {
        self.is_held = true;
    }

    /// Returns the blocks of each page that is complete by now.
    pub(super) fn release(&mut self) -> Vec<Vec<W>> {
        self.is_held = false;
        self.pages.extract_if(.., |_, sharers| sharers.writing == 0).map(|(_, sharers)| sharers.written).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_complete_with_its_last_block_and_not_before_all_have_entered() {
        let (mut pages, page, other) = (CallPages::new(), PageId(7), PageId(8));
        pages.hold();
        [page, other, other].into_iter().for_each(|page| pages.enter(page));
        assert!(pages.leave(page, Some('a')).is_empty(), "more of the call may enter");
        assert!(pages.leave(other, Some('b')).is_empty());
        assert_eq!(pages.release(), [['a']]);
        assert_eq!(pages.leave(other, None), ['b'], "with the last, which needs no record");
        pages.enter(page);
        assert_eq!(pages.leave(page, Some('c')), ['c']);
    }
}
