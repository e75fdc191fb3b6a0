//! The superblock: identity and geometry of a member.
//!
//! `docs/design.md` has the byte diagram, [`format`](super) the meaning of the states.

use super::{
    PAGE_BYTES, array, get_u16, get_u32, get_u64, is_zero, put,
    stripe::{MEMBERS_MAX, SLOTS_MAX},
};
use crate::{
    checksum::{Digest, checksum},
    config::Config,
};

/// The first 8 bytes of a store, in every format version.
pub const MAGIC: [u8; 8] = *b"KVHOIST\0";

/// The format version of new stores, and the latest that this program reads. A store keeps the version it was created
/// with, so that older programs can still open it.
pub const VERSION: u32 = 2;

/// Largest sequence number, so that the next one never overflows.
pub const SEQUENCE_MAX: u64 = (1 << 63) - 1;

const VERSION_AT: usize = 8;
const STATE: usize = 12;
const UUID: usize = 16;
const SEQUENCE: usize = 32;
const BLOCK_BYTES: usize = 40;
const SLOT_BYTES: usize = 48;
const SLOTS: usize = 56;
const SLOTS_ALL: usize = 64;
const FINGERPRINT: usize = 72;
const MEMBER: usize = 80;
const MEMBERS: usize = 82;
const NAMESPACE_BYTES: usize = 84;
const ZERO_1: usize = 86;
const NAMESPACE: usize = 88;
const NAMESPACE_MAX: usize = 255;
const ZERO_2: usize = NAMESPACE + NAMESPACE_MAX;
const CRC: usize = 504;
const ZERO_3: usize = 512;

/// Progress of a store's creation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreState {
    /// Being created; holds no block.
    Forming = 1,
    /// Complete.
    Whole = 2,
}

/// A decoded superblock. Every field was checked for plausibility.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Superblock {
    /// Format version of the store.
    pub version: u32,
    /// Progress of creation.
    pub state: StoreState,
    /// Random id, the same in all members of a store.
    pub uuid: [u8; 16],
    /// Rises with every write; of two valid copies, the one with the higher number is used.
    pub sequence: u64,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Bytes of a slot.
    pub slot_bytes: u64,
    /// Slots of this member.
    pub slots: u64,
    /// Slots of all members.
    pub slots_all: u64,
    /// [`fingerprint`] of the settings that determine where a slot is and what its bytes mean.
    pub fingerprint: u64,
    /// Index of this member.
    pub member: u16,
    /// Number of members.
    pub members: u16,
    /// Namespace of the keys.
    pub namespace: String,
}

/// Why a superblock is invalid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SuperblockError {
    /// All zero.
    Blank,
    /// Not written by kvhoist.
    Foreign,
    /// Written by kvhoist, but torn or corrupted.
    Damaged,
    /// Valid, but of a later version.
    Newer(u32),
    /// The crc is correct, but a field has an impossible value.
    Field(&'static str),
}

impl Superblock {
    /// True if records may contain use counts: programs of format version 1 reject such records as damaged.
    pub fn records_uses(&self) -> bool {
        self.version >= 2
    }

    /// The superblock of member `member` of a new store. The settings must be valid.
    pub fn new(config: &Config, uuid: [u8; 16], member: u16) -> Self {
        Superblock {
            version: VERSION,
            state: StoreState::Forming,
            uuid,
            sequence: 1,
            block_bytes: config.block_bytes as u64,
            slot_bytes: config.slot_bytes() as u64,
            slots: config.path_slots(&config.disk.paths[usize::from(member)]).into(),
            slots_all: config.disk_slots(),
            fingerprint: fingerprint(config),
            member,
            members: config.disk.paths.len() as u16,
            namespace: config.namespace.clone(),
        }
    }

    /// Encodes the superblock.
    ///
    /// # Panics
    /// If the namespace is longer than 255 bytes, which [`Config::validate`] refuses.
    pub fn encode(&self) -> [u8; PAGE_BYTES] {
        assert!(self.namespace.len() <= NAMESPACE_MAX, "Config::validate limits the namespace");
        let mut bytes = [0; PAGE_BYTES];
        put(&mut bytes, 0, &MAGIC);
        put(&mut bytes, VERSION_AT, &self.version.to_le_bytes());
        put(&mut bytes, STATE, &(self.state as u32).to_le_bytes());
        put(&mut bytes, UUID, &self.uuid);
        put(&mut bytes, SEQUENCE, &self.sequence.to_le_bytes());
        put(&mut bytes, BLOCK_BYTES, &self.block_bytes.to_le_bytes());
        put(&mut bytes, SLOT_BYTES, &self.slot_bytes.to_le_bytes());
        put(&mut bytes, SLOTS, &self.slots.to_le_bytes());
        put(&mut bytes, SLOTS_ALL, &self.slots_all.to_le_bytes());
        put(&mut bytes, FINGERPRINT, &self.fingerprint.to_le_bytes());
        put(&mut bytes, MEMBER, &self.member.to_le_bytes());
        put(&mut bytes, MEMBERS, &self.members.to_le_bytes());
        put(&mut bytes, NAMESPACE_BYTES, &(self.namespace.len() as u16).to_le_bytes());
        put(&mut bytes, NAMESPACE, self.namespace.as_bytes());
        let crc = checksum(&bytes[..CRC]);
        put(&mut bytes, CRC, &crc.to_le_bytes());
        bytes
    }

    /// Decodes one copy.
    pub fn decode(bytes: &[u8; PAGE_BYTES]) -> Result<Self, SuperblockError> {
        use SuperblockError::{Blank, Damaged, Field, Foreign, Newer};
        if is_zero(bytes) {
            return Err(Blank);
        }
        if bytes[..MAGIC.len()] != MAGIC {
            return Err(Foreign);
        }
        if checksum(&bytes[..CRC]) != get_u64(bytes, CRC) {
            return Err(Damaged);
        }
        let version = get_u32(bytes, VERSION_AT);
        match version {
            1..=VERSION => {}
            0 => return Err(Field("format version")),
            _ => return Err(Newer(version)),
        }
        // These zeros are not covered by the crc: any other value is corruption, not a field.
        if !is_zero(&bytes[ZERO_3..]) {
            return Err(Damaged);
        }
        let superblock = Superblock {
            version,
            state: match get_u32(bytes, STATE) {
                1 => StoreState::Forming,
                2 => StoreState::Whole,
                _ => return Err(Field("state")),
            },
            uuid: array(bytes, UUID),
            sequence: get_u64(bytes, SEQUENCE),
            block_bytes: get_u64(bytes, BLOCK_BYTES),
            slot_bytes: get_u64(bytes, SLOT_BYTES),
            slots: get_u64(bytes, SLOTS),
            slots_all: get_u64(bytes, SLOTS_ALL),
            fingerprint: get_u64(bytes, FINGERPRINT),
            member: get_u16(bytes, MEMBER),
            members: get_u16(bytes, MEMBERS),
            namespace: decode_namespace(bytes)?,
        };
        if !is_zero(&bytes[ZERO_1..NAMESPACE]) || !is_zero(&bytes[ZERO_2..CRC]) {
            return Err(Field("unused bytes"));
        }
        superblock.check().map_err(Field)?;
        Ok(superblock)
    }

    fn check(&self) -> Result<(), &'static str> {
        if self.sequence == 0 || self.sequence > SEQUENCE_MAX {
            return Err("sequence number");
        }
        if self.block_bytes == 0 || self.block_bytes > 1 << 30 {
            return Err("block_bytes");
        }
        if self.slot_bytes != self.block_bytes.next_multiple_of(PAGE_BYTES as u64) {
            return Err("slot_bytes");
        }
        if self.slots == 0 || self.slots > self.slots_all || self.slots_all > SLOTS_MAX {
            return Err("slots");
        }
        if self.member >= self.members || usize::from(self.members) > MEMBERS_MAX {
            return Err("member index");
        }
        Ok(())
    }
}

fn decode_namespace(bytes: &[u8; PAGE_BYTES]) -> Result<String, SuperblockError> {
    let len = usize::from(get_u16(bytes, NAMESPACE_BYTES));
    if len == 0 || len > NAMESPACE_MAX {
        return Err(SuperblockError::Field("namespace length"));
    }
    let (name, padding) = bytes[NAMESPACE..ZERO_2].split_at(len);
    match std::str::from_utf8(name) {
        Ok(name) if is_zero(padding) => Ok(name.to_owned()),
        _ => Err(SuperblockError::Field("namespace")),
    }
}

/// Hash of the settings that determine where a slot is and what its bytes mean: the slot mapping, the block size, the
/// sizes of all members in order, and the namespace. The device layout is not included: blocks have one canonical order
/// on disk.
pub fn fingerprint(config: &Config) -> u64 {
    let mut digest = Digest::new();
    digest.update(b"stripe 1");
    digest.update(&(config.block_bytes as u64).to_le_bytes());
    digest.update(&(config.disk.paths.len() as u64).to_le_bytes());
    for disk in &config.disk.paths {
        digest.update(&u64::from(config.path_slots(disk)).to_le_bytes());
    }
    digest.update(config.namespace.as_bytes());
    digest.finish()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::config::DiskPath;

    pub(in super::super) fn sample() -> Superblock {
        let disk = |blocks| DiskPath::with_blocks(format!("d{blocks}"), blocks);
        let config = Config::default().disks(vec![disk(10), disk(20)]).namespace("naïve");
        Superblock { state: StoreState::Whole, ..Superblock::new(&config, [0xAB; 16], 1) }
    }

    pub(in super::super) fn seal(bytes: &mut [u8; PAGE_BYTES]) {
        let crc = checksum(&bytes[..CRC]);
        put(bytes, CRC, &crc.to_le_bytes());
    }

    #[test]
    fn what_is_written_is_read_back() {
        let longest = Superblock { namespace: "n".repeat(255), ..sample() };
        for superblock in [
            sample(),
            longest,
            Superblock { version: 1, ..sample() },
            Superblock { state: StoreState::Forming, ..sample() },
        ] {
            assert_eq!(Superblock::decode(&superblock.encode()), Ok(superblock));
        }
    }

    #[test]
    fn the_bytes_are_where_the_diagram_says() {
        let bytes = sample().encode();
        assert_eq!(&bytes[..16], b"KVHOIST\0\x02\0\0\0\x02\0\0\0");
        assert_eq!((&bytes[16..32], bytes[32], bytes[56], bytes[64]), (&[0xAB; 16][..], 1, 20, 30));
        assert_eq!((bytes[80], bytes[82], bytes[84], &bytes[88..94]), (1, 2, 6, "naïve".as_bytes()));
        assert_eq!(get_u64(&bytes, 504), checksum(&bytes[..504]));
        assert!(is_zero(&bytes[512..]), "only one sector is in use");
    }

    #[test]
    fn every_single_bit_flip_is_detected() {
        let good = sample().encode();
        for bit in 0..PAGE_BYTES * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            let error = Superblock::decode(&bad).expect_err("a flipped bit");
            let expected = if bit < 64 { SuperblockError::Foreign } else { SuperblockError::Damaged };
            assert_eq!(error, expected, "bit {bit}");
        }
    }

    #[test]
    fn impossible_fields_under_a_good_crc_are_refused() {
        let cases: [(&str, usize, u8); 14] = [
            ("format version", VERSION_AT, 0),
            ("state", STATE, 3),
            ("sequence number", SEQUENCE + 7, 0xFF),
            ("sequence number", SEQUENCE, 0),
            ("block_bytes", BLOCK_BYTES + 7, 0xFF),
            ("slot_bytes", SLOT_BYTES, 1),
            ("slots", SLOTS, 0),
            ("slots", SLOTS, 31),
            ("slots", SLOTS_ALL + 6, 1),
            ("member index", MEMBER, 2),
            ("member index", MEMBERS + 1, 1),
            ("namespace length", NAMESPACE_BYTES + 1, 1),
            ("namespace", NAMESPACE, 0xFF),
            ("unused bytes", ZERO_1, 1),
        ];
        for (what, at, value) in cases {
            let mut bytes = sample().encode();
            bytes[at] = value;
            seal(&mut bytes);
            assert_eq!(Superblock::decode(&bytes), Err(SuperblockError::Field(what)), "byte {at}");
        }
    }

    #[test]
    fn a_newer_version_is_not_taken_for_damage() {
        let mut newer = sample().encode();
        newer[VERSION_AT] = 3;
        assert_eq!(Superblock::decode(&newer), Err(SuperblockError::Damaged));
        seal(&mut newer);
        newer[3000] = 1;
        assert_eq!(Superblock::decode(&newer), Err(SuperblockError::Newer(3)));
    }
}
