//! What is known of the blocks that callers compute.

use bytes::Bytes;

/// The computations of a life.
#[derive(Default)]
pub struct Computations {
    /// Block, and removals begun, of each computation under way; `None` if it began beside a removal.
    pub under_way: Vec<(usize, Option<u64>)>,
    /// What was computed, and when.
    pub computed: Vec<(u64, Bytes)>,
}

impl Computations {
    /// When bytes were computed, if they are not a copy.
    pub fn when(&self, bytes: &Bytes) -> Option<u64> {
        let same = self.computed.iter().find(|(_, computed)| computed.as_ptr() == bytes.as_ptr());
        same.map(|(at, _)| *at)
    }
}
