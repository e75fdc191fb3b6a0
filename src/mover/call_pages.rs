//! The pages of records of the blocks that one call stores. Pure data.

use std::collections::BTreeMap;

use slab::Slab;
use tokio::sync::oneshot;

use crate::disk::PageId;

/// The blocks of one call, in groups: those of a page that enter together, or before the others have their checksums,
/// are recorded by one write beside their payloads. The caller waits for all blocks of the call in any case, and a page
/// costs about as much as a block.
pub(super) struct CallPages<S, W> {
    groups: Slab<Group<S, W>>,
    /// The groups that further blocks of their pages join.
    open: BTreeMap<PageId, usize>,
    /// More blocks of the call are about to enter: no group is complete.
    is_held: bool,
}

/// The blocks of a call whose records are written together.
struct Group<S, W> {
    page: PageId,
    /// How many are not checksummed yet.
    unsummed: u32,
    /// What is recorded of the others, with their numbers in the call.
    summed: Vec<(usize, S)>,
    /// How many payloads are being written.
    writing: u32,
    /// Those whose payload is written.
    written: Vec<W>,
    /// Who waits for the last payload.
    waiter: Option<oneshot::Sender<Vec<W>>>,
}

/// What follows from a step of a block.
#[must_use]
pub(super) struct Next<W> {
    /// The group that is to be recorded.
    pub(super) record: Option<usize>,
    /// Who waits for the payloads of the group, and those that are written.
    pub(super) written: Option<(oneshot::Sender<Vec<W>>, Vec<W>)>,
}

impl<S, W> CallPages<S, W> {
    pub(super) fn new() -> Self {
        CallPages { groups: Slab::new(), open: BTreeMap::new(), is_held: false }
    }

    /// A block whose payload is about to be checksummed and written, with its record on the page. Returns its group.
    pub(super) fn enter(&mut self, page: PageId) -> usize {
        let groups = &mut self.groups;
        let new = || Group { page, unsummed: 0, summed: Vec::new(), writing: 0, written: Vec::new(), waiter: None };
        let number = *self.open.entry(page).or_insert_with(|| groups.insert(new()));
        let group = &mut groups[number];
        (group.unsummed, group.writing) = (group.unsummed + 1, group.writing + 1);
        number
    }

    /// A block has its checksum, and may be recorded.
    pub(super) fn summed(&mut self, group: usize, block: usize, summed: S) -> Next<W> {
        self.groups[group].unsummed -= 1;
        self.groups[group].summed.push((block, summed));
        self.next(group)
    }

    /// The payload of a block is written.
    pub(super) fn written(&mut self, group: usize, written: W) -> Next<W> {
        self.groups[group].writing -= 1;
        self.groups[group].written.push(written);
        self.next(group)
    }

    /// A block leaves its group, unwritten. Its record is written no more, unless that has begun.
    pub(super) fn give_up(&mut self, group: usize, block: usize, is_summed: bool) -> Next<W> {
        let Group { unsummed, summed, writing, .. } = &mut self.groups[group];
        *writing -= 1;
        match is_summed {
            true => summed.retain(|&(number, _)| number != block),
            false => *unsummed -= 1,
        }
        self.next(group)
    }

    fn next(&mut self, number: usize) -> Next<W> {
        let Group { page, unsummed, writing, waiter, .. } = &mut self.groups[number];
        let is_complete = !self.is_held && *unsummed == 0 && self.open.get(page) == Some(&number);
        if is_complete {
            self.open.remove(page);
        }
        let waiter = if *writing == 0 { waiter.take() } else { None };
        let written = waiter.map(|waiter| (waiter, self.groups.remove(number).written));
        Next { record: is_complete.then_some(number), written }
    }

    /// No group is complete until the [release](Self::release).
    pub(super) fn hold(&mut self) {
        self.is_held = true;
    }

    /// Returns the groups that are complete by now, to be recorded.
    pub(super) fn release(&mut self) -> Vec<usize> {
        self.is_held = false;
        let is_complete = |_: &PageId, number: &mut usize| self.groups[*number].unsummed == 0;
        self.open.extract_if(.., is_complete).map(|(_, number)| number).collect()
    }

    /// The page of a complete group, and what is recorded there.
    pub(super) fn record(&mut self, group: usize) -> (PageId, Vec<S>) {
        let Group { page, summed, .. } = &mut self.groups[group];
        (*page, std::mem::take(summed).into_iter().map(|(_, summed)| summed).collect())
    }

    /// Ends a complete group: the blocks whose payload is written, or who sends them once the last one is.
    pub(super) fn end(&mut self, group: usize) -> Result<Vec<W>, oneshot::Receiver<Vec<W>>> {
        if self.groups[group].writing == 0 {
            return Ok(self.groups.remove(group).written);
        }
        let (waiter, written) = oneshot::channel();
        self.groups[group].waiter = Some(waiter);
        Err(written)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: PageId = PageId(7);

    fn written(next: Next<char>) -> Option<Vec<char>> {
        let (waiter, written) = next.written?;
        drop(waiter);
        Some(written)
    }

    #[test]
    fn a_group_is_recorded_with_its_last_checksum_and_ends_with_its_last_payload() {
        let mut pages = CallPages::new();
        let [first, second] = [0, 1].map(|_| pages.enter(PAGE));
        assert_eq!(first, second, "they are recorded together");
        assert_eq!(pages.summed(first, 0, 'x').record, None);
        assert!(written(pages.written(first, 'a')).is_none(), "nobody waits yet");
        assert_eq!(pages.summed(first, 1, 'y').record, Some(first));
        assert_ne!(pages.enter(PAGE), first, "its write may have begun");
        assert_eq!(pages.record(first), (PAGE, vec!['x', 'y']));
        assert!(pages.end(first).is_err(), "a payload is being written");
        assert_eq!(written(pages.written(first, 'b')), Some(vec!['a', 'b']));
    }

    #[test]
    fn no_group_is_complete_before_all_blocks_have_entered() {
        let mut pages = CallPages::new();
        pages.hold();
        let (group, other) = (pages.enter(PAGE), pages.enter(PageId(8)));
        let first = pages.summed(group, 0, 'x');
        assert_eq!(first.record, None, "more of the call may enter");
        assert_eq!(pages.enter(PAGE), group);
        assert!(written(pages.summed(other, 2, 'z')).is_none());
        assert_eq!(pages.release(), [other]);
        assert_eq!(pages.summed(group, 1, 'y').record, Some(group));
        drop([pages.written(group, 'a'), pages.written(group, 'b'), pages.written(other, 'c')]);
        assert_eq!(pages.end(group).ok(), Some(vec!['a', 'b']), "they were written before");
    }

    #[test]
    fn a_block_that_is_given_up_is_not_recorded_and_holds_up_no_other() {
        let mut pages = CallPages::<_, char>::new();
        let group = [0, 1, 2].map(|_| pages.enter(PAGE))[0];
        assert_eq!(pages.summed(group, 0, 'x').record, None);
        assert_eq!(pages.summed(group, 1, 'y').record, None);
        assert_eq!(pages.give_up(group, 1, true).record, None, "one has no checksum yet");
        assert_eq!(pages.give_up(group, 2, false).record, Some(group));
        assert_eq!(pages.record(group), (PAGE, vec!['x']));
        assert!(pages.end(group).is_err());
        assert_eq!(written(pages.give_up(group, 0, true)), Some(vec![]), "also where none is left");
    }
}
