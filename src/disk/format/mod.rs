//! The on-disk format of a store. All numbers are little endian; unused bytes are zero and checked.
//!
//! `docs/design.md` has the byte diagram of the superblocks and the records. Of a superblock only the first 512-byte
//! sector is in use, so that a sector-wise torn write is all or nothing.
//!
//! All checksums are CRC-64/NVME (`checksum.rs`). A record's crc is taken over its first 120
//! bytes followed by 8 bytes that stand for the store, the member and the slot
//! ([`RecordSeal`](record::RecordSeal)): a record that was copied elsewhere is refused.
//!
//! **Versions.** Magic, version and the crc at 504 keep their places in every version, so that an older program can
//! distinguish a newer store from a damaged one. A store keeps the version it was created with: a program that could
//! open it still can after newer programs have used it.
//!
//! - 1: records have no use count. Flags 4, 8 and 16 are zero.
//! - 2: records have a use count, and say whose memory a block came from.
//!
//! **States.** *Forming* (1): the store is being created and holds no block. *Whole* (2): when this state was written,
//! every member was at least forming on the medium. Creation runs in steps, each over all members before the next: zero
//! the record tables and superblocks B, sync; write A forming, sync; write B whole, sync; write A whole, sync. So one
//! whole superblock on any member proves that creation only needs to be finished. No whole superblock, with record
//! tables of zeros, proves that nothing was ever stored; with records, it means that the superblocks are damaged.
//! An open that fails after it has created the store in files of its own takes the last three steps back, in reverse,
//! before it removes the files.

pub mod pair;
pub mod record;
pub mod stripe;
pub mod superblock;
pub mod survey;

use crate::block::IO_ALIGN;
// Settings in bytes are turned into slots by the same sizes.
pub use crate::config::sizing::{DATA_ALIGN, RECORDS_PER_PAGE, TABLE_OFFSET};

/// Bytes of a superblock, and of a page of the record table.
pub const PAGE_BYTES: usize = IO_ALIGN;

/// Offsets of the two copies of the superblock.
pub const SUPERBLOCK_OFFSETS: [u64; 2] = [0, PAGE_BYTES as u64];

/// Bytes of both superblocks.
pub const HEAD_BYTES: usize = 2 * PAGE_BYTES;

/// Bytes of a record.
pub const RECORD_BYTES: usize = 128;

const _: () = assert!(PAGE_BYTES == 4096 && RECORDS_PER_PAGE == 32 && TABLE_OFFSET == 8192);
const _: () = assert!(RECORDS_PER_PAGE == PAGE_BYTES / RECORD_BYTES && TABLE_OFFSET == HEAD_BYTES as u64);

/// The `N` bytes at `offset`.
fn array<const N: usize>(bytes: &[u8], offset: usize) -> [u8; N] {
    bytes[offset..offset + N].try_into().expect("the slice has N bytes")
}

fn get_u16(bytes: &[u8], offset: usize) -> u16 {
    u16::from_le_bytes(array(bytes, offset))
}

fn get_u32(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(array(bytes, offset))
}

fn get_u64(bytes: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(array(bytes, offset))
}

fn put(bytes: &mut [u8], offset: usize, value: &[u8]) {
    bytes[offset..offset + value.len()].copy_from_slice(value);
}

/// True if all bytes are zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    // Wide chunks, which the compiler compares with vector instructions.
    let (chunks, rest) = bytes.as_chunks::<64>();
    chunks.iter().all(|chunk| *chunk == [0; 64]) && rest.iter().all(|&byte| byte == 0)
}
