//! Bytes that a store takes for a number of slots, and slots that fit in a number of bytes.

use crate::{
    config::DiskPath,
    disk::format::stripe::{MemberGeometry, SLOTS_MAX},
    io::IO_ALIGN,
};

impl DiskPath {
    /// Bytes of the file or device of one path with this many slots: superblocks, records and blocks.
    ///
    /// Counts at most 2^31 - 1 slots of 1 GiB: no store has more.
    ///
    /// ```
    /// use kvhoist::DiskPath;
    /// let bytes = DiskPath::file_bytes(1000, 64 << 10);
    /// assert_eq!(DiskPath::blocks_within(bytes, 64 << 10), 1000);
    /// ```
    pub fn file_bytes(blocks: u64, block_bytes: u64) -> u64 {
        MemberGeometry::of(blocks.min(SLOTS_MAX) as u32, slot_bytes(block_bytes)).bytes
    }

    /// Largest number of slots of one path whose file or device has `file_bytes`; 0 if none fits.
    pub fn blocks_within(file_bytes: u64, block_bytes: u64) -> u32 {
        let (mut fits, mut too_many) = (0, SLOTS_MAX + 1);
        while too_many - fits > 1 {
            let middle = u64::midpoint(fits, too_many);
            if Self::file_bytes(middle, block_bytes) <= file_bytes { fits = middle } else { too_many = middle }
        }
        fits as u32
    }
}

fn slot_bytes(block_bytes: u64) -> u64 {
    block_bytes.clamp(1, 1 << 30).next_multiple_of(IO_ALIGN as u64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn one_slot_more_would_not_fit(bytes in 0u64..1 << 62, block_bytes in 1u64..=1 << 30) {
            let slots = u64::from(DiskPath::blocks_within(bytes, block_bytes));
            prop_assert!(slots == 0 || DiskPath::file_bytes(slots, block_bytes) <= bytes);
            prop_assert!(slots == SLOTS_MAX || DiskPath::file_bytes(slots + 1, block_bytes) > bytes);
        }
    }

    #[test]
    fn the_records_count() {
        assert_eq!(DiskPath::file_bytes(1, 4096), (1 << 20) + 4096);
        assert_eq!(DiskPath::blocks_within((1 << 20) + 4096, 1), 1);
        assert_eq!(DiskPath::blocks_within((1 << 20) + 4095, 4096), 0);
        assert_eq!((DiskPath::blocks_within(u64::MAX, 1), DiskPath::blocks_within(0, u64::MAX)), (SLOTS_MAX as u32, 0));
    }
}
