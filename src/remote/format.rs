//! An object: a run of one chain's blocks, behind a table of them.
//!
//! Little endian; unused bytes are zero. Blocks have one length, so an object's length says how many it
//! has, and where its table ends: one read gets the whole table.
//!
//! ```text
//! head (128 bytes)                       entry, one for each block (48 bytes)
//!   0  magic "KVHOISTR"      8            0  key                 32
//!   8  format version        4           32  payload checksum     8
//!  12  blocks                4           40  zero                 8
//!  16  block_bytes           8
//!  24  flags: 1 has a parent 8           then the blocks, without a gap
//!  32  parent               32
//!  64  namespace            32
//!  96  zero                 24
//! 120  crc of the others     8
//! ```

use std::ops::Range;

use bytes::Bytes;
use sha2::{Digest as _, Sha256};

use super::{presence::Known, store::RemoteError};
use crate::{block::BlockKey, checksum::Digest};

const MAGIC: &[u8; 8] = b"KVHOISTR";
/// The version of the format, which is a part of each name too.
const VERSION: u32 = 1;
const HEAD_BYTES: usize = 128;
const CRC_AT: usize = HEAD_BYTES - 8;
const ENTRY_BYTES: usize = 48;
/// Blocks of an object at most.
pub(crate) const BLOCKS_MAX: usize = 4096;

/// What the table of an object says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Table {
    /// The key before the first block in its chain.
    pub(crate) parent: Option<BlockKey>,
    pub(crate) blocks: Box<[Known]>,
}

/// The objects of a namespace, whose blocks have one length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Space {
    pub(crate) block_bytes: u64,
    digest: [u8; 32],
}

impl Space {
    pub(crate) fn new(namespace: &str, block_bytes: u64) -> Self {
        let mut digest = Sha256::new();
        digest.update(block_bytes.to_le_bytes());
        digest.update(namespace.as_bytes());
        Space { block_bytes, digest: digest.finalize().into() }
    }

    /// With what the names of its objects begin.
    pub(crate) fn prefix(&self) -> String {
        format!("kvhoist{VERSION}/{}/", BlockKey::new(self.digest))
    }

    /// The name of the object that begins with a block.
    pub(crate) fn name(&self, first: &BlockKey) -> String {
        self.prefix() + &first.to_string()
    }

    /// Blocks of an object of this length; `None` if no object has it.
    pub(crate) fn blocks_in(&self, object_bytes: u64) -> Option<usize> {
        let of_blocks = object_bytes.checked_sub(HEAD_BYTES as u64)?;
        let bytes_each = self.block_bytes.checked_add(ENTRY_BYTES as u64)?;
        let blocks = of_blocks / bytes_each;
        let is_whole = of_blocks.is_multiple_of(bytes_each) && (1..=BLOCKS_MAX as u64).contains(&blocks);
        is_whole.then_some(blocks as usize)
    }

    /// Bytes of the table of an object of this length; `None` if no object has it.
    pub(crate) fn table_bytes(&self, object_bytes: u64) -> Option<u64> {
        Some((HEAD_BYTES + self.blocks_in(object_bytes)? * ENTRY_BYTES) as u64)
    }

    /// Blocks of an object that has about `object_bytes`.
    pub(crate) fn blocks_of(&self, object_bytes: u64) -> usize {
        ((object_bytes / self.block_bytes).max(1) as usize).min(BLOCKS_MAX)
    }

    /// The parts of an object: its table, and its blocks.
    pub(crate) fn encode(&self, parent: Option<&BlockKey>, blocks: Vec<(BlockKey, u64, Bytes)>) -> Vec<Bytes> {
        let mut table = vec![0; HEAD_BYTES];
        table[..8].copy_from_slice(MAGIC);
        table[8..12].copy_from_slice(&VERSION.to_le_bytes());
        table[12..16].copy_from_slice(&(blocks.len() as u32).to_le_bytes());
        table[16..24].copy_from_slice(&self.block_bytes.to_le_bytes());
        table[24] = u8::from(parent.is_some());
        table[32..64].copy_from_slice(parent.map_or(&[0; 32], |parent| parent.as_bytes()));
        for (key, checksum, _) in &blocks {
            table.extend_from_slice(key.as_bytes());
            table.extend_from_slice(&checksum.to_le_bytes());
            table.extend_from_slice(&[0; 8]);
        }
        table[64..96].copy_from_slice(&self.digest);
        let crc = crc_of(&table);
        table[CRC_AT..HEAD_BYTES].copy_from_slice(&crc.to_le_bytes());
        std::iter::once(Bytes::from(table)).chain(blocks.into_iter().map(|(_, _, bytes)| bytes)).collect()
    }

    /// The table of an object of this length.
    ///
    /// # Errors
    /// [`RemoteError::Invalid`].
    pub(crate) fn decode(&self, name: &str, table: &[u8], object_bytes: u64) -> Result<Table, RemoteError> {
        let block_bytes = self.block_bytes;
        let expected_bytes = self.table_bytes(object_bytes);
        if expected_bytes != Some(table.len() as u64) {
            let expected = format!("the table of an object of blocks of {block_bytes} bytes");
            return Err(invalid(format!("{} bytes, of an object of {object_bytes}", table.len()), expected));
        }
        let crc = u64::from_le_bytes(array(table, CRC_AT));
        if &table[..8] != MAGIC || crc != crc_of(table) {
            return Err(invalid("another magic or checksum", "an object of kvhoist"));
        }
        let version = u32::from_le_bytes(array(table, 8));
        if version != VERSION {
            return Err(invalid(format!("format version {version}"), format!("version {VERSION}: update kvhoist")));
        }
        let count = u32::from_le_bytes(array(table, 12)) as usize;
        let (length, flags) = (u64::from_le_bytes(array(table, 16)), u64::from_le_bytes(array(table, 24)));
        if HEAD_BYTES + count * ENTRY_BYTES != table.len() || length != block_bytes || flags > 1 {
            let found = format!("{count} blocks of {length} bytes, flags {flags}");
            return Err(invalid(found, format!("blocks of {block_bytes} bytes in an object of {object_bytes}")));
        }
        let entry = |(at, entry): (usize, &[u8])| Known {
            key: BlockKey::new(array(entry, 0)),
            offset: table.len() as u64 + at as u64 * block_bytes,
            checksum: u64::from_le_bytes(array(entry, 32)),
        };
        let blocks: Box<[Known]> = table[HEAD_BYTES..].chunks_exact(ENTRY_BYTES).enumerate().map(entry).collect();
        if array(table, 64) != self.digest || blocks.first().is_none_or(|first| self.name(&first.key) != name) {
            return Err(invalid("an object of another name", "the one that was asked for"));
        }
        Ok(Table { parent: (flags == 1).then(|| BlockKey::new(array(table, 32))), blocks })
    }
}

/// The blocks of an object of whichever namespace, for `kvhoist remote verify`: the range and the checksum of each.
/// `start` is the beginning of the object, with the whole table.
///
/// # Errors
/// [`RemoteError::Invalid`].
pub fn blocks_of_object(name: &str, start: &[u8], object_bytes: u64) -> Result<Vec<(Range<u64>, u64)>, RemoteError> {
    let no_object = || invalid("another beginning, or another name", "an object of kvhoist");
    let digest = name.split('/').nth(1).and_then(|digits| digits.parse::<BlockKey>().ok()).ok_or_else(no_object)?;
    let head = start.get(..HEAD_BYTES).filter(|head| head.starts_with(MAGIC)).ok_or_else(no_object)?;
    let block_bytes = u64::from_le_bytes(array(head, 16));
    let space = Space { block_bytes, digest: *digest.as_bytes() };
    let table_bytes = space.table_bytes(object_bytes).and_then(|bytes| start.get(..bytes as usize));
    let table = space.decode(name, table_bytes.ok_or_else(no_object)?, object_bytes)?;
    let of_block = |known: &Known| (known.offset..known.offset + block_bytes, known.checksum);
    Ok(table.blocks.iter().map(of_block).collect())
}

/// The checksum of a table, but for the place of the checksum.
fn crc_of(table: &[u8]) -> u64 {
    let mut digest = Digest::new();
    digest.update(&table[..CRC_AT]);
    digest.update(&table[HEAD_BYTES..]);
    digest.finish()
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("its caller has checked the length")
}

fn invalid(found: impl Into<String>, expected: impl Into<String>) -> RemoteError {
    RemoteError::Invalid { found: found.into(), expected: expected.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u8) -> BlockKey {
        BlockKey::new([n; 32])
    }

    #[test]
    fn an_object_is_read_as_it_was_written_and_no_changed_table_is() {
        let space = Space::new("a model", 16);
        let blocks: Vec<_> = (1..4).map(|n| (key(n), u64::from(n), Bytes::from(vec![n; 16]))).collect();
        for parent in [None, Some(key(9))] {
            let parts = space.encode(parent.as_ref(), blocks.clone());
            let object = parts.concat();
            let bytes = object.len() as u64;
            let table = &object[..space.table_bytes(bytes).expect("an object's length") as usize];
            let name = space.name(&key(1));
            let decoded = space.decode(&name, table, bytes).expect("as written");
            assert_eq!(decoded.parent, parent);
            for (known, (key, checksum, payload)) in decoded.blocks.iter().zip(&blocks) {
                assert_eq!((known.key, known.checksum), (*key, *checksum));
                assert_eq!(object[known.offset as usize..][..16], payload[..]);
            }
            let found = blocks_of_object(&name, &object, bytes).expect("as written");
            let expected: Vec<_> = decoded.blocks.iter().map(|b| (b.offset..b.offset + 16, b.checksum)).collect();
            assert_eq!(found, expected, "without the namespace's name");
            for cut in [0, 127, table.len() - 1] {
                assert!(blocks_of_object(&name, &object[..cut], bytes).is_err(), "{cut} bytes");
            }
            assert!(blocks_of_object(&space.name(&key(2)), &object, bytes).is_err());
            for at in 0..table.len() {
                let mut changed = table.to_vec();
                changed[at] ^= 4;
                assert!(space.decode(&name, &changed, bytes).is_err(), "byte {at}");
                assert!(blocks_of_object(&name, &changed, bytes).is_err(), "byte {at}");
            }
            assert!(space.decode(&space.name(&key(2)), table, bytes).is_err(), "another name");
            assert!(space.decode(&name, table, bytes + 64).is_err(), "another length");
            let other = Space::new("another model", 16);
            assert!(other.decode(&other.name(&key(1)), table, bytes).is_err(), "another namespace");
        }
    }

    #[test]
    fn lengths_that_no_object_has_are_refused() {
        let space = Space::new("a", 4096);
        let of = |blocks: u64| HEAD_BYTES as u64 + blocks * (ENTRY_BYTES as u64 + 4096);
        assert_eq!(space.table_bytes(of(3)), Some((HEAD_BYTES + 3 * ENTRY_BYTES) as u64));
        for bytes in [0, 127, of(0), of(1) - 1, of(1) + 1, of(BLOCKS_MAX as u64 + 1), u64::MAX] {
            assert_eq!(space.table_bytes(bytes), None, "{bytes}");
        }
        assert_eq!((space.blocks_of(1), space.blocks_of(8 << 20), space.blocks_of(u64::MAX)), (1, 2048, BLOCKS_MAX));
    }
}
