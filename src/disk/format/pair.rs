//! The two copies of a superblock in a member's first 8 KiB, and what they mean together.

use super::{
    HEAD_BYTES, PAGE_BYTES, is_zero,
    superblock::{MAGIC, StoreState, Superblock, SuperblockError},
};

/// The meaning of a member's first 8 KiB.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SuperblockPair {
    /// All zero.
    Blank,
    /// An interrupted first write of a creation. A store with a damaged copy A and a zeroed copy B looks the same, but
    /// has records.
    Torn,
    /// One of the copies is valid.
    Valid {
        /// The copy with the higher sequence number.
        superblock: Superblock,
        /// Which copy that is: 0 for A, 1 for B.
        copy: usize,
        /// The other copy is whole too, and an equal or older copy of this superblock: not another member's.
        other_is_whole: bool,
    },
    /// Both copies are invalid; the more informative error.
    Bad(SuperblockError),
}

/// What stands in the place of a copy that cannot be read: damaged, as it is neither zero nor without the magic.
pub const UNREADABLE_COPY: [u8; PAGE_BYTES] = {
    let mut bytes = [0; PAGE_BYTES];
    bytes.split_at_mut(MAGIC.len()).0.copy_from_slice(&MAGIC);
    bytes
};

impl SuperblockPair {
    /// Decodes both copies. Never panics, whatever the bytes.
    pub fn decode(bytes: &[u8; HEAD_BYTES]) -> Self {
        let a_bytes: &[u8; PAGE_BYTES] = bytes.first_chunk().expect("a head has two pages");
        let b_bytes: &[u8; PAGE_BYTES] = bytes.last_chunk().expect("a head has two pages");
        match (Superblock::decode(a_bytes), Superblock::decode(b_bytes)) {
            // A newer program has written to this member, even if only one copy.
            (Err(error @ SuperblockError::Newer(_)), _) | (_, Err(error @ SuperblockError::Newer(_))) => {
                SuperblockPair::Bad(error)
            }
            (Ok(a), Ok(b)) if b.sequence > a.sequence => Self::valid(b, 1, Some(&a)),
            (Ok(a), b) => Self::valid(a, 0, b.as_ref().ok()),
            (Err(_), Ok(b)) => Self::valid(b, 1, None),
            (Err(SuperblockError::Blank), Err(SuperblockError::Blank)) => SuperblockPair::Blank,
            (Err(_), Err(SuperblockError::Blank)) if begins_like_a_store(a_bytes) => SuperblockPair::Torn,
            (Err(error @ SuperblockError::Field(_)), Err(_)) | (Err(_), Err(error @ SuperblockError::Field(_))) => {
                SuperblockPair::Bad(error)
            }
            (Err(SuperblockError::Damaged), Err(_)) | (Err(_), Err(SuperblockError::Damaged)) => {
                SuperblockPair::Bad(SuperblockError::Damaged)
            }
            (Err(_), Err(_)) => SuperblockPair::Bad(SuperblockError::Foreign),
        }
    }

    fn valid(superblock: Superblock, copy: usize, other: Option<&Superblock>) -> Self {
        let (state, sequence) = (superblock.state, superblock.sequence);
        let other_is_whole = other.is_some_and(|other| {
            other.state == StoreState::Whole && Superblock { state, sequence, ..other.clone() } == superblock
        });
        SuperblockPair::Valid { superblock, copy, other_is_whole }
    }
}

/// The copy that another program has written over: a partition table or a swap header lies over A, metadata of an md
/// array over B. The other copy may be all that is left of a store.
pub(super) fn foreign_copy(bytes: &[u8; HEAD_BYTES]) -> Option<usize> {
    let (pages, _) = bytes.as_chunks::<PAGE_BYTES>();
    let is_foreign = |page| Superblock::decode(page) == Err(SuperblockError::Foreign) && !begins_like_a_store(page);
    pages.iter().position(is_foreign)
}

/// Whether a copy looks like a torn first write: a bad crc, or part of the magic followed by zeros. After a creation
/// got further than that write of copy A, copy B is blank only if it was damaged.
fn begins_like_a_store(bytes: &[u8; PAGE_BYTES]) -> bool {
    let matching = bytes.iter().zip(MAGIC).take_while(|(byte, magic)| **byte == *magic).count();
    match Superblock::decode(bytes) {
        Err(SuperblockError::Damaged) => true,
        _ => matching > 0 && is_zero(&bytes[matching..]),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{
        super::{
            put,
            superblock::tests::{sample, seal},
        },
        *,
    };

    /// The first byte after the sector that is in use.
    const UNUSED: usize = 512;

    fn head(a: &[u8; PAGE_BYTES], b: &[u8; PAGE_BYTES]) -> SuperblockPair {
        let mut bytes = [0; HEAD_BYTES];
        put(&mut bytes, 0, a);
        put(&mut bytes, PAGE_BYTES, b);
        SuperblockPair::decode(&bytes)
    }

    #[test]
    fn a_newer_version_in_one_copy_is_not_taken_for_damage() {
        let mut newer = sample().encode();
        newer[8] = 3;
        seal(&mut newer);
        assert_eq!(head(&sample().encode(), &newer), SuperblockPair::Bad(SuperblockError::Newer(3)));
    }

    #[test]
    fn an_unreadable_copy_is_a_damaged_one() {
        let sound = sample();
        let expected = |copy| SuperblockPair::Valid { superblock: sound.clone(), copy, other_is_whole: false };
        assert_eq!(Superblock::decode(&UNREADABLE_COPY), Err(SuperblockError::Damaged));
        assert_eq!(head(&UNREADABLE_COPY, &sound.encode()), expected(1));
        assert_eq!(head(&sound.encode(), &UNREADABLE_COPY), expected(0));
    }

    #[test]
    fn a_torn_copy_leaves_the_other() {
        let old = sample();
        let new = Superblock { sequence: 2, ..sample() };
        for torn_bytes in 0..PAGE_BYTES {
            let mut torn = old.encode();
            let new_bytes = Superblock { sequence: 3, uuid: [1; 16], ..sample() }.encode();
            torn[..torn_bytes].copy_from_slice(&new_bytes[..torn_bytes]);
            if torn == old.encode() || torn == new_bytes {
                continue;
            }
            let expected = |copy| SuperblockPair::Valid { superblock: new.clone(), copy, other_is_whole: false };
            assert_eq!(head(&torn, &new.encode()), expected(1), "A torn after {torn_bytes}");
            assert_eq!(head(&new.encode(), &torn), expected(0), "B torn after {torn_bytes}");
        }
    }

    #[test]
    fn the_copy_with_the_higher_sequence_number_is_used() {
        let (old, new) = (sample(), Superblock { sequence: 2, ..sample() });
        let expected = |copy| SuperblockPair::Valid { superblock: new.clone(), copy, other_is_whole: true };
        assert_eq!(head(&old.encode(), &new.encode()), expected(1));
        assert_eq!(head(&new.encode(), &old.encode()), expected(0));
    }

    #[test]
    fn the_copy_of_another_member_does_not_count_as_this_ones() {
        let (new, other) = (Superblock { sequence: 2, ..sample() }, Superblock { member: 0, ..sample() });
        let expected = |copy| SuperblockPair::Valid { superblock: new.clone(), copy, other_is_whole: false };
        assert_eq!(head(&other.encode(), &new.encode()), expected(1));
        assert_eq!(head(&new.encode(), &other.encode()), expected(0));
    }

    #[test]
    fn what_was_damaged_behind_the_magic_or_torn_is_no_other_programs() {
        let foreign = |a: &[u8]| {
            let mut bytes = [0; HEAD_BYTES];
            put(&mut bytes, 0, a);
            put(&mut bytes, PAGE_BYTES, &sample().encode());
            foreign_copy(&bytes)
        };
        let sound = sample().encode();
        for flipped in 0..PAGE_BYTES {
            let mut damaged = sound;
            damaged[flipped] ^= 1;
            assert_eq!(foreign(&damaged), (flipped < MAGIC.len()).then_some(0), "byte {flipped}");
            assert_eq!(foreign(&sound[..flipped]), None, "torn after {flipped}");
        }
        assert_eq!(foreign(&UNREADABLE_COPY), None);
    }

    #[test]
    fn a_creation_torn_anywhere_is_blank_torn_or_forming() {
        let forming = Superblock { state: StoreState::Forming, ..sample() };
        let blank = [0; PAGE_BYTES];
        for torn_bytes in 0..=PAGE_BYTES {
            let mut a = blank;
            a[..torn_bytes].copy_from_slice(&forming.encode()[..torn_bytes]);
            match head(&a, &blank) {
                SuperblockPair::Blank => assert_eq!(torn_bytes, 0),
                SuperblockPair::Torn => assert!(torn_bytes < UNUSED),
                SuperblockPair::Valid { superblock, .. } => {
                    assert_eq!((superblock, a), (forming.clone(), forming.encode()));
                }
                other => panic!("{torn_bytes} bytes: {other:?}"),
            }
        }
    }

    proptest! {
        #[test]
        fn random_bytes_are_refused_and_never_panic(
            bytes in prop::collection::vec(any::<u8>(), PAGE_BYTES),
            at in 8usize..504,
        ) {
            let mut page: [u8; PAGE_BYTES] = bytes.try_into().expect("a page");
            prop_assert!(Superblock::decode(&page).is_err());
            // Passes the first checks: a valid beginning, a correct crc, and random bytes in between.
            let sound = sample().encode();
            put(&mut page, 0, &sound[..at]);
            page[UNUSED..].fill(0);
            seal(&mut page);
            let _ = head(&page, &sound);
            let _ = head(&sound, &page);
        }
    }
}
