//! A sorted table of address ranges.

use std::{collections::BTreeMap, ops::Range};

use crate::block::Segment;

/// Ranges of addresses, each with a value, by their first addresses. No two overlap.
#[derive(Debug)]
pub struct Ranges<T>(BTreeMap<usize, (usize, T)>);

impl<T> Default for Ranges<T> {
    fn default() -> Self {
        Ranges(BTreeMap::new())
    }
}

impl<T> Ranges<T> {
    /// How many there are.
    #[expect(clippy::len_without_is_empty, reason = "it is a limit that is asked for")]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether no range has a byte in common with this one.
    pub fn is_free(&self, range: &Range<usize>) -> bool {
        let before = self.0.range(..range.end).next_back();
        before.is_none_or(|(_, (end, _))| *end <= range.start)
    }

    /// Adds a range that [is free](Self::is_free).
    pub fn insert(&mut self, range: Range<usize>, value: T) {
        debug_assert!(self.is_free(&range), "no two ranges overlap");
        self.0.insert(range.start, (range.end, value));
    }

    /// The range that a segment lies in: its first address, and its value.
    pub fn of(&self, segment: &Segment) -> Option<(usize, &T)> {
        let start = segment.ptr as usize;
        let (first, (end, value)) = self.0.range(..=start).next_back()?;
        (start <= *end && segment.len <= *end - start).then_some((*first, value))
    }

    /// Takes out the range that begins at this address, if its value is the one that is meant.
    pub fn remove_if(&mut self, start: usize, is_meant: impl FnOnce(&T) -> bool) -> Option<T> {
        self.0.get(&start).filter(|(_, value)| is_meant(value))?;
        self.0.remove(&start).map(|(_, value)| value)
    }

    /// The value of the range that begins at this address.
    pub fn get(&self, start: usize) -> Option<&T> {
        self.0.get(&start).map(|(_, value)| value)
    }

    /// The values of all ranges.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.0.values_mut().map(|(_, value)| value)
    }
}

/// Of ranges that overlap or touch it makes one.
impl FromIterator<Range<usize>> for Ranges<()> {
    fn from_iter<I: IntoIterator<Item = Range<usize>>>(ranges: I) -> Self {
        let mut ranges: Vec<_> = ranges.into_iter().collect();
        ranges.sort_unstable_by_key(|range| range.start);
        ranges.dedup_by(|next, last| {
            let is_joined = next.start <= last.end;
            if is_joined {
                last.end = last.end.max(next.end);
            }
            is_joined
        });
        Ranges(ranges.into_iter().map(|range| (range.start, (range.end, ()))).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(address: usize, len: usize) -> Segment {
        Segment { ptr: std::ptr::without_provenance_mut(address), len }
    }

    #[test]
    fn a_segment_is_found_in_the_range_that_it_lies_in_wholly() {
        let mut ranges = Ranges::default();
        ranges.insert(4096..8192, 'a');
        ranges.insert(12288..16384, 'b');
        assert_eq!(ranges.of(&at(4106, 100)), Some((4096, &'a')));
        assert_eq!(ranges.of(&at(16284, 100)), Some((12288, &'b')));
        assert!(ranges.of(&at(4096, 4096)).is_some() && ranges.of(&at(8192, 0)).is_some());
        for address in [0, 4000, 8100, 8193, 16285, usize::MAX - 10] {
            assert_eq!(ranges.of(&at(address, 100)), None, "{address}");
        }
        assert!(ranges.of(&at(4096, usize::MAX)).is_none(), "more than there is");
        assert!(ranges.is_free(&(0..4096)) && ranges.is_free(&(8192..12288)) && ranges.is_free(&(16384..usize::MAX)));
        assert!(!ranges.is_free(&(0..4097)) && !ranges.is_free(&(8191..8192)) && !ranges.is_free(&(0..usize::MAX)));
        assert_eq!(ranges.remove_if(4096, |name| *name == 'b'), None);
        assert_eq!(ranges.remove_if(4096, |name| *name == 'a'), Some('a'));
        assert_eq!(ranges.of(&at(4106, 100)), None);
    }

    #[test]
    fn ranges_that_overlap_or_touch_are_one() {
        let ranges = Ranges::from_iter([40..50, 10..20, 15..30, 30..35, 41..42]);
        assert_eq!(ranges.len(), 2);
        assert!(ranges.of(&at(10, 25)).is_some() && ranges.of(&at(40, 10)).is_some());
        assert!(ranges.of(&at(10, 26)).is_none() && ranges.of(&at(39, 2)).is_none());
        assert_eq!(Ranges::from_iter([]).len(), 0);
    }
}
