//! The record of a slot: 128 bytes that identify the block in the slot.
//!
//! The byte diagram is in `docs/design.md`.

use super::{PAGE_BYTES, RECORD_BYTES, array, get_u32, get_u64, is_zero, put};
use crate::{block::BlockKey, checksum::checksum};

const FLAGS: usize = 0;
const LENGTH: usize = 4;
const GENERATION: usize = 8;
const CHECKSUM: usize = 16;
const LAST_USE: usize = 24;
const KEY: usize = 32;
const PARENT: usize = 64;
const ZERO: usize = 96;
const CRC: usize = 120;

const FLAG_FULL: u32 = 1;
const FLAG_PARENT: u32 = 2;
const FLAG_USES_SHIFT: u32 = 2;
const FLAG_USES: u32 = (USES_MAX as u32) << FLAG_USES_SHIFT;
/// Set by earlier versions for blocks that were written from a caller's memory; says nothing now.
const FLAG_FORMER: u32 = 16;

/// Largest use count in a record; higher counts are stored as this.
pub const USES_MAX: u8 = 3;

/// Largest generation and last use, so that the next value never overflows. No store counts that far, but a forged
/// record may have this value, and then all new records have it too.
pub const COUNTER_MAX: u64 = (1 << 63) - 1;

/// The content of a full slot's record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// The block's key.
    pub key: BlockKey,
    /// The key of the preceding block in its prefix chain.
    pub parent: Option<BlockKey>,
    /// Bytes of the payload.
    pub length: u32,
    /// Rises with every block stored; of two records with the same key, the higher generation is newer.
    pub generation: u64,
    /// CRC-64/NVME of the payload.
    pub checksum: u64,
    /// The index's logical clock when the block was last used.
    pub last_use: u64,
    /// Number of requests that used the block, at most [`USES_MAX`]; 0 if unknown, as in stores of format version 1.
    pub uses: u8,
}

/// Why a record is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordError {
    /// Torn, corrupted, or written for another slot, member or store.
    Crc,
    /// The crc is correct, but a field has an impossible value.
    Field(&'static str),
}

/// A record page whose records have no crc yet: the holder of the lock leaves computing them for after it.
#[must_use = "a record without its crc is refused"]
pub struct UnsealedPage<'a>(pub(crate) &'a mut [u8; PAGE_BYTES]);

impl UnsealedPage<'_> {
    /// Computes the crc of each record.
    pub fn seal(self) {
        self.0.as_chunks_mut().0.iter_mut().for_each(seal);
    }
}

/// Puts the crc into a record that was encoded without it; leaves a free slot as it is.
fn seal(bytes: &mut [u8; RECORD_BYTES]) {
    if get_u32(bytes, FLAGS) != 0 {
        let crc = checksum(bytes);
        put(bytes, CRC, &crc.to_le_bytes());
    }
}

/// Binds records to one member of one store.
///
/// The record's crc covers 8 further bytes, which the seal derives for each slot. A CRC maps equal prefixes with
/// different last 8 bytes to different values, so two slots of a store never share a seal, and two stores share one
/// with probability 2^-64.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordSeal(u64);

impl RecordSeal {
    /// The seal of member `member` of the store `uuid`.
    pub fn new(uuid: &[u8; 16], member: u16) -> Self {
        // Slot numbers are below 2^31 and use the low half, so members differ in other bits.
        RecordSeal(checksum(uuid) ^ (u64::from(member) << 48))
    }

    fn of_slot(self, local: u32) -> [u8; 8] {
        (self.0 ^ u64::from(local)).to_le_bytes()
    }

    /// Encodes the record for slot `local` of the member. Larger counters become [`COUNTER_MAX`].
    pub fn encode(self, local: u32, record: &Record) -> [u8; RECORD_BYTES] {
        let mut bytes = self.encode_unsealed(local, record);
        seal(&mut bytes);
        bytes
    }

    /// As [`encode`](Self::encode), to be [sealed](seal): until then the seal of its slot is in the place of its crc.
    pub(crate) fn encode_unsealed(self, local: u32, record: &Record) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        let parent = if record.parent.is_some() { FLAG_PARENT } else { 0 };
        let flags = FLAG_FULL | parent | u32::from(record.uses.min(USES_MAX)) << FLAG_USES_SHIFT;
        put(&mut bytes, FLAGS, &flags.to_le_bytes());
        put(&mut bytes, LENGTH, &record.length.to_le_bytes());
        put(&mut bytes, GENERATION, &record.generation.min(COUNTER_MAX).to_le_bytes());
        put(&mut bytes, CHECKSUM, &record.checksum.to_le_bytes());
        put(&mut bytes, LAST_USE, &record.last_use.min(COUNTER_MAX).to_le_bytes());
        put(&mut bytes, KEY, record.key.as_bytes());
        if let Some(parent) = &record.parent {
            put(&mut bytes, PARENT, parent.as_bytes());
        }
        put(&mut bytes, CRC, &self.of_slot(local));
        bytes
    }

    /// Decodes the record of slot `local`; `None` for a free slot. Only the length `block_bytes` is accepted.
    pub fn decode(
        self,
        local: u32,
        block_bytes: u32,
        bytes: &[u8; RECORD_BYTES],
    ) -> Result<Option<Record>, RecordError> {
        if get_u32(bytes, FLAGS) == 0 && is_zero(bytes) {
            return Ok(None);
        }
        let mut sealed = *bytes;
        put(&mut sealed, CRC, &self.of_slot(local));
        if checksum(&sealed) != get_u64(bytes, CRC) {
            return Err(RecordError::Crc);
        }
        let flags = get_u32(bytes, FLAGS);
        let parent = match flags & !(FLAG_USES | FLAG_FORMER) {
            FLAG_FULL if is_zero(&bytes[PARENT..ZERO]) => None,
            FLAG_FULL => return Err(RecordError::Field("parent without its flag")),
            flags if flags == FLAG_FULL | FLAG_PARENT => Some(BlockKey::new(array(bytes, PARENT))),
            _ => return Err(RecordError::Field("unknown flags")),
        };
        let record = Record {
            key: BlockKey::new(array(bytes, KEY)),
            parent,
            length: get_u32(bytes, LENGTH),
            generation: get_u64(bytes, GENERATION),
            checksum: get_u64(bytes, CHECKSUM),
            last_use: get_u64(bytes, LAST_USE),
            uses: ((flags & FLAG_USES) >> FLAG_USES_SHIFT) as u8,
        };
        if record.length != block_bytes {
            return Err(RecordError::Field("length"));
        }
        if record.generation > COUNTER_MAX || record.last_use > COUNTER_MAX {
            return Err(RecordError::Field("counter"));
        }
        if !is_zero(&bytes[ZERO..CRC]) {
            return Err(RecordError::Field("unused bytes"));
        }
        Ok(Some(record))
    }
}

/// The member and slot of store `uuid` for which a record was written that is invalid in its place. The caller checks
/// both against the store's sizes, to distinguish a misdirected or swapped record from a corrupted one.
pub fn written_for(uuid: &[u8; 16], bytes: &[u8; RECORD_BYTES]) -> (u16, u64) {
    // For equal bytes before it, the seal at the end of the input determines the crc and is determined by it: the last
    // 8 bytes are computed backwards.
    let mut state = !get_u64(bytes, CRC);
    for _ in 0..64 {
        let carried = state >> 63;
        state = ((state ^ (POLYNOMIAL * carried)) << 1) | carried;
    }
    let seal = state ^ !checksum(&bytes[..CRC]) ^ RecordSeal::new(uuid, 0).0;
    ((seal >> 48) as u16, seal & ((1 << 48) - 1))
}

/// The reflected polynomial of CRC-64/NVME.
const POLYNOMIAL: u64 = 0x9A6C_9329_AC4B_C9B5;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SEAL: RecordSeal = RecordSeal(0x1234_5678_9abc_def0);

    fn record() -> impl Strategy<Value = Record> {
        let counter = 0..=COUNTER_MAX;
        (any::<[u8; 32]>(), any::<Option<[u8; 32]>>(), counter.clone(), any::<u64>(), counter, 0..=USES_MAX).prop_map(
            |(key, parent, generation, checksum, last_use, uses)| Record {
                key: BlockKey::new(key),
                parent: parent.map(BlockKey::new),
                length: 4096,
                generation,
                checksum,
                last_use,
                uses,
            },
        )
    }

    fn sample() -> Record {
        let key = BlockKey::new([7; 32]);
        let parent = Some(BlockKey::new([9; 32]));
        Record { key, parent, length: 4096, generation: 3, checksum: 4, last_use: 5, uses: 0 }
    }

    #[test]
    fn the_bytes_are_where_the_diagram_says() {
        let bytes = SEAL.encode(1, &sample());
        assert_eq!(bytes[0..8], [3, 0, 0, 0, 0, 16, 0, 0]);
        assert_eq!((bytes[8], bytes[16], bytes[24]), (3, 4, 5));
        let used = SEAL.encode(1, &Record { uses: 2, ..sample() });
        assert_eq!(used[0], 3 + (2 << 2), "two bits for the uses");
        assert_eq!((&bytes[32..64], &bytes[64..96], &bytes[96..120]), (&[7; 32][..], &[9; 32][..], &[0; 24][..]));
    }

    #[test]
    fn a_flag_of_earlier_versions_is_passed_over() {
        let mut bytes = SEAL.encode_unsealed(1, &sample());
        bytes[0] |= 16;
        seal(&mut bytes);
        assert_eq!(SEAL.decode(1, 4096, &bytes), Ok(Some(sample())));
        assert_eq!(SEAL.encode(1, &sample())[0], 3, "and not written");
    }

    #[test]
    fn every_single_bit_flip_is_detected() {
        let good = SEAL.encode(1, &sample());
        for bit in 0..RECORD_BYTES * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(SEAL.decode(1, 4096, &bad).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn a_free_slot_with_any_bit_set_is_not_free() {
        for bit in 0..RECORD_BYTES * 8 {
            let mut bytes = [0; RECORD_BYTES];
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(SEAL.decode(1, 4096, &bytes), Err(RecordError::Crc), "bit {bit}");
        }
    }

    #[test]
    fn impossible_fields_under_a_good_crc_are_refused() {
        type Spoil = fn(&mut [u8; RECORD_BYTES]);
        let cases: [(&str, Spoil); 7] = [
            ("unknown flags", |b| b[0] = 35),
            ("unknown flags", |b| b[0] = 2),
            ("parent without its flag", |b| b[0] = 1),
            ("length", |b| b[4] = 1),
            ("counter", |b| b[GENERATION + 7] = 0x80),
            ("counter", |b| b[LAST_USE + 7] = 0xff),
            ("unused bytes", |b| b[ZERO] = 1),
        ];
        for (what, spoil) in cases {
            let mut bytes = SEAL.encode(1, &sample());
            spoil(&mut bytes);
            put(&mut bytes, CRC, &SEAL.of_slot(1));
            let crc = checksum(&bytes);
            put(&mut bytes, CRC, &crc.to_le_bytes());
            assert_eq!(SEAL.decode(1, 4096, &bytes), Err(RecordError::Field(what)));
        }
    }

    #[test]
    fn counters_saturate() {
        let last = Record { generation: COUNTER_MAX, last_use: COUNTER_MAX, ..sample() };
        let past = Record { generation: COUNTER_MAX + 1, last_use: u64::MAX, ..sample() };
        assert_eq!(SEAL.decode(1, 4096, &SEAL.encode(1, &past)), Ok(Some(last)));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(record in record(), local: u32) {
            prop_assert_eq!(SEAL.decode(local, 4096, &SEAL.encode(local, &record)), Ok(Some(record)));
        }

        #[test]
        fn a_record_is_valid_only_where_it_was_written(
            record in record(), uuid: [u8; 16], other_uuid: [u8; 16],
            local in 0u32..1 << 31, other_local in 0u32..1 << 31, member in 0u16..64, other_member in 0u16..64,
        ) {
            let bytes = RecordSeal::new(&uuid, member).encode(local, &record);
            let here = (uuid, member, local);
            for there in [(uuid, member, other_local), (uuid, other_member, local), (uuid, other_member, other_local),
                (other_uuid, member, local)]
            {
                if there != here {
                    let seal = RecordSeal::new(&there.0, there.1);
                    prop_assert_eq!(seal.decode(there.2, 4096, &bytes), Err(RecordError::Crc));
                }
            }
        }

        #[test]
        fn the_intended_slot_of_a_record_can_be_computed(
            record in record(), uuid: [u8; 16], local in 0u32..1 << 31, member in 0u16..64,
        ) {
            let bytes = RecordSeal::new(&uuid, member).encode(local, &record);
            prop_assert_eq!(written_for(&uuid, &bytes), (member, u64::from(local)));
        }

        #[test]
        fn random_bytes_are_refused_and_never_panic(bytes: [[u8; 32]; 4], local: u32) {
            let bytes = bytes.concat().try_into().expect("4 x 32 bytes");
            prop_assert!(SEAL.decode(local, 4096, &bytes).is_err());
        }
    }
}
