//! Which ranges of files are read together.

use arbitrary::Arbitrary;
use kvhoist_files::{Range, internals::requests};

#[derive(Debug, Arbitrary)]
struct Input {
    /// File, offset, length: of its kind.
    ranges: Vec<(u8, u64, u32, u8)>,
    shift: u8,
    drives: [u8; 4],
}

/// Bytes of memory that all ranges together may have: addresses do not overflow.
const BYTES_MAX: u64 = 1 << 40;
/// Pieces of all ranges.
const PIECES_MAX: u64 = 1 << 14;

/// Plans the requests: they have each byte of each range once, are no longer than asked for, and each drive's are in
/// the order of its files.
pub fn run(data: &[u8]) {
    let Ok(Input { ranges, shift, drives }) = Input::arbitrary_take_rest(arbitrary::Unstructured::new(data)) else {
        return;
    };
    let (piece_bytes, align) = (4096_u64 << (shift % 12), 4096_u64);
    let mut address = 1 << 20;
    let (mut planned, mut pieces) = (Vec::new(), 0);
    for (file, offset, len, kind) in ranges {
        // Near one another, anywhere, and at the end of what can be counted.
        let offset = match kind % 4 {
            0 => offset % (1 << 16),
            1 => offset % (1 << 24),
            2 => offset >> 1,
            _ => i64::MAX as u64 - offset % (1 << 20),
        };
        let len = u64::from(len).min(u64::MAX - offset) >> (kind / 8);
        pieces += len / piece_bytes + 2;
        if pieces > PIECES_MAX || address + len > BYTES_MAX {
            break;
        }
        planned.push(Range { file: usize::from(file % 4), offset, len: len as usize, address: address as usize });
        address += len;
    }
    let drives = drives.map(u64::from);
    let found = requests(&planned, piece_bytes, align, &drives);
    let mut parts: Vec<Vec<(u64, usize, usize)>> = vec![Vec::new(); planned.len()];
    let mut last = std::collections::BTreeMap::new();
    for request in &found {
        assert!(
            request.end > request.start && request.end - request.start / align * align <= piece_bytes,
            "{request:?}"
        );
        assert_eq!(request.parts.iter().map(|part| part.1).min(), Some(request.start));
        assert_eq!(request.parts.iter().map(|part| part.1 + part.2 as u64).max(), Some(request.end));
        let before = last.insert(drives[request.file], (request.file, request.start));
        assert!(before <= Some((request.file, request.start)), "a drive's requests are out of order");
        for &(range, offset, len, address) in &request.parts {
            assert_eq!(planned[range].file, request.file);
            parts[range].push((offset, len, address));
        }
    }
    for (range, mut parts) in planned.iter().zip(parts) {
        parts.sort_unstable();
        let mut at = range.offset;
        for (offset, len, address) in parts {
            assert_eq!(offset, at, "a byte twice, or none");
            assert_eq!(address - range.address, (offset - range.offset) as usize);
            at += len as u64;
        }
        assert_eq!(at, range.offset + range.len as u64);
    }
}
