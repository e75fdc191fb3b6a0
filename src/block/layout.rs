//! How a block lies in memory: its segments.

use serde::{Deserialize, Serialize};

/// A contiguous range of memory: address and length in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Address of the first byte.
    pub ptr: *mut u8,
    /// Length in bytes.
    pub len: usize,
}

// SAFETY: an address and a length; what may be done with them is the contract of whoever takes it.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

/// The lengths of a block's segments, in the order in which they make up the block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    segments: Vec<usize>,
}

impl Layout {
    /// Sum of the segments, bytes.
    pub fn block_bytes(&self) -> usize {
        self.segments.iter().sum()
    }
}
