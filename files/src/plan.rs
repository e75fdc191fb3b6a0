//! Which ranges are read together: pure data.

use std::collections::BTreeMap;

use crate::{Error, Result, SourceFile};

/// Bytes between two ranges that are read with them: as long as another request takes.
const GAP_BYTES: u64 = 64 << 10;

/// Bytes of a file, and where they go or come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// The file, by its number in the list of files.
    pub file: usize,
    /// First byte in the file.
    pub offset: u64,
    /// Length in bytes. 0: nothing is done.
    pub len: usize,
    /// First byte in memory.
    pub address: usize,
}

impl Range {
    fn end(&self) -> u64 {
        self.offset + self.len as u64
    }
}

/// A part of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    /// The range, by its number in the caller's list.
    pub(crate) range: usize,
    pub(crate) offset: u64,
    pub(crate) len: usize,
    pub(crate) address: usize,
}

/// Parts that lie together in one file, in its order: one request. They may overlap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) file: usize,
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) parts: Vec<Part>,
}

/// Pieces of at most `piece_bytes`, in the order of files and offsets; each begins at a multiple of `align`, or with
/// its first part.
pub(crate) fn plan(ranges: &[Range], piece_bytes: u64, align: u64) -> Vec<Piece> {
    let mut order: Vec<usize> = (0..ranges.len()).filter(|&n| ranges[n].len > 0).collect();
    order.sort_by_key(|&n| (ranges[n].file, ranges[n].offset, n));
    let mut pieces: Vec<Piece> = Vec::new();
    for n in order {
        let range = ranges[n];
        let mut at = range.offset;
        while at < range.end() {
            // Pieces end at multiples of their length, so that those of one range begin aligned.
            let joined = pieces.last_mut().filter(|piece| {
                let limit = limit(piece.start, piece_bytes, align);
                piece.file == range.file && at >= piece.start && at < limit && at <= piece.end.saturating_add(GAP_BYTES)
            });
            let (until, piece) = match joined {
                Some(piece) => (range.end().min(limit(piece.start, piece_bytes, align)), piece),
                None => {
                    pieces.push(Piece { file: range.file, start: at, end: at, parts: Vec::new() });
                    let until = range.end().min(limit(at, piece_bytes, align));
                    (until, pieces.last_mut().expect("just pushed"))
                }
            };
            let address = range.address + (at - range.offset) as usize;
            piece.parts.push(Part { range: n, offset: at, len: (until - at) as usize, address });
            piece.end = piece.end.max(until);
            at = until;
        }
    }
    // Only overlapping ranges left the order.
    pieces.sort_by_key(|piece| (piece.file, piece.start));
    pieces
}

/// The pieces of each drive, in order. `drives` says which drive each file is on.
pub(crate) fn by_drive(pieces: Vec<Piece>, drives: &[u64]) -> Vec<Vec<Piece>> {
    let mut found: BTreeMap<u64, Vec<Piece>> = BTreeMap::new();
    for piece in pieces {
        found.entry(drives[piece.file]).or_default().push(piece);
    }
    found.into_values().collect()
}

/// Where a piece that begins at `start` ends at the latest.
fn limit(start: u64, piece_bytes: u64, align: u64) -> u64 {
    (start - start % align).saturating_add(piece_bytes)
}

/// Refuses ranges that are not in their files.
pub(crate) fn check(ranges: &[Range], files: &[SourceFile]) -> Result<()> {
    for range in ranges {
        let Some(file) = files.get(range.file) else {
            let text = format!("found a range of file {}, expected one of {}", range.file, files.len());
            return Err(Error::Argument(text));
        };
        let end = u128::from(range.offset) + range.len as u128;
        if end > u128::from(file.size()) {
            let (path, offset) = (file.path().to_owned(), range.offset);
            return Err(Error::OutOfFile { path, offset, end, size: file.size() });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ranges() -> impl Strategy<Value = Vec<Range>> {
        let range = (0..3_usize, 0..300_000_u64, prop_oneof![Just(0), 1..200_usize, 1..100_000_usize]);
        prop::collection::vec(range, 0..40).prop_map(|drawn| {
            let mut address = 1 << 20;
            let place = |(file, offset, len)| {
                address += len;
                Range { file, offset, len, address: address - len }
            };
            drawn.into_iter().map(place).collect()
        })
    }

    proptest! {
        /// Each byte of each range is in one part, at its place; no piece is too long; pieces are in order.
        #[test]
        fn pieces_have_every_byte_of_every_range_once(ranges in ranges(), shift in 12..18_u32) {
            let (piece_bytes, align) = (1_u64 << shift, 4096);
            let pieces = plan(&ranges, piece_bytes, align);
            let mut next: Vec<u64> = ranges.iter().map(|range| range.offset).collect();
            for piece in &pieces {
                prop_assert!(piece.end > piece.start && piece.end - (piece.start - piece.start % align) <= piece_bytes);
                prop_assert_eq!(piece.parts.iter().map(|part| part.offset).min(), Some(piece.start));
                prop_assert_eq!(piece.parts.iter().map(|part| part.offset + part.len as u64).max(), Some(piece.end));
                for part in &piece.parts {
                    let range = ranges[part.range];
                    prop_assert_eq!((piece.file, part.offset), (range.file, next[part.range]));
                    prop_assert_eq!((part.address - range.address) as u64, part.offset - range.offset);
                    next[part.range] += part.len as u64;
                }
            }
            let ends: Vec<u64> = ranges.iter().map(Range::end).collect();
            prop_assert_eq!(next, ends);
            prop_assert!(pieces.is_sorted_by_key(|piece| (piece.file, piece.start)));
        }
    }

    #[test]
    fn small_neighbors_are_one_piece_and_distant_ones_are_not() {
        let range = |offset, len| Range { file: 0, offset, len, address: 0 };
        let small: Vec<Range> = (0..1000).map(|n| range(n * 1000, 900)).collect();
        assert_eq!(plan(&small, 4 << 20, 4096).len(), 1);
        assert_eq!(plan(&[range(0, 10), range(GAP_BYTES + 11, 10)], 4 << 20, 4096).len(), 2);
        assert_eq!(plan(&[range(5, 10 << 20)], 4 << 20, 4096).len(), 3);
    }
}
