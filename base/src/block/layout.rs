//! The layout of a block in memory: its segments.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// A contiguous range of memory: address and length in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Address of the first byte.
    pub ptr: *mut u8,
    /// Length in bytes.
    pub len: usize,
}

// SAFETY: an address and a length; the contract of the function that takes it governs its use.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// The addresses; an error about `what` if they are none.
    #[doc(hidden)]
    pub fn addresses(&self, what: &'static str) -> Result<Range<usize>> {
        let start = self.ptr as usize;
        match start.checked_add(self.len) {
            Some(end) if start != 0 && self.len > 0 => Ok(start..end),
            _ => Err(Error::argument(what, format!("{} bytes at {start:#x}", self.len), "a range of memory")),
        }
    }

    /// Refuses segments that are not one block long in all.
    #[doc(hidden)]
    pub fn check_block(segments: &[Segment], block_bytes: usize) -> Result<()> {
        let bytes = segments.iter().try_fold(0usize, |sum, segment| sum.checked_add(segment.len));
        if bytes == Some(block_bytes) {
            return Ok(());
        }
        let bytes = bytes.map_or("more bytes than memory has".into(), |bytes| format!("{bytes} bytes"));
        let found = format!("{bytes} in {} segments", segments.len());
        Err(Error::argument("segments", found, format!("one block of {block_bytes} bytes")))
    }
}

/// The lengths of a block's segments, in block order.
///
/// Serialized as the list of lengths; deserializing refuses what [`Layout::new`] refuses.
///
/// ```
/// use kvhoist::Layout;
/// let layout = Layout::new(vec![4096, 4096, 512])?;
/// assert_eq!((layout.block_bytes(), layout.segments().len()), (8704, 3));
/// assert!(Layout::new(vec![4096, 0]).is_err());
/// # Ok::<(), kvhoist::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<usize>", into = "Vec<usize>")]
pub struct Layout {
    segments: Box<[usize]>,
    block_bytes: usize,
}

impl Layout {
    /// Largest number of segments in a block.
    pub const SEGMENTS_MAX: usize = 65_536;

    /// The layout with these segment lengths, in bytes.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no segment, an empty one, or more than [`Layout::SEGMENTS_MAX`], or if their sum
    /// exceeds `isize::MAX`.
    pub fn new(segments: Vec<usize>) -> Result<Self> {
        if segments.is_empty() || segments.len() > Self::SEGMENTS_MAX {
            let expected = format!("1 to {} segments", Self::SEGMENTS_MAX);
            return Err(wrong("layout", format!("{} segments", segments.len()), expected));
        }
        if let Some(index) = segments.iter().position(|&len| len == 0) {
            return Err(wrong("layout", format!("segment {index} of 0 bytes"), "segments of at least 1 byte"));
        }
        let sum = segments.iter().try_fold(0, |sum: usize, &len| sum.checked_add(len));
        let Some(block_bytes) = sum.filter(|&sum| isize::try_from(sum).is_ok()) else {
            let sum: u128 = segments.iter().map(|&len| len as u128).sum();
            return Err(wrong("layout", format!("{sum} bytes in all"), format!("{} bytes at most", isize::MAX)));
        };
        Ok(Layout { segments: segments.into(), block_bytes })
    }

    /// A single segment of `bytes` bytes.
    ///
    /// # Errors
    /// [`Error::Argument`] if `bytes` is 0 or over `isize::MAX`.
    pub fn contiguous(bytes: usize) -> Result<Self> {
        Layout::new(vec![bytes])
    }

    /// The length of every segment in bytes.
    pub fn segments(&self) -> &[usize] {
        &self.segments
    }

    /// Sum of the segments, bytes.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }
}

impl TryFrom<Vec<usize>> for Layout {
    type Error = Error;

    fn try_from(segments: Vec<usize>) -> Result<Self> {
        Layout::new(segments)
    }
}

impl From<Layout> for Vec<usize> {
    fn from(layout: Layout) -> Self {
        layout.segments.into()
    }
}

pub(super) fn wrong(what: &'static str, found: impl ToString, expected: impl Into<String>) -> Error {
    Error::argument(what, found, expected)
}

#[cfg(test)]
mod tests {
    use serde_test::{Token, assert_de_tokens_error, assert_tokens};

    use super::*;

    fn refusal(segments: Vec<usize>) -> String {
        Layout::new(segments).expect_err("a wrong layout").to_string()
    }

    #[test]
    fn a_layout_knows_its_segments_and_their_sum() {
        let layout = Layout::new(vec![3, 1, 2]).expect("three segments");
        assert_eq!((layout.segments(), layout.block_bytes()), (&[3, 1, 2][..], 6));
        assert_eq!(Layout::contiguous(7).expect("7 bytes"), Layout::new(vec![7]).expect("7 bytes"));
    }

    #[test]
    fn wrong_layouts_are_refused_with_what_was_found() {
        assert_eq!(refusal(vec![]), "layout: found 0 segments, expected 1 to 65536 segments");
        assert_eq!(refusal(vec![1; 65_537]), "layout: found 65537 segments, expected 1 to 65536 segments");
        assert_eq!(refusal(vec![1, 0]), "layout: found segment 1 of 0 bytes, expected segments of at least 1 byte");
        let most = isize::MAX.unsigned_abs();
        assert!(refusal(vec![most, 1]).contains("9223372036854775808 bytes in all"), "{}", refusal(vec![most, 1]));
        assert!(refusal(vec![usize::MAX; 4]).contains("73786976294838206460 bytes in all"));
        assert!(Layout::contiguous(0).is_err());
        assert!(Layout::new(vec![most - 1, 1]).is_ok());
        assert!(Layout::new(vec![1; 65_536]).is_ok());
    }

    #[test]
    fn serde_is_the_list_and_validates_it() {
        let layout = Layout::new(vec![8, 9]).expect("two segments");
        assert_tokens(&layout, &[Token::Seq { len: Some(2) }, Token::U64(8), Token::U64(9), Token::SeqEnd]);
        assert_de_tokens_error::<Layout>(
            &[Token::Seq { len: Some(0) }, Token::SeqEnd],
            "layout: found 0 segments, expected 1 to 65536 segments",
        );
        assert_de_tokens_error::<Layout>(
            &[Token::Seq { len: Some(1) }, Token::U64(0), Token::SeqEnd],
            "layout: found segment 0 of 0 bytes, expected segments of at least 1 byte",
        );
    }
}
