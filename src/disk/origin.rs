//! Who is to blame if the block of a slot is wrong.

/// Whose memory a block was written from, for as long as it was not read back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Origin([u8; 3]);

impl Origin {
    /// A slot of the cache; or anyone's, and the block was read back since. If it is wrong the drive is to blame.
    pub const OURS: Origin = Origin([0; 3]);
    /// Of a caller that nobody remembers.
    pub const UNKNOWN: Origin = Origin([1, 0, 0]);
    /// Of an earlier run, whose end may have kept the block from the drive.
    pub const EARLIER_RUN: Origin = Origin([2, 0, 0]);
    /// Of the first caller with a number.
    pub const FIRST: Origin = Origin([3, 0, 0]);
    /// Of the last one.
    pub const LAST: Origin = Origin([0xff; 3]);

    /// Of the caller with this number; `None` past the last one.
    pub fn new(number: u32) -> Option<Self> {
        let [low @ .., 0] = number.to_le_bytes() else { return None };
        Some(Origin(low))
    }

    /// Its number.
    pub fn number(self) -> u32 {
        let [a, b, c] = self.0;
        u32::from_le_bytes([a, b, c, 0])
    }
}
