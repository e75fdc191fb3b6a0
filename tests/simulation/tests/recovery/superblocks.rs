//! Superblocks that are repaired, and stores that are refused.

use super::*;

#[test]
fn a_damaged_superblock_is_repaired_from_the_other() {
    let config = config(&[4]);
    for at in [20, PAGE_BYTES + 20] {
        let mut files = created(&config);
        files[0][at] ^= 1;
        let storage = Memory::new(files);
        block_on(open(&storage, &members(&config, true), &config, UUID)).expect("one copy is sound");
        let files = storage.into_files();
        let head = SuperblockPair::decode(files[0].first_chunk().expect("a head"));
        assert!(matches!(head, SuperblockPair::Valid { other_is_whole: true, .. }), "{head:?}");
    }
}

#[test]
fn a_superblock_at_the_end_of_its_numbers_is_repaired_too() {
    let config = config(&[4]);
    let mut files = created(&config);
    let last = Superblock { sequence: SEQUENCE_MAX, ..superblock(&files[0]).expect("sound") };
    files[0][..PAGE_BYTES].copy_from_slice(&last.encode());
    files[0][PAGE_BYTES + 20] ^= 1;
    let storage = Memory::new(files);
    for _ in 0..2 {
        block_on(open(&storage, &members(&config, true), &config, UUID)).expect("one copy is sound");
        let head = SuperblockPair::decode(storage.files()[0].first_chunk().expect("a head"));
        assert_eq!(head, SuperblockPair::Valid { superblock: last.clone(), copy: 0, other_is_whole: true });
    }
}

#[test]
fn a_refused_store_is_not_written_to() {
    let config = config(&[4, 4]);
    let mut files = created(&config);
    files[0][20] ^= 1; // would be repaired
    files.swap(0, 1);
    let storage = Memory::new(files.clone());
    block_on(open(&storage, &members(&config, true), &config, UUID)).expect_err("members in the wrong order");
    assert_eq!(files, storage.files());
}

/// The first look may have found the copy unreadable, and gone by the other.
#[test]
fn another_programs_data_over_a_superblock_of_a_device_is_refused_before_a_repair() {
    let config = config(&[4]);
    let mut devices = members(&config, false);
    devices[0].device = true;
    for at in [0, PAGE_BYTES] {
        let mut files = created(&config);
        files[0][at..][..PAGE_BYTES].fill(b'x');
        let storage = Memory::new(files.clone());
        let refused = block_on(open(&storage, &devices, &config, UUID)).expect_err("it may be needed");
        assert!(refused.to_string().contains("data that kvhoist did not write"), "{refused}");
        assert_eq!(files, storage.files());
    }
}
