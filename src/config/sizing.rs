//! Bytes that a store takes for a number of slots, and slots that fit in a number of bytes.

use super::DiskPath;
use crate::{
    block::IO_ALIGN,
    error::{Error, Result},
};

/// Largest number of slots of a store; keeps every offset far below 2^63.
pub const SLOTS_MAX: u64 = (u32::MAX >> 1) as u64;
/// Offset of the record table, after both superblocks.
pub const TABLE_OFFSET: u64 = 2 * IO_ALIGN as u64;
/// Records in a page of the record table.
pub const RECORDS_PER_PAGE: usize = 32;
/// Alignment of the data area.
pub const DATA_ALIGN: u64 = 1 << 20;

/// Offset of the first slot, after the records of so many.
pub fn data_offset(slots: u32) -> u64 {
    let pages = u64::from(slots.div_ceil(RECORDS_PER_PAGE as u32));
    (TABLE_OFFSET + pages * IO_ALIGN as u64).next_multiple_of(DATA_ALIGN)
}

/// Slots that fit with their records in the bytes of one path; `u32::MAX` if that is more than a store can have.
pub fn slots_in(bytes: u64, block_bytes: u64) -> u32 {
    let (mut fits, mut too_many) = (0, SLOTS_MAX + 1);
    while too_many - fits > 1 {
        let middle = u64::midpoint(fits, too_many);
        if DiskPath::file_bytes(middle, block_bytes) <= bytes { fits = middle } else { too_many = middle }
    }
    let one_more = DiskPath::file_bytes(SLOTS_MAX, block_bytes) + slot_bytes(block_bytes);
    if one_more <= bytes { u32::MAX } else { fits as u32 }
}

impl DiskPath {
    /// Bytes of the file or device of one path with this many slots: superblocks, records and blocks.
    ///
    /// Counts at most 2^31 - 1 slots of 1 GiB: no store has more.
    ///
    /// ```
    /// use kvhoist::DiskPath;
    /// let bytes = DiskPath::file_bytes(1000, 64 << 10);
    /// assert_eq!(DiskPath::blocks_on_each(2 * bytes, 2, 64 << 10)?, 1000);
    /// # Ok::<(), kvhoist::Error>(())
    /// ```
    pub fn file_bytes(blocks: u64, block_bytes: u64) -> u64 {
        let blocks = blocks.min(SLOTS_MAX);
        data_offset(blocks as u32) + blocks * slot_bytes(block_bytes)
    }

    /// Largest number of slots of each path of a store whose files or devices have `capacity_bytes` in all.
    ///
    /// # Errors
    /// [`Error::Config`] for `capacity`: a path has no room for a block, or all paths together have room for more than
    /// the 2^31 - 1 blocks that a store can have.
    pub fn blocks_on_each(capacity_bytes: u64, paths: usize, block_bytes: u64) -> Result<u32> {
        let paths = paths.max(1) as u64;
        let (share, blocks_max) = (capacity_bytes / paths, SLOTS_MAX / paths);
        let wrong = |expected: String| Error::config("capacity", format!("{capacity_bytes} bytes"), expected);
        let of_all = |blocks: u64| Self::file_bytes(blocks, block_bytes).saturating_mul(paths);
        if Self::file_bytes(blocks_max, block_bytes) + slot_bytes(block_bytes) <= share {
            let most = of_all(blocks_max);
            return Err(wrong(format!(
                "{most} bytes or less: a store has at most {SLOTS_MAX} blocks, here of {block_bytes} bytes; larger \
                 blocks make use of more"
            )));
        }
        let fits = u64::from(slots_in(share, block_bytes)).min(blocks_max);
        if fits == 0 {
            let least = of_all(1);
            return Err(wrong(format!("{least} bytes or more, for one block of {block_bytes} bytes on each path")));
        }
        Ok(fits as u32)
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
        fn one_slot_more_would_not_fit(bytes in 0u64..1 << 62, paths in 1usize..=64, block_bytes in 1u64..=1 << 30) {
            let share = bytes / paths as u64;
            let blocks_max = SLOTS_MAX / paths as u64;
            match DiskPath::blocks_on_each(bytes, paths, block_bytes) {
                Ok(slots) => {
                    let slots = u64::from(slots);
                    prop_assert!(slots > 0 && slots <= blocks_max);
                    prop_assert!(DiskPath::file_bytes(slots, block_bytes) <= share);
                    prop_assert!(slots == blocks_max || DiskPath::file_bytes(slots + 1, block_bytes) > share);
                }
                Err(_) => {
                    let [least, most] = [1, blocks_max].map(|slots| DiskPath::file_bytes(slots, block_bytes));
                    prop_assert!(share < least || share > most);
                }
            }
        }
    }

    #[test]
    fn the_records_count() {
        assert_eq!(DiskPath::file_bytes(1, 4096), (1 << 20) + 4096);
        assert_eq!(DiskPath::blocks_on_each((1 << 20) + 4096, 1, 1).expect("room"), 1);
    }

    #[test]
    fn too_little_and_too_much_are_refused_in_the_words_of_the_capacity() {
        let said = |bytes, paths, block_bytes| {
            DiskPath::blocks_on_each(bytes, paths, block_bytes).expect_err("refused").to_string()
        };
        let little = said((1 << 20) + 4095, 1, 4096);
        assert!(little.contains("capacity") && little.contains("found 1052671 bytes"), "{little}");
        assert!(little.contains("1052672 bytes or more"), "{little}");
        assert!(said(0, 3, u64::MAX).contains("on each path"));
        // 2^31 - 1 blocks and one more, on one path and on three.
        for paths in [1, 3] {
            let most = DiskPath::file_bytes(SLOTS_MAX / paths, 4096) * paths;
            let blocks = DiskPath::blocks_on_each(most, paths as usize, 4096).expect("the largest store");
            assert_eq!(u64::from(blocks), SLOTS_MAX / paths);
            let much = said(most + 4096 * paths, paths as usize, 4096);
            assert!(much.contains(&format!("{most} bytes or less")) && much.contains("larger blocks"), "{much}");
        }
        assert!(said(u64::MAX, 1, 1).contains("2147483647 blocks"));
    }
}
