//! In how many requests a block was used: what counts, and what a store keeps of it.

use crate::common;

use std::{fs, path::Path};

use common::key;
use kvhoist::{
    Cache, Config, DeviceKind, DirectIo, DiskPath, Eviction, block_on,
    internals::{
        checksum::checksum,
        disk::format::{
            PAGE_BYTES, RECORD_BYTES, TABLE_OFFSET,
            record::{Record, RecordSeal},
            superblock::{Superblock, VERSION},
        },
    },
};

const BLOCK_BYTES: usize = 4096;

fn config(dir: &Path, eviction_policy: Eviction) -> Config {
    Config::default()
        .block_bytes(BLOCK_BYTES)
        .host_blocks(2)
        .device_blocks(2)
        .device(DeviceKind::Simulated)
        .disks(vec![DiskPath::with_blocks(dir, 32)])
        .eviction_policy(eviction_policy)
        .direct_io(DirectIo::Prefer)
}

fn open(dir: &Path) -> Cache {
    block_on(Cache::open(config(dir, Eviction::Rb))).expect("open")
}

fn store(cache: &Cache, n: u64) {
    block_on(cache.store(&key(n), None, &[n as u8; BLOCK_BYTES])).expect("stored");
}

fn fetch(cache: &Cache, n: u64) {
    assert_eq!(block_on(cache.fetch(&key(n))).expect("fetch").expect("a hit")[0], n as u8);
}

fn superblock(bytes: &[u8]) -> Superblock {
    Superblock::decode(bytes.first_chunk().expect("a page")).expect("sound")
}

/// The record of block `n` in the closed store.
fn record(dir: &Path, n: u64) -> Record {
    let bytes = fs::read(dir.join("kvhoist.store")).expect("the store");
    let seal = RecordSeal::new(&superblock(&bytes).uuid, 0);
    let (records, _) = bytes[TABLE_OFFSET as usize..][..PAGE_BYTES].as_chunks::<RECORD_BYTES>();
    let found = (0..)
        .zip(records)
        .filter_map(|(local, bytes)| seal.decode(local, BLOCK_BYTES as u32, bytes).expect("a sound record"));
    found.into_iter().find(|record| record.key == key(n)).expect("it is on disk")
}

#[test]
fn uses_are_counted_once_a_request_and_survive_a_restart() {
    let dir = tempfile::tempdir().expect("a directory");
    let cache = open(dir.path());
    (0..4).for_each(|n| store(&cache, n));
    block_on(cache.close()).expect("closed");
    assert_eq!([0, 1, 2, 3].map(|n| record(dir.path(), n).uses), [1; 4]);

    let cache = open(dir.path());
    cache.match_len(&[key(1)]);
    cache.prefetch(&[key(1)]).expect("prefetch");
    // Another request begins before the prefetched block is fetched.
    cache.match_len(&[key(9)]);
    fetch(&cache, 1);
    drop(block_on(cache.fetch_to_device(&key(2))).expect("fetch").expect("a hit"));
    for _ in 0..5 {
        cache.match_len(&[key(3)]);
        fetch(&cache, 3);
        fetch(&cache, 3);
    }
    block_on(cache.close()).expect("closed");
    let uses = [0, 1, 2, 3].map(|n| record(dir.path(), n).uses);
    assert_eq!(uses, [1, 2, 2, 3], "unused; prefetched and fetched; by way of host memory; five requests");

    let cache = open(dir.path());
    fetch(&cache, 1);
    block_on(cache.close()).expect("closed");
    assert_eq!([0, 1].map(|n| record(dir.path(), n).uses), [1, 3], "counted on from the last run");
}

#[test]
fn to_ask_whether_a_block_is_there_begins_no_request() {
    let dir = tempfile::tempdir().expect("a directory");
    let cache = open(dir.path());
    (0..2).for_each(|n| store(&cache, n));
    cache.match_len(&[key(0), key(1)]);
    fetch(&cache, 0);
    assert!(cache.contains(&key(1)) && !cache.contains(&key(9)));
    assert_eq!(cache.keys().count(), 2);
    fetch(&cache, 0);
    block_on(cache.close()).expect("closed");
    let uses = [0, 1].map(|n| record(dir.path(), n).uses);
    assert_eq!(uses, [2, 1], "stored, and fetched in one request; stored, and asked for");
}

/// A store as format version 1 left it opens, keeps its version, and so stays readable for programs that know no other.
#[test]
fn a_store_of_version_1_opens_and_stays_one() {
    let dir = tempfile::tempdir().expect("a directory");
    let cache = block_on(Cache::open(config(dir.path(), Eviction::Rb))).expect("open");
    (0..4).for_each(|n| store(&cache, n));
    block_on(cache.close()).expect("closed");
    let path = dir.path().join("kvhoist.store");
    let mut bytes = fs::read(&path).expect("the store");
    assert_eq!(superblock(&bytes).version, VERSION, "what a new store is");
    let seal = RecordSeal::new(&superblock(&bytes).uuid, 0);
    for copy in [0, PAGE_BYTES] {
        bytes[copy + 8] = 1;
        let crc = checksum(&bytes[copy..copy + 504]);
        bytes[copy + 504..copy + 512].copy_from_slice(&crc.to_le_bytes());
    }
    let (records, _) = bytes[TABLE_OFFSET as usize..][..PAGE_BYTES].as_chunks_mut::<RECORD_BYTES>();
    for (local, bytes) in (0..).zip(records) {
        if let Some(record) = seal.decode(local, BLOCK_BYTES as u32, bytes).expect("a sound record") {
            *bytes = seal.encode(local, &Record { uses: 0, ..record });
        }
    }
    fs::write(&path, &bytes).expect("written");

    let cache = open(dir.path());
    fetch(&cache, 1);
    store(&cache, 7);
    block_on(cache.close()).expect("closed");
    assert_eq!(superblock(&fs::read(&path).expect("the store")).version, 1);
    assert_eq!([0, 1, 2, 3, 7].map(|n| record(dir.path(), n).uses), [0; 5], "no bits that version 1 does not know");
    let cache = open(dir.path());
    [0, 1, 2, 3, 7].into_iter().for_each(|n| fetch(&cache, n));
    block_on(cache.close()).expect("closed");
}
