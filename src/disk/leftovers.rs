//! Records that the medium may still contain after their blocks were removed: a removal waits until they are cleared.
//!
//! A record is left over from the time its slot is cleared until a page image encoded after that has been written:
//!
//! ```text
//!             add            encoded           written
//!     (none) -----> pending ---------> writing ---------> (none)
//!                      ^                  |
//!                      +------------------+  failed
//! ```
//!
//! Keys are compared by their first eight bytes. Two keys that share them cost an unneeded page write.

use std::collections::{BTreeMap, BTreeSet};

use super::format::{RECORDS_PER_PAGE, stripe::PageId};
use crate::block::BlockKey;

/// Keys kept per page, for pages whose writes fail repeatedly. Beyond this limit a page counts as possibly naming any
/// block.
const KEYS_MAX: usize = 4 * RECORDS_PER_PAGE;

/// A key's tag, or `None` for any key.
type Tag = Option<u64>;

/// The pages that may name removed blocks, by key and by page.
#[derive(Debug, Default)]
pub(super) struct Leftovers {
    by_key: BTreeSet<(Tag, PageId)>,
    by_page: BTreeMap<PageId, Page>,
}

#[derive(Debug, Default)]
struct Page {
    /// On the medium, but absent from every page image encoded from now on.
    pending: Vec<Tag>,
    /// On the medium until the image being written has replaced it.
    writing: Vec<Tag>,
}

impl Leftovers {
    /// Notes that the page may name a removed block: `key`, or any block if it is unknown.
    pub(super) fn add(&mut self, page: PageId, key: Option<&BlockKey>) {
        let pending = &mut self.by_page.entry(page).or_default().pending;
        let tag = key.map(tag).filter(|_| pending.len() < KEYS_MAX);
        if !pending.contains(&tag) {
            pending.push(tag);
            self.by_key.insert((tag, page));
        }
    }

    /// Notes that an image of the page was encoded and is about to be written.
    pub(super) fn encoded(&mut self, page: PageId) {
        if let Some(Page { pending, writing }) = self.by_page.get_mut(&page) {
            writing.append(pending);
        }
    }

    /// Notes that the image is on the medium.
    pub(super) fn written(&mut self, page: PageId) {
        let Some(Page { pending, writing }) = self.by_page.get_mut(&page) else { return };
        for tag in writing.drain(..).filter(|tag| !pending.contains(tag)) {
            self.by_key.remove(&(tag, page));
        }
        if pending.is_empty() {
            self.by_page.remove(&page);
        }
    }

    /// Notes that the write failed: the medium may have parts of the image, or none.
    pub(super) fn failed(&mut self, page: PageId) {
        let Some(Page { pending, writing }) = self.by_page.get_mut(&page) else { return };
        for tag in writing.drain(..) {
            if !pending.contains(&tag) {
                pending.push(tag);
            }
        }
        if pending.len() > KEYS_MAX {
            pending.drain(..).for_each(|tag| _ = self.by_key.remove(&(tag, page)));
            self.add(page, None);
        }
    }

    /// The pages that may name the removed block `key`.
    pub(super) fn pages(&self, key: &BlockKey) -> impl Iterator<Item = PageId> + '_ {
        let of = |tag| self.by_key.range((tag, PageId(0))..=(tag, PageId(u32::MAX)));
        [Some(tag(key)), None].into_iter().flat_map(of).map(|&(_, page)| page)
    }

    /// Pages that need another write.
    pub(super) fn pending(&self) -> impl Iterator<Item = PageId> + '_ {
        self.by_page.iter().filter(|(_, page)| !page.pending.is_empty()).map(|(page, _)| *page)
    }

    /// Checks that the two indices agree.
    pub(super) fn validate(&self) -> Result<(), String> {
        let of_pages: BTreeSet<_> = self
            .by_page
            .iter()
            .flat_map(|(page, Page { pending, writing })| pending.iter().chain(writing).map(|tag| (*tag, *page)))
            .collect();
        match of_pages == self.by_key {
            true => Ok(()),
            false => Err(format!("by page they are {of_pages:?}, by key {:?}", self.by_key)),
        }
    }
}

fn tag(key: &BlockKey) -> u64 {
    u64::from_le_bytes(*key.as_bytes().first_chunk().expect("a key has 32 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: PageId = PageId(7);

    fn key(n: usize) -> BlockKey {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&(n as u64).to_le_bytes());
        BlockKey::new(bytes)
    }

    fn pages(left: &Leftovers, n: usize) -> Vec<PageId> {
        left.validate().expect("valid");
        left.pages(&key(n)).collect()
    }

    #[test]
    fn a_record_is_left_over_until_a_page_encoded_after_its_clearing_is_written() {
        let mut left = Leftovers::default();
        left.add(PAGE, Some(&key(1)));
        assert_eq!(pages(&left, 1), [PAGE]);
        assert_eq!(pages(&left, 2), []);
        left.encoded(PAGE);
        left.add(PAGE, Some(&key(2)));
        assert_eq!((pages(&left, 1), pages(&left, 2)), (vec![PAGE], vec![PAGE]));
        left.written(PAGE);
        assert_eq!((pages(&left, 1), pages(&left, 2)), (vec![], vec![PAGE]));
        left.encoded(PAGE);
        left.failed(PAGE);
        assert_eq!(pages(&left, 2), [PAGE]);
        left.encoded(PAGE);
        left.written(PAGE);
        assert!(left.by_page.is_empty() && left.by_key.is_empty(), "{left:?}");
    }

    #[test]
    fn a_block_cleared_again_while_its_page_is_written_stays_left_over() {
        let mut left = Leftovers::default();
        left.add(PAGE, Some(&key(1)));
        left.encoded(PAGE);
        left.add(PAGE, Some(&key(1)));
        left.written(PAGE);
        assert_eq!(pages(&left, 1), [PAGE]);
    }

    #[test]
    fn a_page_with_too_many_leftovers_may_name_any_block() {
        let mut left = Leftovers::default();
        (0..=KEYS_MAX).for_each(|n| left.add(PAGE, Some(&key(n))));
        assert_eq!(pages(&left, KEYS_MAX + 9), [PAGE]);
        assert_eq!(left.by_page[&PAGE].pending.len(), KEYS_MAX + 1);
        left.encoded(PAGE);
        left.written(PAGE);
        assert_eq!(pages(&left, 0), []);
    }

    #[test]
    fn a_page_whose_writes_keep_failing_may_name_any_block() {
        let mut left = Leftovers::default();
        for n in 0..20 * KEYS_MAX {
            left.add(PAGE, Some(&key(n)));
            left.encoded(PAGE);
            // Another block is removed while the image is written.
            left.add(PAGE, Some(&key(n + 20 * KEYS_MAX)));
            left.failed(PAGE);
            let kept = left.by_page[&PAGE].pending.len();
            assert!(kept <= KEYS_MAX + 1 && left.by_key.len() == kept, "{kept} tags after {n} failures");
        }
        assert_eq!(pages(&left, 0), [PAGE], "it was forgotten alone");
        left.encoded(PAGE);
        left.written(PAGE);
        assert!(left.by_page.is_empty() && left.by_key.is_empty(), "{left:?}");
    }
}
