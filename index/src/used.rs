//! What is known of the uses of an entry.

/// The known uses of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Used {
    /// The index's clock at the last use; 0 before the first.
    pub last: u64,
    /// Uses, as far as they are remembered: 3 stands for more as well.
    pub uses: u8,
}

impl Used {
    /// It was used before its last use too.
    pub fn again(self) -> bool {
        self.uses > 1
    }
}
